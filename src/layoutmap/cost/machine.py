"""Describe a machine: the memory and speed of its devices, and their networks.

Devices are in the row-major order of the mesh. Each `node_size` consecutive devices form a node.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from layoutmap.core.mesh import Mesh
from layoutmap.cost.table import CollectiveKind


@dataclass(frozen=True, slots=True)
class Network:
    """Network that connects devices."""

    name: str
    bandwidth: float  # bytes per second that a device sends; on a ring, in both directions together
    # smallest number of devices of a ring; smaller groups are lines with half the bandwidth; 0: no rings
    ring_from: int = 0

    def get_bandwidth(self, num_devices: int) -> float:
        """Return the bytes per second that each device can send in a group of `num_devices` neighboring devices."""
        return self.bandwidth / 2 if num_devices < self.ring_from else self.bandwidth


@dataclass(frozen=True, slots=True)
class Device:
    """Type of device, with its memory, peak speeds, and networks."""

    name: str  # name of the device type, such as "h100"
    about: str
    memory_bytes: int
    memory_bandwidth: float  # bytes per second that a device reads or writes
    # FLOPs per second of matrix products, by the element type of the operands
    flops: Mapping[str, float] = field(hash=False)
    fast: Network  # network between the devices of a node
    slow: Network  # network between nodes
    node_size: int  # number of devices that share the fast network
    sources: tuple[str, ...] = ()  # documents with these numbers, with the documents' versions

    def get_flops_rate(self, dtype: str) -> float:
        """Return FLOPs per second for an element type, or the rate of the slowest type if `dtype` is unknown."""
        return self.flops.get(dtype) or min(self.flops.values())


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that run one collective together, in at most `nodes` nodes."""

    size: int
    nodes: int

    def make_subgroup(self, size: int) -> DeviceGroup:
        """Return a group of `size` of these devices in as few nodes as possible, or this group if `size` is 0."""
        return replace(self, size=size, nodes=-(-size // self.devices_per_node)) if size else self

    @property
    def devices_per_node(self) -> int:
        """Average number of the group's devices in one node, rounded down, but at least 1."""
        return max(1, self.size // self.nodes)


@dataclass(frozen=True, slots=True)
class Machine:
    """A number of devices of one type, with their networks."""

    device: Device
    num_devices: int

    def __str__(self) -> str:
        return f"{self.device.name}:{self.num_devices}"

    def group(self, mesh: Mesh, dims: Iterable[str]) -> DeviceGroup:
        """Return the numbers of devices and nodes that take part in one collective over the mesh dims `dims`.

        Example:
            >>> from layoutmap.core.mesh import Mesh
            >>> from layoutmap.cost.machines import machine_named
            >>> machine_named("h100:64").group(Mesh(None, "data=16,model=4"), ["data"])
            DeviceGroup(size=16, nodes=8)
        """
        inside = set(dims)
        steps: dict[bool, list[range]] = {True: [], False: []}
        for dim, stride in zip(mesh.mesh_dims, mesh.strides, strict=True):
            steps[dim.name in inside].append(range(0, dim.size * stride, stride))
        offsets = [sum(each) for each in itertools.product(*steps[True])]
        # How many nodes a group spans depends only on where it starts within a node, so try each start once.
        starts = {sum(each) % self.device.node_size for each in itertools.product(*steps[False])}
        nodes = max(
            len({(start + offset) // self.device.node_size for offset in offsets}) for start in starts
        )
        return DeviceGroup(len(offsets), nodes)

    def network_text(self, group: DeviceGroup) -> str:
        """Return a text that names the networks of a group, as in "NVLink among 8, InfiniBand beyond"."""
        fast, slow = self.device.fast.name, self.device.slow.name
        if group.nodes == 1:
            return fast
        return (
            slow if group.devices_per_node == 1 else f"{fast} among {group.devices_per_node}, {slow} beyond"
        )

    def estimate_seconds(self, kind: CollectiveKind, tensor_bytes: float, group: DeviceGroup) -> float:
        """Return the least seconds of one collective in a group, at the peak bandwidth of the slower network.

        Inside a node, each device forwards the parts of all devices of the node. Between nodes, all devices of a node
        send their own parts at once, so each byte leaves a node only once.
        """
        size, near, nodes = group.size, group.devices_per_node, group.nodes
        if size == 1:
            return 0.0
        fast, slow = self.device.fast.get_bandwidth(near), self.device.slow.bandwidth
        if kind == "permute":
            one_way = fast / 2 if 0 < self.device.fast.ring_from <= near else fast
            return tensor_bytes / (slow if nodes > 1 else one_way)
        if kind == "all_to_all":
            # In a bidirectional ring, a chunk travels over a quarter of the links on average, so multiply the time by
            # this number of links.
            hops = max(1.0, near / 4) if self.device.fast.ring_from else 1.0
            part = tensor_bytes / size
            return max(part * (near - 1) * hops / fast, part * (size - near) / slow)
        inside = tensor_bytes * (near - 1) / near / fast
        beyond = tensor_bytes * (nodes - 1) / nodes / (near * slow)
        return max(inside, beyond) * (2 if kind == "all_reduce" else 1)
