"""Records of turns and chats, from files that may come from anywhere: every key is checked."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from minikv.chat.report import PLACES, STOPS, TurnReport
from minikv.chat.transcript import REUSES

_T = TypeVar("_T")
_NAMES: Mapping[type, str] = {
    dict: "object",
    list: "list",
    str: "text",
    int: "whole number",
    float: "number",
    bool: "truth",
}


_GONE = {"refreshes"}
"""Keys in the record of a turn that earlier versions wrote, and nobody reads."""


class Wrong(ValueError):
    """A record is wrong. The message says how, and under which key."""


def report_of(record: object, *, known: bool = False) -> TurnReport:
    """The figures of a turn. known: other keys are an error. Raises Wrong."""
    names = {field.name for field in dataclasses.fields(TurnReport)} | _GONE
    if known and (other := set(checked(dict, record, "record")) - names):
        raise Wrong(f"record has keys that are not known: {sorted(map(str, other))[:3]}")
    report = fields_of(TurnReport, record, "record")
    for name, words in (("stop_reason", STOPS), ("tier", ("", *PLACES)), ("reuse", REUSES[1:])):
        if getattr(report, name) not in words:
            raise Wrong(f"record.{name} is {getattr(report, name)!r:.80}")
    return report


def fields_of(kind: Callable[..., _T], value: object, where: str) -> _T:
    """A dataclass from its record, with the types that it declares."""
    record = checked(dict, value, where)
    hints = typing.get_type_hints(kind)
    names = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.name in record or field.default is dataclasses.MISSING  # keys that came later
    ]
    places = {name: f"{where}.{name}".lstrip(".") for name in names}
    return kind(**{n: _typed(hints[n], key(record, n, where), places[n]) for n in names})


def _typed(hint: Any, value: object, where: str) -> object:
    if isinstance(hint, types.UnionType):  # X | None
        if value is None:
            return None
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    origin = typing.get_origin(hint)
    if hint is TurnReport:
        return report_of(value)
    if dataclasses.is_dataclass(hint):
        return fields_of(typing.cast(type, hint), value, where)
    if origin is tuple:
        item = typing.get_args(hint)[0]  # of tuple[item, ...]
        return tuple(_typed(item, one, where) for one in checked(list, value, where))
    if hasattr(hint, "_fields"):  # a NamedTuple of counts, as a list
        counts = [count(number, where) for number in checked(list, value, where)]
        if len(counts) != len(hint._fields):
            raise Wrong(f"{where} has {len(counts)} numbers, not {len(hint._fields)}")
        return hint(*counts)
    return checked(dict if origin is Mapping else hint, value, where)


def key(record: Mapping[str, object], name: str, where: str = "") -> object:
    """The value under a key that must be there."""
    if name not in record:
        raise Wrong(f"no key {where + '.' if where else ''}{name}")
    return record[name]


def checked(kind: type[_T], value: object, where: str) -> _T:
    """The value, if it has this type."""
    accepted = (int, float) if kind is float else kind
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, accepted):
        raise Wrong(f"{where} is no {_NAMES[kind]}")
    return kind(value)  # type: ignore[call-arg]


def count(value: object, where: str) -> int:
    """The value, if it is a whole number and not negative."""
    number = checked(int, value, where)
    if number < 0:
        raise Wrong(f"{where} is negative")
    return number
