"""Random programs of torch: on DTensors of any layouts each gives what it gives on plain tensors, or an error.

A program is a few lines of Python over two or three inputs, made from templates: `Program.random(seed)` is always the
same one. A line that fails on plain tensors is left out while it is made. `verdict(program)` runs it on plain tensors
and on DTensors, as a model's call does or outside of one, and compares all variables afterwards, also those that were
changed in place, whether they require gradients, the gradients of the inputs, and for some their gradients.
`shrunk(program)` leaves out what does not matter.
"""

from __future__ import annotations

import random
import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from layoutmap.core.errors import LayoutMapError, LayoutMapWarning
from layoutmap.core.layout import Layout
from layoutmap.core.mesh import Mesh
from layoutmap.engines.torch.dtensor_ops import gathered
from layoutmap.engines.torch.engine import engine
from layoutmap.engines.torch.placing import make_replicated_placements, redistribute_if_needed
from layoutmap.engines.torch.simulation import get_tensors_by_rank
from layoutmap.engines.torch.specs import get_local

__all__ = ["Program", "shrunk", "verdict"]

_MESHES = (Mesh(None, "model=2"), Mesh(None, "batch=2,model=2"))

# {x}: a tensor of floats; {y}: any tensor, of floats or not; {i}: one of numbers; {n}: a number. {x} is the same one in
# all of a line, the others may differ.
_VIEWS = """
{x}.view({shape}) | {x}.reshape({shape}) | {x}.flatten({dim}) | {x}.flatten(0, {dim}) | {x}.transpose({dim}, {dim})
{x}.permute({order}) | {x}.mT | {x}.T | {x}.unsqueeze({dim}) | {x}.squeeze() | {x}.squeeze({dim}) | {x}.ravel()
{x}.expand(3, *{x}.shape) | {x}.unsqueeze({dim}).expand({sizes}) | {x}.flip({dims}) | {x}.roll({few}, {dim})
{x}.roll({few}) | {x}.chunk({few}, {dim})[-1] | {x}.split({few}, {dim})[0] | {x}.unbind({dim})[-1] | {x}.view_as({y})
{x}.movedim({dim}, {dim}) | {x}.unflatten({dim}, (-1, {few})) | {x}.narrow({dim}, 1, {few}) | {x}.select({dim}, -1)
{x}.diagonal() | {x}.unfold({dim}, 2, 1) | {x}.repeat(2, *[1] * {x}.ndim) | {x}.repeat_interleave(2, {dim})
{x}.tensor_split({few}, {dim})[0] | {x}.contiguous() | {x}.clone() | {x}.expand_as({y}) | {x}[{index}] | {x}[{index}]
{y}[{index}] | {x}.swapaxes({dim}, {dim}) | torch.rot90({x}) | {x}.tile(2, 1) | {x}.detach() | {x}.data
"""
_REDUCTIONS = """
{x}.{reduce}({dims}, keepdim={bool}) | {x}.{reduce}({dim}) | {x}.{reduce}() | {x}.prod({dim}) | {x}.cumsum({dim})
{x}.cumprod({dim}) | {x}.logcumsumexp({dim}) | {x}.cummax({dim})[{bit}] | {x}.argmax({dim}) | {x}.argmin()
{x}.max({dim}, keepdim={bool})[{bit}] | {x}.median({dim})[0] | ({x} > 0).any({dim}) | ({x} > 0).sum({dim})
{x}.norm(dim={dim}) | {x}.norm() | torch.linalg.vector_norm({x}, {few}, {dims}) | {x}.sort({dim})[{bit}]
{x}.topk(2, {dim}, largest={bool})[{bit}] | {x}.argsort({dim}) | {x}.diff(dim={dim}) | torch.aminmax({x}, dim={dim})[0]
torch.trapezoid({x}, dim={dim}) | {y}.sum({dim}) | {y}.amax({dims}) | {y}.cumsum({dim}) | {x}.count_nonzero({dim})
{x}.softmax({dim}) | F.log_softmax({x}, {dim}) | F.normalize({x}, dim={dim}) | {x}.kthvalue(1, {dim})[0] | {x}.trace()
F.layer_norm({x}, {x}.shape[-1:]) | F.layer_norm({x}, {x}.shape[-2:], {y}, {y}) | F.rms_norm({x}, {x}.shape[-1:])
F.group_norm({x}, {few}) | F.softmin({x}, {dim}) | {x}.logsumexp({dims}) | {x}.mean() | {x}.sum() | {x}.sum({dim})
"""
_PRODUCTS = """
{x} @ {y} | {x} @ {y}.mT | {x} @ {x}.mT | F.linear({x}, {y}) | F.linear({x}, {y}, {y}) | torch.outer({x}, {y})
torch.einsum("...i,...i->...", {x}, {y}) | torch.einsum("ij,kj->ik", {x}, {y}) | torch.einsum("bij,bjk->bik", {x}, {y})
torch.einsum("ij->j", {x}) | torch.addmm({y}, {x}, {y}) | torch.addmm({y}, {x}, {y}.mT) | torch.bmm({x}, {y}.mT)
torch.baddbmm({y}, {x}, {x}.mT) | torch.mv({x}, {y}) | torch.tensordot({x}, {y}, 1) | torch.linalg.det({x})
torch.dot({x}, {y}) | torch.kron({x}, {y}) | torch.cdist({x}, {y}) | torch.cross({x}, {y}, dim={dim})
torch.einsum("i,j->ij", {x}, {y}) | torch.einsum("...ij,...kj->...ik", {x}, {y}) | torch.vecdot({x}, {y})
F.bilinear({x}, {x}, {y}) | torch.matrix_power({x}, 2) | torch.block_diag({x}, {y}) | torch.inner({x}, {y})
"""
_ELEMENTS = """
{x} + {y} | {x} - {n} | {n} - {x} | {x} * {y} | {x} * {n} | {n} / ({x}.abs() + 1) | {x} / ({y}.abs() + 1) | -{x}
{x}.sin() | {x}.tanh() | {x}.relu() | {x}.exp() | {x}.abs() | {x} ** 2 | {x}.clamp({n}) | {x}.sigmoid() | {x} + {x}
torch.where({x} > 0, {x}, {y}) | torch.where({x} > 0, {n}, {x}) | torch.maximum({x}, {y}) | {x} > {y} | {x}.sign()
{x}.masked_fill({x} > 0, {n}) | {x} * ({y} > 0) | {x}.float() | {x}.double() | {x}.to({y}.dtype) | {i}.double()
{i} + {n} | {i} // 2 | {i} % 2 == 0 | {i} * {x} | torch.lerp({x}, {y}, 0.3) | torch.addcmul({x}, {y}, {y}) | F.gelu({x})
torch.lerp({x}, {y}, {y}) | torch.zeros_like({y}) + {x} | {x}.new_ones({x}.shape) * {x}
{x} * torch.arange({x}.shape[-1])
torch.tensor(2.0) * {x} | {x} * torch.ones({x}.shape[-1:]) | {x} * {x}.sum().item() | {x} * {x}.mean() | {i} & 1
{x}.tril() | {x}.nan_to_num() | torch.logaddexp({x}, {y}) | torch.hypot({x}, {y}) | F.softplus({x}) | {x}.logical_not()
F.pad({x}, (1, 0)) | F.pad({x}, (0, 0, 1, 1)) | F.glu({x}, {dim}) | torch.stack([{x}, {x}], {dim}) | {i}.bool()
torch.cat([{x}, {y}], {dim}) | torch.stack([{x}, {y}], {dim}) | torch.cat([{x}, {x}], {dim}) | torch.hstack([{x}, {y}])
torch.cat([{x}, {y}[:1]]) | torch.meshgrid({x}, {y}, indexing="ij")[0] | torch.broadcast_tensors({x}, {y})[0]
"""
_LOOKUPS = """
{x}.gather({dim}, {i}) | {x}.index_select({dim}, {i}.flatten()) | F.embedding({i}, {x}) | {x}[{i}] | {x}[:, {i}]
{x}[{x} > 0] | {x}[..., {i}, None] | {x}[{i}, {i}] | {x}.take_along_dim({i}, {dim}) | {x}.take({i}) | F.one_hot({i}, 8)
{x}[({x} > 0).any(-1)] | {x}.scatter({dim}, {i}, {n}) | {x}.scatter({dim}, {i}, {y}) | {x}.scatter_add({dim}, {i}, {y})
{x}.index_add({dim}, {i}.flatten(), {y}) | {x}.index_fill({dim}, {i}.flatten(), {n}) | {x}.masked_select({x} > 0)
{x}.index_put(({i},), {y}) | {x}.index_put(({x} > 0,), torch.tensor({n}, dtype={x}.dtype)) | {x}.argwhere()
{x}.index_copy({dim}, {i}.flatten(), {y}) | {x}.masked_scatter({x} > 0, {y}) | torch.nonzero({x} > 0)
{x}.scatter_reduce({dim}, {i}, {y}, "amax") | torch.select_scatter({x}, {y}, {dim}, 0) | torch.bincount({i}.flatten())
torch.slice_scatter({x}, {y}, {dim}, 1) | torch.where({x} > 0)[0] | torch.unique({i}) | torch.isin({i}, {i})
"""
_LOSSES = """
F.mse_loss({x}, {y}) | F.l1_loss({x}, {y}, reduction="sum") | F.cross_entropy({x}, {i}) | F.nll_loss({x}, {i})
F.smooth_l1_loss({x}, {y}, reduction="none") | F.binary_cross_entropy_with_logits({x}, {y}.sigmoid())
F.cross_entropy({x}, {i}, reduction="none") | F.cross_entropy({x}, {y}.softmax(1)) | F.kl_div({x}, {y}, reduction="sum")
F.cosine_similarity({x}, {y}, {dim}) | F.cross_entropy({x}, {i}, ignore_index=1) | F.pairwise_distance({x}, {y})
F.scaled_dot_product_attention({x}, {x}, {y}) | F.gaussian_nll_loss({x}, {y}, {x}.abs() + 1) | F.huber_loss({x}, {y})
"""
_CHANGES = """
{x}.add_({y}) | {x}.mul_({n}) | {x}.sub_({y}, alpha=2) | {x}[{index}] = {n} | {x}[{index}] = {y} | {x}[{index}] += {n}
{x}[{index}].mul_({n}) | {x}.transpose({dim}, {dim}).mul_({n}) | {x}.masked_fill_({x} > 0, {n}) | {x}.copy_({y})
{x}.zero_() | {x}.fill_({n}) | {x} += {y} | {x} *= {n} | {x}.clamp_(min={n}) | {x}.relu_() | {x}[{x} > 0] = {n}
{x}[{i}] = {n} | {x}.index_fill_({dim}, {i}.flatten(), {n}) | {x}.scatter_({dim}, {i}, {n})
{x}.flatten()[1:].add_({n})
{x}.index_add_({dim}, {i}.flatten(), {y}) | {x}.index_put_(({i},), {y}, accumulate={bool}) | {x}.tanh_() | {i}.add_(1)
{x}.view(-1).mul_({n}) | {x}.T.add_({n}) | {x}.diagonal().zero_() | {x}.detach().mul_({n}) | {x}.data.add_({n})
{x}.scatter_add_({dim}, {i}, {y}) | {x}.addmm_({y}, {y}) | torch.add({x}, {n}, out={x}) | {x}.unbind({dim})[0].zero_()
{x}.chunk(2, {dim})[1].add_({n}) | {x}.lerp_({y}, 0.5) | {x}.reshape(-1).mul_({n}) | {x}.squeeze().add_({n})
{x}.expand_as({x}).add_({n}) | {x}.unsqueeze(0).mul_({n}) | {x}[..., 0] -= {y} | {x}[{x}.argmax(0)] = {n}
"""
_KINDS = {
    kind: [line.strip() for line in re.split(r"[|\n]", text) if line.strip()]
    for kind, text in {
        "views": _VIEWS.replace(" | ", "\n"),
        "reductions": _REDUCTIONS,
        "products": _PRODUCTS,
        "elements": _ELEMENTS,
        "lookups": _LOOKUPS,
        "losses": _LOSSES,
        "changes": _CHANGES,
    }.items()
}
_WEIGHTS = {
    "views": 6,
    "reductions": 4,
    "products": 3,
    "elements": 4,
    "lookups": 3,
    "losses": 1,
    "changes": 3,
}
_REDUCE = ("sum", "mean", "amax", "amin", "std", "var", "logsumexp")
_NUMBERS = ("2", "-1.5", "0.5", "True", "3")


class _Pick(dict):
    """What a template asks for, chosen for the variables that there are."""

    def __init__(self, rng: random.Random, variables: dict[str, torch.Tensor]) -> None:
        self.rng, self.variables = rng, variables
        self.x = self._one(torch.Tensor.is_floating_point)

    def _one(self, of: Any) -> str:
        names = [name for name, each in self.variables.items() if of(each)]
        return self.rng.choice(names + names[-2:])  # rather what was made last

    def __missing__(self, key: str) -> str:
        rng, x = self.rng, self.variables[self.x]
        rank = max(x.ndim, 1)
        axes = [axis - rng.choice((0, rank)) for axis in range(rank)]
        match key:
            case "x":
                return self.x
            case "y":
                return self._one(lambda each: True)
            case "i":
                return self._one(lambda each: each.dtype == torch.int64)
            case "n":
                return rng.choice(_NUMBERS)
            case "few":
                return str(rng.randint(1, 3))
            case "bit":
                return rng.choice("01")
            case "bool":
                return rng.choice(("True", "False"))
            case "reduce":
                return rng.choice(_REDUCE)
            case "dim":
                return str(rng.choice(axes))
            case "dims":
                return str(tuple(rng.sample(axes, rng.randint(1, rank))))
            case "order":
                return str(tuple(rng.sample(axes, rank)))
            case "sizes":
                return ", ".join(map(str, rng.choices((-1, 2, 3), k=rank + 1)))
            case "shape":
                return str(_another_shape(rng, x))
            case "index":
                parts = [rng.choice(_PARTS) for _ in range(rng.randint(1, rank))]
                return ", ".join([*parts, "..."] if rng.random() < 0.2 and "..." not in parts else parts)
        raise KeyError(key)


_PARTS = (
    *(":", ":", "None", "...", "0", "-1", "1", "1:", ":2", "::2", "-2:", "1:3", "[1, 0]", "[0, 0, -1]"),
    *("torch.tensor([1, 0, 1])", "torch.tensor(1)", "1:1"),
)


def _another_shape(rng: random.Random, x: torch.Tensor) -> tuple[int, ...]:
    sizes, left = [], x.numel()
    while left > 1 and len(sizes) < 3:
        sizes.append(rng.choice([size for size in range(1, left + 1) if left % size == 0][:6]))
        left //= sizes[-1]
    sizes.insert(rng.randint(0, len(sizes)), rng.choice((-1, left)))
    return tuple(sizes)


@dataclass(frozen=True)
class Input:
    """A tensor that a program begins with.

    Attributes:
        shape: Its shape.
        dtype: Its type.
        trained: Whether it requires gradients.
        layout: Its sharding specs, `None` for a tensor that is no DTensor, or the mesh dim over which it waits for a
            sum.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    layout: Any

    @staticmethod
    def random(rng: random.Random, mesh: Mesh, sizes: tuple[int, ...], is_number: bool) -> Input:
        shape = tuple(rng.choice(sizes) for _ in range(rng.choice((1, 2, 2, 2, 3, 3, 4))))
        dtype = torch.int64 if is_number else rng.choice((torch.float64,) * 5 + (torch.float32,))
        specs: list[Any] = [None] * len(shape)
        for dim in rng.sample(mesh.dim_names, len(mesh.dim_names)):
            parts = [2 if spec is None else 4 for spec in specs]
            axes = [i for i, size in enumerate(shape) if size % parts[i] == 0]
            if axes and rng.random() < 0.75:
                axis = rng.choice(axes)
                specs[axis] = dim if specs[axis] is None else (specs[axis], dim)
        layout: Any = tuple(specs)
        chance = rng.random()
        if chance < 0.1:
            layout = None
        elif chance < 0.25 and not is_number:
            layout = rng.choice(mesh.dim_names)
        return Input(shape, dtype, not is_number and rng.random() < 0.7, layout)


@dataclass(frozen=True)
class Program:
    """A program: its inputs `v0`, `v1` ..., and lines that make other variables or change them.

    Attributes:
        seed: What it was made from.
        mesh: The mesh that its DTensors are on.
        inputs: Its inputs.
        lines: Its lines.
        num_gradients: How often gradients are taken, at the end: 0, 1, or 2 for gradients of gradients.
    """

    seed: Any
    mesh: Mesh
    inputs: tuple[Input, ...]
    lines: tuple[str, ...] = ()
    num_gradients: int = 1

    @staticmethod
    def random(seed: Any) -> Program:
        """The program of a seed."""
        rng = random.Random(f"program {seed}")
        sizes = (*rng.sample((2, 3, 4, 6, 8), 2), rng.choice((1, 2, 4)))
        mesh = rng.choice(_MESHES)
        inputs = [Input.random(rng, mesh, sizes, i == 1) for i in range(rng.choice((2, 3)))]
        program = Program(seed, mesh, tuple(inputs), (), rng.choice((1, 1, 2)))
        variables = program.variables(on_mesh=False)[0]
        scope = {"torch": torch, "F": F, **variables}
        for _ in range(rng.randint(3, 10)):
            for _ in range(30):
                kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
                template = rng.choice(_KINDS[kind])
                line = template.format_map(_Pick(rng, variables))
                name = f"v{len(variables)}"
                if kind != "changes":
                    line = f"{name} = {line}"
                if rng.random() < 0.04:
                    line = f"with torch.no_grad(): {line}"
                try:
                    exec(line, scope)
                    made = scope.get(name)
                    fits = made is None or (made.numel() <= 512 and made.ndim < 6 and _is_tame(made))
                except Exception:
                    fits = False
                if fits:
                    break
                scope.pop(name, None)
            else:
                break
            if kind != "changes":
                variables[name] = scope[name]
            program = replace(program, lines=(*program.lines, line))
        for number in (program.num_gradients, 1, 0):
            program = replace(program, num_gradients=number)
            try:
                program.run(on_mesh=False)
                break
            except Exception:
                continue
        return program

    def unseen(self) -> Program:
        """Its first two lines that make a variable, and a change of a variable that autograd does not see."""
        rng = random.Random(f"unseen {self.seed}")
        lines = [each for each in self.lines if re.match(r"(with torch.no_grad\(\): )?v\d+ = ", each)][:2]
        program = replace(self, lines=tuple(lines), num_gradients=min(self.num_gradients, 1))
        variables = program.variables(on_mesh=False)[0]
        exec("\n".join(lines), {"torch": torch, "F": F}, variables)
        floats = [name for name, each in variables.items() if each.is_floating_point()]
        change = rng.choice((".mul_(2)", ".add_(1)", ".tanh_()", ".zero_()", "[..., 0].mul_(3)"))
        name = rng.choice(floats)
        if not variables[name].ndim:
            change = change.removeprefix("[..., 0]")
        return replace(program, lines=(*lines, f"{name}.data{change}"))

    def __str__(self) -> str:
        head = [f"v{i}: {each}" for i, each in enumerate(self.inputs)]
        return "\n".join(
            [
                f"seed {self.seed} on {self.mesh.to_string()}",
                *head,
                *self.lines,
                f"gradients: {self.num_gradients}",
            ]
        )

    def variables(self, *, on_mesh: bool) -> tuple[dict[str, Any], list[Any]]:
        """Its inputs by name, and what gets their gradients."""
        generator = torch.Generator().manual_seed(0)
        values, leaves = {}, []
        for number, each in enumerate(self.inputs):
            if each.dtype.is_floating_point:
                leaf = torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.dtype)
            else:
                leaf = torch.randint(0, 2, each.shape, generator=generator)
            waits = isinstance(each.layout, str)
            if waits:
                leaf = torch.stack([leaf * 2, -leaf])
            if on_mesh and each.layout is not None:
                specs = (each.layout, *[None] * len(each.shape)) if waits else each.layout
                leaf = engine().relayout(leaf, Layout(specs, self.mesh))
            leaf.requires_grad_(each.trained)
            leaves.append(leaf)
            values[f"v{number}"] = leaf.sum(0) if waits else leaf
        return values, leaves

    def run(
        self, *, on_mesh: bool, in_call: bool = True, noise: float = 0.0
    ) -> tuple[dict[str, Any], list[Any]]:
        """What all variables are at the end, and the gradients of the inputs.

        Args:
            on_mesh: Whether on DTensors.
            in_call: Whether as a model's call does.
            noise: How far to move what each line makes, as rounding does.
        """
        with engine().run_on(self.mesh) if on_mesh and in_call else nullcontext():
            variables, leaves = self.variables(on_mesh=on_mesh)
            scope = {"torch": torch, "F": F, **variables}
            for number, line in enumerate(self.lines):
                exec(line, scope)
                if noise:
                    _disturb(scope.values(), noise, number)
            variables = {name: each for name, each in scope.items() if re.fullmatch(r"v\d+", name)}
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            gradients: list[Any] = []
            for number in range(self.num_gradients):
                results = list(variables.values()) if number == 0 else gradients
                loss = _loss(results)
                if loss is None or not trained:
                    break
                last = number == self.num_gradients - 1
                found = torch.autograd.grad(loss, trained, create_graph=not last, allow_unused=True)
                gradients = [
                    torch.zeros_like(leaf) if each is None else each
                    for each, leaf in zip(found, trained, strict=True)
                ]
            return variables, gradients


def _loss(results: list[Any]) -> Any:
    losses = []
    for each in results:
        if each.requires_grad:
            weights = torch.linspace(-1, 2, each.numel(), dtype=torch.float64).view(each.shape).to(each.dtype)
            losses.append((each * weights).sum())
    return sum(losses) if losses else None


def _is_tame(made: torch.Tensor) -> bool:
    return not made.is_floating_point() or bool((made.detach().abs() < 1e3).all())


def _disturb(values: Any, noise: float, seed: int) -> None:
    """Change floats a little, unseen by autograd, so that it shows what depends on rounding."""
    generator = torch.Generator().manual_seed(seed)
    for each in values:
        if isinstance(each, torch.Tensor) and each.is_floating_point() and 0 not in each.stride():
            each.data.add_(torch.randn(each.shape, generator=generator, dtype=torch.float64), alpha=noise)


def _gathered(tensor: Any) -> tuple[torch.Tensor, bool]:
    """All values of a tensor, and whether all devices agree on them."""
    tensor = tensor.detach()
    if not hasattr(tensor, "placements"):
        return tensor, True
    pieces = list(
        get_tensors_by_rank(
            get_local(redistribute_if_needed(tensor, make_replicated_placements(tensor.device_mesh)))
        ).values()
    )
    return pieces[0], all(torch.equal(pieces[0].nan_to_num(), each.nan_to_num()) for each in pieces)


def _facts(found: tuple[dict[str, Any], list[Any]]) -> dict[str, Any]:
    variables, gradients = found
    return {**variables, **{f"gradient {i}": each for i, each in enumerate(gradients)}}


def _difference(plain: dict[str, Any], ours: dict[str, Any], scale: float = 1.0) -> str:
    """What differs; empty if nothing does."""
    if plain.keys() != ours.keys():
        return f"{sorted(ours)}, not {sorted(plain)}"
    for name, expected in plain.items():
        if not isinstance(expected, torch.Tensor):
            continue
        if ours[name].requires_grad != expected.requires_grad:
            return f"{name}: requires_grad is {ours[name].requires_grad}, not {expected.requires_grad}"
        actual, agrees = _gathered(ours[name])
        if not agrees:
            return f"{name}: devices disagree"
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            return (
                f"{name}: {tuple(actual.shape)} {actual.dtype}, not {tuple(expected.shape)} {expected.dtype}"
            )
        loose = any(each.dtype == torch.float32 for each in plain.values())
        limit = (1e-3 if loose else 1e-8) * scale
        if not torch.allclose(
            actual.double(), expected.detach().double(), rtol=limit, atol=limit, equal_nan=True
        ):
            return f"{name}: another value"
    return ""


def verdict(program: Program, *, in_call: bool = True) -> str:
    """What became of a program: `right`, `gathered`, `refused: ...`, `failed: ...`, `wrong: ...` or `unstable`."""
    expected = _facts(program.run(on_mesh=False))
    gathered._warned_functions.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            actual = _facts(program.run(on_mesh=True, in_call=in_call))
            wrong = _difference(expected, actual)
        except LayoutMapError as error:
            return f"refused: {str(error).splitlines()[0]}"
        except Exception as error:
            text = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            return f"failed: {text[:300]}"
    if wrong:
        noise = 1e-4 if any(each.dtype == torch.float32 for each in expected.values()) else 1e-9
        try:
            moved = _facts(program.run(on_mesh=False, noise=noise))
            unstable = _difference(expected, moved, 1e3)
        except Exception:
            unstable = "an error"
        return "unstable" if unstable else f"wrong: {wrong}"
    return "gathered" if any(issubclass(each.category, LayoutMapWarning) for each in caught) else "right"


def _kind(found: str) -> str:
    return re.sub(r"[\d(\[].*", "", found.split(": ")[0] if found.startswith("wrong") else found)


def shrunk(program: Program, *, in_call: bool = True) -> Program:
    """The program without what does not matter to its verdict."""
    kind = _kind(verdict(program, in_call=in_call))

    def is_same(candidate: Program) -> bool:
        try:
            return _kind(verdict(candidate, in_call=in_call)) == kind
        except Exception:  # on plain tensors
            return False

    changed = True
    while changed:
        changed = False
        candidates = [
            replace(program, lines=program.lines[:i] + program.lines[i + 1 :])
            for i in range(len(program.lines))
        ]
        candidates += [replace(program, num_gradients=number) for number in range(program.num_gradients)]
        for i, each in enumerate(program.inputs):
            simpler = [replace(each, layout=None)] if each.layout is not None else []
            if isinstance(each.layout, tuple):
                simpler += [
                    replace(each, layout=tuple(None if j == axis else s for j, s in enumerate(each.layout)))
                    for axis, spec in enumerate(each.layout)
                    if spec is not None
                ]
            if each.trained:
                simpler.append(replace(each, trained=False))
            candidates += [
                replace(program, inputs=(*program.inputs[:i], other, *program.inputs[i + 1 :]))
                for other in simpler
            ]
        for candidate in candidates:
            if is_same(candidate):
                program, changed = candidate, True
                break
    return program
