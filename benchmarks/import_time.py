"""Compare the time of `import layoutmap` with `import numpy`, which layoutmap imports only for arrays.

    python benchmarks/import_time.py --rounds 15

Each measurement is a fresh process. The time of a process that imports nothing is subtracted.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from measure import make_parser, run_rounds, time_call


def time_statement(statement: str) -> float:
    """Return the seconds that a fresh process takes for a statement."""
    return time_call(lambda: subprocess.run([sys.executable, "-c", statement], check=True))[0]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    statements = ("pass", "import numpy", "import layoutmap")
    times = run_rounds(statements, rounds, time_statement)
    nothing = statistics.median(times["pass"])
    print(f"{rounds} rounds, medians, less the {1000 * nothing:.0f} ms of a process that does nothing")
    for statement in statements[1:]:
        print(f"{statement:<18} {1000 * (statistics.median(times[statement]) - nothing):6.0f} ms")


if __name__ == "__main__":
    main()
