"""Print escaped text for people, and write files completely or not at all."""

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
from layoutmap.core.escaping import escape_text
from layoutmap.core.text_table import ALL_COLUMNS, wrap_lines

SUCCESS, PROBLEMS, FAILED, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141
"""Exit codes, documented in `layoutmap.cli.main`."""
_MIN_WIDTH = 60  # tables are never narrower; the lines wrap in a narrower terminal


def add_wide_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--wide`, which prints full lines, also if the terminal is narrower."""
    parser.add_argument(
        "--wide",
        action="store_true",
        help="print all columns of tables and all of each line, also where the terminal is narrower",
    )


def get_line_width(stream: TextIO | None, wide: bool) -> int | None:
    """Return the terminal's width in characters, or `None` if `wide` is true or the stream is not a terminal."""
    if wide or stream is None or stream.closed or not stream.isatty():
        return None
    return max(_MIN_WIDTH, shutil.get_terminal_size().columns)


def print_text(text: str, stream: TextIO | None, width: int | None = None) -> None:
    """Print lines with control and unencodable characters escaped, wrapped at `width` unless it is `None`.

    Raises:
        OSError: The stream is closed, or cannot be written to.
    """
    output = _require_open_stream(stream)
    encoding = output.encoding or "utf-8"
    lines = escape_text(text, keep="\n\t")
    lines = (
        lines.encode(encoding, "backslashreplace").decode(encoding).replace(ALL_COLUMNS, "--wide shows all")
    )
    output.write(wrap_lines(lines, width) + "\n")


def is_stdout_path(path: str) -> bool:
    """Return whether a path is `-` or another name of this process's stdout, such as `/dev/stdout`."""
    try:
        return path == "-" or os.path.samestat(os.stat(path), os.fstat(1))
    except OSError:
        return False


def check_output_path(option: str, path: str) -> None:
    """Raise if the path of an option is a folder or is in a folder that does not exist."""
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


def get_output_paths(options: Mapping[str, str | None]) -> dict[str, str]:
    """Return a dict from option to path, without `None`. Raise if a path cannot be written or two are equal."""
    files = {option: path for option, path in options.items() if path is not None}
    for option, path in files.items():
        check_output_path(option, path)
    if len({os.path.realpath(path) for path in files.values()}) < len(files):
        raise LayoutMapError(
            f"{' and '.join(files)} are both {next(iter(files.values()))!r}",
            why="the second file would overwrite the first",
            fix="name two different files",
        )
    return files


def write_files(texts: Mapping[str, str]) -> TextIO | None:
    """Write each text to its path. Return the stream for other output: stderr if a text is on stdout, else stdout."""
    out = sys.stdout
    for path, text in texts.items():
        write_text_file(path, text)
        if is_stdout_path(path):
            out = sys.stderr
        else:
            print_text(f"written: {path}", sys.stderr)
    return out


def write_text_file(path: str, text: str) -> None:
    """Write a text to a file completely or not at all, and keep the old file until the new one is complete.

    The new file keeps the mode and the owner of the one that it replaces. A symlink stays, and its target is replaced.
    A device or a pipe is written to as it is. `-` is stdout.

    Raises:
        LayoutMapError: The file cannot be written. The message has the system's reason.
        OSError: Stdout cannot be written to.
    """
    data = text.encode("utf-8", "backslashreplace")  # UTF-8 cannot encode unpaired surrogates, so escape them
    if is_stdout_path(path):
        return _write_to_stdout(data)
    target = os.path.realpath(path)
    try:
        old_stat = os.stat(target) if os.path.exists(target) else None
        if old_stat is None or stat.S_ISREG(old_stat.st_mode):
            with interrupts.allow_interrupts():
                _replace_file(target, data, old_stat)
        else:
            with open(target, "wb") as file:
                file.write(data)
    except OSError as error:
        raise LayoutMapError(
            f"{path} cannot be written",
            why=error.strerror or str(error),
            fix="name a writable file on a disk with free space; an existing file is unchanged",
        ) from error
    return None


def discard_unwritten_output(stream: TextIO | None) -> None:
    """Redirect a stream to the null device, so that Python does not report its unwritten output at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # pyright: ignore[reportOptionalMemberAccess]


def _require_open_stream(stream: TextIO | None) -> TextIO:
    """Return a stream, or raise an `OSError` if it is missing or closed."""
    if stream is None or stream.closed:
        raise OSError(errno.EBADF, "the output is closed")
    return stream


def _write_to_stdout(data: bytes) -> None:
    stream = _require_open_stream(sys.stdout)
    if stream.isatty() or not hasattr(stream, "buffer"):
        return print_text(data.decode(), stream)
    stream.flush()
    stream.buffer.write(data)
    return None


def _replace_file(target: str, data: bytes, old_stat: os.stat_result | None) -> None:
    if old_stat is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    new = os.path.join(os.path.dirname(target), f".layoutmap-{secrets.token_hex(8)}")
    mode = 0o666 if old_stat is None else stat.S_IMODE(old_stat.st_mode)
    file = None
    try:
        # No `with`: an interrupt at its end would leave the file open.
        file = open(new, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
        file.write(data)
        file.close()
        if old_stat is not None:
            # Copying the owner fails for another user's file, and is missing on Windows.
            with contextlib.suppress(PermissionError, AttributeError):
                os.chown(new, old_stat.st_uid, old_stat.st_gid)
            os.chmod(new, mode)
        os.replace(new, target)
    finally:
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk is already reported
                file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
