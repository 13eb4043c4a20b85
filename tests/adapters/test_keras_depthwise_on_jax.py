"""Depthwise convolutions with a kernel as large as their input: XLA ends the process on CPU devices (decision 0028)."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import layoutmap as lm

PROCESSES = ("jax",)
L = keras.layers

LAYERS = {
    "DepthwiseConv2D": (lambda: L.DepthwiseConv2D(4, name="c"), (4, 4, 8), (None, None, "model", None)),
    "DepthwiseConv1D": (lambda: L.DepthwiseConv1D(4, name="c"), (4, 8), (None, "model", None)),
    "SeparableConv2D": (lambda: L.SeparableConv2D(8, 4, name="c"), (4, 4, 8), (None, None, "model", None)),
    "Conv2D": (lambda: L.Conv2D(8, 4, groups=8, name="c"), (4, 4, 8), (None, None, None, "model")),
}
PROGRAM = """
import jax
import numpy as np

mesh = jax.make_mesh((2, 4), ("batch", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, None, "model"))
kernel = jax.device_put(np.ones((4, 4, 1, 8), "float32"), sharding)


@jax.jit
def convolve(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=8
    )


print(convolve(np.ones((4, 4, 4, 8), "float32"), kernel).shape)
"""


def rules(spec, mesh="batch=2,model=4", **options):
    return lm.LayoutMap(lm.create_mesh(mesh, **options), {r"c\.(depthwise_)?kernel": spec})


def cannot_run(make, shape, layout_map):
    plan = lm.plan(lambda: keras.Sequential([keras.Input(shape), make()]), layout_map)
    return [problem for problem in plan.problems if problem.kind == "unsupported"]


@pytest.mark.parametrize("name", LAYERS)
def test_the_plan_names_it(name):
    """An error for the kernel, with the axis to leave unsharded; none with that fix, or with a larger input."""
    make, shape, spec = LAYERS[name]
    (problem,) = cannot_run(make, shape, rules(spec))

    kernel = "c.depthwise_kernel" if name.startswith("Sep") else "c.kernel"
    assert (kernel, "error") == (problem.subject, problem.severity)
    assert f"leave axis {spec.index('model')} of the kernel unsharded" == problem.fix
    assert [] == cannot_run(make, shape, rules([None] * len(spec)))
    assert [] == cannot_run(make, (*(n + 1 for n in shape[:-1]), shape[-1]), rules(spec))


def test_it_is_of_cpu_devices():
    """A mesh of other devices has no such problem."""
    make, shape, spec = LAYERS["DepthwiseConv2D"]
    gpus = [f"GPU:{number}" for number in range(8)]

    assert [] == cannot_run(make, shape, rules(spec, devices=gpus))
    assert 1 == len(cannot_run(make, shape, rules(spec, devices=[f"CPU:{number}" for number in range(8)])))


@pytest.mark.filterwarnings("ignore:layout map:layoutmap.core.errors.LayoutMapWarning")
def test_the_fix_runs():
    """With the axis unsharded the layer computes what it computes on one device."""
    make, shape, spec = LAYERS["DepthwiseConv2D"]
    x = np.arange(4 * 128, dtype="float32").reshape(4, *shape) / 100

    def model():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input(shape), make()])

    expected = np.asarray(model()(x))
    actual = np.asarray(rules([None] * len(spec)).build(model)(x))

    np.testing.assert_allclose(expected, actual, rtol=1e-5)


@pytest.mark.long
def test_xla_still_ends_the_process():
    """Where this fails, XLA is fixed: delete `backends/jax_unsupported.py`, `Unsupported.device_type` and this file."""
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=250
    )

    assert run.returncode < 0, "XLA compiles it now: the limit can be deleted"
    assert "free(): invalid pointer" in run.stderr
