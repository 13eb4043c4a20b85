"""Laws of values that are kept: saved and loaded, and laid out where they are."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from layoutmap.engines import installed_engines
from layoutmap.saving.describe import describe
from layoutmap.saving.load import load
from layoutmap.saving.save import save
from layoutmap.scope.layout_map import LayoutMap
from layoutmap.scope.plan import Plan
from layoutmap.testing.laws.trial import NotTried, Trial
from layoutmap.testing.models.maps import Map, draw_map

_TRIES = 8
_OTHER_ENGINE = {"jax": "torch", "torch": "tensorflow", "tensorflow": "jax"}
_LOADS = """
from layoutmap.adapters import get_adapter
plan = lm.plan(make_model, layout_map, inputs={inputs}, library={library!r})
if plan.errors:
    raise SystemExit({refused})
model = lm.load(make_model, {folder!r}, layout_map=layout_map, inputs={inputs}, library={library!r}, progress=False)
variables = get_adapter({library!r}).variables(model)
np.savez({found!r}, **{{path: get_adapter({library!r}).read(variable) for path, variable in variables.items()}})
"""
_REFUSED = 3
"""The exit code of a program whose map the plan refuses."""


def it_is_loaded_on_another_mesh(trial: Trial) -> Iterator[str]:
    """A model that has trained is saved, and loaded in another drawn map with the same bits, each in its layout."""
    case, sharded = trial.case, trial.pair[1]
    other, plan = _another_map(trial)
    with trial.folder() as folder:
        save(sharded, folder, progress=False)
        kept = describe(folder)
        variables = trial.adapter.variables(sharded)
        expected = {path: trial.adapter.read(v) for path, v in variables.items() if path in kept}
        loaded = load(
            case.make_model,
            folder,
            layout_map=_layout_map(other),
            inputs=case.inputs,
            library=case.library,
            batch_dim=other.batch_dim,
            progress=False,
        )
        found = trial.adapter.variables(loaded)
        actual = {path: trial.adapter.read(variable) for path, variable in found.items()}
    planned = {a.variable.path: a.layout for a in plan.assignments}
    yield from (f"{path}: saved, and not loaded" for path in expected if path not in found)
    for path, variable in found.items():
        if path in expected and not np.array_equal(expected[path], actual[path], equal_nan=True):
            yield f"{path}: loaded on {other.mesh} with other bits"
        if path in planned and variable.layout != planned[path]:
            yield f"{path}: planned {planned[path]}, loaded in {variable.layout}"


def it_is_loaded_by_another_engine(trial: Trial) -> Iterator[str]:
    """A model of Keras that has trained on one engine is saved, and loaded on another one with the same bits.

    One case in eight is tried, since it takes a process of its own.
    """
    case, sharded = trial.case, trial.pair[1]
    if case.library != "keras":
        raise NotTried("its library has one engine")
    engine = _OTHER_ENGINE[trial.adapter.engine_name]
    if trial.group.several or not case.devices.simulated or engine not in installed_engines():
        raise NotTried(f"{engine} may have other devices, or none")
    if not trial.choices.one_in(8):
        raise NotTried("one case in eight is tried")
    with tempfile.TemporaryDirectory() as folder:
        kept, found = str(Path(folder, "kept")), str(Path(folder, "found.npz"))
        save(sharded, kept, progress=False)
        program = case.program + _LOADS.format(
            inputs=case.model.planned_with or None,
            library=case.library,
            folder=kept,
            found=found,
            refused=_REFUSED,
        )
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"KERAS_BACKEND": engine},
            capture_output=True,
            text=True,
        )
        if ended.returncode == _REFUSED:
            raise NotTried(f"the plan on {engine} refuses its map")
        if ended.returncode:
            yield f"loaded on {engine}: {ended.stderr[-3000:]}"
            return
        actual = dict(np.load(found))
        described = describe(kept)
    for path, variable in trial.adapter.variables(sharded).items():
        if path not in described:
            continue
        if path not in actual:
            yield f"{path}: saved, and not loaded on {engine}"
        elif not np.array_equal(trial.adapter.read(variable), actual[path], equal_nan=True):
            yield f"{path}: loaded on {engine} with other bits"


def a_model_that_exists_is_laid_out(trial: Trial) -> Iterator[str]:
    """`apply` keeps each bit of a plain model, and gives each variable the layout of the plan."""
    model = trial.plain()
    planned = {a.variable.path: a.layout for a in trial.plan.assignments}
    own = {path for path in trial.adapter.variables(model) if not path.startswith("optimizer.")}
    if not own <= planned.keys():
        raise NotTried("layers without a name of their own have Keras's numbers in a model that exists")
    expected = [trial.adapter.read(variable) for variable in trial.adapter.variables(model).values()]
    laid_out = trial.case.layout_map.apply(model, batch_dim=trial.case.map.batch_dim)
    model = model if laid_out is None else laid_out
    for value, (path, variable) in zip(expected, trial.adapter.variables(model).items(), strict=True):
        if not np.array_equal(value, trial.adapter.read(variable), equal_nan=True):
            yield f"{path}: other bits after apply"
        if path in planned and variable.layout != planned[path]:
            yield f"{path}: planned {planned[path]}, laid out in {variable.layout}"


def _another_map(trial: Trial) -> tuple[Map, Plan]:
    """A map that the plan accepts: engines cannot hold all layouts."""
    choices = trial.choices
    shapes = {a.variable.path: a.variable.shape for a in trial.ruled if a.variable.shape}
    for _ in range(_TRIES):
        drawn = draw_map(choices, shapes, {}, trial.case.devices)
        plan = trial.case.plan(_layout_map(drawn))
        if not plan.errors:
            return drawn, plan
    raise NotTried(f"none of {_TRIES} other maps fits")


def _layout_map(drawn: Map) -> LayoutMap:
    return LayoutMap(drawn.mesh, dict(drawn.rules), uneven=drawn.uneven, rest="replicated")
