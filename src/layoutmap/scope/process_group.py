"""Exchange texts and arrays between the processes of a mesh, and check that they act consistently.

A computation on a mesh of several processes is right only if all processes compute parts of the same program. If they
differ, a collective waits forever or returns wrong numbers. So the processes compare options, plans, and initializers
before the computation. All processes call each check with their own values, and it raises in all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from layoutmap.core.errors import CheckpointError, PlanError, ScopeError
from layoutmap.core.mesh import Mesh
from layoutmap.engines import Engine
from layoutmap.engines.agreement import (
    Gather,
    NamedText,
    Result,
    call_and_share_errors,
    check_same_texts,
    find_first_text_difference,
    format_text_difference,
    gather_texts,
    gather_unequal_texts_and_checksums,
    map_process_names_to_texts,
)
from layoutmap.plan.diff import diff_plans
from layoutmap.plan.json import compute_fingerprint, plan_from_json, plan_to_json
from layoutmap.plan.table import PlanTable


class MeshProcesses:
    """The processes that have devices of a mesh, for exchanging values between them.

    Args:
        engine: The engine of the arrays.
        mesh: The mesh; `None`: only this process.

    Attributes:
        process_index: The position of this process among the processes of the mesh.
        devices_by_process: For each process, the positions of its devices in the mesh.
    """

    def __init__(self, engine: Engine, mesh: Mesh | None):
        self._engine = engine
        self._mesh = mesh
        self.process_index = 0
        self.devices_by_process: list[tuple[int, ...]] = [tuple(range(mesh.size)) if mesh is not None else ()]
        bound = None if mesh is None else engine.bind_mesh(mesh)
        if bound is not None and 0 < len(bound.local_device_ids) < bound.size:
            own_ids = json.dumps(bound.local_device_ids)
            texts = gather_texts(own_ids, self.gather_from_processes)
            self.devices_by_process = [tuple(json.loads(text)) for text in texts]
            self.process_index = texts.index(own_ids)

    @property
    def num_processes(self) -> int:
        """Number of processes with devices of the mesh."""
        return len(self.devices_by_process)

    @property
    def has_other_processes(self) -> bool:
        """Whether other processes have devices of the mesh, too."""
        return self.num_processes > 1

    def gather_from_processes(self, values: Any) -> Any:
        """Return the numpy values of all processes, stacked with one row per process. All processes must call this."""
        assert self._mesh is not None
        return self._engine.gather_from_processes(values, self._mesh)

    def gather_text(self, text: str) -> list[str]:
        """Return the texts of all processes in order. All processes must call this."""
        return gather_texts(text, self.gather_from_processes) if self.has_other_processes else [text]

    def gather_texts_if_different(self, text: str) -> Sequence[str]:
        """Return the texts of all processes if they differ, else an empty sequence. All processes must call this."""
        return (
            gather_unequal_texts_and_checksums(text, self.gather_from_processes)[0]
            if self.has_other_processes
            else []
        )

    def run_in_all_processes(self, function: Callable[[], Result], verb: str = "load") -> Result:
        """Call a function in each process, and return its result here. If it raises in one process, raise in all."""
        if not self.has_other_processes:
            return function()
        return call_and_share_errors(function, self.gather_from_processes, verb)

    def run_in_first_process(self, function: Callable[[], list[str]]) -> list[str]:
        """Call a function only in process 0, and return its texts in all processes. If it raises, raise in all."""
        texts = self.run_in_all_processes(lambda: function() if self.process_index == 0 else [], "save")
        return json.loads(self.gather_text(json.dumps(texts))[0])


def check_same_options(options: str, gather: Gather) -> None:
    """Raise a `ScopeError` in all processes if their options for a scope, or the errors in these options, differ."""
    texts, _ = gather_unequal_texts_and_checksums(options, gather)
    if texts:
        raise ScopeError(
            "the processes open this scope with different options",
            facts=map_process_names_to_texts(texts),
            why="the options decide what each process computes, and all must compute parts of the same "
            "program",
            fix="pass the same options in all processes",
        )


def check_same_plans(
    plan: PlanTable,
    gather: Gather,
    *,
    strict: bool = False,
    rules: str = "",
    versions: Iterable[NamedText] = (),
) -> None:
    """Raise a `PlanError` in all processes if their plans, problems, rules, or versions differ."""
    refusal = ""
    try:
        plan.check(strict=strict)
    except PlanError as error:
        refusal = str(error)
    devices = ", ".join(plan.mesh.devices or ())
    own_parts = [
        *versions,
        ("plan", f"{compute_fingerprint(plan)} {devices}"),
        ("problems", refusal),
        ("rules", rules),
    ]
    found = find_first_text_difference(own_parts, gather)
    if found is None:
        return
    name, texts = found
    plans = [plan_from_json(text) for text in gather_texts(plan_to_json(plan), gather)]
    refusals = [text.partition("\n")[0] for text in gather_texts(refusal, gather)]
    orders = gather_texts(devices, gather)
    other = next(i for i, text in enumerate(texts) if text != texts[0])
    if name == "problems":
        raise PlanError(
            "the processes find different problems in the same plan",
            facts=map_process_names_to_texts([text or "no problem" for text in refusals]),
            why="their rules or models differ, although all variables have the same layouts",
            fix="use the same layout map and model in all processes",
        )
    difference = diff_plans(plans[0], plans[other])
    same = "no difference" if orders[0] == orders[other] else f"{orders[0]}\n{orders[other]}"
    what = f"process {other} has a different plan from process 0"
    raise PlanError(
        what if name == "plan" else format_text_difference(name, texts),
        facts={f"from process 0 to {other}": str(difference) if difference else same},
        why="each process holds a part of one model, so all must build the same model with the same rules",
        fix="use the same layout map, library releases, and model in all processes",
    )


def check_same_initializers(recipes: Iterable[tuple[str, str]], gather: Gather) -> None:
    """Raise a `ScopeError` if processes would initialize their shards of a variable differently.

    Args:
        recipes: For each variable in order, its path and a text that determines its initial value.
        gather: Returns the numpy values of all processes, stacked.
    """
    check_same_texts(
        recipes,
        gather,
        "the processes initialize it in different ways",
        why="each process initializes its own shards, which would come from different values",
        fix="create the same model in all processes, with the same arguments of initializers, and set "
        "the same seed before",
    )


def check_same_save_arguments(named_texts: Iterable[tuple[str, str]], gather: Gather) -> None:
    """Raise a `CheckpointError` if the processes save with different arguments.

    Args:
        named_texts: The arguments and variables of the save in order, each as a name or path and a text to compare.
        gather: Returns the numpy values of all processes, stacked.
    """
    if (found := find_first_text_difference(named_texts, gather)) is not None:
        raise CheckpointError(
            f"{found[0]}: the processes save with different arguments",
            facts=map_process_names_to_texts(found[1]),
            why="each process writes its shards of one step",
            fix="pass the same directory, step, metadata, model and optimizer in all processes",
        )
