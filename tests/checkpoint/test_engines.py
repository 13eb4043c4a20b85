"""What one engine saves another loads: through JAX, TensorFlow and torch and back, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layoutmap.core.mesh import Mesh

PROCESSES = ("core",)

WORKER = Path(__file__).with_name("hop_process.py")
WAY = ("jax", "tensorflow", "torch", "jax")
MESHES = ("a=8", "a=2,b=4", "a=4,b=2", "a=2,b=2,c=2", "a=1,b=8")
DTYPES = ["float32", "bfloat16", "float16", "float64", "int8", "uint8", "int32", "int64", "bool", "complex64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2"]
SHAPES = ((), (0, 4), (8,), (16, 8), (8, 16, 4), (3, 24))


class Hops:
    """Processes of all engines, which load and save what they are told to."""

    def __init__(self) -> None:
        path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
        self._processes = {
            engine: subprocess.Popen(
                [sys.executable, str(WORKER), engine],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
            for engine in {*WAY}
        }

    def hop(self, engine: str, **command: Any) -> list[str]:
        process = self._processes[engine]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def hops() -> Iterator[Hops]:
    """One process of each engine."""
    started = Hops()
    yield started
    started.end()


@st.composite
def specs(draw: Any, shape: tuple[int, ...], mesh: Mesh) -> list[str | None]:
    """A layout of a shape: each dim shards one axis that it divides, or none."""
    found: list[str | None] = [None] * len(shape)
    for dim in mesh.dim_names:
        free = [a for a, n in enumerate(shape) if found[a] is None and n % mesh.dim_size(dim) == 0]
        axis = draw(st.sampled_from([None, *free]))
        if axis is not None:
            found[axis] = dim
    return found


@given(data=st.data())
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_engine_loads_what_another_has_saved(hops: Hops, data: st.DataObject) -> None:
    """From JAX over TensorFlow and torch to JAX, on any meshes, each shard has its bits, and each array its layout."""
    variables = data.draw(
        st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=5)
    )
    with tempfile.TemporaryDirectory() as folder:
        read = None
        for number, engine in enumerate(WAY):
            mesh = data.draw(st.sampled_from(MESHES))
            described = [
                (shape, dtype, data.draw(specs(shape, Mesh(None, mesh)))) for shape, dtype in variables
            ]
            write = f"{folder}/{number}"
            assert [] == hops.hop(engine, mesh=mesh, variables=described, read=read, write=write)
            read = write
