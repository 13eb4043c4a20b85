"""Cache the figures of layout maps in a file, so that a repeated search of the same step is fast."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from typing import Any

from layoutmap.core.errors import LayoutMapError, LayoutMapWarning
from layoutmap.cost.search.loop import Evaluate, Figures
from layoutmap.rules.rule_set import RuleSet

VERSION = 1


class FigureCache:
    """A file of figures: `{"version": 1, "figures": {fingerprint: {map: [seconds, peak_bytes, serial_seconds]}}}`.

    Raises:
        LayoutMapError: There is another file of that name, or no folder for it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = os.fspath(path)
        self._all: dict[str, dict[str, Any]] = {}
        folder = os.path.dirname(os.path.abspath(self._path))
        if not os.path.isdir(folder):
            raise LayoutMapError(
                f"{self._path} cannot be written",
                why=f"{folder} is not a folder",
                fix="pass cache= with a file in an existing folder",
            )
        if os.path.exists(path):
            self._all = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            if not os.path.isfile(self._path):  # opening a named pipe would block
                raise ValueError("no regular file")
            with open(self._path, encoding="utf-8") as file:
                found = json.load(file)
            if found["version"] != VERSION:
                raise ValueError(found["version"])
            return {
                step: {key: [*map(float, figures)] for key, figures in maps.items() if len(figures) == 3}
                for step, maps in found["figures"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LayoutMapError(
                f"{self._path} is not a cache of a search",
                why=f"it is not JSON of this form, version {VERSION}",
                fix="name another file for cache=, or delete it",
            ) from error

    def wrap_evaluate(self, evaluate: Evaluate, fingerprint: str) -> Evaluate:
        """Return a function that evaluates only the maps without figures in the file."""
        mine = self._all.setdefault(fingerprint, {})

        def evaluate_once(layout_map: RuleSet) -> Figures:
            key = hashlib.sha256(layout_map.to_yaml().encode()).hexdigest()[:16]
            known = mine.get(key)
            if known is None:
                found = evaluate(layout_map)
                mine[key] = [found.seconds, found.peak_bytes, found.serial_seconds]
                return found
            return Figures(float(known[0]), int(known[1]), float(known[2]))

        return evaluate_once

    def write(self) -> None:
        """Write the whole file, or warn and leave the file unchanged."""
        text = json.dumps({"version": VERSION, "figures": self._all}, indent=1)
        new = f"{self._path}.{os.getpid()}.new"
        try:
            with open(new, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.replace(new, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(new)
            warning = LayoutMapWarning(
                f"{self._path}: the figures of the search cannot be stored",
                why=error.strerror or str(error),
                fix="free some space, or name another file for cache=",
            )
            warnings.warn(warning, stacklevel=2)
