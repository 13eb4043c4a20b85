"""The layout map as users see it: a rule set that plans, builds and lays out models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from layoutmap.core.errors import LayoutMapWarning, RuleError
from layoutmap.core.match import layout_text
from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import html_table
from layoutmap.rules.rule_set import RuleSet, mesh_of
from layoutmap.rules.tp_plan import is_maker, plan_of, tp_rules
from layoutmap.scope.context import Scope
from layoutmap.scope.optimizers import apply_optimizer, build_optimizer, plan_optimizer
from layoutmap.scope.plan import Plan
from layoutmap.scope.scope import apply, build, plan, scope


class LayoutMap(RuleSet):
    """A dict from regex over a variable's path to a layout.

    Reading (`layout_map[path]`, `layout_map.get(path)`) looks the path up: an exact key first, then `re.match` over the
    rules in insertion order; the first match wins, and no match gives `None`. All else (`in`, `del`, `pop`, `len`,
    `items`, ...) is the dict of the rules themselves.

    `activations` is a dict of the same kind, from regex over a layer's path to the layout of the layer's output.

    `re.match` anchors the start of the path and not its end: `d1\\.kernel` also matches `d1.kernel_scale`. End a
    pattern with `$` to exclude that.

    Args:
        mesh: The mesh to which tuples of specs are bound, and on which variables without a rule are replicated.
            Text such as `"batch=2,model=4"` means an abstract mesh of these dims; `None`, the mesh of the first layout
            that is added.
        rules: Rules to begin with, in order.
        activations: Rules for layers' outputs, in order; see `Activations`.
        uneven: What happens to an axis of a variable that does not divide: `"error"`, `"replicate"`
            (it is left unsharded) or `"shrink"` (it is sharded over as many of its mesh dims as divide
            it). A rule of `add` can say it for itself. What is taken is in the plan.
        rest: `"replicated"`: variables that no rule matches are replicated on purpose, and `strict`
            accepts them; `None`: they are, too, and the plan warns of each. An attribute, too.

    Raises:
        RuleError: See `__setitem__`; or `rest` is something else.
        MeshError: The mesh is none, or the text says none.

    Example:
        >>> layout_map = LayoutMap(Mesh(None, "batch=2,model=4"))
        >>> layout_map[r".*\\.kernel"] = (None, "model")
        >>> layout_map["d1.kernel"].sharding_specs
        ('unsharded', 'model')
        >>> layout_map["d1.bias"] is None
        True
        >>> "d1.kernel" in layout_map, r".*\\.kernel" in layout_map
        (False, True)
        >>> layout_map.activations[r"blocks\\.\\d+"] = ("batch", None, None)
        >>> layout_map.activations["blocks.7"].sharding_specs
        ('batch', 'unsharded', 'unsharded')

    References:
        `tf.keras.dtensor.experimental.LayoutMap` of TensorFlow 2.9 to 2.15.
    """

    def get_default_mesh(self) -> Mesh | None:
        """The mesh of the map; `None` while it has neither a mesh nor a rule."""
        return self.mesh

    @classmethod
    def from_tp_plan(
        cls,
        plan: Any,
        mesh: Mesh,
        *,
        dim: str = "model",
        batch_dim: str | None = None,
        prefix: str = "",
        parameters: Mapping[str, Any] | None = None,
        activations: bool = True,
    ) -> LayoutMap:
        """Make a map of the tensor parallel plan of a Hugging Face transformers model.

        Args:
            plan: A function that makes the model: a dry run of it shows the plan and the parameters.
                Or a model, which has both. Or the config of a base model or a plan itself, a dict of styles by path:
                their paths may need a `prefix`, and what parameters there are is guessed if not given.
            mesh: The mesh.
            dim: The mesh dim that weights are sharded over.
            batch_dim: The mesh dim that batches are sharded over; `None`: they are not.
            prefix: What stands before the plan's paths in the model, as in `"model."`.
            parameters: All parameters by path: shapes, or anything with a `shape`, such as a state dict.
            activations: Whether the styles that say how a layer's output is laid out become `activations`. They are for
                outputs of shape (batch, sequence, features), and (tokens, features) of experts. Where a model calls
                other layers with tokens in one axis, the first call says so: give those layers rules of their own.

        Returns:
            The map. Each rule ends in `$`, and is for one name of parameter.

        Raises:
            RuleError: There is no plan; a style is not known; or the mesh has no such dim.

        Warns:
            LayoutMapWarning: Something of the plan cannot be said in layouts, or is for nothing in the model.

        Example:
            >>> plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
            >>> shapes = {"layers.0.mlp.up_proj.weight": (64, 16), "layers.0.mlp.down_proj.weight": (16, 64)}
            >>> print(LayoutMap.from_tp_plan(plan, Mesh(None, "model=4"), parameters=shapes))
            LayoutMap on model=4, 2 rules
               1  layers\\.\\d+\\.mlp\\.up_proj\\.weight$    (model, unsharded)
               2  layers\\.\\d+\\.mlp\\.down_proj\\.weight$  (unsharded, model)
            Activations on model=4, 1 rules
               1  layers\\.\\d+\\.mlp\\.down_proj$  (unsharded, unsharded, unsharded)

        References:
            `transformers.distributed.tensor_parallel` of transformers 5.23.
        """
        mesh = mesh_of(mesh) or mesh
        for name in (dim, batch_dim):
            if name is not None and name not in mesh:
                raise RuleError(
                    f"from_tp_plan: the mesh has no dim {name!r}",
                    facts={"mesh": str(mesh)},
                    why="weights are sharded over dim, and batches over batch_dim",
                    fix=f"use one of {', '.join(map(repr, mesh.dim_names))}",
                )
        layers: list[str] | None = None
        if is_maker(plan):
            plan, parameters = _made_dry(plan, mesh)
        if hasattr(plan, "named_parameters"):
            layers = [path for path, _ in plan.named_modules(remove_duplicate=False)]
            parameters = parameters or dict(plan.named_parameters(remove_duplicate=False))
        made = tp_rules(
            plan_of(plan), dim=dim, batch_dim=batch_dim, prefix=prefix, parameters=parameters, layers=layers
        )
        for text in made.warnings:
            warnings.warn(text, LayoutMapWarning, stacklevel=2)
        return cls(mesh, made.rules, made.activations if activations else None)

    def scope(self, **options: Any) -> AbstractContextManager[Scope]:
        """Build models whose variables are created straight in their layouts; see `layoutmap.scope`."""
        return scope(self, **options)

    def build(self, make_model: Callable[[], Any], **options: Any) -> Any:
        """Build one model in a scope and give it back, its variables in their layouts; see `layoutmap.build`."""
        return build(make_model, self, **options)

    def apply(self, model: Any, **options: Any) -> Any:
        """Lay out a model that exists; see `layoutmap.apply`."""
        return apply(model, self, **options)

    def plan_optimizer(self, tx: Any, params: Any, *, wrt: Any = None, zero_dim: str | None = None) -> Plan:
        """Say where the state of an optimizer would go: the dry run of `build_optimizer`. Computes nothing.

        Args:
            tx: See `build_optimizer`.
            params: See `build_optimizer`. Parameters without a layout, such as the `jax.ShapeDtypeStruct`s of
                `jax.eval_shape`, get that of their rule.
            wrt: See `build_optimizer`.
            zero_dim: See `build_optimizer`.

        Returns:
            The plan of the parameters and of all slots, each with its parameter. Slots of several elements that
            follow no parameter are replicated, and among its problems.

        Raises:
            LayoutError: A parameter is no array.
            MeshError: Parameters are on two meshes, or on another one than that of the map.
            ScopeError: There is no such dim, or `tx` is no optimizer.

        Example:
            >>> import jax, optax
            >>> layout_map = LayoutMap("batch=2,model=4", {r".*kernel": (None, "model")})
            >>> params = {"up": {"kernel": jax.ShapeDtypeStruct((128, 256), "float32")}}
            >>> plan = layout_map.plan_optimizer(optax.adafactor(1e-3), params)
            >>> [(slot, str(plan[slot].layout)) for slot in plan if "v_" in slot]
            [('optimizer.up.kernel.0.v_row', '(unsharded,)'), ('optimizer.up.kernel.0.v_col', '(model,)')]
        """
        return plan_optimizer(self, tx, params, wrt=wrt, zero_dim=zero_dim)

    def build_optimizer(
        self, tx: Any, params: Any, *, wrt: Any = None, zero_dim: str | None = None, strict: bool = False
    ) -> Any:
        """Make the state of an optimizer of optax, each leaf straight in its layout.

        A leaf belongs to the parameter whose path is in its own, and its axes are laid out as the axes of the parameter
        that they are made of: moments as the parameter, Adafactor's rows and columns as what is left of it. All else,
        such as step counts, is replicated.

        Args:
            tx: The optimizer: anything with `init` and `update`, as in `optax.adamw(1e-3)`.
            params: The parameters, in layouts: a pytree of arrays, a state of `flax.nnx`, or a module of it.
            wrt: For a module: which of its variables are parameters; `None` means `nnx.Param`.
            zero_dim: A mesh dim over which slots are sharded further than their parameters, along the first axis that
                divides, as ZeRO-1 does; mostly that of the batch. `None`: they are not.
            strict: Whether what is only worth a warning, a large slot that follows no parameter, is an error.

        Returns:
            The state, as `tx.init(params)` returns it, with the same values. For a module an `nnx.Optimizer`.

        Raises:
            LayoutError: A parameter is no array, or has no layout.
            MeshError: Parameters are on two meshes, or on another one than that of the map.
            PlanError: `strict`, and there are warnings.
            ScopeError: There is no such dim, `tx` is no optimizer, or its `init` cannot be traced.

        Example:
            >>> import jax.numpy as jnp, optax
            >>> layout_map = LayoutMap(lm.create_mesh("batch=2,model=4"))
            >>> layout = lm.Layout([None, "model"], layout_map.mesh)
            >>> params = {"up": {"kernel": lm.dtensor.relayout(jnp.ones((64, 256)), layout)}}
            >>> state = layout_map.build_optimizer(optax.adam(1e-3), params)
            >>> print(lm.dtensor.fetch_layout(state[0].mu["up"]["kernel"]))
            (unsharded, model)
            >>> state = layout_map.build_optimizer(optax.adam(1e-3), params, zero_dim="batch")
            >>> print(lm.dtensor.fetch_layout(state[0].mu["up"]["kernel"]))
            (batch, model)
        """
        return build_optimizer(self, tx, params, wrt=wrt, zero_dim=zero_dim, strict=strict)

    def apply_optimizer(
        self, state: Any, params: Any, *, wrt: Any = None, zero_dim: str | None = None, strict: bool = False
    ) -> Any:
        """Lay out the state of an optimizer that exists: the same plan, with the values that it has.

        Args:
            state: The state, as `tx.init` or a checkpoint gave it; or an `nnx.Optimizer`, which is changed in place.
            params: See `build_optimizer`.
            wrt: See `build_optimizer`; `None` means that of an `nnx.Optimizer`.
            zero_dim: See `build_optimizer`.
            strict: See `build_optimizer`.

        Returns:
            The state in its layouts, or the `nnx.Optimizer`.

        Raises:
            LayoutError: A parameter is no array, or has no layout.
            MeshError: Parameters are on two meshes, or on another one than that of the map.
            PlanError: `strict`, and there are warnings.
            ScopeError: There is no such dim.

        Example:
            >>> import jax.numpy as jnp, optax
            >>> layout_map = LayoutMap(lm.create_mesh("model=4"))
            >>> params = [lm.dtensor.relayout(jnp.ones(8), lm.Layout(["model"], layout_map.mesh))]
            >>> state = layout_map.apply_optimizer(optax.adam(1e-3).init([jnp.ones(8)]), params)
            >>> print(lm.dtensor.fetch_layout(state[0].mu[0]))
            (model,)
        """
        return apply_optimizer(self, state, params, wrt=wrt, zero_dim=zero_dim, strict=strict)

    def _repr_html_(self) -> str:
        shown = [(self, "rule"), (self.activations, "activation rule")]
        return "".join(
            html_table(
                rules.title(),
                (kind, "pattern", "layout"),
                [(str(rule.number), rule.pattern, layout_text(rule)) for rule in rules.rules]
                + ([("", "the rest", self.rest)] if self.rest and rules is self else []),
            )
            for rules, kind in shown
            if rules or rules is self
        )


def _made_dry(make_model: Callable[[], Any], mesh: Mesh) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """A model as a dry run leaves it, with shapes and no values, and the shapes of its variables under all paths."""
    made: list[Any] = []

    def make_and_keep() -> Any:
        made.append(make_model())
        return made[0]

    weights = [
        a.variable
        for a in plan(make_and_keep, RuleSet(mesh), library="torch").assignments
        if a.variable.kind == "weight"
    ]
    return made[0], {path: v.shape for v in weights for path in (v.path, *v.aliases)}
