"""Define the rules of one layout map: rules for variables, and rules for layer outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import MeshError, RuleError
from layoutmap.core.match import AS_REST, Rest, check_rest
from layoutmap.core.mesh import Mesh, convert_mesh
from layoutmap.core.specs import BatchDim
from layoutmap.core.uneven import UnevenSetting
from layoutmap.rules import presets, yaml_file
from layoutmap.rules.rules import WRITE_LOCK, MeshSlot, Rules


class Activations(Rules):
    """Rules for the layouts of layer outputs: `layout_map.activations`.

    A dict from regex over a layer's path to a layout, with the semantics of the rules for variables. A layer outputs
    one array or several in a tuple, list or dict; the layout is for each array among them, and its rank must be theirs.
    A layer's output is not known before it runs, so another rank is an error when that layer is first called.
    """

    _rule_kind = "activation rule"
    _has_memory = False
    _paths = "layers' paths"
    _expression = "layout_map.activations"
    _example = r"blocks\.\d+"
    _otherwise = "its output stays as it is"

    def __repr__(self) -> str:
        return f"<{self}>"


class RuleSet(Rules):
    """Map regexes over variable paths, and over layer paths, to layouts.

    `LayoutMap` adds the methods that build models.

    Args:
        mesh: See `LayoutMap`.
        rules: See `LayoutMap`.
        activations: See `LayoutMap`.
        uneven: See `LayoutMap`.
        rest: See `LayoutMap`.

    Raises:
        RuleError: See `__setitem__`. Or `rest` is invalid.
        MeshError: The mesh is not a mesh or the text of one.
    """

    def __init__(
        self,
        mesh: Mesh | str | None = None,
        rules: Mapping[str, Any] | None = None,
        activations: Mapping[str, Any] | None = None,
        *,
        uneven: UnevenSetting = "error",
        rest: Rest | None = None,
    ):
        super().__init__(MeshSlot(read_mesh(mesh)), rules, uneven)
        self._activations = Activations(self._slot, activations)
        self.rest = rest

    @property
    def activations(self) -> Activations:
        """Rules for the outputs of layers, on the same mesh."""
        return self._activations

    @property
    def rest(self) -> Rest | None:
        """The map's word for variables that no rule matches.

        `None`: nothing. They are replicated all the same, with a warning for each, which `strict` makes an error.
        `"replicated"`: that is meant, and no warning is given.

        Raises:
            RuleError: Something else is assigned.

        Example:
            >>> layout_map = lm.LayoutMap("model=4", {r".*\\.kernel$": (None, "model")})
            >>> layout_map.rest = "replicated"
            >>> print(layout_map.match("d1.bias"))
            d1.bias: no rule matches, so it is replicated, as layout_map.rest = "replicated" says
        """
        return "replicated" if self._otherwise == AS_REST else None

    @rest.setter
    def rest(self, rest: Rest | None) -> None:
        self._otherwise = AS_REST if check_rest(rest, "layout_map") else type(self)._otherwise

    def update(self, rules: Any = (), /, **more: Any) -> None:
        """Add all rules in order, with activation rules if they come from a layout map, or none if one fails.

        Raises:
            RuleError: See `__setitem__`.
        """
        theirs = rules._activations if isinstance(rules, RuleSet) else ()
        new, new_activations = self._collect_rules(rules, more), self._activations._collect_rules(theirs, {})
        with WRITE_LOCK:
            mesh, entries = self._check_rules(new, self.mesh)
            mesh, activations = self._activations._check_rules(new_activations, mesh)
            self._append_entries(mesh, entries)
            self._activations._append_entries(mesh, activations)

    def __eq__(self, other: object) -> bool:
        """Compare the mesh, the rules in order, the activation rules, and `rest` of two maps.

        Any other mapping has no order and stands for a map without activations that says nothing of the rest.
        """
        same = super().__eq__(other)
        if same is NotImplemented:
            return same
        theirs: tuple[object, object] = ({}, None)
        if isinstance(other, RuleSet):
            theirs = other._activations, other.rest
        return same and (self._activations, self.rest) == theirs

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Self:
        twin = super().__copy__()
        twin._activations = copy.copy(self._activations)
        twin._activations._slot = twin._slot
        return twin

    def to_yaml(self) -> str:
        """Return the text of a rules file (see `layoutmap.rules.yaml_file`).

        Example:
            >>> print(lm.LayoutMap(lm.Mesh(None, "model=4"), {r"d1\\.kernel": (None, "model")}).to_yaml())
            version: 1
            mesh:
              dims:
                model: 4
            rules:
              d1\\.kernel: [null, model]
        """
        mesh = self.mesh
        return yaml_file.to_yaml(
            yaml_file.RulesFields(
                dims=None if mesh is None else {dim.name: dim.size for dim in mesh.mesh_dims},
                mesh_name="" if mesh is None else mesh.name,
                devices=None if mesh is None else mesh.devices,
                explicit_dims=() if mesh is None else mesh.explicit_dims,
                rules={pattern: layout.sharding_specs for pattern, layout in self.items()},
                activations={pattern: layout.sharding_specs for pattern, layout in self.activations.items()},
                uneven=self.uneven,
                uneven_rules=self._list_uneven_rules(),
                memory_rules={pattern: layout.memory for pattern, layout in self.items() if layout.memory},
                rest=self.rest,
                reasons={rule.pattern: rule.reason for rule in self.rules if rule.reason},
            )
        )

    @classmethod
    def from_yaml(cls, text: str, mesh: Mesh | str | None = None) -> Self:
        """Read a rules file.

        Args:
            text: The text of the file.
            mesh: The mesh to use instead of the file's, or its dims as in `"batch=2,model=4"`.

        Raises:
            RuleError: The text is no rules file, or a rule of it is not allowed.
            MeshError: Its mesh is not allowed.

        Example:
            >>> text = "rules: {d1: [model]}"
            >>> lm.LayoutMap.from_yaml(text, "model=4")["d1"].sharding_specs
            ('model',)
        """
        fields = yaml_file.from_yaml(text)
        mesh = read_mesh(mesh)
        if mesh is None and fields.dims is not None:
            types = dict.fromkeys(fields.explicit_dims, "explicit")
            mesh = Mesh(fields.devices, fields.dims, fields.mesh_name, axis_types=types)
        return cls._from_fields(fields, mesh)

    @classmethod
    def preset(
        cls,
        name: str,
        mesh: Mesh,
        *,
        model_dim: str | None = "model",
        fsdp_dim: str | None = None,
        batch_dim: BatchDim | None = None,
    ) -> Self:
        """Return the preset layout map of a model family.

        It is a map as any other: rules can be added and taken out, and `to_yaml` writes it to a file.

        Args:
            name: The family, as in `"llama"`; `layoutmap.rules.presets.list_presets()` are all.
            mesh: The mesh.
            model_dim: The mesh dim that layers are sharded over: each device gets the global input and
                computes with its heads, experts or features. `None`: they are not.
            fsdp_dim: A mesh dim that weights are sharded over along another axis, too, and gathered
                where they are used. It must be the one that batches are sharded over, as
                `scope(batch_dim=..)` says: `activations` then keep blocks' outputs sharded along the
                batch. `None`: there is none, and there are no such rules.
            batch_dim: The mesh dims that batches are sharded over, if they are more than `fsdp_dim`, as in
                `("replica", "fsdp")` (HSDP).

        Raises:
            RuleError: There is no such preset, or the mesh has no such dim.

        Example:
            >>> mesh = lm.Mesh(None, "data=2,tp=4")
            >>> layout_map = lm.LayoutMap.preset("llama", mesh, model_dim="tp")
            >>> layout_map["backbone.transformer_layer_0.feedforward_gate_dense.kernel"].sharding_specs
            ('unsharded', 'tp')
            >>> layout_map = lm.LayoutMap.preset("llama", mesh, model_dim="tp", fsdp_dim="data")
            >>> layout_map["backbone.transformer_layer_0.feedforward_gate_dense.kernel"].sharding_specs
            ('data', 'tp')
            >>> layout_map.activations["backbone.transformer_layer_0"].sharding_specs
            ('data', 'unsharded', 'unsharded')
        """
        mesh = read_mesh(mesh) or mesh
        return cls._from_fields(presets.read_preset(name, mesh, model_dim, fsdp_dim, batch_dim), mesh)

    @classmethod
    def _from_fields(cls, fields: yaml_file.RulesFields, mesh: Mesh | None) -> Self:
        made = cls(mesh, uneven=fields.uneven, rest=fields.rest)
        rules = [
            (pattern, specs, fields.uneven_rules.get(pattern), "", fields.memory_rules.get(pattern))
            for pattern, specs in fields.rules.items()
        ]
        outputs = [(pattern, specs, None, "", None) for pattern, specs in fields.activations.items()]
        try:
            made._add_rules(rules)
            made.activations._add_rules(outputs)
        except RuleError:
            rows = [*((made, *rule) for rule in rules), *((made.activations, *rule) for rule in outputs)]
            yaml_file.check_all(_add_rule, rows)
            raise
        return made

    def __repr__(self) -> str:
        # Only `add` can set `uneven` and `memory` of a single rule.
        if self._list_uneven_rules() or any(layout.memory for layout in self.values()):
            return f"{type(self).__name__}.from_yaml({self.to_yaml()!r}, {self.mesh!r})"
        parts = [repr(self.mesh), _format_rules(self)]
        if self._activations:
            parts.append(f"activations={_format_rules(self._activations)}")
        if self.uneven != "error":
            parts.append(f"uneven={self.uneven!r}")
        if self.rest:
            parts.append(f"rest={self.rest!r}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def __str__(self) -> str:
        rest = [f"the rest is {self.rest}"] if self.rest else []
        return "\n".join([super().__str__(), *rest, *([str(self._activations)] if self._activations else [])])


def _add_rule(rules: Rules, pattern: str, specs: Any, uneven: Any, reason: str, memory: str | None) -> None:
    if pattern not in rules:
        rules.add(pattern, specs, uneven=uneven, reason=reason, memory=memory)


def read_mesh(mesh: object) -> Mesh | None:
    """Convert another library's mesh or a text to a `Mesh`."""
    if isinstance(mesh, str):
        return Mesh(None, mesh)
    mesh = convert_mesh(mesh)
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    raise MeshError(
        f"{mesh!r} is not a mesh",
        why=f"it is {describe_type(mesh)}",
        fix=f'pass a Mesh, as lm.create_mesh("{_format_dims(mesh)}") makes one, or that text',
    )


def _format_dims(mesh: Any) -> str:
    """Format the dims of a JAX, Keras, or torch mesh, or example dims."""
    names = getattr(mesh, "axis_names", None) or getattr(mesh, "mesh_dim_names", None)
    if not names:
        return "batch=2,model=4"
    shape = mesh.shape
    sizes = shape.values() if hasattr(shape, "values") else shape
    return ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=False))


def _format_rules(rules: Rules) -> str:
    """Format rules as Python code, one per line."""
    lines = "".join(f"    {p!r}: {layout.sharding_specs!r},\n" for p, layout in rules.items())
    return f"{{{chr(10) if lines else ''}{lines}}}"
