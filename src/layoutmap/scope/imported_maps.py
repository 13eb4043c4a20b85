"""Create layout maps from plans, models, and other libraries' rules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Self

from layoutmap.core.errors import LayoutMapWarning, MeshError, RuleError, format_count
from layoutmap.core.mesh import Mesh, check_dims_in_mesh
from layoutmap.core.specs import BatchDim
from layoutmap.core.users_line import find_user_stacklevel
from layoutmap.plan.table import PlanTable
from layoutmap.plan.to_rules import derive_rules
from layoutmap.rules.keras_rules import read_keras_map
from layoutmap.rules.logical_axes import Semantics, resolve_logical_axes_to_specs
from layoutmap.rules.partition_specs import (
    make_path_rules,
    read_shapes_by_path,
    read_spec_tree,
    resolve_partition_rules,
)
from layoutmap.rules.rule_set import RuleSet, parse_or_convert_mesh
from layoutmap.rules.tp_plan import convert_tp_plan_to_rules, is_model_function, read_tp_plan
from layoutmap.scope.plan import make_plan
from layoutmap.scope.scope import plan


class LayoutMapConstructors(RuleSet):
    """Constructors of `LayoutMap` from plans, models, and other libraries' rules."""

    @classmethod
    def from_plan(cls, plan: PlanTable) -> Self:
        """Return the map with the fewest rules that give the layouts of a plan.

        The rules are planned again and compared with the given plan. With the map, a model of another program can be
        planned on another mesh, searched, or built here.

        Args:
            plan: Plan of an existing model (`lm.inspect(model)`) or from a file (`lm.Plan.from_json(text)`).

        Returns:
            The map, on the mesh of the plan, with the activation rules that the plan uses. Variables without a rule are
            replicated.

        Raises:
            RuleError: Rules cannot give a variable its layout.

        Warns:
            LayoutMapWarning: The plan has arrays without a layout, or slots with another layout than their weights,
                which rules cannot give.

        Example:
            >>> import layoutmap as lm
            >>> from layoutmap.core.variables import VariableSpec
            >>> variables = [VariableSpec(f"h.{i}.up", (64, 256), "float32") for i in range(4)]
            >>> rules = lm.LayoutMap("data=2,model=4", {r"h\\.[0-3]\\.up": (None, "model")})
            >>> print(lm.LayoutMap.from_plan(make_plan(variables, rules)))
            LayoutMap on data=2, model=4, 1 rule
               1  .*\\.\\d+\\.up$  (unsharded, model)
            the rest is replicated
        """
        rules = derive_rules(plan)
        if lost := _find_reasons_for_lost_layouts(plan, rules):
            _warn_user(
                f"from_plan: {format_count(len(lost), 'variable')} of the plan "
                f"{'gets' if len(lost) == 1 else 'get'} a different layout, or none, from the map",
                lost,
                "rules give layouts only on the map's mesh, and slots follow their weights",
                "print the plan to see the layouts that rules cannot give",
            )
        outputs = sorted({m.rule for m in plan.activations if m.rule}, key=lambda rule: rule.number)
        activations = {rule.pattern: rule.layout for rule in outputs}
        patterns = {rule.pattern: rule.layout for rule in rules.rules}
        return cls(rules.mesh, patterns, activations, uneven=rules.uneven, rest="replicated")

    @classmethod
    def from_model(cls, model: object, optimizer: object = None) -> Self:
        """Return the map of an existing model, as `lm.inspect(model, optimizer).to_layout_map()` does.

        Args:
            model: See `layoutmap.inspect`. Or a plan, see `from_plan`.
            optimizer: See `layoutmap.inspect`.

        Raises:
            RuleError: Rules cannot give a variable its layout.
            ScopeError: `model` is not a model of a supported library.
        """
        # Import by name, because the package of `inspect` imports this one, so a normal import would be circular.
        plan = model if isinstance(model, PlanTable) else import_module("layoutmap").inspect(model, optimizer)
        return cls.from_plan(plan)

    @classmethod
    def from_tp_plan(
        cls,
        plan: Any,
        mesh: Mesh,
        *,
        dim: str = "model",
        batch_dim: BatchDim | None = None,
        prefix: str = "",
        parameters: Mapping[str, Any] | None = None,
        activations: bool = True,
    ) -> Self:
        """Convert the tensor-parallel plan of a Hugging Face transformers model.

        Args:
            plan: Function that creates the model, whose dry run shows the plan and the parameters. Or a model. Or the
                config of a base model, or a plan itself, which is a dict of styles by path: its paths may need a
                `prefix`, and without `parameters` their names are guessed.
            mesh: The mesh.
            dim: Mesh dim over which weights are sharded.
            batch_dim: Mesh dim over which batches are sharded; `None`: none.
            prefix: Prefix of the plan's paths in the model, as in `"model."`.
            parameters: All parameters by path: shapes, or objects with a `shape`, such as a state dict.
            activations: Whether to convert styles for layer outputs to `activations`. They assume outputs of shape
                (batch, sequence, features), and (tokens, features) for experts. If a model calls other layers with all
                tokens in one axis, the first call raises: write rules for these layers.

        Returns:
            The map. Each rule ends in `$` and matches one name of a parameter.

        Raises:
            RuleError: There is no plan, a style is unknown, or the mesh does not have the dim.

        Warns:
            LayoutMapWarning: Layouts cannot express a part of the plan, or a part matches nothing in the model.

        Example:
            >>> plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
            >>> shapes = {"layers.0.mlp.up_proj.weight": (64, 16), "layers.0.mlp.down_proj.weight": (16, 64)}
            >>> print(lm.LayoutMap.from_tp_plan(plan, lm.Mesh(None, "model=4"), parameters=shapes))
            LayoutMap on model=4, 2 rules
               1  layers\\.\\d+\\.mlp\\.up_proj\\.weight$    (model, unsharded)
               2  layers\\.\\d+\\.mlp\\.down_proj\\.weight$  (unsharded, model)
            Activations on model=4, 1 rule
               1  layers\\.\\d+\\.mlp\\.down_proj$  (unsharded, unsharded, unsharded)

        References:
            `transformers.distributed.tensor_parallel` of transformers 5.23.
        """
        mesh = parse_or_convert_mesh(mesh) or mesh
        check_dims_in_mesh("from_tp_plan: dim", dim, mesh, "weights are sharded over it", RuleError, "")
        check_dims_in_mesh(
            "from_tp_plan: batch_dim", batch_dim, mesh, "batches are sharded over it", RuleError
        )
        layers: list[str] | None = None
        if is_model_function(plan):
            plan, parameters = _build_in_dry_run(plan, mesh)
        if hasattr(plan, "named_parameters"):
            layers = [path for path, _ in plan.named_modules(remove_duplicate=False)]
            parameters = parameters or dict(plan.named_parameters(remove_duplicate=False))
        made = convert_tp_plan_to_rules(
            read_tp_plan(plan),
            dim=dim,
            batch_dim=batch_dim,
            prefix=prefix,
            parameters=parameters,
            layers=layers,
        )
        for text in made.warnings:
            warnings.warn(text, LayoutMapWarning, stacklevel=2)
        return cls(mesh, made.rules, made.activations if activations else None)

    @classmethod
    def from_keras(cls, keras_map: object, mesh: Mesh | str | None = None) -> Self:
        """Convert a `keras.distribution.LayoutMap`.

        Its keys, regexes over `variable.path`, become rules with the prefix `keras:` and keep the meaning that they
        have in Keras 3.15: an exact name wins, and otherwise the regex that matches the whole name. Two matching
        regexes are an error of the plan. Axes that a layout leaves out are unsharded. If Keras numbers a name that the
        program did not choose, the count starts at the beginning of the scope, as in a process that created no layer
        before.

        You can add rules over object paths. A rule equal to the path or name of a variable wins, and otherwise the
        first rule of either kind that matches.

        Args:
            keras_map: The map.
            mesh: Mesh to use instead of the map's, with the dims of its layouts.

        Raises:
            RuleError: `keras_map` is not a `keras.distribution.LayoutMap`, has no mesh, or has a rule that is not
                allowed.
            MeshError: The mesh is not allowed.

        Example:
            >>> import keras
            >>> devices = keras.distribution.DeviceMesh((2, 4), ("batch", "model"), keras.distribution.list_devices())
            >>> theirs = keras.distribution.LayoutMap(devices)
            >>> theirs["up/kernel"] = (None, "model")
            >>> layout_map = lm.LayoutMap.from_keras(theirs)
            >>> layout_map["keras:up/kernel"].sharding_specs
            ('unsharded', 'model')
            >>> print(layout_map)
            LayoutMap on batch=2, model=4, 1 rule
               1  keras:up/kernel  (unsharded, model)
        """
        found, rules = read_keras_map(keras_map, parse_or_convert_mesh(mesh))
        return cls(found, rules)

    @classmethod
    def from_partition_specs(cls, specs: object, mesh: Mesh | str, parameters: object) -> Self:
        """Return a map from the `PartitionSpec`s or `NamedSharding`s of arrays.

        Args:
            specs: Specs in a dict by path (`{"d1.kernel": P(None, "model")}`) or in nested dicts. `None` means
                replicated.
            mesh: The mesh.
            parameters: Shapes of all arrays by path: a plan, a dict, or nested dicts of shapes or of objects with a
                `shape`. An array without a spec gets no rule.

        Returns:
            The map. Its rules match these paths, and paths of other blocks that differ only in numbers.

        Raises:
            RuleError: A spec does not fit its array, has no array, or cannot be expressed as a layout.

        Example:
            >>> specs = {"d1": {"kernel": (None, "model"), "bias": ()}}
            >>> shapes = {"d1": {"kernel": (8, 16), "bias": (16,)}}
            >>> print(lm.LayoutMap.from_partition_specs(specs, "batch=2,model=4", shapes))
            LayoutMap on batch=2, model=4, 2 rules
               1  d1\\.kernel$  (unsharded, model)
               2  d1\\.bias$    (unsharded,)
        """
        where, on = "from_partition_specs", _require_mesh(mesh)
        return cls(
            on,
            make_path_rules(read_spec_tree(specs, read_shapes_by_path(parameters, where), on, where)),
        )

    @classmethod
    def from_partition_rules(cls, rules: object, mesh: Mesh | str, parameters: object) -> Self:
        """Convert rules in the form of EasyLM: `[(regex, PartitionSpec), ...]`.

        They keep their meaning: the first regex that `re.search` finds in an array's path, joined by slashes, wins. An
        array of one element is replicated. Each other array needs a rule.

        Args:
            rules: The pairs, in order.
            mesh: The mesh.
            parameters: See `from_partition_specs`. Every array gets a rule.

        Returns:
            The map, with rules over paths joined by dots; see `from_partition_specs`.

        Raises:
            RuleError: An array has no rule, or a rule is invalid, does not fit its array, or cannot be expressed as a
                layout.

        Warns:
            LayoutMapWarning: A rule decides nothing.

        Example:
            >>> rules = [("attention/(wq|wk|wv)/kernel", ("fsdp", "model")), (".*", ())]
            >>> shapes = {f"h.{i}.attention.{name}.kernel": (16, 64) for i in range(32) for name in ("wq", "wo")}
            >>> print(lm.LayoutMap.from_partition_rules(rules, "fsdp=2,model=4", shapes))
            LayoutMap on fsdp=2, model=4, 2 rules
               1  h\\.\\d+\\.attention\\.wq\\.kernel$  (fsdp, model)
               2  h\\.\\d+\\.attention\\.wo\\.kernel$  (unsharded, unsharded)

        References:
            `match_partition_rules` of EasyLM.
        """
        where, on = "from_partition_rules", _require_mesh(mesh)
        specs, unused = resolve_partition_rules(rules, read_shapes_by_path(parameters, where), where)
        if unused:
            _warn_user(
                f"{where}: {format_count(len(unused), 'rule')} without effect",
                {"rules": ", ".join(unused)},
                "these rules match no path, or earlier rules match first",
                "ignore this if the model has no such part, else correct the rules or move them up",
            )
        return cls(on, make_path_rules(specs))

    @classmethod
    def from_logical_axes(
        cls,
        rules: object,
        axes: object,
        mesh: Mesh | str,
        parameters: object,
        *,
        semantics: Semantics = "linen",
    ) -> Self:
        """Convert logical axis rules of flax or MaxText and the axis names of each array.

        Args:
            rules: Pairs of an axis name and the mesh dims that shard it, in order: `[("embed", "fsdp"), ("mlp",
                ("tensor",)), ("norm", None)]`.
            axes: Axis names of each array, by path or in nested dicts, as `nn.get_partition_spec` returns them:
                `{"mlp": {"kernel": P("embed", "mlp")}}`.
            mesh: The mesh.
            parameters: See `from_partition_specs`.
            semantics: Meaning of names with several rules or none. `"linen"`, as in `flax.linen` and MaxText: rules
                apply in order, to axes that have no dims yet, if the dims shard no other axis of the array; a name
                without a rule is unsharded. `"nnx"`, as in `flax.nnx`: the last rule for a name wins, and a name
                without a rule names a mesh dim.

        Returns:
            The map; see `from_partition_specs`.

        Raises:
            RuleError: A rule is invalid, or axes or dims do not fit their array or the mesh.

        Warns:
            LayoutMapWarning: With `"linen"`, a name has no rule.

        Example:
            >>> axes = {"mlp": {"kernel": ("embed", "mlp")}, "norm": {"scale": ("embed",)}}
            >>> shapes = {"mlp": {"kernel": (16, 64)}, "norm": {"scale": (16,)}}
            >>> rules = [("mlp", "tensor"), ("embed", "fsdp")]
            >>> print(lm.LayoutMap.from_logical_axes(rules, axes, "fsdp=2,tensor=4", shapes))
            LayoutMap on fsdp=2, tensor=4, 2 rules
               1  mlp\\.kernel$  (fsdp, tensor)
               2  norm\\.scale$  (fsdp,)

        References:
            `flax.linen.logical_to_mesh_axes` and `flax.nnx.get_partition_spec` of flax 0.12.8.
        """
        where, on = "from_logical_axes", _require_mesh(mesh)
        specs, without = resolve_logical_axes_to_specs(
            rules, axes, read_shapes_by_path(parameters, where), semantics, where
        )
        if without:
            _warn_user(
                f"{where}: {len(without)} names of axes have no rule",
                {"names": ", ".join(without)},
                "linen leaves such an axis unsharded",
                f"add a rule: ({without[0]!r}, None), or a mesh dim in place of None",
            )
        return cls(on, make_path_rules(specs))


def _require_mesh(mesh: Mesh | str) -> Mesh:
    """Convert the mesh argument of a constructor to a mesh, or raise if it is missing."""
    found = parse_or_convert_mesh(mesh)
    if found is None:
        raise MeshError(
            "the mesh is missing",
            why="specs name dims of a mesh",
            fix='pass a mesh, as in mesh="batch=2,model=4"',
        )
    return found


def _find_reasons_for_lost_layouts(plan: PlanTable, rules: RuleSet) -> dict[str, object]:
    """Return a dict from path to reason, for variables to which the rules do not give their layout in the plan."""
    planned = make_plan([a.variable for a in plan.assignments], rules, complete=False)
    lost: dict[str, object] = {
        problem.subject: problem.what.removeprefix(f"{problem.subject}: ")
        for problem in plan.problems
        if problem.kind in ("no layout", "another mesh", "uneven") and problem.severity == "warning"
    }
    for here, there in zip(plan.assignments, planned.assignments, strict=True):
        if here.layout != there.layout:
            lost[here.variable.path] = f"in {here.layout}, and as its weight it would be in {there.layout}"
    return lost


def _warn_user(what: str, facts: Mapping[str, object], why: str, fix: str) -> None:
    warnings.warn(LayoutMapWarning(what, facts=facts, why=why, fix=fix), stacklevel=find_user_stacklevel())


def _build_in_dry_run(make_model: Callable[[], Any], mesh: Mesh) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Build a model in a dry run, and return it and a dict from path to the shape of each weight."""
    built_models: list[Any] = []

    def make_and_keep_model() -> Any:
        built_models.append(make_model())
        return built_models[0]

    weights = [
        a.variable
        for a in plan(make_and_keep_model, RuleSet(mesh), library="torch").assignments
        if a.variable.kind == "weight"
    ]
    return built_models[0], {path: v.shape for v in weights for path in (v.path, *v.aliases)}
