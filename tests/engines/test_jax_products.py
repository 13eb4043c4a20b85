"""Products of matrices and of tensors, in layouts that nobody chose, are those of NumPy.

As a program it counts which of many drawn ones are wrong in XLA, and with this package's correction:

    python tests/engines/test_jax_products.py --count 3000
"""

import argparse
import itertools
import math
import os
import random
import subprocess
import sys
from collections import Counter

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import layoutmap as lm

PROCESSES = ("jax",)
XLA = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
MESHES = ((2, 4), (4, 2), (2, 2, 2))


def mesh_of(sizes):
    return Mesh(np.array(jax.devices()).reshape(sizes), ("x", "y", "z")[: len(sizes)])


def correct():
    """Have the package correct what XLA lowers, as it does from the first array on that it places."""
    mesh = lm.create_mesh("batch=2,model=4", device_type="cpu")
    lm.dtensor.relayout(np.zeros(()), lm.Layout.replicated(mesh, 0))


def is_right(equation, operands, mesh, specs, result_spec):
    """Whether a product in a layout is that of NumPy; of whole numbers, which no order of sums rounds."""
    product = jax.jit(
        lambda *each: jax.numpy.einsum(equation, *each),
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs),
        out_shardings=None if result_spec is None else NamedSharding(mesh, result_spec),
    )
    return np.array_equal(product(*operands), np.einsum(equation, *operands, optimize=True))


def whole_numbers(rng, *shapes):
    return [rng.integers(-3, 4, shape).astype("float32") for shape in shapes]


def test_three_summed_axes():
    """Also where the operands are sharded along different ones: XLA leaves out the mesh dim that they share."""
    correct()
    mesh = mesh_of((2, 4))
    operands = whole_numbers(np.random.default_rng(0), (4, 4, 4, 2), (4, 4, 4, 3))
    specs = [PartitionSpec(*order) for order in set(itertools.permutations(("x", "y", None)))]
    pairs = list(itertools.product(specs, specs))

    assert [] == [pair for pair in pairs if not is_right("abci,abcj->ij", operands, mesh, pair, None)]


# -- as a program


def drawn(seed):
    """A product, its operands, a mesh, the layouts of the operands and that of the result; or `None`: any."""
    rng = random.Random(seed)
    mesh = mesh_of(rng.choice(MESHES))
    axes = {
        letter: rng.choice([2, 4, 8])
        for letters, most in (
            ("ab", [0, 0, 0, 1, 2]),
            ("klmn", [1, 2, 3, 4]),
            ("ij", [0, 1, 2]),
            ("uv", [0, 1, 2]),
        )
        for letter in letters[: rng.choice(most)]
    }
    batch, summed, *free = (
        [each for each in axes if each in letters] for letters in ("ab", "klmn", "ij", "uv")
    )
    terms = [batch + summed + each for each in free]
    for term in terms:
        rng.shuffle(term)
    terms.append(batch + free[0] + free[1])
    shapes = [[axes[letter] for letter in term] for term in terms]
    specs = [spec_of(rng, shape, mesh) for shape in shapes]
    equation = "{},{}->{}".format(*map("".join, terms))
    result_spec = specs[2] if rng.random() < 0.7 else None
    return equation, whole_numbers(np.random.default_rng(seed), *shapes[:2]), mesh, specs[:2], result_spec


def spec_of(rng, shape, mesh):
    """A spec with most dims of a mesh, in any order."""
    dims, axes = list(mesh.axis_names), [()] * len(shape)
    rng.shuffle(dims)
    for dim in dims if shape else ():
        axis = rng.randrange(len(shape))
        shards = math.prod(mesh.shape[each] for each in (*axes[axis], dim))
        if rng.random() < 0.8 and shape[axis] % shards == 0:
            axes[axis] += (dim,)
    return PartitionSpec(*(dims or None for dims in axes))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", choices=("XLA", "here"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only is None:
        print("summed axes, layout of the result, outcome: number", flush=True)
        environment = os.environ | {"XLA_FLAGS": XLA, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        for only in ("XLA", "here"):
            subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--only", only], env=environment, check=True
            )
        return
    if asked.only == "here":
        correct()
    counts = Counter()
    for seed in range(asked.seed, asked.seed + asked.count):
        equation, *rest, mesh, specs, result_spec = drawn(seed)
        number = len(set(equation.split("->")[0]) & set("klmn"))
        try:
            outcome = "right" if is_right(equation, *rest, mesh, specs, result_spec) else "wrong"
        except jax.errors.JaxRuntimeError:  # XLA finds that it has made an invalid program
            outcome = "error"
        axes = "three or four" if number > 2 else "one or two"
        counts[axes, "any" if result_spec is None else "given", outcome] += 1
        if outcome != "right":
            print(
                f"  {asked.only}: {outcome}: seed {seed}: {equation} in {specs} to {result_spec}, {mesh.shape}"
            )
    for key, number in sorted(counts.items()):
        print(f"{asked.only}: {', '.join(key)}: {number}", flush=True)


if __name__ == "__main__":
    main()
