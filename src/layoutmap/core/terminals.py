"""Detect whether stderr is interactive."""

import sys


def is_stderr_interactive() -> bool:
    """Return whether stderr is shown to a person at once: it is a terminal or a Jupyter notebook."""
    return sys.stderr.isatty() or type(sys.stderr).__module__ == "ipykernel.iostream"
