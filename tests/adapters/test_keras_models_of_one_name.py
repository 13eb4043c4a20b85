"""Several Keras models with one name in one scope or plan are several models, each with its own variables."""

import keras
import numpy as np
import pytest
from quiet import OF_ARRAYS, OF_MAPS

import layoutmap as lm

PROCESSES = ("jax", "tensorflow", "torch")
L = keras.layers
pytestmark = [OF_MAPS, OF_ARRAYS]
SIZES = (32, 16, 8)


def mlp(size, **of_kernel):
    return keras.Sequential(
        [keras.Input((8,)), L.Dense(size, name="d1", **of_kernel), L.Dense(4, name="d2")], name="mlp"
    )


def make_map(rules):
    return lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules)


RULES = {r"d1\.kernel": (None, "model"), "d1.bias": ("model",), r"d2\.kernel": ("model", None)}
WHERE = [(f"mlp{number}", f"{path}.kernel") for number in ("", "_1", "_2") for path in ("d1", "d2")]
SHAPES = [(8, 32), (32, 4), (8, 16), (16, 4), (8, 8), (8, 4)]


def kernels_of(plan):
    return {a.variable.key: a.variable.shape for a in plan.assignments if a.variable.path.endswith("kernel")}


def test_a_plan_shows_models_of_one_name_apart():
    """Each of three models of one name has its own shapes in a plan, and the table names them apart."""
    kept = []

    def make_model():
        kept[:] = [mlp(size) for size in SIZES]
        return kept[0]

    plan = lm.plan(make_model, make_map(RULES))
    assert dict(zip(WHERE, SHAPES, strict=True)) == kernels_of(plan)
    assert all(f"{model}: {path}" in str(plan) for model, path in WHERE)


def test_models_of_one_name_in_a_scope_have_their_plain_values():
    """Three models of one name and other sizes are laid out each by its own shapes, with the plain models' values."""
    keras.utils.set_random_seed(1)
    plain = [mlp(size) for size in SIZES]
    keras.utils.set_random_seed(1)
    with make_map(RULES).scope() as scope:
        made = [mlp(size) for size in SIZES]
    assert dict(zip(WHERE, SHAPES, strict=True)) == kernels_of(scope.plan)
    for one, other in zip(plain, made, strict=True):
        for expected, actual in zip(one.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(expected, actual)
    expected = [("unsharded", "model"), ("model",)] * len(SIZES)
    assert expected == [w.layout.sharding_specs for model in made for w in model.layers[0].weights]


def test_a_student_from_the_config_of_its_teacher_is_another_model():
    """A model that `from_config` makes of another is listed beside it, variable for variable."""
    with make_map(RULES).scope() as scope:
        teacher = mlp(16)
        student = keras.Sequential.from_config(teacher.get_config())
    assert len(teacher.variables) + len(student.variables) == len(scope.plan)
    assert teacher.layers[0].kernel.layout == student.layers[0].kernel.layout
    assert "mlp: d1.kernel" in str(scope.plan)
    assert "mlp_1: d1.kernel" in str(scope.plan)
    assert "mlp_1" == scope.plan["mlp_1: d1.kernel"].variable.model
    assert scope.plan == lm.Plan.from_json(scope.plan.to_json())


def test_a_note_on_a_draw_is_of_the_model_that_draws_so():
    """Of two models of one name, the one whose initializer cannot be split is named, in a scope and in a plan."""
    kept = []

    def make_model():
        kept[:] = [mlp(16), mlp(16, kernel_initializer="orthogonal")]
        return kept[0]

    with make_map(RULES).scope() as scope:
        make_model()
    planned = lm.plan(make_model, make_map(RULES))
    for plan in (scope.plan, planned):
        assert [("mlp_1", "d1.kernel")] == [a.variable.key for a in plan.assignments if a.global_init]
        assert ["mlp_1: d1.kernel"] == [
            p.what.rpartition(": ")[0] for p in plan.problems if p.kind == "global init"
        ]


def test_a_problem_names_the_model_that_has_it():
    """Where one of two models of one name does not fit, each error names that one."""
    with (
        pytest.raises(lm.PlanError, match=r"3 problems\nmlp_2: d1\.kernel: ") as caught,
        make_map(RULES).scope(),
    ):
        _kept = mlp(16), mlp(16), mlp(6)
    assert {"mlp_2"} == {problem.model for problem in caught.value.problems}


def test_two_optimizers_of_models_of_one_name_have_slots_of_their_own_shapes():
    """Slots of each model are those of its own weights."""
    x, y = np.ones((8, 8), "float32"), np.ones((8, 4), "float32")
    with make_map(RULES).scope() as scope:
        made = [mlp(size) for size in SIZES[:2]]
        for model in made:
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    for model in made:
        model.fit(x, y, verbose=0)
    slots = {
        a.variable.key: a.variable.shape for a in scope.plan.assignments if "momentum" in a.variable.path
    }
    expected = {
        (model, f"optimizer.{path}.momentum"): shape
        for (model, path), shape in zip(WHERE[:4], SHAPES[:4], strict=True)
    }
    assert expected == {key: shape for key, shape in slots.items() if "kernel" in key[1]}


def test_variables_of_one_name_in_a_layer_are_distinguished():
    """A layer may make several weights of one name that no attribute holds; each has its own shape and values."""

    class Two(L.Layer):
        def build(self, shape):
            self.add_weight((8, 4), name="w")
            self.add_weight((4, 2), name="w")

    with make_map({"w": (None, "model")}).scope() as scope:
        layer = Two(name="two")
        layer.build((8, 8))
    assert {"two.w": (8, 4), "two.w_1": (4, 2)} == {
        a.variable.path: a.variable.shape for a in scope.plan.assignments
    }
