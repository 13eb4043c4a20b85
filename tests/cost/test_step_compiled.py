"""A counted training step beside what XLA makes of it, for CPUs and for devices that are not there."""

import importlib.util

import numpy as np
import optax
import pytest
from cases import compiled_for_gpus
from step_models import (
    MEGATRON,
    MESH,
    ROWS,
    WIDTH,
    Block,
    Recomputing,
    Scanned,
    Unrolled,
    collectives,
    lowered,
)

import layoutmap as lm
from layoutmap.cost.jax import hlo
from layoutmap.testing import models


@pytest.mark.parametrize(
    "groups",
    [
        "[8,4]<=[32]",
        "{{0,1,2,3},{4,5,6,7}}",
        "mesh['a'=8,'b'=4] {'b'}",
        "mesh['a'=4,'b'=8], device_ids=([8,4]T(1,0)) {'a'}",
        "mesh['a'=8,'b'=8] {'a':(1)2, 'b':(4)2}",
    ],
)
def test_a_group_has_its_size_in_each_of_xlas_notations(groups):
    """A collective is over as many devices as one of its groups has, however XLA writes them."""
    line = f"  %sum = f32[8]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add"
    found = hlo.count_compiled_collectives(f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{line}\n}}")
    assert {hlo.CompiledCollective("all_reduce", 4, 32): 1} == found


@pytest.mark.parametrize("kind", [Unrolled, Scanned])
def test_xla_sends_what_was_counted(kind):
    """XLA's compiler for CPUs has the arguments and the collectives that were counted, to the byte."""
    rules = {path: (None, *s) if kind is Scanned else s for path, s in MEGATRON.items()}
    found = lowered(kind, rules, optax.adam(1e-3)).verify(lm.LayoutMap(MESH, rules))
    arguments = found.rows[-2]
    assert [(name, xla) for name, _, xla in found.rows[:-2]] == [(n, own) for n, own, _ in found.rows[:-2]]
    assert arguments[1] == arguments[2]


@pytest.mark.parametrize("kind", [Unrolled, Scanned, Recomputing])
def test_a_step_is_counted_as_xla_compiles_it(kind):
    """With two and three of equal blocks, for the collectives and the memory of all of them."""
    rules = {path: (None, *s) if kind is Scanned else s for path, s in MEGATRON.items()}
    step = lowered(kind, rules, optax.adam(1e-3))
    found = step.count(lm.LayoutMap(MESH, rules), target="cpu")
    made = step.compile(lm.LayoutMap(MESH, rules), target="cpu")
    assert "compiled by XLA for cpu" == found.known_by
    assert (made.argument_bytes, sum(made.sent_by_kind.values())) == (found.argument_bytes, found.sent_bytes)
    assert 0.97 < found.peak_bytes / made.peak_bytes < 1.03
    plain = step.count(lm.LayoutMap(MESH, rules))
    assert {*collectives(plain)} == {*collectives(found)}
    # XLA makes sums of products of a small matrix product, and computes no product twice.
    assert 0.5 < found.flops["float32"] / plain.flops["float32"] <= 1


@pytest.mark.parametrize("library", ["nnx", "keras", "pytree"])
@pytest.mark.parametrize(
    ("target", "seed"), [("cpu", 1), ("cpu", 2), *[compiled_for_gpus("h100", n) for n in range(1, 4)]]
)
def test_drawn_steps_are_counted_as_xla_compiles_them(target, seed, library):
    """The text of whatever XLA compiles is read to the byte, groups of a part of a dim too."""
    case = models.draw(20261124 + seed, library)
    inputs = case.batch[0] if library == "keras" else case.batch
    options = {"inputs": inputs, "batch_dim": case.map.batch_dim, "library": case.library}
    step = lm.lower_step(case.make_model, case.layout_map, **options)
    found = step.count(case.layout_map, target=target)
    made = step.compile(case.layout_map, target=target)
    # Several small arrays in one are counted one by one, each with its own rounding.
    most = sum(calls for calls in made.collectives.values()) + sum(c.calls for c in found.collectives)
    assert abs(sum(made.sent_by_kind.values()) - found.sent_bytes) <= most


@pytest.mark.parametrize(
    "target",
    [
        compiled_for_gpus("h100"),
        *(
            pytest.param(
                name,
                marks=pytest.mark.skipif(
                    importlib.util.find_spec("libtpu") is None,
                    reason='needs pip install "layoutmap[xla-tpu]", hundreds of MB',
                ),
            )
            for name in ("v5e", "v5p")
        ),
    ],
)
def test_xla_for_devices_that_are_not_there_sends_what_was_counted(target):
    """Compilers for GPUs and TPUs have the collectives that were counted, to the byte; TPUs fill tiles of 8 x 128."""
    found = lowered(Unrolled, MEGATRON, optax.adam(1e-3)).verify(lm.LayoutMap(MESH, MEGATRON), target=target)
    arguments = found.rows[-2]
    assert [(name, xla) for name, _, xla in found.rows[:-2]] == [(n, own) for n, own, _ in found.rows[:-2]]
    assert arguments[1] == arguments[2] if target == "h100" else arguments[1] <= arguments[2]


def test_a_batch_takes_the_bytes_that_jax_gives_it():
    """Numpy's whole numbers and floats are of 64 bits; on a device they are of 32."""
    step = lowered(Block, inputs=np.ones((ROWS, WIDTH)))
    layout_map = lm.LayoutMap(MESH)
    assert step.compile(layout_map).argument_bytes == step.count(layout_map).argument_bytes
