"""Define the rules of one layout map: rules for variables, and rules for layer outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import MeshError, RuleError
from layoutmap.core.match import AS_REST, Rest, validate_rest_setting
from layoutmap.core.mesh import Mesh, convert_mesh
from layoutmap.core.specs import BatchDim
from layoutmap.core.uneven import UnevenSetting
from layoutmap.rules import presets, yaml_file
from layoutmap.rules.rules import WRITE_LOCK, Rules, SharedMesh


class Activations(Rules):
    """Rules for the layouts of layer outputs: `layout_map.activations`.

    A dict from regexes over layer paths to layouts, which works like the rules for variables. The layout applies to
    each array of its rank in the output of a layer. The outputs are not known before the layer runs, so an error is
    raised at the first call of the layer if no array has this rank.
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
        super().__init__(SharedMesh(parse_or_convert_mesh(mesh)), rules, uneven)
        self._activations = Activations(self._shared_mesh, activations)
        self.rest = rest

    @property
    def activations(self) -> Activations:
        """Rules for the outputs of layers, on the same mesh."""
        return self._activations

    @property
    def rest(self) -> Rest | None:
        """The setting for variables that no rule matches.

        `None`: they are replicated with a warning for each, which `strict` makes an error. `"replicated"`: they are
        replicated without a warning.

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
        self._otherwise = AS_REST if validate_rest_setting(rest, "layout_map") else type(self)._otherwise

    def update(self, rules: Any = (), /, **more: Any) -> None:
        """Add all rules in order, and also the activation rules of a layout map. If one is invalid, none is added.

        Raises:
            RuleError: See `__setitem__`.
        """
        theirs = rules._activations if isinstance(rules, RuleSet) else ()
        new = self._list_new_rules(rules, more)
        new_activations = self._activations._list_new_rules(theirs, {})
        with WRITE_LOCK:
            mesh, entries = self._make_rule_entries(new, self.mesh)
            mesh, activations = self._activations._make_rule_entries(new_activations, mesh)
            self._append_rule_entries(mesh, entries)
            self._activations._append_rule_entries(mesh, activations)

    def __eq__(self, other: object) -> bool:
        """Compare the mesh, the rules in order, the activation rules, and `rest` of two maps.

        Another mapping is equal if it has the same rules, and this map has neither activation rules nor `rest`.
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
        twin._activations._shared_mesh = twin._shared_mesh
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
        return yaml_file.make_rules_file_text(
            yaml_file.RulesFileFields(
                dims=None if mesh is None else {dim.name: dim.size for dim in mesh.mesh_dims},
                mesh_name="" if mesh is None else mesh.name,
                devices=None if mesh is None else mesh.devices,
                explicit_dims=() if mesh is None else mesh.explicit_dims,
                rules={pattern: layout.sharding_specs for pattern, layout in self.items()},
                activations={pattern: layout.sharding_specs for pattern, layout in self.activations.items()},
                uneven=self.uneven,
                uneven_rules=self._get_uneven_settings(),
                memory_rules={pattern: layout.memory for pattern, layout in self.items() if layout.memory},
                rest=self.rest,
                reasons={rule.pattern: rule.reason for rule in self.rules if rule.reason},
            )
        )

    @classmethod
    def from_yaml(cls, text: str, mesh: Mesh | str | None = None) -> Self:
        """Return the layout map that the text of a rules file describes.

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
        fields = yaml_file.parse_rules_file(text)
        mesh = parse_or_convert_mesh(mesh)
        if mesh is None and fields.dims is not None:
            types = dict.fromkeys(fields.explicit_dims, "explicit")
            mesh = Mesh(fields.devices, fields.dims, fields.mesh_name, axis_types=types)
        return cls._from_rules_fields(fields, mesh)

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
        """Return a new layout map with the preset rules of a model family. They can be changed and written to a file.

        Args:
            name: The family, such as `"llama"`; `layoutmap.rules.presets.list_presets()` returns all names.
            mesh: The mesh.
            model_dim: The mesh dim for tensor parallelism: each device computes its heads, experts, or features from
                the whole input. `None`: no tensor parallelism.
            fsdp_dim: The mesh dim for FSDP: each weight is sharded over it along another axis, too, and gathered where
                it is used. It must be the batch dim of `scope(batch_dim=..)`, because `activations` keep the outputs
                of blocks sharded over it. `None`: no FSDP, and no activation rules.
            batch_dim: The mesh dims over which batches are sharded, if they are more than `fsdp_dim`, as in
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
        mesh = parse_or_convert_mesh(mesh) or mesh
        return cls._from_rules_fields(presets.read_preset(name, mesh, model_dim, fsdp_dim, batch_dim), mesh)

    @classmethod
    def _from_rules_fields(cls, fields: yaml_file.RulesFileFields, mesh: Mesh | None) -> Self:
        new = cls(mesh, uneven=fields.uneven, rest=fields.rest)
        rules = [
            (pattern, specs, fields.uneven_rules.get(pattern), "", fields.memory_rules.get(pattern))
            for pattern, specs in fields.rules.items()
        ]
        outputs = [(pattern, specs, None, "", None) for pattern, specs in fields.activations.items()]
        try:
            new._add_rules(rules)
            new.activations._add_rules(outputs)
        except RuleError:
            rows = [*((new, *rule) for rule in rules), *((new.activations, *rule) for rule in outputs)]
            yaml_file.check_each_argument_row(_add_rule_if_missing, rows)
            raise
        return new

    def __repr__(self) -> str:
        # A dict of rules cannot express `uneven` and `memory` of single rules, so show a map that has these as YAML.
        if self._get_uneven_settings() or any(layout.memory for layout in self.values()):
            return f"{type(self).__name__}.from_yaml({self.to_yaml()!r}, {self.mesh!r})"
        parts = [repr(self.mesh), _format_rules_as_python(self)]
        if self._activations:
            parts.append(f"activations={_format_rules_as_python(self._activations)}")
        if self.uneven != "error":
            parts.append(f"uneven={self.uneven!r}")
        if self.rest:
            parts.append(f"rest={self.rest!r}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def __str__(self) -> str:
        rest = [f"the rest is {self.rest}"] if self.rest else []
        return "\n".join([super().__str__(), *rest, *([str(self._activations)] if self._activations else [])])


def _add_rule_if_missing(
    rules: Rules, pattern: str, specs: Any, uneven: Any, reason: str, memory: str | None
) -> None:
    if pattern not in rules:
        rules.add(pattern, specs, uneven=uneven, reason=reason, memory=memory)


def parse_or_convert_mesh(mesh: object) -> Mesh | None:
    """Convert a mesh of another library, or text with dims such as `"batch=2"`, to a `Mesh`. None stays None."""
    if isinstance(mesh, str):
        return Mesh(None, mesh)
    mesh = convert_mesh(mesh)
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    raise MeshError(
        f"{mesh!r} is not a mesh",
        why=f"it is {describe_type(mesh)}",
        fix=f'pass lm.create_mesh("{_format_mesh_dims(mesh)}"), or its dims as text',
    )


def _format_mesh_dims(mesh: Any) -> str:
    """Return the dims of a mesh of JAX, Keras, or torch as text, or example dims for another value."""
    names = getattr(mesh, "axis_names", None) or getattr(mesh, "mesh_dim_names", None)
    if not names:
        return "batch=2,model=4"
    shape = mesh.shape
    sizes = shape.values() if hasattr(shape, "values") else shape
    return ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=False))


def _format_rules_as_python(rules: Rules) -> str:
    """Return rules as Python source of a dict from patterns to specs, with one rule per line."""
    lines = "".join(f"    {p!r}: {layout.sharding_specs!r},\n" for p, layout in rules.items())
    return f"{{{chr(10) if lines else ''}{lines}}}"
