"""`python -m layoutmap`: the command line."""

import sys

from layoutmap.cli import main

if __name__ == "__main__":
    sys.exit(main())
