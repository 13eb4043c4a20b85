"""Compare the calls of a model between processes: its program, unsharded weights, batches and random numbers."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch.boundary import list_tensors
from layoutmap.adapters.torch.fingerprints import iterate_module_descriptions
from layoutmap.adapters.torch.own_rows import RowsOfThisProcess
from layoutmap.core.checksums import compute_checksum
from layoutmap.engines.agreement import (
    CallComparisonSchedule,
    check_same_batch,
    check_same_program,
    check_same_values,
)
from layoutmap.engines.torch.dtensor_ops import check_equal_random_draws_in_block
from layoutmap.engines.torch.operators import Args, Kwargs


class ProcessChecks:
    """Comparisons between processes for calls of one module. All processes of the mesh make them together.

    Args:
        context: The scope of the model.
    """

    def __init__(self, context: ScopeContext) -> None:
        self._context = context
        self._schedule = CallComparisonSchedule()
        self._modes: set[object] = set()  # pairs (training, grad enabled) for which the program was compared

    def check_program_of_module(self, module: torch.nn.Module, forwards: Iterable[object]) -> None:
        """Raise if the module or its code differs between processes. Check only the first call of each mode.

        Args:
            module: The module.
            forwards: Functions that the program has set as `forward` of modules in it.
        """
        # A `forward` may branch on both flags, so compare the processes for each pair of them.
        mode = (module.training, torch.is_grad_enabled())
        if mode not in self._modes:
            parts = iterate_module_descriptions(module, forwards)
            check_same_program(f"{type(module).__name__}.forward", parts, self._context.gather_from_processes)
            self._modes.add(mode)

    def check_equal_unsharded_parameters(self, module: torch.nn.Module) -> None:
        """Raise if values of parameters without a layout differ between processes."""
        others = ((n, p) for n, p in module.named_parameters() if not isinstance(p, DTensor))
        sums = ((n, compute_checksum(self._context.engine.to_numpy(p.detach()))) for n, p in others)
        check_same_values(sums, self._context.gather_from_processes)

    @contextmanager
    def compare_call_between_processes(
        self, args: Args, kwargs: Kwargs, own_rows: RowsOfThisProcess | None
    ) -> Generator[None]:
        """Raise if batches or random numbers differ between processes for the call that runs in the block.

        Args:
            args: The positional arguments of the call.
            kwargs: The keyword arguments.
            own_rows: The rows of this process. `None`: it passes the global batch.

        Raises:
            EngineError: They differ.
        """
        context = self._context
        is_compared = context.spans_processes and context.options.check_batches
        is_due = is_compared and self._schedule.count_call_and_check_due()
        if is_compared and own_rows is not None:
            own_rows.check_rows_of_processes(compare_values=is_due)
        if not is_due:
            yield
            return
        if own_rows is None:
            self._check_equal_batch(args, kwargs)
        mesh = context.engine.make_native_layout(context.policy.make_replicated_layout(0), 0)[0]
        with check_equal_random_draws_in_block(mesh, context.gather_from_processes):
            yield

    def _check_equal_batch(self, args: Args, kwargs: Kwargs) -> None:
        context = self._context
        tensors = list_tensors((args, kwargs))
        values = [context.engine.to_numpy(t) for t in tensors if not isinstance(t, DTensor)]
        advice = 'pass rows="own" to the scope if each process has its own rows, or '
        hint = advice if context.options.batch_dim else ""
        check_same_batch(values, context.gather_from_processes, self._schedule.calls, hint)
