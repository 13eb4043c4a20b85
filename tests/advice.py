"""What a verdict advises, taken as it is written: in Python, and on the command line with a rules file."""

import copy
import re
import shlex
from dataclasses import dataclass

import layoutmap as lm
from layoutmap.rules.yaml_file import parse_rules_file

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
    fields = parse_rules_file(f"version: 1\n{text[len(first) :]}")
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


_SPECS = r"(\([^()]*\))"
_CHANGE = re.compile(rf"change rule (\d+) to {_SPECS}")
_PLACE = re.compile(rf'(?:put before rule (\d+)|add a rule): layout_map\[r"(.*?)"\] = {_SPECS}')
_CORRECT = re.compile(
    r'did you mean r"(.*?)"\?|correct rule \d+  .*? to r"(.*?)"|to match anywhere in a path: r"(.*)"'
)


@dataclass(frozen=True)
class Rules:
    """Rules as a user edits them: patterns with their specs, in order."""

    rows: tuple[tuple[str, tuple], ...]

    def change(self, number, specs):
        """Return the rules with other specs in one of them."""
        return self._replace(number, [(self.rows[number - 1][0], specs)])

    def rename(self, number, pattern):
        """Return the rules with another pattern in one of them, or without it if that pattern exists."""
        is_there = any(pattern == other for other, _ in self.rows)
        return self._replace(number, [] if is_there else [(pattern, self.rows[number - 1][1])])

    def delete(self, number):
        """Return the rules without one of them."""
        return self._replace(number, [])

    def put(self, pattern, specs, before=None):
        """Return the rules with another one before a number, or as the last one."""
        rows = [row for row in self.rows if row[0] != pattern]
        at = len(rows) if before is None else sum(row in rows for row in self.rows[: before - 1])
        return Rules((*rows[:at], (pattern, specs), *rows[at:]))

    def find(self, pattern):
        """Return the number of the rule with a pattern."""
        return 1 + next(number for number, (other, _) in enumerate(self.rows) if other == pattern)

    def _replace(self, number, rows):
        return Rules((*self.rows[: number - 1], *rows, *self.rows[number:]))


def follow(problem, rules):
    """Return the rules after the fix of a problem, which is read as it is written."""
    if problem.kind in ("unused rule", "no rule") and (found := _CORRECT.search(problem.fix)):
        pattern = problem.subject
        if problem.kind == "no rule":
            pattern = re.search(r"rule \d+  (.*?) to r\"", problem.fix)[1]
        return rules.rename(rules.find(pattern), next(filter(None, found.groups())))
    if problem.kind in ("unused rule", "shadowed rule"):
        assert "delete it" in problem.fix, problem
        return rules.delete(rules.find(problem.subject))
    changes, places = _CHANGE.findall(problem.fix), _PLACE.findall(problem.fix)
    deleted = re.findall(r"(?:^|; )delete rule (\d+)", problem.fix)
    assert changes or places or deleted, problem
    rules_before = rules
    for number, specs in changes:
        rules = rules.change(int(number), eval(specs))
    for before, pattern, specs in reversed(places):
        rules = rules.put(pattern, eval(specs), int(before) if before else None)
    for pattern in [rules_before.rows[int(number) - 1][0] for number in deleted]:
        rules = rules.delete(rules.find(pattern))
    return rules
