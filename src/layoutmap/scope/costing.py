"""The cost of a step in a plan: the model that was made for the plan is counted, and timed on a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from layoutmap.core.errors import ScopeError
from layoutmap.core.mesh import Mesh, check_dim
from layoutmap.core.policy import LayoutPolicy
from layoutmap.cost.machine import Machine
from layoutmap.cost.machines import machine_for
from layoutmap.engines import step_counter
from layoutmap.plan.lint import usual_batch_dim
from layoutmap.scope.arguments import check_remat
from layoutmap.scope.context import Scope
from layoutmap.scope.plan import Plan, make_plan
from layoutmap.scope.progress import Waiting


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of the cost of a step.

    Args:
        machine: What it runs on.
        batch_dim: The mesh dim over which batches are sharded; `None`: the usual one.
        loss: What is derived; `None`: the model's own.
        target: What XLA compiles the step for; `None`: it does not.
        remat: Whose activations are computed again in the backward pass; `None`: as the model's code says.
    """

    machine: Machine
    batch_dim: str | None
    loss: Callable[..., Any] | None
    target: str | None
    remat: str | None = None


def asked_cost(
    on: Any,
    mesh: Mesh,
    batch_dim: str | None,
    loss: Any,
    inputs: Any,
    verify: bool | str,
    engine: str,
    remat: str | None = None,
) -> Asked | None:
    """Check what is asked of the cost of a step, before a model is made; `None`: it is not asked for.

    Raises:
        LayoutMapError: There is no such machine or dim, it has another number of devices than the mesh, the inputs are
            missing, the engine counts no steps, or options are for a cost that nobody asks for.
    """
    given = {"batch_dim": batch_dim, "loss": loss, "verify": verify or None, "remat": remat}
    if on is None:
        for name, value in given.items():
            if value is not None:
                raise ScopeError(
                    f"plan: {name}={value!r} has no effect without on=",
                    why="it is about the cost of a training step, which is counted only with on=",
                    fix=f"leave {name} out, or name the machine, as in on='h100:{mesh.size}'",
                )
        return None
    machine = machine_for(on, mesh)
    check_dim("plan: batch_dim", batch_dim, mesh, "the batch is sharded over it")
    if inputs is None:
        raise ScopeError(
            f"plan: on={str(on)!r} needs inputs",
            why="what a step sends and computes depends on the shape of the batch, which is not given",
            fix='pass inputs=: anything with shape and dtype; for the command line --inputs "int32[64,4096]"',
        )
    step_counter(engine)
    check_remat(remat)
    on_jax = {
        "verify": "the step is compiled by XLA",
        "remat": "recomputing is done by JAX",
    }
    for name, why in on_jax.items():
        if given[name] is not None and engine != "jax":
            raise ScopeError(
                f"plan: {name}={given[name]!r} is for models on JAX, and this one is on {engine}",
                why=why,
                fix=f"leave {name} out, or plan the same rules with the model on JAX",
            )
    return Asked(machine, batch_dim, loss, target_of(verify, machine), remat)


def target_of(verify: bool | str, machine: Machine) -> str | None:
    """Return what XLA is to compile for; `None`: it is not to.

    Raises:
        EngineError: XLA cannot compile for it, or its compiler is not installed.
    """
    if not verify:
        return None
    from layoutmap.engines.jax.cost.targets import target_named  # late: it imports JAX

    name = machine.device.name if verify is True else verify
    target_named(name)
    return name


def with_cost(plan: Plan, dry: Scope, model: Any, inputs: Any, optimizer: Any, asked: Asked) -> Plan:
    """Return a plan with the cost of a step of its model, which was made in a dry run."""
    batch_dim = asked.batch_dim or usual_batch_dim(plan)
    step = dry.session.step(model, inputs, optimizer, asked.loss)
    # Those of the plan, and slots of optimizers that models do not carry, which follow their weights.
    planned = {v.key: v for v in (*(a.variable for a in plan.assignments), *step.variables)}
    assignments = make_plan(list(planned.values()), dry.layout_map).check().assignments
    layouts = {a.variable.key: a for a in assignments}
    activations = dry.layout_map.activations
    policy = LayoutPolicy(plan.mesh, batch_dim, activations.__getitem__ if activations else None)
    counter = step_counter(dry.adapter.engine_name)
    lowered = counter(step, asked.remat) if asked.remat else counter(step)
    placed = [layouts[v.key] for v in step.variables]
    counted = lowered.count(placed, policy, with_held=True)
    over = (
        f"sharded over {batch_dim}" if batch_dim else "replicated, since no mesh dim is known to shard them"
    )
    counted = replace(counted, notes=(f"batches are {over}", *counted.notes))
    verified = None
    if asked.target:
        with Waiting(f"XLA compiles the step for {asked.target}") as shown:
            verified = lowered.verify(placed, policy, asked.target, counted, shown)
    return plan.with_cost(counted, asked.machine, batch_dim, verified)
