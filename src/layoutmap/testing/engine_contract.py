"""The laws of every engine, as tests: inherit them to test yours.

    class TestMyEngine(EngineContract):
        engine_name = "mine"

        def make_array(self, values): return mine.array(values)
        def device_values(self, array): return {shard.device: shard.numpy() for shard in array.shards}

The laws use the engine protocol, numpy and hypothesis, and no framework. They want 8 devices, or just the one that
`one_device` names, such as a machine's only GPU. Where an engine runs as several processes, each runs the tests, with
the same `hypothesis` seed, and `gathered` joins what they hold.
"""

from __future__ import annotations

from layoutmap.testing.engine.cases import all_specs, assert_same_bits, random_values
from layoutmap.testing.engine.computing import ComputingLaws
from layoutmap.testing.engine.creation import CreationLaws
from layoutmap.testing.engine.layouts import LayoutLaws
from layoutmap.testing.engine.shards import ShardLaws

__all__ = ["EngineContract", "all_specs", "assert_same_bits", "random_values"]


class EngineContract(LayoutLaws, ShardLaws, CreationLaws, ComputingLaws):
    """The laws of engines. Inherit it and set what is below.

    Attributes:
        engine_name: The engine's name.
        meshes: The grids to try; each needs at most 8 devices.
        dtypes: The element types to try.
        cannot_hold: Sharding specs on the mesh `x=2,y=4` that the engine cannot hold, each with words of its refusal.
        holds_any_device_order: Whether a mesh may name devices in any order; if not, the engine must refuse others.
        one_device: The name of a device that all grids are then on, each dim of size 1; `None`: eight devices.
    """
