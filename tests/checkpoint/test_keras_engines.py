"""A model goes from one backend of Keras to another, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import layoutmap as lm
from layoutmap.core.variables import Kind

MESHES = {"jax": "batch=2,model=4", "torch": "batch=1,model=8", "tensorflow": "batch=4,model=2"}
SOURCE = Path(lm.__file__).parents[1]


def losses(backend, directory, loaded, saved):
    """What a process printed that has loaded a step, saved it as another one and trained on."""
    arguments = [backend, MESHES[backend], str(directory), str(loaded), str(saved)]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("keras_engine_process.py"), *arguments],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == ended.returncode, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def values(directory, step):
    found = lm.describe(directory, step=step)
    return {path: found.read(path) for path, v in found.variables.items() if v.kind is not Kind.METRIC}


@pytest.mark.long
@pytest.mark.timeout(900)  # each process loads a framework
@pytest.mark.parametrize("backends", [("jax", "torch"), ("torch", "tensorflow", "jax")], ids="-".join)
def test_a_model_goes_from_backend_to_backend(backends, tmp_path):
    """Loaded on other backends and meshes, weights, slots and seeds have the same bits, and training goes on alike."""
    expected = losses(backends[0], tmp_path, "new", 0)
    first = values(tmp_path, 0)
    for number, backend in enumerate(backends[1:], 1):
        np.testing.assert_allclose(losses(backend, tmp_path, number - 1, number), expected, rtol=2e-5)
        found = values(tmp_path, number)
        np.testing.assert_equal(
            {p: v.astype("float64") for p, v in found.items()},
            {p: v.astype("float64") for p, v in first.items()},
        )
        floats = {path: value.dtype for path, value in first.items() if value.dtype.kind not in "iu"}
        assert floats == {path: found[path].dtype for path in floats}
