"""Lists saved chats, and reads the file of one and the records in it. Version 0.1.0 saved a chat as
`chat.jsonl` beside files with its documents and its cache; that is read here, too. Needs no
torch."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from minikv.chat.report import PLACES, STOPS, TurnReport, clipped
from minikv.chat.transcript import REUSES
from minikv.checks import guess
from minikv.cli.paths import chats_folder, opened, refuse_many
from minikv.cli.saved.database import (
    DAMAGE,
    FILE,
    LAST,
    NEW,
    ChatFile,
    check_name,
    is_name,
    parts,
    unreadable,
)
from minikv.errors import UsageError

TRANSCRIPT = "chat.jsonl"
_FILES = (FILE, TRANSCRIPT, NEW)  # every chat's folder has at least one of them
_NAMED = 5  # the most chats that an error names
_TITLE = 200  # the most characters of a title

Rows = Callable[[str], Sequence[Any]]
"""A function that returns the rows of one of a chat's tables, like `ChatFile.rows`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A saved chat in a list. saved: when, in seconds since 1970. nbytes: the size of its files.
    title: its first question, cut; for a damaged chat, of which nothing else is known, that it is
    damaged."""

    name: str
    saved: float = 0.0
    nbytes: int = 0
    title: str = "(damaged: it cannot be read)"
    turns: int = 0
    documents: int = 0
    damaged: bool = True


def listing() -> list[Entry]:
    """All saved chats, the newest first, without anything else in their directory."""
    try:
        names = sorted(filter(is_name, os.listdir(chats_folder())))
    except OSError:
        return []
    found = [entry for name in names if (entry := _entry(name))]
    return sorted(found, key=lambda entry: entry.saved, reverse=True)


def _entry(name: str) -> Entry | None:
    folder = chats_folder() / name
    files = [path for file in _FILES if os.path.lexists(path := folder / file)]
    if not files:
        return None
    found = Entry(name)
    with contextlib.suppress(OSError):  # somebody has removed it meanwhile
        sizes = [path.lstat().st_size for path in folder.rglob("*")]
        found = Entry(name, files[0].stat().st_mtime, sum(sizes))
    with contextlib.suppress(UsageError), reading(name) as rows:
        facts = facts_of(rows)
        title = " ".join(str(facts["title"])[:_TITLE].split())
        turns, documents = int(facts["turns"]), len(facts["documents"])
        return replace(found, title=title, turns=turns, documents=documents, damaged=False)
    return found


def newest() -> str:
    """The name of the chat that was saved last, other than by `ask`. Raises UsageError if there is
    none."""
    chats = [entry for entry in listing() if not entry.damaged and entry.name != LAST]
    if not chats:
        raise UsageError(f"no saved chat in {chats_folder()}", "chats are saved after every turn")
    return chats[0].name


def unknown(name: str) -> UsageError:
    """The error for a name under which no chat is saved."""
    if name == LAST:
        return UsageError("there is no ask to continue", "`minikv ask QUESTION FILE` keeps one")
    names = [entry.name for entry in listing()]
    if not names:
        return UsageError(f"no saved chat {name!r}", f"there is none in {chats_folder()}")
    some = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return UsageError(
        f"no saved chat {name!r}", f"{guess(name, names)}saved are {some}; `minikv chats` lists all"
    )


# -- reading one ----------------------------------------------------------------------------------


@contextlib.contextmanager
def damage(name: str, hint: str = "") -> Iterator[None]:
    """Turns every error that a damaged or missing file causes into one UsageError with the
    reason."""
    try:
        yield
    except OSError as error:
        folder = chats_folder() / name
        if not any(os.path.lexists(folder / file) for file in _FILES):
            raise unknown(name) from None
        raise UsageError(f"chat {name} cannot be read: {error.strerror}") from None
    except DAMAGE as error:
        if unreadable(error):
            raise UsageError(f"chat {name} cannot be read: {error}") from None
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"chat {name} is damaged: {clipped(what, 200)}",
            hint or f"`minikv chats rm {name}` removes it",
        ) from None


@contextlib.contextmanager
def reading(name: str) -> Iterator[Rows]:
    """A context for reading the rows of a chat. Raises UsageError, also in place of the errors that
    reading them raises inside."""
    check_name(name)
    with damage(name):
        if is_old(chats_folder() / name):
            yield old_rows(chats_folder() / name)
            return
        with contextlib.closing(ChatFile(name)) as file:
            yield file.rows


def facts_of(rows: Rows) -> Mapping[str, Any]:
    """The facts about a chat in its file. Raises `DAMAGE`."""
    ((facts, _),) = rows("chat")
    return decoded(facts)


def decoded(text: str) -> Mapping[str, Any]:
    """A JSON object of a chat's file. Raises ValueError, and RecursionError."""
    refuse_many(text.encode())
    found: Mapping[str, Any] = json.loads(text)
    return found


# -- records of turns -----------------------------------------------------------------------------

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
GONE_OPTIONS = {"gate", "near"}
"""Options of policies in earlier versions, which had no effect by default."""


class Wrong(ValueError):
    """A record is wrong. The message says why, and names the key."""


def report_of(record: object, *, known: bool = False) -> TurnReport:
    """The figures of a turn. known: other keys are an error. Raises Wrong."""
    names = {field.name for field in dataclasses.fields(TurnReport)} | _GONE
    if known and (other := set(checked(dict, record, "record")) - names):
        raise Wrong(f"record has keys that are not known: {sorted(map(str, other))[:3]}")
    report = fields_of(TurnReport, record, "record")
    report = dataclasses.replace(report, policy_options=without_gone(report.policy_options))
    for name, words in (("stop_reason", STOPS), ("tier", ("", *PLACES)), ("reuse", REUSES[1:])):
        if getattr(report, name) not in words:
            raise Wrong(f"record.{name} is {getattr(report, name)!r:.80}")
    return report


def without_gone(options: Mapping[str, _T]) -> dict[str, _T]:
    """Options of a policy without those that are gone."""
    return {name: value for name, value in options.items() if name not in GONE_OPTIONS}


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


# -- version 0.1.0 --------------------------------------------------------------------------------

_OLD = re.compile(r"chat\.jsonl|document-[0-9a-f]{16}\.txt|cache-[0-9a-f]{16}\.safetensors")
_FACTS = "title turns identity seed system pin_system opened_with pending curve no_cache".split()


def is_old(folder: Path) -> bool:
    """Whether version 0.1.0 saved this chat and no later version has converted it."""
    return os.path.lexists(folder / TRANSCRIPT) and not os.path.lexists(folder / FILE)


def old_rows(folder: Path) -> Rows:
    """The rows for the new file of such a chat. Raises OSError and `DAMAGE`; so do the rows."""

    def read(line: Mapping[str, Any]) -> bytes:
        """The content of the file that a line names."""
        path = folder / os.path.basename(line["file"])
        with opened(path) as file:
            data: bytes = file.read()
        if hashlib.sha256(data).hexdigest() != line["sha256"]:
            raise ValueError(f"the checksum of {path.name} does not fit: it was edited or damaged")
        return data

    def rows(table: str) -> Sequence[Any]:
        if table == "document":
            return [(_json(line, "name", "source"), read(line).decode()) for line in documents]
        if table == "turn":
            about = ("documents", "record")
            return [(_json(line, *about), line["question"], line["answer"]) for line in turns]
        if table == "cache":
            return parts(read(cache) if cache else b"")
        facts = {
            **{key: top[key] for key in _FACTS},
            "reuse": top.get("reuse", "once"),
            "run": {"kv": "auto", "weights": "auto", **top["run"]},
            "documents": [line["name"] for line in documents],
            "cache": cache["bytes"] if cache else 0,
        }
        ids = array.array("i", [id for line in tokens for id in line["ids"]])
        return [(json.dumps(facts), ids.tobytes())]

    with opened(folder / TRANSCRIPT) as file:
        body, newline, end = file.read().rstrip(b"\n").rpartition(b"\n")
    if json.loads(end)["sha256"] != hashlib.sha256(body + newline).hexdigest():
        raise ValueError(f"the checksum of {TRANSCRIPT} does not fit: it was cut or edited")
    top, *lines = [json.loads(line) for line in body.split(b"\n")]
    if top["kind"] != "chat" or top["identity"]["format"] != 1:
        raise ValueError(f"{TRANSCRIPT} is of another version")
    cache = top["cache"]
    documents, turns, tokens = (
        [line for line in lines if line["kind"] == kind] for kind in ("document", "turn", "tokens")
    )
    return rows


def _json(line: Mapping[str, Any], *keys: str) -> str:
    return json.dumps({key: line.get(key) for key in keys})


def remove_old(folder: Path) -> None:
    """Remove the old files of a chat that has its new file. The transcript goes last, so that a
    removal that was killed is repeated."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == TRANSCRIPT):
        if _OLD.fullmatch(path.name):
            path.unlink(missing_ok=True)
