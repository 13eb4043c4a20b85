"""How long `import layoutmap` takes, compared with `import numpy`, which it loads only when arrays come in.

    python benchmarks/import_time.py --rounds 15

Each measurement is a fresh process; the time of a process that imports nothing is taken off.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def seconds(statement: str) -> float:
    """Return how long a fresh process takes for a statement."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    statements = ("pass", "import numpy", "import layoutmap")
    times: dict[str, list[float]] = {statement: [] for statement in statements}
    for _ in range(rounds):
        for statement in statements:
            times[statement].append(seconds(statement))
    nothing = statistics.median(times["pass"])
    print(f"{rounds} rounds, medians, less the {1000 * nothing:.0f} ms of a process that does nothing")
    for statement in statements[1:]:
        print(f"{statement:<18} {1000 * (statistics.median(times[statement]) - nothing):6.0f} ms")


if __name__ == "__main__":
    main()
