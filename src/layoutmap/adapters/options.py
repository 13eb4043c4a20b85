"""Define the options of a scope as one frozen value, created where a user passes them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from layoutmap.core.errors import ScopeError
from layoutmap.core.specs import BatchDim


@dataclass(frozen=True, slots=True)
class ScopeOptions:
    """Hold the options of `scope`, `build`, and `apply` that every model library has.

    Args:
        strict: Whether warnings, such as a variable without a rule or a rule without a variable, are errors.
        batch_dim: Mesh dim over which `fit`, `evaluate`, and `predict` split the batch, or a tuple of several, major to
            minor, as in `("replica", "fsdp")`. `None`: they do not split it.
        progress: Whether to show progress on stderr; `None`: only on a terminal and if it takes long.
        check_batches: Whether several processes compare data that must be equal in all of them: each batch of a Keras
            model, and the arguments of the first calls of a torch module. It costs a checksum of the batch, at about 1
            GB per second, and a few bytes of communication.
        later: Functions that create arrays which appear after the model, such as a KV cache, an accumulator, or an
            average of weights, by name: `{"cache": make_cache}`. They are evaluated on shapes, and the plan lists their
            arrays under paths such as `cache.0.k`. For models on JAX.
        own: Options of one model library: for torch a `layoutmap.adapters.torch.options.TorchOptions` with `draws`,
            `gather`, `rows`, and `fully_shard`; `None` for other libraries.

    Example:
        >>> ScopeOptions(batch_dim="batch").strict
        False
    """

    strict: bool = False
    batch_dim: BatchDim | None = None
    progress: bool | None = None
    check_batches: bool = True
    later: Mapping[str, Callable[[], object]] | None = None
    own: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.batch_dim, list):
            object.__setattr__(self, "batch_dim", tuple(self.batch_dim))


Draws = Literal["exact", "tiles"]
Gather = Literal["fully_shard", "own"]
Rows = Literal["global", "own"]


class OptionsByName(TypedDict, total=False):
    """Types of all scope options, including those only for torch, for editors and type checkers."""

    strict: bool
    batch_dim: BatchDim | None
    progress: bool | None
    check_batches: bool
    later: Mapping[str, Callable[[], object]] | None
    draws: Draws
    gather: Gather
    rows: Rows
    fully_shard: Mapping[str, Any]


_MIN_SIMILARITY = 0.75
"""Names less similar than this are not suggested. The options `gather` and `later` have a similarity of 0.73."""
COMMON_OPTIONS = tuple(field.name for field in fields(ScopeOptions) if field.name != "own")
"""The options of every library."""


def check_option_names(values: Mapping[str, Any], library: str, library_options: Iterable[str] = ()) -> None:
    """Raise a `ScopeError` if a scope for a model library lacks one of the options in `values`.

    Args:
        values: The values of options by name.
        library: Name of the library.
        library_options: Names of options that only this library has.
    """
    known = (*COMMON_OPTIONS, *library_options)
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, _MIN_SIMILARITY)
            raise ScopeError(
                f"{name}={value!r}: a scope for {library} models has no such option",
                facts={"options": ", ".join(known)},
                why="the name is misspelled, or the option is for models of a different library",
                fix=f"write {near[0]}=" if near else "leave it out",
            )
