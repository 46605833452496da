"""Read a JSON export. Every key is checked, because the file is not trusted."""

from __future__ import annotations

import base64
import binascii
import json
import os
import stat
from pathlib import Path

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
from minikv.cli.json_limits import refuse_many
from minikv.cli.records import Wrong, checked, count, fields_of, key, report_of
from minikv.cli.screen.text import clean
from minikv.errors import UsageError

MAX_BYTES = 256 << 20
_MOST = 1 << 63
_MADE = "in a chat, /export chat.json writes one"


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
    except Wrong as wrong:
        raise UsageError(
            f"{shown} is not a chat that minikv exported: {clean(str(wrong))}",
            f"in a chat, /export {Path(shown).stem or 'chat'}.json writes one",
        ) from None


def parse(data: bytes) -> ChatFacts:
    """The facts in the bytes of a JSON export. Raises `Wrong` (a ValueError) that says why not."""
    try:
        refuse_many(data)
    except ValueError as error:
        raise Wrong(str(error)) from None
    try:
        # Bytes may be taken for UTF-16, in which the limit does not see the lists.
        text = data.decode("utf-8-sig", "surrogatepass")
        record = json.loads(text, parse_int=_int, parse_float=_float, parse_constant=_float)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"no JSON ({error})") from None
    top = checked(dict, record, "the file")
    if top.get("format") != FORMAT:
        raise Wrong(f"format is not {FORMAT!r}")
    if top.get("version") != VERSION:
        raise Wrong(f"version {top.get('version')!r}, and this program reads version {VERSION}")
    tokens = checked(dict, key(top, "tokens"), "tokens")
    pieces = tuple(
        None if piece is None else checked(str, piece, "tokens.text")
        for piece in checked(list, key(tokens, "text"), "tokens.text")
    )
    documents = tuple(
        fields_of(Attached, document, "documents")
        for document in checked(list, key(top, "documents"), "documents")
    )
    model = fields_of(Model, key(top, "model"), "model")
    return ChatFacts(
        minikv=checked(str, key(top, "minikv"), "minikv"),
        made=checked(str, key(top, "made"), "made"),
        model=model,
        policy=fields_of(Policy, key(top, "policy"), "policy"),
        system=checked(str, key(top, "system"), "system"),
        documents=documents,
        turns=tuple(
            _turn(turn, len(documents)) for turn in checked(list, key(top, "turns"), "turns")
        ),
        pieces=pieces,
        sections=tuple(
            _section(part, len(pieces))
            for part in checked(list, key(tokens, "sections"), "sections")
        ),
        kept=_kept(key(top, "kept"), model, len(pieces)),
        curve=tuple(_point(point) for point in checked(list, key(top, "curve"), "curve")),
    )


def _turn(value: object, documents: int) -> Turn:
    turn = checked(dict, value, "turns")
    indices = tuple(
        count(i, "turns.documents") for i in checked(list, key(turn, "documents"), "turns")
    )
    if any(index >= documents for index in indices):
        raise Wrong("turns.documents names a document that is not there")
    record = key(turn, "record")
    report = None if record is None else report_of(record)
    question = checked(str, key(turn, "question"), "question")
    return Turn(question, checked(str, key(turn, "answer"), "answer"), indices, report)


def _section(value: object, tokens: int) -> Section:
    section = fields_of(Section, value, "tokens.sections")
    if section.kind not in KINDS or not 0 <= section.start < section.end <= tokens:
        raise Wrong("tokens.sections has a section that is none")
    return section


def _kept(value: object, model: Model, tokens: int) -> tuple[tuple[str, ...], ...]:
    kept = tuple(
        tuple(checked(str, head, "kept") for head in checked(list, layer, "kept"))
        for layer in checked(list, value, "kept")
    )
    if len(kept) != model.layers or any(len(layer) != model.kv_heads for layer in kept):
        raise Wrong("kept has not one bitmap per layer and KV head")
    for bits in (bits for layer in kept for bits in layer):
        try:
            size = len(base64.b64decode(bits, validate=True))
        except (binascii.Error, ValueError):
            raise Wrong("kept has a bitmap that is not base64") from None
        if size != (tokens + 7) // 8:
            raise Wrong("kept has a bitmap of another length than the tokens")
    return kept


def _point(value: object) -> Point:
    numbers = [count(number, "curve") for number in checked(list, value, "curve")]
    if len(numbers) != 3:
        raise Wrong("curve has a point without three numbers")
    return Point(*numbers)


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
