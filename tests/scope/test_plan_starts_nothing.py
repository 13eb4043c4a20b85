"""A plan touches nothing: the program that has made one starts its framework as that framework's documentation says.

Keras itself starts its backend for some models, such as those that are compiled, with or without this library; those
here are of the other kind.
"""

from __future__ import annotations

import os

import forked
import pytest

PROCESSES = ("jax", "tensorflow", "torch")
RUNNING = os.environ.get("LAYOUTMAP_TEST_PROCESS", "")

PLAN = """
import layoutmap as lm

def make_model():
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, name="d1"), keras.layers.Dropout(0.5), keras.layers.Dense(4)]
    )

def plans(make_model=make_model, devices=tuple(f"CPU:{i}" for i in range(8))):
    for mesh in (lm.Mesh(None, "x=2,y=4"), lm.Mesh(devices, "x=2,y=4"), lm.Mesh(devices[::-1], "x=8")):
        layout_map = lm.LayoutMap(mesh, {r"d1\\.(kernel|weight)": (None, mesh.dim_names)})
        yield lm.plan(make_model, layout_map, library=library)
"""

KERAS_ON_JAX = f"""
import keras
library = "keras"
{PLAN}
problems = [sorted({{p.kind for p in plan.problems if p.severity != "note"}}) for plan in plans()]
import jax
jax.config.update("jax_num_cpu_devices", 3)
jax.distributed.initialize("127.0.0.1:" + port, num_processes=1, process_id=0)
print(jax.device_count(), problems)
"""

NNX = f"""
import jax
from flax import nnx
library = "jax"

class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.d1, self.drop = nnx.Linear(8, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
{PLAN}
problems = [sorted({{p.kind for p in plan.problems if p.severity != "note"}}) for plan in plans(Model)]
jax.config.update("jax_num_cpu_devices", 3)
jax.distributed.initialize("127.0.0.1:" + port, num_processes=1, process_id=0)
print(jax.device_count(), problems)
"""

KERAS_ON_TENSORFLOW = f"""
import keras
library = "keras"
{PLAN}
import tensorflow as tf
from tensorflow.python.eager import core, execute
failing = core._status_to_exception, execute.execute
problems = [sorted({{p.kind for p in plan.problems if p.severity != "note"}}) for plan in plans()]
import layoutmap.engines.tensorflow.engine
assert failing == (core._status_to_exception, execute.execute)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
tf.experimental.dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=3)
print(len(tf.config.list_logical_devices("CPU")), problems)
"""

TORCH = f"""
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
library = "torch"
CLASSES = (torch.Tensor, torch.nn.Module, torch.nn.Parameter, DeviceMesh, DTensor, torch.Generator, torch, dist)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.d1 = torch.nn.Linear(64, 128)
{PLAN}
import layoutmap.scope.scope, layoutmap.adapters.torch, layoutmap.engines.torch.engine
before = [dict(vars(each)) for each in CLASSES]
problems = [sorted({{p.kind for p in plan.problems if p.severity != "note"}}) for plan in plans(Model)]
assert not dist.is_initialized()
assert before == [dict(vars(each)) for each in CLASSES]
assert lm.create_mesh("x=8", engine="torch").devices == tuple(f"CPU:{{i}}" for i in range(8))
assert not dist.is_initialized()
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + port, rank=0, world_size=1)
print(dist.get_world_size(), problems)
"""

EXPECTED = {
    "jax": "3 [['no rule'], ['no rule'], ['no rule']]",
    "tensorflow": "3 [['no rule', 'unsupported layout'], ['no rule', 'unsupported layout'], ['no rule']]",
    "torch": "1 [['no rule'], ['no rule'], ['no rule', 'unsupported layout']]",
}
PROGRAMS = {"jax": KERAS_ON_JAX, "tensorflow": KERAS_ON_TENSORFLOW, "torch": TORCH}
FREE_PORT = """
import socket
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
"""

COSTS = """
import jax, keras, optax
from flax import nnx
import layoutmap as lm

class Model(nnx.Module):
    def __init__(self):
        self.up, self.drop = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.drop(nnx.relu(self.up(x)))

def make_model():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="up"), keras.layers.Dropout(0.5)])

def attention():
    x = keras.Input((8, 8))
    return keras.Model(x, keras.layers.MultiHeadAttention(2, 4)(x, x))

layout_map = lm.LayoutMap("data=4,model=2", {r"up\\.kernel": (None, "model")})
batch = jax.ShapeDtypeStruct((8, 8), "float32")
for make, optimizer, library in ((Model, optax.adam(1e-3), "jax"), (make_model, "adam", "keras")):
    options = {"inputs": batch, "optimizer": optimizer, "library": library}
    lm.plan(make, layout_map, on="h100", batch_dim="data", verify="cpu", **options)
lm.search(make_model, batch, "h100:8", optimizer="adam", library="keras", tries=1)
sequences = jax.ShapeDtypeStruct((8, 8, 8), "float32")
lm.step_cost(attention, layout_map, batch_dim="data", inputs=sequences, library="keras")
from jax._src import xla_bridge
print(sorted(xla_bridge._backends))
"""


if RUNNING in ("", "jax"):

    def test_no_backend_is_started_after_a_cost():
        """Neither a plan with a cost, nor a search, nor a compiled step starts one in the user's process."""
        done = forked.run(COSTS, environment={"XLA_FLAGS": None, "JAX_PLATFORMS": None})

        assert (0, "[]") == (done.returncode, done.stdout.strip()), done.stderr


if RUNNING in ("", "jax"):

    def test_jax_is_initialized_after_a_plan_of_flax():
        """After plans of a module of flax.nnx, too."""
        done = forked.run(FREE_PORT + NNX, environment={"XLA_FLAGS": None})

        assert (0, EXPECTED["jax"]) == (done.returncode, done.stdout.strip()), done.stderr


@pytest.mark.parametrize("framework", [RUNNING or "jax"])
def test_a_framework_is_initialized_after_a_plan(framework):
    """After plans on abstract meshes and on devices, the framework starts as the program asks it to."""
    done = forked.run(FREE_PORT + PROGRAMS[framework], environment={"XLA_FLAGS": None})

    assert (0, EXPECTED[framework]) == (done.returncode, done.stdout.strip()), done.stderr
