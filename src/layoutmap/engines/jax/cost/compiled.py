"""A step as XLA's compiler makes it, for devices that need not be there: what the counted figures are held against."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from layoutmap.core.errors import EngineError, listed
from layoutmap.engines.jax.cost.compiler import environment
from layoutmap.engines.jax.cost.hlo import Compiled, collectives
from layoutmap.engines.jax.cost.targets import TARGETS


@dataclass(frozen=True)
class CompiledStep:
    """What XLA says of a step, in bytes and of one device.

    Args:
        collectives: Its collectives, and how often each is called.
        argument_bytes: What it is given.
        peak_bytes: What a device holds at most: arguments, results that take no argument's place, and the rest.
    """

    collectives: Mapping[Compiled, int]
    argument_bytes: int
    peak_bytes: int

    @property
    def sent_by_kind(self) -> dict[str, int]:
        """Bytes that each device sends in a step, on rings, by kind of collective."""
        found: dict[str, int] = {}
        for each, number in self.collectives.items():
            found[each.kind] = found.get(each.kind, 0) + each.sent_bytes * number
        return found


def compile_module(module: str, num_devices: int, target: str) -> CompiledStep:
    """Have XLA compile a module, in a process of its own.

    Args:
        module: The module, with layouts, as text.
        num_devices: The size of its mesh.
        target: What it is compiled for.

    Raises:
        EngineError: There is no such target, its plugin is not installed, or XLA cannot compile the step.
    """
    if target not in TARGETS:
        raise EngineError(
            f"target {target!r} is not known",
            facts={"targets": ", ".join(TARGETS)},
            why="XLA compiles for one kind of device",
            fix='use one of these, or "cpu", which needs no plugin',
        )
    chosen = TARGETS[target]
    with tempfile.TemporaryDirectory(prefix="layoutmap-") as folder:
        file = Path(folder) / "step.mlir"
        file.write_text(module)
        source = str(Path(__file__).parents[4])
        paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "layoutmap.engines.jax.cost.compiler",
                target,
                str(num_devices),
                str(file),
            ],
            env=os.environ | environment(chosen, num_devices) | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        made = file.with_suffix(".json")
        if run.returncode or not made.exists():
            raise _failed(target, chosen.package, run.stderr)
        found = json.loads(made.read_text())
    results = found["output_bytes"] - found["alias_bytes"]
    peak = found["argument_bytes"] + results + found["temp_bytes"]
    return CompiledStep(collectives(found["hlo"]), found["argument_bytes"], peak)


def _failed(target: str, package: str, text: str) -> EngineError:
    lines = [line for line in text.splitlines() if "Error" in line] or text.strip().splitlines()
    missing = package and ("not implemented for" in text or "libtpu" in text)
    return EngineError(
        f"XLA did not compile the step for {target!r}",
        facts={"said": listed(lines[-1:]) if lines else "nothing"},
        why="the plugin of JAX for it is not installed" if missing else "XLA refused the module",
        fix=f"pip install {package}, which needs no such device"
        if missing
        else 'compare with target="cpu", and report the model',
    )
