"""DTensor's public methods give what one device has, in each place of a training step, or are refused by name."""

import itertools
import json
from pathlib import Path

import dtensor_methods
import forked
import pytest
import torch
from cases import EVERYTHING
from dtensor_methods import METHODS, PLACES, SIMULATED, Case
from engines.several_processes import free_ports
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import layoutmap as lm
from layoutmap.core.errors import EngineError

PROCESSES = ("torch",)
# The maps match no biases, and one compiled block is not.
pytestmark = pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
WORKER = Path(__file__).with_name("dtensor_methods_process.py")
SEED = 20261128
SEEDS = range(SEED, SEED + (len(METHODS) * len(SIMULATED) if EVERYTHING else 6))
"""Of cases on simulated devices: consecutive seeds visit each pair of a method and a place."""
NUM_PAIRS, SIZE = len(METHODS) * len(PLACES), 84
PARTS = [range(n, min(n + SIZE, SEED + NUM_PAIRS)) for n in range(SEED, SEED + NUM_PAIRS, SIZE)]
"""Of cases in processes: each process tries those of one part."""


def check(cases, found):
    """Compare what was found for drawn cases with what may be."""
    wrong = {
        case: text
        for case, text in zip(cases, found, strict=True)
        if text and not (text.startswith("refused: ") and dtensor_methods.may_be_refused(case))
    }
    assert {} == wrong


def test_a_conversion_takes_the_arguments_of_torch_by_name():
    """Programs, such as torchao's optimizers, pass them by the names that torch's documentation has."""
    mesh = lm.create_mesh("batch=2,model=2", engine="torch")
    model = lm.LayoutMap(mesh, {".*weight": ("model", None)}, rest="replicated").build(
        lambda: nn.Linear(8, 8), library="torch"
    )
    weight = model.weight.detach()
    native, rows = weight.device_mesh, weight.placements
    local = weight.to_local(grad_placements=None)
    again = DTensor.from_local(
        local_tensor=local, device_mesh=native, placements=rows, run_check=False, shape=None, stride=None
    )
    moved = again.redistribute(device_mesh=native, placements=[Replicate()] * 2, async_op=False)
    placed = distribute_tensor(
        tensor=moved.full_tensor(grad_placements=None),
        device_mesh=native,
        placements=rows,
        src_data_rank=None,
    )

    assert rows == placed.placements
    assert torch.equal(weight.full_tensor(), placed.full_tensor())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.every_case
def test_drawn_cases_on_simulated_devices(seed):
    """Outputs and weights after two steps of SGD are those of one device."""
    case = dtensor_methods.draw(seed, dtensor_methods.MESHES[4], SIMULATED)
    check([case], [dtensor_methods.difference(case)])


@pytest.mark.parametrize("seeds", PARTS if EVERYTHING else [range(SEED, SEED + 2)])
@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.every_case
def test_drawn_cases_in_processes(num_processes, seeds, tmp_path):
    """The same in each of several processes, where blocks are compiled, too; and each holds what torch gives it."""
    arguments = [str(tmp_path), str(free_ports(1)[0]), str(num_processes), str(seeds[0]), str(seeds[-1] + 1)]
    ended = forked.wait_for_all(
        [forked.start(WORKER, [str(number), *arguments]) for number in range(num_processes)]
    )
    assert [0] * num_processes == [each.returncode for each in ended], ended[0].stderr[-4000:]
    cases = [dtensor_methods.draw(seed, dtensor_methods.MESHES[num_processes]) for seed in seeds]
    for number in range(num_processes):
        told = json.loads((tmp_path / f"{number}.json").read_text())
        check(cases, [told[str(case.seed)] for case in cases])
        assert [] == told["plain"]


REPORTED = {
    "a replicated weight's to_local": Case(
        "to_local", "forward", "model=4", None, (None, None), ("model", None), 1
    ),
    "redistribute, to_local": Case(
        "redistribute, to_local", "forward", "batch=2,model=2", "batch", ("model", None), ("model", None), 1
    ),
    "full_tensor in a hook": Case(
        "full_tensor", "forward hook", "model=4", None, (None, "model"), (None, None), 1
    ),
    "shards with the full tensor": Case(
        "shards with the full tensor", "forward", "model=4", None, ("model", None), (None, None), 1
    ),
}


@pytest.mark.parametrize("case", REPORTED.values(), ids=REPORTED)
@pytest.mark.every_case
def test_reported_cases(case):
    """Gradients of all weights have the scale of one device's, and no simulated device's tensor gets out."""
    assert "" == dtensor_methods.difference(case)


class Experts(nn.Module):
    """Experts as in PyTorch's own tests: each device computes with those that it has."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 6) * 0.3)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        up = self.up.to_local() if isinstance(self.up, DTensor) else self.up
        return self.out(torch.bmm(x.unsqueeze(0).expand(up.shape[0], -1, -1), up).sum(dim=0) / 4)


def make_experts():
    torch.manual_seed(0)
    return Experts()


@pytest.mark.every_case
def test_experts_on_some_devices_are_refused():
    """The output of a device's own experts is no global tensor, and no weight changes."""
    layout_map = lm.LayoutMap(lm.create_mesh("model=4"), {"up": ("model", None, None)})
    model = layout_map.build(make_experts, library="torch")
    message = (
        r"is a local shard, but must be the global tensor(.|\n)*why(.|\n)*to_local\(\) returns the shard of each device"
        r"(.|\n)*fix(.|\n)*DTensor.from_local\(shard, mesh, placements\)"
    )

    with pytest.raises(EngineError, match=message):
        model(torch.ones(3, 6))
    expected = make_experts().state_dict()
    assert all(torch.equal(each, model.state_dict()[name].full_tensor()) for name, each in expected.items())


@pytest.mark.every_case
def test_shards_are_those_of_torch():
    """`to_local` gives each device the part that `distribute_tensor` of torch has given it."""
    case = Case("to_local", "forward", "batch=2,model=2", None, ("batch", "model"), (None, None), 3)
    weight = dtensor_methods.laid_out(case).probe.w
    torchs = distribute_tensor(weight.full_tensor().detach(), weight.device_mesh, [Shard(0), Shard(1)])

    pieces = lm.dtensor.unpack(weight)
    assert [each.tolist() for each in pieces] == [each.tolist() for each in lm.dtensor.unpack(torchs)]


@pytest.mark.every_case
def test_another_mesh_is_refused():
    """Torch would ignore the other mesh."""
    build = [
        dtensor_methods.laid_out(Case("", "", mesh, None, (None, None), (None, None), 0))
        for mesh in ("model=4", "batch=2,model=2")
    ]
    one, other = (each.probe.w for each in build)

    with pytest.raises(EngineError, match="cannot redistribute: the target is on another mesh"):
        one.redistribute(other.device_mesh, [Replicate()] * 2)


def test_tensors_on_different_meshes_are_refused():
    """DTensor would read the placements of the second as those of the first mesh."""
    first, second = (
        lm.LayoutMap(mesh, {"weight": (dims, None)}, rest="replicated").build(
            lambda: torch.nn.Linear(8, 8), library="torch"
        )
        for mesh, dims in (("a=2,b=4", "a"), ("a=4,b=2", "b"))
    )
    with torch.no_grad(), pytest.raises(EngineError, match="combines tensors on different meshes") as caught:
        torch.add(first.weight, second.weight)
    assert "layoutmap.dtensor.relayout" in caught.value.fix

    optimizer = torch.optim.AdamW(
        [first.weight, second.weight], fused=True
    )  # its operator takes lists of both
    first.weight.grad, second.weight.grad = (torch.ones_like(each.weight) for each in (first, second))
    optimizer.step()

    moved = lm.dtensor.relayout(second.weight, lm.dtensor.fetch_layout(first.weight))
    with torch.no_grad():
        total = torch.add(first.weight, moved)
        torch.testing.assert_close(
            total.full_tensor(), first.weight.full_tensor() + second.weight.full_tensor()
        )


def test_each_pair_of_a_method_and_a_place_is_drawn():
    """On simulated devices and in processes, once in the long run."""
    for places in (SIMULATED, list(PLACES)):
        seeds = range(SEED, SEED + len(METHODS) * len(places))
        cases = [dtensor_methods.draw(seed, dtensor_methods.MESHES[4], places) for seed in seeds]
        assert set(itertools.product(METHODS, places)) == {(case.method, case.place) for case in cases}


@pytest.mark.every_case
@pytest.mark.parametrize("with_shape", [True, False])
def test_uneven_shards_need_a_shape(with_shape):
    """Shards of different sizes make the tensor that its shape and strides describe, and without these an error."""

    class Scaled(nn.Linear):
        def forward(self, x):
            weight = self.weight
            if isinstance(weight, DTensor):
                sizes = {"shape": weight.shape, "stride": weight.stride()} if with_shape else {}
                shard = weight.to_local() * 2.0
                weight = DTensor.from_local(shard, weight.device_mesh, weight.placements, **sizes)
            else:
                weight = weight * 2.0
            return F.linear(x, weight, self.bias)

    def make():
        torch.manual_seed(0)
        return Scaled(6, 5)

    model = lm.LayoutMap("model=4", {"weight": ("model", None)}, uneven="pad", rest="replicated").build(
        make, library="torch"
    )
    if not with_shape:
        with pytest.raises(EngineError, match=r"different sizes(.|\n)*fix(.|\n)*shape=tensor\.shape"):
            model(torch.ones(3, 6))
        return
    expected = make()
    for each in (expected, model):
        each(torch.ones(3, 6)).square().sum().backward()

    torch.testing.assert_close(model.weight.grad.full_tensor(), expected.weight.grad)
