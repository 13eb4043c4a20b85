"""`python -m layoutmap`: the command line."""

import sys

from layoutmap.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
