"""Figures of maps in a file, beside the fingerprint of the step, so that a search that is begun again is quick."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import Any, cast

from layoutmap.core.errors import LayoutMapError
from layoutmap.rules.rule_set import RuleSet
from layoutmap.searching.loop import Evaluate, Figures

VERSION = 1


class KeptFigures:
    """A file of figures: `{"version": 1, "figures": {fingerprint: {map: [seconds, peak_bytes, serial_seconds]}}}`.

    Args:
        path: The file; it need not exist.
        fingerprint: What the figures depend on besides the map.

    Raises:
        LayoutMapError: There is another file of that name.
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: str):
        self._path, self._fingerprint = os.fspath(path), fingerprint
        self._all: dict[str, dict[str, Any]] = {}
        if os.path.exists(path):
            self._all = self._read()
        self._mine = self._all.setdefault(fingerprint, {})

    def _read(self) -> dict[str, dict[str, Any]]:
        found: Any = None
        with contextlib.suppress(OSError, ValueError), open(self._path, encoding="utf-8") as file:
            found = json.load(file)
        fields = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        if fields.get("version") != VERSION or not isinstance(fields.get("figures"), dict):
            raise LayoutMapError(
                f"{self._path} keeps no figures of a search",
                why=f"it is no JSON of version {VERSION} of that form",
                fix="name another file for cache=, or delete it",
            )
        return fields["figures"]

    def around(self, evaluate: Evaluate) -> Evaluate:
        """The same function, which is asked only for maps whose figures are not in the file."""

        def evaluate_once(layout_map: RuleSet) -> Figures:
            key = hashlib.sha256(layout_map.to_yaml().encode()).hexdigest()[:16]
            known = self._mine.get(key)
            if known is None:
                found = evaluate(layout_map)
                self._mine[key] = [found.seconds, found.peak_bytes, found.serial_seconds]
                return found
            return Figures(float(known[0]), int(known[1]), float(known[2]))

        return evaluate_once

    def write(self) -> None:
        """Write the file: all of it, or nothing."""
        text = json.dumps({"version": VERSION, "figures": self._all}, indent=1)
        new = f"{self._path}.{os.getpid()}.new"
        with open(new, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(new, self._path)
