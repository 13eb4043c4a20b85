"""Laws about stored values: they survive a checkpoint and `apply`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from layoutmap.core.layout import Layout
from layoutmap.engines import list_installed_engines
from layoutmap.saving.describe import describe
from layoutmap.saving.load import load
from layoutmap.saving.save import save
from layoutmap.saving.sync import plan_sync
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.plan import Plan
from layoutmap.scope.scope import build
from layoutmap.testing.laws.trial import NotApplicable, Trial
from layoutmap.testing.models.maps import DrawnLayoutMap, draw_layout_map

_MAX_DRAWS = 8
_OTHER_ENGINE = {"jax": "torch", "torch": "tensorflow", "tensorflow": "jax"}
_LOAD_PROGRAM = """
from layoutmap.adapters import get_adapter
plan = lm.plan(make_model, layout_map, inputs={inputs}, library={library!r})
if plan.errors:
    raise SystemExit({refused})
model = lm.load(make_model, {folder!r}, layout_map=layout_map, inputs={inputs}, library={library!r}, progress=False)
variables = get_adapter({library!r}).variables(model)
np.savez({arrays!r}, **{{path: get_adapter({library!r}).read(variable) for path, variable in variables.items()}})
"""
_OTHER_SEED = 1
_REFUSED_EXIT_CODE = 3  # exit code of a program that stops because the plan has errors


def load_checkpoint_on_other_mesh(trial: Trial) -> Iterator[str]:
    """Save a trained model, and load it with a different layout map. Compare layouts, and values bit for bit."""
    case, sharded = trial.case, trial.model_pair[1]
    other, plan = _draw_other_valid_layout_map(trial)
    with trial.create_shared_folder() as folder:
        save(sharded, folder, progress=False)
        saved = describe(folder)
        variables = trial.adapter.variables(sharded)
        expected = {path: trial.adapter.read(v) for path, v in variables.items() if path in saved}
        model = load(
            case.make_model,
            folder,
            layout_map=_make_layout_map(other),
            inputs=case.plan_inputs,
            library=case.library,
            batch_dim=other.batch_dim,
            progress=False,
        )
        loaded = trial.adapter.variables(model)
        actual = {path: trial.adapter.read(variable) for path, variable in loaded.items()}
    planned = {a.variable.path: a.layout for a in plan.assignments}
    yield from (f"{path}: saved, and not loaded" for path in expected if path not in loaded)
    for path, variable in loaded.items():
        if path in expected and not np.array_equal(expected[path], actual[path], equal_nan=True):
            yield f"{path}: loaded on {other.mesh} with different bits"
        if path in planned and variable.layout != planned[path]:
            yield f"{path}: planned {planned[path]}, loaded in {variable.layout}"


def sync_weights_to_other_mesh(trial: Trial) -> Iterator[str]:
    """Sync a model to one with a different layout map. Compare layouts, sent bytes, and values bit for bit."""
    case, trainer = trial.case, trial.model_pair[1]
    other, _ = _draw_other_valid_layout_map(trial)
    trial.adapter.set_seed(_OTHER_SEED)
    sampler = build(
        case.make_model,
        _make_layout_map(other),
        batch_dim=other.batch_dim,
        inputs=case.plan_inputs,
        library=case.library,
        progress=False,
    )
    sources, before = trial.adapter.variables(trainer), trial.adapter.variables(sampler)
    layouts = {path: variable.layout for path, variable in before.items()}
    sync = plan_sync(trainer, sampler)
    synced = trial.adapter.variables(sync(verify=True))
    for row in sync.plan.rows:
        path, source = row.variable.path, sources[row.sources[0]]
        expected = trial.adapter.read(source)
        if not np.array_equal(expected, trial.adapter.read(synced[path]), equal_nan=True):
            yield f"{path}: synced to {other.mesh} with different bits"
        if synced[path].layout != layouts[path]:
            yield f"{path}: its layout was {layouts[path]} before the sync, and is {synced[path].layout}"
        if (counted := _count_missing_bytes(source.layout, layouts[path], expected)) != row.num_bytes:
            yield f"{path}: devices lack {counted} bytes, and the plan counts {row.num_bytes}"
    planned = {row.variable.path for row in sync.plan.rows}
    stored = {each.variable.path for each in trial.adapter.list_stored_variables(trainer)}
    ruled_paths = (a.variable.path for a in trial.rule_assignments)
    yield from (f"{path}: not synced" for path in ruled_paths if path in stored and path not in planned)


def _count_missing_bytes(source: Layout | None, target: Layout | None, values: Any) -> int:
    """Return how many bytes all devices must receive if an array changes from layout `source` to `target`."""
    if source is None or target is None:
        return 0
    num_missing = 0
    for device in range(target.mesh.size):
        missing = np.zeros(values.shape, bool)
        missing[target.shard_slices(values.shape, device)] = True
        missing[source.shard_slices(values.shape, device)] = False
        num_missing += int(missing.sum())
    return num_missing * values.itemsize


def load_checkpoint_on_other_engine(trial: Trial) -> Iterator[str]:
    """Save a trained Keras model, load it on a different engine, and compare values bit for bit.

    One case in eight runs, since loading needs a process.
    """
    case, sharded = trial.case, trial.model_pair[1]
    if case.library != "keras":
        raise NotApplicable("only Keras models can be loaded on a different engine")
    engine = _OTHER_ENGINE[trial.adapter.engine_name]
    has_devices = case.devices.simulated and not trial.processes.has_other_processes
    if not has_devices or engine not in list_installed_engines():
        raise NotApplicable(f"{engine} is not installed, or the devices are not simulated in one process")
    if not trial.choices.draw_true_once_in(8):
        raise NotApplicable("only one case in eight tries this law")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, arrays = str(Path(folder, "checkpoint")), str(Path(folder, "arrays.npz"))
        save(sharded, checkpoint, progress=False)
        program = case.program + _LOAD_PROGRAM.format(
            inputs=case.model.plan_inputs or None,
            library=case.library,
            folder=checkpoint,
            arrays=arrays,
            refused=_REFUSED_EXIT_CODE,
        )
        process = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"KERAS_BACKEND": engine},
            capture_output=True,
            text=True,
        )
        if process.returncode == _REFUSED_EXIT_CODE:
            raise NotApplicable(f"the plan of the case on {engine} has an error")
        if process.returncode:
            yield f"loaded on {engine}: {process.stderr[-3000:]}"
            return
        actual = dict(np.load(arrays))
        saved = describe(checkpoint)
    for path, variable in trial.adapter.variables(sharded).items():
        if path not in saved:
            continue
        if path not in actual:
            yield f"{path}: saved, and not loaded on {engine}"
        elif not np.array_equal(trial.adapter.read(variable), actual[path], equal_nan=True):
            yield f"{path}: loaded on {engine} with different bits"


def apply_map_to_existing_model(trial: Trial) -> Iterator[str]:
    """Apply the layout map to an unsharded model. Values must stay equal bit for bit, and layouts be as planned."""
    model = trial.create_unsharded_model()
    planned = {a.variable.path: a.layout for a in trial.plan.assignments}
    paths = {path for path in trial.adapter.variables(model) if not path.startswith("optimizer.")}
    if not paths <= planned.keys():
        raise NotApplicable(
            "Keras numbers unnamed layers of this existing model differently than in the plan"
        )
    expected = [trial.adapter.read(variable) for variable in trial.adapter.variables(model).values()]
    sharded = trial.case.layout_map.apply(model, batch_dim=trial.case.map.batch_dim)
    model = model if sharded is None else sharded
    for value, (path, variable) in zip(expected, trial.adapter.variables(model).items(), strict=True):
        if not np.array_equal(value, trial.adapter.read(variable), equal_nan=True):
            yield f"{path}: different bits after apply"
        if path in planned and variable.layout != planned[path]:
            yield f"{path}: planned {planned[path]}, laid out in {variable.layout}"


def _draw_other_valid_layout_map(trial: Trial) -> tuple[DrawnLayoutMap, Plan]:
    """Return a random layout map and its plan without errors. Raise `NotApplicable` if no draw has one."""
    choices = trial.choices
    shapes = {a.variable.path: a.variable.shape for a in trial.rule_assignments if a.variable.shape}
    for _ in range(_MAX_DRAWS):
        drawn_map = draw_layout_map(choices, shapes, {}, trial.case.devices)
        plan = trial.case.plan(_make_layout_map(drawn_map))
        if not plan.errors:
            return drawn_map, plan
    raise NotApplicable(f"plans with {_MAX_DRAWS} other random layout maps all have errors")


def _make_layout_map(drawn_map: DrawnLayoutMap) -> LayoutMap:
    return LayoutMap(drawn_map.mesh, dict(drawn_map.rules), uneven=drawn_map.uneven, rest="replicated")
