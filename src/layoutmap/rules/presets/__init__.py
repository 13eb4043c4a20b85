"""Read the preset rules for model families, and adapt them to a mesh: `LayoutMap.preset`.

A file here has no mesh, and its specs name two dims that stand for those of any mesh:

    model    tensor parallelism: layers that increase the number of features are sharded over their output
             features, layers that decrease it over their input features
    fsdp     FSDP: each weight is sharded along another axis, too; activations stay sharded along the batch,
             so weights are gathered where they are used

A weight that no spec shards over a dim is replicated along it. Small weights, such as norms, are replicated.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from layoutmap.core.errors import RuleError
from layoutmap.core.mesh import Mesh, check_dims_in_mesh
from layoutmap.core.old_names import warn_about_old_name
from layoutmap.core.specs import BatchDim, Specs
from layoutmap.rules.yaml_file import RulesFileFields, parse_rules_file

_FOLDER = os.path.dirname(__file__)  # a text and not a `Path`, because pathlib is slow to import
_COMPATIBLE_FAMILIES = {
    "mistral": "llama",
    "opt": "gpt2",
    "roberta": "bert",
    "xlmroberta": "bert",
    "distilbert": "bert",
    "electra": "bert",
}
"""The preset that also fits another model family of keras-hub, by the lower-case name of that family."""
_OLD_NAMES = {"names": "list_presets", "about": "describe_preset", "read": "read_preset"}
_MIN_SIMILARITY = 0.85  # different families, such as bart and bert, reach 0.75, so require more


def list_presets() -> tuple[str, ...]:
    """Return the names of all presets.

    Example:
        >>> list_presets()
        ('bert', 'gemma', 'gemma_nnx', 'gpt2', 'gpt2_nnx', 'llama', 'llama_nnx', 'mixtral', 'qwen', 'qwen_nnx', ...)
    """
    return tuple(sorted(name[:-5] for name in os.listdir(_FOLDER) if name.endswith(".yaml")))


def describe_preset(name: str) -> str:
    """Return the purpose of a preset, from the first line of its file.

    Raises:
        RuleError: There is no preset of that name.

    Example:
        >>> describe_preset("t5")
        'T5 of keras-hub, first version, 1.1 and Flan: T5Backbone, alone or in T5Seq2SeqLM.'
    """
    return _read_preset_file(name).partition("\n")[0].removeprefix("# ")


def find_matching_preset(paths: Sequence[str]) -> str | None:
    """Return the name of the preset with a rule for each path and the fewest unused rules, or None if no preset fits.

    Example:
        >>> print(find_matching_preset(["token_embedding.embeddings", "up.kernel"]))
        None
    """
    unused: dict[str, int] = {}
    for name in list_presets() if paths else ():
        patterns = [re.compile(pattern) for pattern in parse_rules_file(_read_preset_file(name)).rules]
        first = {next((n for n, each in enumerate(patterns) if each.match(path)), None) for path in paths}
        if None not in first:
            unused[name] = len(patterns) - len(first)
    return min(unused, key=unused.__getitem__, default=None)


# Mesh dims have no standard names, so the caller's dims replace `model` and `fsdp` of the preset (decisions/0024).
def read_preset(
    name: str, mesh: Mesh, model_dim: str | None, fsdp_dim: str | None, batch_dim: BatchDim | None = None
) -> RulesFileFields:
    """Return the rules of a preset with its dims replaced by those of a mesh.

    Args:
        name: One of `list_presets`.
        mesh: The mesh.
        model_dim: The mesh's dim for `model`; `None`: nothing is sharded over it.
        fsdp_dim: The mesh's dim for `fsdp`; `None`: nothing is sharded over it, and activations have no rules.
        batch_dim: The mesh dims that batches, and so activations, are sharded over; `None`: `fsdp_dim`.

    Raises:
        RuleError: There is no preset of that name, or the mesh has no such dim.

    Example:
        >>> from layoutmap import Mesh
        >>> read_preset("llama", Mesh(None, "tp=4"), "tp", None).rules[r"(.*\\.)?token_embedding\\.embeddings$"]
        ('tp', None)
    """
    fields, dims = parse_rules_file(_read_preset_file(name)), {"model": model_dim, "fsdp": fsdp_dim}
    for role, dim in dims.items():
        where, why = f"preset {name!r}: {role}_dim", "weights are sharded over it"
        check_dims_in_mesh(where, dim, mesh, why, RuleError, ", or pass None")
    check_dims_in_mesh(
        f"preset {name!r}: batch_dim", batch_dim, mesh, "activations are sharded over it", RuleError
    )
    return replace(
        fields,
        rules=_replace_preset_dims(fields.rules, dims),
        activations=_replace_preset_dims(fields.activations, {**dims, "fsdp": batch_dim or fsdp_dim})
        if fsdp_dim
        else {},
    )


@lru_cache(1)
def list_patterns() -> frozenset[str]:
    """Return the patterns of the rules of all presets, for variables and for activations."""
    files = [parse_rules_file(_read_preset_file(name)) for name in list_presets()]
    return frozenset(pattern for each in files for pattern in (*each.rules, *each.activations))


def _read_preset_file(name: str) -> str:
    presets = list_presets()
    if name not in presets:
        fits = _COMPATIBLE_FAMILIES.get("".join(filter(str.isalpha, name.lower())))
        near = difflib.get_close_matches(name.lower(), presets, 1, _MIN_SIMILARITY)
        raise RuleError(
            f"there is no preset {name!r}",
            facts={"presets": ", ".join(presets)},
            fix=f"use {fits!r}: its rules fit {name}, too"
            if fits
            else f"did you mean {near[0]!r}?"
            if near
            else "use one of them, or LayoutMap.from_yaml for a file",
        )
    with open(os.path.join(_FOLDER, f"{name}.yaml"), encoding="utf-8") as file:
        return file.read()


def _replace_preset_dims(rules: Mapping[str, Specs], dims: Mapping[str, BatchDim | None]) -> dict[str, Specs]:
    return {
        pattern: tuple(dims[spec] if isinstance(spec, str) else spec for spec in specs)
        for pattern, specs in rules.items()
    }


def __getattr__(name: str) -> object:
    if name in _OLD_NAMES:
        warn_about_old_name(name, _OLD_NAMES[name])
        return globals()[_OLD_NAMES[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
