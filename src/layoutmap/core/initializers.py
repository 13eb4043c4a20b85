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
class InitializerProgram:
    """Describe an initializer as a function of a seed, which an engine can trace and compile.

    Args:
        key: Identifies the function with its shape and dtype, so that programs of equal keys are compiled once.
        seed: Argument of the function, as arrays or nested containers of arrays; may be empty.
        function: Computes the global value from the seed, in operations that the engine can trace.
    """

    key: Hashable
    seed: Any
    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
# Processes hold different shards and cannot compare values, so they compare initializer recipes (decisions/0181).
class Initializer:
    """Describe how to compute a variable's first value: as a whole, and if possible as a program or in blocks.

    Args:
        global_value: Computes the global value, as an array of the engine's framework or of numpy.
        program: The same computation as a program; `None`: the library does not allow it.
        blocks: Computes the values at some indices in limited memory; `None`: the library does not allow it. An engine
            that can use blocks prefers them.
        recipe: Returns lines of text on what determines the values besides the program's seed. Initializers with
            equal texts have equal values in any process. `None`: no text determines them, so processes compare values.
    """

    global_value: Callable[[], Any]
    program: InitializerProgram | None = None
    blocks: Callable[[Sequence[Index]], Sequence[Any]] | None = None
    recipe: Callable[[], str] | None = None
