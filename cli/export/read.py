"""Read a JSON export. Every key is checked, because the file is not trusted."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path

from minikv.cli.export.facts import FORMAT, KINDS, VERSION, ChatFacts
from minikv.cli.json_limits import refuse_many
from minikv.cli.records import Wrong, checked, fields_of
from minikv.cli.screen.text import clean
from minikv.errors import UsageError

MAX_BYTES = 256 << 20
_MOST, _MOST_LAYERS = 1 << 63, 1 << 20
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
    facts = fields_of(ChatFacts, top, "")
    tokens, turns, sections = len(facts.tokens.text), facts.turns, facts.tokens.sections
    if not all(0 <= i < len(facts.documents) for turn in turns for i in turn.documents):
        raise Wrong("turns.documents names a document that is not there")
    if not all(part.kind in KINDS and 0 <= part.start < part.end <= tokens for part in sections):
        raise Wrong("tokens.sections has a section that is none")
    heads = facts.model.kv_heads
    if [len(layer) for layer in facts.kept] != [heads] * min(facts.model.layers, _MOST_LAYERS):
        raise Wrong("kept has not one bitmap per layer and KV head")
    for bits in (bits for layer in facts.kept for bits in layer):
        try:
            size = len(base64.b64decode(bits, validate=True))
        except ValueError:
            raise Wrong("kept has a bitmap that is not base64") from None
        if size != (tokens + 7) // 8:
            raise Wrong("kept has a bitmap of another length than the tokens")
    return facts


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
