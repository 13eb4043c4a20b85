"""Private names of torch are in one file."""

import ast
from pathlib import Path

import layoutmap

PROCESSES = ("core",)

SOURCE = Path(layoutmap.__file__).parent
PRIVATE = "engines/torch/private.py"
OWN = ("self", "cls")
NOT_OF_TORCH = {
    "_alone",
    "_as_called",
    "_compiled_or_called",
    "_replace",
    "_getframe",
    "_current_frames",
    "_module",
    "_before",
    "_watch",
    "_compared",
}  # of tuples, of sys, of our own classes
NOT_OF_TORCH |= {"_to_copy"}  # an operation of torch's dispatcher, as others print its name


def private_names(tree):
    """The names that begin with one underscore and are imported from torch, or read from something else than self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [
                name
                for alias in node.names
                for name in alias.name.split(".")
                if alias.name.startswith("torch.")
            ]
        elif isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in OWN
        ):
            names = [node.attr]
        else:
            continue
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def found_in(path):
    return set(private_names(ast.parse(path.read_text()))) - NOT_OF_TORCH


def test_private_names_of_torch_are_in_one_file():
    """No other file of what knows torch imports or reads a private name of it."""
    files = [path for room in ("engines", "adapters") for path in (SOURCE / room / "torch").rglob("*.py")]
    found = {path.relative_to(SOURCE).as_posix(): found_in(path) for path in files}

    assert {"_local_tensor", "_rank_map", "_is_view"} <= found.pop(PRIVATE)
    assert {} == {path: names for path, names in found.items() if names}


def looked_for_in(tree):
    """The private names that a file imports or looks for when it is imported, or has in a string."""
    for node in tree.body:
        if isinstance(node, (ast.Try, ast.AnnAssign, ast.Import, ast.ImportFrom)):
            yield from private_names(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.split()


def test_each_private_name_of_torch_is_looked_for():
    """A release of torch that lacks one of the names is refused: the file has each in a list, or imports it."""
    path = SOURCE / PRIVATE

    assert set() == found_in(path) - set(looked_for_in(ast.parse(path.read_text())))
