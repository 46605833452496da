"""Converts the rows of a saved chat's file to documents and turns, and back; and what its cache
belongs to: model, tokenizer, number formats, policies and budget."""

from __future__ import annotations

import array
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minikv
from minikv.cache.budget import Budget
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import size
from minikv.chat.transcript import (
    OVERFLOWS,
    REUSES,
    Document,
    Source,
    TokenLog,
    Turn,
    system_messages,
)
from minikv.cli.chat.turn import thoughts_of
from minikv.cli.paths import chats_folder
from minikv.cli.saved.database import FILE, REREAD, TABLES, ChatFile, check_name, parts, renew
from minikv.cli.saved.listing import (
    TRANSCRIPT,
    Rows,
    checked,
    damage,
    decoded,
    facts_of,
    is_old,
    old_rows,
    reading,
    remove_old,
    report_of,
    without_gone,
)
from minikv.errors import UsageError
from minikv.models import BUNDLED
from minikv.models.identity import digests
from minikv.settings import WEIGHTS, Settings

if TYPE_CHECKING:
    from minikv.cache.kv_cache import KVCache
    from minikv.chat.session import ChatSession
    from minikv.chat.snapshot import ChatSnapshot


POLICY = ("policy", "policy_options", "decode", "decode_options", "budget", "stride")
"""The fields of an identity that need not agree, because a loaded chat sets them."""

_UNREAD = "nothing had been read when the chat was saved"
_UNITS = ("rows", "share", "bytes", "auto")


def identity(session: ChatSession, model: Mapping[str, object]) -> dict[str, object]:
    """Everything that a saved cache depends on. model: what `model_identity` returns."""
    eviction = session.eviction
    return {
        "format": 1,
        "minikv": minikv.__version__,
        **model,
        "dtype": session.facts.dtype,
        "kv": session.facts.kv,
        "form": session.facts.form,
        "policy": eviction.policy,
        "policy_options": dict(eviction.policy_options),
        "decode": eviction.decode,
        "decode_options": dict(eviction.decode_options),
        "budget": f"{eviction.budget.value} {eviction.budget.unit}",
        "stride": eviction.stride,
    }


def eviction_of(identity: Mapping[str, Any]) -> EvictionConfig:
    """The eviction settings of an identity. Raises ValueError, KeyError or TypeError."""
    value, unit = str(identity["budget"]).split()
    # Without this limit "1e9999999" would be computed to its last digit.
    written = re.fullmatch(r"\d{1,40}(/\d{1,40})?", value, re.ASCII)
    least = 0 if unit == "auto" else Fraction(1, 10**18)
    if unit not in _UNITS or written is None or Fraction(value) < least:
        raise ValueError(f"{identity['budget']!r:.40} is not a budget")
    return EvictionConfig(
        str(identity["policy"]),
        str(identity["decode"]),
        Budget(unit, Fraction(value)),
        without_gone(identity["policy_options"]),
        dict(identity["decode_options"]),
        int(identity["stride"]),
    )


def differences(here: Mapping[str, object], there: Mapping[str, Any]) -> str:
    """How a session (`here`) differs from the one that saved a cache (`there`), policy and budget
    aside, in words; "" if it does not."""
    different = [key for key in here if key not in POLICY and here[key] != there.get(key)]
    if "weights" in different and "model" in different:
        different.remove("weights")

    def told(key: str) -> str:
        if key in ("weights", "tokenizer"):  # by hashes
            return f"the model's {key} changed"
        return f"{key} {_shown(here[key])} here, {_shown(there.get(key))} there"

    return "; ".join(map(told, different))


def _shown(value: object) -> str:
    """A value of an identity for a message."""
    return "nothing" if value is None else str(value) or "none"


def model_identity(session: ChatSession) -> dict[str, object]:
    """The model's name and revision, for people, and hashes of its weights and its tokenizer."""
    facts, folder = session.facts, model_folder(session)
    named = {"model": facts.model, "revision": facts.revision}
    if folder is None:
        return {**named, "weights": "", "tokenizer": ""}
    if not facts.revision:
        named["model"] = "bundled" if folder == BUNDLED else folder.name  # it may be moved
    return {**named, **digests(folder)}


def model_folder(session: ChatSession) -> Path | None:
    """The folder or file that the session's model was loaded from; None if there is none."""
    name = session.facts.model
    if not name:
        return None
    if name == "bundled":
        return BUNDLED
    from minikv.models.hub import resolve

    return resolve(name, revision=session.facts.revision or None, offline=True).folder.resolve()


CACHE_BYTES = 512 << 20
"""The most bytes of a cache that is saved with its chat. A larger one has usually evicted
nothing."""
_RUN = {"model", "revision", "dtype", "seed", "system", "pin_system", "kv", "weights"}


@dataclass(frozen=True, slots=True)
class Saved:
    """A chat that was read and checked, without its cache. tokens: those of the conversation.
    curve: as in `ChatSession.curve`."""

    name: str
    facts: Mapping[str, Any]
    eviction: EvictionConfig
    turns: tuple[Turn, ...]
    pending: tuple[Document, ...]
    tokens: tuple[int, ...]
    curve: list[tuple[int, int, int]]

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents that the model has read, in order."""
        return tuple(document for turn in self.turns for document in turn.documents)

    @property
    def unread(self) -> bool:
        """Nothing was cached when the chat was saved."""
        return bool(self.facts["no_cache"] == _UNREAD)

    def without_cache(self, known: bool = True) -> ChatSnapshot:
        """The chat without its cache: the next question reads the whole conversation again, except
        for what a tier has of it. known: whether its tokens may be used."""
        from minikv.chat.snapshot import ChatSnapshot, Conversation

        said = Conversation(
            opened_with=system_messages(self.facts["opened_with"]),
            turns=list(self.turns),
            pending=list(self.pending),
            log=TokenLog(self.tokens if known else ()),
            curve=list(self.curve),
        )
        return ChatSnapshot(None, self.eviction, int(self.facts["seed"]), said)


# -- reading ------------------------------------------------------------------------------


def held(name: str) -> ChatFile:
    """Open a chat for reading and saving, and lock it. Converts it first if an earlier version
    saved it. Raises UsageError."""
    check_name(name)
    folder = chats_folder() / name
    with damage(name):
        if is_old(folder):
            rows = old_rows(folder)
            read_from(name, rows)  # an unreadable chat must not replace a readable one
            renew(name, {table: rows(table) for table in TABLES})
            saved = os.stat(folder / TRANSCRIPT)
            os.utime(folder / FILE, ns=(saved.st_atime_ns, saved.st_mtime_ns))
        if os.path.lexists(folder / TRANSCRIPT):
            remove_old(folder)
        return ChatFile(name, lock=True)


def resumed(settings: Settings, name: str, given: Collection[str]) -> Settings:
    """The settings for building the session of a saved chat: its own, except for the fields that
    the user stated (`given`). `Keeper.load` sets policy and budget later. Raises UsageError. Needs
    no torch."""
    with reading(name) as rows:
        run = facts_of(rows)["run"]
        if set(run) != _RUN:
            raise ValueError("it does not say how it was run")
        if run["weights"] not in WEIGHTS:  # older chats name the form of the file itself
            run["weights"] = "auto"
    fields = {field: value for field, value in run.items() if field not in given}
    if not set(given) & {"policy", "decode", "budget", "stride", "options"}:
        fields |= {"policy": "full", "decode": "auto"}  # until `Keeper.load` sets the chat's own
    if "model" in given:
        fields.pop("revision", None)
    return replace(settings, **fields)


def read(name: str) -> Saved:
    """A chat without its cache. Raises UsageError."""
    with reading(name) as rows:
        return read_from(name, rows)


def read_from(name: str, rows: Rows) -> Saved:
    """Like `read`, from open rows. Raises `DAMAGE` if anything is missing or altered."""
    from minikv.cli.documents.text import one_line

    ((text, tokens),) = rows("chat")
    facts = decoded(text)
    texts = list[Document]()
    for about, text in rows("document"):
        known = decoded(about)
        source = Source(**known["source"]) if known["source"] else None
        if known["name"] is not None and one_line(known["name"]) != known["name"]:
            raise ValueError(f"{known['name']!r:.60} is not a name of a document")  # it is shown
        texts.append(Document(text, known["name"], source))
    turns = list[Turn]()
    for about, question, answer in rows("turn"):
        known = decoded(about)
        documents = tuple(texts[i] for i in known["documents"])
        report = report_of(known["record"], known=True)
        thoughts = checked(str, known.get("thoughts", ""), "thoughts")
        turns.append(Turn(question, answer, documents, report, thoughts))
    if (facts["turns"], len(facts["documents"])) != (len(turns), len(texts)):
        raise ValueError("turns or documents are missing")
    pending = tuple(texts[i] for i in facts["pending"])
    eviction, ids = eviction_of(facts["identity"]), tuple(array.array("i", tokens))
    curve = [(int(a), int(b), int(c)) for a, b, c in facts["curve"]]
    # Check now what is used later, so that damage is found before anything is changed.
    kinds = {"seed": int, "cache": int, "opened_with": str, "system": str, "no_cache": str}
    for key, kind in (kinds | {"pin_system": bool}).items():
        checked(kind, facts[key], key)
    for key, words in (("reuse", REUSES), ("overflow", OVERFLOWS)):
        if facts.get(key, words[0]) not in words:
            raise ValueError(f"{key} {facts[key]!r:.20} is invalid")
    return Saved(name, facts, eviction, tuple(turns), pending, ids, curve)


def read_cache(rows: Rows, saved: Saved, kv: KVCache) -> ChatSnapshot:
    """The chat with its cache, for use in `kv`. Raises UsageError if the cache cannot be used."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    from minikv.cache.snapshot import CacheSnapshot

    if not saved.facts["cache"]:
        raise UsageError(f"chat {saved.name} has no cache: {saved.facts['no_cache']}", REREAD)
    with damage(saved.name, REREAD):
        data = b"".join(part for (part,) in rows("cache"))
        if len(data) != saved.facts["cache"]:
            raise ValueError("the cache has another length than when it was written")
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
        unfed, seen = () if pending is None else (pending,), held.state.position
        if len(saved.tokens) != seen + len(unfed) or saved.tokens[seen:] != unfed:
            raise ValueError("the tokens in the cache are not those of the chat")
        made = saved.without_cache()
        made = replace(made, held=held, said=replace(made.said, rereads=bool(state["rereads"])))
    if not kv.accepts(held, made.eviction.rules()):
        raise UsageError(
            f"the cache of chat {saved.name} is of another version of minikv: "
            f"{made.eviction.pair} stored other figures per token then",
            REREAD,
        )
    return made


# -- writing ------------------------------------------------------------------------------


def rows_of(
    session: ChatSession, identity: Mapping[str, object], *, ask: bool = False, same: int = 0
) -> dict[str, Iterable[Any]]:
    """The rows of a chat's file. ask: whether it is the chat of the last `ask`. same: how many
    turns at the beginning to leave out. Raises MemoryError."""
    turns = session.turns
    documents = (document for turn in turns for document in turn.documents)
    texts = list(dict.fromkeys((*documents, *session.pending)))
    cache, why = b"", "what it holds is chosen again from what is remembered"
    if not ask or not session.recalls or session.recall.kind == "none":
        cache, why = _cache(session)
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
        "opened_with": "".join(m.content for m in session.messages[:1] if m.role == "system"),
        "pending": [texts.index(document) for document in session.pending],
        "curve": [list(point) for point in session.curve],
        "run": _run(session),
    }
    about = [{"name": one.name, "source": one.source and asdict(one.source)} for one in texts]
    return {
        "chat": [(json.dumps(facts), array.array("i", session.log.ids).tobytes())],
        "document": zip(map(json.dumps, about), (one.text for one in texts), strict=True),
        "turn": (_turn_row(turn, texts) for turn in turns[same:]),
        "cache": parts(cache),
    }


def _cache(session: ChatSession) -> tuple[bytes, str]:
    """The cache as a safetensors file and ""; or b"" and why the cache is not saved."""
    if not session.fed:
        return b"", _UNREAD
    held_bytes = session.engine.kv.stats().held_bytes
    if held_bytes > CACHE_BYTES:
        return b"", f"it held {size(held_bytes)}, and at most {size(CACHE_BYTES)} are saved"
    from safetensors.torch import save

    snapshot = session.snapshot()
    assert snapshot.held is not None
    state = {
        "held": snapshot.held.record(),
        "owed": session.pending_token,
        "rereads": snapshot.said.rereads,
    }
    tensors = {f"column.{name}": column for name, column in snapshot.held.columns.items()}
    try:
        return save(tensors, {"state": json.dumps(state)}), ""
    except BaseException as error:
        # The library raises this if memory is short. It is no Exception, and has no public name.
        if type(error).__name__ != "PanicException":
            raise
        raise MemoryError from None


def _turn_row(turn: Turn, texts: Sequence[Document]) -> tuple[str, str, str]:
    documents = [texts.index(document) for document in turn.documents]
    about = {"documents": documents, "record": turn.report.to_dict(), **thoughts_of(turn)}
    return json.dumps(about), turn.question, turn.answer


def _run(session: ChatSession) -> dict[str, object]:
    """The fields of `Settings` that `resumed` needs to build this session again."""
    facts, folder = session.facts, model_folder(session)
    model = facts.model
    if folder is None or folder == BUNDLED:
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
        "weights": facts.weights if facts.weights in WEIGHTS else "auto",  # "auto": the file's own
    }
