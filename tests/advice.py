"""What a verdict advises, taken as it is written: in Python, and on the command line with a rules file."""

import copy
import re
import shlex

import layoutmap as lm
from layoutmap.rules.yaml_file import from_yaml

_PRESET = re.compile(r"lm\.LayoutMap\.preset\([^)]*\)")
_BATCH = re.compile(r"inputs of a batch of ([\d,]+)")
_OF_MAP = ("rules", "activations", "mesh")


def in_python(text, layout_map):
    """The map with what a text of Python says of it, the options of `lm.plan` in it, and the size of the batch."""
    batch = _BATCH.search(text)
    preset = _PRESET.search(text)
    rest = _BATCH.sub("", _PRESET.sub("", text.replace(" where the model is made", "")))
    said = eval(
        f"dict({', '.join(filter(None, rest.split(', '))) if not rest.strip(', ') else rest.strip(', ')})"
    )
    if preset:
        layout_map = eval(preset[0], {"lm": lm})
    of_map = {name: said.pop(name) for name in _OF_MAP if name in said}
    return changed(layout_map, **of_map), said, batch and int(batch[1].replace(",", ""))


def as_command(text, layout_map):
    """The map with what a text for the command line says for its rules file, and the options in it."""
    first, *_ = re.split(r"^(?=rules:|activations:)", text, flags=re.MULTILINE)
    fields = from_yaml(f"version: 1\n{text[len(first) :]}")
    return changed(layout_map, fields.rules, fields.activations), shlex.split(first)


def changed(layout_map, rules=None, activations=None, mesh=None):
    """A map with some rules changed where they stand, others added behind, or on another mesh."""
    made = lm.LayoutMap(mesh or layout_map.mesh, uneven=layout_map.uneven, rest=layout_map.rest)
    for after, before, new in (
        (made, layout_map, dict(rules or {})),
        (made.activations, layout_map.activations, dict(activations or {})),
    ):
        for rule in before.rules:
            specs, memory = new.pop(rule.pattern, rule.layout.sharding_specs), rule.layout.memory
            after.add(rule.pattern, specs, uneven=rule.uneven, memory=memory)
        after.update(copy.copy(new))
    return made
