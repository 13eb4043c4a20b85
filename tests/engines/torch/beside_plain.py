"""A function of DTensors beside the same function of plain tensors: values, gradients and the generator."""

import torch
from engines.torch.dtensors import place, run_on, summands, whole


def specs_of(layout, name, tensor):
    """The sharding specs of an argument, by what its name says that it is; see `function_cases`."""
    specs = [None] * tensor.ndim
    role, floating = name[0], tensor.is_floating_point()
    if layout == "batch and channels":
        if role in "xt":
            specs[0] = "batch"
        if role == "x" and tensor.ndim > 1 and tensor.shape[1] % 2 == 0:
            specs[1] = "model"
        if role == "w":
            specs[0] = "model"
    elif layout == "last axes":
        if role in "xw" and floating and tensor.shape[-1] % 2 == 0:
            specs[-1] = "model"
    elif layout == "batch over both" and role in "xt":
        specs[0] = ("batch", "model")
    return specs


LAYOUTS = ("batch and channels", "last axes", "summands")


def argument(layout, name, tensor):
    if layout == "summands" and (name == "x" or name[0] == "s"):
        return summands(tensor)
    return place(tensor, *specs_of(layout, name, tensor))


def tensors_in(results):
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for each in results if each is not None for tensor in tensors_in(each)]


def results_and_gradients(function, given, trained, scope=run_on):
    torch.manual_seed(3)
    for name in trained:
        given[name].requires_grad_()
    with scope() if any(hasattr(each, "placements") for each in given.values()) else torch.enable_grad():
        results = tensors_in(function(*given.values()))
        found = [each for each in results if each.requires_grad]
        if found:
            sum(
                (each * torch.linspace(-1, 2, each.numel(), dtype=each.dtype).view(each.shape)).sum()
                for each in found
            ).backward()
    return (
        [whole(each) for each in results],
        {name: whole(given[name].grad) for name in trained if given[name].grad is not None},
        torch.get_rng_state(),
    )


def assert_as_plain(function, tensors, layout, scope=run_on):
    trained = [name for name, each in tensors.items() if name[0] in "xw" and each.is_floating_point()]
    expected = results_and_gradients(
        function, {name: each.clone() for name, each in tensors.items()}, trained
    )
    actual = results_and_gradients(
        function, {name: argument(layout, name, each) for name, each in tensors.items()}, trained, scope
    )
    compared = [*zip(expected[0], actual[0], strict=True)]
    compared += [tuple(each[1].get(name, torch.zeros(())) for each in (expected, actual)) for name in trained]
    for number, (plain, ours) in enumerate(compared):
        message = f"{layout}: " + ", ".join([*["value"] * len(expected[0]), *trained][number : number + 1])
        torch.testing.assert_close(
            ours, plain, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda text, of=message: f"{of}: {text}"
        )
    assert torch.equal(expected[2], actual[2]), "the generator"


def outcome(function, tensors):
    """What a function gives, and the gradients of its floating arguments."""
    torch.manual_seed(5)
    tensors = [each.requires_grad_(each.is_floating_point() and each.ndim > 1) for each in tensors]
    results = function(*tensors)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    for each in results:
        if each.requires_grad:
            each.square().sum().backward()
    found = [whole(each) for each in results]
    return found + [whole(each.grad) for each in tensors if each.grad is not None]
