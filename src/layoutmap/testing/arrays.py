"""Test laws of arrays on random meshes, layouts, and shapes. A law is a program for any devices and processes.

>>> from layoutmap.scope.devices import simulate_devices
>>> simulate_devices(8, "jax")
>>> {outcome.what for outcome, _ in try_array_laws("jax", 3)}
{'held'}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from layoutmap.core.mesh import Mesh
from layoutmap.engines import get_engine
from layoutmap.testing.laws import Outcome, run_law
from layoutmap.testing.models.choices import Choices
from layoutmap.testing.models.maps import EIGHT, Devices, Specs, draw_sharding_specs

_PROGRAM = """\
import ml_dtypes  # registers bfloat16 with numpy
import numpy as np

import layoutmap as lm
from layoutmap.core.blocks import get_starts_and_stops
from layoutmap.core.initializers import Initializer
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import get_engine
{simulation}
engine = get_engine({engine!r})
mesh = lm.Mesh(None, {mesh!r})
values = np.random.default_rng({seed}).normal(size={shape!r}).astype({dtype!r})
first, second = (lm.Layout(specs, mesh) for specs in {specs!r})


def check(array, layout):
    assert engine.get_layout(array) == layout, (engine.get_layout(array), layout)
    shards = {{get_starts_and_stops(index): shard for index, shard in engine.iterate_shards(array)}}
    expected = [layout.shard_slices(values.shape, device) for device in engine.bind_mesh(mesh).local_device_ids]
    assert set(shards) == set(map(get_starts_and_stops, expected)), (set(shards), expected)
    for index in expected:
        assert np.array_equal(shards[get_starts_and_stops(index)], values[index]), index
    assert np.array_equal(engine.to_numpy(array), values)


variable = VariableSpec("w", values.shape, values.dtype.name)
{law}
"""
_LAWS = {
    "a relayout keeps every bit, and each device has its shard": """\
array = engine.relayout(values, first)
check(array, first)
check(engine.relayout(array, second), second)""",
    "a created variable has its initial values in its layout": """\
initializers = {"w": Initializer(global_value=lambda: values)}
check(engine.create_initial_values({"w": Assignment(variable, first)}, initializers)["w"], first)""",
    "an array that is read by shard has its values in its layout": """\
check(engine.create_from_shards(Assignment(variable, second), values.__getitem__), second)""",
    "a call returns its values in the layout": """\
array = engine.relayout(values, first)
values = values + values
check(engine.call_with_layout(lambda x: x + x, second, [array], {}), second)""",
}


def try_array_laws(engine: str, seed: int, devices: Devices = EIGHT) -> Iterator[tuple[Outcome, str]]:
    """Try the laws of arrays in random layouts. Yield each outcome, and the law's program if it failed, or ""."""
    choices = Choices.from_seed(seed)
    mesh = Mesh(None, dims := choices.pick_weighted(devices.mesh_frequencies))
    shape = tuple(choices.pick(1, 2, 3) * mesh.size for _ in range(choices.pick_weighted({2: 4, 3: 3, 1: 2})))
    values = {
        "engine": engine,
        "mesh": dims,
        "seed": seed,
        "shape": shape,
        "dtype": choices.pick("float32", "int32", "float16", "int8", "bfloat16"),
        "specs": [_draw_specs_for_engine(choices, engine, mesh, shape) for _ in range(2)],
        "simulation": f"\nlm.simulate_devices({devices.number}, {engine!r})\n" if devices.simulated else "",
    }
    for law, lines in _LAWS.items():
        program = _PROGRAM.format(**values, law=lines)
        outcome = run_law(law, partial(_execute_law_program, program))
        yield outcome, program if outcome.is_failure else ""


def _execute_law_program(program: str) -> Iterable[str]:
    """Run a program that raises if its law does not hold, and return no differences otherwise."""
    exec(compile(program, "<drawn>", "exec"), {"__name__": __name__})
    return ()


def _draw_specs_for_engine(choices: Choices, engine: str, mesh: Mesh, shape: tuple[int, ...]) -> Specs:
    """Draw sharding specs that the engine supports. TensorFlow's DTensor cannot shard an axis over several dims."""
    specs = draw_sharding_specs(choices, mesh, shape, "error")
    can_combine = get_engine(engine).several_dims
    return tuple(spec if can_combine or isinstance(spec, str) else None for spec in specs)
