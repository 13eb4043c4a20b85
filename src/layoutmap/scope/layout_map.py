"""Define `LayoutMap`: a rule set that plans, builds, and shards models.

The work is done in `rules`, `scope.scope` and `scope.optimizers`. Constructors from other libraries' rules are in
`scope.imported_maps`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Unpack

from layoutmap.adapters.options import OptionsByName
from layoutmap.core.match import format_rule_layout
from layoutmap.core.mesh import Mesh
from layoutmap.core.text_table import format_html_table
from layoutmap.scope.context import Scope
from layoutmap.scope.imported_maps import LayoutMapConstructors
from layoutmap.scope.optimizers import apply_optimizer, build_optimizer, plan_optimizer
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.scope.scope import apply, build, scope


# Rules must not import adapters, so the methods that need one are in this subclass (decisions/0038).
class LayoutMap(LayoutMapConstructors):
    """Map regexes over variable paths to layouts.

    `layout_map[path]` and `layout_map.get(path)` look a path up: first an exact key, then `re.match` of each rule in
    insertion order. The first match wins. Without a match the result is `None`. All other operations (`in`, `del`,
    `pop`, `len`, `items`, ...) are those of a dict of the rules.

    `re.match` anchors the start of the path and not its end: `d1\\.kernel` also matches `d1.kernel_scale`. End a
    pattern with `$` to exclude that. A rule that begins with `keras:` matches Keras's name of a variable; see
    `from_keras`.

    `activations` is a second dict of this kind. It maps regexes over layer paths to the layouts of the layers' outputs.

    Args:
        mesh: Mesh for rules that are tuples of specs, and for variables without a rule, which are replicated on it.
            Text such as `"batch=2,model=4"` means an abstract mesh with these dims. `None`: the mesh of the first
            layout that is added.
        rules: Initial rules, in order.
        activations: Rules for layer outputs, in order; see `Activations`.
        uneven: Policy for an axis that its mesh dims do not divide. `"error"`: refuse it. `"pad"`: store padding that
            no reader sees; the last shards hold fewer elements, or none. `"replicate"`: leave the axis unsharded.
            `"shrink"`: shard it over those of its mesh dims that divide it. `("pad", "shrink")`: pad, and shrink
            variables that cannot be padded. A rule from `add` can have its own policy. The plan shows which one was
            applied.
        rest: `"replicated"`: variables without a rule are replicated on purpose, which `strict` accepts. `None`: they
            are replicated, and the plan warns about each. Also an attribute.

    Raises:
        RuleError: See `__setitem__`. Or `rest` has an invalid value.
        MeshError: `mesh` is not a mesh, or its text is invalid.

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
        """Return the mesh of the map, or `None` while it has neither a mesh nor a rule."""
        return self.mesh

    def to_partition_specs(self, tree: object) -> Any:
        """Return a tree of `PartitionSpec`s for a pytree of arrays or of `jax.ShapeDtypeStruct`s.

        The path of a leaf is its keys joined by dots, as in `blocks.0.kernel`. Rules are checked as in a plan.

        Args:
            tree: The pytree.

        Returns:
            The same tree, with a spec for each array that has an entry per axis, and `None` for other leaves.

        Raises:
            PlanError: The rules do not fit the arrays.

        Example:
            >>> import jax, layoutmap as lm
            >>> layout_map = lm.LayoutMap("batch=2,model=4", {"d1.kernel": (None, "model")})
            >>> layout_map.to_partition_specs({"d1": {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}})
            {'d1': {'kernel': P(None, 'model')}}
        """
        return self._plan_tree(tree).to_partition_specs(tree)

    def to_named_shardings(self, tree: object) -> Any:
        """Return a tree of `NamedSharding`s on the devices of this machine. See `to_partition_specs`.

        Raises:
            PlanError: The rules do not fit the arrays.
            MeshError: The machine does not have the mesh's devices.
        """
        return self._plan_tree(tree).to_named_shardings(tree)

    def _plan_tree(self, tree: object) -> Plan:
        # imported here, because most plans need not load JAX
        from layoutmap.engines.jax.trees import list_variables

        return make_plan(list_variables(tree), self).check()

    def scope(
        self, *, library: str | None = None, **options: Unpack[OptionsByName]
    ) -> AbstractContextManager[Scope]:
        """Build models with each variable created in its layout. See `layoutmap.scope`."""
        return scope(self, library=library, **options)

    def build(
        self,
        make_model: Callable[[], Any],
        *,
        inputs: Any = None,
        library: str | None = None,
        **options: Unpack[OptionsByName],
    ) -> Any:
        """Build one model in a scope, with its variables in their layouts. See `layoutmap.build`."""
        return build(make_model, self, inputs=inputs, library=library, **options)

    def apply(self, model: object, **options: Unpack[OptionsByName]) -> Any:
        """Shard an existing model. See `layoutmap.apply`."""
        return apply(model, self, **options)

    def plan_optimizer(
        self,
        tx: object,
        params: object,
        *,
        wrt: object = None,
        zero_dim: str | None = None,
        memory: str | None = None,
    ) -> Plan:
        """Plan the layouts of an optimizer's state, as a dry run of `build_optimizer` without computations.

        Args:
            tx: See `build_optimizer`.
            params: See `build_optimizer`. Parameters without a layout, such as the `jax.ShapeDtypeStruct`s of
                `jax.eval_shape`, get the layout of their rule.
            wrt: See `build_optimizer`.
            zero_dim: See `build_optimizer`.
            memory: See `build_optimizer`.

        Returns:
            The plan of the parameters and of all slots, each with its parameter. Slots of several elements that follow
            no parameter are replicated and listed among the problems.

        Raises:
            LayoutError: A parameter is not an array.
            MeshError: Parameters are on different meshes, or not on the map's mesh.
            ScopeError: The mesh does not have the dim, or `tx` is not an optimizer.

        Example:
            >>> import jax, optax
            >>> layout_map = LayoutMap("batch=2,model=4", {r".*kernel": (None, "model")})
            >>> params = {"up": {"kernel": jax.ShapeDtypeStruct((128, 256), "float32")}}
            >>> plan = layout_map.plan_optimizer(optax.adafactor(1e-3), params)
            >>> [(slot, str(plan[slot].layout)) for slot in plan if "v_" in slot]
            [('optimizer.up.kernel.0.v_row', '(unsharded,)'), ('optimizer.up.kernel.0.v_col', '(model,)')]
        """
        return plan_optimizer(self, tx, params, wrt, zero_dim, memory)

    def build_optimizer(
        self,
        tx: Any,
        params: Any,
        *,
        wrt: Any = None,
        zero_dim: str | None = None,
        memory: str | None = None,
        strict: bool = False,
    ) -> Any:
        """Create the state of an optax optimizer, with each leaf sharded like its parameter.

        A leaf belongs to the parameter whose path its own path contains. Its axes get the layouts of the parameter's
        axes to which they correspond: moments are sharded like the parameter, Adafactor's rows and columns like the
        remaining axes. Other leaves, such as step counts, are replicated.

        Args:
            tx: Optimizer with `init` and `update`, as in `optax.adamw(1e-3)`.
            params: Sharded parameters: a pytree of arrays, a state of `flax.nnx`, or a module.
            wrt: For a module: filter for the variables that are parameters; `None` means `nnx.Param`.
            zero_dim: Mesh dim over which slots are sharded in addition to their parameters, along the first axis that
                it divides, as in ZeRO-1. Mostly the batch dim. `None`: slots are sharded like their parameters.
            memory: Kind of memory that stores slots of parameters, as for `Layout`: `"pinned_host"` leaves more device
                memory to the model. `None`: that of their parameters.
            strict: Whether to raise on warnings, such as a large slot that follows no parameter.

        Returns:
            The state, with the values of `tx.init(params)`. For a module, an `nnx.Optimizer`.

        Raises:
            LayoutError: A parameter is not an array or has no layout.
            MeshError: Parameters are on different meshes, or not on the map's mesh.
            PlanError: With `strict`, there are warnings.
            ScopeError: The mesh does not have the dim, `tx` is not an optimizer, or its `init` cannot be traced.

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
            >>> state = layout_map.build_optimizer(optax.adam(1e-3), params, memory="pinned_host")
            >>> print(lm.dtensor.fetch_layout(state[0].mu["up"]["kernel"]))
            (unsharded, model) in pinned_host
        """
        return build_optimizer(self, tx, params, wrt, zero_dim, memory, strict)

    def apply_optimizer(
        self,
        state: object,
        params: object,
        *,
        wrt: object = None,
        zero_dim: str | None = None,
        memory: str | None = None,
        strict: bool = False,
    ) -> Any:
        """Shard the existing state of an optimizer, with its values.

        Args:
            state: State from `tx.init` or from a checkpoint. Or an `nnx.Optimizer`, which is changed in place.
            params: See `build_optimizer`.
            wrt: See `build_optimizer`; `None` means that of an `nnx.Optimizer`.
            zero_dim: See `build_optimizer`.
            memory: See `build_optimizer`. `None`: each slot stays in its memory.
            strict: See `build_optimizer`.

        Returns:
            The sharded state, or the `nnx.Optimizer`.

        Raises:
            LayoutError: A parameter is not an array or has no layout.
            MeshError: Parameters are on different meshes, or not on the map's mesh.
            PlanError: With `strict`, there are warnings.
            ScopeError: The mesh does not have the dim.

        Example:
            >>> import jax.numpy as jnp, optax
            >>> layout_map = LayoutMap(lm.create_mesh("model=4"))
            >>> params = [lm.dtensor.relayout(jnp.ones(8), lm.Layout(["model"], layout_map.mesh))]
            >>> state = layout_map.apply_optimizer(optax.adam(1e-3).init([jnp.ones(8)]), params)
            >>> print(lm.dtensor.fetch_layout(state[0].mu[0]))
            (model,)
        """
        return apply_optimizer(self, state, params, wrt, zero_dim, memory, strict)

    def _repr_html_(self) -> str:
        shown = [(self, "rule"), (self.activations, "activation rule")]
        return "".join(
            format_html_table(
                rules.format_title(),
                (kind, "pattern", "layout"),
                [(str(rule.number), rule.pattern, format_rule_layout(rule)) for rule in rules.rules]
                + ([("", "the rest", self.rest)] if self.rest and rules is self else []),
            )
            for rules, kind in shown
            if rules or rules is self
        )
