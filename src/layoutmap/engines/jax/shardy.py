"""Run Shardy's passes from jaxlib. All private names that this needs are in this file.

Tested on jaxlib 0.10.2.

    jaxlib.mlir.ir, jaxlib.mlir.passmanager         MLIR's Python bindings
    sdy-propagation-pipeline                        gives each value a layout, from those of arguments and results
    #sdy.sharding, sdy.mesh, sdy.sharding_constraint    layouts, meshes, and constraints as MLIR text
    jax._src.interpreters.mlir.make_ir_context      MLIR with JAX's dialects
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import jaxlib.version

from layoutmap.core.errors import EngineError
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh

try:
    from jaxlib.mlir import ir as _ir
    from jaxlib.mlir.passmanager import PassManager as _PassManager
except ImportError as _error:
    _missing = str(_error)
else:
    _missing = ""

Module = Union["_ir.Module", "_ir.Operation"]
TESTED = "0.10"
PASS = "builtin.module(sdy-propagation-pipeline)"
MESH = "layoutmap"
"""The name of the mesh in MLIR modules."""

MARK = "layoutmap_mark"
"""The dim of a mesh whose sharding constraints mark layer outputs. They are replaced by layouts later."""


def _make_unsupported_jaxlib_error(missing: str) -> EngineError:
    return EngineError(
        f"jaxlib {jaxlib.version.__version__}: the layouts of a step cannot be found",
        facts={"missing": missing, "tested on": f"jaxlib {TESTED}"},
        why="layoutmap finds them with passes of the partitioner Shardy, which are private and differ in this release",
        fix=f'pip install "jaxlib=={TESTED}.*"',
    )


def make_mlir_context() -> _ir.Context:
    """Make an MLIR context with the dialects of JAX. Enter it before use."""
    from jax._src.interpreters import mlir

    return mlir.make_ir_context()


def serialize_module(module: Module) -> bytes:
    """Serialize a module as MLIR bytecode, with the names of its operations."""
    file = io.BytesIO()
    module.operation.write_bytecode(file)
    return file.getvalue()


def parse_module(text: str | bytes) -> _ir.Module:
    """Parse a module from text or MLIR bytecode, in the MLIR context that the caller has entered."""
    return _ir.Module.parse(text)


@functools.cache
def check_shardy_passes() -> None:
    """Raise an `EngineError` if this jaxlib lacks MLIR's bindings or Shardy's passes."""
    if _missing:
        raise _make_unsupported_jaxlib_error(_missing)
    with make_mlir_context():
        try:
            _PassManager.parse(PASS)
        except (ValueError, RuntimeError) as error:
            said = str(error)
            raise _make_unsupported_jaxlib_error(
                said.partition("error: ")[2].partition("\n")[0] or said
            ) from error


def format_layout_for_shardy(layout: Layout | None, rank: int, mesh: str = MESH) -> str:
    """Return a layout as text for Shardy. Axes beyond its rank are unsharded. `None` lets Shardy choose all axes."""
    if layout is None:
        return f"<@{mesh}, [{', '.join(['{?}'] * rank)}]>"
    names = [", ".join(f'"{dim}"' for dim in layout.list_mesh_dims(axis)) for axis in range(layout.rank)]
    return f"<@{mesh}, [{', '.join(f'{{{each}}}' for each in (*names, *[''] * (rank - layout.rank)))}]>"


def copy_module_with_layouts(
    module: _ir.Module,
    mesh: Mesh,
    argument_layouts: Sequence[Layout | None],
    result_layouts: Sequence[Layout | None],
    choose_layer_output_layout: Callable[[str, tuple[int, ...]], Layout | None],
) -> _ir.Operation:
    """Return a copy of a module for a mesh, with layouts of its arguments, results, and layer outputs.

    Args:
        module: The module, with marks of layer outputs. It is not changed.
        mesh: The mesh.
        argument_layouts: The layout of each argument of its main function; `None`: the partitioner chooses.
        result_layouts: The layout of each result; `None`: the partitioner chooses. A result with a layout reuses the
            memory of the argument at its position.
        choose_layer_output_layout: Returns the layout of a mark by its operation name and shape; `None`: remove it.
    """
    with module.context, _ir.Location.unknown():
        copy = module.operation.clone()
        dims = ", ".join(f'"{name}"={size}' for name, size in zip(mesh.dim_names, mesh.shape, strict=True))
        block = copy.regions[0].blocks[0]
        functions = [op for op in block if op.operation.name == "func.func"]
        named = {"sym_name": _ir.StringAttr.get(MESH), "mesh": _ir.Attribute.parse(f"#sdy.mesh<[{dims}]>")}
        _ir.Operation.create("sdy.mesh", attributes=named, ip=_ir.InsertionPoint.at_block_begin(block))
        copy.attributes["mhlo.num_partitions"] = _ir.Attribute.parse(f"{mesh.size} : i32")
        main = next(f for f in functions if f.attributes["sym_name"].value == "main")
        _pad_arguments_and_results(main, argument_layouts, result_layouts)
        donated = {n: f"{n} : i32" for n, layout in enumerate(result_layouts) if layout is not None}
        for name, layouts, types, aliases in (
            ("arg_attrs", argument_layouts, main.type.inputs, donated),
            ("res_attrs", result_layouts, main.type.results, {}),
        ):
            main.attributes[name] = _add_layouts_to_attributes(main.attributes, name, layouts, types, aliases)
        for op in list_layer_output_markers(copy):
            name, shape = get_location_name(op), tuple(op.results[0].type.shape)
            _replace_marker_by_layout(op, choose_layer_output_layout(name, shape))
        return copy


# Shardy drops the shardings of uneven arguments and results, so pad these like training steps do (decisions/0230).
def _pad_arguments_and_results(
    main: Any, argument_layouts: Sequence[Layout | None], result_layouts: Sequence[Layout | None]
) -> None:
    """Change a function so that it takes padded arguments, which it slices first, and returns padded results."""
    inputs, outputs = list(main.type.inputs), list(main.type.results)
    block = main.regions[0].blocks[0]
    last = block.operations[len(block.operations) - 1]
    for n, layout in enumerate(argument_layouts):
        if layout is not None and (padded := _make_padded_type(inputs[n], layout)) != inputs[n]:
            argument, uses = block.arguments[n], list(block.arguments[n].uses)
            bounds = {
                "start_indices": [0] * layout.rank,
                "limit_indices": inputs[n].shape,
                "strides": [1] * layout.rank,
            }
            argument.set_type(padded)
            rows = _create_operation(
                "stablehlo.slice", inputs[n], [argument], bounds, _ir.InsertionPoint.at_block_begin(block)
            )
            for use in uses:
                use.owner.operands[use.operand_number] = rows
            inputs[n] = padded
    for n, layout in enumerate(result_layouts):
        if layout is not None and (padded := _make_padded_type(outputs[n], layout)) != outputs[n]:
            element, insertion_point = padded.element_type, _ir.InsertionPoint(last)
            scalar = _ir.RankedTensorType.get([], element)
            number = "0.0" if isinstance(element, _ir.FloatType) else "false" if str(element) == "i1" else "0"
            value = _ir.Attribute.parse(f"dense<{number}> : {scalar}")
            zero = _ir.Operation.create(
                "stablehlo.constant", [scalar], attributes={"value": value}, ip=insertion_point
            )
            added = [new - old for new, old in zip(padded.shape, outputs[n].shape, strict=True)]
            none = [0] * layout.rank
            amounts = {"edge_padding_low": none, "edge_padding_high": added, "interior_padding": none}
            last.operands[n] = _create_operation(
                "stablehlo.pad", padded, [last.operands[n], zero.results[0]], amounts, insertion_point
            )
            outputs[n] = padded
    main.attributes["function_type"] = _ir.TypeAttr.get(_ir.FunctionType.get(inputs, outputs))


def _make_padded_type(tensor_type: Any, layout: Layout) -> Any:
    if layout.rank != len(tensor_type.shape):  # a random key: it has one more axis here, and is never padded
        return tensor_type
    return _ir.RankedTensorType.get(layout.pad_shape(tensor_type.shape), tensor_type.element_type)


def _create_operation(
    name: str,
    result_type: Any,
    operands: Sequence[Any],
    numbers: Mapping[str, Sequence[int]],
    insertion_point: Any,
) -> Any:
    attributes: dict[str, Any] = {key: _ir.DenseI64ArrayAttr.get(list(each)) for key, each in numbers.items()}
    made = _ir.Operation.create(
        name, results=[result_type], operands=list(operands), attributes=attributes, ip=insertion_point
    )
    return made.results[0]


def propagate_layouts(module: _ir.Operation) -> None:
    """Assign a layout to each value of a module in place, by Shardy's propagation.

    Raises:
        EngineError: This jaxlib lacks the passes.
    """
    check_shardy_passes()
    with module.context, _ir.Location.unknown():
        for op in list_operations(module, "chlo."):
            _replace_chlo_operation(op)
        _PassManager.parse(PASS).run(module)


def get_location_name(op: Any) -> str:
    """Return the name in the location of an operation, or an empty string."""
    # In jaxlib 0.10.0 all locations have a `name_str`, and reading it from one that is no name ends the process.
    is_a_name = getattr(op.location, "is_a_name", lambda: True)()
    return getattr(op.location, "name_str", "") if is_a_name else ""


def list_operations(module: Module, prefix: str) -> list[_ir.Operation]:
    """List the operations with names that start with `prefix`, in order."""
    found: list[_ir.Operation] = []

    def append_if_prefixed(op: _ir.Operation) -> _ir.WalkResult:
        if op.name.startswith(prefix):
            found.append(op)
        return _ir.WalkResult.ADVANCE

    module.operation.walk(append_if_prefixed)
    return found


def _replace_chlo_operation(op: _ir.Operation) -> None:
    """Replace a CHLO operation by a StableHLO operation of equal cost, because Shardy has no rules for CHLO."""
    operands, results = list(op.operands), [result.type for result in op.results]
    shapes = [tuple(each.type.shape) for each in operands]
    attributes: dict[str, _ir.Attribute] = {}
    if op.name == "chlo.top_k":
        name = "stablehlo.custom_call"
        symbols = _SYMBOLS[: len(shapes[0]) + 1]
        *kept, last, taken = symbols
        sizes = [f"{s}={n}" for s, n in zip(symbols, (*shapes[0], results[0].shape[-1]), strict=True)]
        given, made = (f"[{', '.join((*kept, each))}]" for each in (last, taken))
        rule = f"<({given})->({made}, {made}) {{{', '.join(sizes)}}} need_replication={{{last}, {taken}}}, custom>"
        attributes["sdy.sharding_rule"] = _ir.Attribute.parse(f"#sdy.op_sharding_rule{rule}")
        attributes["call_target_name"] = _ir.StringAttr.get("top_k")
    elif any(shape != tuple(result.shape) for shape in shapes for result in results):
        return
    elif len(operands) == 2:
        name = "stablehlo.add"
    elif operands[0].type == results[0]:
        name = "stablehlo.tanh"
    else:
        name = "stablehlo.is_finite"
    made_op = _ir.Operation.create(
        name, results, operands, attributes, loc=op.location, ip=_ir.InsertionPoint(op)
    )
    for old, new in zip(op.results, made_op.results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()


_SYMBOLS = "ijklmnopq"


def list_layer_output_markers(module: Module) -> list[_ir.Operation]:
    """List the operations that mark layer outputs in a module, in order."""
    mark_meshes = {
        op.attributes["sym_name"].value
        for op in module.operation.regions[0].blocks[0]
        if op.operation.name == "sdy.mesh" and f'"{MARK}"' in str(op.attributes["mesh"])
    }

    def is_layer_output_marker(op: _ir.Operation) -> bool:
        return str(op.attributes["sharding"]).partition("@")[2].partition(",")[0] in mark_meshes

    return list(filter(is_layer_output_marker, list_operations(module, "sdy.sharding_constraint")))


def _replace_marker_by_layout(op: _ir.Operation, layout: Layout | None) -> None:
    rank = len(op.results[0].type.shape)
    if layout is None or layout.rank != rank:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()
    else:
        op.attributes["sharding"] = _ir.Attribute.parse(
            f"#sdy.sharding{format_layout_for_shardy(layout, rank)}"
        )


def _add_layouts_to_attributes(
    attributes: Mapping[str, Any],
    name: str,
    layouts: Sequence[Layout | None],
    types: Sequence[Any],
    aliases: Mapping[int, str],
) -> _ir.ArrayAttr:
    before = attributes[name] if name in attributes else [{}] * len(types)
    after: list[_ir.DictAttr] = []
    for number, (each, layout, kind) in enumerate(zip(before, layouts, types, strict=True)):
        entries = {entry.name: entry.attr for entry in each} if each else {}
        if layout is not None:
            text = format_layout_for_shardy(layout, len(kind.shape))
            entries["sdy.sharding"] = _ir.Attribute.parse(f"#sdy.sharding{text}")
        if number in aliases:
            entries["tf.aliasing_output"] = _ir.Attribute.parse(aliases[number])
        after.append(_ir.DictAttr.get(entries))
    return _ir.ArrayAttr.get(after)
