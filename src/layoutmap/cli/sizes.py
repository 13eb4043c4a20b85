"""Parse sizes of memory and files on the command line."""

from __future__ import annotations

import argparse
import re


def parse_size(text: str) -> int:
    """Return the number of bytes of a size such as "80GiB", or raise the error that argparse prints."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([KMGT])(i?)B", text)
    num_bytes = 0
    if found is not None:
        number, prefix, binary = found.groups()
        num_bytes = int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(prefix) + 1))
    if not num_bytes:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise argparse.ArgumentTypeError(
            f'{shown!r} is not a memory size; write a number and a unit (KB to TB, KiB to TiB), as in "80GiB"'
        )
    return num_bytes
