"""A stack of layers whose step is measured, and counted: `python -m layoutmap.testing.stack jax batch=2,model=4 ...`.

Weights and batch are sharded over the first mesh dim that is larger than one. A step is counted in a process of its
own, since torch counts in none that has devices.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from layoutmap.core.mesh import Mesh
from layoutmap.cost.machine import Machine
from layoutmap.cost.machines import machine_named
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.scope import build, plan

_LAYERS = 4


def _on_torch(width: int) -> Any:
    import torch

    from layoutmap.adapters.torch import train_with

    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]
    return train_with(
        torch.nn.Sequential(*layers),
        loss=torch.nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )


def _on_jax(width: int) -> Any:
    import jax
    import optax

    from layoutmap.adapters.jax import train_with

    def forward(layers: Any, x: Any) -> Any:
        for layer in layers:
            x = x @ layer["weight"].T
        return x

    keys = jax.random.split(jax.random.key(0), _LAYERS)
    return train_with(
        [{"weight": jax.random.normal(key, (width, width)) * width**-0.5} for key in keys],
        forward=forward,
        loss=lambda y, target: ((y - target) ** 2).mean(),
        optimizer=optax.sgd(0.1),
    )


def _on_tensorflow(width: int) -> Any:
    import keras

    layers = [keras.layers.Dense(width, use_bias=False) for _ in range(_LAYERS)]
    return keras.Sequential([keras.Input((width,)), *layers])


_MAKES: dict[str, Callable[[int], Any]]
_MAKES = {"jax": _on_jax, "torch": _on_torch, "tensorflow": _on_tensorflow}


class Stack:
    """The stack, on a mesh.

    Args:
        engine: The engine's name, which is that of the library, but for Keras on TensorFlow.
        dims: The mesh.
        width: The width of its layers, and the number of rows of its batch: a multiple of the mesh's size.
    """

    def __init__(self, engine: str, dims: str, width: int):
        self.mesh = Mesh(None, dims)
        self.library = {"tensorflow": "keras"}.get(engine, engine)
        self._make, self.width = partial(_MAKES[engine], width), width
        dim = next((dim.name for dim in self.mesh.mesh_dims if dim.size > 1), self.mesh.dim_names[0])
        self._map, self._dim = (
            LayoutMap(self.mesh, {r".*(weight|kernel)": (dim, None)}, uneven="replicate"),
            dim,
        )

    @property
    def batch(self) -> tuple[Any, Any]:
        """Inputs and targets."""
        return tuple(np.random.default_rng(0).normal(size=(2, self.width, self.width)).astype("float32"))

    def built(self) -> Any:
        """Return the model in its layouts, on the devices."""
        return build(self._make, self._map, library=self.library, batch_dim=self._dim, progress=False)

    def counted(self, machine: Machine) -> dict[str, float]:
        """Return the seconds of a step, the bytes of its peak, and those of the variables, as they are planned."""
        inputs: Any = np.empty((self.width, self.width), "float32")
        found = plan(
            self._make,
            self._map,
            inputs=(inputs, inputs) if self.library == "jax" else inputs,  # a loss with targets needs both
            library=self.library,
            batch_dim=self._dim,
            on=machine,
            advise=False,
        )
        assert found.cost is not None
        held = sum(each.shard_bytes for each in found.assignments)
        return {
            "step": found.cost.step_seconds,
            "step_bytes": found.cost.step.peak_bytes,
            "created_bytes": held,
        }


def main(arguments: list[str]) -> int:
    """Print what is counted.

    Args:
        arguments: The engine, the mesh, the width, and the machine, as `--on` takes it.
    """
    engine, dims, width, on = arguments
    stack = Stack(engine, dims, int(width))
    counted = stack.counted(Machine(machine_named(on).device, stack.mesh.size))
    sys.stdout.write(f"{json.dumps(counted)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
