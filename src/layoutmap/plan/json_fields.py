"""Reading a plan's JSON, field by field: what is missing, wrong or not known is refused with its place."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar, cast

from layoutmap.core.errors import PlanError, brief

MOST = 2**63 - 1
"""The largest number of elements or bytes, in one axis and in all; what tensors can have."""
_MISSING: Any = object()

T = TypeVar("T")
Read = Callable[[Any, str], T]
"""Makes a value of a part of the file; the text is the place of that part, for messages."""


class JsonObject(dict[str, Any]):
    """An object of the file; knows a key that is there twice, of which JSON itself keeps the last."""

    def __init__(self, pairs: list[tuple[str, Any]]):
        super().__init__(pairs)
        seen: set[str] = set()
        self.twice = next((key for key, _ in pairs if key in seen or seen.add(key)), None)


class Fields:
    """The fields of one object, each read by its key; what is missing, wrong or not known is refused with its place."""

    def __init__(self, item: Any, place: str):
        self._item, self._place, self._asked = an_object(item, place), place, list[str]()

    def __contains__(self, key: str) -> bool:
        return key in self._item

    def __call__(self, key: str, read: Read[T], default: Any = _MISSING) -> T:
        """Read the value of a key; the default if the object has no such key."""
        self._asked.append(key)
        if key in self._item:
            return read(self._item[key], key if self._place == "plan" else f"{self._place}.{key}")
        if default is _MISSING:
            raise refused(f"{self._place} has no {key!r}", "every plan has one")
        return default

    def check(self) -> None:
        """Raise if the object has a key that nobody has asked for."""
        for key in self._item:
            if key not in self._asked:
                near = difflib.get_close_matches(key, self._asked, 1)
                fix = (
                    f"did you mean {near[0]!r}?" if near else "delete it, or use the layoutmap that wrote it"
                )
                raise refused(f"{self._place}: {brief(key)} is not known", "a plan has no such key", fix)


def refused(what: str, why: str, fix: str = "write it with plan.to_json()") -> PlanError:
    """Return the error of a plan's file."""
    return PlanError(f"plan file: {what}", why=why, fix=fix)


def wrong(place: str, value: Any, wanted: str) -> PlanError:
    """Return the error of a value of another kind than is wanted."""
    return refused(f"{place} is not {wanted}", f"it is {brief(value)}")


def an_object(value: Any, place: str) -> JsonObject:
    """Read an object, in which no key is there twice."""
    if not isinstance(value, JsonObject):
        raise wrong(place, value, "an object")
    if value.twice is not None:
        why = "which of the two values is meant is not known"
        raise refused(f"{place}: key {value.twice!r} is there twice", why, "delete one of the two")
    return value


def a_text(value: Any, place: str) -> str:
    """Read a text."""
    if not isinstance(value, str):
        raise wrong(place, value, "text")
    return value


def a_flag(value: Any, place: str) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise wrong(place, value, "true or false")
    return value


def a_number(value: Any, place: str) -> int:
    """Read a whole number that is not negative."""
    if type(value) is not int or not 0 <= value <= MOST:  # a bool is an int
        raise wrong(place, value, "a whole number of 0 or more")
    return value


def a_count(value: Any, place: str) -> int:
    """Read a whole number above 0."""
    if not a_number(value, place):
        raise wrong(place, value, "a whole number above 0")
    return value


def a_figure(value: Any, place: str) -> float:
    """Read a number above 0."""
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise wrong(place, value, "a number above 0")
    return value


def list_of(read: Read[T]) -> Read[tuple[T, ...]]:
    """Return what reads a list of such values."""

    def read_all(value: Any, place: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise wrong(place, value, "a list")
        return tuple(read(each, f"{place}[{i}]") for i, each in enumerate(cast("list[Any]", value)))

    return read_all


def one_of(*known: T) -> Read[T]:
    """Return what reads one of some texts."""

    def read(value: Any, place: str) -> T:
        if isinstance(value, str):
            for each in known:
                if value == each:
                    return each
        why = f"it is {brief(value)}"
        raise refused(f"{place} is not known", why, f"use one of {', '.join(map(str, known))}")

    return read


def or_null(read: Read[T]) -> Read[T | None]:
    """Return what reads such a value, or null."""
    return lambda value, place: None if value is None else read(value, place)


def a_row(*reads: Read[Any], least: int = 2) -> Read[list[Any]]:
    """Return what reads a list whose places have types of their own; those after the first `least` may be left out."""

    def read(value: Any, place: str) -> list[Any]:
        items = cast("list[Any]", value) if isinstance(value, list) else []
        if not least <= len(items) <= len(reads):
            raise wrong(
                place, value, f"a list of {least}" + (f" to {len(reads)}" if least < len(reads) else "")
            )
        return [of(each, f"{place}[{i}]") for i, (of, each) in enumerate(zip(reads, items, strict=False))]

    return read
