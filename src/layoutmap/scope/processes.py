"""Agreement: what the processes of one program must do alike, and the errors where they do not.

A computation on a mesh of several processes is right only if each of them does its part of the
same thing. Where they differ, a collective waits for ever or returns wrong numbers. So what decides
what they do is compared before they do it.

All processes must call the same check, each with its own values and a `gather` that gathers from all. Where they
differ, it raises in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from layoutmap.core.errors import CheckpointError, PlanError, ScopeError
from layoutmap.engines.agreement import (
    Gather,
    Part,
    check_alike,
    check_equal,
    describe_difference,
    differing_name,
    gather_texts,
    of_processes,
)
from layoutmap.plan.diff import diff_plans
from layoutmap.plan.json import fingerprint, plan_from_json, plan_to_json
from layoutmap.plan.table import PlanTable


def check_options(options: str, gather: Gather) -> None:
    """Raise a `ScopeError` if the processes open a scope with different options, or some with none that can be used."""
    texts, _ = check_alike(options, gather)
    if texts:
        raise ScopeError(
            "the processes open this scope with different options",
            facts=of_processes(texts),
            why="the options decide what each process computes, and all must do their part of the same computation",
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
    """Raise a `PlanError` if the processes have other plans, or some would refuse theirs and others would not.

    Args:
        plan: The plan of this process; it may have problems.
        gather: Gathers from all processes.
        strict: Whether what is only worth a warning is an error.
        rules: The rules that the plan follows from.
        versions: The releases of the libraries that compute.
    """
    refusal = ""
    try:
        plan.check(strict=strict)
    except PlanError as error:
        refusal = str(error)
    devices = ", ".join(plan.mesh.devices or ())
    own = [*versions, ("plan", f"{fingerprint(plan)} {devices}"), ("problems", refusal), ("rules", rules)]
    found = differing_name(own, gather)
    if found is None:
        return
    name, texts = found
    plans = [plan_from_json(text) for text in gather_texts(plan_to_json(plan), gather)]
    refusals = [text.partition("\n")[0] for text in gather_texts(refusal, gather)]
    orders = gather_texts(devices, gather)
    other = next(i for i, text in enumerate(texts) if text != texts[0])
    if name == "problems":
        raise PlanError(
            "the processes find different problems in one plan",
            facts=of_processes([text or "no problem" for text in refusals]),
            why="they have different rules or models, though all variables have the same layouts",
            fix="give all processes the same layout map, and make the same model in each",
        )
    difference = diff_plans(plans[0], plans[other])
    same = "no difference" if orders[0] == orders[other] else f"{orders[0]}\n{orders[other]}"
    what = f"process {other} has a different plan from process 0"
    raise PlanError(
        what if name == "plan" else describe_difference(name, texts),
        facts={"from 0 to it": str(difference) if difference else same},
        why="each process holds its part of one model, so all must build the same model by the same rules",
        fix="give all processes the same layout map and the same releases, and make the same model in each",
    )


def check_recipes(recipes: Iterable[tuple[str, str]], gather: Gather) -> None:
    """Raise a `ScopeError` if the processes would initialize variables in different ways, each its own shards of them.

    Args:
        recipes: A variable's path, and the text that determines its first value, for each variable in order.
        gather: Gathers from all processes.
    """
    check_equal(
        recipes,
        gather,
        "the processes initialize it in different ways",
        why="each process initializes its own shards, which would then not fit together",
        fix="make the same model in all processes, with the same arguments of initializers, and seed them alike "
        "before it is made",
    )


def check_saves(named_texts: Iterable[tuple[str, str]], gather: Gather) -> None:
    """Raise a `CheckpointError` if the processes save with different arguments.

    Args:
        named_texts: What decides what is saved and where: its name, or a variable's path, and a text, in order.
        gather: Gathers from all processes.
    """
    if (found := differing_name(named_texts, gather)) is not None:
        raise CheckpointError(
            f"{found[0]}: the processes save with different arguments",
            facts=of_processes(found[1]),
            why="each process writes its part of one step",
            fix="pass the same directory, step, metadata, model and optimizer in all processes",
        )
