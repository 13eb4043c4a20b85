"""Devices are simulated by one call on each framework, before or after it is imported, and never too late in silence.

Each program is a process that has no variable set but those that a framework prints less with.
"""

from __future__ import annotations

import os

import forked
import pytest
from engines.fresh_process import run

PROCESSES = ("jax", "tensorflow", "torch")
pytestmark = pytest.mark.every_case
RUNNING = os.environ.get("LAYOUTMAP_TEST_PROCESS", "")
PLAIN = {
    **dict.fromkeys(("KERAS_BACKEND", "XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")),
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

USE = """
import keras
import layoutmap as lm

layout_map = lm.LayoutMap("batch=2,model=3", {r"up\\.kernel": (None, "model")}, rest="replicated")
model = layout_map.build(lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="up")]))
print(model.layers[0].kernel.layout, len(lm.create_mesh("x=-1").devices))
lm.simulate_devices(6)  # as there are
try:
    lm.simulate_devices(8)
except lm.EngineError as error:
    print(error)
"""


@pytest.mark.parametrize("when", ["before it is imported", "after"])
@pytest.mark.parametrize("engine", [RUNNING or "jax"])
def test_devices_are_simulated_until_the_framework_starts(engine, when):
    """A model is built on them; then as many again are well, and another number is refused with what to do."""
    text = "import layoutmap as lm; lm.simulate_devices(6)\n" + USE
    settings = PLAIN | {"KERAS_BACKEND": engine}
    done = (
        run(text, settings) if when != "after" else forked.run(f"import keras; {text}", environment=settings)
    )

    assert 0 == done.returncode, done.stderr[-3000:]
    layout, refused, *_ = done.stdout.splitlines()
    assert "(unsharded, model) 6" == layout
    assert refused.startswith("8 devices cannot be simulated: ")
    assert "  devices  CPU:0, CPU:1, CPU:2, CPU:3, CPU:4, CPU:5\n" in done.stdout
    assert done.stdout.endswith("call lm.simulate_devices(8) right after the imports\n")


if RUNNING in ("", "jax"):

    def test_a_call_counts_more_than_a_variable():
        """The last number that was asked for is that of the devices, and they are the default ones."""
        text = "import layoutmap as lm; [lm.simulate_devices(n, engine='jax') for n in (3, 5)]\n"
        done = run(
            f"{text}import jax; print(jax.device_count())",
            {**PLAIN, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        )

        assert (0, "5\n") == (done.returncode, done.stdout), done.stderr

    def test_a_framework_that_has_started_says_so():
        """Also where it has fewer devices."""
        text = "import jax, layoutmap as lm; jax.devices(); lm.simulate_devices(8)"
        done = forked.run(text, environment={**PLAIN, "JAX_PLATFORMS": "cpu"})

        assert 1 == done.returncode
        assert (
            """8 devices cannot be simulated: JAX has started
  devices  CPU:0
  why      the number of devices is fixed when the framework starts, at the first array or query for devices
  fix      restart Python, and call lm.simulate_devices(8) right after the imports"""
            in done.stderr
        )


if RUNNING == "torch":

    def test_processes_of_torch_are_no_simulation():
        """In one of several, or where there is a process group, the call is refused: each process is a device."""
        text = "import torch, layoutmap as lm; lm.simulate_devices(8)"
        done = forked.run(text, environment={**PLAIN, "RANK": "0", "WORLD_SIZE": "2"})

        assert 1 == done.returncode
        assert "8 devices cannot be simulated: this program is one of 2 processes" in done.stderr
