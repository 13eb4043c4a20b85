"""Write README's table of what works, from the results of the contract tests.

    python tools/works.py                    run the contracts and write the table
    python tools/works.py --check FILE ...   fail if the table is not what these JUnit files say

The rows are the laws of `AdapterContract`, the columns the classes in the tests that inherit it. A cell says `yes` if
the law passed there, and the reason in words if it was skipped. `make test` checks the table against its own results.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
START, END = "<!-- works: made by tools/works.py -->", "<!-- /works -->"

CONTRACTS = (
    ("layoutmap.testing.adapter_contract", "AdapterContract"),
    ("layoutmap.testing.engine_contract", "EngineContract"),
)
# Class of the tests -> column.
ADAPTERS = {
    "TestKerasOnJax": "Keras 3 on JAX",
    "TestKerasOnTensorFlow": "Keras 3 on TensorFlow",
    "TestKerasOnTorch": "Keras 3 on PyTorch",
    "TestTorch": "torch.nn",
}
ENGINES = {"TestJaxEngine": "JAX", "TestTensorFlowEngine": "TensorFlow", "TestTorchEngine": "PyTorch"}
LIMITS = "tests/adapters/test_keras_limits_tensorflow.py"
FILES = {
    "jax": ("tests/adapters/test_keras_contract.py", "tests/engines/test_jax.py"),
    "tensorflow": (
        "tests/adapters/test_keras_contract_tensorflow.py",
        "tests/engines/test_tensorflow.py",
        LIMITS,
    ),
    "torch": (
        "tests/adapters/test_keras_contract_torch.py",
        "tests/adapters/test_torch_contract.py",
        "tests/engines/test_torch.py",
    ),
}
# Test with one case for each layer -> what it shows of them.
LAYERS = {
    "test_what_is_wanted_whole_is_put_together": "weights stay cut, and are put together when the layer is called",
    "test_what_cannot_run_is_known_before_the_first_step": "does not run, or not train; the plan says so, and the mend",
}


def run() -> dict[tuple[str, str], str]:
    """Run the contracts; the outcome for each class and law."""
    outcomes: dict[tuple[str, str], str] = {}
    for process, files in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results.xml"
            subprocess.run(
                [sys.executable, "-m", "pytest", "-q", f"--junitxml={results}", *files],
                cwd=ROOT,
                env={**os.environ, "LAYOUTMAP_TEST_PROCESS": process},
            )
            outcomes |= read(results)
    return outcomes


def read(results: Path) -> dict[tuple[str, str], str]:
    """The outcome for each class and law in a JUnit file."""
    outcomes: dict[tuple[str, str], str] = {}
    for case in ET.parse(results).getroot().iter("testcase"):
        where, name = case.get("classname", "").rpartition(".")[2], case.get("name", "")
        # Of a law one outcome is kept for all its cases; a layer is a case, and each is kept.
        key = where, name if name.partition("[")[0] in LAYERS else name.partition("[")[0]
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "**no**"
        elif skipped is not None:
            outcome = skipped.get("message", "skipped")
        else:
            outcome = "yes"
        if outcomes.get(key, "yes") == "yes":  # of a law with several cases, one that does not hold counts
            outcomes[key] = outcome
    return outcomes


def table(outcomes: dict[tuple[str, str], str]) -> str:
    """One row for each law of adapters, and for all laws of engines together how many of them hold."""
    adapters, engines = CONTRACTS
    rows = [_row("models", ADAPTERS.values()), _row("---", ["---"] * len(ADAPTERS))]
    for law, sentence in laws(adapters):
        rows.append(_row(sentence, [outcomes.get((test, law), "not run") for test in ADAPTERS]))
    rows += ["", _row("arrays", ENGINES.values()), _row("---", ["---"] * len(ENGINES))]
    all_laws = laws(engines)
    counts = [sum(outcomes.get((test, law)) == "yes" for law, _ in all_laws) for test in ENGINES]
    rows.append(_row("laws of engines that hold", [f"{count} of {len(all_laws)}" for count in counts]))
    rows += ["", _row("on TensorFlow's DTensor", ["layers"]), _row("---", ["---"])]
    for test, meaning in LAYERS.items():
        shown = [
            name[len(test) + 1 : -1]
            for (_, name), said in outcomes.items()
            if name.startswith(f"{test}[") and said == "yes"
        ]
        rows.append(_row(meaning, [", ".join(shown) or "not run"]))
    return "\n".join(rows)


def laws(contract: tuple[str, str]) -> list[tuple[str, str]]:
    """The tests of a contract, each with the sentence that states its law."""
    module, name = contract
    members = vars(getattr(importlib.import_module(module), name))
    return [
        (law, (test.__doc__ or law).strip().partition("\n")[0].rstrip("."))
        for law, test in members.items()
        if law.startswith("test_")
    ]


def _row(first: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", nargs="+", type=Path, metavar="FILE", help="change nothing; fail if the table is old"
    )
    args = parser.parse_args()
    outcomes: dict[tuple[str, str], str] = {}
    for results in args.check or ():
        outcomes |= read(results)
    new = f"{START}\n\n{table(outcomes if args.check else run())}\n\n{END}"
    text = README.read_text(encoding="utf-8")
    written = re.sub(f"{re.escape(START)}.*{re.escape(END)}", lambda _: new, text, flags=re.DOTALL)
    if args.check and written != text:
        print("README's table of what works is not what the tests say; mend: make works", file=sys.stderr)
        return 1
    README.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
