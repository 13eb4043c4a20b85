"""Explain an import error of Keras without its backend: which backends are installed, and how to choose one."""

from __future__ import annotations

import os
import sys
import traceback

from layoutmap.core.errors import ScopeError
from layoutmap.engines import ENGINES, list_installed_engines

_FIX_IN_PYTHON = 'start Python anew, and write os.environ["KERAS_BACKEND"] = "{}" before Keras is imported'


def set_backend_if_only_one_is_installed() -> None:
    """Set `KERAS_BACKEND` to the only installed framework, unless it is set already or Keras is imported."""
    there = list_installed_engines()
    if len(there) == 1 and "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", there[0])


def make_missing_backend_error(
    error: BaseException | None, choose_fix: str = _FIX_IN_PYTHON
) -> ScopeError | None:
    """Return a `ScopeError` if `error` says that Keras cannot be imported without its backend, and otherwise None."""
    if not isinstance(error, ModuleNotFoundError) or not _is_keras_import_failure(error):
        return None
    backend = str(error.name).partition(".")[0]
    if backend not in ENGINES:
        return None
    there = list_installed_engines()
    chosen = os.environ.get("KERAS_BACKEND")
    fixes = [*(choose_fix.format(name) for name in there[:1]), f'pip install "layoutmap[{backend}]"']
    return ScopeError(
        f"Keras cannot be imported: its backend, {backend}, is not installed",
        facts={"installed": ", ".join(there) or f"none of {', '.join(ENGINES)}"},
        why=f"KERAS_BACKEND={chosen}"
        if chosen
        else "KERAS_BACKEND is not set, and then Keras chooses by itself",
        fix=", or ".join(fixes),
    )


def _is_keras_import_failure(error: ModuleNotFoundError) -> bool:
    if "keras" in sys.modules:  # Keras is imported, so another module is missing
        return False
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__")).startswith("keras.") for frame in frames)
