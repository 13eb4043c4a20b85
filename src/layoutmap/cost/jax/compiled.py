"""A step as XLA's compiler makes it, for devices that need not be there: what the counted figures are held against."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from layoutmap.core.errors import EngineError
from layoutmap.cost.jax.compiler import environment
from layoutmap.cost.jax.compiler_process import NO_DEVICES, Asked
from layoutmap.cost.jax.hlo import Compiled, collectives
from layoutmap.cost.jax.partitioner import ENVIRONMENT
from layoutmap.cost.jax.targets import Target, target_named
from layoutmap.cost.verified import TooLargeError

_MOST_SIGNS = 500  # of what XLA said


@dataclass(frozen=True)
class CompiledStep:
    """XLA's figures of a step, in bytes and of one device.

    Args:
        text: The compiled module.
        argument_bytes: What it is given.
        peak_bytes: What a device holds at most: arguments, results that take no argument's place, and the rest.
    """

    text: str
    argument_bytes: int
    peak_bytes: int

    @property
    def collectives(self) -> Mapping[Compiled, int]:
        """The collectives of the compiled module, and how often each is called."""
        return collectives(self.text)

    @property
    def sent_by_kind(self) -> dict[str, int]:
        """Bytes that each device sends in a step, on rings, by kind of collective."""
        found: dict[str, int] = {}
        for each, number in self.collectives.items():
            found[each.kind] = found.get(each.kind, 0) + each.sent_bytes * number
        return found


def compile_modules(
    modules: Sequence[bytes], num_devices: int, target: str, on_wait: Callable[[], object] = lambda: None
) -> list[CompiledStep]:
    """Have XLA compile modules, each in a process of its own, which ends with this call however that ends.

    Args:
        modules: The modules, with layouts, as text or as MLIR's bytes.
        num_devices: The size of their mesh.
        target: What they are compiled for.
        on_wait: Called several times a second while XLA compiles.

    Raises:
        EngineError: There is no such target, its plugin is not installed, or XLA cannot compile one of them.
    """
    chosen = target_named(target)
    answers = _answers(
        f"{__package__}.compiler",
        [(module, (target, str(num_devices))) for module in modules],
        environment(chosen, num_devices),
        (target, chosen),
        on_wait,
    )
    return [_step(**json.loads(each)) for each in answers]


def _step(
    text: str, argument_bytes: int, output_bytes: int, alias_bytes: int, temp_bytes: int
) -> CompiledStep:
    return CompiledStep(text, argument_bytes, argument_bytes + output_bytes - alias_bytes + temp_bytes)


def partitioned(
    modules: Sequence[bytes], num_devices: int, on_wait: Callable[[], object] = lambda: None
) -> list[str]:
    """Return the texts of what XLA's partitioner makes of modules, each in a process of its own; see `compile_modules`.

    Args:
        modules: The modules, with layouts, as bytes of MLIR.
        num_devices: The size of their mesh.
        on_wait: Called several times a second until they are compiled.

    Raises:
        EngineError: XLA cannot partition one of them.
    """
    asked = [(module, (str(num_devices),)) for module in modules]
    return _answers(f"{__package__}.partitioner", asked, ENVIRONMENT, ("cpu", target_named("cpu")), on_wait)


def _answers(
    name: str,
    asked: Sequence[tuple[bytes, tuple[str, ...]]],
    environment: Mapping[str, str],
    target: tuple[str, Target],
    on_wait: Callable[[], object],
) -> list[str]:
    """Answers of processes that run at the same time."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(closing(Asked(name, arguments, module, environment)))
            for module, arguments in asked
        ]
        found: list[str] = []
        for each in running:
            status, answer, said = each.result(on_wait)
            if status or not answer:
                raise _failed(*target, status, said)
            found.append(answer)
        return found


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
