"""Convert states of data iterators, random generators, and schedules to JSON and back, without running code.

JSON lacks bytes, arrays, tuples, infinite numbers, mappings with keys other than text, and counters. Each of them
becomes an object with a key that begins with `__`.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from layoutmap.checkpoint.dtypes import get_numpy_dtype
from layoutmap.core.arguments import describe_type
from layoutmap.core.errors import CheckpointError

_MAX_ARRAY_BYTES = 1 << 24  # limit for one array; larger ones must be saved as variables


def encode_state(value: Any, where: str) -> Any:
    """Convert a state, such as that of a data iterator, to JSON values. Arrays and bytes become base64 text.

    Args:
        value: Numbers, texts, bytes, `None`, arrays, and lists, tuples and mappings of them.
        where: The name of the state in messages.

    Raises:
        CheckpointError: The state contains another type of value. The message names its position.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"__float__": repr(float(value))}
    if isinstance(value, Counter):
        return {"__counter__": encode_state(dict(cast("Counter[Any]", value)), where)}
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        if all(isinstance(key, str) and not key.startswith("__") for key, _ in items):
            return {key: encode_state(each, f"{where}[{key!r}]") for key, each in items}
        return {"__items__": [[encode_state(k, where), encode_state(v, f"{where}[{k!r}]")] for k, v in items]}
    if isinstance(value, (list, tuple)):
        parts = [encode_state(each, f"{where}[{n}]") for n, each in enumerate(cast("Sequence[Any]", value))]
        return {"__tuple__": parts} if isinstance(value, tuple) else parts
    if hasattr(value, "__array__") and hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(value)
        if array.dtype.kind not in "OSUM" and array.nbytes <= _MAX_ARRAY_BYTES:
            data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
            found: dict[str, Any] = {"__array__": data, "dtype": array.dtype.name, "shape": list(array.shape)}
            return found | {"tensor": True} if type(value).__module__ == "torch" else found
    raise CheckpointError(
        f"{where}: this state cannot be saved",
        facts={"type": describe_type(value)},
        why="a state may contain only numbers, strings, bytes, arrays of up to 16 MiB, lists, and mappings",
        fix="pass the result of the iterator's state_dict() or get_state(), with such values only",
    )


def decode_state(value: Any) -> Any:
    """Convert JSON values of `encode_state` to the state. Tensors become numpy arrays if torch is not imported."""
    if isinstance(value, list):
        # The state of a Mersenne Twister has 625 numbers, so copy lists of numbers without a call for each.
        parts = cast("list[Any]", value)
        return [decode_state(each) for each in parts] if {list, dict} & {*map(type, parts)} else [*parts]
    if not isinstance(value, dict):
        return value
    found = cast("dict[str, Any]", value)
    if "__bytes__" in found:
        return base64.b64decode(found["__bytes__"])
    if "__float__" in found:
        return float(found["__float__"])
    if "__counter__" in found:
        return Counter[Any](decode_state(found["__counter__"]))
    if "__tuple__" in found:
        return tuple(map(decode_state, found["__tuple__"]))
    if "__items__" in found:
        return {decode_state(key): decode_state(each) for key, each in found["__items__"]}
    if "__array__" in found:
        data = np.frombuffer(base64.b64decode(found["__array__"]), get_numpy_dtype(found["dtype"]))
        array = data.reshape(found["shape"]).copy()
        # torch's generators and data loaders accept only tensors, so return a tensor if a tensor was saved.
        return (
            sys.modules["torch"].from_numpy(array) if "tensor" in found and "torch" in sys.modules else array
        )
    return {key: decode_state(each) for key, each in found.items()}
