"""Compiled training steps that keep the layouts of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any, overload

import jax
import numpy as np

from layoutmap.adapters.jax.private import has_only_distinct_live_arrays
from layoutmap.adapters.jax.step_arguments import (
    ArgumentReader,
    FlatArguments,
    StepCall,
    StepOptions,
    make_step_call,
)
from layoutmap.adapters.jax.step_changes import CompiledArguments, format_first_difference
from layoutmap.adapters.jax.step_programs import (
    ARRAYS,
    EarlierCall,
    Signature,
    StepPrograms,
    UnrecognizedCallError,
    allow_tracing_temporarily,
    make_padded_shape_struct,
    place_leaf_on_mesh,
)
from layoutmap.adapters.protocol import RuleLookup
from layoutmap.core.specs import BatchDim
from layoutmap.engines import get_engine
from layoutmap.engines.jax.padded import PaddedArray

_MAX_KNOWN_CALLS = 8  # a new call is compared with this number of earlier calls, because more take too long


@overload
def jit_step(
    function: Callable[..., object],
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    batch_dim: BatchDim | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    layout_map: RuleLookup | None = None,
    out_names: object = None,
) -> JitStep: ...


@overload
def jit_step(
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    batch_dim: BatchDim | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    layout_map: RuleLookup | None = None,
    out_names: object = None,
) -> Callable[[Callable[..., object]], JitStep]: ...


def jit_step(
    function: Callable[..., object] | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    batch_dim: BatchDim | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    layout_map: RuleLookup | None = None,
    out_names: object = None,
) -> JitStep | Callable[[Callable[..., object]], JitStep]:
    """Compile a training step that keeps the layouts of its arguments in its results.

    Under `jax.jit`, the compiler chooses the layouts of results, so weights can become replicated after a step. Here, a
    result that replaces an argument gets its layouts: the first result those of the first argument, the second result
    those of the second, if structure and shapes are equal and it is an update of the argument. A donated argument keeps
    its layouts wherever it is returned. XLA places other results, such as a loss. Modules and optimizers of flax.nnx
    among the arguments are updated in place, and each Variable keeps its layout. They and static arguments do not count
    in that order.

    A step is compiled once for each structure, shapes, and layouts of its arguments, and for each value of its static
    arguments. Functions and texts in a pytree, and the fields of an Equinox module that are not arrays, are static,
    too.

    Args:
        function: Step function of arrays, pytrees of arrays, and nnx objects. `None`: return a decorator.
        donate_argnums: Positional arguments whose memory the results may reuse, as for `jax.jit`.
        static_argnums: Positional arguments that are constants of the compiled step, as for `jax.jit`.
        static_argnames: Static arguments by name.
        batch_dim: Mesh dim over which the first axis of batches is sharded, or a tuple of several, as in `("replica",
            "fsdp")`. `None`: batches are replicated. Rows that do not divide are padded before the program, and the
            function gets them without padding.
        batch_argnums: Positional arguments that are batches. `None`: all numpy arrays, and arrays with one random key
            per row. Each of several processes passes its own rows.
        layout_map: Rules for arrays that appear after the model was built, such as a KV cache. An argument without a
            layout gets that of the rule for its parameter's name and its path, as in `cache.0.k`, and so does a result
            that replaces no argument. `None`: arrays that an nnx module got after `build` use the rules of its map.
        out_names: Names of results, as a tuple or a tree: `(None, "cache")`. `None`: the keys of a dict are names, and
            other results have none.

    Returns:
        The compiled step, which is called like the function. Its `lower` takes the same arguments and returns the same
        object as `lower` of `jax.jit`.

    Raises:
        LayoutError: An argument is not an array, none has a layout, rows do not divide under explicit axes, or a
            donated argument is returned with another shape or passed again. The call raises this and the following.
        MeshError: Arguments are on different meshes.
        ScopeError: A dim or argument does not exist, an nnx object is inside another argument or is returned, the step
            changes more than arrays of an nnx object, or several processes would run different steps.

    Example:
        >>> import jax, optax
        >>> layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"))
        >>> kernel = lm.dtensor.relayout(np.ones((8, 16), np.float32), lm.Layout([None, "model"], layout_map.mesh))
        >>> tx = optax.adam(1e-3)
        >>> @lm.jit_step(donate_argnums=(0, 1), batch_dim="batch")
        ... def step(params, state, x):
        ...     loss, gradients = jax.value_and_grad(lambda p: ((x @ p["kernel"]) ** 2).mean())(params)
        ...     updates, state = tx.update(gradients, state, params)
        ...     return optax.apply_updates(params, updates), state, loss
        >>> params = {"kernel": kernel}
        >>> state = layout_map.build_optimizer(tx, params)
        >>> params, state, loss = step(params, state, np.ones((4, 8), np.float32))
        >>> print(lm.dtensor.fetch_layout(params["kernel"]), lm.dtensor.fetch_layout(state[0].mu["kernel"]))
        (unsharded, model) (unsharded, model)
    """
    compile_step = functools.partial(
        JitStep,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        batch_dim=batch_dim,
        batch_argnums=batch_argnums,
        layout_map=layout_map,
        out_names=out_names,
    )
    return compile_step if function is None else compile_step(function)


class JitStep:
    """Run a compiled training step. `jit_step` creates it."""

    def __init__(self, function: Callable[..., object], **options: Any):
        functools.update_wrapper(self, function)
        self._options = StepOptions(function, **options)
        self._reader = ArgumentReader(self._options.static)
        self._programs = StepPrograms(self._options)
        self._known_calls: list[EarlierCall] = []  # earlier calls, the latest first
        # The latest known call, if `jax.jit` notices different arguments itself. Then the next call is not compared.
        self._direct_call: EarlierCall | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the step, and compile it first for arguments with new shapes or layouts."""
        direct, read = self._direct_call, None
        if direct is not None:
            values = args
            # A call without keywords, static arguments, and nnx objects passes its arguments unchanged to the program.
            if kwargs or direct.types != [*map(type, args)]:
                read = self._reader.read_arguments(args, kwargs)
                values = read.values if read.head == direct.head else None
            if values is not None and has_only_distinct_live_arrays(values, direct.kind):
                try:
                    out, changed = direct.program.compiled(*values)
                except (UnrecognizedCallError, ValueError):  # nothing has run yet, so handle the call below
                    pass
                else:
                    if read is not None and read.objects is not None:
                        read.objects.write_arrays(changed)
                    return direct.program.rebuild_results(out, direct.program.constants)
        arguments = (read or self._reader.read_arguments(args, kwargs)).flatten_arguments()
        for known in self._known_calls:
            matched = known.match_arguments(arguments)
            if matched is not None:
                # JAX takes longer than this loop to notice a different call, so let JAX compare only repeated calls.
                self._direct_call = known if known.is_jit_checked and known is self._known_calls[0] else None
                if known is not self._known_calls[0]:
                    self._known_calls = [known, *(each for each in self._known_calls if each is not known)]
                return self._run_program(known, arguments, *matched)
        call = make_step_call(arguments)
        known = EarlierCall(arguments, call, *self._programs.get_or_compile_program(call, ARRAYS))
        self._direct_call = known if known.is_jit_checked and not self._known_calls else None
        self._known_calls = [known, *self._known_calls[: _MAX_KNOWN_CALLS - 1]]
        return self._run_program(known, arguments, call.leaves, True)

    @property
    def num_programs(self) -> int:
        """The number of programs compiled for this step."""
        return len(self._programs.by_signature)

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered:
        """Lower the step for these arguments without running it, like `jax.jit(..).lower`.

        In the result, nnx objects are lists of their arrays, and leaves that are not arrays are `None`.

        Args:
            args: Arguments of the step. `jax.ShapeDtypeStruct` may stand for arrays.
            kwargs: Arguments by name.
        """
        call = make_step_call(self._reader.read_flat_arguments(args, kwargs))
        program, _ = self._programs.get_or_compile_program(call, (*ARRAYS, jax.ShapeDtypeStruct))
        variant = call.variant

        def rebuild_results_and_changes(out: object, changed: object) -> object:
            out = program.rebuild_results(out, dict.fromkeys(program.constants))
            return (out, changed) if variant.nodes else out

        def call_program_with_arguments(*args: object, **kwargs: object) -> object:
            leaves = program.make_program_arguments(jax.tree.leaves((args, kwargs)))
            return rebuild_results_and_changes(*program.compiled.__wrapped__(*leaves))

        call_program_with_arguments.__name__ = call_program_with_arguments.__qualname__ = self._options.name
        shapes = map(make_padded_shape_struct, call.leaves, program.shardings)
        values = zip(variant.keys, variant.rebuild_arguments(shapes, with_constants=False), strict=True)
        dynamic = [(key, value) for key, value in values if key not in self._options.static]
        positions = [key for key, _ in dynamic if isinstance(key, int)]
        named = {key: value for key, value in dynamic if isinstance(key, str)}
        compiled = jax.jit(
            call_program_with_arguments,
            out_shardings=rebuild_results_and_changes(*program.result_shardings),
            donate_argnums=[n for n, key in enumerate(positions) if key in self._options.donate],
            donate_argnames=[key for key in named if key in self._options.donate],
        )
        with allow_tracing_temporarily():
            return compiled.lower(*(value for _, value in dynamic[: len(positions)]), **named)

    def explain(self, *args: object, **kwargs: object) -> Any:
        """Explain the work of each device in this step, without running it.

        Args:
            args: Arguments of the step, as for `lower`.
            kwargs: Arguments by name.

        Returns:
            The collectives with their bytes, source lines, and causes, the work of each device next to its equal share,
            and the reasons for recompilations. `print` shows tables, and `to_json` returns the figures.

        Example:
            >>> layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"))
            >>> kernel = lm.dtensor.relayout(np.ones((8, 16), np.float32), lm.Layout(["model", None], layout_map.mesh))
            >>> step = lm.jit_step(lambda kernel, x: (x @ kernel).sum(), batch_dim="batch")
            >>> explanation = step.explain(kernel, np.ones((4, 8), np.float32))
            >>> sorted({each.kind for each in explanation.collectives}), explanation.recompilations
            (['all_reduce'], ())
        """
        call = make_step_call(self._reader.read_flat_arguments(args, kwargs))
        program, _ = self._programs.get_or_compile_program(call, (*ARRAYS, jax.ShapeDtypeStruct))
        names, _ = call.list_leaf_names_and_owners()
        mesh, _ = self._programs.find_call_mesh_and_native_mesh(names, call.leaves)
        with allow_tracing_temporarily():
            shapes = [*map(make_padded_shape_struct, call.leaves, program.shardings)]
            traced = program.compiled.trace(*program.make_program_arguments(shapes))
        names = list(map(self._options.format_argument_name, names))
        leaves = tuple(program.make_program_arguments(range(len(names))))
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(leaves)[0]]
        engine = get_engine("jax")
        batches = {
            name for name, leaf in zip(names, call.leaves, strict=True) if engine.get_layout(leaf) is None
        }
        keys = list(map(self._describe_compiled_arguments, self._programs.by_signature))
        changes = [format_first_difference(before, after) for before, after in pairwise(keys)]
        # Import by name, because this package must not depend on the higher package `cost`.
        return import_module("layoutmap.cost.entry").explain_step(
            self._options.name, traced, names, paths, list(map(np.shape, call.leaves)), batches, mesh, changes
        )

    def _describe_compiled_arguments(self, signature: Signature) -> CompiledArguments:
        """Return the properties of the arguments for which a program was compiled, with names for messages."""
        variant, avals, shardings, _ = signature
        names, _ = StepCall(variant, [*range(len(avals))]).list_leaf_names_and_owners()
        static = [(f"argument {variant.keys[n]!r}", value) for n, _, value in variant.static]
        static += [(f"leaf {n}", value) for n, _, value in variant.constants]
        types = [(aval.shape, aval.dtype) for aval in avals]
        return CompiledArguments(
            list(map(self._options.format_argument_name, names)), types, shardings, static
        )

    def _run_program(
        self, known: EarlierCall, arguments: FlatArguments, leaves: list[Any], may_have_duplicates: bool
    ) -> object:
        """Run the program of a call, update the nnx objects, and return the results of the step."""
        program, objects = known.program, arguments.objects
        if known.to_place:
            leaves = [*leaves]
            for n, is_batch in known.to_place.items():
                leaves[n] = place_leaf_on_mesh(leaves[n], program.shardings[n], is_batch)
            if objects is not None:  # write the placed arrays back, so that the next call need not place them
                placed = {at: leaves[n] for at, n in enumerate(program.object_leaves) if n in known.to_place}
                objects.write_arrays(placed)
        if may_have_duplicates:
            call = StepCall(known.variant, leaves, objects)
            self._options.check_donations(call, leaves, program.donated)
        with allow_tracing_temporarily():
            results = out, changed = program.compiled(*program.make_program_arguments(leaves))
        for made, shapes in zip(results, program.logical_results, strict=True):
            for n, shape in shapes.items():
                made[n] = PaddedArray(made[n], shape)
        if objects is not None:
            objects.write_arrays(changed)
        return program.rebuild_results(out, program.constants)
