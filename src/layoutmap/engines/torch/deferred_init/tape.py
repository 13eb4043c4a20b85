"""Record how tensors get their values, without computing them.

While a tape records, an operation that would create a large tensor returns a fake tensor, and the tape stores the
operation. Small tensors are computed, so that their values can be read. If a value of a deferred tensor is read, as by
`.item()`, the tensor is computed temporarily.

A random operation on deferred tensors draws no numbers. The tape stores the state of the generator, and advances it as
the operation would. So later operations draw the same numbers as in an unsharded program.

A tape records the thread that opened `record_operations()`. Deferred tensors stay fake after it, and `make_recipe`
describes how to compute their values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from layoutmap.core.errors import EngineError
from layoutmap.engines.patches import set_attribute_temporarily
from layoutmap.engines.torch.deferred_init.calls import (
    can_defer_tensor,
    count_shape_elements,
    find_calling_initializer_name,
    find_random_generator,
    list_written_tensors,
)
from layoutmap.engines.torch.deferred_init.fake_tensors import UNSUPPORTED_ERRORS, FakeTensor, FakeTensorMode
from layoutmap.engines.torch.deferred_init.interception import intercept_operations
from layoutmap.engines.torch.deferred_init.operations import OVERWRITING
from layoutmap.engines.torch.deferred_init.recipes import Recipe
from layoutmap.engines.torch.deferred_init.replay import call_recorded_operation, replay_operations
from layoutmap.engines.torch.deferred_init.steps import (
    DeferredMemory,
    DeferredView,
    RecordedConstant,
    RecordedOperation,
)
from layoutmap.engines.torch.deferred_init.streams import PIECE, find_generator_overload, find_random_fill
from layoutmap.engines.torch.operators import (
    Args,
    Function,
    Kwargs,
    OpOverload,
    can_return_view,
    list_argument_names,
)
from layoutmap.engines.torch.storages import get_storage_key
from layoutmap.engines.torch.trees import tree_leaves, tree_map

MIN_DEFERRED_ELEMENTS = 4096
_MAX_COPIED_ELEMENTS = 1 << 12  # larger constants are copied only before a change, to save memory


# No device may store a full weight, so record operations and replay them in pieces (decisions/0006).
class Tape:
    """Record the operations that compute deferred tensors.

    Args:
        min_numel: Tensors with fewer elements are computed at once, unless they depend on deferred ones.
        piece_numel: The number of elements to compute at a time, a multiple of 16.
        shapes_only: Whether only shapes will be read later, and no values. Random operations then leave the generator
            unchanged, which takes no time for large tensors. Values that are read while recording are arbitrary, but
            `any` of a tensor is false and `all` of it is true.
        tiles: Whether random numbers are drawn by tiles: then a part of a tensor costs no more than that part, and
            values are the same on every mesh, but not those of a plain program. Each random operation takes one
            number from the generator.
        should_record: Returns whether to record the running code, because other tasks may share the thread.

    Attributes:
        fake_mode: The mode of the deferred tensors, in which operations on them compute shapes, and record nothing.

    Example:
        >>> tape = Tape()
        >>> with tape.record_operations():
        ...     layer = torch.nn.Linear(100, 100)
        >>> tape.is_deferred(layer.weight), tape.is_deferred(layer.bias)
        (True, False)
        >>> recipe = tape.make_recipe(layer.weight)
        >>> [block] = recipe.compute_blocks([(slice(0, 50), slice(0, 100))])
        >>> block.shape
        torch.Size([50, 100])
    """

    def __init__(
        self,
        min_numel: int = MIN_DEFERRED_ELEMENTS,
        piece_numel: int = PIECE,
        *,
        shapes_only: bool = False,
        tiles: bool = False,
        should_record: Callable[[], bool] = lambda: True,
    ) -> None:
        self._min_numel = min_numel
        self._shapes_only = shapes_only
        self._tiles = tiles
        self._should_record = should_record
        self._piece = piece_numel
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._operations: list[RecordedOperation] = []
        self._memories: dict[int, DeferredMemory] = {}
        self._shared_constants: dict[int, list[RecordedConstant]] = {}
        self._depth = 0
        self._paused = False

    @contextmanager
    def record_operations(self) -> Generator[Tape]:
        """Record this thread's operations on large tensors while the `with` block runs. Blocks may be nested."""
        if self._depth:
            yield self
            return
        self._depth = 1
        try:
            with intercept_operations(self, self.fake_mode):
                yield self
        finally:
            self._depth = 0
            self._shared_constants.clear()

    @property
    def is_recording(self) -> bool:
        """Whether a `record_operations()` block is running."""
        return bool(self._depth)

    def is_deferred(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is deferred by this tape."""
        return (
            isinstance(tensor, FakeTensor)
            and tensor.layout == torch.strided
            and get_storage_key(tensor) in self._memories
        )

    def make_recipe(self, tensor: torch.Tensor) -> Recipe:
        """Return the recipe of the current values of a deferred tensor.

        Raises:
            EngineError: This tape did not defer the tensor.
        """
        if not self.is_deferred(tensor):
            raise EngineError(
                "the tape did not record this tensor",
                facts={"tensor": f"{type(tensor).__name__} {tuple(tensor.shape)}"},
                why="it was created outside record_operations(), or is small and was computed at once",
                fix="check tape.is_deferred(tensor) first",
            )
        return Recipe(self._operations, self._make_deferred_view(tensor), len(self._operations), self._piece)

    # -- called by interception.py while the tape records

    def run_or_record_operation(self, op: OpOverload, args: Args, kwargs: Kwargs) -> object:
        """Record an operation if it has deferred tensors or a large result, otherwise run it. Return its result."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self._paused or op.namespace == "prim" or not self._should_record():
            return op(*args, **kwargs)
        if not any(map(self.is_deferred, tensors)):
            return self._run_or_defer_operation(op, args, kwargs, tensors)
        written = [leaf for leaf in list_written_tensors(op, args, kwargs) if isinstance(leaf, torch.Tensor)]
        if not all(map(self.is_deferred, written)):
            if any(map(self.is_deferred, written)):
                raise EngineError(
                    f"{op} changes deferred and real tensors together",
                    why="a tape either runs or records an operation",
                    fix="create all tensors inside record_operations(), or all before it",
                )
            return self._run_with_evaluated_arguments(op, args, kwargs, written)
        try:
            inferred = self._infer_fake_result(op, args, kwargs)
        except UNSUPPORTED_ERRORS:
            # The operation would change only a temporary copy, and the change would be lost, so raise.
            if written:
                raise
            return self._run_with_evaluated_arguments(op, args, kwargs, written)
        is_drawn = find_random_generator(op, args, kwargs) is not None
        can_all_wait = all(
            can_defer_tensor(leaf) for leaf in tree_leaves(inferred) if isinstance(leaf, torch.Tensor)
        )
        if not can_all_wait or (is_drawn and find_generator_overload(op) is None):
            return self._run_with_evaluated_arguments(op, args, kwargs, written)
        return self._record_operation(op, args, kwargs, written, inferred)

    def defer_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a deferred tensor with the values of a real tensor."""
        copy = torch.ops.aten.clone.default
        with torch.no_grad():
            inferred = self._infer_fake_result(copy, (tensor,), {})
            return self._record_operation(copy, (tensor,), {}, [], inferred)

    def defer_file_read(self, read_tensor: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a deferred tensor with the values of a file. A small tensor is read at once, and returned.

        Of a mapped file, only the needed parts are read.

        Args:
            read_tensor: Returns the tensor, which nothing else may change.
        """
        with self._pause_recording():
            tensor = read_tensor()
        if tensor.numel() < self._min_numel or not can_defer_tensor(tensor):
            return tensor
        copy, constant = torch.ops.aten.clone.default, RecordedConstant(tensor.detach(), is_mapped_file=True)
        with torch.no_grad():
            inferred = self._infer_fake_result(copy, (tensor,), {})
            return self._record_operation(copy, (constant,), {}, [], inferred)

    def evaluate_deferred_tensors(self, values: object) -> Any:
        """Return nested values in which computed tensors replace deferred tensors."""
        deferred = [
            leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and self.is_deferred(leaf)
        ]
        with self._pause_recording():
            made = iter(
                self._compute_deferred_values([self._make_deferred_view(tensor) for tensor in deferred])
            )
        return tree_map(
            lambda leaf: next(made) if isinstance(leaf, torch.Tensor) and self.is_deferred(leaf) else leaf,
            values,
        )

    # -- helpers

    def _run_or_defer_operation(
        self, op: OpOverload, args: Args, kwargs: Kwargs, tensors: list[torch.Tensor]
    ) -> object:
        """Run an operation on real tensors, or record it if its result is much larger than these tensors."""
        written = list_written_tensors(op, args, kwargs)
        for leaf in written:
            self._copy_constants_before_change(leaf)
        known = sum(tensor.numel() for tensor in tensors if not tensor.is_meta)
        # Compute a result that is not much larger than existing tensors at once, because deferring it saves little
        # memory.
        bound = max(self._min_numel, 2 * known + 1 if known else 0)
        if written or can_return_view(op) or (not tensors and args and count_shape_elements(args[0]) < bound):
            return op(*args, **kwargs)
        # Tensor subclasses may have side effects, so do not defer them.
        if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
            return op(*args, **kwargs)
        try:
            inferred = self._infer_fake_result(op, args, kwargs)
        except (*UNSUPPORTED_ERRORS, NotImplementedError):
            return op(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(inferred) if isinstance(leaf, torch.Tensor)]
        if not made or not all(can_defer_tensor(tensor) and tensor.numel() >= bound for tensor in made):
            return op(*args, **kwargs)
        return self._record_operation(op, args, kwargs, [], inferred)

    def _run_with_evaluated_arguments(
        self, op: OpOverload, args: Args, kwargs: Kwargs, written: list[torch.Tensor]
    ) -> Any:
        """Compute the deferred arguments of an operation that will change `written`, and run it with them."""
        for leaf in written:
            self._copy_constants_before_change(leaf)
        args, kwargs = self.evaluate_deferred_tensors((args, kwargs))
        return op(*args, **kwargs)

    def _infer_fake_result(self, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Return an operation's result as fake tensors, without running it."""
        if op.overloadpacket in OVERWRITING and not any(isinstance(arg, torch.Tensor) for arg in args[1:]):
            return args[0]  # a fill does not change the shape of its first argument, so return that argument
        args, kwargs = tree_map(self._detach_argument, (args, kwargs))
        with self.fake_mode:
            return op(*args, **kwargs)

    def _detach_argument(self, leaf: object) -> object:
        if isinstance(leaf, torch.Generator):
            return None
        # A fake mode keeps each real tensor that it sees in a cache, so pass a detached tensor.
        return leaf.detach() if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) else leaf

    def _record_operation(
        self, op: OpOverload, args: Args, kwargs: Kwargs, written: list[torch.Tensor], inferred: torch.Tensor
    ) -> Any:
        """Append an operation to the tape, unless its results are only views. Return its inferred result."""
        made_tensors = [leaf for leaf in tree_leaves(inferred) if isinstance(leaf, torch.Tensor)]
        fresh = [each for each in made_tensors if isinstance(each, FakeTensor) and not self.is_deferred(each)]
        if not fresh and (not written or torch.Tag.inplace_view in op.tags):
            return inferred  # the results are only views of recorded tensors, so there is nothing to replay
        number = len(self._operations)
        for tensor in fresh:
            memory = DeferredMemory(tensor.untyped_storage(), tensor.dtype, [number])
            self._memories.setdefault(get_storage_key(tensor), memory)
        if "dtype" in list_argument_names(op) and not any(
            isinstance(x, torch.Tensor) for x in tree_leaves(args)
        ):
            # The program may change the default dtype before the replay, so store the dtype in the arguments.
            kwargs = {**kwargs, "dtype": made_tensors[0].dtype}
        generator = find_random_generator(op, args, kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        recorded_args, recorded_kwargs = tree_map(self._make_recorded_argument, (args, kwargs))
        operation = RecordedOperation(
            number,
            op,
            recorded_args,
            recorded_kwargs,
            tuple(
                self._make_deferred_view(each) if self.is_deferred(each) else None for each in made_tensors
            ),
            tuple(self._make_deferred_view(each) for each in written),
            None if generator is None else generator.get_state(),
            caller=find_calling_initializer_name(),
        )
        if generator is not None and not self._shapes_only:
            operation = self._advance_generator_and_set_seed(operation, generator)
        for memory in {view.memory for view in operation.writes}:
            memory.writes.append(number)
        self._operations.append(operation)
        return inferred

    def _advance_generator_and_set_seed(
        self, operation: RecordedOperation, generator: torch.Generator
    ) -> RecordedOperation:
        """Advance a generator as an operation does. Return the operation, with a drawn seed if it draws by tiles."""
        view = operation.writes[0] if operation.writes else operation.results[0]
        fill = None if view is None else find_random_fill(operation, view)
        with self._pause_recording():
            if fill is not None and view is not None:
                if self._tiles:
                    seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
                    return dataclasses.replace(operation, seed=int(seed))
                fill.skip_values(view.numel, generator)
                return operation
            views = list(operation.iterate_deferred_inputs())
            made = dict(zip(views, self._compute_deferred_values(views), strict=True))
            args, kwargs = tree_map(
                lambda leaf: (
                    made[leaf]
                    if isinstance(leaf, DeferredView)
                    else leaf.value
                    if isinstance(leaf, RecordedConstant)
                    else leaf
                ),
                (operation.args, operation.kwargs),
            )
            call_recorded_operation(operation, args, kwargs, generator)
        return operation

    def _compute_deferred_values(self, views: list[DeferredView]) -> list[torch.Tensor]:
        """Return the values of deferred tensors. If the tape has only shapes, `any()` is False, and `all()` is True."""
        if self._shapes_only and len(views) == 1:
            maker = self._operations[views[0].memory.writes[0]]
            if maker.op in (torch.ops.aten.any.default, torch.ops.aten.all.default):
                return [torch.tensor(maker.name == "all", device="cpu")]
        if len(views) == 1:
            recipe = Recipe(self._operations, views[0], len(self._operations), self._piece)
            return [recipe.compute_global_value()]
        return replay_operations(self._operations, views, len(self._operations))

    def _make_deferred_view(self, tensor: torch.Tensor) -> DeferredView:
        return DeferredView(
            self._memories[get_storage_key(tensor)],
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def _make_recorded_argument(self, leaf: object) -> object:
        """Return an argument to record: a `DeferredView`, `RecordedConstant`, None for a generator, or itself."""
        if isinstance(leaf, torch.Generator):
            return None
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self.is_deferred(leaf):
            return self._make_deferred_view(leaf)
        with self._pause_recording():
            if leaf.numel() <= _MAX_COPIED_ELEMENTS:
                return RecordedConstant(leaf.detach().clone())
            constant = RecordedConstant(leaf.detach())
            self._shared_constants.setdefault(get_storage_key(leaf), []).append(constant)
            return constant

    def _copy_constants_before_change(self, leaf: object) -> None:
        """Copy the values of a real tensor for the recorded operations that read it, because it will change now."""
        if isinstance(leaf, torch.Tensor) and self._shared_constants:
            for constant in self._shared_constants.pop(get_storage_key(leaf), ()):
                constant.value = constant.value.clone()

    @contextmanager
    def _pause_recording(self) -> Generator[None]:
        with set_attribute_temporarily(self, "_paused", True), torch.no_grad():
            yield


def trace_recipe(function: Function, *args: object, tiles: bool = False) -> Recipe:
    """Return the recipe of the tensor that a function returns.

    Args:
        function: Makes a tensor; random numbers come from generators that it makes, or from torch's own.
        args: What it is called with.
        tiles: Whether random numbers are drawn by tiles, see `Tape`.

    Raises:
        EngineError: The function does not return a tensor.

    Example:
        >>> trace_recipe(lambda: torch.ones(100, 100)).shape
        (100, 100)
    """
    tape = Tape(tiles=tiles)
    with tape.record_operations():
        made = function(*args)
    if not isinstance(made, torch.Tensor):
        raise EngineError(
            f"{getattr(function, '__name__', function)} returns no tensor",
            facts={"returned": type(made).__name__},
            why="a recipe describes one tensor",
            fix="make the function return one tensor, and nothing else",
        )
    return tape.make_recipe(made) if tape.is_deferred(made) else Recipe.from_values(made)
