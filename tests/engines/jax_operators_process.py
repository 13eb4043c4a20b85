"""Runs JAX's own cases of its operators on random layouts, beside one device; run by test_jax_operators.py.

Arguments: the folder for the outcome, which cases as `first:step`, how many layouts of a case, and `corrected` or
`plain`: with what this package corrects, or XLA as it is. A case that ends the process is in the outcome as begun; the
next run in the same folder goes on after it.
"""

import json
import math
import random
import sys
import warnings
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.internal_test_util.test_harnesses import all_harnesses
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import layoutmap as lm
from layoutmap.engines.jax.devices import make_named_sharding

MESHES = ({"batch": 2, "model": 4}, {"batch": 4, "model": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 2}, {"a": 4})


def random_specs(shape, sizes, rng):
    """A spec for each axis of an array; each dim of the mesh shards an axis that it divides, or none."""
    specs = [() for _ in shape]
    for dim, size in sizes.items():
        parts = [math.prod(sizes[each] for each in spec) for spec in specs]
        axes = [i for i, n in enumerate(shape) if n and n % (size * parts[i]) == 0]
        if axes and rng.random() < 0.8:
            specs[rng.choice(axes)] += (dim,)
    return tuple(spec or None for spec in specs)


def is_inexact(array):
    return jnp.issubdtype(array.dtype, jnp.inexact)


def program(harness, arguments, places):
    """What a case computes, and its gradients for a sum of its results with weights of their own."""

    def results(arrays):
        filled = list(arguments)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return jax.tree.leaves(harness.dyn_fun(*filled))

    def run(arrays):
        inexact = [i for i, array in enumerate(arrays) if is_inexact(array)]

        def loss(given):
            filled = list(arrays)
            for i, array in zip(inexact, given, strict=True):
                filled[i] = array
            found = results(filled)
            weighed = (
                jnp.real(each) * jnp.linspace(-1, 2, each.size).reshape(each.shape)
                for each in found
                if is_inexact(each)
            )
            return sum((each.sum() for each in weighed), start=jnp.zeros(())), found

        try:
            (_, found), gradients = jax.value_and_grad(loss, has_aux=True)([arrays[i] for i in inexact])
        except Exception:  # an operator without a gradient, or one of complex numbers
            return results(arrays), []
        return found, gradients

    return run


def exact(run, arrays):
    """The same in 64 bits, as far as the case can be computed in them."""
    with jax.enable_x64(True):
        wide = {"f": np.float64, "c": np.complex128}
        kinds = [each.dtype.kind if each.dtype.kind in "fc" else "f" for each in arrays]
        given = [
            np.asarray(each).astype(wide[kind]) if is_inexact(each) else each
            for each, kind in zip(arrays, kinds, strict=True)
        ]
        try:
            return jax.tree.map(np.asarray, jax.jit(run)(given))
        except Exception:
            return None


def distance(one, other):
    """The largest difference beside the largest number; infinite where they differ in what is finite."""
    one, other = (np.asarray(each).astype(np.complex128) for each in (one, other))
    if one.shape != other.shape or not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return math.inf
    finite = np.isfinite(one)
    size = np.abs(one[finite]).max(initial=0)
    return float(np.abs(one[finite] - other[finite]).max(initial=0) / max(size, 1e-6))


def differences(one, other, reference):
    """What differs between one device and a mesh by more than by rounding; empty if nothing does."""
    for number, (kind, first, second) in enumerate(zip(("value", "gradient"), one, other, strict=True)):
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            if not is_inexact(a):
                if not np.array_equal(a, b):
                    yield f"{kind} differs"
                continue
            tolerance = 3e-2 if a.dtype.itemsize <= 2 else 1e-4
            if (found := distance(a, b)) > tolerance:
                truth = reference() and reference()[number][i]
                if truth is None or distance(truth, b) > 10 * distance(truth, a) + tolerance:
                    yield f"{kind} differs by {found:.2g}{_times(a, b)}"


def _times(a, b):
    a, b = (np.asarray(each, np.complex128).ravel() for each in (a, b))
    if not np.any(a) or not np.isfinite(a).all() or not np.isfinite(b).all():
        return ""
    factor = np.vdot(a, b) / np.vdot(a, a)
    same = np.abs(b - factor * a).max() <= 1e-2 * np.abs(b).max()
    return f", {factor.real:.3g} times" if same else ""


def verdicts(harness, number, corrected, tell):
    """What became of each try of a case: `right`, `wrong: ...` or `error: ...`, and the layouts."""
    arguments = harness.dyn_args_maker(np.random.RandomState(zlib.crc32(harness.fullname.encode())))
    places = [i for i, each in enumerate(arguments) if hasattr(each, "shape") and np.ndim(each)]
    arrays = [jnp.asarray(arguments[i]) for i in places]
    run = program(harness, arguments, places)
    expected = jax.tree.map(np.asarray, jax.jit(run)(arrays))
    known = []

    def reference():
        known.extend([] if known else [exact(run, arrays)])
        return known[0]

    tried = set()
    for trial in range(number):
        rng = random.Random(f"{harness.fullname} {trial}")
        sizes = rng.choice(MESHES)
        specs = tuple(random_specs(each.shape, sizes, rng) for each in arrays)
        if (str(sizes), specs) in tried or not any(spec for each in specs for spec in each):
            continue
        tried.add((str(sizes), specs))
        where = f"{','.join(f'{k}={v}' for k, v in sizes.items())} {[list(each) for each in specs]}"
        tell("trying", where)
        shardings = [sharding(sizes, each, corrected) for each in specs]
        try:
            found = jax.tree.map(np.asarray, jax.jit(run, in_shardings=(shardings,))(arrays))
        except Exception as error:
            yield f"error: {type(error).__name__}: {str(error)[:200]}", where
            continue
        differs = "; ".join(dict.fromkeys(differences(expected, found, reference)))
        yield f"wrong: {differs}" if differs else "right", where


def sharding(sizes, specs, corrected):
    if corrected:
        return make_named_sharding(lm.Layout(specs, lm.create_mesh(list(sizes.items()))))
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return NamedSharding(Mesh(devices.reshape(*sizes.values()), tuple(sizes)), PartitionSpec(*specs))


def name_of(harness):
    return f"{harness.group_name} {harness.fullname}"


def main():
    folder, which, number, how = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    warnings.simplefilter("ignore")
    first, step = map(int, which.split(":"))
    begun = {json.loads(line)[0] for line in (folder / "outcome.jsonl").read_text().splitlines()}
    with (folder / "outcome.jsonl").open("a", buffering=1) as lines:
        for harness in sorted(all_harnesses, key=name_of)[first::step]:  # JAX's order is that of addresses
            name = name_of(harness)
            unimplemented = [
                limit for limit in harness.jax_unimplemented if limit.filter("cpu", harness.dtype)
            ]
            if name in begun or unimplemented or not harness.filter("cpu"):
                continue

            def tell(what, how, name=name):
                lines.write(json.dumps([name, what, how]) + "\n")

            tell("begun", "")
            try:
                tell("done", list(verdicts(harness, number, how == "corrected", tell)))
            except Exception as error:  # of the case itself, on one device
                tell("not run", f"{type(error).__name__}: {str(error)[:200]}")


if __name__ == "__main__":
    main()
