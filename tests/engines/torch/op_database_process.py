"""Runs torch's own database of operators on random layouts, beside plain tensors; run by test_op_database.py.

Arguments: the folder for the outcome, the names of the entries, how many samples of each, and how many layouts of a
sample. The mesh is 5 x 2, as the database's axes are of 5 and 10.
"""

import json
import random
import sys
import types
import unittest
import warnings
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layoutmap.core.errors import LayoutMapError, LayoutMapWarning
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.torch.dtensor_ops import gathered
from layoutmap.engines.torch.engine import engine
from layoutmap.engines.torch.modes import skip_function_modes
from layoutmap.engines.torch.placing import gather_if_sharded
from layoutmap.engines.torch.trees import tree_leaves, tree_map
from layoutmap.scope.devices import simulate_devices

MESH = Mesh(None, "rows=5,columns=2")
DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
UNINITIALIZED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
PENDING = (2.0, -1.0, 0.0, 0.0, 0.0)  # summands of a tensor, in parts of it: their sum is exact


def entries():
    """The entries of the database, by name."""
    # The database imports a package of which it needs the name of a class only.
    sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).TestCase = unittest.TestCase
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op
        for op in (*op_db, grouped_product())
    }


def grouped_product():
    """An entry for products of groups of rows, as experts compute them, which the database lacks."""
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

    rows, inner, columns, groups = 40, 80, 40, 10

    def draw(op, device, dtype, requires_grad, **_):
        ends = [4, 4, 12, 16, 20, 24, 28, 32, 36, 40]  # one group is empty
        for left, right in (
            ((rows, inner), (groups, inner, columns)),  # groups of rows
            ((groups, rows, inner), (inner, columns * groups)),  # groups of columns
            ((inner, rows), (rows, columns)),  # groups of summands
            ((groups, rows, inner), (groups, inner, columns)),
        ):
            operands = [
                torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in (left, right)
            ]
            last = torch.tensor(
                [10 * each for each in ends] if right[-1] > columns else ends, dtype=torch.int32
            )
            are_all_groups = len(left) == len(right) == 3
            yield SampleInput(
                operands[0], args=(operands[1],), kwargs={} if are_all_groups else {"offs": last}
            )

    return OpInfo(
        "nn.functional.grouped_mm",
        op=torch.nn.functional.grouped_mm,
        dtypes=(torch.float32,),
        sample_inputs_func=draw,
        supports_out=False,
    )


def few_samples(op, number):
    """Some samples, spread over the first sixty."""
    dtypes = op.supported_dtypes("cpu")
    dtype = next(each for each in (*DTYPES, *sorted(dtypes, key=str)) if each in dtypes)
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    samples = list(islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), 60))
    step = max(1, len(samples) // number)
    return samples[::step][:number]


def random_layout(tensor, rng):
    """The sharding specs of a tensor, the mesh dim over which it waits for a sum, and whether it is transposed.

    Half of the tensors may have uneven shards, empty ones among them, along axes that one mesh dim shards.
    """
    specs, pending, uneven = [None] * tensor.ndim, None, rng.random() < 0.5
    transposed = tensor.ndim > 1 and rng.random() < 0.3
    shape = (*tensor.shape[:-2], *reversed(tensor.shape[-2:])) if transposed else tensor.shape
    can_wait = tensor.is_floating_point() and bool(tensor.isfinite().all())
    for dim in MESH.dim_names:
        size = MESH.dim_size(dim)
        axes = [i for i, n in enumerate(shape) if n and n % (size * _parts(specs[i])) == 0]
        if uneven:
            axes = [i for i, n in enumerate(shape) if n and (specs[i] is None or i in axes)]
        kind = rng.random()
        if kind < 0.2 and can_wait and pending is None:
            pending = dim
        elif kind < 0.9 and axes:
            axis = rng.choice(axes)
            both = (specs[axis], dim)
            specs[axis] = dim if both[0] is None else both if rng.random() < 0.7 else both[::-1]
    return tuple(specs), pending, transposed


def _parts(spec):
    return 1 if spec is None else MESH.dim_size(spec)


def laid_out(tensor, layout, on_mesh):
    """A tensor in a layout, and the leaf that gets its gradient."""
    specs, pending, transposed = layout
    values = tensor.detach().clone()
    if transposed:
        values = values.transpose(-1, -2).contiguous()
    if on_mesh and pending is not None:
        parts = PENDING[: MESH.dim_size(pending)]
        values = torch.stack([values * part for part in parts])
        specs = (pending, *specs)
    leaf = engine().relayout(values, Layout(specs, MESH), pad=True) if on_mesh else values
    leaf.requires_grad_(tensor.requires_grad)
    value = leaf.sum(0) if on_mesh and pending is not None else leaf
    if transposed:
        value = value.transpose(-1, -2)
    return value, leaf


def whole(value):
    return gather_if_sharded(value.detach())


class AxesFromTheEnd(TorchDispatchMode):
    """Operators are called with axes that count from the end, -1 for the last, where a program may have said either."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        first = next(iter(args), None)
        tensor = next(iter(first), None) if isinstance(first, (list, tuple)) else first
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.ndim
            and func.namespace == "aten"
            and "backward" not in name
            and not name.startswith("_")  # torch itself calls these, with axes from the start
        ):
            rank = tensor.ndim + (name in ("stack", "unsqueeze", "unsqueeze_", "unsqueeze_copy"))
            names = [each.name for each in func._schema.arguments]
            args = tuple(_from_the_end(*each, rank) for each in zip(names, args, strict=False))
            kwargs = {name: _from_the_end(name, value, rank) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _from_the_end(name, value, rank):
    if name not in ("dim", "dims", "dim0", "dim1", "dimension", "axis"):
        return value
    if isinstance(value, (list, tuple)):
        return [each - rank if each >= 0 else each for each in value]
    return value - rank if type(value) is int and value >= 0 else value


def outcome(op, sample, layouts, on_mesh, in_place, from_the_end=False):
    """What an operator gives: values, inputs afterwards, gradients, and the state of the generator."""
    made = {}

    @skip_function_modes
    def arguments():
        numbers = iter(layouts)

        def given(tensor):
            if id(tensor) not in made:
                made[id(tensor)] = laid_out(tensor, next(numbers), on_mesh)
            return made[id(tensor)][0]

        return tree_map(
            lambda each: given(each) if isinstance(each, torch.Tensor) else each,
            (sample.input, tuple(sample.args), dict(sample.kwargs)),
        )

    given, args, kwargs = arguments()
    torch.manual_seed(1)
    with (
        engine().run_on(MESH) if on_mesh else nullcontext(),
        AxesFromTheEnd() if from_the_end else nullcontext(),
    ):
        if in_place:
            given = tree_map(lambda each: each * 1 if isinstance(each, torch.Tensor) else each, given)
        result = (op.inplace_variant if in_place else op.op)(given, *args, **kwargs)
        result = sample.output_process_fn_grad(result)
        results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if op.name in UNINITIALIZED:
            results = [torch.zeros_like(each) for each in results]
        state = torch.get_rng_state()
        losses = [
            (each * _weights(each, on_mesh)).sum()
            for each in results
            if each.requires_grad and (each.is_floating_point() or each.is_complex())
        ]
        if losses:
            total = sum(each.abs() if each.is_complex() else each for each in losses)
            total.backward()
    leaves = [leaf for _, leaf in made.values()]
    return (
        [whole(each) for each in results],
        [whole(value) for value, _ in made.values()],
        [None if leaf.grad is None else whole(leaf.grad) for leaf in leaves],
        state,
    )


def _weights(tensor, on_mesh):
    weights = torch.linspace(-1, 2, tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
    weights = weights.to(tensor.dtype)
    return engine().relayout(weights, Layout.replicated(MESH, weights.ndim)) if on_mesh else weights


def difference(expected, actual, layouts):
    """What differs between two outcomes; empty if nothing does."""
    if len(expected[0]) != len(actual[0]):
        return f"{len(actual[0])} results, not {len(expected[0])}"
    for kind, plain, ours in (
        ("value", *[e[0] for e in (expected, actual)]),
        ("input", expected[1], actual[1]),
    ):
        for one, other in zip(plain, ours, strict=True):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                return f"{kind}: {tuple(other.shape)} {other.dtype}, not {tuple(one.shape)} {one.dtype}"
            if not _close(one, other):
                return f"{kind} differs"
    for one, other, (_, pending, _) in zip(expected[2], actual[2], layouts, strict=False):
        if one is None and other is None:
            continue
        others = [other] if pending is None else (list(other) if other is not None else [None])
        for each in others:
            each = torch.zeros_like(one) if each is None else each
            one_ = torch.zeros_like(each) if one is None else one
            if one_.shape != each.shape or not _close(one_, each):
                return "gradient differs"
    return "" if torch.equal(expected[3], actual[3]) else "generator differs"


def _close(one, other):
    if one.numel() == 0 or one.dtype == torch.bool:
        return bool(torch.equal(one, other))
    if not (one.is_floating_point() or one.is_complex()):
        return bool(torch.equal(one, other))
    loose = one.dtype not in (torch.float64, torch.complex128)
    return torch.allclose(
        one, other, rtol=1e-4 if loose else 1e-8, atol=1e-5 if loose else 1e-9, equal_nan=True
    )


def verdicts(name, op, num_samples, num_layouts):
    """What became of each try of an entry: `sharded`, `gathered`, `refused: ...`, `error: ...` or `wrong: ...`."""
    for number, sample in enumerate(few_samples(op, num_samples)):
        tensors = {
            id(e): e
            for e in tree_leaves((sample.input, sample.args, sample.kwargs))
            if isinstance(e, torch.Tensor)
        }
        for variant in (
            (False, True) if op.inplace_variant is not None and not sample.broadcasts_input else (False,)
        ):
            for trial in range(num_layouts):
                rng = random.Random(f"{name} {number} {trial}")
                layouts = [random_layout(each, rng) for each in tensors.values()]
                where = f"sample {number}, {'in place, ' if variant else ''}{layouts}"
                try:
                    expected = outcome(op, sample, layouts, False, variant)
                    again = outcome(op, sample, layouts, False, variant)
                except Exception:
                    continue
                is_plain = [(specs, None, transposed) for specs, _, transposed in layouts]
                if difference(expected, again, is_plain):  # it reads memory that has no values
                    continue
                from_the_end = trial % 2 == 1
                yield (
                    verdict(op, sample, layouts, variant, from_the_end, expected),
                    f"{where}{', axes from the end' if from_the_end else ''}",
                )


def verdict(op, sample, layouts, in_place, from_the_end, expected):
    gathered._warned_functions.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            actual = outcome(op, sample, layouts, True, in_place, from_the_end)
        except LayoutMapError as error:
            return f"refused: {str(error).splitlines()[0]}"
        except Exception as error:
            return f"error: {type(error).__name__}: {str(error).strip()[:300]}"
    differs = difference(expected, actual, layouts)
    if differs:
        return f"wrong: {differs}"
    return "gathered" if any(issubclass(each.category, LayoutMapWarning) for each in caught) else "sharded"


def main():
    folder, names, num_samples, num_layouts = (
        Path(sys.argv[1]),
        sys.argv[2].split(","),
        *map(int, sys.argv[3:]),
    )
    torch.set_num_threads(1)
    simulate_devices(MESH.size)
    engine().bind_mesh(MESH)
    engine().relayout(torch.zeros(()), Layout.replicated(MESH, 0))  # begins the simulation
    database = entries()
    if len(names) == 1 and ":" in names[0]:
        first, step = map(int, names[0].split(":"))
        names = list(database)[first::step]
    with (folder / "outcome.jsonl").open("w") as lines:
        for name in names:
            try:
                found = list(verdicts(name, database[name], num_samples, num_layouts))
            except Exception as error:  # of the database itself
                found = [(f"no samples: {type(error).__name__}: {error}", "")]
            lines.write(json.dumps([name, found]) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
