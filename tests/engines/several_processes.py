"""Several processes make arrays together: what each does, and what must come of it, for any engine.

A test runs a worker file in each process, which joins the others and calls `work`; `check` compares what they wrote.
"""

import contextlib
import json
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import numpy as np

import layoutmap.dtensor
from layoutmap.core.blocks import assemble_blocks
from layoutmap.core.errors import EngineError
from layoutmap.core.initializers import Initializer, InitializerProgram
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import Engine
from layoutmap.testing.engine_contract import assert_same_bits, generate_values

SHAPE = (16, 8)


def free_ports(number: int) -> list[int]:
    """Return ports on which no process listens.

    The system gives out the ports above 32767: one of these may be given to another process before it is used here.
    """
    ports: list[int] = []
    draw = random.SystemRandom()
    while len(ports) < number:
        port = draw.randrange(10_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports += [port] * (port not in ports)
    return ports


def run(worker: Path, folder: Path, environments: Sequence[Mapping[str, str]], *arguments: str) -> list[Any]:
    """Return what each process that runs the worker wrote: what it tells, and the arrays of one that has any."""
    processes = [
        forked.start(worker, [str(i), str(folder), *arguments], environment, warnings_are_errors=True)
        for i, environment in enumerate(environments)
    ]
    for ended in forked.wait_for_all(processes):
        assert 0 == ended.returncode, ended.stdout + ended.stderr[-4000:]
    results: list[Any] = []
    for i in range(len(environments)):
        arrays = folder / f"{i}.npz"
        results.append(
            (json.loads((folder / f"{i}.json").read_text()), dict(np.load(arrays)) if arrays.exists() else {})
        )
    return results


# -- in a worker


@dataclass(frozen=True)
class Framework:
    """What a framework is asked to draw and to hold.

    Attributes:
        seed: A seed of the framework, from a number.
        normal: Draws an array of `SHAPE` from a seed, by a program that can be sharded.
        summed: Draws one by a program that needs all of it.
        plain: A plain array of the framework.
        dtypes: The element types to move between layouts.
        cuts_over_several_dims: Whether one axis may be sharded over several mesh dims.
    """

    seed: Callable[[int], Any]
    normal: Callable[[Any], Any]
    summed: Callable[[Any], Any]
    plain: Callable[[Any], Any]
    dtypes: Sequence[str]
    cuts_over_several_dims: bool


def work(
    engine: Engine, framework: Framework, number: int, folder: Path, dims: str = "x=2,y=4", **more: Any
) -> None:
    """Make arrays as process `number`, and write what came of it, and what else there is to tell."""
    mesh = engine.bind_mesh(Mesh(None, dims))
    layouts = {
        "program": Layout(["x", "y"], mesh),
        "crossed": Layout(["y", "x"], mesh),
        "replicated": Layout([None, None], mesh),
        "summed": Layout(["x", None], mesh),
        "whole": Layout([None, "x"], mesh),
    }
    if framework.cuts_over_several_dims:
        layouts["tuple"] = Layout([("y", "x"), None], mesh)
    values = np.arange(128, dtype=np.float32).reshape(SHAPE)

    def drawn(function: Callable[[Any], Any], name: str) -> Initializer:
        """A draw with another seed in each process: that of process 0 counts."""
        seed = framework.seed(number)
        return Initializer(
            global_value=lambda: function(seed), program=InitializerProgram(name, seed, function)
        )

    draws = {
        **dict.fromkeys(layouts, drawn(framework.normal, "normal")),
        "summed": drawn(framework.summed, "summed"),
        "whole": Initializer(global_value=lambda: values),
    }
    assignments = {
        key: Assignment(VariableSpec(key, SHAPE, "float32"), layout) for key, layout in layouts.items()
    }
    arrays = engine.create_initial_values(assignments, draws)
    seed = framework.seed(0)
    expected: dict[str, Any] = {
        **dict.fromkeys(layouts, np.asarray(framework.normal(seed))),
        "summed": np.asarray(framework.summed(seed)),
        "whole": values,
    }

    def add(name: str, array: Any, layout: Layout, wanted: Any) -> None:
        arrays[name], layouts[name], expected[name] = array, layout, wanted

    add(
        "plain",
        engine.relayout(framework.plain(values), Layout(["y", None], mesh)),
        Layout(["y", None], mesh),
        values,
    )
    for dtype in framework.dtypes:
        bits = generate_values(SHAPE, dtype, seed=1)
        cut, crossed = Layout(["x", "y"], mesh), Layout([None, "x"], mesh)
        add(f"numpy {dtype}", engine.relayout(bits, cut), cut, bits)
        add(f"moved {dtype}", engine.relayout(arrays[f"numpy {dtype}"], crossed), crossed, bits)
        add(
            f"packed {dtype}",
            layoutmap.dtensor.pack(layoutmap.dtensor.unpack(arrays[f"moved {dtype}"]), crossed),
            crossed,
            bits,
        )

    held: dict[str, Any] = {}
    shards: dict[str, Any] = {}
    for name, array in arrays.items():
        held[f"{name}.expected"] = _bytes_of(expected[name])
        held[f"{name}.gathered"] = _bytes_of(engine.to_numpy(array))
        shards[name] = []
        for i, (index, shard) in enumerate(engine.iterate_shards(array)):
            held[f"{name}.{i}"] = _bytes_of(shard)
            shards[name].append([(part.start, part.stop) for part in index])
    np.savez(folder / f"{number}.npz", **held)
    told = {
        "devices": engine.list_device_names(),
        "local_device_ids": mesh.local_device_ids,
        "layouts_equal": {name: engine.get_layout(array) == layouts[name] for name, array in arrays.items()},
        "shards": shards,
        "expected": list(expected),
        "other_values": refusal(
            lambda: engine.create_initial_values(
                {"other": assignments["summed"]},
                {"other": Initializer(global_value=lambda: np.full(SHAPE, number, np.float32))},
            )
        ),
        "gathered": engine.gather_from_processes(np.array([number, 2.5]), mesh).tolist(),
        "unpacked": len(layoutmap.dtensor.unpack(arrays["crossed"])),
        **more,
    }
    (folder / f"{number}.json").write_text(json.dumps(told))


def _bytes_of(values: Any) -> Any:
    """The bytes of each element along one more axis: a file of numpy does not know the types of frameworks."""
    return np.ascontiguousarray(values)[..., None].view(np.uint8)


def refusal(function: Callable[[], object]) -> str:
    """What an error of the engine says."""
    try:
        function()
    except EngineError as error:
        return str(error)
    return ""


# -- in a test


def check(results: Sequence[Any], devices_each: int = 4) -> None:
    """Fail unless the values of all processes are those of one, each element held once, and wrong draws noticed."""
    first, values = results[0]

    # JAX numbers the devices of another process from 2048 on.
    assert [f"CPU:{i}" for i in range(devices_each)] == first["devices"][:devices_each]
    assert devices_each * len(results) == len(set(first["devices"]))
    for process, (told, held) in enumerate(results):
        place = process * devices_each
        assert first["devices"] == told["devices"]
        assert list(range(place, place + devices_each)) == told["local_device_ids"]
        assert first["other_values"] == told["other_values"]
        assert devices_each == told["unpacked"]
        assert [[other, 2.5] for other in range(len(results))] == told["gathered"]
        for name in first["expected"]:
            assert told["layouts_equal"][name]
            assert_same_bits(values[f"{name}.expected"], held[f"{name}.gathered"])
    assert "summed: the processes have different values" in first["other_values"]
    for name in first["expected"]:
        shards: dict[tuple[tuple[int, int], ...], Any] = {}
        for told, held in results:
            for i, ends in enumerate(told["shards"][name]):
                shard = held[f"{name}.{i}"]
                known = shards.setdefault((*map(tuple, ends), (0, shard.shape[-1])), shard)
                assert_same_bits(known, shard)
        expected = values[f"{name}.expected"]
        blocks = [(tuple(slice(*pair) for pair in ends), shard) for ends, shard in shards.items()]

        assert_same_bits(expected, assemble_blocks(blocks, expected.shape, expected.dtype))
