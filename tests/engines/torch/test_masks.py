"""With `draws="tiles"`, dropout drops the same elements on every mesh, and a device draws its part of them alone."""

import pytest
import torch
import torch.nn.functional as F
from engines.torch.masked import CASES, drawn_on
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

import layoutmap as lm
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.torch.dtensor_ops.masks import draw_sharded_mask
from layoutmap.engines.torch.engine import engine
from layoutmap.engines.torch.placing import gather_if_sharded

PROCESSES = ("torch",)

ONE = "batch=1"
# Layouts of the first axes; others are not sharded.
LAYOUTS = {
    "batch=2,model=2": ("batch", "model"),
    "batch=4,model=2": ("batch",),
    "model=4": (None, "model"),
    "batch=2,model=4": (("batch", "model"),),
    "model=4,batch=2": (("batch", "model"),),  # in an order that is not the mesh's
}


@pytest.mark.parametrize("name", CASES)
def test_masks_do_not_depend_on_the_mesh(name):
    """On one device and on any mesh, whichever axes are sharded, values, gradients and the generator are the same."""
    expected = drawn_on(ONE, (), name)
    for mesh, specs in LAYOUTS.items():
        found = drawn_on(mesh, specs, name)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, msg=lambda text, of=mesh: f"{of}: {text}")


PLACEMENTS = {
    "rows": [Shard(0), Replicate()],
    "both": [Shard(0), Shard(1)],
    "rows twice": [Shard(0), Shard(0)],
    "rows, the other dim first": [_StridedShard(0, split_factor=2), Shard(0)],
}


@pytest.mark.parametrize("placements", PLACEMENTS)
@pytest.mark.parametrize("shape", [(7, 5), (1, 9), (2, 3, 4), (0, 3)])
def test_masks_of_what_does_not_divide(placements, shape):
    """Devices that have fewer rows than others, or none, draw their part of the same mask."""
    found = []
    for sizes, chosen in (("a=1,b=1", [Replicate()] * 2), ("a=4,b=2", PLACEMENTS[placements])):
        native, _ = engine().make_native_layout(Layout.replicated(Mesh(None, sizes), 0), 0)
        torch.manual_seed(5)
        with engine().run_on(Mesh(None, sizes)):
            mask = draw_sharded_mask(shape, torch.float32, "cpu", 0.5, native, chosen)
            found.append(gather_if_sharded(mask))

    assert torch.equal(*found)


def mask_of(shape, p, seed=0):
    """A mask on one device."""
    native, _ = engine().make_native_layout(Layout.replicated(Mesh(None, ONE), 0), 0)
    torch.manual_seed(seed)
    return gather_if_sharded(draw_sharded_mask(shape, torch.float64, "cpu", p, native, [Replicate()]))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(200, 500), (100_000,), (3, 100, 333), (70_000, 1)])
def test_as_many_are_dropped_as_asked(p, shape):
    """The share of dropped elements is within five standard deviations of its probability, in the parts too."""
    kept = mask_of(shape, p)
    for part in (kept, kept[: shape[0] // 3], kept.flatten()[::7], kept.flatten()[1::2]):
        deviation = (p * (1 - p) / part.numel()) ** 0.5

        assert abs((1 - part.mean().item()) - p) < 5 * deviation


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_what_is_dropped_is_unrelated(p):
    """Two calls, elements of a row or a column, transposed elements and neighbouring pairs have no correlation."""
    first, second = mask_of((256, 256), p), mask_of((256, 256), p, seed=1)
    pairs = {"seeds": (first, second)}
    for apart in (1, 2, 3, 64):
        pairs[f"{apart} rows"] = (first[apart:], first[:-apart])
        pairs[f"{apart} columns"] = (first[:, apart:], first[:, :-apart])
    pairs["the diagonal"] = (first[1:, 1:], first[:-1, :-1])
    rows, columns = torch.triu_indices(256, 256, 1)
    pairs["the other axis"] = (first[rows, columns], first[columns, rows])
    pairs["pairs"] = (first[1:] * first[:-1], second[1:] * second[:-1])
    for name, (one, other) in pairs.items():
        found = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].item()

        assert abs(found) < 5 / one.numel() ** 0.5, name


def test_the_next_call_draws_another_mask():
    """What is dropped differs from call to call, as from seed to seed, and is the same after the same seed."""
    x = torch.ones(64, 64)
    mesh = Mesh(None, "batch=2,model=2")
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with lm.dtensor.run_on(mesh, draws="tiles"):
            placed_x = engine().relayout(x, Layout(["batch", None], mesh))
            found.append([engine().to_numpy(F.dropout(placed_x, 0.5)).tobytes() for _ in range(2)])

    assert found[0] == found[1]
    assert 4 == len({each for seed in found for each in seed})


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that an operation makes on one device."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (list, tuple)) else [made]:
            if type(each) is torch.Tensor:
                self.numel = max(self.numel, each.numel())
        return made


@pytest.mark.parametrize("specs", [("batch", None), (None, "model"), (("batch", "model"), None)])
@pytest.mark.parametrize(("draws", "times"), [("tiles", 1), ("exact", None)])
def test_no_device_draws_more_than_its_part(specs, draws, times):
    """Nothing on the way has more elements than a shard, for which `exact` has those of the global tensor."""
    mesh = Mesh(None, "batch=4,model=2")
    x = engine().relayout(torch.ones(512, 512), Layout(specs, mesh))
    shard = 512 * 512 // Layout(specs, mesh).num_shards(0) // Layout(specs, mesh).num_shards(1)
    with lm.dtensor.run_on(mesh, draws=draws), Largest() as largest:
        F.dropout(x, 0.5)

    assert (times or 512 * 512 // shard) * shard == largest.numel


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.3, 0.75])
def test_what_is_kept_is_scaled_as_by_torch(dtype, p):
    """What is kept has the bits that torch's dropout gives it, in the same element type."""
    x = torch.linspace(0.5, 3, 4096).to(dtype).view(64, 64)
    plain = x * F.dropout(torch.ones(100, dtype=dtype), p).max()
    mesh = Mesh(None, "batch=2,model=2")
    with lm.dtensor.run_on(mesh, draws="tiles"):
        y = F.dropout(engine().relayout(x, Layout(["batch", "model"], mesh)), p)
    y = torch.from_numpy(engine().to_numpy(y.double()))

    assert (dtype, x.shape) == (plain.dtype, y.shape)
    assert torch.equal(plain.double()[y != 0], y[y != 0])
    assert 0 < (y == 0).double().mean().item() < 1


def edge(function, x):
    """What comes of an edge, whether it is the input itself, and whether numbers were drawn."""
    before = torch.get_rng_state()
    try:
        y = function(x)
    except (RuntimeError, ValueError) as error:
        return str(error)
    is_drawn = not torch.equal(before, torch.get_rng_state())
    return (y is x, tuple(y.shape), y.dtype, float((y * 1).sum()), is_drawn)


EDGES = {
    "p=0": lambda x: torch.dropout(x, 0.0, True),
    "p=0, in place": lambda x: F.dropout(x, 0.0, inplace=True),
    "in inference": lambda x: F.dropout(x, 0.4, training=False),
    "alpha, in inference": lambda x: F.alpha_dropout(x, 0.4, training=False),
    "no rows": lambda x: F.dropout(x[:0], 0.4),
    "a p that is none": lambda x: torch.dropout(x, 1.5, True),
    "a p below 0": lambda x: torch.dropout_(x, -0.5, True),
    "channels of a vector": lambda x: torch.feature_dropout(x[0], 0.4, True),
    "attention with a p that is none": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=1.5),
}


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
@pytest.mark.parametrize("name", EDGES)
def test_edges_are_those_of_torch(name):
    """Where nothing is to be drawn nothing is, and what torch refuses is refused in its words."""
    mesh = Mesh(None, "batch=2,model=2")
    x = torch.ones(4, 6)
    expected = edge(EDGES[name], x.clone())
    with lm.dtensor.run_on(mesh, draws="tiles"):
        found = edge(EDGES[name], engine().relayout(x, Layout(["batch", None], mesh)))

    assert expected[1:] == found[1:]


@pytest.mark.parametrize("function", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout])
def test_all_can_be_dropped(function):
    """With p=1 everything is zero, as on one device."""
    mesh = Mesh(None, "batch=2,model=2")
    with lm.dtensor.run_on(mesh, draws="tiles"):
        y = function(engine().relayout(torch.ones(4, 6), Layout(["batch", None], mesh)), 1.0, True)

    assert not engine().to_numpy(y).any()


def test_the_innermost_scope_counts():
    """`draws="exact"` gives the numbers of the plain program, around and inside of what draws by parts."""
    mesh = Mesh(None, "batch=2,model=2")
    x = torch.ones(16, 16)
    torch.manual_seed(2)
    plain = F.dropout(x, 0.5)

    def dropped():
        torch.manual_seed(2)
        y = F.dropout(engine().relayout(x, Layout(["batch", None], mesh)), 0.5)
        return torch.from_numpy(engine().to_numpy(y))

    with lm.dtensor.run_on(mesh):
        with lm.dtensor.run_on(mesh, draws="tiles"):
            inside = dropped()
        around = dropped()
        with lm.dtensor.run_on(mesh, draws="exact"):
            exact = dropped()

    assert torch.equal(plain, around)
    assert torch.equal(plain, exact)
    assert not torch.equal(plain, inside)
