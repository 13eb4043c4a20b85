"""The hooks into Keras: which there are, that they go without a trace, and that each name they need is probed."""

import ast
import contextlib
import gc
import importlib.util
import inspect
import sys
import types
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm
from layoutmap.adapters.keras import private
from layoutmap.adapters.keras.protocol import get_backend, get_keras_backend_name
from layoutmap.engines.tested import warn_if_untested

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [
    pytest.mark.every_case,
    pytest.mark.every_backend,
    OF_MAPS,
    OF_ARRAYS,
]
X = np.ones((8, 8), "float32")


def make_model():
    model = keras.Sequential([keras.Input((8,)), L.Dense(8, name="d1"), L.Dropout(0.1, seed=1)])
    model.compile("adam", "mse")
    return model


def make_map():
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {r"d1\.kernel": (None, "model")})


def use(model, path):
    """What Keras does on its first uses, and what could leave something behind."""
    model.fit(X, X, verbose=0)
    model.predict(X, verbose=0)
    model.save(path)
    model.load_weights(path)
    return keras.models.load_model(path)


PYTHONS_OWN = {"__slotnames__", "__warningregistry__", "__annotations_cache__"}


def keras_now():
    """Every attribute of every module of Keras, and of every class in them."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or not f"{module_name}.".startswith("keras."):
            continue
        things = {module_name: module}
        things |= {
            f"{module_name}.{name}": value
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module_name
        }
        for owner_name, owner in things.items():
            for name, value in list(vars(owner).items()):
                if name not in PYTHONS_OWN:
                    found[f"{owner_name}.{name}"] = value
    return found


def changed(before):
    """The names of all that has changed in modules that were there before."""
    now = keras_now()
    new = {name for name in now.keys() - before.keys() if not isinstance(now[name], types.ModuleType)}
    loaded = {name.rpartition(".")[0] for name in before}
    new = {name for name in new if name.rpartition(".")[0] in loaded}
    return new | {name for name in before if name not in now or now[name] is not before[name]}


def test_a_scope_changes_what_is_listed_and_leaves_no_trace(tmp_path):
    """Inside a scope exactly the listed hooks are there; after it, whatever happened, every module is as before."""
    path = str(tmp_path / "m.keras")
    use(make_model(), path)  # what Keras loads and keeps on its first use
    before = keras_now()
    with make_map().scope(batch_dim="batch"):
        inside = changed(before)
        model = make_model()
    after_scope = changed(before)
    with contextlib.suppress(ZeroDivisionError), make_map().scope():
        make_model()
        raise ZeroDivisionError
    after_exception = changed(before)
    with pytest.warns(lm.LayoutMapWarning, match="is loaded outside of a scope"):
        use(model, path)
    after_saving = changed(before)
    with make_map().scope(), make_map().scope():
        use(make_model(), path)
    del model
    gc.collect()

    hooked = {
        "keras.src.backend.common.variables.Variable.__init__",
        "keras.src.layers.layer.Layer.__new__",
        "keras.src.layers.layer.Layer._maybe_build",
        "keras.src.optimizers.base_optimizer.BaseOptimizer.__init__",
        "keras.src.random.seed_generator.SeedGenerator.next",
        "keras.src.saving.saving_lib.get_attr_skipset",
        *(
            f"{owner.__module__}.{owner.__qualname__}.{name}"
            for owner, name in get_backend(get_keras_backend_name()).methods_disabled_in_scope
        ),
    }
    assert 1000 < len(before)
    assert hooked == inside
    assert {"keras.src.saving.saving_lib.H5IOStore.get"} == after_saving
    assert set() == after_scope == after_exception == changed(before)


def probed():
    return [*private.NAMES, *get_backend(get_keras_backend_name()).list_required_private_names()]


def name_of(value):
    return value if isinstance(value, str) else getattr(value, "__name__", "")


def refusal():
    """What a scope says when it is opened."""
    with pytest.raises(lm.ScopeError) as caught, make_map().scope():
        pass
    return str(caught.value)


def missing_in(said):
    line = next(line for line in said.splitlines() if line.startswith("  missing  "))
    return line.removeprefix("  missing  ").split(", ")


@pytest.mark.parametrize(("owner", "name"), [(o, n) for o, names in probed() for n in names], ids=name_of)
def test_each_name_that_is_gone_is_refused(owner, name, monkeypatch):
    """A Keras in which one name of the list has moved is refused by that name, with the version that has it."""
    for each in getattr(owner, "__mro__", (owner,)):
        if name in vars(each) and each is not object:
            monkeypatch.delattr(each, name)
    said = refusal()
    monkeypatch.undo()

    assert said.startswith(f"keras {keras.__version__} is not supported\n")
    assert f"{owner.__name__}.{name}" in missing_in(said)
    assert 'pip install "keras==3.15.*"' in said
    with make_map().scope():
        pass


def with_code(method, code):
    plain = inspect.unwrap(method)
    return types.FunctionType(code, plain.__globals__, plain.__name__, closure=plain.__closure__)


@pytest.mark.parametrize(
    ("owner", "name"), [(o, n) for o, names in private.ATTRIBUTES for n in names], ids=name_of
)
def test_each_attribute_that_is_gone_is_refused(owner, name, monkeypatch):
    """So is a Keras whose objects have an attribute under another name."""
    for each in owner.__mro__:
        for method_name, method in list(vars(each).items()):
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if each is not object and code is not None and name in code.co_names:
                renamed = tuple("moved" if n == name else n for n in code.co_names)
                monkeypatch.setattr(each, method_name, with_code(method, code.replace(co_names=renamed)))
    said = refusal()
    monkeypatch.undo()

    assert f"{owner.__name__}.{name}" in missing_in(said)


def imported():
    """The modules and names that `private` imports from Keras's own."""
    tree = ast.parse(Path(private.__file__).read_text(encoding="utf-8"))
    return [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras.src")
        for alias in node.names
    ]


@pytest.mark.parametrize(("module", "name"), imported())
def test_each_import_that_is_gone_is_refused(module, name, monkeypatch):
    """A name that is imported and is gone is refused when the adapter is loaded."""
    monkeypatch.delattr(sys.modules[module], name)
    monkeypatch.delitem(sys.modules, f"{module}.{name}", raising=False)
    spec = importlib.util.spec_from_file_location("private_again", private.__file__)
    with (
        pytest.raises(ValueError, match=f"(?s)is not supported.*cannot import name '{name}'.*keras=="),
        without_file(f"{module}.{name}"),
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@contextlib.contextmanager
def without_file(module):
    """While open, a submodule cannot be loaded either."""

    class Gone:
        def find_spec(self, fullname, path=None, target=None):
            if fullname == module:
                raise ModuleNotFoundError(f"cannot import name '{module.rpartition('.')[2]}'", name=fullname)

    sys.meta_path.insert(0, finder := Gone())
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def test_the_list_says_all_that_is_probed():
    """Every name that is probed or imported is in the list at the top of `private`, or of a file of the backend."""
    folder = Path(sys.modules[type(get_backend(get_keras_backend_name())).__module__].__file__).parent
    lists = [
        private.__doc__,
        *(ast.get_docstring(ast.parse(p.read_text("utf-8"))) for p in folder.glob("*.py")),
    ]
    probed_names = [n for _, names in (*probed(), *private.ATTRIBUTES) for n in names if n.startswith("_")]
    named = [*probed_names, *(name for _, name in imported())]

    # Python's own
    assert {"__getitem__"} == {name for name in named if not any(name in text for text in lists)}


def test_a_newer_keras_warns_once(monkeypatch):
    """Of two scopes in one that was not tested and has each name, the first warns."""
    monkeypatch.setattr(keras, "__version__", "99.0.0")
    warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with make_map().scope():
                pass
    warn_if_untested.cache_clear()
    said = [(str(each.message).splitlines()[0], each.filename) for each in caught]
    # Of tf_keras, which another test may import
    said = [each for each in said if "saw no layer" not in each[0]]

    assert [("keras 99.0.0 is not a release that layoutmap was tested with", __file__)] == said
