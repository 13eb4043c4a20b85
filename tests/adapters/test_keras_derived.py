"""What Keras derives from a weight lies as the weight does, axis for axis, whether rules are loose or strict."""

import keras
import numpy as np
import pytest
from keras.quantizers import AWQConfig, GPTQConfig, Int4QuantizationConfig

import layoutmap as lm
from layoutmap.adapters import get_adapter
from layoutmap.adapters.keras.paths import find_variables
from layoutmap.adapters.keras.pending import is_pending

PROCESSES = ("jax", "tensorflow", "torch")
# Keras's own: it hands variables to numpy where it quantizes.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

L = keras.layers
MESH = "batch=2,model=4"
COLUMNS, ROWS = (None, "model"), ("model", None)
HEADS, HEADS_IN = (None, "model", None), ("model", None, None)


def dense():
    return L.Dense(16, name="l"), (4, 8)


def heads():
    return L.EinsumDense("abc,cde->abde", (None, 8, 4), bias_axes="de", name="l"), (4, 3, 16)


def joined():
    return L.EinsumDense("abde,dec->abc", (None, 16), name="l"), (4, 3, 8, 4)


def embedding():
    return L.Embedding(16, 8, name="l"), (4, 3)


def reversible():
    return L.ReversibleEmbedding(16, 8, tie_weights=False, name="l"), (4, 3)


def conv():
    return L.Conv2D(8, 3, name="l"), (2, 5, 5, 4)


def lora(layer):
    layer.enable_lora(2)


def quantized(mode):
    return lambda layer: layer.quantize(mode)


def int4(layer):
    layer.quantize("int4", config=Int4QuantizationConfig(block_size=-1))


def gptq(layer):  # before it is calibrated, the kernel is there too
    layer.quantize("gptq", config=GPTQConfig(dataset=["text"], tokenizer=None, weight_bits=4, group_size=4))


def awq(layer):
    layer.quantize("awq", config=AWQConfig(dataset=["text"], tokenizer=None, group_size=4))


def int4_groups(layer):
    layer.quantize("int4", config=Int4QuantizationConfig(block_size=4))


def read(variable):
    return get_adapter("keras").read(variable)


# The layer, the layout of its weight, what is done to it, and where each derived variable is sharded.
CASES = {
    "dense lora": (dense, COLUMNS, lora, {"lora_kernel_a": (None, None), "lora_kernel_b": (None, "model")}),
    "dense lora, rows": (
        dense,
        ROWS,
        lora,
        {"lora_kernel_a": ("model", None), "lora_kernel_b": (None, None)},
    ),
    "dense int8": (
        dense,
        COLUMNS,
        quantized("int8"),
        {"kernel": (None, "model"), "kernel_scale": ("model",)},
    ),
    "dense int8, rows": (
        dense,
        ROWS,
        quantized("int8"),
        {"kernel": ("model", None), "kernel_scale": (None,)},
    ),
    "dense int4": (
        dense,
        COLUMNS,
        int4,
        {"kernel": (None, "model"), "kernel_scale": ("model",)},
    ),
    "dense int4 in groups": (
        dense,
        ROWS,
        int4_groups,
        {
            "kernel": ("model", None),
            "kernel_scale": (None, None),  # two groups, which four shards do not divide
            "kernel_zero": (None, None),
            "g_idx": ("model",),
        },
    ),
    "dense gptq": (
        dense,
        COLUMNS,
        gptq,
        {"quantized_kernel": ("model", None), "kernel_scale": ("model", None), "g_idx": (None,)},
    ),
    "dense awq, rows": (
        dense,
        ROWS,
        awq,
        {"quantized_kernel": (None, "model"), "kernel_zero": (None, None), "awq_scales": ("model",)},
    ),
    "heads gptq": (
        heads,
        HEADS,
        gptq,
        {"quantized_kernel": ("model", None), "kernel_scale": ("model", None), "g_idx": (None,)},
    ),
    "dense float8": (
        dense,
        COLUMNS,
        quantized("float8"),
        {"kernel": (None, "model"), "kernel_scale": (), "kernel_amax_history": (None,), "inputs_scale": ()},
    ),
    "heads lora": (
        heads,
        HEADS,
        lora,
        {"lora_kernel_a": (None, "model", None), "lora_kernel_b": (None, None)},
    ),
    "heads int8": (
        heads,
        HEADS,
        quantized("int8"),
        {"kernel": HEADS, "kernel_scale": (None, None, "model", None)},
    ),
    "heads int4": (heads, HEADS, int4, {"kernel": (None, "model"), "kernel_scale": ("model",)}),
    "heads int4 in groups": (
        heads,
        HEADS,
        int4_groups,
        {"kernel": (None, "model"), "kernel_scale": (None, "model"), "g_idx": (None,)},
    ),
    "joined lora": (
        joined,
        HEADS_IN,
        lora,
        {"lora_kernel_a": ("model", None, None), "lora_kernel_b": (None, None)},
    ),
    "joined int8": (
        joined,
        HEADS_IN,
        quantized("int8"),
        {"kernel": HEADS_IN, "kernel_scale": (None, None, None)},
    ),
    "joined int4": (
        joined,
        HEADS_IN,
        int4,
        {"kernel": ("model", None), "kernel_scale": (None,)},
    ),
    "embedding lora": (
        embedding,
        ROWS,
        lora,
        {"lora_embeddings_a": ("model", None), "lora_embeddings_b": (None, None)},
    ),
    "embedding int8": (
        embedding,
        ROWS,
        quantized("int8"),
        {"embeddings": ("model", None), "embeddings_scale": ("model",)},
    ),
    "embedding int4": (
        embedding,
        COLUMNS,
        int4,
        {"embeddings": (None, "model"), "embeddings_scale": (None,)},
    ),
    "reversible int4": (
        reversible,
        COLUMNS,
        int4,
        {
            "embeddings": (None, "model"),
            "embeddings_scale": (None,),
            "reverse_embeddings": (None, "model"),
            "reverse_embeddings_scale": ("model",),
        },
    ),
    "conv lora": (
        conv,
        (None, None, None, "model"),
        lora,
        {"lora_kernel_a": (None, None, None, None), "lora_kernel_b": (None, "model")},
    ),
}


INPUTS_IN_INT8 = ("dense int8", "dense int8, rows", "heads int8", "joined int8")


def made(make_layer, change):
    keras.utils.set_random_seed(3)
    layer, shape = make_layer()
    layer.build(shape)
    change(layer)
    return layer, shape


def inputs_of(layer, shape):
    rng = np.random.default_rng(0)
    if isinstance(layer, L.Embedding):
        return rng.integers(0, 16, shape).astype("int32")
    return rng.normal(size=shape).astype("float32")


def rules_for(layer, specs, end):
    rules = {rf"l\.(kernel|embeddings|reverse_embeddings){end}": specs}
    if getattr(layer, "bias", None) is not None:
        rules[r"l\.bias"] = (None,) * len(layer.bias.shape)
    return lm.LayoutMap(lm.create_mesh(MESH), rules)


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("name", "end"),
    [(name, "") for name in CASES if name not in INPUTS_IN_INT8] + [("dense lora", "$"), ("heads int4", "$")],
)
def test_a_derived_variable_is_sharded_where_its_parent_is(name, end):
    """By what its axes mean, by a loose rule and a strict one; values and outputs are those of the plain layer."""
    check(name, end)


if keras.backend.backend() == "tensorflow":

    @pytest.mark.every_backend
    def test_layers_with_inputs_in_int8_are_refused():
        """DTensor has no product of int8: the plan says so before anything is quantized into layouts."""
        make_layer, specs, change, _ = CASES["dense int8"]
        layout_map = rules_for(make_layer()[0], specs, "")
        held = []
        with pytest.raises(lm.PlanError, match="with inputs in int8 cannot run"), layout_map.scope():
            held.append(made(make_layer, change))

else:

    @pytest.mark.parametrize(("name", "end"), [*((name, "") for name in INPUTS_IN_INT8), ("dense int8", "$")])
    def test_layers_with_inputs_in_int8(name, end):
        """Their scales lie as the columns do that they scale; the integers are those of the plain layer."""
        check(name, end)


def check(name, end):
    make_layer, specs, change, expected = CASES[name]
    plain, shape = made(make_layer, change)
    layout_map = rules_for(plain, specs, end)
    with layout_map.scope(strict=True) as scope:
        layer, _ = made(make_layer, change)

    variables = {f.path: f.variable for f in find_variables(layer)}
    for variable, layout in expected.items():
        given = variables[variable].layout.sharding_specs
        assert (variable, layout) == (variable, tuple(None if s == "unsharded" else s for s in given))
    assert not [path for path, v in variables.items() if is_pending(v)]
    for ours, theirs in zip(find_variables(layer), find_variables(plain), strict=True):
        assert np.array_equal(read(ours.variable), read(theirs.variable)), ours.path
    x = inputs_of(layer, shape)
    outputs = [keras.ops.convert_to_numpy(each(x)) for each in (plain, layer)]
    np.testing.assert_allclose(*outputs, rtol=2e-5, atol=2e-5)
    assert not [p for p in scope.plan.problems if p.severity != "note"]


def low_rank(model):
    model.layers[-1].enable_lora(2)


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize` method:UserWarning")
@pytest.mark.parametrize("change", [quantized("int8"), low_rank, int4], ids=["int8", "lora", "int4"])
def test_a_rule_that_new_variables_do_not_fit_leaves_the_weights(change):
    """The error names it; the model has its weights and values, and trains, as if nothing had been tried."""
    wrong = {r"l2\.(kernel_scale|lora_kernel_b)$": ("model", "batch", None)}
    rules = {r"l\d\.kernel$": (None, "model"), r"l\d\.bias$": (None,), **wrong}
    layout_map = lm.LayoutMap(lm.create_mesh(MESH), rules)

    def make():
        with layout_map.scope(batch_dim="batch") as scope:
            model = keras.Sequential([keras.Input((8,)), L.Dense(16, name="l1"), L.Dense(16, name="l2")])
            model.compile("sgd", "mse")
        return model, scope

    with pytest.warns(lm.LayoutMapWarning, match="rule 3 .* matches no variable"):
        model, scope = make()
    x, y = np.ones((4, 8), "float32"), np.ones((4, 16), "float32")
    model.fit(x, y, verbose=0)
    before = {f.path: (f.variable, f.variable.trainable, read(f.variable)) for f in find_variables(model)}
    planned, outputs = scope.plan, model.predict(x, verbose=0)

    with pytest.raises(lm.PlanError, match=r"l2\.(kernel_scale|lora_kernel_b): .*rank 3|with inputs in int8"):
        change(model)

    after = {f.path: (f.variable, f.variable.trainable, read(f.variable)) for f in find_variables(model)}
    assert list(before) == list(after)
    for path, (variable, trainable, value) in before.items():
        assert (path, variable, trainable) == (path, *after[path][:2])
        assert np.array_equal(value, after[path][2])
    assert planned.fingerprint == scope.plan.fingerprint
    assert np.array_equal(outputs, model.predict(x, verbose=0))
    model.fit(x, y, verbose=0)
    assert not np.array_equal(outputs, model.predict(x, verbose=0))
