"""Find layers that DTensor cannot compute, as determined by running each with TensorFlow 2.21.

There are three kinds. Some operations need a replicated weight, so it is stored sharded, and gathered in each call of
its layer. Loops over time are unrolled. Some operations cannot run, so the plan reports them before the first step.
Other unsupported operations show when a step is compiled: see `tensorflow_gathering`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from layoutmap.adapters.keras.private import ConvLSTMCell
from layoutmap.core.errors import EngineError
from layoutmap.core.layout import Layout
from layoutmap.core.unsupported import UnsupportedFeature
from layoutmap.engines.tensorflow.refusals import find_refusal_line, is_dtensor_refusal

L = keras.layers

# DTensor does not support the operations that unpack these weights, so replicate the weights before unpacking them.
_PACKED_QUANTIZATIONS = ("int8", "int4", "gptq", "awq")
_SLOW_NUM_STEPS = 64  # each time step takes 0.1 s to compile in each function, so warn of more steps
# DTensor lacks rules for these layers' sharded weights, so the weights are gathered (decisions/0010).
_NEED_REPLICATED_WEIGHTS = (
    *(L.Conv1D, L.Conv2D, L.Conv3D),
    *(L.DepthwiseConv1D, L.DepthwiseConv2D, L.SeparableConv1D, L.SeparableConv2D),
    *(L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose),
    *(L.LSTMCell, L.GRUCell, L.SimpleRNNCell, ConvLSTMCell, L.BatchNormalization),
)


# Weights are stored as planned, and gathered only as far as their layer needs (decisions/0010).
def get_read_layout_converter(layer: keras.Layer) -> Callable[[Layout], Layout] | None:
    """Return a function from a weight's layout to the one in which `layer` must read it, or None for no change."""
    in_few_bits = getattr(layer, "quantization_mode", None) in _PACKED_QUANTIZATIONS
    if in_few_bits or isinstance(layer, _NEED_REPLICATED_WEIGHTS):
        return lambda layout: Layout.replicated(layout.mesh, layout.rank)
    if isinstance(layer, L.Embedding):  # DTensor supports tables sharded by rows, but not by columns
        return lambda layout: Layout([*layout.sharding_specs[:1], *[None] * (layout.rank - 1)], layout.mesh)
    return None


def find_unsupported_features(layer: Any, path: str, weights: list[str]) -> Iterator[UnsupportedFeature]:
    """Yield the features of a layer that DTensor lacks, or for which weights are gathered or loops are unrolled."""
    kind = type(layer).__name__
    if isinstance(layer, L.RNN) and not layer.unroll:
        steps = [*(layer.get_build_config() or {}).get("input_shape", ()), None, None][1]
        yield UnsupportedFeature(
            path,
            f"the loop over time of {kind} ({steps or 'any number of'} steps) is unrolled on TensorFlow's DTensor",
            why="DTensor has no loops, so each time step is compiled separately, which takes long for "
            "long series",
            fix="no action is needed; to compile faster, use shorter series, or another backend",
            severity="warning" if (steps or 0) > _SLOW_NUM_STEPS else "note",
        )
    is_int8 = isinstance(layer, (L.Dense, L.EinsumDense)) and layer.quantization_mode == "int8"
    if is_int8 and getattr(layer, "inputs_quantizer", None) is not None:
        yield UnsupportedFeature(
            path,
            f"{kind} with inputs in int8 cannot run on TensorFlow's DTensor",
            why="Keras multiplies int8 numbers with an operation for a single device",
            fix="quantize with int4, or with weights only, or run this model on another backend",
        )
    if get_read_layout_converter(layer) is not None:
        rows = isinstance(layer, L.Embedding) and layer.quantization_mode not in _PACKED_QUANTIZATIONS
        for weight in weights:
            yield UnsupportedFeature(
                weight,
                f"DTensor computes with {'whole rows' if rows else 'all'} of this weight, so each step gathers it",
                why=f"DTensor's operations for {kind} cannot compute with this axis sharded; the weight and its slots "
                "are stored as planned",
                fix="no action is needed; leave the axis unsharded to avoid the gather",
                severity="note",
                if_sharded=tuple(range(rows, 8)),
            )


def make_function_that_refuses_generate(task: keras.Model) -> Callable[[], object]:
    """Return a replacement for the `make_generate_function` of a keras-hub task. It raises an `EngineError`."""

    def make_generate_function() -> object:
        raise EngineError(
            f"{task.name}: generate cannot run on TensorFlow's DTensor",
            why="DTensor cannot update a slice of a tensor, which the key-value cache needs for each token",
            fix="generate on JAX or PyTorch: lm.save(model, directory) here, lm.load(make_model, directory) there",
        )

    return make_generate_function


_OPERATION = re.compile(
    r"see current operation: .*?\"tf\.(\w+)\"(?:.*?_global_shape = \[#tf_type\.shape<([\dx]*)>)?"
)
_NAMED = re.compile(r"'?tf\.(\w+)'?()")


def is_compiler_refusal(error: tf.errors.OpError) -> bool:
    """Return whether an error says that DTensor's compiler refused a function, so that no part of it ran."""
    return "dtensor_graph_to_mlir_pass" in error.message


def make_refused_op_facts(
    error: tf.errors.OpError, graph: tf.Graph | None, layer_texts: Mapping[str, str]
) -> dict[str, str]:
    """Return facts for a DTensor error: the operation that it names, and the layers that contain the operation.

    `layer_texts` has a text for each layer name.
    """
    found = _OPERATION.search(error.message) or _NAMED.search(error.message)
    kind, shape = found.groups() if found else ("", None)
    inside = dict[str, None]()
    for op in graph.get_operations() if graph and found else ():
        if op.type == kind and (not shape or shape in ("x".join(map(str, out.shape)) for out in op.outputs)):
            parts = (p if p in layer_texts else re.sub(r"_\d+$", "", p) for p in op.name.split("/")[::-1])
            inside[next((layer_texts[part] for part in parts if part in layer_texts), "")] = None
    return {"operation": kind, "in": "; ".join(list(filter(None, inside))[:4])}


@contextmanager
def translate_compiler_refusals(action: str) -> Generator[None]:
    """Replace errors of DTensor's compiler in the block by an `EngineError` with a reason and a fix."""
    try:
        yield
    except tf.errors.OpError as error:
        if not is_dtensor_refusal(error):
            raise
        raise EngineError(
            f"{action} cannot be run by TensorFlow's DTensor",
            facts={
                **getattr(error, "layoutmap_place", make_refused_op_facts(error, None, {})),
                "TensorFlow": find_refusal_line(error.message),
            },
            why="DTensor has no rule for an operation; compiled steps were tried with the planned layouts, with only "
            "the batch sharded between layers, with weights gathered, and with everything gathered",
            fix="use different operations, compile eager calls, or run this model on JAX or PyTorch",
        ) from None
