"""Convert a plan's JSON to objects, and raise an error with the position of a missing, wrong, or unknown field."""

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
PositiveFloat = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
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


# msgspec also checks names and types of fields, so no code for that is needed (decisions/0190).
class PlanJsonObject(msgspec.Struct, forbid_unknown_fields=True):
    """Base class of the structs for objects in a plan's JSON. Unknown fields are refused."""


class PlanJsonList(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base class of the structs that are lists in a plan's JSON, with a type for each position."""


def make_plan_file_error(what: str, why: str, fix: str = "write it with plan.to_json()") -> PlanError:
    """Return, but do not raise, the error for an invalid plan file."""
    return PlanError(f"plan file: {what}", why=why, fix=fix)


def make_plan_file_type_error(where: str, value: Any, expected: str) -> PlanError:
    """Return, but do not raise, the error for a value of the wrong type at a position in a plan file."""
    return make_plan_file_error(f"{where} is not {expected}", f"it is {shorten_repr(value)}")


def load_json_without_repeated_keys(text: str) -> Any:
    """Return the data of a JSON text, and raise if it is not JSON or an object has a key twice."""
    repeated_keys: list[tuple[dict[str, Any], str]] = []

    def make_dict_and_record_repeated_key(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated_keys.append((found, next(key for key in keys if keys.count(key) > 1)))
        return found

    try:
        data = json.loads(text, object_pairs_hook=make_dict_and_record_repeated_key)
        repeated = [(_find_json_path(data, found, "plan"), key) for found, key in repeated_keys]
    except (ValueError, TypeError) as error:
        raise make_plan_file_error("the file is not JSON", str(error)) from error
    except RecursionError:
        raise make_plan_file_error("the file is not the JSON of a plan", "it is nested too deeply") from None
    for where, key in repeated:
        if where:
            why = "one key has one value"
            raise make_plan_file_error(f"{where}: key {key!r} appears twice", why, "delete one of the two")
    return data


def convert_json_to_type(data: Any, target_type: type[T], where: str = "") -> T:
    """Return a part of a plan's JSON as an object of a type.

    Args:
        data: The part.
        target_type: The type.
        where: The position of the part in the document, such as `cost.machine`; empty: it is the document.

    Raises:
        PlanError: A value in it has another type.
    """
    try:
        return msgspec.convert(data, target_type)
    except UnicodeEncodeError as error:  # msgspec fails to encode a key or text with an unpaired surrogate
        found = shorten_repr(error.object)
        raise make_plan_file_error(
            f"{where or 'plan'}: {found} is not text",
            "it has an unpaired surrogate, which no encoding can write",
        ) from error
    except msgspec.ValidationError as error:
        match = _MESSAGE.fullmatch(str(error))
        message, path = (match[1], match[2] or "") if match else (str(error), "")
        for name, number in _STEP.findall(path):
            data = data[name or int(number)]
        at = (where + path).removeprefix(".") or "plan"
        raise _make_conversion_error(message, at, data) from error


def convert_json_values_to_type(data: dict[str, Any], target_type: Any, where: str) -> dict[str, Any]:
    """Return a JSON object with its values converted to a type. Unlike errors of msgspec, errors name the key."""
    return {name: convert_json_to_type(value, target_type, f"{where}.{name}") for name, value in data.items()}


def _make_conversion_error(message: str, where: str, value: Any) -> PlanError:
    """Return a plan error for a value that msgspec refused with a message."""
    field = re.search("field `(.*)`", message)
    if field and "missing" in message:
        return make_plan_file_error(f"{where} has no {field[1]!r}", "this field is required")
    if field:
        kinds = PlanJsonObject.__subclasses__()
        kinds += [each for kind in kinds for each in kind.__subclasses__()]
        known = {name for each in kinds for name in each.__struct_fields__}
        near = difflib.get_close_matches(field[1], sorted(known - {field[1]}), 1)
        fix = f"did you mean {near[0]!r}?" if near else "delete it, or use the layoutmap that wrote it"
        return make_plan_file_error(
            f"{where}: {shorten_repr(field[1])} is not known", "a plan has no such key", fix
        )
    if message.startswith("Invalid enum value"):
        return make_plan_file_error(f"{where} is not known", f"it is {shorten_repr(value)}")
    for pattern, expected in _WANTED:
        if found := re.search(pattern, message.partition(", got")[0]):
            return make_plan_file_type_error(where, value, found.expand(expected))
    return make_plan_file_error(f"{where}: {message}", f"it is {shorten_repr(value)}")


def _find_json_path(data: Any, expected: Any, where: str) -> str:
    """Return the position of an object in a document as text, or `""` if the document does not contain it."""
    if data is expected:
        return where
    inside = "" if where == "plan" else where
    parts: list[tuple[Any, str]] = []
    if isinstance(data, dict):
        named = cast("dict[str, Any]", data).items()
        parts = [(each, f"{inside}.{name}".removeprefix(".")) for name, each in named]
    elif isinstance(data, list):
        parts = [(each, f"{inside}[{i}]") for i, each in enumerate(cast("list[Any]", data))]
    return next((found for each, at in parts if (found := _find_json_path(each, expected, at))), "")
