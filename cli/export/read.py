"""A JSON export read back, every key checked: the file may come from anywhere."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import os
import stat
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from minikv.chat.report import STOPS, TurnReport
from minikv.cli.export.facts import (
    FORMAT,
    KINDS,
    VERSION,
    Attached,
    ChatFacts,
    Model,
    Point,
    Policy,
    Section,
    Turn,
)
from minikv.cli.terminal import clean
from minikv.errors import UsageError

MAX_BYTES = 256 << 20
_MOST = 1 << 63
_MADE = "in a chat, /export chat.json writes one"
_T = TypeVar("_T")
_NAMES: Mapping[type, str] = {
    dict: "object",
    list: "list",
    str: "text",
    int: "whole number",
    float: "number",
}


class _Wrong(ValueError):
    """What is wrong, and under which key."""


def read_file(path: str) -> ChatFacts:
    """The facts in a file that `/export chat.json` wrote. Raises UsageError."""
    shown = clean(path)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{shown} is not a regular file")
            if status.st_size > MAX_BYTES:
                raise UsageError(f"{shown} is larger than {MAX_BYTES >> 20} MiB")
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {shown}: {error.strerror}", _MADE) from None
    try:
        return parse(data)
    except _Wrong as wrong:
        raise UsageError(
            f"{shown} is not a chat that minikv exported: {clean(str(wrong))}",
            f"in a chat, /export {Path(shown).stem or 'chat'}.json writes one",
        ) from None


def parse(data: bytes) -> ChatFacts:
    """The facts in the bytes of a JSON export. Raises ValueError that names the key."""
    try:
        record = json.loads(data, parse_int=_int, parse_float=_float, parse_constant=_float)
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"no JSON ({error})") from None
    top = _is(dict, record, "the file")
    if top.get("format") != FORMAT:
        raise _Wrong(f"format is not {FORMAT!r}")
    if top.get("version") != VERSION:
        raise _Wrong(f"version {top.get('version')!r}, and this program reads version {VERSION}")
    tokens = _is(dict, _key(top, "tokens"), "tokens")
    pieces = tuple(
        None if piece is None else _is(str, piece, "tokens.text")
        for piece in _is(list, _key(tokens, "text"), "tokens.text")
    )
    documents = tuple(
        _fields(Attached, document, "documents")
        for document in _is(list, _key(top, "documents"), "documents")
    )
    model = _fields(Model, _key(top, "model"), "model")
    return ChatFacts(
        minikv=_is(str, _key(top, "minikv"), "minikv"),
        made=_is(str, _key(top, "made"), "made"),
        model=model,
        policy=_fields(Policy, _key(top, "policy"), "policy"),
        system=_is(str, _key(top, "system"), "system"),
        documents=documents,
        turns=tuple(_turn(turn, len(documents)) for turn in _is(list, _key(top, "turns"), "turns")),
        pieces=pieces,
        sections=tuple(
            _section(part, len(pieces)) for part in _is(list, _key(tokens, "sections"), "sections")
        ),
        kept=_kept(_key(top, "kept"), model, len(pieces)),
        curve=tuple(_point(point) for point in _is(list, _key(top, "curve"), "curve")),
    )


def _turn(value: object, documents: int) -> Turn:
    turn = _is(dict, value, "turns")
    indices = tuple(
        _count(i, "turns.documents") for i in _is(list, _key(turn, "documents"), "turns")
    )
    if any(index >= documents for index in indices):
        raise _Wrong("turns.documents names a document that is not there")
    record = _key(turn, "record")
    report = None if record is None else _fields(TurnReport, record, "record")
    if report is not None and report.stop_reason not in STOPS:
        raise _Wrong(f"record.stop_reason is {report.stop_reason!r}")
    question = _is(str, _key(turn, "question"), "question")
    return Turn(question, _is(str, _key(turn, "answer"), "answer"), indices, report)


def _section(value: object, tokens: int) -> Section:
    section = _fields(Section, value, "tokens.sections")
    if section.kind not in KINDS or not 0 <= section.start < section.end <= tokens:
        raise _Wrong("tokens.sections has a section that is none")
    return section


def _kept(value: object, model: Model, tokens: int) -> tuple[tuple[str, ...], ...]:
    kept = tuple(
        tuple(_is(str, head, "kept") for head in _is(list, layer, "kept"))
        for layer in _is(list, value, "kept")
    )
    if [len(layer) for layer in kept] != [model.kv_heads] * model.layers:
        raise _Wrong("kept has not one bitmap per layer and KV head")
    for bits in (bits for layer in kept for bits in layer):
        try:
            size = len(base64.b64decode(bits, validate=True))
        except (binascii.Error, ValueError):
            raise _Wrong("kept has a bitmap that is not base64") from None
        if size != (tokens + 7) // 8:
            raise _Wrong("kept has a bitmap of another length than the tokens")
    return kept


def _point(value: object) -> Point:
    numbers = [_count(number, "curve") for number in _is(list, value, "curve")]
    if len(numbers) != 3:
        raise _Wrong("curve has a point without three numbers")
    return Point(*numbers)


def _fields(kind: Callable[..., _T], value: object, where: str) -> _T:
    """A dataclass from its record, with the types that it declares."""
    record = _is(dict, value, where)
    hints = typing.get_type_hints(kind)
    names = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.name in record or field.default is dataclasses.MISSING  # keys that came later
    ]
    return kind(**{n: _typed(hints[n], _key(record, n, where), f"{where}.{n}") for n in names})


def _typed(hint: Any, value: object, where: str) -> object:
    if isinstance(hint, types.UnionType):  # X | None
        if value is None:
            return None
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return _fields(typing.cast(type, hint), value, where)
    if origin is tuple:
        return tuple(_is(str, item, where) for item in _is(list, value, where))
    return _is(dict if origin is Mapping else hint, value, where)


def _key(record: Mapping[str, object], name: str, where: str = "") -> object:
    if name not in record:
        raise _Wrong(f"no key {where + '.' if where else ''}{name}")
    return record[name]


def _is(kind: type[_T], value: object, where: str) -> _T:
    """The value, if it has this type."""
    accepted = (int, float) if kind is float else kind
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise _Wrong(f"{where} is no {_NAMES[kind]}")
    return kind(value)  # type: ignore[call-arg]


def _count(value: object, where: str) -> int:
    number = _is(int, value, where)
    if number < 0:
        raise _Wrong(f"{where} is negative")
    return number


def _int(digits: str) -> int:
    number = int(digits)
    if abs(number) >= _MOST:
        raise ValueError("a number is too large")
    return number


def _float(digits: str) -> float:
    number = float(digits)
    if not abs(number) < _MOST:
        raise ValueError(f"{digits[:20]} is no measured number")
    return number
