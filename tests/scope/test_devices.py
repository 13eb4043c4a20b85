"""Meshes of devices that exist, and of devices that need not."""

import importlib.util
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from layoutmap.core.errors import EngineError, MeshError
from layoutmap.core.mesh import Mesh
from layoutmap.engines.checks import check_devices_are_simulated
from layoutmap.scope.devices import choose_engine_name, create_mesh, list_device_names, simulate_devices

PROCESSES = ("jax",)
pytestmark = pytest.mark.every_case

ALL = tuple(f"CPU:{i}" for i in range(8))


@pytest.fixture
def imported(monkeypatch):
    """Makes it look as if exactly these frameworks had been imported."""

    def pretend(*names, backend=None):
        for name in ("jax", "tensorflow", "torch", "keras"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        for name in names:
            monkeypatch.setitem(sys.modules, name, SimpleNamespace())
        if backend:
            keras = SimpleNamespace(config=SimpleNamespace(backend=lambda: backend))
            monkeypatch.setitem(sys.modules, "keras", keras)

    return pretend


@pytest.mark.parametrize(
    "dims", ["batch=512,model=8", {"batch": 512, "model": 8}, [("batch", 512), ("model", 8)]]
)
def test_sizes_alone_make_an_abstract_mesh(imported, dims):
    """A mesh of sizes needs no devices and no framework, whatever the sizes are."""
    imported()

    assert Mesh(None, [("batch", 512), ("model", 8)], "big") == create_mesh(dims, "big")


@pytest.mark.parametrize(
    "asked",
    [{"engine": "jax"}, {"engine": "jax", "device_type": "cpu"}, {"engine": "jax", "device_type": "CPU"}],
)
def test_an_engine_or_a_type_asks_for_real_devices(asked):
    """With an engine or a device type, the mesh is of the first devices there are."""
    assert Mesh(ALL[:6], [("x", 3), ("y", 2)], "m") == create_mesh([("x", 3), ("y", 2)], "m", **asked)


@pytest.mark.parametrize(("dims", "shape"), [("x=-1", (8,)), ("x=2,y=-1", (2, 4)), ("x=-1,y=8", (1, 8))])
def test_an_open_size_is_what_the_devices_leave(dims, shape):
    """A size of -1 becomes what the number of devices leaves for it."""
    mesh = create_mesh(dims, engine="jax")

    assert shape == mesh.shape
    assert mesh.devices == ALL


def test_given_devices_are_used_as_they_are():
    """Devices that are named need not exist, and keep their order."""
    names = ["TPU:5", "TPU:1", "TPU:2", "TPU:3"]

    assert Mesh(names, "x=2,y=2") == create_mesh("x=2,y=-1", devices=names)
    assert Mesh(names, "x=2,y=2") == create_mesh("x=2,y=2", devices=names, device_type="tpu")


@pytest.mark.parametrize(
    ("kind", "words", "asked"),
    [
        (MeshError, "the mesh needs 16 devices, but JAX has 8", {"mesh_dims": "x=16", "engine": "jax"}),
        (MeshError, "8 devices are not a multiple of 3", {"mesh_dims": "x=3,y=-1", "engine": "jax"}),
        (MeshError, "all have size -1", {"mesh_dims": "x=-1,y=-1", "engine": "jax"}),
        (EngineError, "no GPU devices", {"mesh_dims": "x=1", "engine": "jax", "device_type": "gpu"}),
        (EngineError, "no engine 'mxnet'", {"mesh_dims": "x=1", "engine": "mxnet"}),
        (MeshError, "device_type='CPU'", {"mesh_dims": "x=1", "devices": ["TPU:0"], "device_type": "CPU"}),
        (
            MeshError,
            "'TPU:0' does not exist|no TPU",
            {"mesh_dims": "x=1", "devices": ["TPU:0"], "engine": "jax"},
        ),
        (MeshError, "cannot have 1", {"mesh_dims": "x=2", "devices": ["CPU:0"]}),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(kind, words, asked):
    """A mesh that the machine does not have, or that contradicts itself, is refused, saying how."""
    with pytest.raises(kind, match=words):
        create_mesh(**asked)


@pytest.mark.parametrize("device_type", [None, "cpu"])
def test_too_few_devices_are_refused_with_what_helps_a_program_that_runs(device_type):
    """The number of devices is fixed once JAX has started, so the fix begins anew, with the call to make first."""
    with pytest.raises(MeshError) as refused:
        create_mesh("x=16", engine="jax", device_type=device_type)

    assert """\
the mesh needs 16 devices, but JAX has 8
  mesh     x=16
  devices  CPU:0, CPU:1, CPU:2, CPU:3, CPU:4, CPU:5, CPU:6, CPU:7
  why      each position of the mesh needs a device
  fix      restart Python and call lm.simulate_devices(16) before JAX starts, for as many devices of the CPU; \
or make the mesh smaller""" == str(refused.value)


def test_devices_are_listed():
    """The devices of an engine are listed by name, of one type or of the default one."""
    assert ALL == list_device_names("jax") == list_device_names(engine="jax", device_type="cpu")


def test_the_framework_in_use_is_the_default(imported):
    """Without an engine it is the framework that is imported, or the one that Keras runs on."""
    imported("jax")
    assert "jax" == choose_engine_name()
    imported("jax", backend="jax")
    assert "jax" == choose_engine_name()


def test_without_a_framework_in_use_one_must_be_named(imported, monkeypatch):
    """Where none is imported and several are installed, an open size is refused, and the fix says what to pass."""
    imported()
    monkeypatch.delenv("KERAS_BACKEND")
    for ask in (lambda: create_mesh("x=-1"), lambda: simulate_devices(8)):
        with pytest.raises(
            EngineError, match=r"no framework is imported[^$]*jax, tensorflow, torch[^$]*pass engine="
        ):
            ask()


def test_without_a_framework_in_use_it_is_the_one_that_will_be(imported, monkeypatch):
    """That of KERAS_BACKEND, or else the only one that is installed; but what is imported comes first."""
    imported()
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert "torch" == choose_engine_name()
    monkeypatch.delenv("KERAS_BACKEND")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec(name) if name == "jax" else None)
    assert "jax" == choose_engine_name()
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    imported("tensorflow")
    assert "tensorflow" == choose_engine_name()


@pytest.mark.parametrize(
    ("there", "is_well"),
    [
        (["CPU:0", "CPU:1"], True),
        (["CPU:2048", "CPU:2049"], True),  # of the second process of JAX
        (["CPU:0"], False),
        (["GPU:0", "GPU:1"], False),
    ],
)
def test_devices_that_are_there_already_are_simulated_ones_of_that_number(there, is_well):
    """As many devices of the CPU, whichever their numbers; accelerators are no simulation."""
    refused = nullcontext() if is_well else pytest.raises(EngineError, match="2 devices cannot be simulated")
    with refused:
        check_devices_are_simulated("JAX", 2, there)


@pytest.mark.parametrize("number", [0, -1, 2.0, True, None, "8"])
def test_what_is_no_number_of_devices_is_refused(number):
    """Before a framework is asked."""
    with pytest.raises(MeshError, match=r"devices cannot be simulated[^$]*simulate_devices\(8\)"):
        simulate_devices(number, engine="nosuch")


def test_a_backend_without_an_engine_is_named(imported):
    """Where Keras runs on a backend that has no engine, the error names it."""
    imported("jax", backend="openvino")
    with pytest.raises(EngineError, match="openvino"):
        choose_engine_name()
