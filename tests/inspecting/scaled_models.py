"""Small models of JAX whose numbers are of drawn sizes, from 1e-7 to 100, with faults that only the first build has.

`check_parity` builds the sharded model first, so that only the sharded model has the fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import layoutmap as lm
from layoutmap.adapters.jax import train_with

STAGES = {
    "output": "forward",
    "zero output": "forward",
    "loss": "loss",
    "gradient": "gradient",
    "zero gradient": "gradient",
    "step": "step 1",
}
"""The faults, and the stage in which each shows first."""


class Net(nnx.Module):
    """The same weights as attributes of a module."""

    def __init__(self, weights):
        for name, value in weights.items():
            setattr(self, name, nnx.Param(value))

    def weights(self):
        return {name: each[...] for name, each in vars(self).items() if isinstance(each, nnx.Param)}


@jax.custom_vjp
def scale_gradient(x, factor):
    return x


scale_gradient.defvjp(lambda x, factor: (x, factor), lambda factor, g: (g * factor, None))


@dataclass(frozen=True)
class Head:
    """One output: `size * (hidden @ (kernel / weight_size) + bias / weight_size)`."""

    size: float
    weight_size: float
    loss_size: float


class ScaledModel:
    """A trunk, which may normalize over the batch, and heads whose outputs, weights and losses are of drawn sizes.

    Args:
        seed: What everything is drawn from.
        fault: One of `STAGES`; empty: none.
    """

    def __init__(self, seed: int, fault: str = ""):
        rng = np.random.default_rng(seed)
        sizes = 10.0 ** rng.uniform(-7, 2, size=(rng.integers(1, 4), 3))
        self.heads = [Head(*map(float, row)) for row in sizes]
        self.is_nnx, self.normalizes = rng.random() < 0.5, rng.random() < 0.5
        self.rows, self.width = int(rng.choice([8, 16, 24])), int(rng.choice([8, 16, 32]))
        self.target_size = float(rng.choice([0.0, 1.0]))
        self.chosen = int(rng.integers(len(self.heads)))
        self.chosen_weight = f"{rng.choice(['kernel', 'bias'])}{self.chosen}"
        optimizers = [
            lambda: optax.sgd(0.05),
            lambda: optax.sgd(0.05, momentum=0.9),
            lambda: optax.adam(1e-3),
        ]
        self.make_optimizer = optimizers[rng.integers(3)]
        self.specs = {
            name: [("model",), (None,)][rng.integers(2)]
            if name.startswith("bias")
            else [(None, "model"), ("model", None), ("batch", "model"), (("batch", "model"), None)][
                rng.integers(4)
            ]
            for name in self.make_weights()
        }
        self.batch_dim = str(rng.choice(["batch", ""])) or None
        self.fault, self.num_builds, self.seed = fault, 0, seed
        self.inputs = rng.normal(size=(self.rows, 8)).astype("float32")
        self.targets = rng.normal(size=(self.rows, 8)).astype("float32")

    def make_weights(self) -> dict[str, Any]:
        """Draw the weights; biases of heads are zero."""
        rng = np.random.default_rng(1)
        weights = {
            "kernel": rng.normal(size=(8, self.width)).astype("float32") / 3,
            "bias": rng.normal(size=self.width).astype("float32") / 10,
        }
        for number, head in enumerate(self.heads):
            kernel = rng.normal(size=(self.width, 8)) / np.sqrt(self.width)
            weights[f"kernel{number}"] = (kernel * head.weight_size).astype("float32")
            weights[f"bias{number}"] = np.zeros(8, "float32")
        return weights

    def make_model(self) -> object:
        """Return the model with its loss and optimizer; only the first one has the fault."""
        self.num_builds += 1
        fault = self.fault if self.num_builds == 1 else ""
        optimizer = self.make_optimizer()
        if fault == "step":
            optimizer = optax.chain(optimizer, optax.stateless(self.double_update))
        weights = {name: jnp.asarray(value) for name, value in self.make_weights().items()}
        return train_with(
            Net(weights) if self.is_nnx else weights,
            forward=lambda model, x: self.compute_outputs(model, x, fault),
            loss=lambda outputs, y: self.compute_loss(outputs, y, fault),
            optimizer=optimizer,
        )

    def double_update(self, updates: Any, params: Any) -> Any:
        """Double the update of the bias of the chosen head: kernels hide updates below a rounding of themselves."""
        return {name: u * 2 if f"bias{self.chosen}" in name else u for name, u in updates.items()}

    def compute_outputs(self, model: Any, x: jax.Array, fault: str) -> tuple[jax.Array, ...]:
        """Return the output of each head."""
        weights = dict(model.weights() if self.is_nnx else model)
        if fault in ("gradient", "zero gradient"):
            factor = 2.0 if fault == "gradient" else 0.0
            weights[self.chosen_weight] = scale_gradient(weights[self.chosen_weight], factor)
        hidden = x @ weights["kernel"] + weights["bias"]
        if self.normalizes:
            hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-3)
        hidden = jnp.tanh(hidden)
        outputs = []
        for number, head in enumerate(self.heads):
            kernel, bias = weights[f"kernel{number}"], weights[f"bias{number}"]
            factor = {"output": 2.0, "zero output": 0.0}.get(fault, 1.0) if number == self.chosen else 1.0
            outputs.append(
                factor * head.size * (hidden @ (kernel / head.weight_size) + bias / head.weight_size)
            )
        return tuple(outputs)

    def compute_loss(self, outputs: tuple[jax.Array, ...], y: jax.Array, fault: str) -> jax.Array:
        """Return the sum of the heads' squared errors, each of a size of its own."""
        errors = [
            head.loss_size * ((output - self.target_size * head.size * y) ** 2).mean() / head.size**2
            for head, output in zip(self.heads, outputs, strict=True)
        ]
        return sum(errors) * (2.0 if fault == "loss" else 1.0)

    def check_parity(self, **options: Any) -> lm.ParityReport:
        """Compare the model in the drawn layouts with one device."""
        rules = {rf"{name}$": specs for name, specs in self.specs.items()}
        layout_map = lm.LayoutMap(lm.create_mesh("batch=2,model=4"), rules)
        batch = self.inputs, self.targets
        options = {"batch_dim": self.batch_dim, "library": "jax", "raises": False, **options}
        return lm.check_parity(self.make_model, layout_map, batch, **options)
