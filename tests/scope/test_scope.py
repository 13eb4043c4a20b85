"""The main job at its surface: `scope`, `build`, `plan`, `apply` and what they hand out."""

import contextlib
import textwrap

import keras
import numpy as np
import pytest

import layoutmap as lm
from layoutmap.adapters.current import activate_session, get_current_session
from layoutmap.core.policy import LayoutPolicy

PROCESSES = ("jax",)
L = keras.layers
RULES = {r".*kernel": (None, "model"), r".*bias": (None,)}


def make_model():
    return keras.Sequential([keras.Input((8,)), L.Dense(16, name="d1"), L.Dense(8, name="d2")])


def make_map(rules=RULES, mesh="batch=2,model=4"):
    return lm.LayoutMap(lm.create_mesh(mesh), rules)


class Lazy(keras.Model):
    """Makes its weights at its first call."""

    def __init__(self):
        super().__init__()
        self.d1 = L.Dense(16)
        self.d2 = L.Dense(8)

    def call(self, x):
        return self.d2(self.d1(x))


def assignments(plan):
    return {a.variable.path: a.layout for a in plan.assignments}


def test_a_plan_grows_as_weights_are_made():
    """What a first call makes joins the plan of the scope, and what was there stays."""
    with make_map().scope() as scope:
        model = Lazy()

    assert 0 == len(scope.plan)
    model(np.ones((1, 8), "float32"))
    assert ["d1.kernel", "d1.bias", "d2.kernel", "d2.bias"] == [
        a.variable.path for a in scope.plan.assignments
    ]
    assert (
        repr(scope)
        == "<Scope: <Plan: 4 variables on batch=2, model=4, 1.1 KiB, 352 B per device; no problems>>"
    )


def test_inputs_build_a_lazy_model():
    """With `inputs` a model that makes its weights at its first call is planned and built; nothing is computed."""
    inputs = keras.Input((8,), batch_size=4)
    model = make_map().build(Lazy, inputs=inputs)

    assert lm.plan(Lazy, make_map(), inputs=np.ones((4, 8)))["d2.kernel"].layout == model.d2.kernel.layout
    assert ("unsharded", "model") == model.d1.kernel.layout.sharding_specs


def test_a_plan_without_inputs_says_what_it_cannot_know():
    """Layers that have no weights yet are a warning of their own, with the fix, and an error if `strict`."""
    message = textwrap.dedent("""\
        Lazy: 2 layers have no weights yet: dense, dense_1
          why   a model makes its weights at its first call, and has not been called
          fix   pass inputs=: an example batch, or keras.Input(...); a lazy layer of torch needs its sizes instead""")
    keras.utils.clear_session()
    plan = lm.plan(Lazy, lm.LayoutMap(make_map().mesh))

    assert ["not built"] == [p.kind for p in plan.problems]
    assert message == str(plan.problems[0])
    keras.utils.clear_session()
    with pytest.raises(lm.PlanError) as caught:
        lm.plan(Lazy, lm.LayoutMap(make_map().mesh), strict=True)
    assert message == str(caught.value)


def test_a_batch_is_sharded_where_it_divides():
    """The batch lies over the batch dim, and whole where it does not divide or has no axis."""
    with make_map().scope(batch_dim="batch") as scope:
        make_model()
    with make_map().scope() as whole:
        make_model()

    assert ("batch", "unsharded") == scope.policy.derive_batch_layout((6, 3)).sharding_specs
    assert scope.policy.derive_batch_layout((7, 3)).is_fully_replicated()
    assert 0 == scope.policy.derive_batch_layout(()).rank
    for axis_types in ("auto", "explicit"):  # meshes of other axis types are equal
        policy = LayoutPolicy(lm.create_mesh("batch=2,model=4", axis_types=axis_types), "batch")
        assert policy.mesh is policy.derive_batch_layout((6, 3)).mesh
    assert whole.policy.derive_batch_layout((6, 3)).is_fully_replicated()


def test_strict_scopes_raise_what_others_warn_of():
    """A kernel without a rule is a warning, and with `strict` an error; nothing is made then."""
    with pytest.warns(lm.LayoutMapWarning, match=r"d2\.kernel: no rule matches, so it is replicated"):
        make_map({r"d1\.kernel": (None, "model")}).build(make_model)
    with pytest.raises(lm.PlanError, match="2 problems"):
        make_map({r"d1\.kernel": (None, "model"), r"d1\.bias": (None,)}).build(make_model, strict=True)


def test_a_complete_map_is_quiet():
    """Where every variable has its rule and every rule its variable, there is nothing to tell."""
    assert () == lm.plan(make_model, make_map(), strict=True).problems
    make_map().build(make_model, strict=True)


def test_the_older_spelling_warns_and_works():
    """`layout_map_scope` is deprecated, at the user's line, and gives the same scope."""
    with (
        pytest.warns(DeprecationWarning, match="write layout_map") as caught,
        lm.layout_map_scope(make_map()) as scope,
    ):
        make_model()

    assert [__file__] == [w.filename for w in caught]
    assert "layout_map_scope(layout_map) is deprecated: write layout_map.scope()" == str(caught[0].message)
    assert 4 == len(scope.plan)


def test_the_current_scope_is_that_of_the_innermost_block():
    """What is entered is current until it is left, by an exception too."""
    assert get_current_session() is None
    with activate_session("outer"):
        with contextlib.suppress(ZeroDivisionError), activate_session("inner"):
            assert "inner" == get_current_session()
            raise ZeroDivisionError
        assert "outer" == get_current_session()
    assert get_current_session() is None


def test_apply_wants_a_model():
    """What is not a model is refused by its type."""
    with pytest.raises(lm.ScopeError) as caught:
        make_map().apply(3)

    assert str(caught.value) == textwrap.dedent("""\
        builtins.int is not a model
          why   it belongs to none of the supported libraries: keras, torch, jax
          fix   pass a model, or a function that builds and returns one""")


def test_a_library_without_an_adapter():
    """Names the libraries that there are."""
    with pytest.raises(lm.ScopeError) as caught:
        make_map().build(make_model, library="sonnet")

    assert str(caught.value) == textwrap.dedent("""\
        there is no adapter 'sonnet'
          why   the adapters are 'keras', 'torch', 'jax'
          fix   pass one of these names as library=""")


def test_apply_changes_nothing_if_something_does_not_fit():
    """A model that exists is moved as a whole or not at all."""
    model = make_model()
    before = [(v.value.sharding, v._layout) for v in model.variables]
    with pytest.raises(lm.PlanError, match=r"d2\.kernel"):
        make_map({r"d1\.kernel": (None, "model"), r"d2\.kernel": ("model",)}).apply(model)

    assert before == [(v.value.sharding, v._layout) for v in model.variables]
    assert not any(hasattr(v, "layout") for v in model.variables)


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
def test_a_model_follows_the_last_map_only():
    """After a second `apply`, training and new weights know nothing of the first map."""
    model = make_map().build(make_model, batch_dim="batch")
    model.compile("adam", "mse")
    x, y = np.ones((8, 8), "float32"), np.ones((8, 8), "float32")
    model.fit(x, y, verbose=0)
    other = make_map({r"d\d\.kernel$": ("model", None)}, "model=4,batch=2")
    other.apply(model, batch_dim="batch")
    model.layers[0].enable_lora(2)
    model.compile("adam", "mse")
    model.fit(x, y, verbose=0)

    meshes = {v.layout.mesh for v in (*model.variables, *model.optimizer.variables)}
    assert {other.mesh} == meshes
    assert other["d2.kernel"] == model.layers[1].kernel.layout


def test_progress_is_shown_if_asked_for(capsys):
    """With `progress` a line on stderr counts what is made, and is wiped in the end; without, there is none."""
    make_map().build(make_model, progress=True)
    shown = capsys.readouterr().err
    make_map().build(make_model, progress=False)

    assert "layoutmap: 1/4 variables" in shown
    assert "" == shown.rpartition("\r")[2]
    assert "" == shown.rpartition("\r")[0].rpartition("\r")[2].strip()
    assert "" == capsys.readouterr().err
