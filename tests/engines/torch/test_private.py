"""A private name of torch is in one file, beside what uses it, and that file looks for it."""

import ast
from pathlib import Path

import layoutmap

PROCESSES = ("core",)

SOURCE = Path(layoutmap.__file__).parent
OWN = ("self", "cls")
NOT_OF_TORCH = {
    "_call_outside_graph",
    "_compiled_by_caller",
    "_call_without_dynamo",
    "_replace",
    "_getframe",
    "_current_frames",
    "_module",
    "_original",
    "_gradient_hooks",
    "_process_checks",
}  # of tuples, of sys, of our own classes
NOT_OF_TORCH |= {"_to_copy"}  # an operation of torch's dispatcher, as others print its name
NOT_OF_TORCH |= {"_C"}  # a module: its names are


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names(tree):
    """The names that begin with one underscore and are imported from torch, or read from something else than self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            inside = any(map(is_private, node.module.split(".")))
            for alias in node.names:
                if inside or is_private(alias.name):
                    yield f"{node.module}.{alias.name}" if inside else alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.") and any(map(is_private, alias.name.split("."))):
                    yield alias.name
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) not in OWN:
            yield from filter(is_private, [node.attr])


def tree_of(path):
    return ast.parse(path.read_text())


def private_names_by_file():
    files = [path for room in ("engines", "adapters") for path in (SOURCE / room / "torch").rglob("*.py")]
    found = {path: set(private_names(tree_of(path))) - NOT_OF_TORCH for path in files}
    return {path: names for path, names in found.items() if names}


def test_each_private_name_of_torch_is_in_one_file():
    """No two files of what knows torch import or read the same one."""
    files = {}
    for path, names in private_names_by_file().items():
        for name in names:
            files.setdefault(name, []).append(path.relative_to(SOURCE).as_posix())

    assert {"_local_tensor", "_rank_map", "_is_view"} <= files.keys()
    assert {} == {name: paths for name, paths in files.items() if len(paths) > 1}


def looked_for_in(tree):
    """The private names that a file imports, reads when it is imported, or has in a string."""
    for node in tree.body:
        if isinstance(node, (ast.With, ast.Expr, ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)):
            yield from private_names(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.split()


def test_each_private_name_of_torch_is_looked_for():
    """A release of torch that lacks one of the names is refused: the file has each in a list, or imports it."""
    found = {
        path.name: names - set(looked_for_in(tree_of(path)))
        for path, names in private_names_by_file().items()
    }

    assert {} == {name: names for name, names in found.items() if names}


def test_imports_of_private_names_are_in_a_block_that_says_what_is_missing():
    """No file imports a private name of torch outside of `with Needed("torch")`."""
    outside = {
        path.name: set(private_names(ast.Module(imports, [])))
        for path in private_names_by_file()
        if (
            imports := [each for each in tree_of(path).body if isinstance(each, (ast.Import, ast.ImportFrom))]
        )
    }

    assert {} == {name: names for name, names in outside.items() if names}
