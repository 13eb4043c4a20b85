"""Count a training step of a planned model, and add its cost on a machine to the plan."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from layoutmap.core.errors import EngineError, LayoutMapWarning, ScopeError, ShardingRefusedError
from layoutmap.core.mesh import Mesh, check_dim
from layoutmap.core.paths import find_repeated_layers
from layoutmap.core.policy import LayoutPolicy
from layoutmap.core.specs import BatchDim, format_batch_dim, list_batch_dims
from layoutmap.core.steps import Shape, TrainingStep
from layoutmap.core.text_table import format_bytes
from layoutmap.core.variables import Assignment, Kind
from layoutmap.cost.cost import Cost
from layoutmap.cost.machine import Machine
from layoutmap.cost.machines import find_machine
from layoutmap.cost.model_steps import load_step_counter, make_training_step
from layoutmap.cost.table import SCORED_ATTENTION, StepCost
from layoutmap.cost.verified import Verified
from layoutmap.plan.lint import guess_batch_dim
from layoutmap.plan.problems import Problem
from layoutmap.plan.variable_problems import find_free_activations
from layoutmap.plan.ways import Way, find_preset
from layoutmap.scope.arguments import check_remat
from layoutmap.scope.context import Scope
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.scope.progress import ElapsedTime

_SHARE_OF_JAX = 0.75  # share of GPU memory that JAX preallocates: 63.8 of 84.9 GB on an H100


@dataclass(frozen=True, slots=True)
class CostRequest:
    """Arguments of `plan` that request the cost of a step."""

    machine: Machine
    batch_dim: BatchDim | None  # None: guessed from the mesh
    loss: Callable[..., Any] | None  # None: the model's own
    target: str | None  # what XLA compiles the whole step for, to verify the count
    counted_for: str | None  # what XLA compiles for to count; None: its partitioner's module is counted
    remat: str | None  # layers that recompute activations; None: as the code says
    fuse_attention: bool
    on: str  # the machine's name
    device_memory: int | None = None  # overrides the machine's memory
    advises: bool = True  # whether other ways are counted if the step does not fit


def request_cost(on: Any, mesh: Mesh, inputs: object, engine: str, options: Mapping[str, Any]) -> CostRequest:
    """Check the arguments of `plan` for the cost of a step, before a model is made."""
    batch_dim, verify, remat = options["batch_dim"], options["verify"], options["remat"]
    machine = find_machine(on, mesh)
    check_dim("plan: batch_dim", batch_dim, mesh, "the batch is sharded over it")
    if inputs is None:
        raise ScopeError(
            f"plan: on={str(on)!r} needs inputs",
            why="the communication and computation of a step depend on the shape of the batch, which is "
            "not given",
            fix='pass inputs=: objects with shape and dtype; on the command line --inputs "int32[64,4096]"',
        )
    load_step_counter(engine)
    check_remat(remat)
    on_jax = {
        "verify": "the step is compiled by XLA",
        "remat": "recomputing is done by JAX",
        "fuse_attention": "torch's scaled_dot_product_attention is counted as the operations that it is for torch",
    }
    for name, why in on_jax.items():
        if options[name] not in (None, False) and engine != "jax":
            raise ScopeError(
                f"plan: {name}={options[name]!r} is for models on JAX, and this one is on {engine}",
                why=why,
                fix=f"leave {name} out, or plan the same rules with the model on JAX",
            )
    target = choose_target(verify, machine)
    counted_for = choose_compiler(verify, machine) if engine == "jax" else None
    fuses = bool(options["fuse_attention"])
    return CostRequest(machine, batch_dim, options["loss"], target, counted_for, remat, fuses, str(on))


def choose_target(verify: bool | str | None, machine: Machine) -> str | None:
    """Return the target that XLA compiles for, or None without `verify`."""
    if not verify:
        return None
    from layoutmap.cost.jax.targets import find_target  # imported here, because it imports JAX

    name = machine.device.name if verify is True else verify
    find_target(name)
    return name


def choose_compiler(verify: bool | str | None, machine: Machine) -> str | None:
    """Return the machine's device if XLA's compiler for it should count steps, or else None."""
    from layoutmap.cost.jax.targets import has_gpu_compiler  # imported here, because it imports JAX

    name = machine.device.name
    return name if verify in (None, True) and has_gpu_compiler(name) else None


def add_cost(
    plan: Plan, context: Scope, model: object, inputs: object, optimizer: object, request: CostRequest
) -> Plan:
    """Return the plan with the cost of a step of its model, which comes from a dry run."""
    counting = _ModelCounter(plan, context, model, inputs, optimizer, request)
    begin = time.process_time()
    lowered, placed, policy = counting.prepare_count(counting.way)
    try:
        counted = (
            _count_compiled(lowered, placed, policy, request.counted_for) if request.counted_for else None
        )
        counted = counted or lowered.count(placed, policy, with_held=True)
    except ShardingRefusedError as error:  # report errors of the model's code as problems of the plan
        facts = tuple((name, str(value)) for name, value in error.facts.items())
        subject = type(model).__name__
        return plan.add_problem(
            Problem("out_sharding", "error", subject, error.what, facts, error.why, error.fix)
        )
    if context.adapter.engine_name == "jax" and request.device_memory is None:
        counted = replace(counted, notes=(*counted.notes, *_note_memory_setting(counted, request.machine)))
    seconds = time.process_time() - begin
    verified = None
    if request.target:
        with ElapsedTime(f"XLA compiles the step for {request.target}") as shown:
            verified = lowered.verify(placed, policy, request.target, counted, shown)
    found = counting.attach_cost(plan, counted, policy, verified)
    assert isinstance(found.cost, Cost)
    if found.cost.fits or not request.advises:
        return found
    from layoutmap.cost.advise import advise  # imported here, because most plans need no search code
    from layoutmap.cost.search.space import find_blocks

    step, on_jax = counting.step, context.adapter.engine_name == "jax"
    *_, data = (None, *list_batch_dims(policy.batch_dim))
    variables = [a.variable for a in plan.assignments]
    tried, untried = advise(
        replace(
            counting.way,
            preset=find_preset(context.layout_map),
            data=data,
        ),
        plan,
        found.cost.step.peak_bytes,
        counting.count_way,
        blocks=find_blocks(getattr(lowered, "outputs", {}), variables),
        can_recompute=on_jax
        and request.remat is None
        and bool(step.how_to_recompute and find_repeated_layers(v.path for v in variables)),
        can_fuse=on_jax and SCORED_ATTENTION in counted.notes,
        seconds=seconds,
    )
    return replace(found, cost=replace(found.cost, tried=tried, untried=untried))


def _note_memory_setting(counted: StepCost, machine: Machine) -> Iterator[str]:
    """Yield the setting that lets JAX use the part of the GPU's memory that the step needs."""
    from layoutmap.cost.jax.targets import is_gpu  # imported here, because it imports JAX

    share = counted.peak_bytes / machine.device.memory_bytes
    if is_gpu(machine.device.name) and _SHARE_OF_JAX < share <= 1:
        yield (
            f"JAX takes {_SHARE_OF_JAX:.0%} of a GPU's memory unless it is told otherwise, and this step needs more: "
            f"run it with XLA_PYTHON_CLIENT_MEM_FRACTION={min(1.0, math.ceil(100 * share + 1) / 100):g}"
        )


def _count_compiled(lowered: Any, placed: Any, policy: LayoutPolicy, target: str) -> StepCost | None:
    """Return the cost of a step as XLA compiles it, or warn and return None if that fails."""
    try:
        with ElapsedTime(f"XLA compiles the step for {target}") as shown:
            return cast(
                "StepCost", lowered.count(placed, policy, with_held=True, target=target, on_wait=shown)
            )
    except EngineError as error:
        warnings.warn(
            LayoutMapWarning(
                f"plan: XLA's compiler for {target!r} is installed, and failed: the cost is an estimate",
                why=error.what,
                fix="pass verify=False to skip the compiler, or verify=True to see its whole error",
            ),
            stacklevel=2,
        )
        return None


class _ModelCounter:
    """Counter of one model's steps in several ways, each traced once."""

    def __init__(
        self, plan: Plan, context: Scope, model: Any, inputs: Any, optimizer: Any, request: CostRequest
    ):
        self._plan, self._context, self._request = plan, context, request
        self._made, self._given = (model, optimizer), inputs
        self.step = self._make_step(inputs)
        self._lowered: dict[Any, Any] = {}
        self.way = Way(
            context.layout_map,
            on=request.on,
            inputs=_list_arrays(inputs),
            named=isinstance(inputs, Mapping),
            batch_dim=request.batch_dim,
            remat=request.remat,
            fuse_attention=request.fuse_attention,
        )

    def _make_step(self, inputs: object) -> TrainingStep:
        model, optimizer = self._made
        return make_training_step(self._context, model, inputs, optimizer, self._request.loss)

    def prepare_count(self, way: Way) -> tuple[Any, list[Assignment], LayoutPolicy]:
        """Return the counter of a step for a way, and the layouts of its variables and activations."""
        same = way.inputs == self.way.inputs
        step = self.step if same else self._make_step(_restore_structure(self._given, way.inputs))
        # Include slots of optimizers that are not part of the model. They follow their weights.
        planned = {v.key: v for v in (*(a.variable for a in self._plan.assignments), *step.variables)}
        table = make_plan(
            list(planned.values()), way.rules, layers=self._context.layers, complete=False
        ).check()
        layouts = {a.variable.key: a for a in table.assignments}
        batch_dim = way.batch_dim or guess_batch_dim(table)
        activations = way.rules.activations
        policy = LayoutPolicy(table.mesh, batch_dim, activations.__getitem__ if activations else None)
        key = way.inputs, way.remat, way.fuse_attention
        if key not in self._lowered:
            more = {"remat": way.remat, "fuse_attention": way.fuse_attention}
            counter = load_step_counter(self._context.adapter.engine_name)
            self._lowered[key] = counter(step, **{name: value for name, value in more.items() if value})
        return self._lowered[key], [layouts[v.key] for v in step.variables], policy

    def attach_cost(
        self, plan: Plan, counted: StepCost, policy: LayoutPolicy, verified: Verified | None
    ) -> Plan:
        """Return the plan with the cost of a counted step."""
        dim = policy.batch_dim
        over = "replicated, since no mesh dim is known to shard them"
        if dim:
            over = f"sharded over {format_batch_dim(dim)}"
        counted = replace(counted, notes=(f"batches are {over}", *counted.notes))
        beside = sum(a.device_bytes for a in plan.assignments if a.variable.kind is Kind.LATER)
        if beside:  # a step is traced without them, and they are held while it runs
            names = ("argument_bytes", "peak_bytes", "least_peak_bytes")
            held = {name: getattr(counted, name) + beside for name in names if getattr(counted, name)}
            note = f"the arrays of later=, {format_bytes(beside)} per device, are held while the step runs"
            counted = replace(counted, **held, notes=(*counted.notes, note))
        machine = Machine(self._request.machine.device, policy.mesh.size)
        is_open = plan.free_activations and not policy.activations and dim is not None
        if is_open and not any(problem.kind == "no activations" for problem in plan.problems):
            plan = plan.add_problems([*find_free_activations(plan.assignments, dim)])
        cost = Cost(counted, machine, batch_dim=dim, verified=verified)
        return plan.add_cost(cost).set_limits(device_memory=self._request.device_memory)

    def count_way(self, way: Way) -> Cost:
        """Return the cost of a step in a way."""
        lowered, placed, policy = self.prepare_count(way)
        found = self.attach_cost(self._plan, lowered.count(placed, policy), policy, None).cost
        assert isinstance(found, Cost)
        return found


def _list_arrays(inputs: object) -> tuple[Shape, ...]:
    """Return the arrays of inputs that are one array, a list, or a mapping, and no others."""
    pairs: Any = [("", inputs)]
    if isinstance(inputs, Mapping | list | tuple):
        given = cast("Any", inputs)
        pairs = given.items() if isinstance(inputs, Mapping) else enumerate(given)
    named: dict[Any, Any] = dict(pairs)
    if not all(hasattr(each, "shape") and hasattr(each, "dtype") for each in named.values()):
        return ()
    return tuple(Shape(str(name), tuple(x.shape), str(x.dtype)) for name, x in named.items())


def _restore_structure(inputs: object, leaves: Sequence[Shape]) -> Any:
    """Return arrays in the structure of the inputs."""
    if isinstance(inputs, Mapping):
        return dict(zip(cast("Any", inputs), leaves, strict=True))
    return (
        list(leaves)
        if isinstance(inputs, list)
        else tuple(leaves)
        if isinstance(inputs, tuple)
        else leaves[0]
    )
