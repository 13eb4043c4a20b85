"""Store the costs of layout maps in a file, so that a repeated search of the same step is fast."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from typing import Any

from layoutmap.core.errors import LayoutMapError, LayoutMapWarning
from layoutmap.cost.search.loop import EvaluateFn, MapCost
from layoutmap.rules.rule_set import RuleSet

VERSION = 1


class SearchCache:
    """JSON file of costs: `{"version": 1, "figures": {fingerprint: {map: [seconds, peak_bytes, serial_seconds]}}}`.

    Raises:
        LayoutMapError: The file has other content, or its folder does not exist.
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
            self._all = self._read_file()

    def _read_file(self) -> dict[str, dict[str, Any]]:
        try:
            if not os.path.isfile(self._path):  # opening a named pipe would block forever, so refuse it
                raise ValueError("the path is not a regular file")
            with open(self._path, encoding="utf-8") as file:
                found = json.load(file)
            if found["version"] != VERSION:
                raise ValueError(f"version {found['version']} is not known")
            return {
                step: {key: [*map(float, cost)] for key, cost in maps.items() if len(cost) == 3}
                for step, maps in found["figures"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LayoutMapError(
                f"{self._path} was not written by a search",
                why=f"its content is not the JSON that search(cache=..) writes, version {VERSION}",
                fix="name another file for cache=, or delete this file",
            ) from error

    def wrap_with_cache(self, evaluate: EvaluateFn, fingerprint: str) -> EvaluateFn:
        """Return a function that calls `evaluate` only if the file has no cost of the map for this step."""
        costs_by_map = self._all.setdefault(fingerprint, {})

        def evaluate_with_cache(layout_map: RuleSet) -> MapCost:
            key = hashlib.sha256(layout_map.to_yaml().encode()).hexdigest()[:16]
            known = costs_by_map.get(key)
            if known is None:
                found = evaluate(layout_map)
                costs_by_map[key] = [found.seconds, found.peak_bytes, found.serial_seconds]
                return found
            return MapCost(float(known[0]), int(known[1]), float(known[2]))

        return evaluate_with_cache

    def write_file(self) -> None:
        """Write all costs to the file. If that fails, warn and leave the file unchanged."""
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
                f"{self._path}: the costs that the search has computed cannot be stored",
                why=error.strerror or str(error),
                fix="free some space, or name another file for cache=",
            )
            warnings.warn(warning, stacklevel=2)
