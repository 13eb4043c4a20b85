"""Two processes that do not do the same: what each case does, run by a worker of a framework, and what must come of it.

A worker runs all cases one after the other, since processes start slowly. What a case ends in, an error or the bits
that each process holds, is written down, and `outcomes` reads it.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from layoutmap.core.checksums import compute_checksum
from layoutmap.core.errors import LayoutMapError
from layoutmap.engines import get_engine

AGREE = "replicas agree bit for bit"


def held(engine: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The checksum of each shard that this process holds, and of the gathered array, by name."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        shards = {
            str([(part.start, part.stop) for part in index]): compute_checksum(values)
            for index, values in get_engine(engine).iterate_shards(array)
        }
        found[name] = shards | {"gathered": compute_checksum(get_engine(engine).to_numpy(array))}
    return found


def run(cases: Mapping[str, Callable[[], Any]], number: int, folder: Path, only: str = "") -> None:
    """Run cases in this process, all or those that are named, with commas between, and write what came of them."""
    told = {}
    for name, case in cases.items():
        if only and name not in only.split(","):
            continue
        try:
            told[name] = {"held": case()}
        except LayoutMapError as error:
            told[name] = {"error": str(error)}
        except Exception:
            told[name] = {"failed": traceback.format_exc()}
    (folder / f"{number}.json").write_text(json.dumps(told))


def outcomes(results: Sequence[tuple[Mapping[str, Any], Any]]) -> dict[str, str]:
    """What each case ended in: the first line of the error that both processes raise, or that what they hold agrees."""
    told = [each for each, _ in results]
    return {name: _outcome([each[name] for each in told]) for name in told[0]}


def _outcome(told: Sequence[Mapping[str, Any]]) -> str:
    if all("error" in each for each in told) and told[0] == told[1]:
        return str(told[0]["error"].partition("\n")[0])
    if all("held" in each for each in told):
        values = [
            {(name, at): v for name, of in each["held"].items() for at, v in of.items()} for each in told
        ]
        both = values[0].keys() & values[1].keys()
        if both and {key: values[0][key] for key in both} == {key: values[1][key] for key in both}:
            return AGREE
    return json.dumps(told)
