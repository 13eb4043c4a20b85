"""What the processes of one program must do alike, and what is said when they do not.

A computation on a mesh of several processes is right only if each of them does its part of the same thing. Where they
part, a collective waits for ever or gives wrong numbers. So what decides what they do is compared before they do it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from layoutmap.errors import PlanError, ScopeError
from layoutmap.plan import Plan
from layoutmap.plan_json import fingerprint, plan_from_json, plan_to_json

__all__ = ["Gather", "check_alike", "check_plans", "check_values", "tell"]

NumpyArray = npt.NDArray[Any]
Gather = Callable[[NumpyArray], NumpyArray]
"""Gives the values of each process, one row each; all must call it, with values of one shape."""


def tell(text: str, gather: Gather) -> list[str]:
    """What each process says, in order of the processes."""
    own = np.frombuffer(text.encode(), np.uint8)
    lengths = gather(np.array([own.size], np.int64))[:, 0]
    rows = gather(np.pad(own, (0, int(lengths.max()) - own.size)))
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def check_alike(text: str, gather: Gather, checksum: int = 0) -> tuple[Sequence[str], Sequence[int]]:
    """Compare what the processes say.

    What each asks first has the same size whatever it is about, so processes that are about different things find out.

    Args:
        text: What this process says.
        gather: Gathers from all processes.
        checksum: A number that is gathered along, and not compared.

    Returns:
        What the processes say if they do not all say the same, else nothing; and the numbers of all.
    """
    told = gather(np.array([zlib.crc32(text.encode()), checksum], np.uint32))
    return tell(text, gather) if len(np.unique(told[:, 0])) > 1 else [], told[:, 1].tolist()


def check_plans(plan: Plan, gather: Gather) -> None:
    """Raise if the processes have other plans, with what differs.

    Raises:
        PlanError: They have; in all of them.
    """
    if not check_alike(f"{fingerprint(plan)} {plan.mesh.devices}", gather)[0]:
        return
    plans = [plan_from_json(text) for text in tell(plan_to_json(plan), gather)]
    other = next(i for i, each in enumerate(plans) if _key(each) != _key(plans[0]))
    difference = str(plans[0].diff(plans[other]))
    devices = [", ".join(each.mesh.devices or ()) for each in (plans[0], plans[other])]
    raise PlanError(
        f"process {other} has another plan than process 0",
        facts={"from 0 to it": difference if plans[0].diff(plans[other]) else f"{devices[0]}\n{devices[1]}"},
        why="each process holds its part of one model, so all must build the same model by the same rules",
        mend="give all processes the same layout map, and make the same model in each",
    )


def _key(plan: Plan) -> tuple[str, Any]:
    return fingerprint(plan), plan.mesh.devices


def check_values(values: Mapping[str, Any], gather: Gather) -> None:
    """Raise if values that each process has for itself are not the same in all of them.

    Args:
        values: Arrays by path; the same paths in all processes, in one order.
        gather: Gathers from all processes.

    Raises:
        ScopeError: They differ; in all of them.
    """
    if not values:
        return
    own = [zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data) for value in values.values()]
    everyone = gather(np.array(own, np.uint32))
    differ = [path for path, column in zip(values, everyone.T, strict=True) if len(np.unique(column)) > 1]
    if differ:
        raise ScopeError(
            f"{differ[0]}: the processes have different values of it",
            facts={"variables": ", ".join(differ[:10])},
            why="it was made in each process for itself, and devices of all would hold parts of different values",
            mend="give all processes the same seed before it is made, or load the same file in all of them",
        )
