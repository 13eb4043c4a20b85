"""Say by name where every weight of a model lives; see it before a byte is allocated; get exactly that."""

from layoutmap.devices import create_mesh
from layoutmap.errors import (
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
from layoutmap.layout import UNSHARDED, Layout
from layoutmap.layout_map import LayoutMap, Match, Rule
from layoutmap.mesh import Mesh, MeshDimension
from layoutmap.parity import ParityReport, check_parity
from layoutmap.plan import Plan, Problem
from layoutmap.scope import Scope, apply, build, layout_map_scope, plan, scope

__version__ = "0.1.0"

__all__ = [
    "UNSHARDED",
    "EngineError",
    "Layout",
    "LayoutError",
    "LayoutMap",
    "LayoutMapError",
    "LayoutMapWarning",
    "Match",
    "Mesh",
    "MeshDimension",
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
    "__version__",
    "apply",
    "build",
    "check_parity",
    "create_mesh",
    "layout_map_scope",
    "plan",
    "scope",
]
