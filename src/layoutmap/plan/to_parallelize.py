"""Convert a plan to Python code that shards a module with torch's own functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from layoutmap.core.layout import Layout
from layoutmap.plan.table import PlanTable
from layoutmap.plan.torch_styles import (
    ModuleVariables,
    StyledModule,
    find_styled_modules,
    group_variables_by_module,
    list_sharding_dims,
    make_inexpressible_error,
)

_CALL = "to_parallelize_plan"
_START = '''\
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


def parallelize(model, mesh):
    """Lay a model out over {mesh}: init_device_mesh(device, {shape}, mesh_dim_names={names})."""
'''
_DISTRIBUTE = '''

def distribute(module, mesh, placements):
    """Lay a module's own tensors out on all of a mesh; it takes and gives plain tensors, which are whole."""
    for name, each in placements.items():
        tensor = getattr(module, name)
        placed = distribute_tensor(tensor.detach(), mesh, each)
        if isinstance(tensor, nn.Parameter):
            placed = nn.Parameter(placed, tensor.requires_grad)
        setattr(module, name, placed)
    if [*module.children()]:
        return  # what it computes with them, the modules in it and plain tensors, is its own

    def taken(module, inputs, mesh):
        whole = [Replicate()] * mesh.ndim
        return tuple(DTensor.from_local(x, mesh, whole) if type(x) is Tensor else x for x in inputs)

    def given(module, output, mesh):
        return output.full_tensor() if isinstance(output, DTensor) else output

    distribute_module(module, mesh, None, taken, given)
'''
_SHARED = """\
    for path, first in {shared}.items():  # one tensor in several modules
        module, _, name = path.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(first))
"""


def make_parallelize_code(plan: PlanTable) -> str:
    """Return Python source with a function `parallelize(model, mesh)` that shards a model as the plan says.

    Raises:
        PlanError: A layout cannot be expressed by torch's functions.
    """
    modules = group_variables_by_module(plan, _CALL)
    styled = find_styled_modules(plan, modules, _CALL)
    rest, shared = _collect_placements(modules, styled)
    mesh = plan.mesh
    text = _START.format(mesh=mesh, shape=mesh.shape, names=tuple(mesh.dim_names))
    for dim in dict.fromkeys(each.dim for each in styled.values()):
        text += f'    parallelize_module(\n        model,\n        mesh["{dim}"],\n        {{\n'
        calls = {path: _format_parallel_style(each) for path, each in styled.items() if each.dim == dim}
        text += (
            "".join(f"            {line},\n" for line in _format_dict_entries(calls)) + "        },\n    )\n"
        )
    if rest:
        lines = "".join(f"        {line},\n" for line in _format_dict_entries(rest))
        text += f"    for path, placements in {{\n{lines}    }}.items():\n"
        text += "        distribute(model.get_submodule(path), mesh, placements)\n"
    if shared:
        text += _SHARED.format(shared=shared)
    text += "    return model\n"
    if rest:
        text = text.replace("from torch import nn", "from torch import Tensor, nn") + _DISTRIBUTE
    return text


def _format_parallel_style(styled: StyledModule) -> str:
    if styled.kind == "sequence":
        return f"SequenceParallel(sequence_dim={styled.output}, use_local_output=True)"
    options: list[str] = []
    if styled.kind == "rowwise" and (styled.is_embedding or not styled.is_paired):
        options.append("input_layouts=Replicate()")
    if styled.output != (-1 if styled.kind == "colwise" else None):
        output = "Replicate()" if styled.output is None else f"Shard({styled.output})"
        options.append(f"output_layouts={output}")
    return f"{styled.kind.title()}Parallel({', '.join(options)})"


def _collect_placements(
    modules: Mapping[str, ModuleVariables], styled: Mapping[str, StyledModule]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dicts: the placements of modules that have no `ParallelStyle`, and the first paths of shared tensors.

    The first maps the path of a module to Python code. The second maps each other path of a tensor to its first path.
    """
    rest: dict[str, str] = {}
    shared: dict[str, str] = {}
    for module, variables in modules.items():
        placements: list[str] = []
        for name, a in variables.items():
            first_path, path = a.variable.path, f"{module}.{name}".lstrip(".")
            if not list_sharding_dims(a.layout):
                continue
            if path != first_path:
                shared[path] = first_path
            if module not in styled:
                placements.append(f'"{name}": [{", ".join(_format_placements(first_path, a.layout))}]')
        if placements:
            rest[module] = f"{{{', '.join(placements)}}}"
    return rest, shared


def _format_placements(path: str, layout: Layout) -> Iterator[str]:
    """Return torch's placements of a layout as Python code, one per mesh dim."""
    order = {name: number for number, name in enumerate(layout.mesh.dim_names)}
    for axis in range(layout.rank):
        dims = layout.list_mesh_dims(axis)
        if [*dims] != sorted(dims, key=order.__getitem__):
            raise make_inexpressible_error(
                _CALL,
                path,
                f"the layout {layout} on {layout.mesh}",
                "torch shards one axis over several dims in the order of the mesh dims",
                f"plan on a mesh with its dims in the order {', '.join(dims)}",
            )
    axis_of = {dim: axis for axis in range(layout.rank) for dim in layout.list_mesh_dims(axis)}
    return (f"Shard({axis_of[dim]})" if dim in axis_of else "Replicate()" for dim in layout.mesh.dim_names)


def _format_dict_entries(values: Mapping[str, str]) -> Iterator[str]:
    """Yield the entries of a dict as Python source. Equal values at paths that differ in one number become a loop."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path, value in values.items():
        groups.setdefault((_FIRST.sub("{i}", path, count=1), value), []).append(path)
    for (path, value), paths in groups.items():
        if len(paths) == 1:
            yield f'"{paths[0]}": {value}'
        else:
            numbers = [int(found[0]) for each in paths if (found := _FIRST.search(each))]
            yield f'**{{f"{path}": {value} for i in {_format_numbers_as_python(numbers)}}}'


_FIRST = re.compile(r"(?<![^.])\d+(?![^.])")


def _format_numbers_as_python(numbers: Iterable[int]) -> str:
    numbers = [*numbers]
    return f"range({len(numbers)})" if numbers == [*range(len(numbers))] else str(tuple(numbers))
