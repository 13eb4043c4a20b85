"""Say by name where every weight of a model lives; see it before a byte is allocated; get exactly that."""

import importlib
from typing import TYPE_CHECKING, Any

# First of all, for Ctrl-C while the rest is imported.
from layoutmap.cli import interrupts as _interrupts  # noqa: F401  # pyright: ignore[reportUnusedImport]
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
from layoutmap.plan.problems import Problem
from layoutmap.rules.rule_set import Activations
from layoutmap.scope.context import Scope
from layoutmap.scope.devices import create_mesh, simulate_devices
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.plan import Plan
from layoutmap.scope.scope import apply, build, layout_map_scope, plan, scope

if TYPE_CHECKING:
    from layoutmap import dtensor
    from layoutmap.adapters.jax.steps import jit_step
    from layoutmap.cost.table import StepCost
    from layoutmap.scope.cost import lower_step, step_cost
    from layoutmap.scope.describing import Checkpoint, describe
    from layoutmap.scope.exporting import export
    from layoutmap.scope.guarding import Guard, guard
    from layoutmap.scope.inspecting import inspect
    from layoutmap.scope.loading import load
    from layoutmap.scope.manager import CheckpointManager
    from layoutmap.scope.parity import ParityReport, check_parity
    from layoutmap.scope.saving import save
    from layoutmap.scope.search import SearchResult, search

    DVariable: Any  # a class of an engine; even for types, nothing here needs its framework

__version__ = "0.1.0"

__all__ = [  # why: decisions/0124
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
    "plan",
    "save",
    "scope",
    "search",
    "simulate_devices",
    "step_cost",
]

_LATE = {
    "CheckpointManager": "layoutmap.scope.manager",
    "DVariable": "layoutmap.engines.tensorflow.variable",
    "Checkpoint": "layoutmap.scope.describing",
    "ParityReport": "layoutmap.scope.parity",
    "check_parity": "layoutmap.scope.parity",
    "describe": "layoutmap.scope.describing",
    "export": "layoutmap.scope.exporting",
    "Guard": "layoutmap.scope.guarding",
    "guard": "layoutmap.scope.guarding",
    "inspect": "layoutmap.scope.inspecting",
    "jit_step": "layoutmap.adapters.jax.steps",
    "StepCost": "layoutmap.cost.table",
    "load": "layoutmap.scope.loading",
    "lower_step": "layoutmap.scope.cost",
    "step_cost": "layoutmap.scope.cost",
    "save": "layoutmap.scope.saving",
    "SearchResult": "layoutmap.scope.search",
    "search": "layoutmap.scope.search",
}
"""Names whose modules load numpy or a framework, which takes long: they are imported when first asked for."""


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
