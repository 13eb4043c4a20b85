"""Output of the command line: text for people, escaped, and files that are written all or not at all."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Mapping
from typing import TextIO

from layoutmap.cli import interrupts
from layoutmap.core.errors import LayoutMapError
from layoutmap.core.escaping import escaped
from layoutmap.core.text_table import ALL_COLUMNS, wrapped

WELL, PROBLEMS, CANNOT, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141
"""The exit codes; `layoutmap.cli.main` says what they mean."""
_NARROWEST = 60  # columns of a terminal: in a narrower one lines are broken by the terminal


def add_wide_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--wide`, which prints full lines in a narrow terminal, too."""
    parser.add_argument(
        "--wide",
        action="store_true",
        help="print all columns of tables and all of each line, also where the terminal is narrower",
    )


def columns_of(stream: TextIO | None, wide: bool) -> int | None:
    """Return the width of the terminal in characters; `None`: lines keep their full width.

    Args:
        stream: The output. A file or a pipe gets full lines.
        wide: Whether a terminal gets full lines, too.
    """
    if wide or stream is None or stream.closed or not stream.isatty():
        return None
    return max(_NARROWEST, shutil.get_terminal_size().columns)


def say(text: str, stream: TextIO | None, width: int | None = None) -> None:
    """Print lines for people: control characters are escaped, and so is what the stream's encoding lacks.

    Args:
        text: The lines.
        stream: Where they go.
        width: How wide a line may be, before it is broken between words; `None`: as it is.

    Raises:
        OSError: The stream is closed, or cannot be written to.
    """
    there = _opened(stream)
    encoding = there.encoding or "utf-8"
    lines = escaped(text, keep="\n\t")
    lines = (
        lines.encode(encoding, "backslashreplace").decode(encoding).replace(ALL_COLUMNS, "--wide shows all")
    )
    there.write(wrapped(lines, width) + "\n")


def is_stdout(path: str) -> bool:
    """Whether a path is `-`, or another name of this process's stdout, as `/dev/stdout` is."""
    try:
        return path == "-" or os.path.samestat(os.stat(path), os.fstat(1))
    except OSError:
        return False


def check_target(option: str, path: str) -> None:
    """Refuse what no file can be written to, before the work is done that is to be written.

    Raises:
        LayoutMapError: It is a folder, or the folder that it would be in does not exist.
    """
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path) or not os.path.basename(path):
        why = "it is a folder"
    elif not os.path.isdir(folder):
        why = f"there is no folder {folder}"
    else:
        return
    raise LayoutMapError(
        f"{option} {path!r} cannot be written",
        why=why,
        fix='name a file in a folder that exists, or "-" for stdout',
    )


def check_targets(options: Mapping[str, str | None]) -> dict[str, str]:
    """Return the files that options name; refuse what cannot be written to, and one file for two options.

    Raises:
        LayoutMapError: See `check_target`; or two options name one file.
    """
    files = {option: path for option, path in options.items() if path is not None}
    for option, path in files.items():
        check_target(option, path)
    if len({os.path.realpath(path) for path in files.values()}) < len(files):
        raise LayoutMapError(
            f"{' and '.join(files)} are both {next(iter(files.values()))!r}",
            why="the second would replace the first",
            fix="name two files",
        )
    return files


def write_all(texts: Mapping[str, str]) -> TextIO | None:
    """Write texts to files by name; returns where tables for people go: stdout, or stderr if a text went to stdout."""
    out = sys.stdout
    for path, text in texts.items():
        write(path, text)
        if is_stdout(path):
            out = sys.stderr
        else:
            say(f"written: {path}", sys.stderr)
    return out


def write(path: str, text: str) -> None:
    """Write a text to a file, all of it or nothing: what was there stays until the new file is complete.

    The new file keeps the mode and the owner of the one that it replaces. A symlink stays, and its target is replaced.
    A device or a pipe is written to as it is. `-` is stdout.

    Raises:
        LayoutMapError: The file cannot be written; says the system's reason.
        OSError: Stdout cannot be written to.
    """
    data = text.encode("utf-8", "backslashreplace")  # half of a surrogate pair: in JSON, its escape
    if is_stdout(path):
        return _write_to_stdout(data)
    target = os.path.realpath(path)
    try:
        there = os.stat(target) if os.path.exists(target) else None
        if there is None or stat.S_ISREG(there.st_mode):
            with interrupts.raised():
                _replace(target, data, there)
        else:
            with open(target, "wb") as file:
                file.write(data)
    except OSError as error:
        raise LayoutMapError(
            f"{path} cannot be written",
            why=error.strerror or str(error),
            fix="name a file that you may write to, on a disk that has room; if it existed, it has not changed",
        ) from error
    return None


def drop_unwritten(stream: TextIO | None) -> None:
    """Let the interpreter end without a word about what a stream could not write."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # pyright: ignore[reportOptionalMemberAccess]


def _opened(stream: TextIO | None) -> TextIO:
    if stream is None or stream.closed:
        raise OSError(errno.EBADF, "the output is closed")
    return stream


def _write_to_stdout(data: bytes) -> None:
    stream = _opened(sys.stdout)
    if stream.isatty() or not hasattr(stream, "buffer"):
        return say(data.decode(), stream)
    stream.flush()
    stream.buffer.write(data)
    return None


def _replace(target: str, data: bytes, there: os.stat_result | None) -> None:
    if there is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    new = os.path.join(os.path.dirname(target), f".layoutmap-{secrets.token_hex(8)}")
    mode = 0o666 if there is None else stat.S_IMODE(there.st_mode)
    file = None
    try:
        # No `with`: between its last line and the file's end an interrupt would leave the file open.
        file = open(new, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
        file.write(data)
        file.close()
        if there is not None:
            with contextlib.suppress(PermissionError, AttributeError):  # of another user; not on Windows
                os.chown(new, there.st_uid, there.st_gid)
            os.chmod(new, mode)
        os.replace(new, target)
    finally:
        if file is not None:
            with contextlib.suppress(OSError):  # the disk is full: it has been raised above
                file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
