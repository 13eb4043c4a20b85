"""Find the weights of experts in a plan, stacked in one array or in lists, and their routers."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from layoutmap.core.variables import Assignment

_ROUTER = re.compile(r"(^|[._])(router|gate)(\.[^.]+)?$")


class ExpertWeightIds(NamedTuple):
    """The ids of the assignments of stacked expert weights, of experts' weights in lists, and of their routers."""

    stacks: Set[int]
    listed: Set[int]
    routers: Set[int]


def find_expert_weights(weights: Sequence[Assignment]) -> ExpertWeightIds:
    """Find the stacked weights of experts, those in lists, and the kernels of their routers.

    A router has the axes (features, experts), or in the other order as its use or its name shows. Beside it are two
    stacks or more. The first axis of each is that of the experts, and another one has the size of the features.
    """
    stacks: dict[tuple[str, str, int], list[Assignment]] = defaultdict(list)
    for a in weights:
        if len(a.variable.shape) > 1 and a.variable.use is None:
            layer = a.variable.path.rpartition(".")[0]
            for module in {layer, layer.rpartition(".")[0]}:  # equal for an array in the root
                stacks[a.variable.model, module, a.variable.shape[0]].append(a)
    found, routers = set[int](), set[int]()
    for a in weights if stacks else ():
        v = a.variable
        is_bias = v.use is not None and not any(role.startswith("in") for role in v.use.roles)
        if len(v.shape) != 2 or is_bias:
            continue
        # Norms of stacked layers also have the axes (layers, features). So a weight of unknown use with the axes
        # (experts, features) must have the name of a router.
        orders = (v.shape, v.shape[::-1])[: 1 + bool(v.use is None and _ROUTER.search(v.path))]
        if v.use and v.use.roles[0].startswith("out"):
            orders = (v.shape[::-1],)
        layer = v.path.rpartition(".")[0]
        for (features, count), module in itertools.product(orders, (layer, layer.rpartition(".")[0])):
            members = [each for each in stacks.get((v.model, module, count), ()) if each is not a]
            kernels = [each for each in members if len(each.variable.shape) == 3]
            if len(kernels) > 1 and all(features in each.variable.shape[1:] for each in kernels):
                found |= {id(each) for each in members}
                routers.add(id(a))
    listed = set[int]()
    for router, members in _iterate_expert_lists(weights):
        routers.add(id(router))
        listed.update(map(id, members))
    return ExpertWeightIds(found - routers, listed, routers)


def _iterate_expert_lists(weights: Sequence[Assignment]) -> Iterator[tuple[Assignment, Sequence[Assignment]]]:
    """Yield the kernel of each router, by its name, with the weights of a list beside it with one expert per output."""
    routers: dict[tuple[str, str], list[Assignment]] = defaultdict(list)
    for a in weights:
        if len(a.variable.shape) == 2 and (match := _ROUTER.search(a.variable.path)):
            module = a.variable.path[: match.end(2)].rpartition(".")[0]
            routers[a.variable.model, module].append(a)
    lists: dict[tuple[str, str, str], dict[str, list[Assignment]]] = defaultdict(lambda: defaultdict(list))
    for a in weights if routers else ():
        parts = a.variable.path.split(".")
        for n, number in enumerate(parts[1:-1], 1):
            if number.isdigit():
                lists[a.variable.model, ".".join(parts[: n - 1]), parts[n - 1]][number].append(a)
    for (model, module, _), experts in lists.items():
        for router in routers.get((model, module), ()):
            shape, use = router.variable.shape, router.variable.use
            outs = (
                [n for n, role in zip(shape, use.roles, strict=True) if role.startswith("out")]
                if use
                else shape
            )
            if 1 < len(experts) in outs:
                yield router, [each for members in experts.values() for each in members]
