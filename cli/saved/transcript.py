"""`chat.jsonl`: a header, the documents' names, a line per turn, and a checksum of all of it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import size
from minikv.chat.reuse import REUSES
from minikv.cli.json_limits import refuse_many
from minikv.cli.paths import chats_folder
from minikv.cli.saved.files import (
    TRANSCRIPT,
    TRANSCRIPT_BYTES,
    check_name,
    damage,
    opened,
    prune,
    read_part,
    write,
    write_part,
)
from minikv.cli.saved.identity import (
    FORMAT,
    bundled,
    document_hashes,
    eviction_of,
    model_folder,
)
from minikv.cli.saved.listing import unknown
from minikv.errors import UsageError
from minikv.settings import Settings

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession
    from minikv.chat.transcript import Document, Message, Turn

DOCUMENT_BYTES = 64 << 20
"""Bytes. A chat whose documents have more text than this is not saved."""

_RUN = ("model", "revision", "dtype", "seed", "system", "pin_system")
_LATER = ("kv", "weights")  # missing in chats of versions without these flags


@dataclass(frozen=True, slots=True)
class Saved:
    """A transcript that was read and checked. Its cache was not read yet."""

    name: str
    folder: Path
    header: Mapping[str, Any]
    eviction: EvictionConfig
    turns: tuple[Turn, ...]
    pending: tuple[Document, ...]
    tokens: tuple[int, ...] = ()  # of the conversation; chats of older versions do not say

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents that the model has read, in order."""
        return tuple(document for turn in self.turns for document in turn.documents)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages, as a session has them."""
        from minikv.chat.transcript import Message

        opened_with = str(self.header["opened_with"])
        system = [Message("system", opened_with)] if opened_with else []
        return (*system, *(message for turn in self.turns for message in turn.messages()))

    @property
    def curve(self) -> tuple[tuple[int, int, int], ...]:
        """As `ChatSession.curve`."""
        return tuple((int(a), int(b), int(c)) for a, b, c in self.header["curve"])


# -- reading ------------------------------------------------------------------------------


def header(name: str) -> Mapping[str, Any]:
    """A chat's header, checked with the whole transcript. Raises UsageError. Needs no torch."""
    top = _lines(name)[0]
    with damage(name):
        if not set(_RUN) <= set(top["run"]) <= {*_RUN, *_LATER}:
            raise ValueError("it does not say how it was run")
    return top


def resumed(settings: Settings, header: Mapping[str, Any], given: Collection[str]) -> Settings:
    """The settings to build a saved chat's session with: those it was run with, except for the
    fields that the user stated (`given`). `Keeper.load` sets the policy and its budget."""
    fields = {name: value for name, value in header["run"].items() if name not in given}
    if not set(given) & {"policy", "decode", "budget", "stride", "options"}:
        fields |= {"policy": "full", "decode": "auto"}  # any budget will do until then
    if "model" in given:
        fields.pop("revision", None)
    return replace(settings, **fields)


def read(name: str) -> Saved:
    """A chat's transcript and documents. Raises UsageError for anything missing or altered."""
    from minikv.chat.transcript import Document, Source, Turn
    from minikv.cli.records import report_of

    folder = chats_folder() / name
    lines = _lines(name)
    with damage(name):
        texts = [
            Document(
                read_part(folder, line, DOCUMENT_BYTES).decode(),
                _one_line(line["name"]),
                # Chats of older versions do not have it.
                Source(**line["source"]) if line.get("source") else None,
            )
            for line in lines
            if line["kind"] == "document"
        ]
        turns = tuple(
            Turn(
                str(line["question"]),
                str(line["answer"]),
                tuple(texts[i] for i in line["documents"]),
                report_of(line["record"], known=True),
            )
            for line in lines
            if line["kind"] == "turn"
        )
        top = lines[0]
        pending = tuple(texts[i] for i in top["pending"])
        told = [line["ids"] for line in lines if line["kind"] == "tokens"]
        tokens = tuple(int(id) for id in told[0]) if told else ()
        saved = Saved(name, folder, top, eviction_of(top["identity"]), turns, pending, tokens)
        hashes = document_hashes(saved.documents)
        if top["turns"] != len(turns) or top["identity"]["documents"] != hashes:
            raise ValueError("turns or documents are not those of the header")
        # Check now what is used later, so that damage is found before anything is changed.
        _ = saved.curve, str(top["system"]), int(top["seed"]), bool(top["pin_system"])
        _ = saved.messages, top["cache"], top["no_cache"]
        if top.get("reuse", "once") not in REUSES:
            raise ValueError(f"reuse {top['reuse']!r:.20} is none")
    return saved


def _one_line(name: str | None) -> str | None:
    """A document's name as the commands give it. Raises ValueError for any other: it is shown."""
    from minikv.cli.documents import one_line

    if name is not None and one_line(name) != name:
        raise ValueError(f"{name!r:.60} is no name of a document")
    return name


def _lines(name: str) -> list[dict[str, Any]]:
    """The transcript's lines, the header first, the checksum checked and left out."""
    check_name(name)
    try:
        with opened(chats_folder() / name / TRANSCRIPT) as file:
            data = file.read(TRANSCRIPT_BYTES + 1)
    except FileNotFoundError:
        raise unknown(name) from None
    except OSError as error:
        raise UsageError(f"chat {name} cannot be read: {error.strerror}") from None
    with damage(name):
        if len(data) > TRANSCRIPT_BYTES:
            raise ValueError(f"chat.jsonl is larger than {size(TRANSCRIPT_BYTES)}")
        body, newline, end = data.removesuffix(b"\n").rpartition(b"\n")
        if json.loads(end) != _end(body + newline):
            raise ValueError("the checksum of chat.jsonl does not fit: it was cut or edited")
        refuse_many(body)
        # Bytes may be taken for UTF-16, in which the limit does not see the lists.
        lines = [json.loads(line.decode("utf-8", "surrogatepass")) for line in body.splitlines()]
        if lines[0]["kind"] != "chat":
            raise ValueError("no header")
        if lines[0]["identity"]["format"] != FORMAT:
            raise ValueError(f"format {lines[0]['identity']['format']!r:.20}, not {FORMAT}")
    return lines


def _end(written: bytes) -> dict[str, str]:
    """The last line, which is the checksum of the others."""
    return {"kind": "end", "sha256": hashlib.sha256(written).hexdigest()}


# -- writing ------------------------------------------------------------------------------


def texts_of(session: ChatSession) -> list[Document]:
    """The documents of a chat, each once. Raises UsageError where they are too long to save."""
    read = (document for turn in session.turns for document in turn.documents)
    texts = list(dict.fromkeys((*read, *session.pending)))
    total = sum(len(document.text.encode()) for document in texts)
    if total > DOCUMENT_BYTES:
        raise UsageError(
            f"its documents have {size(total)} of text, more than the {size(DOCUMENT_BYTES)} "
            "that are stored"
        )
    return texts


class TurnLines:
    """The lines of the turns. Those of the last save are kept in memory: a chat is saved after
    every turn, and making thousands of records again takes seconds."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Turn, list[int], str]] = {}  # by the turn's id()

    def of(self, turns: Sequence[Turn], texts: Sequence[Document]) -> Iterator[str]:
        """A line of JSON for each turn, which names its documents by their place in `texts`."""
        before, self._known = self._known, {}
        for turn in turns:
            documents = [texts.index(document) for document in turn.documents]
            known = before.get(id(turn))
            if known is None or known[1] != documents:
                known = turn, documents, _turn_line(turn, documents)
            self._known[id(turn)] = known
            yield known[2]


def _turn_line(turn: Turn, documents: list[int]) -> str:
    return json.dumps(
        {
            "kind": "turn",
            "question": turn.question,
            "answer": turn.answer,
            "documents": documents,
            "record": turn.report.to_dict(),
        }
    )


def write_chat(
    session: ChatSession,
    folder: Path,
    texts: list[Document],
    identity: Mapping[str, object],
    cache: Mapping[str, object] | None,
    no_cache: str,
    lines: TurnLines,
) -> None:
    """Write the documents, then the transcript in one step; then remove files it does not name.

    `cache`: the record of the file with the cache, or None, and then `no_cache` says why. `lines`:
    the lines of the last save. Raises OSError.
    """
    body: list[dict[str, object]] = []
    for document in texts:
        part = write_part(folder, "document", "txt", document.text.encode())
        body.append(
            {
                "kind": "document",
                "name": document.name,
                "characters": len(document.text),
                "source": asdict(document.source) if document.source else None,
                **part,
            }
        )
    named = {str(line["file"]) for line in body} | ({str(cache["file"])} if cache else set())
    owed = [] if session.pending_token is None else [session.pending_token]
    body.append({"kind": "tokens", "ids": [*session.fed, *owed] or session.known})
    title = session.turns[0].question if session.turns else ""
    first = session.messages[0] if session.messages else None
    top = {
        "kind": "chat",
        "title": " ".join(title.split())[:80],
        "turns": len(session.turns),
        "identity": identity,
        "cache": cache,
        "no_cache": no_cache,
        "seed": session.seed,
        "system": session.system,
        "pin_system": session.pin_system,
        "reuse": session.reuse,
        "opened_with": first.content if first and first.role == "system" else "",
        "pending": [texts.index(document) for document in session.pending],
        "curve": [list(point) for point in session.curve],
        "run": _run(session),
    }
    first_lines = [json.dumps(line) for line in (top, *body)]
    written = "".join(f"{line}\n" for line in (*first_lines, *lines.of(session.turns, texts)))
    data = written.encode()
    if len(data) > TRANSCRIPT_BYTES - 1000:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    write(folder, TRANSCRIPT, data + json.dumps(_end(data)).encode() + b"\n")
    prune(folder, named)


def _run(session: ChatSession) -> dict[str, object]:
    """The fields of `Settings` that build this session again, its policy aside."""
    facts, folder = session.facts, model_folder(session)
    model = facts.model
    if folder is None or folder == bundled():
        model = ""
    elif not facts.revision:
        model = str(folder)
    return {
        "model": model or None,
        "revision": facts.revision or None,
        "dtype": facts.dtype,
        "seed": session.seed,
        "system": session.system,
        "pin_system": session.pin_system,
        "kv": "int8" if facts.kv == "int8" else "auto",
        "weights": facts.weights,
    }
