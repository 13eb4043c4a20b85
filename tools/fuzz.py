"""Try the laws on drawn models and maps: `make fuzz`, with SEED= and MINUTES= (else today's date, and ten).

    python tools/fuzz.py --minutes 60                           every library, for an hour
    python tools/fuzz.py --seed 920081 --count 1 keras-jax      one case again
    python tools/fuzz.py --count 1000 --publish                 so many of each, and write docs/evidence.md

What does not hold is printed, and written as a program of its own into results/fuzz/. A line of JSON for each law and
case goes to results/fuzz.jsonl. Exit code: 0, or 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path

import evidence

from layoutmap.testing.laws import LAWS
from layoutmap.testing.schedule import LawResult, Schedule
from layoutmap.testing.subjects import PADDED, SUBJECTS, WITHOUT_MODELS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
REPORT_SECONDS = 15.0


def main(arguments: list[str]) -> int:
    asked = _make_parser().parse_args(arguments)
    subjects = asked.subjects or list(SUBJECTS)
    if asked.add:
        evidence.check_seeds_are_new(subjects, asked.seed)  # before cases are tried for hours
    minutes = asked.minutes or (None if asked.count else 10)
    limits = {} if minutes is None else {"seconds": minutes * 60}
    schedule = Schedule(
        subjects, asked.seed, count=asked.count, laws=asked.law, num_workers=asked.workers, **limits
    )
    programs = asked.results / "fuzz"
    programs.mkdir(parents=True, exist_ok=True)
    tried: list[LawResult] = []
    started = reported = time.monotonic()
    interrupted = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the processes, as Ctrl-C does
    with (asked.results / "fuzz.jsonl").open("w", encoding="utf-8") as lines:
        try:
            for each in schedule.run_cases():
                tried.append(each)
                kept = dataclasses.asdict(each.outcome)
                lines.write(json.dumps({"subject": each.subject, "seed": each.seed, **kept}) + "\n")
                if each.outcome.is_failure:
                    _print_failure(each, programs)
                    if asked.until_found:
                        break
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    _print_progress(tried, reported - started)
        except KeyboardInterrupt:
            interrupted = True
    counts = evidence.count_outcomes(tried)
    print(f"\n{evidence.format_summary(counts)}")
    print(
        f"{time.monotonic() - started:.0f} s; seeds from {asked.seed} on; programs of what failed: {programs}"
    )
    if interrupted:
        print("interrupted: cases in work have no outcome", file=sys.stderr)
        return 130
    if asked.publish or asked.add:
        command = " ".join(each for each in arguments if each not in ("--publish", "--add"))
        evidence.publish(counts, f"python tools/fuzz.py {command}", adds=asked.add)
    return int(any(each.outcome.is_failure for each in tried))


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    today = int(date.today().strftime("%Y%m%d")) * 1000
    parser.add_argument(
        "subjects",
        nargs="*",
        choices=[*SUBJECTS, *PADDED, *WITHOUT_MODELS, []],
        metavar="SUBJECT",
        help=", ".join(SUBJECTS | PADDED | WITHOUT_MODELS),
    )
    parser.add_argument(
        "--seed", type=int, default=today, help="the first seed of each (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, help="how long (default: 10, or until --count is reached)")
    parser.add_argument(
        "--count", type=int, help="how many cases of each (default: as many as the time allows)"
    )
    parser.add_argument(
        "--law", action="append", default=[], choices=list(LAWS), help="only this law; may come again"
    )
    parser.add_argument("--workers", type=int, help="processes at a time (default: one for each core)")
    parser.add_argument("--until-found", action="store_true", help="stop at the first law that does not hold")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results go (default: results/)")
    parser.add_argument("--publish", action="store_true", help="write docs/evidence.md from what came of it")
    parser.add_argument(
        "--add",
        action="store_true",
        help="with --publish: add to the published counts, instead of replacing them",
    )
    return parser


def _print_failure(tried: LawResult, programs: Path) -> None:
    outcome, name = tried.outcome, f"{tried.subject}-{tried.seed}"
    print(f"\n{outcome.what}: {name}: {outcome.law}\n{outcome.why}", flush=True)
    if tried.program:
        (programs / f"{name}.py").write_text(tried.program, encoding="utf-8")


def _print_progress(tried: list[LawResult], seconds: float) -> None:
    cases = Counter(subject for subject, _ in {(each.subject, each.seed) for each in tried})
    counts = Counter(each.outcome.what for each in tried)
    told = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"[{seconds:4.0f} s] {', '.join(f'{k} {n}' for k, n in cases.items())}; laws: {told}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
