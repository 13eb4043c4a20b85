"""Run a separate process that compiles one module, and ends at the latest when its parent ends.

The process is separate because the number of simulated CPU devices and JAX's plugins are fixed when JAX starts, and
because a compiler may crash. The module is a file in the process's folder. Its stdin is a pipe that closes when the
parent ends, and it writes its answer to stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

MODULE = "module"  # name of the file with the module, in the folder of the process
_ANSWER, _SAID = "answer", "said"
NO_DEVICES = 3  # exit status if the target devices cannot be described
_BETWEEN_SECONDS = 0.2
_FIRST_SECONDS = 0.01
_BETWEEN_PRINTS = 0.005
_START = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])  # find the same modules and plugins as the parent
importlib.import_module(sys.argv[2]).main(*sys.argv[3:])
"""


class CompilerProcess:
    """Process that compiles or partitions one module. Its owner must close it."""

    def __init__(self, name: str, arguments: tuple[str, ...], module: bytes, environment: Mapping[str, str]):
        self._folder = tempfile.TemporaryDirectory(prefix="layoutmap-")
        folder = Path(self._folder.name)
        (folder / MODULE).write_bytes(module)
        paths = json.dumps([os.path.abspath(path) for path in sys.path])
        with (folder / _ANSWER).open("wb") as answer, (folder / _SAID).open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, paths, name, *arguments],
                env=os.environ | dict(environment),
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=answer,
                stderr=said,
                start_new_session=True,  # Ctrl-C must interrupt only the parent process
            )

    def wait_for_result(self, on_wait: Callable[[], object] = lambda: None) -> tuple[int, str, str]:
        """Wait for the process, calling `on_wait` meanwhile, and return its exit status, answer, and stderr output."""
        seconds = _FIRST_SECONDS
        while True:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                return self._process.returncode, self._read_file(_ANSWER), self._read_file(_SAID)
            seconds = min(2 * seconds, _BETWEEN_SECONDS)
            on_wait()

    def _read_file(self, name: str) -> str:
        return Path(self._folder.name, name).read_text(errors="replace").strip()

    def close(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._folder.cleanup()


@contextmanager
def exit_after_answering_parent() -> Generator[Callable[[str], object]]:
    """Yield a function that sends an answer to the parent. This process ends when the block or the parent ends."""
    threading.Thread(target=_exit_when_parent_ends, daemon=True).start()
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # plugins print to stdout, which is for the answer, so send their output to stderr
        once = threading.Lock()

        def send_answer(text: str) -> None:
            once.acquire()  # only the first caller may send an answer; another thread waits here until the process ends
            answer.write(text)
            answer.flush()

        status = 1
        try:
            yield send_answer
            status = 0
        except TargetDevicesError as error:
            status = NO_DEVICES
            traceback.print_exception(error.__cause__)
        except Exception:
            traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)  # skip Python's shutdown, because plugins may hang or crash in it


def answer_from_dump_file(
    send_answer: Callable[[str], object],
    name_part: str,
    read_dump: Callable[[Path], str],
    # XLA cannot stop after a pass, so a thread ends the process once XLA has written the file (decisions/0156).
) -> None:
    """Start a thread that waits for XLA's file, answers with the result of `read_dump`, and ends the process."""

    def wait_for_dump() -> None:
        while True:
            for file in Path().iterdir():
                if name_part in file.name and (text := read_dump(file)):
                    send_answer(text)
                    os._exit(0)
            time.sleep(_BETWEEN_PRINTS)

    threading.Thread(target=wait_for_dump, daemon=True).start()


class TargetDevicesError(Exception):
    """Raised when JAX cannot describe the devices that a step is compiled for."""


def _exit_when_parent_ends() -> None:
    """Wait until stdin closes, which means that the parent process has ended, and then end this process."""
    while os.read(0, 1):
        pass
    os._exit(1)
