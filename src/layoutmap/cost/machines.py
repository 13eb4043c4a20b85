"""Find machines by name: `h100:64` is in layoutmap's `machines.yaml`, and `mine.yaml:big:64` in the user's own file."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from layoutmap.core.arguments import as_int, describe_type
from layoutmap.core.errors import LayoutMapError, ScopeError, shorten_repr
from layoutmap.core.mesh import Mesh
from layoutmap.core.strict_yaml import read_yaml
from layoutmap.cost.machine import Device, Machine, Network

_NAMED = re.compile(
    r"(?:(?P<one>.+\.ya?ml)|(?:(?P<file>.+\.ya?ml):)?(?P<device>[^:]+)(?::(?P<count>[0-9]{1,7}))?)"
)
_DECIMAL = {"": 1, **{prefix: 1000**i for i, prefix in enumerate("KMGTP", 1)}}
_PREFIXES = _DECIMAL | {f"{prefix}i": 1024**i for i, prefix in enumerate("KMGTP", 1)}
_EXAMPLE = {"B": "80 GB", "B/s": "450 GB/s", "FLOP/s": "989 TFLOP/s"}
_KEYS = ("about", "memory", "memory_bandwidth", "flops", "fast", "slow", "sources")
_MOST = 10**18


def machine_named(name: str) -> Machine:
    """Return the machine that a text such as `"h100:64"` names.

    Args:
        name: `"h100:64"` for 64 devices of layoutmap's own file, `"mine.yaml:big:64"` for a device that your file
            describes, or `"mine.yaml"` for the only device in your file. Without a number, the machine has one device.

    Raises:
        LayoutMapError: There is no such device, or the file does not have the form of `machines.yaml`.

    Example:
        >>> machine_named("h100:64").device.about
        'NVIDIA H100 SXM, 80 GB'
    """
    found = _NAMED.fullmatch(name)
    if found is None or (found["count"] and not int(found["count"])):
        raise LayoutMapError(
            f"on={name!r} does not name a machine",
            why="the name of a machine is a kind of device and a number of devices",
            fix="write it as in h100:64, or mine.yaml:my_device:64 with your own file",
        )
    file, wanted = found["one"] or found["file"], found["device"]
    devices = _read_device_descriptions(file) if file else load_built_in_devices()
    if found["one"]:
        wanted = next(iter(devices)) if len(devices) == 1 else ""
    device = devices.get(wanted) or devices.get(wanted.lower())
    if device is None:
        near = difflib.get_close_matches(wanted.lower(), devices, 1)
        raise LayoutMapError(
            f"on={name!r}: "
            f"{'the name does not say which device of the file' if found['one'] else f'there is no device {wanted!r}'}",
            facts={"devices": ", ".join(devices)},
            why=f"{file} describes several devices"
            if found["one"]
            else f"{file or 'layoutmap'} has no such device",
            fix=f"name one of them, as in on={f'{name}:{next(iter(devices))}'!r}"
            if found["one"]
            else f"did you mean {near[0]!r}?"
            if near
            else "describe the device in a file, as in on='mine.yaml:my_device:64'",
        )
    return Machine(device, int(found["count"] or 1))


def resolve_machine(on: Any, mesh: Mesh | None, caller: str = "") -> Machine:
    """Return the machine `on`, or the machine with this name. Without a number, it has as many devices as the mesh.

    Raises:
        LayoutMapError: There is no such machine, or its number of devices differs from the mesh's.
    """
    if not isinstance(on, str | Machine):
        raise LayoutMapError(
            f"{caller}on={shorten_repr(on)} does not name a machine",
            why=f"it is {describe_type(on)}",
            fix='write it as in on="h100:64"',
        )
    machine = machine_named(on) if isinstance(on, str) else on
    if isinstance(on, str) and not re.search(r":[0-9]+$", on):
        if mesh is None:
            raise ScopeError(
                f"{caller}on={on!r} has no number of devices",
                why="without mesh=, the search tries mesh shapes for that number of devices",
                fix=f"add the number, as in on='{on}:8', or pass a mesh",
            )
        return Machine(machine.device, mesh.size)
    if mesh is not None and machine.num_devices != mesh.size:
        raise LayoutMapError(
            f"on={str(on)!r}: the machine has {machine.num_devices:,} devices, but the mesh has {mesh.size:,}",
            facts={"mesh": str(mesh)},
            why="each device of the machine is at one position of the mesh",
            fix=f"use {str(on).rpartition(':')[0]}:{mesh.size}, or a mesh of {machine.num_devices:,} devices",
        )
    return machine


@functools.cache
def load_built_in_devices() -> Mapping[str, Device]:
    """Return a dict from name to device, with all devices in layoutmap's own file.

    Example:
        >>> list(load_built_in_devices())
        ['h100', 'h200', 'b200', 'a100', 'v5e', 'v5p', 'v6e']
    """
    text = files("layoutmap.cost").joinpath("machines.yaml").read_text(encoding="utf-8")
    return parse_devices(text, "machines.yaml")


def _read_device_descriptions(path: str) -> Mapping[str, Device]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LayoutMapError(
            f"{path} cannot be read", why=str(error), fix="name a UTF-8 file that describes devices"
        ) from error
    return parse_devices(text, path)


def parse_devices(text: str, where: str) -> Mapping[str, Device]:
    """Return a dict from name to device, of all devices in a YAML text. `where` names the text in messages.

    Raises:
        LayoutMapError: The text does not have the form of `machines.yaml`.
    """
    top = _DeviceFileFields(read_yaml(text, where), where, ("version", "devices"))
    if top.data["version"] != 1:
        raise _make_file_error(
            where,
            f"version {shorten_repr(top.data['version'])} is not known",
            "this layoutmap reads version 1",
        )
    devices = _DeviceFileFields(top.data["devices"], f"{where}: devices", ()).data
    return {name: _parse_device(name, data, f"{where}: {name}") for name, data in devices.items()}


class _DeviceFileFields:
    """Mapping in a file of devices. Unknown and missing keys raise an error, and methods return checked values."""

    def __init__(self, data: Any, where: str, needed: tuple[str, ...], optional: tuple[str, ...] = ()):
        if not isinstance(data, dict):
            raise _make_file_error(where, "the value is not a mapping", f"it is {shorten_repr(data)}")
        self.data, self._where = cast("dict[Any, Any]", data), where
        known = (*needed, *optional)
        for key in self.data:
            if (known and key not in known) or not isinstance(key, str):
                near = difflib.get_close_matches(str(key), known, 1)
                fix = f"did you mean {near[0]!r}?" if near else "delete the key"
                raise _make_file_error(
                    where, f"key {shorten_repr(key)} is not known", f"the keys are {', '.join(known)}", fix
                )
        for key in needed:
            if key not in self.data:
                raise _make_file_error(
                    where,
                    f"the key {key!r} is missing",
                    "every device needs this key" if key in _KEYS else "",
                )

    def read_text(self, key: str, default: str | None = None) -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise _make_file_error(self._where, f"{key} is not text", f"its value is {shorten_repr(value)}")
        return value

    def read_number(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key, default)
        number = as_int(value)
        if number is None or not (0 if default == 0 else 1) <= number < _MOST:
            raise _make_file_error(
                self._where, f"{key} is not a number of devices", f"its value is {shorten_repr(value)}"
            )
        return number

    def read_quantity(self, key: str, unit: str) -> float:
        value = self.data[key]
        found = isinstance(value, str) and re.fullmatch(
            r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([KMGTP]i?|)" + re.escape(unit), value
        )
        number = float(found[1]) * _PREFIXES[found[2]] if found else 0.0
        if not 0 < number < _MOST * 1000:
            raise _make_file_error(
                self._where,
                f"{key} is not a positive number with the unit {unit}",
                f"its value is {shorten_repr(value)}",
                f"write it as in {key}: {_EXAMPLE[unit]}",
            )
        return number


def _make_file_error(
    where: str, what: str, why: str, fix: str = "write it as in machines.yaml of layoutmap"
) -> LayoutMapError:
    return LayoutMapError(f"{where}: {what}", why=why, fix=fix)


def _parse_device(name: str, data: Any, where: str) -> Device:
    fields = _DeviceFileFields(data, where, _KEYS[1:-1], ("about", "sources"))
    flops = _DeviceFileFields(fields.data["flops"], f"{where}.flops", ())
    fast = _DeviceFileFields(
        fields.data["fast"], f"{where}.fast", ("name", "bandwidth", "devices"), ("ring_from",)
    )
    slow = _DeviceFileFields(fields.data["slow"], f"{where}.slow", ("name", "bandwidth"))
    sources: Any = fields.data.get("sources") or []
    if not isinstance(sources, list) or not all(isinstance(each, str) for each in cast("list[Any]", sources)):
        raise _make_file_error(
            where, "the key 'sources' is not a list of texts", f"it is {shorten_repr(cast('Any', sources))}"
        )
    if not flops.data:
        why = "the time of a step follows from the FLOP rate of each element type"
        raise _make_file_error(where, "flops lists no element type", why)
    return Device(
        name,
        fields.read_text("about", name),
        int(fields.read_quantity("memory", "B")),
        fields.read_quantity("memory_bandwidth", "B/s"),
        {dtype: flops.read_quantity(dtype, "FLOP/s") for dtype in flops.data},
        Network(
            fast.read_text("name"), fast.read_quantity("bandwidth", "B/s"), fast.read_number("ring_from", 0)
        ),
        Network(slow.read_text("name"), slow.read_quantity("bandwidth", "B/s")),
        fast.read_number("devices"),
        tuple(cast("list[str]", sources)),
    )
