"""The processes that save or load a model together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from layoutmap.core.mesh import Mesh
from layoutmap.engines import Engine
from layoutmap.engines.agreement import Result, agreed, check_alike, gather_texts


class Group:
    """The processes that have devices of a mesh.

    Args:
        engine: What holds the arrays.
        mesh: Their mesh; `None`: this process is alone.

    Attributes:
        number: The number of this process among them.
        devices: The numbers of the mesh's devices that each of them has.
    """

    def __init__(self, engine: Engine, mesh: Mesh | None):
        self._engine = engine
        self._mesh = mesh
        self.number = 0
        self.devices: list[tuple[int, ...]] = [tuple(range(mesh.size)) if mesh is not None else ()]
        bound = None if mesh is None else engine.bind(mesh)
        if bound is not None and 0 < len(bound.local_device_ids) < bound.size:
            own = json.dumps(bound.local_device_ids)
            texts = gather_texts(own, self.gather)
            self.devices = [tuple(json.loads(text)) for text in texts]
            self.number = texts.index(own)

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.devices)

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.count > 1

    def gather(self, values: Any) -> Any:
        """The numpy values of each process, one row each; they must all ask."""
        assert self._mesh is not None
        return self._engine.all_gather(values, self._mesh)

    def texts(self, text: str) -> list[str]:
        """The text of each process; they must all ask."""
        return gather_texts(text, self.gather) if self.several else [text]

    def different(self, text: str) -> Sequence[str]:
        """The text of each process if they differ, else nothing; they must all ask."""
        return check_alike(text, self.gather)[0] if self.several else []

    def agreed(self, function: Callable[[], Result], verb: str = "load") -> Result:
        """The result of a function that each process calls by itself; where it raises in one it raises in all.

        Args:
            function: Exchanges nothing with other processes.
            verb: What it is part of, for messages: `"load"` or `"save"`.

        Raises:
            CheckpointError: It raised in another process.
        """
        return agreed(function, self.gather, verb) if self.several else function()

    def first(self, function: Callable[[], list[str]]) -> list[str]:
        """The texts that a function returns in the first process as it saves; raises in all if it does there."""
        texts = self.agreed(lambda: function() if self.number == 0 else [], "save")
        return json.loads(self.texts(json.dumps(texts))[0])
