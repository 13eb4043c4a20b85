"""Two processes that do not do the same: what each case does, run by a worker of a framework, and what must come of it.

A worker runs all cases one after the other, since processes start slowly. What a case ends in, an error or the bits
that each process holds, is written down and judged by `check`.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layoutmap.checksums import checksum
from layoutmap.engines import get_engine
from layoutmap.errors import LayoutMapError


def held(engine: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The checksum of each shard that this process holds, and of the gathered array, by name."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        shards = {
            str([(part.start, part.stop) for part in index]): checksum(values)
            for index, values in get_engine(engine).to_shards(array)
        }
        found[name] = shards | {"gathered": checksum(get_engine(engine).whole(array))}
    return found


def run(cases: Mapping[str, Callable[[], Any]], number: int, folder: Path) -> None:
    """Run all cases in this process, and write what came of them."""
    told = {}
    for name, case in cases.items():
        try:
            told[name] = {"held": case()}
        except LayoutMapError as error:
            told[name] = {"error": str(error)}
        except Exception:
            told[name] = {"failed": traceback.format_exc()}
    (folder / f"{number}.json").write_text(json.dumps(told))
    np.savez(folder / f"{number}.npz")


def check(told: Sequence[Mapping[str, Any]], expected: str | None) -> None:
    """Fail unless both processes raise an error with this text; or hold equal values where it is `None`."""
    if expected is not None:
        assert [True, True] == [expected in each.get("error", "") for each in told], told
        return
    for each in told:
        assert {"held"} == set(each), each
    for name, shards in told[0]["held"].items():
        both = shards.keys() & told[1]["held"][name].keys()
        assert {key: shards[key] for key in both} == {key: told[1]["held"][name][key] for key in both}
