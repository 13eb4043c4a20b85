"""Shard the weights of a model by their names, and inspect the plan before anything is allocated."""

import importlib
from typing import TYPE_CHECKING, Any

from layoutmap.core.errors import (
    CheckpointError,
    EngineError,
    LayoutError,
    LayoutMapError,
    LayoutMapWarning,
    MeshError,
    ParityError,
    PlanError,
    RuleError,
    ScopeError,
)
from layoutmap.core.layout import UNSHARDED, Layout
from layoutmap.core.match import Rule
from layoutmap.core.mesh import Mesh
from layoutmap.engines.launchers import report_errors_to_torchrun
from layoutmap.plan.problems import Problem
from layoutmap.rules.rule_set import Activations
from layoutmap.scope.context import Scope
from layoutmap.scope.devices import create_mesh, simulate_devices
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.plan import Plan
from layoutmap.scope.scope import apply, build, layout_map_scope, plan, scope
from layoutmap.scope.suggest import suggest

if TYPE_CHECKING:
    from layoutmap import dtensor
    from layoutmap.adapters.jax.microbatches import microbatches
    from layoutmap.adapters.jax.steps import jit_step
    from layoutmap.cost.layout_map_search import SearchResult, search
    from layoutmap.cost.lower_step import lower_step, step_cost
    from layoutmap.cost.table import StepCost
    from layoutmap.inspecting.guard import Guard, guard
    from layoutmap.inspecting.inspect import inspect
    from layoutmap.inspecting.parity import ParityReport, check_parity
    from layoutmap.saving.describe import Checkpoint, describe
    from layoutmap.saving.export import export
    from layoutmap.saving.load import load
    from layoutmap.saving.manager import CheckpointManager
    from layoutmap.saving.receive import receive
    from layoutmap.saving.save import save
    from layoutmap.saving.stream import stream
    from layoutmap.saving.sync import plan_sync

    DVariable: Any  # a class of TensorFlow's engine, which type checkers need not import

report_errors_to_torchrun()

__version__ = "0.1.0"

# Each name here is a promise, so types that only come back from calls are not listed (decisions/0060).
__all__ = [
    "UNSHARDED",
    "DVariable",
    "Activations",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "EngineError",
    "Guard",
    "Layout",
    "LayoutError",
    "LayoutMap",
    "LayoutMapError",
    "LayoutMapWarning",
    "Mesh",
    "MeshError",
    "ParityError",
    "ParityReport",
    "Plan",
    "PlanError",
    "Problem",
    "Rule",
    "RuleError",
    "Scope",
    "ScopeError",
    "SearchResult",
    "StepCost",
    "__version__",
    "apply",
    "build",
    "check_parity",
    "create_mesh",
    "describe",
    "dtensor",
    "export",
    "guard",
    "inspect",
    "jit_step",
    "layout_map_scope",
    "load",
    "lower_step",
    "microbatches",
    "plan",
    "plan_sync",
    "receive",
    "save",
    "scope",
    "search",
    "simulate_devices",
    "step_cost",
    "stream",
    "suggest",
]

_LATE = {
    "CheckpointManager": "layoutmap.saving.manager",
    "DVariable": "layoutmap.engines.tensorflow.variable",
    "Checkpoint": "layoutmap.saving.describe",
    "ParityReport": "layoutmap.inspecting.parity",
    "check_parity": "layoutmap.inspecting.parity",
    "describe": "layoutmap.saving.describe",
    "export": "layoutmap.saving.export",
    "Guard": "layoutmap.inspecting.guard",
    "guard": "layoutmap.inspecting.guard",
    "inspect": "layoutmap.inspecting.inspect",
    "jit_step": "layoutmap.adapters.jax.steps",
    "microbatches": "layoutmap.adapters.jax.microbatches",
    "StepCost": "layoutmap.cost.table",
    "load": "layoutmap.saving.load",
    "lower_step": "layoutmap.cost.lower_step",
    "step_cost": "layoutmap.cost.lower_step",
    "plan_sync": "layoutmap.saving.sync",
    "receive": "layoutmap.saving.receive",
    "save": "layoutmap.saving.save",
    "stream": "layoutmap.saving.stream",
    "SearchResult": "layoutmap.cost.layout_map_search",
    "search": "layoutmap.cost.layout_map_search",
}
"""The module of each name that is imported at its first use, because the module loads numpy or a framework slowly."""


def __getattr__(name: str) -> Any:
    if name == "dtensor":
        return importlib.import_module("layoutmap.dtensor")
    if name in _LATE:
        try:
            return getattr(importlib.import_module(_LATE[name]), name)
        except ModuleNotFoundError as error:
            from layoutmap.engines.tested import TESTED

            package = f'"layoutmap[{error.name}]"' if error.name in TESTED else error.name
            raise AttributeError(
                f"layoutmap.{name} needs {error.name}, which is not installed: pip install {package}"
            ) from error
    raise AttributeError(f"module 'layoutmap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
