"""Make the three pictures of the landing page from real output, as text in SVG, for light and dark pages.

    python tools/site_pictures.py

Each picture is the output of a program below: a plan, a refused mistake, and a resumed run.
"""

from __future__ import annotations

import html
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
COLORS = {
    "light": {"back": "#f5f5f7", "text": "#36464e", "strong": "#3f51b5", "bad": "#b3261e", "edge": "#d9dbe3"},
    "dark": {"back": "#272a35", "text": "#d5d7e0", "strong": "#9fa8ff", "bad": "#ff8a80", "edge": "#3a3e4c"},
}
FONT, LINE, MARGIN = 13, 19, 16
MODEL = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import layoutmap as lm

lm.simulate_devices(8)

def make(wide=64):
    layers = [keras.layers.Dense(wide, "gelu", name="up"), keras.layers.Dense(16, name="down")]
    return keras.Sequential([keras.Input((16,)), *layers])

def make_compiled():
    model = make()
    model.compile("adam", "mse")
    return model

rules = {r"up\\.kernel": (None, "model"), r"up\\.bias": ("model",), r"down\\.kernel": ("model", None)}
layout_map = lm.LayoutMap("batch=2,model=4", rules, rest="replicated")
"""
PLAN = """
print(">>> print(lm.plan(make_model, layout_map))")
print(lm.plan(make, layout_map).to_text().partition("\\n\\nrule 1")[0])
"""
MISTAKE = """
print(">>> layout_map.build(make_wider)")
try:
    layout_map.build(lambda: make(1365))
except lm.LayoutMapError as error:
    print(f"{type(error).__name__}: {str(error).partition(chr(10) * 2)[0]}")
"""
RESUME = """
x = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")
keras.utils.set_random_seed(0)

def train(model, steps):
    for step in steps:
        print(f"step {step}  loss {model.train_on_batch(x, x):.5f}")

print("# one run on batch=2,model=4")
train(layout_map.build(make_compiled, batch_dim="batch"), range(1, 5))
keras.utils.set_random_seed(0)
print("# the same run, stopped after two steps")
model = layout_map.build(make_compiled, batch_dim="batch")
train(model, (1, 2))
lm.save(model, "run", step=2)
print("# and resumed on batch=8,model=1")
other = lm.LayoutMap("batch=8,model=1", rules, rest="replicated")
train(lm.load(make_compiled, "run", layout_map=other, batch_dim="batch"), (3, 4))
"""
PICTURES = {
    "plan": (PLAN, "A plan before any memory is allocated: the layout, shard, and bytes of each weight"),
    "mistake": (MISTAKE, "A mistake is refused before anything is made, with its cause and a fix"),
    "resume": (
        RESUME,
        "A run that is resumed on another mesh has the losses of the run that was not stopped",
    ),
}


def main() -> int:
    """Run each program and write its output as two pictures."""
    for name, (program, title) in PICTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            run = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", MODEL + program],
                cwd=folder,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        for scheme in COLORS:
            path = FOLDER / f"{name}-{scheme}.svg"
            path.write_text(draw_text(run.stdout.rstrip().splitlines(), title, scheme), encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


def draw_text(lines: list[str], title: str, scheme: str) -> str:
    """Return lines of text as an SVG picture in a color scheme."""
    colors = COLORS[scheme]
    width = max(map(len, lines)) * FONT * 0.61 + 2 * MARGIN
    height = len(lines) * LINE + 2 * MARGIN
    rows = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + LINE * number + FONT}" fill="{colors[_choose_color(line)]}" '
        f'xml:space="preserve">{html.escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="{FONT}">\n'
        f"<title>{html.escape(title)}</title>\n"
        f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="6" '
        f'fill="{colors["back"]}" stroke="{colors["edge"]}"/>\n{rows}\n</svg>\n'
    )


def _choose_color(line: str) -> str:
    if "Error:" in line:
        return "bad"
    return "strong" if line.startswith((">>>", "#", "  fix")) else "text"


if __name__ == "__main__":
    sys.exit(main())
