"""Build a stack of linear layers, to compare the measured cost of a step with the predicted cost.

Weights and batch are sharded over the first mesh dim with more than one device. `python -m layoutmap.testing.stack jax
batch=2,model=4 1024 h100` predicts the cost in a process without devices, which torch requires.
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


def _make_torch_model(width: int) -> Any:
    import torch

    from layoutmap.adapters.torch import train_with

    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]
    return train_with(
        torch.nn.Sequential(*layers),
        loss=torch.nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )


def _make_jax_model(width: int) -> Any:
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


def _make_keras_model(width: int) -> Any:
    import keras

    layers = [keras.layers.Dense(width, use_bias=False) for _ in range(_LAYERS)]
    return keras.Sequential([keras.Input((width,)), *layers])


_MAKERS: dict[str, Callable[[int], Any]]
_MAKERS = {"jax": _make_jax_model, "torch": _make_torch_model, "tensorflow": _make_keras_model}


class LayerStack:
    """A model of linear layers. The width is also the number of rows of a batch, and a multiple of the mesh size."""

    def __init__(self, engine: str, dims: str, width: int):
        self.mesh = Mesh(None, dims)
        self.library = {"tensorflow": "keras"}.get(engine, engine)
        self._make_model, self.width = partial(_MAKERS[engine], width), width
        self._dim = next((dim.name for dim in self.mesh.mesh_dims if dim.size > 1), self.mesh.dim_names[0])
        rules = {r".*(weight|kernel)": (self._dim, None)}
        self._layout_map = LayoutMap(self.mesh, rules, uneven="replicate")

    @property
    def batch(self) -> tuple[Any, Any]:
        """The inputs and the targets of a step."""
        return tuple(np.random.default_rng(0).normal(size=(2, self.width, self.width)).astype("float32"))

    def build_model(self) -> Any:
        """Return the sharded model on the devices."""
        return build(
            self._make_model, self._layout_map, library=self.library, batch_dim=self._dim, progress=False
        )

    def predict_cost(self, machine: Machine) -> dict[str, float]:
        """Return the planned seconds of a step, its peak bytes, and the bytes of all variables on a device."""
        inputs: Any = np.empty((self.width, self.width), "float32")
        step_plan = plan(
            self._make_model,
            self._layout_map,
            inputs=(inputs, inputs) if self.library == "jax" else inputs,  # a loss on JAX also takes targets
            library=self.library,
            batch_dim=self._dim,
            on=machine,
            advise=False,
        )
        assert step_plan.cost is not None
        return {
            "step": step_plan.cost.step_seconds,
            "step_bytes": step_plan.cost.step.peak_bytes,
            "created_bytes": sum(assignment.shard_bytes for assignment in step_plan.assignments),
        }


def main(arguments: list[str]) -> int:
    """Print the predicted cost as JSON."""
    engine, dims, width, on = arguments
    stack = LayerStack(engine, dims, int(width))
    cost = stack.predict_cost(Machine(machine_named(on).device, stack.mesh.size))
    sys.stdout.write(f"{json.dumps(cost)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
