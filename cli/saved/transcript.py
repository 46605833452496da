"""What a saved chat says: the rows of its file as documents and turns, and the other way round."""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import clipped, size
from minikv.chat.transcript import OVERFLOWS, REUSES, Message, TokenLog, system_messages
from minikv.cli.chat.turn import thoughts_of
from minikv.cli.paths import chats_folder
from minikv.cli.records import checked, report_of
from minikv.cli.saved.database import (
    FILE,
    REREAD,
    TABLES,
    ChatFile,
    check_name,
    damage,
    parts,
    renew,
)
from minikv.cli.saved.identity import FORMAT, bundled, eviction_of, model_folder
from minikv.cli.saved.listing import (
    MOST_JSON,
    TRANSCRIPT,
    Chat,
    OldChat,
    decoded,
    facts_of,
    is_old,
    unknown,
)
from minikv.errors import UsageError
from minikv.settings import WEIGHTS, Settings

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession
    from minikv.chat.snapshot import ChatSnapshot
    from minikv.chat.transcript import Document, Turn

DOCUMENT_BYTES = 64 << 20
"""A chat whose documents have more text than this is not saved."""
CACHE_BYTES = 512 << 20
"""A larger cache, mostly of --policy full, is not saved with the chat."""
_RUN = {"model", "revision", "dtype", "seed", "system", "pin_system", "kv", "weights"}


@dataclass(frozen=True, slots=True)
class Saved:
    """A chat that was read and checked. Its cache was not read yet. tokens: of the conversation."""

    name: str
    facts: Mapping[str, Any]
    eviction: EvictionConfig
    turns: tuple[Turn, ...]
    pending: tuple[Document, ...]
    tokens: tuple[int, ...]

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents that the model has read, in order."""
        return tuple(document for turn in self.turns for document in turn.documents)

    @property
    def opened_with(self) -> tuple[Message, ...]:
        """The system prompt at the beginning, if there was one."""
        return system_messages(str(self.facts["opened_with"]))

    @property
    def curve(self) -> tuple[tuple[int, int, int], ...]:
        """As `ChatSession.curve`."""
        return tuple((int(a), int(b), int(c)) for a, b, c in self.facts["curve"])

    def without_cache(self) -> ChatSnapshot:
        """The chat without its cache: the next question reads the whole conversation again, except
        what a tier has of it."""
        from minikv.chat.snapshot import ChatSnapshot, Conversation

        said = Conversation(
            opened_with=self.opened_with,
            turns=list(self.turns),
            pending=list(self.pending),
            log=TokenLog(self.tokens),
            curve=list(self.curve),
        )
        return ChatSnapshot(None, self.eviction, int(self.facts["seed"]), said)


# -- reading ------------------------------------------------------------------------------


def opened(name: str) -> Chat:
    """A chat to read. Raises UsageError."""
    check_name(name)
    folder = chats_folder() / name
    with damage(name):
        try:
            return OldChat(folder) if is_old(folder) else ChatFile(name)
        except FileNotFoundError:
            raise unknown(name) from None


def held(name: str) -> ChatFile:
    """A chat to read and to save, locked. minikv rewrites one of an earlier version, and one
    whose cache alone is damaged. Raises UsageError."""
    check_name(name)
    folder = chats_folder() / name
    with damage(name):
        if os.path.lexists(folder / TRANSCRIPT):
            _modernise(folder)
        try:
            file = ChatFile(name, lock=True)
        except FileNotFoundError:
            raise unknown(name) from None
        if not file.wrong:
            return file
        with contextlib.closing(file):
            read_from(file)
            rows: dict[str, Iterable[Any]] = {table: file.rows(table) for table in TABLES}
            why = f"its file was damaged: {clipped(file.wrong, 100)}"
            ((_, tokens),) = file.rows("chat")
            rows["chat"] = [(_encoded({**facts_of(file), "cache": 0, "no_cache": why}), tokens)]
            renew(name, {**rows, "cache": ()})
        return ChatFile(name, lock=True)


def _modernise(folder: Path) -> None:
    """Write a chat of an earlier version as this one does, then remove its files."""
    chat = OldChat(folder)
    if is_old(folder):
        read_from(chat)  # what cannot be read does not replace what can
        renew(folder.name, {table: chat.rows(table) for table in TABLES})
        saved = os.stat(folder / TRANSCRIPT)
        os.utime(folder / FILE, ns=(saved.st_atime_ns, saved.st_mtime_ns))
    chat.remove()


def header(name: str) -> Mapping[str, Any]:
    """The facts that build a chat's session. Raises UsageError. Needs no torch."""
    with contextlib.closing(opened(name)) as chat, damage(name):
        facts = facts_of(chat)
        if set(facts["run"]) != _RUN:
            raise ValueError("it does not say how it was run")
        return facts


def resumed(settings: Settings, header: Mapping[str, Any], given: Collection[str]) -> Settings:
    """The settings to build a saved chat's session with: those it was run with, except for the
    fields that the user stated (`given`). `Keeper.load` sets the policy and its budget."""
    fields = {name: value for name, value in header["run"].items() if name not in given}
    if fields.get("weights", "auto") not in WEIGHTS:  # a form of the file's own, in older chats
        fields["weights"] = "auto"
    if not set(given) & {"policy", "decode", "budget", "stride", "options"}:
        fields |= {"policy": "full", "decode": "auto"}  # any budget will do until then
    if "model" in given:
        fields.pop("revision", None)
    return replace(settings, **fields)


def read(name: str) -> Saved:
    """A chat without its cache. Raises UsageError."""
    with contextlib.closing(opened(name)) as chat:
        return read_from(chat)


def read_from(chat: Chat) -> Saved:
    """As `read`. Raises UsageError for anything missing or altered."""
    from minikv.chat.transcript import Document, Source, Turn

    with damage(chat.name):
        ((text, tokens),) = chat.rows("chat")
        facts = decoded(text)
        if facts["identity"]["format"] != FORMAT:
            raise ValueError(f"format {facts['identity']['format']!r:.20}, not {FORMAT}")
        texts, total = list[Document](), 0
        for about, text in chat.rows("document"):
            total += len(text)
            if total > DOCUMENT_BYTES:
                raise ValueError("its documents are too large")
            known = decoded(about)
            source = Source(**known["source"]) if known["source"] else None
            texts.append(Document(text, _one_line(known["name"]), source))
        turns = list[Turn]()
        for about, question, answer in chat.rows("turn"):
            known = decoded(about)
            documents = tuple(texts[i] for i in known["documents"])
            report = report_of(known["record"], known=True)
            thoughts = checked(str, known.get("thoughts", ""), "thoughts")
            turns.append(Turn(question, answer, documents, report, thoughts))
        if (facts["turns"], len(facts["documents"])) != (len(turns), len(texts)):
            raise ValueError("turns or documents are missing")
        pending = tuple(texts[i] for i in facts["pending"])
        eviction, ids = eviction_of(facts["identity"]), tuple(array.array("i", tokens))
        saved = Saved(chat.name, facts, eviction, tuple(turns), pending, ids)
        # Check now what is used later, so that damage is found before anything is changed.
        _ = saved.curve
        kinds = {"seed": int, "cache": int, "opened_with": str, "system": str, "no_cache": str}
        for name, kind in (kinds | {"pin_system": bool}).items():
            checked(kind, facts[name], name)
        for name, words in (("reuse", REUSES), ("overflow", OVERFLOWS)):
            if facts.get(name, words[0]) not in words:
                raise ValueError(f"{name} {facts[name]!r:.20} is none")
    return saved


def _one_line(name: str | None) -> str | None:
    """A document's name as the commands give it. Raises ValueError for any other: it is shown."""
    from minikv.cli.documents.text import one_line

    if name is not None and one_line(name) != name:
        raise ValueError(f"{name!r:.60} is no name of a document")
    return name


def read_cache(file: ChatFile, saved: Saved) -> ChatSnapshot:
    """The chat with its cache. Raises UsageError."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    from minikv.cache.snapshot import CacheSnapshot

    if not saved.facts["cache"]:
        raise UsageError(f"chat {saved.name} has no cache: {saved.facts['no_cache']}", REREAD)
    with damage(saved.name, REREAD):
        data = b"".join(part for (part,) in file.rows("cache"))
        if len(data) != saved.facts["cache"]:
            raise ValueError("the cache is not as long as it was written")
        length = int.from_bytes(data[:8], "little")
        state = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["state"])
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        columns = {
            name.removeprefix("column."): tensor
            for name, tensor in tensors.items()
            if name.startswith("column.")
        }
        held, pending = CacheSnapshot.read(state["held"], columns), state["owed"]
        fed = saved.tokens if pending is None else saved.tokens[:-1]
        if (
            held.state.position != len(fed)
            or saved.tokens[len(fed) :] != (pending,)[: pending is not None]
        ):
            raise ValueError("the tokens in the cache are not those of the chat")
        made = saved.without_cache()
        said = replace(made.said, rereads=bool(state["rereads"]))
        return replace(made, held=held, said=said)


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


def rows_of(
    session: ChatSession, identity: Mapping[str, object], *, ask: bool = False, same: int = 0
) -> dict[str, Iterable[Any]]:
    """The chat as the rows of its file. ask: it is that of the last `ask`. same: the first turns,
    which are left out. Raises UsageError, OSError and MemoryError."""
    turns, texts = session.turns, texts_of(session)
    cache, why = b"", "what it holds is chosen again from what is remembered"
    if not ask or not session.recalls or session.recall.kind == "none":
        cache, why = _cache(session)
    pending_token = [] if session.pending_token is None else [session.pending_token]
    first = session.messages[0] if session.messages else None
    facts = {
        "title": " ".join(turns[0].question.split())[:80] if turns else "",
        "turns": len(turns),
        "documents": [document.name for document in texts],
        "identity": identity,
        "cache": len(cache),
        "no_cache": why,
        "seed": session.seed,
        "system": session.system,
        "pin_system": session.pin_system,
        "reuse": session.reuse,
        "overflow": session.overflow,
        "opened_with": first.content if first and first.role == "system" else "",
        "pending": [texts.index(document) for document in session.pending],
        "curve": [list(point) for point in session.curve],
        "run": _run(session),
    }
    tokens = array.array("i", [*session.fed, *pending_token] or session.known).tobytes()
    return {
        "chat": [(_encoded(facts), tokens)],
        "document": map(_document_row, texts),
        "turn": (_turn_row(turn, texts) for turn in turns[same:]),
        "cache": parts(cache),
    }


def _cache(session: ChatSession) -> tuple[bytes, str]:
    """The cache as a safetensors file; b"" and the reason if it is not saved."""
    if not session.fed:
        return b"", "nothing of it had been read when it was saved"
    held_bytes = session.engine.kv.stats().held_bytes
    if held_bytes > CACHE_BYTES:
        return b"", f"it held {size(held_bytes)}, and at most {size(CACHE_BYTES)} are saved"
    from safetensors.torch import save

    snapshot = session.snapshot()
    assert snapshot.held is not None
    state = {
        "held": snapshot.held.record(),
        "owed": session.pending_token,
        "shaped_by": session.evicted_for_turn,
        "rereads": snapshot.said.rereads,
    }
    tensors = {f"column.{name}": column for name, column in snapshot.held.columns.items()}
    try:
        return save(tensors, {"state": json.dumps(state)}), ""
    except BaseException as error:
        # The library raises this if memory is short: not an Exception, and without a public name.
        if type(error).__name__ != "PanicException":
            raise
        raise MemoryError from None


def _document_row(document: Document) -> tuple[str, str]:
    source = asdict(document.source) if document.source else None
    return _encoded({"name": document.name, "source": source}), document.text


def _turn_row(turn: Turn, texts: Sequence[Document]) -> tuple[str, str, str]:
    documents = [texts.index(document) for document in turn.documents]
    about = {"documents": documents, "record": turn.report.to_dict(), **thoughts_of(turn)}
    return _encoded(about), turn.question, turn.answer


def _encoded(about: Mapping[str, object]) -> str:
    text = json.dumps(about)
    if len(text) > MOST_JSON:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return text


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
        "weights": facts.weights if facts.weights in WEIGHTS else "auto",  # else the file's own
    }
