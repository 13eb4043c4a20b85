"""Compile or partition a step with XLA for devices that need not exist."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from layoutmap.core.errors import EngineError
from layoutmap.cost.jax.compiler import make_compiler_environment
from layoutmap.cost.jax.compiler_process import NO_DEVICES, CompilerProcess
from layoutmap.cost.jax.hlo import CompiledCollective, count_compiled_collectives
from layoutmap.cost.jax.partitioner import ENVIRONMENT
from layoutmap.cost.jax.targets import CompileTarget, find_target
from layoutmap.cost.verified import StepTooLargeError

_MAX_MESSAGE_LENGTH = 500  # in characters; the rest of XLA's message is not shown


@dataclass(frozen=True)
class CompiledStep:
    """Step that XLA has compiled: its module, and its memory in bytes per device."""

    text: str  # HLO of the compiled module
    argument_bytes: int
    peak_bytes: int  # peak of arguments, results without a donated argument, and temporary buffers

    @property
    def collectives(self) -> Mapping[CompiledCollective, int]:
        """Number of calls of each collective in the compiled module."""
        return count_compiled_collectives(self.text)

    @property
    def sent_by_kind(self) -> dict[str, int]:
        """Dict from kinds of collectives to the bytes that each device sends in a step with ring algorithms."""
        found: dict[str, int] = {}
        for each, number in self.collectives.items():
            found[each.kind] = found.get(each.kind, 0) + each.sent_bytes * number
        return found


def compile_modules(
    modules: Sequence[bytes], num_devices: int, target: str, on_wait: Callable[[], object] = lambda: None
) -> list[CompiledStep]:
    """Compile modules for `target` in separate processes, which end with this call, and return the compiled steps."""
    chosen = find_target(target)
    answers = _run_compiler_processes(
        f"{__package__}.compiler",
        [(module, (target, str(num_devices))) for module in modules],
        make_compiler_environment(chosen, num_devices),
        (target, chosen),
        on_wait,
    )
    return [_make_compiled_step(**json.loads(each)) for each in answers]


def _make_compiled_step(
    text: str, argument_bytes: int, output_bytes: int, alias_bytes: int, temp_bytes: int
) -> CompiledStep:
    return CompiledStep(text, argument_bytes, argument_bytes + output_bytes - alias_bytes + temp_bytes)


def partition_modules(
    modules: Sequence[bytes], num_devices: int, on_wait: Callable[[], object] = lambda: None
) -> list[str]:
    """Run XLA's partitioner on modules in separate processes, which end with this call, and return their new texts."""
    requests = [(module, (str(num_devices),)) for module in modules]
    return _run_compiler_processes(
        f"{__package__}.partitioner", requests, ENVIRONMENT, ("cpu", find_target("cpu")), on_wait
    )


def _run_compiler_processes(
    python_module: str,
    requests: Sequence[tuple[bytes, tuple[str, ...]]],
    environment: Mapping[str, str],
    named_target: tuple[str, CompileTarget],
    on_wait: Callable[[], object],
) -> list[str]:
    """Run `main` of a Python module in one process per request, all at once, and return their answers."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(closing(CompilerProcess(python_module, arguments, module, environment)))
            for module, arguments in requests
        ]
        found: list[str] = []
        for each in running:
            status, answer, said = each.wait_for_result(on_wait)
            if status or not answer:
                raise _make_compile_error(*named_target, status, said)
            found.append(answer)
        return found


_ERROR = re.compile(r"^[\w.]+(?:Error|Exception): (.*)$", re.MULTILINE)


def _make_compile_error(
    target_name: str, target: CompileTarget, exit_status: int, stderr_text: str
) -> EngineError:
    errors = _ERROR.findall(stderr_text) or stderr_text.splitlines() or ["nothing"]
    installed = {package: _get_package_version(package) for package in ("jaxlib", *target.packages)}
    facts = {
        "XLA said": errors[-1].strip()[:_MAX_MESSAGE_LENGTH],
        "versions": ", ".join(f"{package} {found}" for package, found in installed.items()),
    }
    if "RESOURCE_EXHAUSTED" in facts["XLA said"]:
        return StepTooLargeError(
            f"the step does not fit the memory of {target_name!r}, so XLA cannot compile it",
            facts=facts,
            why="XLA for TPUs allocates all arrays while it compiles",
            fix="shard more, use a smaller batch, or recompute activations; leave verify out for an estimate",
            peak_bytes=_parse_needed_bytes(facts["XLA said"]),
        )
    if -exit_status in (signal.SIGKILL, signal.SIGTERM):
        return EngineError(
            f"XLA's compiler for {target_name!r} was ended by {signal.Signals(-exit_status).name}",
            facts=facts,
            why="another program on this machine ended it; the system does so when it runs out of memory",
            fix="free memory on this machine, or compile a model with fewer layers",
        )
    if exit_status < 0 or exit_status == NO_DEVICES:
        return EngineError(
            f"XLA's compiler for {target_name!r} does not work",
            facts={"signal": signal.Signals(-exit_status).name, **facts} if exit_status < 0 else facts,
            why="the compiler crashed"
            if exit_status < 0
            else "JAX's plugin is incomplete or does not match this jaxlib",
            fix=f'pip install --upgrade --force-reinstall "layoutmap[{target.extra or "jax"}]"',
        )
    return EngineError(
        f"XLA did not compile the step for {target_name!r}",
        facts=facts,
        why="XLA refused the module of the step",
        fix='try target="cpu", and report this to layoutmap with the model',
    )


def _parse_needed_bytes(message: str) -> int:
    """Return the first size in a message such as "Used 20.45G of 15.75G hbm" in bytes, or 0 if it has none."""
    found = re.search(r"\b([\d.]+)([KMGT])\b", message)
    return int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2]))) if found else 0


def _get_package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "without a version"
