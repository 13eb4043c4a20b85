"""Detect whether stderr is interactive."""

import sys


def is_interactive() -> bool:
    """Return whether stderr is a terminal or a Jupyter notebook."""
    return sys.stderr.isatty() or type(sys.stderr).__module__ == "ipykernel.iostream"
