"""The laws of every engine, as tests: inherit them to test yours.

    class TestMyEngine(EngineContract):
        engine_name = "mine"

        def make_array(self, values): return mine.array(values)
        def get_device_values(self, array): return {shard.device: shard.numpy() for shard in array.shards}

The laws use the engine protocol, numpy, and hypothesis, and no framework. They need 8 devices, or the device that
`one_device` names, such as a machine's only GPU. If an engine runs in several processes, each process runs the tests
with the same hypothesis seed, and `gather_shards` joins their shards.
"""

from __future__ import annotations

from typing import Any

from layoutmap.core.old_names import warn_about_old_name
from layoutmap.testing.engine.cases import assert_same_bits, generate_values, list_all_specs
from layoutmap.testing.engine.computing import ComputingLaws
from layoutmap.testing.engine.creation import CreationLaws
from layoutmap.testing.engine.layouts import LayoutLaws
from layoutmap.testing.engine.shards import ShardLaws

__all__ = ["EngineContract", "assert_same_bits", "generate_values", "list_all_specs"]
_OLD_NAMES = {"all_specs": "list_all_specs", "random_values": "generate_values"}


class EngineContract(LayoutLaws, ShardLaws, CreationLaws, ComputingLaws):
    """The laws of engines. Inherit it, set the attributes, and define `make_array` and `get_device_values`.

    Attributes:
        engine_name: The engine's name.
        meshes: The meshes to try, each with at most 8 devices.
        dtypes: The element types to try.
        cannot_hold: Unsupported sharding specs on the mesh `x=2,y=4`, with a part of the error message.
        holds_any_device_order: Whether a mesh may list devices in any order. If not, the engine must refuse others.
        one_device: The device of all meshes, which then have dims of size 1. `None`: eight devices.
    """


def __getattr__(name: str) -> Any:
    if name not in _OLD_NAMES:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    warn_about_old_name(name, _OLD_NAMES[name])
    return globals()[_OLD_NAMES[name]]
