"""Attack checkpoints by killing runs that save, forging manifests, and damaging files, and count the harmless ones.

    python tools/attacks.py                        500 kills, 1,000 manifests, 300 files: an hour on a busy machine
    python tools/attacks.py --share 0.1            a tenth of each
    python tools/attacks.py "JAX, 2 processes"     one of them

The laws are those of tests/checkpoint: test_killed_runs.py, test_forged_manifests.py and test_drawn_damage.py; there
each has a few cases. Seeds count up from `--seed`. The first harm ends the command with its traceback and exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
RUNS = 10  # in one directory


@dataclass(frozen=True)
class Attack:
    """A kind of attack.

    Args:
        what: What is done: `"kills"`, `"manifests"`, `"damage"`.
        library: Where.
        count: How often.
        processes: How many processes a run has.
    """

    what: str
    library: str
    count: int
    processes: int = 1


ATTACKS = {
    "JAX, 1 process": Attack("kills", "jax", 180),
    "JAX, 2 processes": Attack("kills", "jax", 100, 2),
    "torch, 1 process": Attack("kills", "torch", 120),
    "torch, 2 processes": Attack("kills", "torch", 100, 2),
    "forged manifests": Attack("manifests", "jax", 1000),
    "damaged files, JAX": Attack("damage", "jax", 150),
    "damaged files, torch": Attack("damage", "torch", 150),
}


def run_attack(attack: Attack, seed: int, count: int) -> Counter[str]:
    """Run one kind of attack in this process and return the counts of its outcomes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if attack.what == "manifests":
            from checkpoint.test_forged_manifests import check

            return check(folder, range(seed, seed + count))
        if attack.what == "damage":
            from checkpoint.damaged import attack as damage

            return damage(folder, range(seed, seed + count))
        from checkpoint.killed_runs import kill_runs

        counts = Counter[str]()
        for first in range(seed, seed + count, RUNS):
            seeds = range(first, min(first + RUNS, seed + count))
            counts += kill_runs(folder / str(first), seeds, attack.processes)
            print(f"{first + len(seeds) - seed} of {count}", file=sys.stderr, flush=True)
        return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "attacks", nargs="*", choices=[*ATTACKS, []], metavar="ATTACK", help="; ".join(ATTACKS)
    )
    parser.add_argument(
        "--seed", type=int, default=100_000, help="the first seed of each (default: %(default)s)"
    )
    parser.add_argument("--share", type=float, default=1.0, help="which part of the cases (default: all)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    for name in asked.attacks or ATTACKS:
        attack = ATTACKS[name]
        count = max(1, round(attack.count * asked.share))
        if asked.here:
            print(json.dumps(run_attack(attack, asked.seed, count)))
            continue
        flags = "--xla_force_host_platform_device_count=8"
        env = os.environ | {"KERAS_BACKEND": attack.library, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        env["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{TESTS}"
        command = [
            sys.executable,
            __file__,
            name,
            "--seed",
            str(asked.seed),
            "--share",
            str(asked.share),
            "--here",
        ]
        ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            return 1
        counts = json.loads(ended.stdout.splitlines()[-1])
        print(
            f"{name}: {count} did no harm; " + ", ".join(f"{n} {what}" for what, n in counts.items()),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
