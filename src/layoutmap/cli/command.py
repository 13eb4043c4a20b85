"""The `layoutmap` command, as a console script and as `python -m layoutmap`."""

from __future__ import annotations

from layoutmap.cli import interrupts


def run() -> int:
    """Run the command line of this process and return the exit code."""
    interrupts.install_interrupt_handler()  # before the import below, which is slow and may be interrupted
    from layoutmap.cli.main import main

    return main()
