"""`python -m layoutmap`: the command line."""

import sys

from layoutmap.cli.command import run

if __name__ == "__main__":
    sys.exit(run())
