"""Convert a tensor parallel plan of Hugging Face transformers to rules: `{"layers.*.self_attn.q_proj": "colwise"}`.

Such a plan gives a style to modules and parameters. The shardings of weights and of layer outputs in a style become
layouts. Its reductions and local tensors need no rules, because a framework with layouts derives them. This module
makes unchecked rules of the styles; `LayoutMap.from_tp_plan` checks them.

Styles: those of `transformers` 5.23, and those of 4.5x that have other names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from layoutmap.core.errors import RuleError, format_message
from layoutmap.core.specs import BatchDim, Specs

ShardedAxis = Literal["out", "in", "first", "last", "nothing", "none of its own"]
Output = Literal["as it comes", "replicated", "sequence", "tokens"]


@dataclass(frozen=True, slots=True)
class ParallelStyle:
    """The shardings that a parallel style of torch or transformers stands for.

    Args:
        sharded: The sharded axis of a parameter. `"out"`: the axis of output features, which is the last but one or the
            only one. `"in"`: the axis of input features, which is the last; biases are replicated. `"first"`, `"last"`:
            that axis. `"nothing"`: the parameter is replicated. `"none of its own"`: the style does not determine the
            sharding of parameters.
        output: How the layer's output is sharded. `"as it comes"`: the style does not determine it. `"replicated"`:
            only along the batch. `"sequence"`: also along the sequence. `"tokens"`: only along the batch, which is one
            axis with the sequence.
        packed: Whether the axis contains several weights in a row, which transformers shards one by one.
    """

    sharded: ShardedAxis
    output: Output = "as it comes"
    packed: bool = False

    def find_sharded_axis(self, parameter_name: str, rank: int) -> int | None:
        """Return the axis along which the style shards a parameter of this name and rank, or None if there is none."""
        if self.sharded == "out":
            return max(rank - 2, 0) if rank else None
        if self.sharded == "in":
            return None if parameter_name == "bias" or (self.packed and rank == 1) else rank - 1
        return {"first": 0, "last": rank - 1}.get(self.sharded)


_ROWWISE = ParallelStyle("in", "replicated")
_REPLICATED = ParallelStyle("nothing")
_WITHOUT_PARAMETERS = ParallelStyle("none of its own")
STYLES = {
    "colwise": ParallelStyle("out"),
    "colwise_gather_output": ParallelStyle("out", "replicated"),
    "colwise_rep": ParallelStyle("out", "replicated"),
    "local_colwise": ParallelStyle("out"),
    "packed_colwise": ParallelStyle("out", packed=True),
    "rowwise": _ROWWISE,
    "rowwise_rep": _ROWWISE,
    "rowwise_split_input": _ROWWISE,
    "local_rowwise": ParallelStyle("in"),
    "packed_rowwise": ParallelStyle("in", packed=True),
    "local_packed_rowwise": ParallelStyle("in", packed=True),
    "embedding_rowwise": ParallelStyle("first", "replicated"),
    "embedding_colwise": ParallelStyle("last", "replicated"),
    "sequence_parallel": ParallelStyle("nothing", "sequence"),
    "replicate": _REPLICATED,
    "replicated_with_grad_allreduce": _REPLICATED,
    "mla_kv_a_proj": _REPLICATED,
    "ep_router": _REPLICATED,
    "grouped_gemm": ParallelStyle("first"),
    "moe_tp_experts": ParallelStyle("none of its own", "tokens"),
    "ep_dispatch_experts": ParallelStyle("none of its own", "tokens"),
    "gather": ParallelStyle("none of its own", "tokens"),
    "all_reduce": _WITHOUT_PARAMETERS,
    "moe_identity_expert": _WITHOUT_PARAMETERS,
    "local_params": _WITHOUT_PARAMETERS,
    "local": _WITHOUT_PARAMETERS,
}
"""The known parallel styles, by their names in a plan."""

_EXPERTS = {"moe_tp_experts", "ep_dispatch_experts", "gather"}


@dataclass(frozen=True, slots=True)
class TpRules:
    """Unchecked rules from a tensor parallel plan: specs by pattern, and warnings about its entries."""

    rules: Mapping[str, tuple[str | None, ...]]
    activations: Mapping[str, Specs]
    warnings: tuple[str, ...]


def read_tp_plan(source: object) -> dict[str, str]:
    """Return the tensor parallel plan of a transformers model or config. A plan is returned as a dict.

    Raises:
        RuleError: The model or config has no such plan.
    """
    if isinstance(source, Mapping):
        return dict(cast("Mapping[str, str]", source))
    for name in ("tp_plan", "_tp_plan", "base_model_tp_plan"):
        found = None if isinstance(source, type) else getattr(source, name, None)
        if found:
            return dict(found)
    source_class = source if isinstance(source, type) else type(source)
    parts = sorted(n for n in ("text_config", "vision_config", "audio_config") if hasattr(source, n))
    raise RuleError(
        f"{source_class.__module__}.{source_class.__qualname__} has no tp_plan",
        why=(
            "it is a class, and part of the plan is in the config of an instance"
            if isinstance(source, type)
            else "transformers has plans only for some models, in the config of each submodel"
        ),
        fix=(
            f"pass the config of a part, as in config.{parts[0]}, and its prefix"
            if parts
            else 'pass a model, a config, or a plan: {"layers.*.self_attn.q_proj": "colwise", ...}'
        ),
    )


def is_model_function(source: object) -> bool:
    """Return whether an object is a function that builds a model, and not a model, config, or class."""
    named = ("tp_plan", "_tp_plan", "base_model_tp_plan", "named_parameters")
    return callable(source) and not isinstance(source, type) and not any(hasattr(source, n) for n in named)


# A tensor parallel plan does not contain the ranks of parameters, so callers may pass their shapes (decisions/0014).
def convert_tp_plan_to_rules(
    plan: Mapping[str, str],
    *,
    dim: str,
    batch_dim: BatchDim | None,
    prefix: str,
    parameters: Mapping[str, Sequence[int]] | None,
    layers: Iterable[str] | None,
) -> TpRules:
    """Return rules with the shardings of a tensor parallel plan of transformers.

    Args:
        plan: Styles by the path of a module or a parameter; `*` stands for the number of a layer.
        dim: The mesh dim that weights are sharded over.
        batch_dim: The mesh dim that batches are sharded over, if any.
        prefix: The text before the plan's paths in the paths of the model, such as `"model."`.
        parameters: The shapes of all parameters by path. `None`: assume that each linear layer has a weight and a bias,
            and that experts are parameters of three axes.
        layers: The paths of all layers; `None` means those above the parameters.

    Raises:
        RuleError: A style is not known, or one entry is for parameters with different numbers of axes.
    """
    for key, name in plan.items():
        _check_style(key, name)
    if parameters is None:
        found = {key: _guess_parameter_ranks(key, plan) for key in plan}
        modules = None
    else:
        found = _find_parameter_ranks(plan, prefix, parameters)
        modules = (
            set(layers)
            if layers is not None
            else {up for path in parameters for up in _list_parent_paths(path)}
        )
        if plan and not any(found.values()):
            raise _make_unmatched_plan_error(next(iter(plan)), prefix, parameters)
    rules: dict[str, tuple[str | None, ...]] = {}
    activations: dict[str, Specs] = {}
    unmatched: list[str] = []
    for key, name in plan.items():
        style, pattern = STYLES[name], re.escape(prefix) + _make_entry_regex(key)
        for leaf, rank in found[key].items():
            axis = style.find_sharded_axis(leaf or key.rpartition(".")[2], rank)
            if style.sharded != "none of its own":
                specs = tuple(dim if i == axis else None for i in range(rank))
                rules[pattern + (rf"\.{re.escape(leaf)}" if leaf else "") + "$"] = specs
        is_layer = "" not in found[key] and (modules is None or _has_matching_path(pattern, modules))
        if is_layer and style.output != "as it comes":
            activations[pattern + "$"] = {
                "replicated": (batch_dim, None, None),
                "sequence": (batch_dim, dim, None),
                "tokens": (batch_dim, None),
            }[style.output]
        if parameters is not None and not found[key] and not is_layer:
            unmatched.append(f"{prefix}{key} ({name})")
    packed = [f"{prefix}{key} ({name})" for key, name in plan.items() if found[key] and STYLES[name].packed]
    return TpRules(rules, activations, tuple(_make_tp_plan_warnings(packed, unmatched)))


def _check_style(key: str, name: object) -> None:
    if not isinstance(name, str) or name not in STYLES:
        near = difflib.get_close_matches(str(name), STYLES, 1)
        raise RuleError(
            f"tp_plan entry {key!r}: there is no style {name!r}",
            why=f"the styles are {', '.join(STYLES)}",
            fix=f"did you mean {near[0]!r}?" if near else "use one of them, or leave the entry out",
        )
    if any("*" in part and part != "*" for part in key.split(".")):
        raise RuleError(
            f"tp_plan entry {key!r}: its * is not a complete part of the path",
            why="* stands for the number of a layer, and must be between dots",
            fix="write it as in 'layers.*.mlp.up_proj'",
        )


def _make_entry_regex(key: str) -> str:
    return r"\.".join(r"\d+" if part == "*" else re.escape(part) for part in key.split("."))


def _has_matching_path(pattern: str, paths: Iterable[str]) -> bool:
    match = re.compile(pattern).fullmatch
    return any(match(path) for path in paths)


def _list_parent_paths(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _find_parameter_ranks(
    plan: Mapping[str, str], prefix: str, parameters: Mapping[str, Any]
) -> dict[str, dict[str, int]]:
    """Return a dict from each entry of a plan to the names and ranks of the parameters to which it applies.

    An entry is for the parameter with its path, which has the name "", or else for the parameters of the module with
    its path that have no entry of their own. This is how transformers applies it.
    """
    found: dict[str, dict[str, int]] = {key: {} for key in plan}
    entries = {key: re.compile(re.escape(prefix) + _make_entry_regex(key)).fullmatch for key in plan}
    for path, shape in parameters.items():
        module, _, leaf = path.rpartition(".")
        of_parameter = [(key, "") for key, match in entries.items() if match(path)]
        of_module = [(key, leaf) for key, match in entries.items() if match(module)]
        for key, name in (of_parameter or of_module)[:1]:
            rank = len(tuple(getattr(shape, "shape", shape)))
            if found[key].setdefault(name, rank) != rank:
                raise RuleError(
                    f"tp_plan entry {key!r}: its parameters have different ranks, {found[key][name]} and {rank}",
                    facts={"parameter": path},
                    why="a rule gives one layout, with a spec for each axis",
                    fix="write an entry for each parameter",
                )
    return found


def _guess_parameter_ranks(key: str, plan: Mapping[str, str]) -> dict[str, int]:
    """Guess, from the style of an entry, which parameters it applies to, and return their ranks by name."""
    style = STYLES[plan[key]]
    parent_style = plan.get(key.rpartition(".")[0])
    if style.sharded == "none of its own" or plan[key] == "replicate":
        return {}
    if style.sharded == "nothing":
        return {"weight": 2 if plan[key] == "mla_kv_a_proj" else 1}
    if parent_style in _EXPERTS or plan[key] == "grouped_gemm":
        return {"": 2 if key.endswith("_bias") else 3}
    if parent_style == "local_params":
        return {"": 1}
    return {"weight": 2} if plan[key].startswith("embedding") else {"weight": 2, "bias": 1}


def _make_unmatched_plan_error(key: str, prefix: str, parameters: Iterable[str]) -> RuleError:
    """Return the error that no entry of a plan matches the model. Its fix is a prefix that makes `key` match."""
    with_any_prefix = re.compile(rf"(.*?\.)?{_make_entry_regex(key)}(\.[^.]+)?")
    matches = (with_any_prefix.fullmatch(path) for path in parameters)
    other = next((match[1] or "" for match in matches if match), None)
    return RuleError(
        "tp_plan: no entry matches a parameter of the model",
        facts={"entry": prefix + key, "parameter": next(iter(parameters), "")},
        why="the model's paths have another prefix"
        if other is not None
        else "the plan belongs to another model",
        fix=f"from_tp_plan(..., prefix={other!r})" if other is not None else "use the plan of this model",
    )


def _make_tp_plan_warnings(packed: Sequence[str], unmatched: Sequence[str]) -> Iterable[str]:
    if packed:
        yield format_message(
            "tp_plan: packed weights are sharded in consecutive pieces",
            {"entries": ", ".join(packed)},
            "a layout shards the axis as a whole, but transformers shards each weight in it. The results are"
            " equal, but splitting the axis into the weights sends values between devices",
            "shard the experts instead, with the config's base_model_ep_plan, or ignore this",
        )
    if unmatched:
        yield format_message(
            "tp_plan: these entries match nothing in the model",
            {"entries": ", ".join(unmatched)},
            "no parameter and no layer has such a path",
            "ignore this if the model has no such part, else correct their paths",
        )
