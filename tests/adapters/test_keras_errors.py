"""What goes wrong with Keras models: the whole message, and that nothing is left behind."""

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading

import forked
import keras
import numpy as np
import pytest
from keras_models import ON_TORCH, compiled_function, hooked, num_arrays, symbolic_function
from quiet import OF_ARRAYS

import layoutmap as lm
from layoutmap.adapters.keras.paths import find_variables
from layoutmap.adapters.keras.pending import is_pending
from layoutmap.scope.progress import Progress

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = OF_ARRAYS
MESH = "batch=2,model=4"
FRAMEWORK = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "torch"}[keras.backend.backend()]


def make_model(units=8):
    return keras.Sequential([keras.Input((8,)), L.Dense(units, name="d1"), L.Dense(8, name="d2")])


def make_map(rules, mesh=MESH):
    return lm.LayoutMap(lm.create_mesh(mesh), rules)


@contextlib.contextmanager
def nothing_is_left():
    """No array is made and no class of Keras is changed."""
    keras.utils.clear_session()
    gc.collect()
    classes, arrays = hooked(), num_arrays()
    yield
    gc.collect()

    assert classes == hooked()
    assert arrays == num_arrays()


def text(message):
    return textwrap.dedent(message).strip()


def raised(error, action):
    """What an action says when it raises an error; nothing else is left of it."""
    with nothing_is_left():
        with pytest.raises(error) as caught:
            action()
        said = str(caught.value)
        caught.value.__traceback__ = caught.value.__context__ = None
        del caught
    return said


def test_a_typo_in_a_rule_warns_with_what_it_is_near_to():
    """A rule that matches nothing is a warning at the user's line, and an error if `strict`."""
    rules = {r"d1\.kernal": (None, "model"), r"d\d\.kernel": ("model", None), r".*bias": (None,)}
    with pytest.warns(lm.LayoutMapWarning) as caught:
        make_map(rules).build(make_model)

    assert [__file__] == [w.filename for w in caught]
    assert str(caught[0].message) == text(r"""
        layout map: the plan has warnings; print(lm.plan(make_model, layout_map)) shows where every variable goes
          rule 1  d1\.kernal: matches no variable
        """)
    said = raised(lm.PlanError, lambda: make_map(rules).build(make_model, strict=True))
    assert said.startswith("rule 1  d1\\.kernal: matches no variable\n")


def test_the_warning_names_the_line_that_made_the_weights():
    """Where a first call makes the weights, deep inside Keras, the warning is at that call, and is given once."""
    with make_map({"nothing": (None,)}).scope():
        model = keras.Sequential([L.Dense(8, name="d1")])
    with pytest.warns(lm.LayoutMapWarning) as caught:
        model(np.ones((1, 8), "float32"))
    model(np.ones((2, 8), "float32"))

    assert [__file__] == [w.filename for w in caught]


def test_more_devices_than_there_are():
    """A mesh that the machine does not have is refused when the scope opens, not when arrays are made."""
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=16"), {"d1.kernel": (None, "model")})
    called = []
    said = raised(lm.MeshError, lambda: layout_map.build(lambda: called.append(1)))

    assert said.startswith(f"the mesh needs 16 devices, but {FRAMEWORK} has 8\n")
    assert [] == called
    assert 16 == lm.plan(lambda: make_model(16), layout_map).mesh.size


@pytest.mark.every_backend
def test_a_scope_inside_a_compiled_function():
    """Refused by name: inside a trace there are no devices."""
    layout_map = make_map({r".*kernel": (None, "model")})

    def traced():
        with layout_map.scope():
            make_model()

    function = symbolic_function if ON_TORCH else compiled_function
    assert raised(lm.ScopeError, lambda: function(traced)()) == text("""
        a scope was opened inside a compiled function
          why   a trace has no real arrays on real devices, which variables need
          fix   build the model outside of the compiled function, and call it inside
        """)


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_a_model_that_outlives_an_exception_is_laid_out_when_it_is_read():
    """A model whose scope was left by an exception still gets its values in its layouts."""
    layout_map = make_map({r".*kernel": (None, "model")})
    with contextlib.suppress(ZeroDivisionError), layout_map.scope():
        model = make_model()
        raise ZeroDivisionError
    model(np.ones((1, 8), "float32"))

    assert layout_map["d1.kernel"] == model.layers[0].kernel.layout == model.layers[1].kernel.layout


def test_a_model_whose_plan_failed_is_never_made_in_other_layouts():
    """Every later read of it raises the same problems again, also when the map is changed: its scope has a copy."""
    layout_map = make_map({r"d1\.(kernel|bias)": (None, "model"), r"d2\.": (None, None), r"d2.bias": (None,)})
    model = None
    with pytest.raises(lm.PlanError) as first, layout_map.scope():
        model = make_model()
    with pytest.raises(lm.PlanError) as second:
        model.layers[1].kernel.numpy()
    with pytest.raises(lm.PlanError):
        model.layers[1].kernel.assign(np.ones((8, 8)))

    assert str(first.value) == str(second.value)
    assert all(is_pending(v) for v in model.variables)
    layout_map.clear()
    layout_map[r".*kernel"] = (None, "model")
    layout_map[r".*bias"] = ("model",)
    with pytest.raises(lm.PlanError) as third:
        model.layers[0].bias.numpy()
    assert str(first.value) == str(third.value)


@pytest.mark.every_backend
@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_an_interrupt_while_values_are_made(monkeypatch):
    """Control-C in the middle of it leaves no half-made model: the same values come at the next read."""
    layout_map = make_map({r".*kernel": (None, "model")})
    keras.utils.set_random_seed(3)
    expected = [v.numpy() for v in make_model().variables]
    with layout_map.scope():
        make_model()  # The engine keeps the programs that it traced first, with their constants.
    made = []

    def interrupt(self, key):
        made.append(key)
        if len(made) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "__call__", interrupt)
    keras.utils.set_random_seed(3)
    model = None
    gc.collect()
    classes, arrays = hooked(), num_arrays()
    with pytest.raises(KeyboardInterrupt), layout_map.scope():
        model = make_model()
    gc.collect()

    assert 3 == len(made)
    assert classes == hooked()
    assert arrays == num_arrays()
    assert all(is_pending(v) for v in model.variables)
    monkeypatch.undo()
    assert all(np.array_equal(a, v.numpy()) for a, v in zip(expected, model.variables, strict=True))
    assert layout_map["d2.kernel"] == model.layers[1].kernel.layout


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            None,
            """
            the function returned no model
              why   build and plan use the model that the function returns
              fix   end the function with: return model
            """,
        ),
        (
            3,
            """
            builtins.int is not a model
              why   it belongs to none of the supported libraries: keras, torch, jax
              fix   pass a model, or a function that builds and returns one
            """,
        ),
    ],
    ids=["None", "a number"],
)
@pytest.mark.parametrize("verb", [lm.build, lm.plan])
def test_a_function_that_returns_no_model(verb, returned, message):
    """`build` and `plan` say so, and nothing that the function made gets a value."""

    def make_and_forget():
        make_model()
        return returned

    assert raised(lm.ScopeError, lambda: verb(make_and_forget, make_map({}))) == text(message)


@pytest.mark.parametrize("verb", [lm.build, lm.plan, lambda make, layout_map: lm.apply(make(), layout_map)])
def test_a_map_without_a_mesh(verb):
    """Refused before the model is made, whatever is done with the map."""
    keras.utils.clear_session()
    with pytest.raises(lm.ScopeError) as caught:
        verb(make_model, lm.LayoutMap())

    assert str(caught.value) == text("""
        the layout map has no mesh
          why   it was created without a mesh and without rules
          fix   create it with a mesh: LayoutMap(create_mesh("batch=2,model=4"))
        """)


def test_a_batch_dim_that_the_mesh_does_not_have():
    """Names the dims that there are."""
    assert raised(lm.ScopeError, lambda: make_map({}).build(make_model, batch_dim="data")) == text("""
        batch_dim 'data' is not a dim of the mesh
          mesh  batch=2, model=4
          why   the batch is sharded over it
          fix   use one of 'batch', 'model', or leave it out
        """)


USES = {
    "read": lambda model: model.layers[0].kernel.numpy(),
    "assign": lambda model: model.layers[0].kernel.assign(np.ones((8, 8))),
    "call": lambda model: model(np.ones((1, 8), "float32")),
    "fit": lambda model: model.fit(np.ones((4, 8)), np.ones((4, 8)), verbose=0),
    "predict": lambda model: model.predict(np.ones((4, 8)), verbose=0),
}


@pytest.mark.parametrize("use", USES)
def test_a_planned_model_has_no_values(use):
    """A model that was only planned says so to whoever wants its values."""
    kept = []

    def make_and_keep():
        kept.append(make_model())
        kept[0].compile("sgd", "mse")
        return kept[0]

    lm.plan(make_and_keep, make_map({}))
    with pytest.raises(lm.PlanError, match="this model is only a plan, so it has no values"):
        USES[use](kept[0])


def test_a_plan_allocates_nothing():
    """Planning makes no array, however large the model is, and needs none of the mesh's devices."""
    huge = 2**20

    def make_huge():
        layers = [L.Dense(huge, name="up"), L.BatchNormalization(name="bn"), L.Dropout(0.1, name="drop")]
        model = keras.Sequential([keras.Input((huge,)), *layers])
        model.compile("adam", "mse")
        return model

    layout_map = lm.LayoutMap(lm.Mesh(None, "batch=512,model=8"), {r"up\.kernel": ("batch", "model")})
    with nothing_is_left():
        plan = lm.plan(make_huge, layout_map)

    assert 3 * 4 * huge**2 < plan.global_bytes
    assert plan.device_bytes < plan.global_bytes / 4000


def test_an_error_in_one_thread_leaves_the_others_alone():
    """While one thread's scope fails, another's goes on."""
    good, bad = (
        make_map({r".*kernel": (None, "model"), r".*bias": (None,)}),
        make_map({r".*": (None, "model")}),
    )
    results = {}
    barrier = threading.Barrier(2)

    def work(name, layout_map):
        with contextlib.suppress(lm.PlanError), layout_map.scope():
            model = make_model()
            barrier.wait(240)
        results[name] = [is_pending(v) for v in model.variables]

    threads = [threading.Thread(target=work, args=pair) for pair in (("good", good), ("bad", bad))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {"good": [False] * 4, "bad": [True] * 4} == results


OPEN = """
import layoutmap as lm
layout_map = lm.LayoutMap(lm.Mesh(None, 'model=2'))
try:
    with layout_map.scope():
        pass
except lm.ScopeError as error:
    print(error)
"""


def said(changed):
    """What a process prints that opens a scope with a changed Keras."""
    (ended,) = forked.wait_for_all([forked.start(f"import keras\n{changed}\n{OPEN}")])
    return ended.stdout.strip() or ended.stderr[-2000:]


def test_a_keras_that_makes_global_variables():
    """KERAS_NNX_ENABLED is refused by name: in that mode each global value is first made on one device."""
    assert said("keras.config.is_nnx_enabled = lambda: True") == text("""
        Keras runs with KERAS_NNX_ENABLED
          why   in that mode, each variable is first created in full on one device, which a layout map avoids
          fix   unset KERAS_NNX_ENABLED, and restart the program
        """)


def test_no_model_library_is_imported():
    """A scope that cannot know which library is to come says so."""
    run = subprocess.run([sys.executable, "-c", OPEN], capture_output=True, text=True)

    assert (run.stdout.strip() or run.stderr[-2000:]) == text("""
        no model library is imported
          why   a scope works inside one of keras, torch, jax, and none of them is imported
          fix   import your library before opening the scope, or pass library="keras"
        """)


def test_a_backend_without_a_port():
    """Keras on a backend that is not supported is refused by name."""
    assert said("keras.backend.backend = lambda: 'numpy'") == text("""
        Keras runs on numpy, where layout maps do not work yet
          why   the supported backends are jax, tensorflow, torch
          fix   set KERAS_BACKEND to one of them before Keras is imported
        """)


def test_find_variables_does_not_look_at_metrics():
    """Metrics and the optimizer have variables of their own, which are not the model's."""
    model = make_model()
    model.compile("adam", "mse", metrics=["mae"])
    model.train_on_batch(np.ones((1, 8)), np.ones((1, 8)))

    assert ["d1.kernel", "d1.bias", "d2.kernel", "d2.bias"] == [f.path for f in find_variables(model)]
