"""A plan as a tensor parallel plan of Hugging Face transformers, `{"layers.*.mlp.up_proj": "colwise", ...}`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from layoutmap.core.layout import Layout
from layoutmap.plan.table import PlanTable
from layoutmap.plan.torch_styles import Held, Styled, by_module, dims_of, refused, styled_modules

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


def tp_plan_of(plan: PlanTable) -> dict[str, str]:
    """The styles of a plan's modules, by their paths with a star for each number.

    Raises:
        PlanError: transformers has no style for a module, or one entry would be for modules with different styles.
    """
    modules = by_module(plan, _CALL)
    styled = styled_modules(plan, modules, _CALL)
    _check(modules, styled)
    found: dict[str, str] = {}
    of_entry: dict[str, str] = {}
    for path in [*dict.fromkeys([*modules, *styled])]:
        name = _name(styled[path]) if path in styled else ""
        entry = _entry(path)
        other = of_entry.setdefault(entry, path)
        if found.setdefault(entry, name) != name:
            raise refused(
                _CALL,
                path,
                f"another style than that of {other}",
                f"in transformers {entry!r} is one entry, for all numbers",
                "lay both out alike",
            )
    return {entry: name for entry, name in found.items() if name}


def _entry(path: str) -> str:
    """As transformers looks a module up: of two numbers that follow each other only the first is a star."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", path)


def _check(modules: Mapping[str, Held], styled: Mapping[str, Styled]) -> None:
    dims: dict[str, tuple[str, Layout]] = {}
    for path, held in modules.items():
        for name, a in held.items():
            own = a.variable.path
            for dim in dims_of(a.layout):
                dims.setdefault(dim, (own, a.layout))
            if path in styled or not dims_of(a.layout):
                continue
            if own != f"{path}.{name}".lstrip("."):
                what, why = f"{path}.{name}, which shares its tensor", "one of them alone would be laid out"
                raise refused(_CALL, own, what, why, "do not tie them, or add both entries by hand")
            raise refused(
                _CALL,
                own,
                f"the layout {a.layout}",
                "its styles are for linear layers and embeddings, sharded over one dim by columns or by rows",
                "replicate it, or train with layout_map.scope(), which can",
            )
    if len(dims) > 1:
        (_, first), (path, layout) = [*dims.values()][:2]
        raise refused(
            _CALL,
            path,
            f"the layout {layout}, beside {first}",
            "a tensor parallel plan is for one mesh dim",
            "shard all weights over one dim; over a second one, transformers shards by an fsdp_plan",
        )


def _name(styled: Styled) -> str:
    name = _STYLES.get((styled.kind, styled.is_embedding, styled.is_paired, styled.output))
    if name is None:
        what = f"a module sharded by {'columns' if styled.kind == 'colwise' else 'rows'} with this output"
        raise refused(
            _CALL, styled.path, what, "it has no style for that", "leave the rule for its output out"
        )
    return name
