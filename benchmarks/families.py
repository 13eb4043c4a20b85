"""Families of models, each tried in a process of its own: what came of each, and how many of each kind there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence


def tell(name: str, what: str, why: str) -> None:
    """Write what came of a family, in its process."""
    print(json.dumps({"family": name, "what": what, "why": why}), flush=True)


def try_each(
    names: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], seconds: float
) -> None:
    """Run this program as `--child NAME` for each family, and print what it told.

    Args:
        names: The families.
        arguments: Further arguments of each process.
        environment: What is set in it.
        seconds: How long it may take.
    """
    counts: Counter[str] = Counter()
    for name in names:
        begun = time.perf_counter()
        told = _tried(name, arguments, environment, seconds)
        counts[told["what"]] += 1
        passed = time.perf_counter() - begun
        print(f"{name:<20} {told['what']:<18} {passed:4.0f} s  {told['why']}", flush=True)
    print(", ".join(f"{number} {what}" for what, number in counts.most_common()))


def _tried(
    name: str, arguments: Sequence[str], environment: Mapping[str, str], seconds: float
) -> dict[str, str]:
    command = [sys.executable, sys.argv[0], "--child", name, *arguments]
    try:
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"family": name, "what": "no end", "why": f"over {seconds:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"family"')]
    ended = {"family": name, "what": "failed", "why": f"the process ended: {done.stderr[-500:]}"}
    return json.loads(lines[-1]) if lines else ended
