"""Depthwise convolutions whose kernels are sharded over their channels, on JAX's CPU devices.

XLA was seen to end a process at one ("free(): invalid pointer"). Nobody could show it again with jax 0.10 (decision 0028),
so no plan refuses them; a process that ends here says which one it was.
"""

import os
import subprocess
import sys
import textwrap

import pytest

PROCESSES = ("jax",)

PROGRAM = textwrap.dedent("""
    import sys
    import keras
    import numpy as np
    import layoutmap as lm

    L = keras.layers
    LAYERS = {
        "DepthwiseConv2D": lambda: L.DepthwiseConv2D(3, padding="same", name="c"),
        "DepthwiseConv1D": lambda: L.DepthwiseConv1D(3, name="c"),
        "SeparableConv2D": lambda: L.SeparableConv2D(16, 3, name="c"),
        "Conv2D": lambda: L.Conv2D(16, 3, groups=4, name="c"),
    }
    kind = sys.argv[1]
    shape = (8, 16) if kind.endswith("1D") else (8, 8, 16)
    axes = [None] * (len(shape) - 1) + ["model", None]

    def make():
        model = keras.Sequential([keras.Input(shape), LAYERS[kind](), L.Flatten(), L.Dense(1, name="d")])
        model.compile(keras.optimizers.SGD(1e-2), "mse")
        return model

    random = np.random.default_rng(0)
    batch = random.normal(size=(4, *shape)).astype("float32"), random.normal(size=(4, 1)).astype("float32")
    rules = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), {r"c\\..*kernel": axes})
    rules[r"d\\.kernel"] = (None, None)
    rules[r".*\\.bias"] = (None,)
    lm.check_parity(make, rules, batch, batch_dim="batch")
    print("trained")
""")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["DepthwiseConv2D", "DepthwiseConv1D", "SeparableConv2D", "Conv2D"])
def test_it_trains_as_on_one_device(kind):
    """The process lives, and three steps give the numbers of one device."""
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], env=environment, capture_output=True, text=True, timeout=280
    )

    assert (0, "trained\n") == (run.returncode, run.stdout), run.stderr
