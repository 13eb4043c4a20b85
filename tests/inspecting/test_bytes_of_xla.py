"""The bytes of a plan are those that XLA and the devices count, found without the library's byte arithmetic."""

import jax
import numpy as np
import pytest
from cases import EVERYTHING
from flax import nnx

import layoutmap as lm
from layoutmap.adapters import get_adapter
from layoutmap.testing import models

PROCESSES = ("jax",)
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
SEEDS = range(500, 600 if EVERYTHING else 503)


def find_arrays(state):
    """Return each array of a model and its optimizer once, as JAX finds them."""
    model = nnx.state(state.model) if isinstance(state.model, nnx.Module) else state.model
    leaves = jax.tree.leaves((model, state.opt_state))
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array)}.values())


def count_bytes(arrays):
    """Return how many bytes of arrays each device holds, by the shards that JAX has put there."""
    counts = dict.fromkeys(jax.devices(), 0)
    for array in arrays:
        for shard in array.addressable_shards:
            data = shard.data
            counts[shard.device] += (
                jax.random.key_data(data) if jax.dtypes.issubdtype(data.dtype, jax.dtypes.prng_key) else data
            ).nbytes
    return counts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("library", ["nnx", "pytree"])
def test_a_device_holds_the_bytes_of_its_plan(library, seed):
    """The plan and `inspect` count what XLA's program takes and returns, and what each device holds."""
    case = models.draw(seed, library)
    planned = case.plan()
    state = lm.build(
        case.make_model, case.layout_map, batch_dim=case.map.batch_dim, library=library, progress=False
    )
    get_adapter(library).create_lazy_variables(state, case.batch)
    found = lm.inspect(state)
    arrays = find_arrays(state)
    shardings = [array.sharding for array in arrays]
    identity = jax.jit(lambda arrays: arrays, keep_unused=True, out_shardings=shardings)
    analysis = identity.lower(arrays).compile().memory_analysis()
    used = {device for array in arrays for device in array.sharding.device_set}
    held = {count for device, count in count_bytes(arrays).items() if device in used}

    assert {analysis.argument_size_in_bytes} == held
    assert analysis.argument_size_in_bytes == found.device_bytes
    assert analysis.argument_size_in_bytes == planned.device_bytes


DTYPES = [
    "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64",
    "int32", "uint32", "int16", "int8", "uint8", "int4", "uint4", "bool", "key",
]  # fmt: skip


def make_array(dtype, shape):
    if dtype == "key":
        return jax.random.split(jax.random.key(0), shape)
    return jax.numpy.ones(shape, dtype)


@pytest.mark.parametrize("seed", SEEDS[:30])
def test_a_device_holds_the_bytes_of_each_element_type(seed):
    """Each array alone, of any element type, rank and layout, takes the bytes that XLA says."""
    random = np.random.default_rng(seed)
    dims = [None, None, "batch", "model", ("batch", "model"), ("model", "batch")]
    arrays, rules = {}, {}
    for number, dtype in enumerate(DTYPES):
        shape = tuple(int(n) for n in 8 * random.integers(1, 4, size=random.integers(0, 4)))
        shape = () if dtype == "key" else shape  # keys are refused in layouts
        spec, free = [], {"batch", "model"}
        for _ in shape:
            drawn = dims[random.integers(len(dims))]
            names = set() if drawn is None else {drawn} if isinstance(drawn, str) else set(drawn)
            spec.append(drawn if names <= free else None)
            free -= names if names <= free else set()
        arrays[f"w{number}"], rules[rf"w{number}$"] = (dtype, shape), tuple(spec)
    layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules)

    def make_model():
        return {name: make_array(*each) for name, each in arrays.items()}

    planned = lm.plan(make_model, layout_map, library="jax")
    model = lm.build(make_model, layout_map, library="jax", progress=False)
    found = lm.inspect(model)
    expected = {}
    for name, array in model.items():
        identity = jax.jit(lambda x: x, out_shardings=array.sharding)
        expected[name] = identity.lower(array).compile().memory_analysis().argument_size_in_bytes

    assert expected == {name: a.device_bytes for name, a in planned.items()}
    assert expected == {name: a.device_bytes for name, a in found.items()}
