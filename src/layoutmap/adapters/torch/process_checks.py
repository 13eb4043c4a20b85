"""Compare the calls of a model between processes: its program, unsharded weights, batches and random numbers."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from layoutmap.adapters.protocol import ScopeContext
from layoutmap.adapters.torch.boundary import list_tensors
from layoutmap.adapters.torch.fingerprints import describe_module
from layoutmap.adapters.torch.own_rows import OwnRows
from layoutmap.core.checksums import compute_checksum
from layoutmap.engines.agreement import CallSchedule, check_batch, check_program, check_values
from layoutmap.engines.torch.dtensor_ops import same_draws
from layoutmap.engines.torch.operators import Args, Kwargs


class ProcessChecks:
    """Comparisons between processes for calls of one module. All processes of the mesh make them together.

    Args:
        context: The scope of the model.
    """

    def __init__(self, context: ScopeContext) -> None:
        self._context = context
        self._schedule = CallSchedule()
        self._modes: set[object] = set()  # modes in which the program was compared

    def compare_program(self, module: torch.nn.Module, forwards: Iterable[object]) -> None:
        """Refuse a module that is another one in another process, in the first call of each mode.

        Args:
            module: The module.
            forwards: What the program has set as `forward` of the modules in it.

        Raises:
            ScopeError: The programs differ.
        """
        mode = module.training, torch.is_grad_enabled()  # a forward may branch on either mode
        if mode not in self._modes:
            parts = describe_module(module, forwards)
            check_program(f"{type(module).__name__}.forward", parts, self._context.gather)
            self._modes.add(mode)

    def compare_unsharded(self, module: torch.nn.Module) -> None:
        """Refuse parameters without a layout if their values differ between processes.

        Raises:
            EngineError: They differ.
        """
        others = ((n, p) for n, p in module.named_parameters() if not isinstance(p, DTensor))
        sums = ((n, compute_checksum(self._context.engine.to_numpy(p.detach()))) for n, p in others)
        check_values(sums, self._context.gather)

    @contextmanager
    def compared_call(self, args: Args, kwargs: Kwargs, own: OwnRows | None) -> Generator[None]:
        """Refuse batches and random numbers that differ between processes, in calls that are due.

        Args:
            args: The arguments of the call.
            kwargs: Those with names.
            own: The rows of this process. `None`: it passes the global batch.

        Raises:
            EngineError: They differ.
        """
        context = self._context
        is_compared = context.across and context.options.check_batches
        is_due = is_compared and self._schedule.count_call()
        if is_compared and own is not None:
            own.check(is_due=is_due)
        if not is_due:
            yield
            return
        if own is None:
            self._check_batch(args, kwargs)
        with same_draws(context.engine.native(context.policy.replicated(0), 0)[0], context.gather):
            yield

    def _check_batch(self, args: Args, kwargs: Kwargs) -> None:
        context = self._context
        given = list_tensors((args, kwargs))
        values = [context.engine.to_numpy(t) for t in given if not isinstance(t, DTensor)]
        own_rows = 'pass rows="own" to the scope if each process has its own rows, or '
        hint = own_rows if context.options.batch_dim else ""
        check_batch(values, context.gather, self._schedule.calls, hint)
