"""Define `Plan`: the plan table with methods for reports, comparisons, and conversions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, wraps
from importlib import import_module
from typing import Any, ParamSpec

from layoutmap.core.layout import Layout
from layoutmap.core.old_names import DeprecatedAlias
from layoutmap.core.specs import BatchDim
from layoutmap.plan.diff import PlanDiff, diff_plans
from layoutmap.plan.keras_names import collect_layouts_by_keras_name
from layoutmap.plan.lint import Findings, lint_plan
from layoutmap.plan.memory import Memory, count_memory_by_purpose
from layoutmap.plan.planner import make_plan_table
from layoutmap.plan.table import PlanTable
from layoutmap.plan.verdict import Verdict, judge_plan
from layoutmap.report.explain import explain_variable_layout
from layoutmap.report.text import format_plan_html, format_plan_summary, format_plan_text
from layoutmap.rules.rule_set import RuleSet

# Modules for JSON and HTML are imported inside methods, because they load slowly.

P = ParamSpec("P")


# Plan tables must not import reports, so the methods that need them are in this subclass (decisions/0038).
class Plan(PlanTable):
    """Map the path of each variable of a model to its `Assignment`, the variable and its layout.

    A tied variable is found under each of its paths, and iteration yields the first. If several models have a variable
    with the same path, the keys are `"model: path"`, and the path alone raises a `PlanError` that names them.

    Args:
        mesh: The mesh.
        assignments: Variables and their layouts, in the order of the model.
        problems: All problems, errors first.
        activations: Layers whose outputs have a rule in `LayoutMap.activations`, in the order of the model. Empty if
            the library does not report layers.
        free_activations: Whether a compiler chooses the layouts of activations without a rule.
        cost: Cost of a training step; `None`: it was not counted.
        device_memory: Memory of a device in bytes, for a plan without a cost; `None`: unknown.
        strict: Whether warnings count as errors in the verdict.
        gathered_dims: Mesh dims over which torch's `fully_shard` gathers weights before their layers compute.
        batches: Mesh dims over which batches of an existing model are sharded. Empty: batches are replicated. `None`:
            unknown.
        layers: Paths of all layers, each with the rank of its output (`None`: unknown), for fixes. `None`: unknown, as
            in a plan from JSON, or the model is a pytree.

    Example:
        >>> from layoutmap.core.variables import VariableSpec
        >>> layout_map = lm.LayoutMap(lm.Mesh(None, "batch=2,model=4"), {r".*\\.kernel": (None, "model")})
        >>> plan = make_plan([VariableSpec("d1.kernel", (512, 1024), "float32")], layout_map)
        >>> plan["d1.kernel"].shard_shape, plan.device_bytes
        ((512, 256), 524288)
        >>> plan
        <Plan: 1 variable on batch=2, model=4, 2.0 MiB, 512.0 KiB per device; no problems>
    """

    of = DeprecatedAlias("from_table")

    @classmethod
    def from_table(cls, table: PlanTable) -> Plan:
        """Convert a plan table to a `Plan`."""
        return cls(**table.__getstate__())

    @property
    def memory(self) -> Memory:
        """Bytes on each device by purpose, and the replicated variables that could be sharded.

        Example:
            >>> from layoutmap.core.variables import VariableSpec
            >>> variables = [VariableSpec(path, (512, 1024), "float32") for path in ("up.kernel", "head.kernel")]
            >>> rules = {"up": (None, "model"), "head": (None, None)}
            >>> layout_map = lm.LayoutMap(lm.Mesh(None, "batch=2,model=4"), rules)
            >>> print(make_plan(variables, layout_map).memory)
            per device: weights 2.5 MiB, gradients 2.5 MiB; 5.0 MiB in total
            <BLANKLINE>
            replicated     saves  if sharded
            -----------  -------  -----------------
            head.kernel  1.5 MiB  axis 1 over model
        """
        return count_memory_by_purpose(self)

    @property
    def verdict(self) -> Verdict:
        """Whether the model can be built with this plan and fits the devices, and how many findings lint has.

        Example:
            >>> from layoutmap.core.variables import VariableSpec
            >>> layout_map = lm.LayoutMap(lm.Mesh(None, "batch=2,model=4"), {"up": (None, "model")})
            >>> plan = make_plan([VariableSpec("up.kernel", (512, 1024), "float32")], layout_map)
            >>> print(plan.set_limits(device_memory=2**20).verdict)
            Verdict: fits: 1.0 MiB of 1.0 MiB per device, and 0 B are left for activations
        """
        return judge_plan(self).add_findings(self._findings)

    def explain(self, path: str, layout_map: RuleSet | None = None) -> str:
        """Explain the layout of a variable, and how you can change it.

        Args:
            path: Path of the variable, or another path to it.
            layout_map: Map to compare with: the explanation adds the layout that its rules give the variable.

        Raises:
            KeyError: The plan does not have the variable. The message names similar ones.

        Example:
            >>> from layoutmap.core.variables import VariableSpec
            >>> rules = {r".*\\.kernel": (None, "model"), "d1": ("model",)}
            >>> layout_map = lm.LayoutMap(lm.Mesh(None, "batch=2,model=4"), rules)
            >>> print(make_plan([VariableSpec("d1.kernel", (512, 1024), "float32")], layout_map).explain("d1.kernel"))
            d1.kernel
              what          weight, float32[512, 1024], 2.0 MiB
              layout        (unsharded, model)
              per device    512 x 256, 512.0 KiB
              because       rule 1  .*\\.kernel
              also matches  rule 2  d1: would give (model,)
              change it     change rule 1, or add a rule before it: the first rule that matches wins
        """
        if layout_map is None:
            return explain_variable_layout(self, path)
        variables = [a.variable for a in self.assignments]
        return explain_variable_layout(self, path, make_plan_table(variables, layout_map, complete=False))

    def diff(self, other: PlanTable) -> PlanDiff:
        """Compare with the plan `other`. The result is false if nothing differs.

        Example:
            >>> from layoutmap.core.variables import VariableSpec
            >>> mesh, variables = lm.Mesh(None, "model=4"), [VariableSpec("d1.kernel", (512, 1024), "float32")]
            >>> rows, columns = lm.LayoutMap(mesh, {"d1": ("model", None)}), lm.LayoutMap(mesh, {"d1": (None, "model")})
            >>> print(make_plan(variables, rows).diff(make_plan(variables, columns)))
            d1.kernel  layout  (model, unsharded) -> (unsharded, model)
            <BLANKLINE>
            1 change; per device 512.0 KiB -> 512.0 KiB
        """
        return diff_plans(self, other)

    def lint(self, batch_dim: BatchDim | None = None) -> Findings:
        """Find layouts that are probably mistakes, each with its evidence and a fix.

        Args:
            batch_dim: Mesh dim over which batches are sharded. `None`: the dim over which rules shard the first axis of
                activations, or else a dim called batch, data, dp, or fsdp.

        Raises:
            PlanError: The mesh does not have the dim.

        Example:
            >>> from layoutmap.core.variables import VariableSpec
            >>> layout_map = lm.LayoutMap(lm.Mesh(None, "batch=2,model=4"), {".*": ("batch", None)})
            >>> print(make_plan([VariableSpec("d1.kernel", (512, 1024), "float32")], layout_map).lint())
            unused dim: model: nothing is sharded over this dim of the mesh
              mesh  batch=2, model=4
              why   groups of 4 devices store and compute the same: 2 of the 8 devices would be enough
              fix   shard weights over model, or plan for a mesh without it
            <BLANKLINE>
            Lint: 1 finding; batches are assumed to be sharded over batch
        """
        return self._findings if batch_dim is None else lint_plan(self, batch_dim)

    @cached_property
    def _findings(self) -> Findings:
        return lint_plan(self)

    @property
    def fingerprint(self) -> str:
        """A short hash that is equal for plans with the same mesh, variables, and layouts."""
        from layoutmap.plan.json import compute_fingerprint

        return compute_fingerprint(self)

    def to_layout_map(self) -> Any:
        """Return the map with the fewest rules that give the layouts of this plan. See `LayoutMap.from_plan`.

        Returns:
            A `LayoutMap`.

        Raises:
            RuleError: Rules cannot give a variable its layout.

        Example:
            >>> import jax, layoutmap as lm
            >>> sharding = jax.NamedSharding(jax.make_mesh((2, 4), ("data", "model")), jax.P(None, "model"))
            >>> kernel = jax.device_put(jax.numpy.ones((64, 256)), sharding)
            >>> params = {"h": [{"up": kernel, "norm": jax.numpy.ones(64)} for _ in range(4)]}
            >>> print(lm.inspect(params).to_layout_map())
            LayoutMap on data=2, model=4, 1 rule
               1  .*\\.\\d+\\.up$  (unsharded, model)
            the rest is replicated
        """
        # Import by name, because the module of LayoutMap imports this one, so a normal import would be circular.
        return import_module("layoutmap.scope.layout_map").LayoutMap.from_plan(self)

    # -- exports

    def to_partition_specs(self, tree: object = None) -> Any:
        """Return the layouts as `PartitionSpec`s of JAX, with an entry for each axis.

        A `PartitionSpec` has no memory kind. `to_named_shardings` keeps that of weights in host memory.

        Args:
            tree: Pytree whose arrays are variables of the plan. Their paths are their keys joined by dots.

        Returns:
            The tree with specs in place of arrays, or without a tree a dict by path.

        Raises:
            KeyError: The plan does not have the variable of an array. The message names similar ones.

        Example:
            >>> from layoutmap.core.variables import VariableSpec
            >>> layout_map = lm.LayoutMap(lm.Mesh(None, "batch=512,model=4"), {"d1": (None, "model")})
            >>> make_plan([VariableSpec("d1.kernel", (512, 1024), "float32")], layout_map).to_partition_specs()
            {'d1.kernel': P(None, 'model')}
        """
        from layoutmap.engines.jax.devices import make_partition_spec

        return self._convert_layouts_to_jax(tree, make_partition_spec)

    def to_named_shardings(self, tree: object = None) -> Any:
        """Return the layouts as `NamedSharding`s of JAX on the devices of this machine. See `to_partition_specs`.

        Raises:
            KeyError: The plan does not have the variable of an array.
            MeshError: The machine does not have the mesh's devices.
        """
        from layoutmap.engines.jax.devices import make_named_sharding

        return self._convert_layouts_to_jax(tree, make_named_sharding)

    def _convert_layouts_to_jax(self, tree: object, convert_layout: Callable[[Layout], Any]) -> Any:
        from layoutmap.engines.jax.trees import map_arrays_by_path

        if tree is None:
            return {path: convert_layout(a.layout) for path, a in self.items()}
        return map_arrays_by_path(tree, lambda path, _: convert_layout(self[path].layout))

    def to_keras(self, device_mesh: object = None) -> Any:
        """Return the layouts as a `keras.distribution.LayoutMap` for `keras.distribution.ModelParallel`.

        It has a key for each variable of the plan: Keras's name for it in a process that created no layer before. Slots
        of optimizers have no key, because Keras shards them like their weights.

        Args:
            device_mesh: `keras.distribution.DeviceMesh` with the plan's dims. `None`: a new one with the devices of the
                plan's mesh, or with all devices of this machine.

        Returns:
            A `keras.distribution.LayoutMap`.

        Raises:
            PlanError: Keras's map cannot express the plan: an axis sharded over several dims, outputs of layers, two
                variables with the same name, or slots with another shape than their weight. Or the plan is not of a
                Keras model, or was read from a file.

        Example:
            >>> import keras, layoutmap as lm
            >>> make = lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="d1")], name="model")
            >>> plan = lm.plan(make, lm.LayoutMap("batch=2,model=4", {"d1.kernel": (None, "model")}))
            >>> plan.to_keras()["model/d1/kernel"].axes
            (None, 'model')
        """
        from layoutmap.adapters.keras.distribution import make_keras_layout_map

        return make_keras_layout_map(self.mesh, collect_layouts_by_keras_name(self), device_mesh)

    def to_parallelize_plan(self) -> str:
        """Return Python code for torch programs: a function `parallelize(model, mesh)` that calls torch's functions.

        `parallelize_module` shards linear layers and embeddings by columns or by rows over one dim, and
        `distribute_module` shards all other modules. A layer that is sharded by columns passes its shards to the next
        one that is sharded by rows, as in attention and gated units. The computation between them must treat each
        feature or head separately. `LayoutMap.activations` tells which outputs must be gathered or sharded along the
        sequence.

        Raises:
            PlanError: torch cannot express the plan: an axis sharded over dims in another order than the mesh's, a rule
                for the output of a module without a style, or slots with another layout than their weight.

        Example:
            >>> from layoutmap.core.variables import AxisRoles, VariableSpec
            >>> up = VariableSpec("up.weight", (64, 16), "float32", use=AxisRoles(("out.0", "in.0")))
            >>> plan = make_plan([up], lm.LayoutMap(lm.Mesh(None, "data=2,model=4"), {"up": ("model", None)}))
            >>> "ColwiseParallel(output_layouts=Replicate())" in plan.to_parallelize_plan()
            True
        """
        from layoutmap.plan.to_parallelize import make_parallelize_code

        return make_parallelize_code(self)

    def to_tp_plan(self) -> dict[str, str]:
        """Return the layouts as a tensor-parallel plan for the `DistributedConfig` of Hugging Face transformers.

        `to_parallelize_plan` describes which layers pass shards to each other.

        Raises:
            PlanError: transformers has no style for a module: it is neither a linear layer nor an embedding, or it is
                sharded over several dims or in another way than by columns or by rows. Or tied weights are sharded, or
                modules that share one entry, which differ only in a number, have different layouts.

        Example:
            >>> from layoutmap.core.variables import AxisRoles, VariableSpec
            >>> shapes = {"layers.0.up.weight": (64, 16), "layers.0.down.weight": (16, 64)}
            >>> linear = AxisRoles(("out.0", "in.0"))
            >>> variables = [VariableSpec(path, shape, "float32", use=linear) for path, shape in shapes.items()]
            >>> rules = {r".*up\\.weight": ("model", None), r".*down\\.weight": (None, "model")}
            >>> make_plan(variables, lm.LayoutMap(lm.Mesh(None, "model=4"), rules)).to_tp_plan()
            {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}
        """
        from layoutmap.plan.to_tp_plan import make_tp_plan

        return make_tp_plan(self)

    def to_logical_axis_rules(self, axes: object = None) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
        """Return names for the axes of each variable, and logical axis rules of flax and MaxText for them.

        Args:
            axes: Axis names from the model's code, by path or in nested dicts, as `nn.get_partition_spec` returns them.
                `None`: new names for the sharded axes.

        Returns:
            The names by path, and the rules in order. With them, `flax.linen.logical_to_mesh_sharding` gives exactly
            the layouts of the plan. With new names, `flax.nnx` does so, too.

        Raises:
            PlanError: Rules over these names cannot give all layouts. The message names a variable that conflicts with
                others. Or a slot of an optimizer has another layout than its weight.

        Example:
            >>> from layoutmap.core.variables import VariableSpec
            >>> layout_map = lm.LayoutMap(lm.Mesh(None, "fsdp=2,model=4"), {"up": ("fsdp", "model")})
            >>> plan = make_plan([VariableSpec("up.kernel", (16, 64), "float32")], layout_map)
            >>> plan.to_logical_axis_rules()
            ({'up.kernel': ('over_fsdp', 'over_model')}, [('over_fsdp', 'fsdp'), ('over_model', 'model')])
            >>> plan.to_logical_axis_rules({"up": {"kernel": ("embed", "mlp")}})[1]
            [('embed', 'fsdp'), ('mlp', 'model')]
        """
        from layoutmap.plan.to_logical_axes import make_logical_axis_rules

        return make_logical_axis_rules(self, axes)

    # -- text, JSON, and HTML

    def to_json(self) -> str:
        """Return the plan as JSON, one variable per line, for files next to the model and for `diff`."""
        from layoutmap.plan.json import plan_to_json

        return plan_to_json(self, self.verdict)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan in a text that `to_json` has written.

        Raises:
            PlanError: The text is not a plan, or has another version. The message gives the place.
        """
        from layoutmap.plan.json import plan_from_json

        return Plan.from_table(plan_from_json(text))

    def to_html(
        self, batch_dim: BatchDim | None = None, *, explained: Mapping[str, Any] | None = None
    ) -> str:
        """Return the plan as one HTML page that loads no other files: mesh, memory, and slices of each variable.

        The page shows the findings of `lint` next to the problems.

        Args:
            batch_dim: See `lint`.
            explained: A compiled step to include, from `step.explain(..).to_json()`.

        Raises:
            PlanError: `explained` does not hold the figures of a step.

        Example:
            >>> from layoutmap.core.variables import VariableSpec
            >>> layout_map = lm.LayoutMap(lm.Mesh(None, "model=4"), {"d1": (None, "model")})
            >>> page = make_plan([VariableSpec("d1.kernel", (512, 1024), "float32")], layout_map).to_html()
            >>> page.startswith("<!doctype html>"), "d1.kernel" in page
            (True, True)
        """
        from layoutmap.report.page.page import make_plan_page, validate_step_explanation

        findings = self.lint(batch_dim)
        return make_plan_page(
            self,
            findings.problems,
            None if explained is None else validate_step_explanation(explained),
            self.verdict.add_findings(findings),
        )

    def to_text(self, width: int | None = None) -> str:
        """Return the text that `print` shows.

        Args:
            width: Width of a table in characters, as of a terminal. Columns are left out or shortened, and the line
                below the table names them. `None`: all columns.
        """
        findings = self.lint()
        line = f"\n\nLint: {findings.summary}; to see them: plan.lint()" if findings else ""
        return format_plan_text(self, str(self.verdict), width) + line

    __str__ = to_text

    def __repr__(self) -> str:
        return f"<Plan: {format_plan_summary(self)}>"

    def _repr_html_(self) -> str:
        return format_plan_html(self, str(self.verdict))


def _convert_result_to_plan(function: Callable[P, PlanTable]) -> Callable[P, Plan]:
    """Wrap a function that returns a plan table so that it returns a `Plan`."""

    @wraps(function)
    def call_and_convert_plan(*args: P.args, **options: P.kwargs) -> Plan:
        return Plan.from_table(function(*args, **options))

    return call_and_convert_plan


make_plan = _convert_result_to_plan(make_plan_table)
