"""Convert a plan to a tensor parallel plan of transformers, `{"layers.*.mlp.up_proj": "colwise", ...}`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from layoutmap.core.layout import Layout
from layoutmap.plan.table import PlanTable
from layoutmap.plan.torch_styles import (
    ModuleVariables,
    StyledModule,
    find_styled_modules,
    group_variables_by_module,
    list_sharding_dims,
    make_inexpressible_error,
)

_CALL = "to_tp_plan"
_STYLES: dict[tuple[str, bool, bool, int | None], str] = {
    ("colwise", False, True, -1): "colwise",
    ("colwise", False, False, -1): "colwise",
    ("colwise", False, True, None): "colwise_gather_output",
    ("colwise", False, False, None): "colwise_gather_output",
    ("rowwise", False, True, None): "rowwise",
    ("rowwise", False, False, None): "rowwise_split_input",
    ("colwise", True, False, None): "embedding_colwise",
    ("rowwise", True, False, None): "embedding_rowwise",
    ("sequence", False, False, 1): "sequence_parallel",
}


def make_tp_plan(plan: PlanTable) -> dict[str, str]:
    """Return a tensor parallel plan: a dict from a module's path, with a star for each number, to its style.

    Raises:
        PlanError: transformers has no style for a module, or modules with different styles would share an entry.
    """
    modules = group_variables_by_module(plan, _CALL)
    styled = find_styled_modules(plan, modules, _CALL)
    _check_sharded_variables_have_styles(modules, styled)
    found: dict[str, str] = {}
    of_entry: dict[str, str] = {}
    for path in [*dict.fromkeys([*modules, *styled])]:
        name = _get_style_name(styled[path]) if path in styled else ""
        entry = _make_tp_plan_key(path)
        other = of_entry.setdefault(entry, path)
        if found.setdefault(entry, name) != name:
            raise make_inexpressible_error(
                _CALL,
                path,
                f"a style that differs from that of {other}",
                f"in transformers, one entry, {entry!r}, gives one style to the modules of all layer numbers",
                f"give {path} and {other} the same layout",
            )
    return {entry: name for entry, name in found.items() if name}


def _make_tp_plan_key(path: str) -> str:
    """Return a module's path with stars for numbers. As in transformers, the second of two adjacent numbers stays."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", path)


def _check_sharded_variables_have_styles(
    modules: Mapping[str, ModuleVariables], styled: Mapping[str, StyledModule]
) -> None:
    """Raise if a sharded variable is in no module with a style, or if layouts are over several mesh dims."""
    dims: dict[str, tuple[str, Layout]] = {}
    for path, variables in modules.items():
        for name, a in variables.items():
            first_path = a.variable.path
            for dim in list_sharding_dims(a.layout):
                dims.setdefault(dim, (first_path, a.layout))
            if path in styled or not list_sharding_dims(a.layout):
                continue
            if first_path != f"{path}.{name}".lstrip("."):
                what, why = f"sharing its tensor with {path}.{name}", "an entry shards only one of the two"
                raise make_inexpressible_error(
                    _CALL, first_path, what, why, "do not tie the two, or add both entries by hand"
                )
            raise make_inexpressible_error(
                _CALL,
                first_path,
                f"the layout {a.layout}",
                "the styles are for linear layers and embeddings, sharded over one dim by columns or by rows",
                "replicate the variable, or train with layout_map.scope(), which supports this layout",
            )
    if len(dims) > 1:
        (_, first), (path, layout) = [*dims.values()][:2]
        raise make_inexpressible_error(
            _CALL,
            path,
            f"the layout {layout} together with {first}",
            "a tensor parallel plan has only one mesh dim",
            "shard all weights over one dim, and use an fsdp_plan of transformers for the second",
        )


def _get_style_name(styled: StyledModule) -> str:
    """Return the name that transformers gives the style of a module, or raise if it has no such style."""
    name = _STYLES.get((styled.kind, styled.is_embedding, styled.is_paired, styled.output))
    if name is None:
        what = f"a module sharded by {'columns' if styled.kind == 'colwise' else 'rows'} with this output"
        raise make_inexpressible_error(
            _CALL,
            styled.path,
            what,
            "transformers has no style for this output",
            "remove the rule for its output",
        )
    return name
