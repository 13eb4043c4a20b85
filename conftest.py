"""Sets up the test process: which files it runs, which framework it may load, and with how many devices.

`make test` runs one process for each of `frameworks.PROCESSES`, named by LAYOUTMAP_TEST_PROCESS. In such a process a
file of another one is not collected, and in `core` no framework can be imported, so every run shows that the core needs
none. Without the variable (`pytest tests/core/test_mesh.py`) everything that is asked for runs, on JAX.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import frameworks
import pytest
from cases import EVERYTHING, IS_QUICK, QUICK_XLA
from hypothesis import settings

RUNNING = os.environ.get("LAYOUTMAP_TEST_PROCESS", "")
NUM_DEVICES = 8
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Background jobs of a shell ignore Ctrl-C, and tests of interrupts raise it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
pytest_plugins = ["shared_queue"] if os.environ.get("LAYOUTMAP_TEST_QUEUE") else []

# The contracts ship with the package; their assertions are to say what they compared, as those of tests do.
_CONTRACTS = ("layoutmap.testing.adapter_contract", "layoutmap.testing.engine")
pytest.register_assert_rewrite(*_CONTRACTS, "checkpoint.chain_laws")

if RUNNING and RUNNING not in frameworks.PROCESSES:
    raise pytest.UsageError(
        f"LAYOUTMAP_TEST_PROCESS={RUNNING}: there are only {', '.join(frameworks.PROCESSES)}"
    )


class _Blocker(MetaPathFinder):
    """Refuses every framework, by name and with the fix."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        wanted = frameworks.FRAMEWORKS.get(fullname)
        is_question = (
            sys._getframe(2).f_globals.get("__name__") == "importlib.util"
        )  # whether it is installed
        if wanted and not is_question:
            raise ModuleNotFoundError(
                f"{fullname} was imported in the core test process, which a file gets that names no other; "
                f'import {fullname} at its top, or write PROCESSES = ("{wanted}",) there',
                name=fullname,
            )
        return None


def _set_up_devices() -> None:
    """Settings that a framework reads once, when it is first imported."""
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={NUM_DEVICES}".strip()
    if RUNNING == "jax" and IS_QUICK:  # most of the time goes into making programs that run once
        os.environ["XLA_FLAGS"] += f" {QUICK_XLA}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    os.environ["KERAS_BACKEND"] = RUNNING if RUNNING in ("tensorflow", "torch") else "jax"


_set_up_devices()
if RUNNING == "core":
    sys.meta_path.insert(0, _Blocker())
elif RUNNING:
    # The engine was asked for. If it does not load, that is a failure, and here, not a skip in each file.
    importlib.import_module(RUNNING)

settings.register_profile(
    "layoutmap",
    deadline=None,
    print_blob=True,
    max_examples=100 if EVERYTHING else 15 if RUNNING == "core" else 6,
)
settings.register_profile("ci", settings.get_profile("layoutmap"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "layoutmap")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of another process is none of ours, nor is one that tests share: it has no doctests to collect."""
    if collection_path.suffix == ".py" and not frameworks.is_collected(collection_path):
        return True
    if not RUNNING or not frameworks.is_collected(collection_path):
        return None
    return None if RUNNING in frameworks.processes_of(collection_path) else True


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """TensorFlow gets its devices before the first of its tests is imported: it makes none later."""
    if (RUNNING or frameworks.processes_of(module_path)[0]) == "tensorflow":
        _set_up_tensorflow()


@functools.cache
def _set_up_tensorflow() -> None:
    dtensor = importlib.import_module("tensorflow").experimental.dtensor
    dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=NUM_DEVICES)


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long what `make test` leaves out because it tries the same law on another backend, model or mesh.

    Marks beside the tests say otherwise: docs/decisions/0039-which-tests-run-at-each-change.md.
    """
    laws: dict[Path, dict[str, list[pytest.Item]]] = {}
    for item in items:
        law = item.nodeid.partition("[")[0]
        laws.setdefault(item.path, {}).setdefault(law, []).append(item)
    for path, of_file in laws.items():
        for item in _left_out(path, list(of_file.values())):
            item.add_marker(pytest.mark.long)


def _left_out(path: Path, laws: list[list[pytest.Item]]) -> Iterator[pytest.Item]:
    """The tests of a file that are long because others of it try the same; each of its laws is a list of cases."""
    if RUNNING == "core" or not frameworks.is_test(path):
        return
    first, *_ = frameworks.processes_of(path)
    elsewhere = path.parent.name in ("adapters", "checkpoint") and RUNNING not in ("", first)
    marked = [cases for cases in laws if cases[0].get_closest_marker("every_backend")]
    # TensorFlow traces each new function: a file without marks costs ten times as much there (decisions/0278).
    is_on_first = RUNNING == "tensorflow" or laws[0][0].get_closest_marker("one_backend")
    on_each = marked or ([] if is_on_first else laws[:1])
    for number, cases in enumerate(laws):
        if elsewhere and cases not in on_each:
            yield from cases
            continue
        chosen = any(case.get_closest_marker("long") for case in cases)  # by `few`, or the law is long
        if not chosen and not cases[0].get_closest_marker("every_case"):
            kept = _kept(cases, number)
            yield from (case for case in cases if case is not kept)


def _kept(cases: list[Any], number: int) -> pytest.Item:
    """The case of a law that `make test` tries: the first; of a contract, the last model, each law on another mesh."""
    contract = getattr(cases[0], "cls", None)
    if len(cases) > 1 and hasattr(contract, "models"):
        *_, plainest = contract().models()
        cases = [case for case in cases if case.callspec.params.get("name") == plainest] or cases
        return cases[number % len(cases)]
    return cases[0]


def pytest_collection_finish() -> None:
    """Let Python look for cycles seldom, since that takes a tenth of the time; tests that count objects collect."""
    gc.set_threshold(20_000, 50, 50)


def pytest_report_header(config: pytest.Config) -> str:
    return f"test process: {RUNNING or 'everything that is asked for'}"


@pytest.fixture(autouse=True)
def _doctest_namespace(doctest_namespace: dict[str, Any]) -> None:
    """What every docstring's example may use without importing it."""
    import layoutmap

    doctest_namespace["lm"] = layoutmap


@pytest.fixture(autouse=True, scope="module")
def _collect_only_what_a_file_makes() -> None:
    """`gc.collect()`, which Keras calls too, looks at each object of the frameworks otherwise: half a second each."""
    gc.collect()
    gc.freeze()
