"""Several processes save a model, another number of them loads it and trains on: for any engine.

What the processes do is in `Worker.work`; what holds for them, in `chain_laws`.
"""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import layoutmap as lm
from layoutmap.checkpoint.reader import StepSource
from layoutmap.checkpoint.storage import LocalStorage
from layoutmap.core.errors import CheckpointError
from layoutmap.engines import get_engine
from layoutmap.saving import load as loading

RULES = {
    r"middle\.(weight|kernel)": ("model", "batch"),
    r"(up|down)\.(weight|kernel)": ("model", None),
    r"up\.bias": ("model",),
}
STEPS = 2  # of training, in each stage


def BATCH(step: int) -> Any:
    return np.random.default_rng(step).normal(size=(8, 8)).astype("float32")


class Loader:
    """An iterator over data that knows where it is."""

    def __init__(self, place: int = 0):
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]


class Worker:
    """One process of a stage.

    Args:
        engine: The name of the engine.
        number: The number of this process.
        size: How many there are.
        folder: Where to write what this tells.
        directory: Where checkpoints are.
        stage: The number of the stage.
        mesh: The mesh of the stage.
    """

    def __init__(
        self, engine: str, number: int, size: int, folder: Path, directory: str, stage: str, mesh: str
    ):
        warnings.simplefilter("ignore", lm.LayoutMapWarning)
        self.engine, self.number, self.size, self.folder = get_engine(engine), number, size, folder
        self.directory, self.stage = Path(directory), int(stage)
        self.layout_map = lm.LayoutMap(lm.create_mesh(mesh, engine=engine), RULES)
        self.seed = 0

    def make_model(self) -> Any: ...

    def make_optimizer(self, model: Any) -> Any: ...

    def train(self, model: Any, optimizer: Any, steps: range) -> list[float]: ...

    def arrays(self, model: Any, optimizer: Any) -> dict[Any, Any]: ...

    def barrier(self) -> None:
        self.engine.gather_from_processes(np.zeros(1), self.layout_map.mesh)

    def work(self) -> None:
        told: dict[str, Any] = {}
        own, common = Loader(), Loader(5)
        random.seed(self.number)
        np.random.seed(7)  # noqa: NPY002
        build: dict[str, Any] = {"batch_dim": "batch", "library": self.engine.name}
        options = {"layout_map": self.layout_map, **build}
        directory_of_own = self.directory.parent / "own"
        if self.stage == 0:
            model = self.layout_map.build(self.make_model, **build)
            optimizer = self.make_optimizer(model)
            own.place = 10 + self.number
            lm.save(model, directory_of_own, data={"own": own})
            own.place = 0
            random.seed(55)
            lm.load(model, directory_of_own, data={"own": own})
            told["own"] = [own.place, random.random()]
        else:
            self.seed = 99  # what is made here is made otherwise, and then read
            np.random.seed(99)  # noqa: NPY002
            common.place = 0
            opened: list[Any] = []
            open_checkpoint_source = loading.open_checkpoint_source

            def noted(*args: Any) -> Any:
                opened.append(open_checkpoint_source(*args))
                return opened[-1]

            loading.open_checkpoint_source = noted
            model, optimizer = lm.load(
                self.make_model,
                self.directory,
                optimizer=self.make_optimizer,
                data={"common": common},
                **options,
            )
            told["read"] = opened[-1].bytes_read
            told["needed"] = self.bytes_here(model, optimizer)
            told["numpy"] = np.random.random()  # noqa: NPY002
            told["common"] = common.place
            told["refused"] = self.refusal(
                lambda: lm.load(self.make_model, directory_of_own, data={"own": own}, **options)
            )
            told["damaged"] = self.damaged(model, options)
        steps = range(STEPS * self.stage, STEPS * (self.stage + 1))
        told["losses"] = self.train(model, optimizer, steps)
        np.random.seed(7)  # noqa: NPY002
        common.place = 5 + self.stage
        lm.save(model, self.directory, step=self.stage, optimizer=optimizer, data={"common": common})
        (self.folder / f"{self.number}.json").write_text(json.dumps(told))

    def bytes_here(self, model: Any, optimizer: Any) -> int:
        """The bytes of the shards that this process holds, each once."""
        arrays = self.arrays(model, optimizer).values()
        return sum(values.nbytes for array in arrays for _, values in self.engine.iterate_shards(array))

    def refusal(self, function: Any) -> str:
        try:
            function()
        except CheckpointError as error:
            return str(error)
        return ""

    def damaged(self, model: Any, options: Mapping[str, Any]) -> list[str]:
        """What each process says if a chunk is damaged that only the last of them reads."""
        copy = self.directory.parent / f"damaged-{self.stage}"
        if self.number == 0:
            step = sorted(self.directory.iterdir())[-1]
            shutil.copytree(step, copy / step.name)
            saved = StepSource(LocalStorage(copy))
            (path,) = [path for path in saved.variables if path in ("middle.weight", "middle.kernel")]
            chunk = max(saved.manifest.chunks[path], key=lambda c: tuple(part.start for part in c.index))
            file = copy / step.name / saved.manifest.files[chunk.file].name
            data = bytearray(file.read_bytes())
            data[chunk.start] ^= 1
            file.write_bytes(data)
        self.barrier()
        return [
            self.refusal(lambda: lm.load(self.make_model, copy, **options)),
            self.refusal(lambda: lm.load(model, copy)),
        ]


# -- in a test
