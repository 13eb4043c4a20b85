"""A layout map: rules over variables' paths, and rules over layers' paths for what those layers put out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from layoutmap.core.errors import LayoutMapWarning, MeshError, RuleError
from layoutmap.core.mesh import Mesh, as_mesh
from layoutmap.core.mesh_dims import kind_of
from layoutmap.core.uneven import Uneven
from layoutmap.rules.rule_set import WRITING, MeshSlot, Rules

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from layoutmap.rules.yaml_file import RulesFields
    from layoutmap.scope.context import Scope

__all__ = ["Activations", "LayoutMap"]


class Activations(Rules):
    """The part of a layout map that says in which layout a layer's output is: `layout_map.activations`.

    A dict from regex over a layer's path to a layout, with the semantics of the rules for variables. A layer puts out
    one array or several in a tuple, list or dict; the layout is for each array among them, and its rank must be theirs.
    What a layer puts out is not known before it runs, so another rank is an error when that layer is first called.
    """

    _rule = "activation rule"
    _paths = "layers' paths"
    _written = "layout_map.activations"
    _example = r"blocks\.\d+"
    _otherwise = "what it puts out stays as it comes"

    def __repr__(self) -> str:
        return f"<{self}>"


class LayoutMap(Rules):
    """A dict from regex over a variable's path to a layout.

    Reading (`layout_map[path]`, `layout_map.get(path)`) looks the path up: an exact key first, then `re.match` over the
    rules in insertion order; the first match wins, and no match gives `None`. All else (`in`, `del`, `pop`, `len`,
    `items`, ...) is the dict of the rules themselves.

    `activations` is a dict of the same kind, from regex over a layer's path to the layout of what the layer puts out.

    `re.match` anchors the start of the path and not its end: `d1\\.kernel` also matches `d1.kernel_scale`. End a
    pattern with `$` to exclude that.

    Args:
        mesh: The mesh to which tuples of specs are bound, and on which variables without a rule are replicated.
            Text such as `"batch=2,model=4"` means an abstract mesh of these dims; `None`, the mesh of the first layout
            that is added.
        rules: Rules to begin with, in order.
        activations: Rules for what layers put out, in order; see `Activations`.
        uneven: What happens to an axis of a variable that does not divide: `"error"`, `"replicate"` (it is left whole)
            or `"shrink"` (it is cut over as many of its mesh dims as divide it). A rule of `add` can say it for itself.
            What is taken is in the plan.

    Raises:
        RuleError: See `__setitem__`.
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

    def __init__(
        self,
        mesh: Mesh | str | None = None,
        rules: Mapping[str, Any] | None = None,
        activations: Mapping[str, Any] | None = None,
        *,
        uneven: Uneven = "error",
    ):
        super().__init__(MeshSlot(_mesh_of(mesh)), rules, uneven)
        self._activations = Activations(self._slot, activations)

    @property
    def activations(self) -> Activations:
        """The rules for what layers put out; they share the map's mesh."""
        return self._activations

    def update(self, rules: Any = (), /, **more: Any) -> None:
        """Add rules, in order, and those for activations if they come from a layout map: all of them, or none.

        Raises:
            RuleError: See `__setitem__`.
        """
        theirs = rules._activations if isinstance(rules, LayoutMap) else ()
        new, new_activations = self._new_rules(rules, more), self._activations._new_rules(theirs, {})
        with WRITING:
            mesh, entries = self._checked(new, self.mesh)
            mesh, activations = self._activations._checked(new_activations, mesh)
            self._put(mesh, entries)
            self._activations._put(mesh, activations)

    def __eq__(self, other: object) -> bool:
        """Whether two maps have the same rules in the same order, on the same mesh, activations included.

        Any other mapping has no order and stands for a map without activations.
        """
        same = super().__eq__(other)
        theirs: object = other._activations if isinstance(other, LayoutMap) else {}
        return same if same is NotImplemented else same and self._activations == theirs

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Any:
        twin = super().__copy__()
        twin._activations = copy.copy(self._activations)
        twin._activations._slot = twin._slot
        return twin

    # -- using it

    def get_default_mesh(self) -> Mesh | None:
        """The mesh of the map; `None` while it has neither a mesh nor a rule."""
        return self.mesh

    def to_yaml(self) -> str:
        """The map as a rules file, to be kept beside the model; see `layoutmap.rules.yaml_file`.

        Example:
            >>> print(LayoutMap(Mesh(None, "model=4"), {r"d1\\.kernel": (None, "model")}).to_yaml())
            version: 1
            mesh:
              dims:
                model: 4
            rules:
              d1\\.kernel: [null, model]
        """
        from layoutmap.rules import yaml_file

        mesh = self.mesh
        return yaml_file.to_yaml(
            yaml_file.RulesFields(
                dims=None if mesh is None else {dim.name: dim.size for dim in mesh.mesh_dims},
                mesh_name="" if mesh is None else mesh.name,
                devices=None if mesh is None else mesh.devices,
                rules={pattern: layout.sharding_specs for pattern, layout in self.items()},
                activations={pattern: layout.sharding_specs for pattern, layout in self.activations.items()},
                uneven=self.uneven,
                uneven_rules=self._uneven_rules(),
            )
        )

    @classmethod
    def from_yaml(cls, text: str, mesh: Mesh | None = None) -> LayoutMap:
        """Read a rules file.

        Args:
            text: The text of the file.
            mesh: The mesh to use instead of the file's.

        Raises:
            RuleError: The text is no rules file, or a rule of it is not allowed.
            MeshError: Its mesh is not allowed.

        Example:
            >>> LayoutMap.from_yaml("{version: 1, rules: {d1: [model]}}", Mesh(None, "model=4"))["d1"].sharding_specs
            ('model',)
        """
        from layoutmap.rules import yaml_file

        fields = yaml_file.from_yaml(text)
        if mesh is None and fields.dims is not None:
            mesh = Mesh(fields.devices, fields.dims, fields.mesh_name)
        return cls._of(fields, mesh)

    @classmethod
    def preset(
        cls, name: str, mesh: Mesh, *, model_dim: str | None = "model", fsdp_dim: str | None = None
    ) -> LayoutMap:
        """Make a map for a family of models that this library knows.

        It is a map as any other: rules can be added and taken out, and `to_yaml` writes it to a file.

        Args:
            name: The family, as in `"llama"`; `layoutmap.rules.presets.names()` are all.
            mesh: The mesh.
            model_dim: The mesh dim that layers are cut over: what goes into a device is whole, and it computes with its
                heads, experts or features. `None`: they are not.
            fsdp_dim: A mesh dim that weights are cut over along another axis, too, and gathered where they are used. It
                must be the one that batches are cut over, as `scope(batch_dim=..)` says: `activations` then keep what
                blocks put out cut along the batch. `None`: there is none, and there are no such rules.

        Raises:
            RuleError: There is no such preset, or the mesh has no such dim.

        Example:
            >>> layout_map = LayoutMap.preset("llama", Mesh(None, "data=2,tp=4"), model_dim="tp")
            >>> layout_map["backbone.transformer_layer_0.feedforward_gate_dense.kernel"].sharding_specs
            ('unsharded', 'tp')
            >>> layout_map = LayoutMap.preset("llama", Mesh(None, "data=2,tp=4"), model_dim="tp", fsdp_dim="data")
            >>> layout_map["backbone.transformer_layer_0.feedforward_gate_dense.kernel"].sharding_specs
            ('data', 'tp')
            >>> layout_map.activations["backbone.transformer_layer_0"].sharding_specs
            ('data', 'unsharded', 'unsharded')
        """
        from layoutmap.rules import presets

        mesh = _mesh_of(mesh) or mesh
        return cls._of(presets.read(name, mesh, model_dim, fsdp_dim), mesh)

    @classmethod
    def _of(cls, fields: RulesFields, mesh: Mesh | None) -> LayoutMap:
        made = cls(mesh, activations=fields.activations, uneven=fields.uneven)
        for pattern, specs in fields.rules.items():
            made.add(pattern, specs, uneven=fields.uneven_rules.get(pattern))
        return made

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
            plan: A function that makes the model: it is called in a dry run, and tells the plan and the parameters.
                Or a model, which tells both. Or the config of a base model or a plan itself, a dict of styles by path:
                their paths may need a `prefix`, and what parameters there are is guessed if not told.
            mesh: The mesh.
            dim: The mesh dim that weights are cut over.
            batch_dim: The mesh dim that batches are cut over; `None`: they are not.
            prefix: What stands before the plan's paths in the model, as in `"model."`.
            parameters: All parameters by path: shapes, or anything with a `shape`, such as a state dict.
            activations: Whether the styles that say how a layer's output lies become `activations`. They are for
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
        from layoutmap.rules.tp_plan import is_maker, plan_of, tp_rules

        mesh = _mesh_of(mesh) or mesh
        for name in (dim, batch_dim):
            if name is not None and name not in mesh:
                raise RuleError(
                    f"from_tp_plan: the mesh has no dim {name!r}",
                    facts={"mesh": str(mesh)},
                    why="weights are cut over dim, and batches over batch_dim",
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
        from layoutmap.scope.scope import scope

        return scope(self, **options)

    def build(self, make_model: Callable[[], Any], **options: Any) -> Any:
        """Build one model in a scope and give it back, its variables in their layouts; see `layoutmap.build`."""
        from layoutmap.scope.scope import build

        return build(make_model, self, **options)

    def apply(self, model: Any, **options: Any) -> Any:
        """Lay out a model that exists; see `layoutmap.apply`."""
        from layoutmap.scope.scope import apply

        return apply(model, self, **options)

    def __repr__(self) -> str:
        if self._uneven_rules():  # only `add` can say it for one rule
            return f"LayoutMap.from_yaml({self.to_yaml()!r}, {self.mesh!r})"
        parts = [repr(self.mesh), _written(self)]
        if self._activations:
            parts.append(f"activations={_written(self._activations)}")
        if self.uneven != "error":
            parts.append(f"uneven={self.uneven!r}")
        return f"LayoutMap({', '.join(parts)})"

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *([str(self._activations)] if self._activations else [])])

    def _repr_html_(self) -> str:
        return super()._repr_html_() + (self._activations._repr_html_() if self._activations else "")


def _mesh_of(mesh: Any) -> Mesh | None:
    """The mesh of a map, from what it is given."""
    if isinstance(mesh, str):
        return Mesh(None, mesh)
    mesh = as_mesh(mesh)
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    raise MeshError(
        f"{mesh!r} is no mesh",
        why=f"it is {kind_of(mesh)}",
        fix='pass a Mesh, as create_mesh("batch=2,model=4") makes one, or that text',
    )


def _made_dry(make_model: Callable[[], Any], mesh: Mesh) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """A model as a dry run leaves it, with shapes and no values, and the shapes of its variables under all paths."""
    from layoutmap.scope.scope import plan

    made: list[Any] = []

    def make_and_keep() -> Any:
        made.append(make_model())
        return made[0]

    weights = [
        a.variable
        for a in plan(make_and_keep, LayoutMap(mesh), library="torch").assignments
        if a.variable.kind == "weight"
    ]
    return made[0], {path: v.shape for v in weights for path in (v.path, *v.aliases)}


def _written(rules: Rules) -> str:
    """Rules as code, one a line."""
    lines = "".join(f"    {p!r}: {layout.sharding_specs!r},\n" for p, layout in rules.items())
    return f"{{{chr(10) if lines else ''}{lines}}}"
