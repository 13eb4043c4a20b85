"""Exchange texts and arrays between the processes of a program, and check that they act consistently.

A computation on a mesh of several processes is right only if each of them does its part of the same thing. Where they
differ, a collective waits forever or returns wrong numbers. So what decides the computation is compared before it. Each
check is called by all processes, with their own values, and raises in all of them.
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
    Part,
    Result,
    check_alike,
    check_equal,
    describe_difference,
    find_difference,
    gather_texts,
    label_processes,
    run_together,
)
from layoutmap.plan.diff import diff_plans
from layoutmap.plan.json import compute_fingerprint, plan_from_json, plan_to_json
from layoutmap.plan.table import PlanTable


class Group:
    """The processes that have devices of a mesh.

    Args:
        engine: The engine of the arrays.
        mesh: Their mesh; `None`: only this process.

    Attributes:
        number: The number of this process among them.
        devices: For each process, the numbers of its devices in the mesh.
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
        """Number of processes."""
        return len(self.devices)

    @property
    def has_others(self) -> bool:
        """Whether there are other processes."""
        return self.count > 1

    def gather(self, values: Any) -> Any:
        """Gather numpy values, with one row per process. All processes must call this."""
        assert self._mesh is not None
        return self._engine.all_gather(values, self._mesh)

    def texts(self, text: str) -> list[str]:
        """Gather a text from each process. All processes must call this."""
        return gather_texts(text, self.gather) if self.has_others else [text]

    def find_differences(self, text: str) -> Sequence[str]:
        """Return the text of each process if they differ, else nothing. All processes must call this."""
        return check_alike(text, self.gather)[0] if self.has_others else []

    def agreed(self, function: Callable[[], Result], verb: str = "load") -> Result:
        """Call a function in each process, and raise in all processes if it raises in one."""
        return run_together(function, self.gather, verb) if self.has_others else function()

    def first(self, function: Callable[[], list[str]]) -> list[str]:
        """Call a function in process 0, and return its texts in all processes, or raise in all."""
        texts = self.agreed(lambda: function() if self.number == 0 else [], "save")
        return json.loads(self.texts(json.dumps(texts))[0])


def check_options(options: str, gather: Gather) -> None:
    """Raise a `ScopeError` if processes open a scope with different or invalid options."""
    texts, _ = check_alike(options, gather)
    if texts:
        raise ScopeError(
            "the processes open this scope with different options",
            facts=label_processes(texts),
            why="the options decide what each process computes, and all must compute parts of the same "
            "program",
            fix="pass the same options in all processes",
        )


def check_plans(
    plan: PlanTable,
    gather: Gather,
    *,
    strict: bool = False,
    rules: str = "",
    versions: Iterable[Part] = (),
) -> None:
    """Raise a `PlanError` if the processes have different plans or different problems."""
    refusal = ""
    try:
        plan.check(strict=strict)
    except PlanError as error:
        refusal = str(error)
    devices = ", ".join(plan.mesh.devices or ())
    own = [
        *versions,
        ("plan", f"{compute_fingerprint(plan)} {devices}"),
        ("problems", refusal),
        ("rules", rules),
    ]
    found = find_difference(own, gather)
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
            facts=label_processes([text or "no problem" for text in refusals]),
            why="their rules or models differ, although all variables have the same layouts",
            fix="use the same layout map and model in all processes",
        )
    difference = diff_plans(plans[0], plans[other])
    same = "no difference" if orders[0] == orders[other] else f"{orders[0]}\n{orders[other]}"
    what = f"process {other} has a different plan from process 0"
    raise PlanError(
        what if name == "plan" else describe_difference(name, texts),
        facts={"from 0 to it": str(difference) if difference else same},
        why="each process holds a part of one model, so all must build the same model with the same rules",
        fix="use the same layout map, library releases, and model in all processes",
    )


def check_recipes(recipes: Iterable[tuple[str, str]], gather: Gather) -> None:
    """Raise a `ScopeError` if processes would initialize their shards of a variable differently.

    Args:
        recipes: A variable's path, and the text that determines its first value, for each variable in order.
        gather: Gathers from all processes.
    """
    check_equal(
        recipes,
        gather,
        "the processes initialize it in different ways",
        why="each process initializes its own shards, which would come from different values",
        fix="create the same model in all processes, with the same arguments of initializers, and set "
        "the same seed before",
    )


def check_saves(named_texts: Iterable[tuple[str, str]], gather: Gather) -> None:
    """Raise a `CheckpointError` if the processes save with different arguments.

    Args:
        named_texts: What decides what is saved and where: its name, or a variable's path, and a text, in order.
        gather: Gathers from all processes.
    """
    if (found := find_difference(named_texts, gather)) is not None:
        raise CheckpointError(
            f"{found[0]}: the processes save with different arguments",
            facts=label_processes(found[1]),
            why="each process writes its shards of one step",
            fix="pass the same directory, step, metadata, model and optimizer in all processes",
        )
