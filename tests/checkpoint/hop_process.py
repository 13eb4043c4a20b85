"""A process of one engine that loads what others have saved, and saves it in layouts of its own; see test_engines.py.

It reads one command as JSON from each line of stdin, and prints what came of it.
"""
# ruff: noqa: E402 - settings are read when a framework is loaded

import json
import os
import sys
import traceback
import warnings

ENGINE = sys.argv[1]
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
if ENGINE == "tensorflow":
    from tensorflow.experimental import dtensor

    dtensor.initialize_accelerator_system("CPU", num_logical_cpu_devices=8)
elif ENGINE == "torch":
    import torch

import numpy as np
from checkpoint.checkpoints import saved

import layoutmap as lm
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.core.variables import Assignment, VariableSpec
from layoutmap.engines import get_engine
from layoutmap.testing.engine_contract import generate_values

engine = get_engine(ENGINE)


def module_of(arrays):
    """A module that holds tensors of any type."""
    module = torch.nn.Module()
    for path, array in arrays.items():
        module.register_buffer(path, array)
    return module


def load(source, assignments, values):
    """Arrays by path, each in its layout: those of a checkpoint, or where there is none, the values."""
    if source is None:
        return {
            path: engine.create_from_shards(a, values[path].__getitem__) for path, a in assignments.items()
        }
    if ENGINE == "tensorflow":
        step = StepSource(LocalStorage(source))
        return {
            path: engine.create_from_shards(a, lambda i, p=path: step.read(p, i))
            for path, a in assignments.items()
        }
    blank = {
        path: engine.create_from_shards(a, np.zeros_like(values[path]).__getitem__)
        for path, a in assignments.items()
    }
    if ENGINE == "jax":
        return lm.load(blank, source, extra="ignore")
    return dict(lm.load(module_of(blank), source, extra="ignore").named_buffers())


def save(arrays, target, values, layouts):
    if ENGINE == "tensorflow":
        here = {path: np.empty_like(value) for path, value in values.items()}
        for path, array in arrays.items():
            for index, shard in engine.iterate_shards(array):
                here[path][index] = shard
        saved(target, here, layouts)
    else:
        lm.save(arrays if ENGINE == "jax" else module_of(arrays), target)


def hop(command):
    """Load what was saved, compare it with what it must be, and save it here."""
    mesh = lm.Mesh(None, command["mesh"])
    values, layouts, assignments = {}, {}, {}
    for number, (shape, dtype, specs) in enumerate(command["variables"]):
        path = f"x{number}"
        values[path] = generate_values(tuple(shape), dtype, number)
        layouts[path] = lm.Layout(specs, mesh)
        assignments[path] = Assignment(VariableSpec(path, tuple(shape), dtype), layouts[path])
    arrays = load(command["read"], assignments, values)
    wrong = []
    for path, array in arrays.items():
        if any(
            shard.tobytes() != values[path][index].tobytes() for index, shard in engine.iterate_shards(array)
        ):
            wrong.append(f"{path}: values")
        if engine.get_layout(array) != layouts[path]:
            wrong.append(f"{path}: layout {engine.get_layout(array)}")
    save(arrays, command["write"], values, layouts)
    return wrong


def main():
    warnings.simplefilter("ignore", lm.LayoutMapWarning)
    for line in sys.stdin:
        try:
            told = hop(json.loads(line))
        except Exception:
            told = [traceback.format_exc()]
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
