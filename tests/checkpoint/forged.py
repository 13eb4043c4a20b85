"""Manifests that somebody has changed, and given the right checksum."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layoutmap.checkpoint.manifest import NAME, compute_xxh3

Place = tuple[str | int, ...]

DEEP = "\0deep"
"""Stands for lists within lists, 200,000 of them: more than JSON can be written of."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 0.5, 2.0, 1e308, 1e-9),
    *(
        "",
        "\0",
        "a\0b",
        "..",
        "../x",
        "/etc/hostname",
        "x" * 5000,
        "\ud800",
        "model",
        "float32",
        "int4",
        "weight",
    ),
    *("object", "V8", "f4,f4", "(2,)f4", "finfo", "key<fry>", "complex128", DEEP),
    *(
        [],
        [[]],
        [None],
        ["model"],
        ["model", "model"],
        [0],
        [0, 0],
        [[0, 0]],
        [[0, 1]],
        [-1],
        [0.5],
        [[0, 10**30]],
    ),
    *(
        {},
        {"x": 0},
        {"": None},
        {"model": 2},
        {"model": -1},
        {"model": 1.5},
        {"__float__": "x"},
        {"__float__": "nan"},
    ),
    *({"__bytes__": "?"}, {"__tuple__": 1}, {"__items__": [[[], 1]]}, {"__items__": 5}, {"__counter__": 3}),
    *(
        {"__array__": "AAAA", "dtype": "float32", "shape": [1]},
        {"__array__": "AAAAAA==", "dtype": "object", "shape": [1]},
    ),
    {"__array__": "AAAAAA==", "dtype": "float32", "shape": [10**30]},
)


def manifest_in(step: Path) -> Any:
    """The manifest of a step's folder, without its checksum."""
    found = json.loads((step / NAME).read_bytes())
    del found["checksum"]
    return found


def write_manifest(step: Path, found: Any) -> None:
    """Write a manifest with the right checksum."""
    text = json.dumps(found).replace(json.dumps(DEEP), "[" * 200_000 + "]" * 200_000)
    body = text[1:].encode()
    (step / NAME).write_bytes(f'{{"checksum": "xxh3_64:{compute_xxh3(body)}",\n'.encode() + body)


def put(found: Any, place: Place, value: Any) -> None:
    """Change what a manifest has at a place."""
    *way, last = place
    for part in way:
        found = found[part]
    found[last] = value


def places(found: Any, begin: Place = ()) -> Iterator[Place]:
    """Each place in a manifest, whatever is there."""
    parts = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for name, value in parts:
        yield (*begin, name)
        yield from places(value, (*begin, name))


def forged(found: Any, seed: int) -> tuple[str, Any]:
    """A manifest with one to three changes, and what they are."""
    rng = random.Random(seed)
    result, said = copy.deepcopy(found), list[str]()
    for _ in range(rng.choice((1, 1, 2, 3))):
        every = list(places(result))
        # Each depth as likely as the others: most places are ends of chunks.
        depth = rng.choice(sorted({len(place) for place in every}))
        place = rng.choice([each for each in every if len(each) == depth])
        *way, last = place
        inner: Any = result
        for part in way:
            inner = inner[part]
        old = inner[last]
        kind = rng.choice(("value", "value", "other", "out", "twice", "wrapped", "nudged", "nudged"))
        said.append(f"{kind} {place}")
        if kind == "out":
            del inner[last]
        elif kind == "twice" and isinstance(inner, list):
            inner.insert(int(last), copy.deepcopy(old))
        elif kind == "other":
            other: Any = result
            for part in rng.choice(every):
                other = other[part]
            inner[last] = copy.deepcopy(other)
        elif kind == "wrapped":
            inner[last] = [old]
        elif kind == "nudged" and isinstance(old, int):
            inner[last] = old + rng.choice((-64, -4, -1, 1, 4, 64))
        elif kind == "nudged" and isinstance(old, str):
            inner[last] = old + "x"
        else:
            inner[last] = rng.choice(VALUES)
            said[-1] += f" {inner[last]!r:.60}"
    return ", ".join(said), result
