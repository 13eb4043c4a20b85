"""What holds for any library of which several processes save a model, and another number of them goes on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import several_processes


def chain(
    worker: Path, folder: Path, stages: Sequence[tuple[int, str]], environment: Any
) -> list[list[dict[str, Any]]]:
    """What the processes of each stage told; a stage is how many there are, and their mesh."""
    told: list[list[dict[str, Any]]] = []
    for number, (size, mesh) in enumerate(stages):
        (port,) = several_processes.free_ports(1)
        out = folder / f"stage-{number}"
        out.mkdir()
        arguments = [str(port), str(size), str(folder / "run" / "steps"), str(number), mesh]
        results = several_processes.run(worker, out, [environment(size)] * size, *arguments)
        told.append([each for each, _ in results])
    return told


class Laws:
    """What holds for any library: a class of tests has this for its base, and says how its library is run."""

    worker: Path
    stages: Sequence[tuple[int, str]]

    @classmethod
    def environment(cls, num_processes):
        """The environment of each process, where so many are started."""
        return {}

    def plain_losses(self, count):
        """The losses of the model on one device, without a layout."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def told(cls, tmp_path_factory):
        """What the processes of three stages told: two of them, then one, then four."""
        return chain(cls.worker, tmp_path_factory.mktemp("chain"), cls.stages, cls.environment)

    def test_training_goes_on_as_on_one_device(self, told):
        """Over stages of two processes, one and four, with meshes of their own, losses are those of one plain model."""
        losses = [loss for stage in told for loss in stage[0]["losses"]]
        for stage in told:
            for each in stage:
                assert stage[0]["losses"] == each["losses"]
        np.testing.assert_allclose(losses, self.plain_losses(len(losses)), rtol=1e-4)

    def test_a_process_reads_what_its_shards_need(self, told):
        """Loaded into a mesh of another shape, a process reads at most a twentieth more than its shards have."""
        for stage in told[1:]:
            for each in stage:
                assert each["needed"] <= each["read"] <= 1.05 * each["needed"]

    def test_states_of_processes(self, told):
        """As many processes get their own states, another number those that all had, and no process that of another."""
        for number, each in enumerate(told[0]):
            assert [10 + number, random.Random(number).random()] == each["own"]
        for number, stage in enumerate(told[1:]):
            for each in stage:
                assert 5 + number == each["common"]
                assert np.random.RandomState(7).random_sample() == each["numpy"]
                assert "data['own']: each process saved its own state" in each["refused"]

    def test_a_chunk_that_one_process_reads_fails_all(self, told):
        """A flipped bit in a chunk that only the last process needs is an error in all, for new models and old ones."""
        for stage in told[1:]:
            first, last = stage[0], stage[-1]
            for each in stage:
                for text in each["damaged"]:
                    assert "its values differ from the saved ones" in text
            for text in last["damaged"]:
                assert text.splitlines()[0].endswith("its values differ from the saved ones")
            for text in first["damaged"] if first is not last else ():
                assert f"process {len(stage) - 1}" in text
