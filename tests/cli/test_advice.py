"""Advice of a step that does not fit: taken as it is written, on the command line and in Python, it is what it says."""

import io
import sys
import types
from contextlib import redirect_stderr, redirect_stdout

import advice
import keras
import pytest
from cases import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.cli.main import main
from layoutmap.cost import advise

PROCESSES = ("jax",)
LENGTH, WIDTH, HEADS = 128, 32, 4
PROJECTION = (None, "model", None)
RULES = {
    r".*(query|key|value)\.kernel$": PROJECTION,
    r".*attention_output\.kernel$": ("model", None, None),
    r".*up\.kernel$": (None, "model"),
    r".*down\.kernel$": ("model", None),
}


class Block(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.attention = keras.layers.MultiHeadAttention(
            HEADS, WIDTH // HEADS, use_bias=False, name="attention"
        )
        self.up = keras.layers.Dense(4 * WIDTH, activation="gelu", use_bias=False, name="up")
        self.down = keras.layers.Dense(WIDTH, use_bias=False, name="down")

    def build(self, shape):
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * WIDTH))

    def call(self, x):
        x = x + self.attention(x, x)
        return x + self.down(self.up(x))


def make():
    return keras.Sequential([keras.Input((LENGTH, WIDTH)), *(Block(name=f"block_{n}") for n in range(2))])


@pytest.fixture
def taken(tmp_path, monkeypatch):
    """Plan with too little memory; what is advised, and what a device needs with each, planned in the two ways."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("advised_models")
    vars(module)["make"] = make
    monkeypatch.setitem(sys.modules, "advised_models", module)

    def run(layout_map, memory, *flags):
        (tmp_path / "rules.yaml").write_text(layout_map.to_yaml())
        given = ("plan", "advised_models:make", "--rules", "rules.yaml", "--library", "keras", "--on", "h100")
        given += ("--optimizer", "adamw", "--device-memory", f"{memory}KiB", "--json", "plan.json")
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = main([*given, *flags])
        assert code < 2, err.getvalue()
        return code, out.getvalue(), lm.Plan.from_json((tmp_path / "plan.json").read_text()).verdict

    def taken(layout_map, batch, memory, most):
        monkeypatch.setattr(advise, "MAX_COUNTING_SECONDS", 1e6)
        inputs = ("--inputs", f"float32[{batch},{LENGTH},{WIDTH}]")
        code, out, verdict = run(layout_map, memory, *inputs)
        assert (1, False) == (code, verdict.fits)
        monkeypatch.setattr(advise, "MAX_COUNTING_SECONDS", 0)
        for each in verdict.advice[:most]:
            assert (
                not each.command or each.format_text(1024 * memory, as_command=True).partition("\n")[0] in out
            )
            by_file, flags = advice.as_command(each.command, layout_map)
            code, _, as_command = run(by_file, memory, *inputs, *flags)
            other_map, options, size = advice.in_python(each.python, layout_map)
            options = {"on": "h100", "device_memory": 1024 * memory, "optimizer": "adamw"} | options
            x = keras.Input(batch_shape=(size or batch, LENGTH, WIDTH))
            in_python = lm.plan(make, other_map, inputs=x, library="keras", **options).verdict
            yield each, code == 0, as_command.needed_bytes, in_python.needed_bytes, in_python.fits

    return taken


def check(found, memory):
    fits = [each.needed_bytes <= 1024 * memory for each, *_ in found]
    expected = [
        (fit, each.needed_bytes, each.needed_bytes, fit) for fit, (each, *_) in zip(fits, found, strict=True)
    ]
    assert expected == [tuple(rest) for _, *rest in found]
    return [each.what for each, *_ in found]


def test_advice_that_is_taken_does_what_it_says(taken):
    """The best, as options and as Python: the exit code is 0 where it says that a step fits."""
    found = list(taken(lm.LayoutMap("data=2,model=2", RULES, rest="replicated"), 8, 4000, 1))

    whats = check(found, 4000)
    assert whats
    assert any("flash attention" in what for what in whats)


@pytest.mark.long
@pytest.mark.timeout(1200)
@given(
    st.sampled_from(["data=2,model=2", "data=4,model=1", "data=1,model=4", "batch=2,stage=2,model=2", "x=4"]),
    st.sampled_from([4, 8, 12]),
    st.sampled_from([500, 1000, 2000, 3000]),
    st.booleans(),
)
@settings(
    max_examples=examples(6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_advice_that_is_taken_does_what_it_says(taken, mesh, batch, memory, sharded):
    """All of it, on drawn meshes, batches and memories; where they fit, there is nothing to advise."""
    rules = RULES if sharded and "model" in mesh else {}
    layout_map = lm.LayoutMap(mesh, rules, rest="replicated")
    check(list(taken(layout_map, batch, memory, None)), memory)
