"""Whatever is read, an error of this library says why not, or what was read can be used to the end.

The subjects are YAML with aliases and tags, plan JSON, wire text and protobuf bytes, each as its writer writes it and
then mutated. `LAYOUTMAP_FUZZ_EXAMPLES` is the number of examples in the long run, and
`LAYOUTMAP_FUZZ_SECONDS` what one of them may take.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layoutmap as lm
from layoutmap.core.variables import VariableSpec
from layoutmap.scope.plan import make_plan
from layoutmap.testing import strategies

MANY = int(os.environ.get("LAYOUTMAP_FUZZ_EXAMPLES", "1000"))
# Of one example; most need a thousandth of it
SECONDS = float(os.environ.get("LAYOUTMAP_FUZZ_SECONDS", "10"))
VARIABLES = [VariableSpec("d1.kernel", (8, 6), "float32"), VariableSpec("blocks.0.up.bias", (5,), "bfloat16")]
VALUES = (  # noqa: SIM905 - a list of quoted texts would be harder to read
    "null true 0 -1 1.5 1e400 NaN 010 1:20 1_0 9999999999999999999999 [] {} [[]] '' \\ud800 \N{NULL} << *a &a &a[*a] "
    "!!str !!int !!python/object:os.system !x ? : , | > - # \" ' unsharded match model x=2 [null,model] --- ..."
).split(" ")


@st.composite
def mutated(draw, texts):
    """A text with parts of it taken out, doubled, moved, or replaced by what readers stumble over."""
    text = draw(texts)
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(text)))
        end = draw(st.integers(begin, min(begin + 12, len(text))))
        part = draw(
            st.sampled_from(["", text[begin:end] * 2, text[end : end + 20], "[" * 2000, "9" * 5000])
            | st.sampled_from(VALUES)
            | st.characters()
        )
        text = text[:begin] + part + text[end:]
    return text


def yaml_texts():
    return mutated(strategies.layout_maps(max_rules=4).map(lm.LayoutMap.to_yaml))


def values_in(data):
    """All values of a JSON text, those inside of others included."""
    inside = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [data, *(found for each in inside for found in values_in(each))]


@st.composite
def json_texts(draw):
    """A plan's JSON, some values replaced by those of other fields, or by any; or mutated as text."""
    text = draw(strategies.plans(layers=True))[2].to_json()
    if draw(st.booleans()):
        return draw(mutated(st.just(text)))
    data = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        holder, key = data, draw(st.sampled_from(list(data)))
        while isinstance(holder[key], (dict, list)) and holder[key] and draw(st.integers(0, 4)):
            holder = holder[key]
            key = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
        holder[key] = draw(
            st.sampled_from(values_in(json.loads(text)))
            | st.recursive(
                st.sampled_from(
                    [None, True, 0, 1, 4, -1, 2**70, 1.5, float("inf"), "", "model", "\ud800", "weight"]
                ),
                lambda inner: (
                    st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
                ),
                max_leaves=4,
            )
        )
    return json.dumps(data)


def wire_texts():
    return mutated(strategies.layouts().map(lm.Layout.to_string))


@st.composite
def proto_bytes(draw):
    data = bytearray(draw(strategies.layouts()).serialized_string())
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(data)


def use_plan(plan):
    """All that is done with a plan."""
    assert plan == lm.Plan.from_json(plan.to_json())
    assert str(plan)
    assert plan.to_json().encode()
    assert plan.to_html().encode()
    assert plan.fingerprint
    assert not plan.diff(plan)


def use_layout(layout):
    assert layout == lm.Layout.from_string(layout.to_string())
    assert layout == lm.Layout.from_str(layout.serialized_string())
    assert layout.mesh == lm.Mesh.from_proto(layout.mesh_proto())
    assert f"{layout}{layout!r}".encode()
    assert layout.locate_shard(0) is not None
    assert repr(layout.is_fully_replicated())


def use_map(layout_map):
    assert layout_map == lm.LayoutMap.from_yaml(layout_map.to_yaml())
    assert f"{layout_map}{layout_map!r}"
    assert layout_map._repr_html_()
    if layout_map.mesh is not None:
        use_plan(make_plan(VARIABLES, layout_map, layers=["d1"]))


READERS = {
    "yaml": (yaml_texts, lm.LayoutMap.from_yaml, use_map),
    "plan": (json_texts, lm.Plan.from_json, use_plan),
    "layout text": (wire_texts, lm.Layout.from_string, use_layout),
    "mesh text": (
        lambda: wire_texts().map(lambda text: text.partition("mesh:")[2] or text),
        lm.Mesh.from_string,
        lambda mesh: use_layout(lm.Layout.replicated(mesh, 1)),
    ),
    "layout bytes": (proto_bytes, lm.Layout.from_str, use_layout),
    "mesh bytes": (proto_bytes, lm.Mesh.from_proto, lambda mesh: use_layout(lm.Layout.replicated(mesh, 1))),
}


def check(name, data):
    _, read, use = READERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python's `re`, of patterns that it will read otherwise some day
        try:
            made = read(data)
        except lm.LayoutMapError as error:
            made = str(error)
    if isinstance(made, str):
        assert made.encode()
    else:
        use(made)


@pytest.mark.parametrize("name", READERS)
def test_a_sample(name):
    """Some mutants of each form."""

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(READERS[name][0]())
    def run(data):
        check(name, data)

    run()


def holders_in(data):
    """All objects and lists of a JSON value."""
    return [each for each in values_in(data) if isinstance(each, dict | list)]


def test_half_a_character_in_each_place_of_a_plan():
    """A lone surrogate as any value or key is refused, or is part of a name."""
    layout_map = lm.LayoutMap(lm.Mesh(None, "model=2"), {"d1.kernel": (None, "model"), "none": (None,)})
    text = make_plan(VARIABLES, layout_map, layers=["d1"]).to_json()
    for number, holder in enumerate(holders_in(json.loads(text))):
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            for is_key in {False, isinstance(holder, dict)}:
                data = json.loads(text)
                changed = holders_in(data)[number]
                if is_key:
                    changed["\ud800"] = changed.pop(key)
                else:
                    changed[key] = "\ud800"
                check("plan", json.dumps(data))


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_many(name):
    """As many mutants of each form as there is time for, in 512 MiB of memory, and none that does not end."""
    code = f"""
        import resource, signal, sys
        sys.path[:0] = {sys.path!r}
        from hypothesis import HealthCheck, given, settings
        import test_hostile_input as tests
        signal.signal(signal.SIGVTALRM, lambda *_: 1 / 0)
        @settings(max_examples={MANY}, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(tests.READERS[{name!r}][0]())
        def run(data):
            signal.setitimer(signal.ITIMER_VIRTUAL, {SECONDS})
            try:
                tests.check({name!r}, data)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (512 << 20, 512 << 20))
        run()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )

    assert "" == done.stderr, done.stderr[:6000]
    assert 0 == done.returncode
