"""Explain an operation that JAX refuses under explicit axes: the user's line, the operands, and the fix."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from layoutmap.core.errors import ShardingRefusedError

_INSTALLED = tuple(
    {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")}
)
_PACKAGE = str(Path(__file__).parents[2])


_SHARDED_TYPE = re.compile(r"\w+\[[^\]]*@")
"""An array's type in JAX's messages, if it has explicit axes: `float32[16@batch,8]`."""
_EXPLICIT_WORDS = re.compile(
    r"\bExplicit\b|\b(Auto|Explicit) axes\b|\baxis specs\b|\breshard\b|\bout_sharding\b|\bxs should be replicated\b"
)
"""Words that JAX's messages contain only under explicit axes."""


def is_sharding_refusal(error: Exception) -> bool:
    """Return whether an exception means that JAX refuses an operation because of the shardings of its operands.

    Loops and branches raise a `TypeError` for carries and results, gradients of gathers, constraints, and `vmap` a
    `ValueError`, and constraints of arrays on explicit axes alone an `AssertionError`.
    """
    if type(error).__name__ in ("ShardingTypeError", "DuplicateSpecError"):
        return True
    is_standard = isinstance(error, (TypeError, ValueError, AssertionError, NotImplementedError))
    return is_standard and any(p.search(str(error)) for p in (_SHARDED_TYPE, _EXPLICIT_WORDS))


@contextmanager
def translate_sharding_refusals(step_name: str) -> Generator[None]:
    """Convert JAX's refusal of an operation under explicit axes to a `ShardingRefusedError`, until the block ends."""
    before = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    # JAX's frames contain the operands, so keep these frames in tracebacks.
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    except Exception as error:
        if not is_sharding_refusal(error):
            raise
        raise _make_refusal_error(step_name, error) from error
    finally:
        jax.config.update("jax_traceback_filtering", before)


def _make_refusal_error(step_name: str, error: Exception) -> ShardingRefusedError:
    line = _find_user_line(error)
    operands, spec = _read_operands_and_result_spec(error)
    facts = {"line": line} | ({"operands": operands} if operands else {})
    return ShardingRefusedError(
        f"{step_name}: JAX cannot determine the sharding of an operation's result",
        facts=facts,
        why=_shorten_jax_message(str(error)),
        fix=_make_refusal_fix(error, spec),
    )


def _make_refusal_fix(error: Exception, spec: PartitionSpec | None) -> str:
    """Return a fix for the refused operation: a reshard, a change of rules, or an `out_sharding`."""
    if constrained := _find_refused_constraint_spec(error):
        return f"write jax.sharding.reshard(x, jax.{constrained}) instead of the constraint, then plan again"
    reshard = "jax.sharding.reshard(x, jax.P(..)); then plan again"
    if "xs should be replicated" in str(error):
        return f"leave axis 0 of the arrays that the scan iterates over unsharded in their rules, or write {reshard}"
    if "axis specs" in str(error):
        return f"shard the mapped axes alike: {reshard}"
    out = f"jax.{spec}" if spec else "jax.P(..), one entry for each axis of its result"
    return f"pass out_sharding={out}, or reshard an operand first: {reshard}"


def _find_refused_constraint_spec(error: Exception) -> PartitionSpec | None:
    """Return the spec that `with_sharding_constraint` refused, with explicit dims only, or None for other functions."""
    if "with_sharding_constraint" not in str(error):
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, NamedSharding):
                axis_types = dict(zip(value.mesh.axis_names, value.mesh.axis_types, strict=True))
                auto = [dim for dim, kind in axis_types.items() if kind is not AxisType.Explicit]
                return _make_spec_of_distinct_dims(value.spec, auto)
    return None


def _shorten_jax_message(text: str) -> str:
    """Return the first line of JAX's message. If it shows no sharded type, append the first line that does."""
    first, *rest = (" ".join(line.split()) for line in text.splitlines() if line.strip())
    more = [] if _SHARDED_TYPE.search(first) else [line for line in rest if _SHARDED_TYPE.search(line)]
    return " ".join([first, *more[:1]])


def _find_user_line(error: BaseException) -> str:
    """Return the innermost line of the user's code in an error's tracebacks: the file, the line number, and the code.

    Gradients of functions that JAX itself compiles have no such line, so the text names the function.
    """
    frames = [frame for each in _iterate_causes(error) for frame in traceback.extract_tb(each.__traceback__)]
    of_user = [each for each in frames if not each.filename.startswith((*_INSTALLED, _PACKAGE, "<"))]
    if of_user:
        return f"{of_user[-1].filename}:{of_user[-1].lineno}  {of_user[-1].line}"
    return f"in the gradient of {frames[-1].name}" if error.__cause__ is not None else "unknown"


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _read_operands_and_result_spec(error: BaseException) -> tuple[str, PartitionSpec | None]:
    """Return the operands of the refused operation as text, "" if unknown, and its result's spec, None if unknown."""
    found: tuple[str, Mapping[str, Any]] | None = None
    for each in _iterate_causes(error):
        for frame, _ in traceback.walk_tb(each.__traceback__):
            name, variables = frame.f_code.co_name, frame.f_locals
            if name.endswith("_rule") and any(map(_has_partition_spec, variables.values())):
                found = name, variables
    if found is None:
        return "", None
    name, variables = found
    shown = ", ".join(
        f"{key} {value.str_short(True)}" for key, value in variables.items() if _has_partition_spec(value)
    )
    if "dot_general" in name and "dimension_numbers" in variables:
        return shown, _find_product_spec(variables["lhs"], variables["rhs"], variables["dimension_numbers"])
    if "gather" in name and "operand" in variables and "indices" in variables:
        rows, rest = (variables[key].sharding.spec for key in ("indices", "operand"))
        return shown, _make_spec_of_distinct_dims([*rows[:-1], *rest[1:]])
    return shown, None


def _has_partition_spec(value: Any) -> bool:
    return hasattr(value, "str_short") and hasattr(getattr(value, "sharding", None), "spec")


def _find_product_spec(lhs: Any, rhs: Any, dimension_numbers: Any) -> PartitionSpec:
    """Return the spec of the result of a matrix product: the specs of its operands, without those of summed axes."""
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = dimension_numbers
    specs = [lhs.sharding.spec[axis] for axis in lhs_batch]
    for operand, others in ((lhs, (*lhs_summed, *lhs_batch)), (rhs, (*rhs_summed, *rhs_batch))):
        specs += [operand.sharding.spec[axis] for axis in range(operand.ndim) if axis not in others]
    return _make_spec_of_distinct_dims(specs)


def _make_spec_of_distinct_dims(specs: Iterable[Any], excluded_dims: Iterable[str] = ()) -> PartitionSpec:
    """Return a spec with these entries. Leave out the excluded dims, and each mesh dim that an earlier entry has."""
    used = set(excluded_dims)
    out: list[Any] = []
    for spec in specs:
        dims = () if spec is None else (spec,) if isinstance(spec, str) else tuple(spec)
        kept = tuple(dim for dim in dims if dim not in used)
        used.update(kept)
        out.append(kept[0] if len(kept) == 1 else kept or None)
    return PartitionSpec(*out)
