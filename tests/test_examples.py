"""The examples: one rules file for several libraries, and the demo."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

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

    def test_the_demo_trains_alike_on_two_meshes_and_says_what_is_next(monkeypatch, tmp_path, capsys):
        """Losses are the same, a misspelt rule is refused with the right one, and what it names to do next works."""
        demo = EXAMPLES / "train_gpt.py"
        monkeypatch.chdir(frameworks.ROOT)
        run_main(monkeypatch, demo, "--steps", "1")
        shown = capsys.readouterr().out
        first = re.findall(r"^   mesh (batch=\d, model=\d) +first loss (\S+) ", shown, re.M)
        _, refused, then = re.split(r"^== (?=a misspelt rule|next)", shown, flags=re.M)
        ((python, script, options),) = re.findall(r"^   (\S+) (\S+\.py) (--.*) plan\.html$", then, re.M)
        run_main(monkeypatch, demo, *options.split(), str(tmp_path / "plan.html"))

        assert ["batch=2, model=4", "batch=4, model=2"] == [mesh for mesh, _ in first]
        assert 1 == len({loss for _, loss in first})
        assert "blocks.{0..1}.down.kernel: no rule matches" in refused
        assert r'did you mean r"blocks\.\d+\.down\.kernel$"?' in refused
        assert Path(script).samefile(demo)
        assert Path(python).samefile(sys.executable)
        assert (tmp_path / "plan.html").stat().st_size > 50_000
        page, others = re.findall(r"(docs/[\w/-]+\.md), or (.*)", then)[0]
        assert [] == [
            n for n in (Path(page).name, *others.split(", ")) if not Path(page).with_name(n).exists()
        ]

    def run_main(monkeypatch, script, *arguments):
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")

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
