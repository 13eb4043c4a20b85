"""Compute the cost of a training step of a planned model on a machine, and add it to the plan."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from layoutmap.core.errors import EngineError, LayoutMapWarning, ScopeError, ShardingRefusedError
from layoutmap.core.mesh import Mesh, check_dims_in_mesh
from layoutmap.core.paths import find_repeated_layers
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.specs import BatchDim, format_batch_dim, list_batch_dims
from layoutmap.core.steps import BatchArraySpec, TrainingStep
from layoutmap.core.text_table import format_bytes
from layoutmap.core.variables import Assignment, Kind
from layoutmap.cost.cost import Cost
from layoutmap.cost.machine import Machine
from layoutmap.cost.machines import resolve_machine
from layoutmap.cost.model_steps import load_step_cost_counter, make_training_step
from layoutmap.cost.table import SCORED_ATTENTION, StepCost
from layoutmap.cost.verified import Verified
from layoutmap.plan.lint import guess_batch_dim
from layoutmap.plan.output_rules import OutputRanks
from layoutmap.plan.problems import Problem, sort_problems
from layoutmap.plan.variable_problems import find_missing_activation_rule_problem
from layoutmap.plan.variants import PlanVariant, find_preset_containing_rules
from layoutmap.scope.arguments import check_remat
from layoutmap.scope.context import Scope
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.scope.progress import ElapsedTime

_SHARE_OF_JAX = 0.75  # share of GPU memory that JAX preallocates, measured on an H100: 63.8 of 84.9 GB


@dataclass(frozen=True, slots=True)
class CostRequest:
    """Arguments of `plan` that concern the cost of a step."""

    machine: Machine
    batch_dim: BatchDim | None  # mesh dim that shards batches; None: guessed from the mesh
    loss: Callable[..., Any] | None  # loss function; None: the model's own
    target: str | None  # device for which XLA compiles the whole step, to verify the cost; None: not verified
    counting_target: str | None  # device whose compiler determines the cost; None: XLA's partitioner does
    remat: str | None  # layers that recompute activations; None: those that the model's code recomputes
    fuse_attention: bool
    machine_name: str
    device_memory: int | None = None  # bytes of memory of a device, instead of the machine's
    advises: bool = True  # whether to try variants of the plan if the step does not fit the memory


def make_cost_request(
    on: Any, mesh: Mesh, inputs: object, engine: str, options: Mapping[str, Any]
) -> CostRequest:
    """Check the arguments of `plan` that concern the cost, before a model is built, and return them as a request."""
    batch_dim, verify, remat = options["batch_dim"], options["verify"], options["remat"]
    machine = resolve_machine(on, mesh)
    check_dims_in_mesh("plan: batch_dim", batch_dim, mesh, "the batch is sharded over it")
    if inputs is None:
        raise ScopeError(
            f"plan: on={str(on)!r} needs inputs",
            why="the communication and computation of a step depend on the shape of the batch, which is "
            "not given",
            fix='pass inputs=: objects with shape and dtype; on the command line --inputs "int32[64,4096]"',
        )
    load_step_cost_counter(engine)
    check_remat(remat)
    on_jax = {
        "verify": "the step is compiled by XLA",
        "remat": "recomputing is done by JAX",
        "fuse_attention": "torch's scaled_dot_product_attention is counted as the operations that torch runs for it",
    }
    for name, why in on_jax.items():
        if options[name] not in (None, False) and engine != "jax":
            raise ScopeError(
                f"plan: {name}={options[name]!r} is for models on JAX, but this model is on {engine}",
                why=why,
                fix=f"leave {name} out, or plan the same rules with the model on JAX",
            )
    target = choose_target_to_verify(verify, machine)
    counting_target = choose_target_for_counting(verify, machine) if engine == "jax" else None
    fuses = bool(options["fuse_attention"])
    return CostRequest(machine, batch_dim, options["loss"], target, counting_target, remat, fuses, str(on))


def choose_target_to_verify(verify: bool | str | None, machine: Machine) -> str | None:
    """Return the device that XLA compiles the whole step for, or None without `verify`. Raise if it has no compiler."""
    if not verify:
        return None
    from layoutmap.cost.jax.targets import find_target  # imported here, because it imports JAX

    name = machine.device.name if verify is True else verify
    find_target(name)
    return name


def choose_target_for_counting(verify: bool | str | None, machine: Machine) -> str | None:
    """Return the machine's device type if XLA's compiler for it is installed and should count costs, else None."""
    from layoutmap.cost.jax.targets import has_gpu_compiler  # imported here, because it imports JAX

    name = machine.device.name
    return name if verify in (None, True) and has_gpu_compiler(name) else None


def make_plan_with_step_cost(
    plan: Plan, context: Scope, model: object, inputs: object, optimizer: object, request: CostRequest
) -> Plan:
    """Return the plan with the cost of its model's step, or with a problem if JAX refuses an operation of the step."""
    counter = _VariantCostComputer(plan, context, model, inputs, optimizer, request)
    begin = time.process_time()
    lowered, assignments, policy = counter.make_counter_assignments_and_policy(counter.variant)
    try:
        target = request.counting_target
        step_cost = _compute_compiled_cost(lowered, assignments, policy, target) if target else None
        step_cost = step_cost or lowered.compute_cost(assignments, policy, with_peak_tensors=True)
    except ShardingRefusedError as error:  # the cause is in the model's code, so report a problem of the plan
        facts = tuple((name, str(value)) for name, value in error.facts.items())
        subject = type(model).__name__
        return plan.add_problem(
            Problem("out_sharding", "error", subject, error.what, facts, error.why, error.fix)
        )
    if context.adapter.engine_name == "jax" and request.device_memory is None:
        notes = _iterate_preallocation_notes(step_cost, request.machine)
        step_cost = replace(step_cost, notes=(*step_cost.notes, *notes))
    seconds = time.process_time() - begin
    verified = None
    if request.target:
        with ElapsedTime(f"XLA compiles the step for {request.target}") as shown:
            verified = lowered.verify(assignments, policy, request.target, step_cost, shown)
    if plan.layers is not None:
        shapes: Mapping[str, tuple[int, ...]] = getattr(lowered, "output_shapes", {})
        plan = replace(
            plan, layers=OutputRanks(plan.layers | {path: len(shape) for path, shape in shapes.items()})
        )
    found = counter.make_plan_with_cost(plan, step_cost, policy, verified)
    assert isinstance(found.cost, Cost)
    if found.cost.fits or not request.advises:
        return found
    from layoutmap.cost.advise import rank_variants_by_cost  # imported here, because few plans use the search
    from layoutmap.cost.search.space import find_block_stacks

    step, on_jax = counter.step, context.adapter.engine_name == "jax"
    *_, data = (None, *list_batch_dims(policy.batch_dim))
    variables = [a.variable for a in plan.assignments]
    tried, untried = rank_variants_by_cost(
        replace(
            counter.variant, preset=find_preset_containing_rules(context.layout_map), guessed_batch_dim=data
        ),
        plan,
        found.cost.step.peak_bytes,
        counter.compute_variant_cost,
        blocks=find_block_stacks(getattr(lowered, "output_shapes", {}), variables),
        can_recompute=on_jax
        and request.remat is None
        and bool(step.how_to_recompute and find_repeated_layers(v.path for v in variables)),
        can_fuse=on_jax and SCORED_ATTENTION in step_cost.notes,
        cost_seconds=seconds,
    )
    return replace(found, cost=replace(found.cost, tried=tried, untried=untried))


def _iterate_preallocation_notes(step_cost: StepCost, machine: Machine) -> Iterator[str]:
    """Yield a note if the step fits the GPU, but not the share of its memory that JAX preallocates by default."""
    from layoutmap.cost.jax.targets import is_gpu_target  # imported here, because it imports JAX

    share = step_cost.peak_bytes / machine.device.memory_bytes
    if is_gpu_target(machine.device.name) and _SHARE_OF_JAX < share <= 1:
        yield (
            f"JAX preallocates {_SHARE_OF_JAX:.0%} of a GPU's memory by default, and this step needs more: "
            f"run it with XLA_PYTHON_CLIENT_MEM_FRACTION={min(1.0, math.ceil(100 * share + 1) / 100):g}"
        )


def _compute_compiled_cost(
    lowered: Any, assignments: Any, policy: LayoutPolicy, target: str
) -> StepCost | None:
    """Return the cost of a step as XLA compiles it for `target`. If that fails, warn and return None."""
    try:
        with ElapsedTime(f"XLA compiles the step for {target}") as shown:
            return cast(
                "StepCost",
                lowered.compute_cost(
                    assignments, policy, with_peak_tensors=True, target=target, on_wait=shown
                ),
            )
    except EngineError as error:
        warnings.warn(
            LayoutMapWarning(
                f"plan: XLA's compiler for {target!r} failed, so the cost is only an estimate",
                why=error.what,
                fix="pass verify=False to skip the compiler, or verify=True to see the compiler's whole error",
            ),
            stacklevel=2,
        )
        return None


class _VariantCostComputer:
    """Costs of a model's plan variants. Variants that differ only in rules, mesh, or batch dim share a traced step."""

    def __init__(
        self, plan: Plan, context: Scope, model: Any, inputs: Any, optimizer: Any, request: CostRequest
    ):
        self._plan, self._context, self._request = plan, context, request
        self._model, self._optimizer, self._inputs = model, optimizer, inputs
        self.step = self._make_training_step(inputs)
        self._lowered: dict[Any, Any] = {}
        self.variant = PlanVariant(
            context.layout_map,
            machine_name=request.machine_name,
            inputs=_list_input_shapes(inputs),
            has_input_names=isinstance(inputs, Mapping),
            batch_dim=request.batch_dim,
            remat=request.remat,
            fuse_attention=request.fuse_attention,
        )

    def _make_training_step(self, inputs: object) -> TrainingStep:
        return make_training_step(self._context, self._model, inputs, self._optimizer, self._request.loss)

    def make_counter_assignments_and_policy(
        self, variant: PlanVariant
    ) -> tuple[Any, list[Assignment], LayoutPolicy]:
        """Return the step counter for a variant, the layouts of its variables, and the policy for its activations."""
        has_same_inputs = variant.inputs == self.variant.inputs
        step = (
            self.step
            if has_same_inputs
            else self._make_training_step(_unflatten_inputs(self._inputs, variant.inputs))
        )
        # If the optimizer is not part of the model, the plan lacks its slots, so add those of the step.
        planned = {v.key: v for v in (*(a.variable for a in self._plan.assignments), *step.variables)}
        table = make_plan(
            list(planned.values()), variant.rules, layers=self._context.layers, complete=False
        ).check()
        layouts = {a.variable.key: a for a in table.assignments}
        batch_dim = variant.batch_dim or guess_batch_dim(table)
        activations = variant.rules.activations
        policy = LayoutPolicy(table.mesh, batch_dim, activations.__getitem__ if activations else None)
        key = variant.inputs, variant.remat, variant.fuse_attention
        if key not in self._lowered:
            more = {"remat": variant.remat, "fuse_attention": variant.fuse_attention}
            counter = load_step_cost_counter(self._context.adapter.engine_name)
            self._lowered[key] = counter(step, **{name: value for name, value in more.items() if value})
        return self._lowered[key], [layouts[v.key] for v in step.variables], policy

    def make_plan_with_cost(
        self, plan: Plan, step_cost: StepCost, policy: LayoutPolicy, verified: Verified | None
    ) -> Plan:
        """Return the plan with the cost of a step. The arrays of `later=` are added to the memory of this cost."""
        dim = policy.batch_dim
        over = "replicated, since no mesh dim is known to shard them"
        if dim:
            over = f"sharded over {format_batch_dim(dim)}"
        step_cost = replace(step_cost, notes=(f"batches are {over}", *step_cost.notes))
        beside = sum(a.device_bytes for a in plan.assignments if a.variable.kind is Kind.LATER)
        if beside:  # the step was traced without these arrays, so add them to its memory
            names = ("argument_bytes", "peak_bytes", "least_peak_bytes")
            held = {name: getattr(step_cost, name) + beside for name in names if getattr(step_cost, name)}
            note = f"the arrays of later=, {format_bytes(beside)} per device, stay in memory during the step"
            step_cost = replace(step_cost, **held, notes=(*step_cost.notes, note))
        machine = Machine(self._request.machine.device, policy.mesh.size)
        if plan.free_activations and not policy.activations:
            # Only the step shows the ranks of outputs and the batch dim, so make the warning of missing rules again.
            problems = [problem for problem in plan.problems if problem.kind != "no activations"]
            found = find_missing_activation_rule_problem(
                plan.assignments, plan.layers, dim, checks_batch_dim=True
            )
            problems += [found] if found else []
            plan = replace(plan, problems=sort_problems(problems))
        cost = Cost(step_cost, machine, batch_dim=dim, verified=verified)
        return plan.add_cost(cost).set_limits(device_memory=self._request.device_memory)

    def compute_variant_cost(self, variant: PlanVariant) -> Cost:
        """Return the cost of a step of a plan variant."""
        lowered, assignments, policy = self.make_counter_assignments_and_policy(variant)
        found = self.make_plan_with_cost(
            self._plan, lowered.compute_cost(assignments, policy), policy, None
        ).cost
        assert isinstance(found, Cost)
        return found


def _list_input_shapes(inputs: object) -> tuple[BatchArraySpec, ...]:
    """Return the shapes of inputs that are one array, a list, or a mapping of arrays, or nothing for other inputs."""
    pairs: Any = [("", inputs)]
    if isinstance(inputs, Mapping | list | tuple):
        arrays = cast("Any", inputs)
        pairs = arrays.items() if isinstance(inputs, Mapping) else enumerate(arrays)
    named: dict[Any, Any] = dict(pairs)
    if not all(hasattr(each, "shape") and hasattr(each, "dtype") for each in named.values()):
        return ()
    return tuple(BatchArraySpec(str(name), tuple(x.shape), str(x.dtype)) for name, x in named.items())


def _unflatten_inputs(inputs: object, leaves: Sequence[BatchArraySpec]) -> Any:
    """Return `leaves` in the structure of `inputs`: a mapping with the same keys, a list, a tuple, or one array."""
    if isinstance(inputs, Mapping):
        return dict(zip(cast("Any", inputs), leaves, strict=True))
    return (
        list(leaves)
        if isinstance(inputs, list)
        else tuple(leaves)
        if isinstance(inputs, tuple)
        else leaves[0]
    )
