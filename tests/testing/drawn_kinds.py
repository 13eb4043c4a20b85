"""What drawn models consist of, counted alike for each library."""

import random
from collections import Counter
from itertools import combinations

import hypothesis

from layoutmap.core.variables import Kind
from layoutmap.testing import models

LAYOUTS = ((0, 0), (1, 1), (2, 2), (2, 1))  # over how many dims weights are sharded, and along how many axes


def counted(kinds_of_models):
    """How many models have each kind, and each pair of kinds."""
    kinds, pairs = Counter(), Counter()
    for found in kinds_of_models:
        kinds.update(found)
        pairs.update(combinations(sorted(found), 2))
    return kinds, pairs


def pairs_not_drawn(kinds, pairs):
    return [pair for pair in combinations(sorted(kinds), 2) if not pairs[pair]]


def layouts_not_drawn(cases, kinds_by_path):
    """The kinds that have no weight of several axes in one of the layouts."""
    found = Counter()
    for case in cases:
        by_path = kinds_by_path(case.model)
        for assignment in case.plan().assignments:
            variable, layout = assignment.variable, assignment.layout
            of = [kind for path, kind in by_path.items() if f"{variable.path}.".startswith(f"{path}.")]
            if of and variable.kind is Kind.WEIGHT and len(variable.shape) > 1:
                dims = [layout.list_mesh_dims(axis) for axis in range(layout.rank)]
                found[of[0], (sum(map(len, dims)), sum(map(bool, dims)))] += 1
    kinds = {kind for kind, _ in found}
    return [(kind, layout) for kind in kinds for layout in LAYOUTS if not found[kind, layout]]


def smallest_with(kind, library, max_examples):
    """A small model with this kind: found with one seed, since Hypothesis may give up early with another."""
    return hypothesis.find(
        models.models(library),
        lambda model: kind in model.layer_kinds,
        settings=hypothesis.settings(max_examples=max_examples, database=None),
        random=random.Random(0),
    )
