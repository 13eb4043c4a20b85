"""Tell whether a person sees stderr."""

import sys


def is_watched() -> bool:
    """Return whether stderr is a terminal or a Jupyter notebook."""
    return sys.stderr.isatty() or type(sys.stderr).__module__ == "ipykernel.iostream"
