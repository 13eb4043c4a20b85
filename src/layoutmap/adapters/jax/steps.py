"""Compiled training steps that keep the layouts of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any, overload

import jax
import numpy as np

from layoutmap.adapters.jax.step_arguments import (
    ArgumentReader,
    Call,
    GivenArguments,
    StepOptions,
    fill,
    find_variant,
)
from layoutmap.adapters.jax.step_changes import ProgramKey, describe_change
from layoutmap.adapters.jax.step_programs import (
    ARRAYS,
    KnownCall,
    Programs,
    Signature,
    describe_shape,
    place_leaf,
)
from layoutmap.adapters.protocol import RuleLookup
from layoutmap.core.specs import BatchDim
from layoutmap.engines import get_engine
from layoutmap.engines.jax.ambient import leave_ambient_mesh
from layoutmap.engines.jax.padded import PaddedArray

_MAX_KNOWN = 8  # calls that a step compares with, before it checks the arguments


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

    Under plain `jax.jit` the compiler chooses the layouts of results, and weights drift: a step later some are
    replicated. Here a result has an argument's layouts if it replaces it: the first result the first argument, the
    second result the second, if it has the same structure and shapes and is an update of it, and a donated argument
    wherever it is returned. All other results, as a loss, are where XLA leaves them. Modules and optimizers of flax.nnx
    among the arguments are changed in place, each Variable in the layout that it has; neither they nor static arguments
    are counted in that order.

    A step is compiled once for each structure, shapes and layouts of its arguments, and each value of those that are
    static. Functions and texts in a pytree, and all but the arrays of a module of Equinox, count as static, too.

    Args:
        function: The step: a function of arrays, pytrees of them, and objects of nnx. `None`: returns a decorator.
        donate_argnums: The positional arguments whose memory the results may take, as for `jax.jit`.
        static_argnums: The positional arguments that are constants of the compiled step, as for `jax.jit`.
        static_argnames: The same, by name.
        batch_dim: The mesh dim over which the first axis of batches is sharded, or a tuple of several, as in
            `("replica", "fsdp")`; `None`: they are replicated. Rows that do not divide are padded before the program,
            and the function gets them without padding.
        batch_argnums: The positional arguments that are batches; `None`: every numpy array is one, and so are random
            keys of which there is one for each row. Of several processes each passes its own rows.
        layout_map: Rules for arrays that appear after the model was built, as a KV cache. An argument without a layout
            gets that of the rule for its parameter's name and its path, as in `cache.0.k`, and so does a result that
            replaces no argument. `None`: an array that a module of nnx got after `build` has the rules of its map.
        out_names: The names of results, as a tuple of them or a tree: `(None, "cache")`. `None`: keys of a dict are
            names, and other results have none.

    Returns:
        The compiled step, called as the function is. Its `lower` takes the same arguments and returns what `lower` of
        `jax.jit` does.

    Raises:
        LayoutError: An argument is no array, none has a layout, rows do not divide under explicit axes, or a donated
            argument is returned with another shape, or passed again. From the call, as all that follow.
        MeshError: Arguments are on different meshes.
        ScopeError: There is no such dim or argument, an object of nnx is inside of another argument or is returned, the
            step changes more of it than arrays, or several processes would run different steps.

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
    """Compiled training step, as `jit_step` returns it."""

    def __init__(self, function: Callable[..., object], **options: Any):
        functools.update_wrapper(self, function)
        self._options = StepOptions(function, **options)
        self._reader = ArgumentReader(self._options.static)
        self._programs = Programs(self._options)
        self._known: list[KnownCall] = []  # the latest first

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the step, and compile it first for arguments with new shapes or layouts."""
        given = self._reader.read(args, kwargs)
        for known in self._known:
            found = known.match(given)
            if found is not None:
                if known is not self._known[0]:
                    self._known = [known, *(each for each in self._known if each is not known)]
                return self._run(known, given, *found)
        call = find_variant(given)
        known = KnownCall(given, call, *self._programs.find(call, ARRAYS))
        self._known = [known, *self._known[: _MAX_KNOWN - 1]]
        return self._run(known, given, call.leaves, True)

    @property
    def num_programs(self) -> int:
        """Number of programs that the step was compiled to."""
        return len(self._programs.by_signature)

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered:
        """Return the step lowered for these arguments without running it, as `jax.jit(..).lower` does.

        Objects of nnx are lists of their arrays in what it returns, and leaves that are no arrays are `None`.

        Args:
            args: The arguments of the step; shapes may stand for arrays: `jax.ShapeDtypeStruct`.
            kwargs: Those by name.
        """
        call = find_variant(self._reader.read(args, kwargs))
        program, _ = self._programs.find(call, (*ARRAYS, jax.ShapeDtypeStruct))
        variant = call.variant

        def fill_results(leaves: Sequence[object], changed: object) -> object:
            out = fill(program.tree, dict.fromkeys(program.constants), leaves)
            return (out, changed) if variant.nodes else out

        def run_with_tree(*args: object, **kwargs: object) -> object:
            return fill_results(*program.compiled.__wrapped__(*jax.tree.leaves((args, kwargs))))

        run_with_tree.__name__ = run_with_tree.__qualname__ = self._options.name
        shapes = map(describe_shape, call.leaves, program.shardings)
        values = zip(variant.keys, variant.fill_tree(shapes, with_constants=False), strict=True)
        given = [(key, value) for key, value in values if key not in self._options.static]
        positions = [key for key, _ in given if isinstance(key, int)]
        named = {key: value for key, value in given if isinstance(key, str)}
        compiled = jax.jit(
            run_with_tree,
            out_shardings=fill_results(*program.result_shardings),
            donate_argnums=[n for n, key in enumerate(positions) if key in self._options.donate],
            donate_argnames=[key for key in named if key in self._options.donate],
        )
        with leave_ambient_mesh():
            return compiled.lower(*(value for _, value in given[: len(positions)]), **named)

    def explain(self, *args: object, **kwargs: object) -> Any:
        """Explain the work of each device in this step, without running it.

        Args:
            args: Arguments of the step, as for `lower`.
            kwargs: Those by name.

        Returns:
            The collectives with their bytes, lines of the program, and causes, the work of each device next to its
            share, and why the step was compiled again. `print` shows tables, `to_json` returns the figures.

        Example:
            >>> layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"))
            >>> kernel = lm.dtensor.relayout(np.ones((8, 16), np.float32), lm.Layout(["model", None], layout_map.mesh))
            >>> step = lm.jit_step(lambda kernel, x: (x @ kernel).sum(), batch_dim="batch")
            >>> explanation = step.explain(kernel, np.ones((4, 8), np.float32))
            >>> sorted({each.kind for each in explanation.collectives}), explanation.recompilations
            (['all_reduce'], ())
        """
        call = find_variant(self._reader.read(args, kwargs))
        program, _ = self._programs.find(call, (*ARRAYS, jax.ShapeDtypeStruct))
        names, _ = call.list_names()
        mesh, _ = self._programs.find_mesh(names, call.leaves)
        with leave_ambient_mesh():
            traced = program.compiled.trace(*map(describe_shape, call.leaves, program.shardings))
        names = list(map(self._options.format_argument, names))
        engine = get_engine("jax")
        batches = {
            name for name, leaf in zip(names, call.leaves, strict=True) if engine.get_layout(leaf) is None
        }
        keys = list(map(self._describe_program, self._programs.by_signature))
        changes = [describe_change(before, after) for before, after in pairwise(keys)]
        # `cost` is a higher package with one entry point.
        return import_module("layoutmap.cost.entry").explain_step(
            self._options.name, traced, names, list(map(np.shape, call.leaves)), batches, mesh, changes
        )

    def _describe_program(self, signature: Signature) -> ProgramKey:
        variant, avals, shardings, _ = signature
        names, _ = Call(variant, [*range(len(avals))]).list_names()
        static = [(f"argument {variant.keys[n]!r}", value) for n, _, value in variant.static]
        static += [(f"leaf {n}", value) for n, _, value in variant.constants]
        types = [(aval.shape, aval.dtype) for aval in avals]
        return ProgramKey(list(map(self._options.format_argument, names)), types, shardings, static)

    def _run(self, known: KnownCall, given: GivenArguments, leaves: list[Any], has_equal: bool) -> object:
        """Run a program and return the results of the step."""
        program, objects = known.program, given.objects
        if known.places:
            leaves = [*leaves]
            for n, is_batch in known.places.items():
                leaves[n] = place_leaf(leaves[n], program.shardings[n], is_batch)
            if objects is not None:  # the arrays of nnx objects are now on the mesh
                objects.write({at: leaves[n] for at, n in enumerate(program.of_objects) if n in known.places})
        if has_equal:
            self._options.check_leaves(Call(known.variant, leaves, objects), leaves, program.donated)
        with leave_ambient_mesh():
            results = out, changed = program.compiled(*leaves)
        for made, shapes in zip(results, program.logical_results, strict=True):
            for n, shape in shapes.items():
                made[n] = PaddedArray(made[n], shape)
        if objects is not None:
            objects.write(changed)
        return fill(program.tree, program.constants, out)
