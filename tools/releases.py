"""Try the contracts on the newest or the oldest release of each framework.

    python tools/releases.py                         torch, JAX and TensorFlow, each with the newest Keras: half an hour
    python tools/releases.py torch                   one of them
    python tools/releases.py torch==2.14.1           a release
    python tools/releases.py --publish               and write what was found, here and before, into docs/versions.md
    python tools/releases.py --oldest                the oldest releases that pyproject.toml allows
    python tools/releases.py --oldest jax            one of them

The laws of engines and adapters, torch's own database of operators, random programs and which corrections are needed.
Each framework gets an environment in results/newest, of the tests' requirements and the newest releases that pip
finds. The oldest releases share the environment .venv-oldest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "results" / "newest"
OLDEST = ROOT / ".venv-oldest"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGE = ROOT / "docs" / "versions.md"
START, END = "<!-- newest: made by tools/releases.py -->", "<!-- /newest -->"
# The package that pip installs, what is installed beside it, and the tests.
TRIED = {
    "torch": (
        "torch",
        ("keras", "safetensors", "transformers"),
        (
            *("engines/torch", "engines/test_torch.py", "adapters/test_torch_contract.py"),
            *("adapters/test_torch_numbers.py", "adapters/test_keras_contract_torch.py"),
            *("adapters/test_torch_tools.py", "adapters/test_torch_own_rows.py"),
        ),
    ),
    "jax": (
        "jax",
        ("keras", "flax", "optax", "equinox", "dm-haiku"),
        (
            *("engines/test_jax.py", "engines/test_jax_operators.py", "engines/test_jax_corrections.py"),
            *(
                "engines/test_jax_products.py",
                "adapters/test_jax_contract.py",
                "adapters/test_keras_contract.py",
            ),
        ),
    ),
    "tensorflow": (
        "tensorflow-cpu",
        ("keras",),
        ("engines/test_tensorflow.py", "adapters/test_keras_contract_tensorflow.py"),
    ),
}


def list_requirements(name: str) -> list[str]:
    """Return pip's arguments for a framework's newest or requested release and the tests' requirements."""
    package, beside, _ = TRIED[name.partition("==")[0]]
    return [name.replace(name.partition("==")[0], package), *beside]


def list_oldest_requirements() -> list[str]:
    """Return pip's arguments for the oldest releases that pyproject.toml allows, of all frameworks together."""
    extras = PROJECT["project"]["optional-dependencies"]
    allowed = [first for extra, (first, *_) in extras.items() if first.startswith(f"{extra}>=")]
    # JAX itself needs a later numpy.
    allowed += [each for each in PROJECT["project"]["dependencies"] if not each.startswith("numpy")]
    oldest = [re.sub(">=([^,]+).*", r"==\1", each) for each in allowed]
    packages = {name: package for name, (package, *_) in TRIED.items()}  # tensorflow-cpu is half as large
    oldest = [re.sub("^[^=]+", lambda name: packages.get(name[0], name[0]), each) for each in oldest]
    pinned = {each.partition("==")[0] for each in oldest}
    return oldest + [each for _, beside, _ in TRIED.values() for each in beside if each not in pinned]


def install(environment: Path, requirements: list[str]) -> None:
    """Install the library, the tests' requirements, and others into an environment."""
    if not (environment / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    print(f"== installing {' '.join(requirements)}", flush=True)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
    pip += ["--upgrade", "--upgrade-strategy", "eager"]
    tests = PROJECT["dependency-groups"]["test"]
    subprocess.run([*pip, *requirements, *tests, "-e", str(ROOT)], check=True)


def test_release(framework: str, environment: Path) -> dict[str, Any]:
    """Run the tests in an environment and return its releases and how many tests passed, failed, and were skipped."""
    python = environment / "bin" / "python"
    asked = subprocess.run(
        [python, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True, text=True
    )
    package, beside, files = TRIED[framework]
    installed = {each["name"].replace("_", "-"): each["version"] for each in json.loads(asked.stdout)}
    releases = {each: installed[each] for each in (package, *beside)}
    print(f"== trying {', '.join(f'{each} {releases[each]}' for each in releases)}", flush=True)
    told = environment / f"{framework}.xml"
    told.unlink(missing_ok=True)
    subprocess.run(
        [
            *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={told}"),
            *(f"tests/{each}" for each in files),
        ],
        cwd=ROOT,
        env={**os.environ, "LAYOUTMAP_TEST_PROCESS": framework},
        check=False,  # what failed is told
    )
    if not told.exists():  # the process ended
        return {"releases": releases, "passed": 0, "failed": 1, "skipped": 0, "date": str(date.today())}
    outcomes = Counter(
        next((each.tag for each in case if each.tag in ("failure", "error", "skipped")), "passed")
        for case in ET.parse(told).getroot().iter("testcase")
    )
    failed = outcomes["failure"] + outcomes["error"]
    found = {
        "releases": releases,
        "passed": outcomes["passed"],
        "failed": failed,
        "skipped": outcomes["skipped"],
        "date": str(date.today()),
    }
    (environment / "found.json").write_text(json.dumps(found))
    return found


def test_newest(name: str) -> dict[str, Any]:
    """Install a framework's newest or requested release into its own environment and run the tests in it."""
    environment = FOLDER / name.replace("==", "-")
    install(environment, list_requirements(name))
    return test_release(name.partition("==")[0], environment)


def format_table(found: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| releases | passed | failed | skipped | on |", "|---|---|---|---|---|"]
    for each in found:
        releases = ", ".join(f"{name} {release}" for name, release in each["releases"].items())
        lines.append(
            f"| {releases} | {each['passed']} | {each['failed']} | {each['skipped']} | {each['date']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the tests on new releases and print a table. Exit with 1 if a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("frameworks", nargs="*", default=list(TRIED), metavar="framework[==release]")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--publish", action="store_true", help="write the table into docs/versions.md")
    way.add_argument(
        "--oldest", action="store_true", help="try the oldest releases that pyproject.toml allows"
    )
    asked = parser.parse_args()
    frameworks = [each.partition("==")[0] for each in asked.frameworks]
    if unknown := [each for each in frameworks if each not in TRIED]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(TRIED)}")
    if asked.oldest:
        install(OLDEST, list_oldest_requirements())
        found = [test_release(each, OLDEST) for each in frameworks]
    else:
        found = [test_newest(each) for each in asked.frameworks]
    print(format_table(found))
    failed = any(each["failed"] for each in found)
    if asked.publish:
        page = PAGE.read_text()
        found = [json.loads(each.read_text()) for each in sorted(FOLDER.glob("*/found.json"))]
        PAGE.write_text(
            re.sub(
                rf"{START}.*{END}", lambda _: f"{START}\n{format_table(found)}\n{END}", page, flags=re.DOTALL
            )
        )
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
