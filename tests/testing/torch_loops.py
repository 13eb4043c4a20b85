"""Loops as people write them around a torch model, on drawn models: each in layouts beside the plain one.

In several processes each is started with seeds, and prints what differs as a list in JSON.
"""

import copy
import json
import os
import sys
import warnings
from functools import partial

import numpy as np
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from layoutmap.adapters.torch.training import compute_loss
from layoutmap.core.errors import LayoutMapError
from layoutmap.engines import get_engine
from layoutmap.testing.laws.trial import ROUNDINGS, TOLERANCE, Trial, slice_rows
from layoutmap.testing.models import Devices
from layoutmap.testing.models.cases import EPSILONS
from layoutmap.testing.worker import draw_subject_case

RATE = 0.05
REFUSED = "fully_shard"  # its own error: it has no gradients by weights, nor of gradients
clip = torch.nn.utils.clip_grad_norm_


def trained(model):
    return [weight for weight in model.parameters() if weight.requires_grad]


def sgd(model, **options):
    return torch.optim.SGD(trained(model), lr=RATE, **options)


def loss(model, batch, seed=0):
    torch.manual_seed(seed)
    return compute_loss(model, batch)


def steps(model, batch, optimizer, *, count=2, before=lambda: None, after=lambda: None):
    """Usual steps; `before` and `after` are called around the optimizer's."""
    found = []
    for seed in range(count):
        optimizer.zero_grad()
        value = loss(model, batch, seed)
        value.backward()
        found += [value.item(), before()]
        optimizer.step()
        after()
    return [each for each in found if each is not None]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def accumulated(model, batch):
    """Gradients of a part of the rows and of all of them, in memory that stays."""
    optimizer, found = sgd(model, momentum=0.9), []
    for seed in range(2):
        optimizer.zero_grad(set_to_none=False)
        for part in (slice_rows(batch, 1), batch):
            value = loss(model, part, seed) / 2
            value.backward()
            found.append(value.item())
        optimizer.step()
    return found


def clipped(model, batch):
    norms = iter((2.0, float("inf"), 1.0))
    return steps(
        model,
        batch,
        sgd(model),
        count=3,
        before=lambda: float(clip(model.parameters(), 0.1, norm_type=next(norms))),
    )


def clipped_by_value(model, batch):
    cut = partial(torch.nn.utils.clip_grad_value_, clip_value=0.01)
    return steps(model, batch, sgd(model), before=lambda: cut(model.parameters()))


def scaled(model, batch):
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=128.0)
    found = []
    for seed in range(2):
        optimizer.zero_grad()
        scaler.scale(loss(model, batch, seed)).backward()
        scaler.unscale_(optimizer)
        found.append(float(clip(model.parameters(), 1.0)))
        scaler.step(optimizer)
        scaler.update()
    return [*found, scaler.get_scale()]


def averaged(model, batch):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    steps(model, batch, sgd(model), after=lambda: average.update_parameters(model))
    return list(average.module.parameters())


def averaged_by_hand(model, batch):
    average = copy.deepcopy(model)

    @torch.no_grad()
    def update():
        for kept, weight in zip(average.parameters(), model.parameters(), strict=True):
            kept.mul_(0.5).add_(weight.detach(), alpha=0.5)

    steps(model, batch, sgd(model), after=update)
    return list(average.parameters())


def of_two_losses(model, batch):
    optimizer = sgd(model)
    value = loss(model, batch)
    value.backward(retain_graph=True)
    (value * value).backward()
    optimizer.step()
    return [value.item()]


def by_autograd(model, batch):
    weights, value = trained(model), loss(model, batch)
    gradients = torch.autograd.grad(value, weights, allow_unused=True)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                weight.sub_(gradient, alpha=RATE)
    return [value.item(), *(each for each in gradients if each is not None)]


def with_a_penalty(model, batch):
    """Of the gradients' size: gradients of gradients."""
    optimizer, value = sgd(model), loss(model, batch)
    gradients = torch.autograd.grad(value, trained(model), allow_unused=True, create_graph=True)
    value = value + 0.01 * whole(sum((each * each).sum() for each in gradients if each is not None))
    value.backward()
    optimizer.step()
    return [float(value)]


def with_decay_in_the_loss(model, batch):
    optimizer = sgd(model)
    size = whole(sum((weight * weight).sum() for weight in model.parameters()))
    (loss(model, batch) + 0.01 * size).backward()
    optimizer.step()
    return [float(size)]


def with_weights_kept_small(model, batch):
    @torch.no_grad()
    def keep_small():
        for weight in model.parameters():
            weight.clamp_(-0.3, 0.3)
            weight.mul_(0.99)

    return steps(model, batch, sgd(model), after=keep_small)


def partly_frozen(model, batch):
    weights = list(model.parameters())
    optimizer, were = torch.optim.SGD(weights, lr=RATE), [each.requires_grad for each in weights]
    found = []
    for frozen in (weights[::2], []):
        for weight, was in zip(weights, were, strict=True):
            weight.requires_grad_(was and not any(weight is each for each in frozen))
        value = loss(model, batch)
        if value.requires_grad:
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        found.append(value.item())
    return found


def norms(model, batch):
    loss(model, batch).backward()
    return [float(whole(each.grad.norm())) for each in model.parameters() if each.grad is not None]


def set_back(model, batch):
    """To the state of a step before, of model and optimizer."""
    optimizer = sgd(model, momentum=0.9)
    steps(model, batch, optimizer, count=1)
    states = [copy.deepcopy(each.state_dict()) for each in (model, optimizer)]
    steps(model, batch, optimizer, count=1)
    for each, state in zip((model, optimizer), states, strict=True):
        each.load_state_dict(state)
    return steps(model, batch, optimizer, count=1)


def evaluated(model, batch):
    def evaluate():
        model.eval()
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                found.append(loss(model, batch, 7).item())
        model.train()

    found = []
    return steps(model, batch, sgd(model), after=evaluate) + found


def checkpointed(model, batch):
    optimizer = sgd(model)
    torch.manual_seed(0)
    value = checkpoint(lambda: compute_loss(model, batch), use_reentrant=False)
    value.backward()
    optimizer.step()
    return [value.item()]


class Reentrant(ActivationWrapper):
    """A block with an input that needs a gradient, without which torch gives its weights none."""

    def forward(self, *args, **kwargs):
        needed = torch.zeros((), requires_grad=True)
        return checkpoint(
            lambda _, *args: self._checkpoint_wrapped_module(*args, **kwargs),
            needed,
            *args,
            use_reentrant=True,
        )


def checkpointed_by_blocks(model, batch, wrap=checkpoint_wrapper):
    """Each child is computed again in the backward pass."""
    for name, child in list(model.named_children()):
        if next(child.parameters(), None) is not None and not isinstance(child, torch.nn.ModuleList):
            setattr(model, name, wrap(child))
    return steps(model, batch, sgd(model))


def checkpointed_by_reentrant_blocks(model, batch):
    return checkpointed_by_blocks(model, batch, Reentrant)


def with_an_unsharded_head(model, batch):
    """Clipped and stepped together with the sharded weights, as torch does by default on GPUs."""
    torch.manual_seed(0)
    head = torch.nn.Linear(1, 4)
    weights, found = [*trained(model), *head.parameters()], []
    optimizer = torch.optim.AdamW(weights, lr=RATE, eps=0.1, foreach=True)
    for seed in range(2):
        optimizer.zero_grad()
        value = head(loss(model, batch, seed).reshape(1)).square().mean()
        value.backward()
        found += [value.item(), float(clip(weights, 0.1, foreach=True))]
        optimizer.step()
    return [*found, *head.parameters()]


def with_a_closure(model, batch):
    optimizer, found = torch.optim.LBFGS(trained(model), lr=0.01, max_iter=2), []

    def closure():
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        found.append(value.item())
        return value

    optimizer.step(closure)
    return found


def in_groups(model, batch):
    even, odd = trained(model)[::2], trained(model)[1::2]
    groups = [{"params": even, "weight_decay": 0.1}, *([{"params": odd, "lr": 0.01}] if odd else [])]
    optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    return steps(model, batch, optimizer, count=3, after=schedule.step)


def with_hooks(model, batch):
    hooks = [weight.register_hook(lambda gradient: gradient * 0.5) for weight in trained(model)]
    found = steps(model, batch, sgd(model), count=1)
    for hook in hooks:
        hook.remove()
    return found


def in_the_backward_pass(model, batch):
    optimizers = {weight: torch.optim.SGD([weight], lr=RATE) for weight in trained(model)}

    def step(weight):
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    hooks = [weight.register_post_accumulate_grad_hook(step) for weight in optimizers]
    found = []
    for seed in range(2):
        value = loss(model, batch, seed)
        value.backward()
        found.append(value.item())
    for hook in hooks:
        hook.remove()
    return found


def compiled(model, batch):
    """In layouts as graphs: all of it, or each part; the plain model runs as it is."""
    if any(isinstance(each, DTensor) for each in model.parameters()):
        parts = [model] if len(list(model.parameters())) % 2 else model.children()
        for part in parts:
            part.compile(backend="aot_eager")
    return steps(model, batch, sgd(model))


LOOPS = (
    accumulated,
    clipped,
    clipped_by_value,
    scaled,
    averaged,
    averaged_by_hand,
    of_two_losses,
    by_autograd,
    with_a_penalty,
    with_decay_in_the_loss,
    with_weights_kept_small,
    partly_frozen,
    norms,
    set_back,
    evaluated,
    checkpointed,
    checkpointed_by_blocks,
    checkpointed_by_reentrant_blocks,
    with_an_unsharded_head,
    with_a_closure,
    in_groups,
    with_hooks,
    in_the_backward_pass,
)
IN_PROCESSES = (*LOOPS, compiled)
"""A graph is for one device."""


def numbers(loop, model, batch):
    """All that a loop finds, and the weights and buffers afterwards."""
    found = [*loop(model, batch), *model.parameters(), *model.buffers()]
    read = get_engine("torch").to_numpy
    tensors = (each.detach() if isinstance(each, torch.Tensor) else torch.tensor(each) for each in found)
    return [read(each).astype("float64") for each in tensors]


def largest_difference(expected, actual):
    """Beside the size of each; infinite where the shapes differ."""
    if [each.shape for each in expected] != [each.shape for each in actual]:
        return float("inf")
    pairs = [(a, b) for a, b in zip(expected, actual, strict=True) if a.size]
    return max((np.max(np.abs(a - b)) / max(np.max(np.abs(a)), 0.01) for a, b in pairs), default=0.0)


def differences(seed, loops=LOOPS, there=None):
    """Which loops on the model of a seed differ from the plain model by more than rounding, or fail."""
    devices = there or Devices(8, simulated=True, mesh="")
    trial = Trial(draw_subject_case("torch", seed, devices))
    signs = np.random.default_rng(0)
    for loop in loops:
        plain, sharded = trial.make_model_pair()
        try:
            expected = numbers(loop, plain, trial.case.batch)
        except RuntimeError:  # torch has no second derivative of some operators
            continue
        if not all(np.isfinite(each).all() for each in expected):
            continue
        try:
            found = largest_difference(expected, numbers(loop, sharded, trial.case.batch))
        except (RuntimeError, LayoutMapError) as error:
            if there is None or REFUSED not in str(error):
                yield f"{seed}: {loop.__name__}: {error}"
            continue
        if found > TOLERANCE:
            moved = trial._copy_weights(
                trial.create_unsharded_model(),
                trial.create_unsharded_model(),
                lambda value: 1 + EPSILONS["float32"] * signs.choice([-1, 1], value.shape),
            )
            rounding = largest_difference(expected, numbers(loop, moved, trial.case.batch))
            if not found <= ROUNDINGS * rounding:
                yield f"{seed}: {loop.__name__}: {found:.2g}, and by one rounding {rounding:.2g}"


def main(*seeds):
    warnings.simplefilter("ignore")
    there = Devices(int(os.environ["WORLD_SIZE"]), simulated=False, mesh="")
    print(json.dumps([each for seed in seeds for each in differences(int(seed), IN_PROCESSES, there)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
