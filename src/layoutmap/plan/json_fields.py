"""Convert a plan's JSON to objects, and raise an error with the position of a missing, wrong, or unknown part."""

from __future__ import annotations

import difflib
import json
import re
import sys
from typing import Annotated, Any, TypeVar, cast

import msgspec

from layoutmap.core.errors import PlanError, shorten_repr

MAX_COUNT = 2**63 - 1
"""The maximum number of elements or bytes, per axis and in total."""
T = TypeVar("T")
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Figure = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
_MESSAGE = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_WANTED = (  # patterns in messages of msgspec, each with the expected value to report
    (r"`array` of (?:at (?:least|most) )?length (\d+)", r"a list of \1"),
    (r"\barray\b", "a list"),
    (r"\bobject\b", "an object"),
    (r"`int` >= 1", "a whole number above 0"),
    (r"\bint\b(?! \|)|`int \|", "a whole number of 0 or more"),
    (r"\bfloat\b|out of range", "a number above 0"),
    (r"\bstr\b", "text"),
    (r"\bbool\b", "true or false"),
)


# A msgspec struct also checks the fields, so that plans with unknown fields are refused (decisions/0190).
class PlanObject(msgspec.Struct, forbid_unknown_fields=True):
    """An object in a plan's JSON."""


class PlanRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A list in a plan's JSON with a type for each position."""


def make_file_error(what: str, why: str, fix: str = "write it with plan.to_json()") -> PlanError:
    """Return the error for an invalid plan file."""
    return PlanError(f"plan file: {what}", why=why, fix=fix)


def make_type_error(place: str, value: Any, wanted: str) -> PlanError:
    """Return the error for a value of the wrong type in a plan file."""
    return make_file_error(f"{place} is not {wanted}", f"it is {shorten_repr(value)}")


def load_json(text: str) -> Any:
    """Parse JSON, and raise if an object has a key twice."""
    twice: list[tuple[dict[str, Any], str]] = []

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice.append((found, next(key for key in keys if keys.count(key) > 1)))
        return found

    try:
        data = json.loads(text, object_pairs_hook=make_object)
        places = [(_find_place(data, found, "plan"), key) for found, key in twice]
    except (ValueError, TypeError) as error:
        raise make_file_error("it is not JSON", str(error)) from error
    except RecursionError:
        raise make_file_error("it is not the JSON of a plan", "it is nested too deeply") from None
    for place, key in places:
        if place:
            why = "which of the two values is meant is not known"
            raise make_file_error(f"{place}: key {key!r} appears twice", why, "delete one of the two")
    return data


def convert(data: Any, kind: type[T], place: str = "") -> T:
    """Convert a part of a plan's JSON to a type.

    Args:
        data: The part.
        kind: Its type.
        place: Its place in the document.

    Raises:
        PlanError: A value in it has another type.
    """
    try:
        return msgspec.convert(data, kind)
    except UnicodeEncodeError as error:  # msgspec encodes keys and misplaced texts in its messages
        found = shorten_repr(error.object)
        raise make_file_error(
            f"{place or 'plan'}: {found} is not text",
            "it has an unpaired surrogate, which no encoding can write",
        ) from error
    except msgspec.ValidationError as error:
        match = _MESSAGE.fullmatch(str(error))
        what, path = (match[1], match[2] or "") if match else (str(error), "")
        for name, number in _STEP.findall(path):
            data = data[name or int(number)]
        at = (place + path).removeprefix(".") or "plan"
        raise _make_error(what, at, data) from error


def convert_values(data: dict[str, Any], kind: Any, place: str) -> dict[str, Any]:
    """Convert the values of an object with arbitrary keys. Errors name the key, which msgspec omits."""
    return {name: convert(value, kind, f"{place}.{name}") for name, value in data.items()}


def _make_error(what: str, place: str, value: Any) -> PlanError:
    field = re.search("field `(.*)`", what)
    if field and "missing" in what:
        return make_file_error(f"{place} has no {field[1]!r}", "every plan has one")
    if field:
        kinds = PlanObject.__subclasses__()
        kinds += [each for kind in kinds for each in kind.__subclasses__()]
        known = {name for each in kinds for name in each.__struct_fields__}
        near = difflib.get_close_matches(field[1], sorted(known - {field[1]}), 1)
        fix = f"did you mean {near[0]!r}?" if near else "delete it, or use the layoutmap that wrote it"
        return make_file_error(
            f"{place}: {shorten_repr(field[1])} is not known", "a plan has no such key", fix
        )
    if what.startswith("Invalid enum value"):
        return make_file_error(f"{place} is not known", f"it is {shorten_repr(value)}")
    for pattern, wanted in _WANTED:
        if found := re.search(pattern, what.partition(", got")[0]):
            return make_type_error(place, value, found.expand(wanted))
    return make_file_error(f"{place}: {what}", f"it is {shorten_repr(value)}")


def _find_place(data: Any, wanted: Any, place: str) -> str:
    """Return the position of an object in a document, or `""` if it is not found."""
    if data is wanted:
        return place
    inside = "" if place == "plan" else place
    parts: list[tuple[Any, str]] = []
    if isinstance(data, dict):
        named = cast("dict[str, Any]", data).items()
        parts = [(each, f"{inside}.{name}".removeprefix(".")) for name, each in named]
    elif isinstance(data, list):
        parts = [(each, f"{inside}[{i}]") for i, each in enumerate(cast("list[Any]", data))]
    return next((found for each, at in parts if (found := _find_place(each, wanted, at))), "")
