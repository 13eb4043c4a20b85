"""The example with one rules file for several libraries."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import frameworks
import pytest
import yaml

import layoutmap as lm

PROCESSES = ("jax", "torch")
TORCH = os.environ.get("LAYOUTMAP_TEST_PROCESS") == "torch"
EXAMPLES = frameworks.ROOT / "examples"


def test_one_rules_file_serves_each_library(monkeypatch):
    """No weight is without a rule and no rule without a weight, and a device holds as much in each library."""
    monkeypatch.syspath_prepend(EXAMPLES)
    layout_map = lm.LayoutMap.from_yaml((EXAMPLES / "gpt_rules.yaml").read_text())
    plans = {
        library: lm.plan(
            importlib.import_module(f"gpt_{name}").make_gpt, layout_map, library=library, strict=True
        )
        for library, name in ([("torch", "torch")] if TORCH else [("keras", "keras"), ("jax", "nnx")])
    }

    assert dict.fromkeys(plans, ()) == {
        library: tuple(plan.lint(batch_dim="batch")) for library, plan in plans.items()
    }
    assert dict.fromkeys(plans, 123_392) == {library: plan.device_bytes for library, plan in plans.items()}


if not TORCH:

    @pytest.mark.long  # it starts three processes; what they plan is tested above
    def test_each_library_trains_to_the_losses_of_one_device():
        """Within 1e-5 in each step, and the last loss is lower than the first."""
        run = subprocess.run(
            [sys.executable, str(EXAMPLES / "one_rules_file.py"), "--steps", "4"],
            env={**os.environ, "KERAS_BACKEND": "jax", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=500,
        )
        found = re.findall(
            r"^(\w+) +first loss (\S+) +last (\S+) +largest difference (\S+)$", run.stdout, re.M
        )
        differences = {library: float(off) for library, _, _, off in found}

        assert 0 == run.returncode, run.stderr[-3000:]
        assert ["keras", "nnx", "torch"] == list(differences)
        assert max(differences.values()) < 1e-5
        assert all(float(last) < float(first) for _, first, last, _ in found)

    def test_the_tutorial_shows_the_rules_file():
        """The rules on the page are those of the example."""
        page = (frameworks.ROOT / "docs/tutorials/6-one-rules-file-three-libraries.md").read_text()
        (shown,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.DOTALL)

        assert yaml.safe_load((EXAMPLES / "gpt_rules.yaml").read_text()) == yaml.safe_load(shown)
