"""Translate suggested fixes from Python into the syntax of a rules file."""

from __future__ import annotations

import re

# The groups of a match are `.activations` or None, the quote, the pattern, and the specs.
_RULE = re.compile(r"""layout_map(\.activations)?\[r?(["'])(.+?)\2\](?: = \(((?:[^()]|\([^()]*\))*)\))?""")
_CHANGE = re.compile(r"""(change rule \d+ to )\(((?:[^()]|\([^()]*\))*)\)""")
_OPTION = re.compile(r"""(?:layout_map\.)?\b(rest|uneven) ?= ?"(\w+)\"""")
_POLICIES = re.compile(r"""\buneven=\("(\w+)", "(\w+)"\)""")
_BATCH_DIM = re.compile(r"""\bpass batch_dim='(\w+)'(?! to the scope)""")
_RAW = re.compile(r"""\br"([^"]+)\"""")


def translate_rules_to_yaml(text: str) -> str:
    """Rewrite Python rules and options in a text as lines of a rules file, and `batch_dim` as an option.

    Example:
        >>> print(translate_rules_to_yaml(r'add a rule: layout_map[r"up\\.kernel$"] = (None, "model")'))
        add a rule: 'up\\.kernel$': [null, model]
        >>> print(translate_rules_to_yaml("change rule 3 to ('model', None)"))
        change rule 3 to [model, null]
        >>> print(translate_rules_to_yaml('say layout_map.rest = "replicated"'))
        say rest: replicated
        >>> print(translate_rules_to_yaml("pass batch_dim='data' if batches are sharded over it"))
        pass --batch-dim data if batches are sharded over it
    """
    text = _BATCH_DIM.sub(r"pass --batch-dim \1", text)
    text = _CHANGE.sub(lambda match: f"{match[1]}{_format_specs_as_yaml(match[2])}", text)
    text = _OPTION.sub(r"\1: \2", _POLICIES.sub(r"uneven: [\1, \2]", _RULE.sub(_format_rule_as_yaml, text)))
    return _RAW.sub(r"'\1'", text)


def _format_rule_as_yaml(match: re.Match[str]) -> str:
    activations, _, pattern, specs = match.groups()
    line = f"'{pattern}'"
    if specs is not None:
        line += f": {_format_specs_as_yaml(specs)}"
    return f"activations: {{{line}}}" if activations else line


def _format_specs_as_yaml(specs: str) -> str:
    """Convert the items of a Python tuple of specs, such as `None, "model"`, to a YAML list."""
    text = re.sub(r"\bNone\b", "null", specs.rstrip(", ").replace("(", "[").replace(")", "]"))
    unquoted = text.replace("'", "").replace('"', "")
    return f"[{unquoted}]"
