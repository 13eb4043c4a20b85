"""Softmax, and losses of classes, of logits that are sharded along the classes, along the rows, or both."""

import pytest
import torch
from engines.torch.dtensors import place, run_on, whole
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

PROCESSES = ("torch",)
pytestmark = pytest.mark.filterwarnings("error::layoutmap.LayoutMapWarning")  # nothing is gathered

LAYOUTS = [
    ("batch", "model"),
    (None, "model"),
    ("model", "batch"),
    (None, ("batch", "model")),
    ("batch", None),
]
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.rand(16, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.tensor([0, 15, -100, 7, 8, 3, -100, 11])
OPTIONS = {
    "labels": {},
    "weights": {"weight": WEIGHT},
    "another label to ignore": {"ignore_index": 7},
    "smoothing": {"label_smoothing": 0.2},
    "weights and smoothing": {"weight": WEIGHT, "label_smoothing": 0.2},
}


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def outcome(function, x, target):
    """A loss, its gradient, and the gradient of that; or the type of the error."""
    x = x.detach().requires_grad_()
    try:
        loss = function(x, target)
    except (IndexError, RuntimeError) as error:
        return type(error)
    weights = torch.linspace(1, 2, max(loss.numel(), 1), dtype=loss.dtype).view(loss.shape)
    (gradient,) = torch.autograd.grad((loss * weights).sum(), x, create_graph=True)
    again = [torch.zeros_like(x)]
    if function.keywords.get("is_curved", True):
        again = torch.autograd.grad((gradient * gradient).sum(), x)
    return [whole(each.detach()) for each in (loss, gradient, *again)]


class Loss:
    """A loss with some options, once for all layouts."""

    def __init__(self, function, **options):
        self.function, self.options = function, options
        self.keywords = {"is_curved": function is F.cross_entropy}

    def __call__(self, x, target):
        return self.function(x, target, **self.options)


def agree(loss, x, target, specs, of_target):
    """Whether a loss on the mesh is what it is on one device, or the same error."""
    expected = outcome(loss, x, target)
    with run_on():
        found = outcome(loss, place(x, *specs), place(target, *of_target))
    if isinstance(expected, type) or isinstance(found, type):
        return expected == found
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_labels(name, reduction):
    """A loss, its gradient and the gradient of that are those of one device, on all layouts."""
    options = {**OPTIONS[name], "reduction": reduction}
    several = LABELS.view(8, 1).expand(8, 4).clone()
    labels = LABELS.clamp(min=0) if "ignore_index" in options else LABELS
    losses = [Loss(F.cross_entropy, **options)]
    if "label_smoothing" not in options:
        losses.append(Loss(F.nll_loss, **options))

    found = {}
    for loss in losses:
        for specs in LAYOUTS:
            key = loss.function.__name__, specs
            found[key] = agree(loss, random(8, 16), labels, specs, specs[:1])
            found[*key, "replicated labels"] = agree(loss, random(8, 16), labels, specs, (None,))
    found["several axes"] = agree(
        losses[0], random(8, 16, 4), several.clamp(min=0), (*LAYOUTS[0], None), ("batch", None)
    )
    found["one row"] = agree(losses[0], random(16), torch.tensor(9), ("model",), ())

    assert dict.fromkeys(found, True) == found


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_probabilities(reduction):
    """Targets may be probabilities of all classes, in the layout of the logits or in another one."""
    target = torch.softmax(random(8, 16) * 2, 1)
    found = {}
    for name in ("labels", "weights", "smoothing", "weights and smoothing"):
        loss = Loss(F.cross_entropy, reduction=reduction, **OPTIONS[name])
        for specs in LAYOUTS:
            found[name, specs] = agree(loss, random(8, 16), target, specs, specs)
            found[name, specs, "by rows"] = agree(loss, random(8, 16), target, specs, ("batch", None))

    assert dict.fromkeys(found, True) == found


def test_classes_that_are_masked_out():
    """Logits of minus infinity, on all of a device's classes too, and large ones, make no number that is none."""
    x = random(8, 16)
    x[:, :8] = -torch.inf
    x[:, 12:] += 1e4
    labels = torch.tensor([8, 9, 10, 11, 12, 13, 14, 15])

    found = {specs: agree(Loss(F.cross_entropy), x, labels, specs, specs[:1]) for specs in LAYOUTS}

    assert dict.fromkeys(LAYOUTS, True) == found


@pytest.mark.filterwarnings("ignore::layoutmap.LayoutMapWarning")
@pytest.mark.parametrize("label", [16, -1])
def test_labels_that_are_no_class(label):
    """They raise an IndexError, as on one device, and options that are wrong what torch raises."""
    target = LABELS.clone().fill_(label)
    for specs in LAYOUTS:
        assert agree(Loss(F.cross_entropy), random(8, 16), target, specs, specs[:1])
        assert agree(Loss(F.cross_entropy, label_smoothing=2.0), random(8, 16), LABELS, specs, specs[:1])
        assert agree(Loss(F.cross_entropy), random(8, 16), LABELS.int(), specs, specs[:1])
        assert agree(
            Loss(F.cross_entropy, weight=WEIGHT), random(8, 16), LABELS.abs().byte() % 16, specs, specs[:1]
        )


def test_logits_are_not_gathered():
    """Devices exchange the largest logit of each row, the sum of exponentials, its gradient, and the loss."""
    x, labels = place(random(8, 16), "batch", "model").requires_grad_(), place(LABELS, "batch")

    with run_on(), CommDebugMode() as counter:
        F.cross_entropy(x, labels).backward()

    counts = {name.__name__: number for name, number in counter.get_comm_counts().items() if number}
    assert ["all_reduce"] == list(counts)
    assert counts["all_reduce"] <= 5


def test_small_element_types():
    """In 16 bits the sum of exponentials is made in 32, and the loss has the type of the logits."""
    x, labels = random(8, 16).bfloat16(), LABELS.clamp(min=0)
    expected = F.cross_entropy(x, labels)

    with run_on():
        found = F.cross_entropy(place(x, "batch", "model"), place(labels, "batch"))

    assert expected.dtype == found.dtype
    assert abs(float(expected) - float(whole(found.float()))) < 0.02


SOFTMAX = {
    "F.softmax": lambda x: F.softmax(x, 1),
    "F.softmax, 64 bits": lambda x: F.softmax(x.float(), -1, dtype=torch.float64),
    "softmax": lambda x: x.softmax(-1) * x,
    "torch.softmax": lambda x: torch.softmax(x, dim=1),
    "F.log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "log_softmax": lambda x: x.log_softmax(1).square(),
    "torch.log_softmax": lambda x: torch.log_softmax(x, 1, torch.float64),
    "of rows": lambda x: x.softmax(0),
    "of the labels": lambda x: F.log_softmax(x, -1).gather(-1, LABELS.clamp(min=0)[:, None]),
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(name):
    """Softmax along a sharded axis, its gradient and the gradient of that are those of one device."""

    def function(x, _):
        return SOFTMAX[name](x)

    masked = random(8, 16)
    masked[:, 4:8] = -torch.inf
    function.keywords = {}
    found = {specs: agree(function, random(8, 16), LABELS, specs, (None,)) for specs in LAYOUTS}
    if name in ("F.softmax", "torch.softmax", "F.log_softmax", "of the labels"):
        found["masked"] = agree(function, masked, LABELS, ("batch", "model"), (None,))

    assert dict.fromkeys(found, True) == found


def test_softmax_gathers_nothing():
    """Along a sharded axis it exchanges sums alone, in 16 bits as well, and stays sharded; an odd axis is an error."""
    x = place(random(8, 16).bfloat16(), "batch", "model")

    with run_on(), CommDebugMode() as counter:
        found = F.softmax(x, -1)
        logarithms = x.log_softmax(1)

    assert {"all_reduce": 4} == {name.__name__: number for name, number in counter.get_comm_counts().items()}
    assert found.placements == logarithms.placements == x.placements
    assert torch.bfloat16 == found.dtype
    assert torch.allclose(whole(found.float()), random(8, 16).bfloat16().softmax(1).float(), rtol=1e-2)
    with run_on(), pytest.raises(IndexError):
        F.softmax(x, 2)
