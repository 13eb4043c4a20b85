"""Steps whose files were damaged in a drawn way, and what may come of their use: the saved values, or an error."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import layoutmap as lm
from layoutmap.engines import get_engine

LIBRARY = os.environ["KERAS_BACKEND"]
KINDS = ("bit", "bit", "bits", "zeros", "cut", "longer", "out", "folder", "exchanged", "other step", "moved")
SIZE = 96


class Jax:
    """A pytree in layouts, with the state of an optimizer."""

    def __init__(self) -> None:
        import jax.numpy as jnp

        mesh = lm.create_mesh("x=2,y=4", engine="jax")
        rows, both = lm.Layout(["x", None], mesh), lm.Layout([None, ("x", "y")], mesh)
        self.arrays = {"w": (rows, jnp.float32), "e": (both, jnp.bfloat16), "adam": (both, jnp.float32)}

    def make(self, value: float) -> Any:
        rng = np.random.default_rng(int(value))
        return {
            name: lm.dtensor.relayout(rng.normal(size=(SIZE, SIZE)).astype(dtype), layout)
            for name, (layout, dtype) in self.arrays.items()
        }, None

    def values(self, model: Any, optimizer: Any) -> list[bytes]:
        return [np.asarray(model[name]).tobytes() for name in self.arrays]


class Torch:
    """A module in layouts, with the slots of AdamW."""

    def make(self, value: float) -> Any:
        import torch

        torch.manual_seed(int(value))
        layout_map = lm.LayoutMap(lm.create_mesh("x=2,y=4"), {"weight": ("x", "y"), "bias": (None,)})
        model = layout_map.build(lambda: torch.nn.Linear(SIZE, SIZE), library="torch")
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * value
        optimizer.step()
        return model, optimizer

    def values(self, model: Any, optimizer: Any) -> list[bytes]:
        to_numpy = get_engine("torch").to_numpy
        slots = [slot for parameter in model.parameters() for slot in optimizer.state[parameter].values()]
        return [to_numpy(each).tobytes() for each in (*model.parameters(), *slots)]


def damage(folder: Path, other: Path, rng: random.Random) -> str:
    """Damage a file of a step; returns what was done to it."""
    kind, name = rng.choice(KINDS), rng.choice(sorted(os.listdir(folder)))
    file = folder / name
    data = bytearray(file.read_bytes())
    place = rng.randrange(len(data))
    if kind in ("bit", "bits"):
        for _ in range(1 if kind == "bit" else 100):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "zeros":  # a page that was not written
        page = slice(place // 4096 * 4096, place // 4096 * 4096 + 4096)
        data[page] = bytes(len(data[page]))
    elif kind == "moved":  # what is behind a place, a few bytes later
        data[place:] = (os.urandom(rng.randint(1, 64)) + data[place:])[: len(data) - place]
    elif kind == "cut":
        del data[place:]
    elif kind == "longer":
        data += bytes(rng.randint(1, 5000))
    elif kind == "other step":
        data = bytearray((other / name).read_bytes())
    elif kind == "exchanged":
        half = len(data) // 2
        data = data[half:] + data[:half]
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind != "out":
        file.write_bytes(data)
    return f"{kind} of {name}"


def loaded(side: Any, directory: Path, **how: Any) -> tuple[list[bytes], list[bytes], str]:
    """The values of a model before a load and after it, and what the load says; empty: it is done."""
    model, optimizer = side.make(3)
    before, said = side.values(model, optimizer), ""
    more = {} if optimizer is None else {"optimizer": optimizer}
    try:
        found = lm.load(model, directory, **more, **how)
        model = found if optimizer is None else found[0]
    except lm.CheckpointError as error:
        said = str(error)
    return before, side.values(model, optimizer), said


def attack(folder: Path, seeds: Iterable[int]) -> Counter[str]:
    """Damage a step once for each seed, and load it in all ways; returns how often it was refused."""
    side: Any = {"jax": Jax, "torch": Torch}[LIBRARY]()
    values = []
    for step in (1, 2):
        model, optimizer = side.make(step)
        values.append(side.values(model, optimizer))
        more = {} if optimizer is None else {"optimizer": optimizer}
        lm.save(model, folder / "good", step=step, **more)
    counts = Counter[str]()
    for seed in seeds:
        rng = random.Random(seed)
        directory = folder / "damaged"
        shutil.copytree(folder / "good", directory)
        files = {file: file.read_bytes() for file in (directory / "step-2").iterdir()}
        what = f"seed {seed}: {damage(directory / 'step-2', directory / 'step-1', rng)}"
        is_same = all(file.is_file() and file.read_bytes() == data for file, data in files.items())
        before, after, said = loaded(side, directory, step=2)
        # What is not read for values, such as the header, may be anything.
        assert after == (before if said else values[1]), what
        _, after, said_while = loaded(side, directory, step=2, verify="while")
        assert bool(said) == bool(said_while), what
        assert not said or all(f"\n  {part}  " in said for part in ("why", "fix")), what
        assert said_while or after == values[1], what
        try:
            problems = list(lm.describe(directory, step=2).verify())
        except lm.CheckpointError as error:
            problems = [error]
        assert bool(problems) != is_same, what
        assert problems or not said, what
        # A run goes on from the step before it.
        model, optimizer = side.make(3)
        more = {} if optimizer is None else {"optimizer": optimizer}
        if said:
            with lm.CheckpointManager(directory) as manager, warnings.catch_warnings():
                warnings.simplefilter("ignore", lm.LayoutMapWarning)
                found = manager.load(model, damaged="skip", **more)
            model = found if optimizer is None else found[0]
            assert values[0] == side.values(model, optimizer), what
        counts["refused" if said else "found by verify alone" if problems else "unchanged"] += 1
        shutil.rmtree(directory)
    return counts
