"""Say by name where every weight of a model lives; see it before a byte is allocated; get exactly that."""

from layoutmap.layout import UNSHARDED, Layout
from layoutmap.layout_map import LayoutMap, Match
from layoutmap.mesh import Mesh, MeshDimension

__version__ = "0.1.0"

__all__ = ["UNSHARDED", "Layout", "LayoutMap", "Match", "Mesh", "MeshDimension", "__version__"]
