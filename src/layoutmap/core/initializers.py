"""Describe how the first value of a variable is computed.

An initializer can always return the global value. Where the model library allows it, it can also return *blocks* of it,
or it has a *program*: a function of a seed, and a key that says when two programs are the same function. An engine then
compiles one program for all equal variables, passes each its seed, and lets the compiler make only the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layoutmap.core.blocks import Index


@dataclass(frozen=True, slots=True)
class Program:
    """Describe an initializer that an engine can compile.

    Args:
        key: Equal for two programs that are the same function; shape and dtype are part of it.
        seed: Argument of the function, as arrays or nested containers of arrays; may be empty.
        function: Computes the global value from the seed, in operations that the engine can trace.
    """

    key: Hashable
    seed: Any
    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
# Processes hold different shards and cannot compare values, so they compare initializer recipes (decisions/0181).
class Initializer:
    """Compute the first value of one variable.

    Args:
        global_value: Computes the global value, as an array of the engine's framework or of numpy.
        program: The same as a program, if the library allows it.
        blocks: Computes the values at some indices, and never more of them at a time than a bounded piece, if the
            library allows it. An engine that can use blocks prefers them.
        recipe: Says, in lines of text, what determines the values besides the program's seed: initializers with equal
            texts have equal values, in any process. `None`: nothing can say it; whoever must know compares values.
    """

    global_value: Callable[[], Any]
    program: Program | None = None
    blocks: Callable[[Sequence[Index]], Sequence[Any]] | None = None
    recipe: Callable[[], str] | None = None
