"""What is remembered of torch's searches is what torch finds: ways between layouts, sizes of strided shards."""

import itertools
import random

import pytest
import torch
from engines.torch import dtensors
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner
from torch.distributed.tensor.placement_types import _StridedShard

from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.dtensor import relayout
from layoutmap.engines.tested import is_older_than
from layoutmap.engines.torch import simulation
from layoutmap.engines.torch.dtensor_ops import dispatch
from layoutmap.engines.torch.engine import engine
from layoutmap.engines.torch.modes import skip_function_modes

PROCESSES = ("torch",)
MESH = Mesh(None, "a=2,b=2,c=2")
State = DTensorRedistributePlanner.DistState


def drawn_states(rng, number):
    """Layouts of a tensor with two axes, some of them in strided shards, or waiting to be summed up."""
    kinds = [Replicate(), Shard(0), Shard(1), Partial(), _StridedShard(0, split_factor=7)]
    for _ in range(number):
        placements, order = tuple(rng.choice(kinds) for _ in range(3)), {}
        for dim, placement in enumerate(placements):
            if isinstance(placement, Shard | _StridedShard):
                order.setdefault(placement.dim, []).append(dim)
        for dims in order.values():
            rng.shuffle(dims)
        yield State(placements, DTensorRedistributePlanner._dict_to_ShardOrder(order))


@skip_function_modes  # as below DTensor's dispatcher
def ways(search, planner, sources, targets):
    """The way that a search finds from each source to each target; `None`: there is none."""
    found = {}
    for pair in itertools.product(sources, targets):
        try:
            found[pair] = list(search(planner, *pair))
        except AssertionError as error:
            if "No path found" not in str(error):
                raise
            found[pair] = None
    return found


@pytest.mark.parametrize("seed", range(2))
def test_the_ways_are_those_of_torch(seed):
    """A search that goes on from where the last one ended finds the way that one from the beginning does."""
    rng = random.Random(seed)
    native, _ = engine().make_native_layout(Layout.replicated(MESH, 0), 0)
    sources, targets = (list(drawn_states(rng, number)) for number in (5, 40))
    # From 2.14 on torch's search has a step from shards to parts of a sum; ours makes whole tensors and costs more.
    if not is_older_than("torch", "2.14"):
        targets = [state for state in targets if not any(each.is_partial() for each in state.placements)]
    targets = targets[:20]
    with engine().run_on(MESH):
        found = []
        for search in (dispatch._ORIGINAL_SEARCH, DTensorRedistributePlanner.find_min_cost_path):
            planner = skip_function_modes(DTensorRedistributePlanner)(
                native, TensorMeta(torch.Size((42, 16)), (16, 1), torch.float32)
            )
            planner.strided_shard_placements_in_target.add(_StridedShard(0, split_factor=7))
            planner.partial_reduce_ops_in_target.add("sum")
            found.append(ways(search, planner, sources, targets))

    assert found[0] == found[1]
    assert sum(way is not None for way in found[0].values()) > 50


@pytest.mark.parametrize("seed", range(2))
def test_a_tensor_keeps_its_values_on_every_way(seed):
    """Uneven shards and empty ones, too; also where nothing else has been computed on the mesh before."""
    rng = random.Random(seed)
    kinds = [Replicate(), Shard(0), Shard(1)]
    for _ in range(12):
        given = torch.randn(rng.randint(1, 9), rng.randint(1, 9))
        source, target = (rng.choices(kinds, k=2) for _ in range(2))
        with dtensors.run_on():
            held = dtensors.place(given, None, None).redistribute(placements=source)
            moved = held.redistribute(placements=target)
            found = dtensors.whole(moved.redistribute(placements=[Replicate()] * 2))
        assert tuple(target) == moved.placements
        torch.testing.assert_close(found, given, rtol=0, atol=1e-6)


def shard_of(factor):
    return _StridedShard(0, split_factor=factor) if factor else Shard(0)


@skip_function_modes
def counted(mesh, size, factor):
    """The size and offset of a shard over the second mesh dim, of which either may differ between ranks."""
    return shard_of(factor).local_shard_size_and_offset(size, 2, mesh._sym_get_coordinate(1))


@pytest.mark.parametrize("factor", [None, 2, 7])
def test_the_sizes_of_shards_are_those_of_torch(factor):
    """Each simulated rank has as many elements as torch counts for it alone, the second time too."""
    native, _ = engine().make_native_layout(Layout.replicated(MESH, 0), 0)
    expected = {
        (size, rank): shard_of(factor).local_shard_size_and_offset(size, 2, rank)
        for size, rank in itertools.product((5, 7, 42), (0, 1))
    }
    with engine().run_on(MESH):
        for _, size in itertools.product(range(2), (5, 7, 42)):
            of_ranks = counted(native, size, factor)
            for device in range(8):
                actual = tuple(
                    each.node._local_ints[device] if isinstance(each, torch.SymInt) else each
                    for each in of_ranks
                )
                assert expected[size, device // 2 % 2] == actual


def pieces_like(kind):
    """Tensors of four ranks that differ in nothing, or in sizes, strides or where they begin in their memory."""
    whole = torch.arange(60.0)
    return {
        "nothing": [whole[:12].clone().view(3, 4).T for _ in range(4)],
        "sizes": [whole[: 4 * rows].clone().view(rows, 4) for rows in (3, 3, 2, 0)],
        "strides": [whole[: 3 * columns].clone().view(3, columns)[:, :2] for columns in (2, 3, 4, 5)],
        "offsets": [whole.clone()[begin : begin + 6].view(2, 3) for begin in (0, 0, 6, 12)],
    }[kind]


@skip_function_modes
@pytest.mark.parametrize("kind", ["nothing", "sizes", "strides", "offsets"])
def test_sizes_that_are_read_off_are_those_of_torch(kind, monkeypatch):
    """A simulated tensor has each rank's size, strides and offset; no simulation is entered where all have the same."""
    simulation.ensure_process_group()
    pieces, entered, enter = pieces_like(kind), [], LocalTensorMode.__enter__
    local = LocalTensor(dict(enumerate(pieces)))
    monkeypatch.setattr(LocalTensorMode, "__enter__", lambda mode: [entered.append(kind), enter(mode)][1])
    found = [local.size(), local.stride(), [local.storage_offset()]]

    for rank, piece in enumerate(pieces):
        of_rank = [
            [each.node._local_ints[rank] if isinstance(each, torch.SymInt) else each for each in sizes]
            for sizes in found
        ]
        assert of_rank == [[*piece.size()], [*piece.stride()], [piece.storage_offset()]]
    assert bool(entered) == (kind != "nothing")


@pytest.mark.parametrize("specs", [("batch", "model"), ("model", "batch"), (None, ("batch", "model"))])
def test_shards_become_partial_sums_from_torch_2_14_on(specs):
    """A program that asks for partial sums reads and computes their sum; an older torch refuses to make them."""
    values = torch.arange(64.0).view(8, 8)
    tensor = relayout(values, Layout(specs, Mesh(None, "batch=2,model=4")))
    for dims in ({0}, {1}, {0, 1}):
        placements = [Partial() if dim in dims else each for dim, each in enumerate(tensor.placements)]
        if is_older_than("torch", "2.14"):
            with pytest.raises(RuntimeError, match="for internal use only"):
                tensor.redistribute(placements=placements)
            continue
        made = tensor.redistribute(placements=placements)
        for found in (made.full_tensor(), (made * 2).full_tensor() / 2, (made @ torch.eye(8)).full_tensor()):
            assert torch.equal(values, found)
