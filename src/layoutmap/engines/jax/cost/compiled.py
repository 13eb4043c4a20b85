"""A step as XLA's compiler makes it, for devices that need not be there: what the counted figures are held against."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import IO

from layoutmap.core.errors import EngineError
from layoutmap.cost.verified import TooLargeError
from layoutmap.engines.jax.cost.compiler import NO_DEVICES, environment
from layoutmap.engines.jax.cost.hlo import Compiled
from layoutmap.engines.jax.cost.targets import Target, target_named

_BETWEEN_SECONDS = 0.2
_MOST_SIGNS = 500  # of what XLA said
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])  # modules, and plugins, are found where they are found here
from layoutmap.engines.jax.cost.compiler import main
main(*sys.argv[2:])
"""


@dataclass(frozen=True)
class CompiledStep:
    """XLA's figures of a step, in bytes and of one device.

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


def compile_module(
    module: str, num_devices: int, target: str, on_wait: Callable[[], object] = lambda: None
) -> CompiledStep:
    """Have XLA compile a module, in a process of its own, which ends with this call however that ends.

    Args:
        module: The module, with layouts, as text.
        num_devices: The size of its mesh.
        target: What it is compiled for.
        on_wait: Called several times a second while XLA compiles.

    Raises:
        EngineError: There is no such target, its plugin is not installed, or XLA cannot compile the step.
    """
    chosen = target_named(target)
    text = module.encode()
    paths = json.dumps([str(path) for path in sys.path])
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, paths, target, str(num_devices), str(len(text))],
            env=os.environ | environment(chosen, num_devices),
            stdin=subprocess.PIPE,
            stdout=answer,
            stderr=said,
            start_new_session=True,  # Ctrl-C is for this process alone
        )
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it has ended, and says why
                process.stdin.write(text)
                process.stdin.flush()
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_BETWEEN_SECONDS)
                    break
                on_wait()
        finally:
            process.kill()
            process.wait()
            with suppress(BrokenPipeError):
                process.stdin.close()
        found = _read(answer)
        if process.returncode or not found:
            raise _failed(target, chosen, process.returncode, _read(said))
    made = json.loads(found)
    results = made["output_bytes"] - made["alias_bytes"]
    peak = made["argument_bytes"] + results + made["temp_bytes"]
    collectives = {Compiled(*each): calls for *each, calls in made["collectives"]}
    return CompiledStep(collectives, made["argument_bytes"], peak)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


_ERROR = re.compile(r"^[\w.]+(?:Error|Exception): (.*)$", re.MULTILINE)


def _failed(name: str, target: Target, code: int, text: str) -> EngineError:
    errors = _ERROR.findall(text) or text.splitlines() or ["nothing"]
    installed = {package: _version(package) for package in ("jaxlib", *target.packages)}
    facts = {
        "XLA said": errors[-1].strip()[:_MOST_SIGNS],
        "versions": ", ".join(f"{package} {found}" for package, found in installed.items()),
    }
    if "RESOURCE_EXHAUSTED" in facts["XLA said"]:
        return TooLargeError(
            f"the step does not fit the memory of {name!r}: XLA does not compile it",
            facts=facts,
            why="XLA for TPUs gives each array its place in memory while it compiles",
            fix="shard more, use a smaller batch or recompute activations; without verify you see what is counted",
            peak_bytes=_needed(facts["XLA said"]),
        )
    if -code in (signal.SIGKILL, signal.SIGTERM):
        return EngineError(
            f"XLA's compiler for {name!r} was ended by {signal.Signals(-code).name}",
            facts=facts,
            why="something else on this machine ended it; the system does so when no memory is left",
            fix="free memory on this machine, or compile a model with fewer layers",
        )
    if code < 0 or code == NO_DEVICES:
        return EngineError(
            f"XLA's compiler for {name!r} does not work",
            facts={"signal": signal.Signals(-code).name, **facts} if code < 0 else facts,
            why="it crashed" if code < 0 else "a plugin of JAX has to be for this jaxlib, and complete",
            fix=f'pip install --upgrade --force-reinstall "layoutmap[{target.extra or "jax"}]"',
        )
    return EngineError(
        f"XLA did not compile the step for {name!r}",
        facts=facts,
        why="XLA refused the module",
        fix='compare with target="cpu", and report the model',
    )


def _needed(said: str) -> int:
    """The first size in what XLA says: "Used 20.45G of 15.75G hbm", or "temporaries (28.00G) exceeds"."""
    found = re.search(r"\b([\d.]+)([KMGT])\b", said)
    return int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2]))) if found else 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "without a version"
