"""Reads records of turns from untrusted files: checks every key, and the size, because a small JSON
file can take a hundred times its size when parsed."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from minikv.chat.report import PLACES, STOPS, TurnReport
from minikv.chat.transcript import REUSES

_T = TypeVar("_T")
_NAMES: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


_GONE = {"refreshes"}
"""Keys that earlier versions wrote to a turn's record and that nothing reads."""


class Wrong(ValueError):
    """A record is wrong. The message says why, and names the key."""


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
        if field.name in record or field.default is dataclasses.MISSING  # or was added later
    ]
    if missing := [name for name in names if name not in record]:
        raise Wrong(f"no key {where}.{missing[0]}")
    return kind(**{n: _typed(hints[n], record[n], f"{where}.{n}") for n in names})


def _typed(hint: Any, value: object, where: str) -> object:
    if isinstance(hint, types.UnionType):  # X | None
        if value is None:
            return None
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return fields_of(typing.cast(type, hint), value, where)
    if origin is tuple:
        item = typing.get_args(hint)[0]  # of tuple[item, ...]
        return tuple(_typed(item, one, where) for one in checked(list, value, where))
    return checked(dict if origin is Mapping else hint, value, where)


def checked(kind: type[_T], value: object, where: str) -> _T:
    """The value, if it has this type."""
    accepted = (int, float) if kind is float else kind
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, accepted):
        raise Wrong(f"{where} is not {_NAMES[kind]}")
    return kind(value)  # type: ignore[call-arg]


# -- size ---------------------------------------------------------------------------------------

CONTAINERS, ITEMS = 1_000_000, 5_000_000
"""The most lists and objects, and the most commas, of one file, outside texts. An object takes
64 bytes or more, a number 8 to 40."""

_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text, or the rest of the file after a quotation mark without a second one. Otherwise each
escaped mark in the rest would be tried as a beginning, which is quadratic."""
_PIECE = re.compile(rb'(?:[^"]*+' + _TEXT.pattern + rb"){1,1000}+|[^\"]++", re.DOTALL)
"""Up to 1,000 texts with the characters before them, or the rest, so that little is copied at
once."""


def refuse_many(data: bytes) -> None:
    """Raise ValueError if a JSON file has more lists, objects or items than any real one."""
    containers, items = data.count(b"{") + data.count(b"["), data.count(b",")
    if containers <= CONTAINERS and items <= ITEMS:
        return
    containers = items = 0
    for piece in _PIECE.finditer(data):  # perhaps they are in texts
        bare = _TEXT.sub(b"", piece[0])
        containers += bare.count(b"{") + bare.count(b"[")
        items += bare.count(b",")
        if containers > CONTAINERS or items > ITEMS:
            raise ValueError(
                f"more than {CONTAINERS:,} lists and objects, or {ITEMS:,} items, are too many"
            )
