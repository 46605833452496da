"""Chats on disk: saved after every turn, and taken up again where they ended.

One directory per chat: `chat.jsonl` (a header, the documents' names, a line per turn, a checksum),
a file per document with its text, and the compressed cache with its identity. The transcript is
written last and replaces the old one in one step, so that what it names is there and complete.
Everything is checked before any of it is used. Files are the user's alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minikv
from minikv.cache.budget import Budget
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import size
from minikv.chat.reuse import REUSES
from minikv.cli.failures import explain
from minikv.cli.terminal import Terminal
from minikv.errors import UsageError
from minikv.loader import Settings

if TYPE_CHECKING:
    from minikv.chat.report import TurnReport
    from minikv.chat.session import ChatSession
    from minikv.chat.snapshot import ChatSnapshot
    from minikv.chat.transcript import Document, Turn

FORMAT = 1
DOCUMENT_BYTES = 64 << 20
"""A chat with more text than this in its documents is not saved."""
CACHE_BYTES = 512 << 20
"""A larger cache (--policy full, mostly) is not saved: the chat is, and can be read again."""

_TRANSCRIPT = "chat.jsonl"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PART = re.compile(r"(cache-[0-9a-f]{16}\.safetensors|document-[0-9a-f]{16}\.txt)")
_POLICY = ("policy", "policy_options", "decode", "decode_options", "budget", "stride")
_RUN = ("model", "revision", "dtype", "seed", "system", "pin_system")
_LATER = ("kv", "weights")  # chats of before there was a choice lack it
_FLAGS = {"options": ("policy_options", "decode_options")}
_SAMPLED = 16 << 20  # bytes of weights in a file above which only samples of it are hashed


@dataclass(frozen=True, slots=True)
class Entry:
    """A saved chat in a list. `saved` is local time, `title` its first question, cut."""

    name: str
    saved: str
    turns: int
    title: str
    model: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A transcript that was read and checked; its cache was not looked at yet."""

    name: str
    folder: Path
    header: Mapping[str, Any]
    eviction: EvictionConfig
    turns: tuple[Turn, ...]
    pending: tuple[Document, ...]

    @property
    def documents(self) -> tuple[Document, ...]:
        """Those that have been read, in order."""
        return tuple(document for turn in self.turns for document in turn.documents)

    @property
    def curve(self) -> tuple[tuple[int, int, int], ...]:
        """As `ChatSession.curve`."""
        return tuple((int(a), int(b), int(c)) for a, b, c in self.header["curve"])


def root() -> Path:
    """$MINIKV_HOME/chats, else minikv/chats under $XDG_DATA_HOME or ~/.local/share."""
    home = os.environ.get("MINIKV_HOME")
    if home:
        return Path(home).expanduser() / "chats"
    data = os.environ.get("XDG_DATA_HOME", "")
    base = data if os.path.isabs(data) else os.path.expanduser("~/.local/share")
    return Path(base) / "minikv" / "chats"


def listing() -> list[Entry]:
    """All saved chats, the newest first; what is no chat is left out. Needs no torch."""
    found: list[tuple[float, Entry]] = []
    try:
        names = sorted(os.listdir(root()))
    except OSError:
        return []
    for name in names:
        path = root() / name / _TRANSCRIPT
        if _NAME.fullmatch(name) is None:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with _opened(path) as file:
                header = json.loads(file.readline(1 << 20))
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
            title, count = str(header["title"]), int(header["turns"])
            model = str(header["identity"]["model"])
            entry = Entry(name, when, count, title, model)
            found.append((path.stat().st_mtime, entry))
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0], reverse=True)]


def newest() -> str:
    """The name of the chat that was saved last. Raises UsageError if there is none."""
    chats = listing()
    if not chats:
        raise UsageError(f"no saved chat in {root()}", "chats are saved after every turn")
    return chats[0].name


def header(name: str) -> Mapping[str, Any]:
    """A chat's header, checked with the whole transcript. Raises UsageError. Needs no torch."""
    top = _lines(name)[0]
    with _as_damage(name):
        if not set(_RUN) <= set(top["run"]) <= {*_RUN, *_LATER}:
            raise ValueError("it does not say how it was run")
    return top


def resumed(settings: Settings, saved: Mapping[str, Any], given: Collection[str]) -> Settings:
    """Settings to build a saved chat's session with: as it was run, except for what the user
    `given` by field name. The policy and its budget come with `Keeper.load`."""
    run = dict(saved["run"])
    fields = {name: run[name] for name in run if name not in given}
    if not set(given) & {"policy", "decode", "budget", "stride", "options"}:
        fields |= {"policy": "full", "decode": "auto"}  # any budget will do until then
    if "model" in given:
        fields.pop("revision", None)
    return replace(settings, **fields)


def read(name: str) -> Saved:
    """A chat's transcript and documents. Raises UsageError for anything missing or altered."""
    from minikv.chat.report import DeviceMemory, KvBytes, Loss, Rates, Seconds, Tokens, TurnReport
    from minikv.chat.transcript import Document, Turn

    folder = root() / name
    lines = _lines(name)

    def report(record: Mapping[str, Any]) -> TurnReport:
        parts = {
            "tokens": Tokens(**record["tokens"]),
            "kv_bytes": KvBytes(**record["kv_bytes"]),
            "time_s": Seconds(**record["time_s"]),
            "rate": Rates(**record["rate"]),
            "loss": Loss(**record["loss"]),
            "device_mem": DeviceMemory(**record["device_mem"]),
            "warnings": tuple(record["warnings"]),
        }
        return TurnReport(**{**record, **parts})

    with _as_damage(name):
        texts = []
        for line in lines:
            if line["kind"] == "document":
                text = _part(folder, line["file"], line, DOCUMENT_BYTES).decode()
                texts.append(Document(text, line["name"]))
        turns = tuple(
            Turn(
                str(line["question"]),
                str(line["answer"]),
                tuple(texts[i] for i in line["documents"]),
                report(line["record"]),
            )
            for line in lines
            if line["kind"] == "turn"
        )
        top = lines[0]
        pending = tuple(texts[i] for i in top["pending"])
        saved = Saved(name, folder, top, _choice(top["identity"]), turns, pending)
        if top["turns"] != len(turns) or top["identity"]["documents"] != _hashes(saved.documents):
            raise ValueError("turns or documents are not those of the header")
        len(saved.curve), str(top["system"]), int(top["seed"]), bool(top["pin_system"])
        if top.get("reuse", "once") not in REUSES:
            raise ValueError(f"reuse {top['reuse']!r:.20} is none")
    return saved


class Keeper:
    """Saves one chat at a time, and opens saved ones. A chat that is open here is locked."""

    def __init__(self, terminal: Terminal, *, active: bool = True) -> None:
        self.active = active
        self.name: str | None = None
        self._terminal = terminal
        self._lock: int | None = None
        self._conversation = 0
        self._last: tuple[object, ...] = ()
        self._model: tuple[str, dict[str, object]] | None = None
        self._warned: set[str] = set()

    def keep(self, session: ChatSession) -> None:
        """Save, if anything changed since. Never fails: a save that does not succeed costs one
        warning, and the chat goes on."""
        if not self.active or not self._changed(session):
            return
        try:
            self._save(session, None)
        except Exception as error:
            reason = _reason(error)
            if reason not in self._warned:
                self._warned.add(reason)
                self._terminal.warn(f"this chat is not saved: {reason}; it goes on without")

    def save(self, session: ChatSession, name: str | None = None) -> Path:
        """Save now; with a `name`, under it from now on. Raises UsageError if that fails."""
        if name is not None:
            check_name(name)
        self._changed(session)
        try:
            self._save(session, name)
        except OSError as error:
            raise UsageError(f"the chat cannot be saved: {_reason(error)}") from None
        self.active = True
        assert self.name is not None
        return root() / self.name

    def load(
        self,
        session: ChatSession,
        name: str,
        *,
        reread: bool = False,
        given: Collection[str] = (),
    ) -> Saved:
        """Put a saved chat in the place of `session`'s, with its policy, budget and seed.

        `given`: fields of `Settings` that the user insists on: a chat saved under others is
        refused, and so is one with another model, tokenizer or dtype, or whose files are not as
        they were written. With `reread` the cache is left alone: the next question reads the whole
        conversation again. On UsageError nothing changed.
        """
        from minikv.chat.snapshot import ChatSnapshot

        check_name(name)
        if not (root() / name / _TRANSCRIPT).exists():
            near = [entry.name for entry in listing()[:3]]
            hint = f"the last ones: {', '.join(near)}" if near else "/save NAME names a chat"
            raise UsageError(f"no saved chat {name!r}", hint)
        lock = None if name == self.name else _locked(root() / name, name)
        try:
            saved = read(name)
            stated = [field for flag in given for field in _FLAGS.get(flag, (flag,))]
            eviction = saved.eviction
            if reread:
                if set(stated) & set(_POLICY):
                    eviction = session.eviction
                snapshot = ChatSnapshot(
                    None,
                    eviction,
                    int(saved.header["seed"]),
                    _messages(saved),
                    saved.documents,
                    saved.pending,
                    turns=saved.turns,
                    curve=saved.curve,
                )
            else:
                self._refuse(session, saved, stated)
                snapshot = _snapshot(saved)
            if "seed" in given:
                snapshot = replace(snapshot, seed=session.seed)
            with _as_damage(name):
                session.restore(snapshot)
        except BaseException:
            if lock is not None:
                os.close(lock)
            raise
        if "reuse" not in given:  # chats of before there was a choice go on as this one does
            session.reuse = saved.header.get("reuse", session.reuse)
        if "system" not in given:
            session.system = str(saved.header["system"])
        if "pin_system" not in given:
            session.pin_system = bool(saved.header["pin_system"])
        if name != self.name:
            self.close()
            self._lock = lock
        self.name, self._conversation = name, session.conversation
        self._last = self._state(session)
        return saved

    def identity(self, session: ChatSession) -> dict[str, object]:
        """What a cache of this session is good for: model, tokenizer, dtype, policy, budget."""
        mark = f"{session.facts.model}@{session.facts.revision}"
        if self._model is None or self._model[0] != mark:
            self._model = mark, _model_identity(session)
        eviction = session.eviction
        return {
            "format": FORMAT,
            "minikv": minikv.__version__,
            **self._model[1],
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

    def _refuse(self, session: ChatSession, saved: Saved, stated: Collection[str]) -> None:
        """Raise UsageError that names everything in which the chat and this session differ."""
        from minikv.chat.facts import Facts

        here, there = self.identity(session), saved.header["identity"]
        # Chats of before there was a choice:
        form = Facts(weights=saved.header["run"].get("weights", "auto")).form
        there = {"kv": there.get("dtype"), "form": form, **there}
        compared = [key for key in here if key not in _POLICY or key in stated]
        different = [key for key in compared if here[key] != there.get(key)]
        if not different:
            return
        if "weights" in different and "model" in different:
            different.remove("weights")
        parts = [
            f"{key} {_shown(here[key])} here, {_shown(there.get(key))} there" for key in different
        ]
        raise UsageError(
            f"the cache of chat {saved.name} does not belong to this run: {'; '.join(parts)}",
            "--reread takes the conversation up without it: the next question reads it again",
        )

    def _changed(self, session: ChatSession) -> bool:
        """Whether there is something to save; a new conversation gets a new name."""
        if session.conversation != self._conversation:
            self.close()
            self.name, self._last, self._conversation = None, (), session.conversation
        if not session.turns and self.name is None:
            return False
        return self._state(session) != self._last

    def _state(self, session: ChatSession) -> tuple[object, ...]:
        return (
            list(session.turns),
            list(session.pending),
            session.eviction,
            session.seed,
            session.reuse,
        )

    def _save(self, session: ChatSession, name: str | None) -> None:
        before = self.name
        made = self._name(name)
        try:
            self._put(session)
        except BaseException:
            if made:  # an empty directory would be no chat
                assert self.name is not None
                shutil.rmtree(root() / self.name, ignore_errors=True)
                self.close()
                self.name = before
            raise

    def _put(self, session: ChatSession) -> None:
        assert self.name is not None
        folder = root() / self.name
        texts = list(
            dict.fromkeys(document for turn in session.turns for document in turn.documents)
        )
        texts += [document for document in session.pending if document not in texts]
        total = sum(len(document.text.encode()) for document in texts)
        if total > DOCUMENT_BYTES:
            raise UsageError(
                f"its documents have {size(total)} of text, more than the {size(DOCUMENT_BYTES)} "
                "that are stored"
            )
        body: list[dict[str, object]] = []
        for document in texts:
            data = document.text.encode()
            mark = hashlib.sha256(data).hexdigest()
            file = f"document-{mark[:16]}.txt"
            if not _is_there(folder / file, len(data)):
                _write(folder, file, data)
            body.append(
                {
                    "kind": "document",
                    "name": document.name,
                    "characters": len(document.text),
                    "bytes": len(data),
                    "sha256": mark,
                    "file": file,
                }
            )
        for turn in session.turns:
            body.append(
                {
                    "kind": "turn",
                    "question": turn.question,
                    "answer": turn.answer,
                    "documents": [texts.index(document) for document in turn.documents],
                    "record": turn.report.to_dict(),
                }
            )
        documents = [document for turn in session.turns for document in turn.documents]
        whole = {
            **self.identity(session),
            "system": session.system,
            "turns": len(session.turns),
            "documents": _hashes(documents),
            "fed": _fed_hash(session.fed),
            "shaped_by": session.shaped_by,
        }
        cache, why = self._cache(session, folder, whole)
        title = session.turns[0].question if session.turns else ""
        first = session.messages[0] if session.messages else None
        top = {
            "kind": "chat",
            "title": " ".join(title.split())[:80],
            "turns": len(session.turns),
            "identity": whole,
            "cache": cache,
            "no_cache": why,
            "seed": session.seed,
            "system": session.system,
            "pin_system": session.pin_system,
            "reuse": session.reuse,
            "opened_with": first.content if first and first.role == "system" else "",
            "pending": [texts.index(document) for document in session.pending],
            "curve": [list(point) for point in session.curve],
            "run": _run(session),
        }
        written = "".join(json.dumps(line) + "\n" for line in (top, *body)).encode()
        end = {"kind": "end", "sha256": hashlib.sha256(written).hexdigest()}
        _write(folder, _TRANSCRIPT, written + json.dumps(end).encode() + b"\n")
        self._last = self._state(session)
        named = {str(line["file"]) for line in body if line["kind"] == "document"}
        _prune(folder, named | ({str(cache["file"])} if cache else set()))

    def _cache(
        self, session: ChatSession, folder: Path, whole: Mapping[str, object]
    ) -> tuple[dict[str, object] | None, str]:
        """Write the cache; its file, bytes and checksum, or None and the reason."""
        if not session.fed:
            return None, "nothing of it had been read when it was saved"
        held_bytes = session.engine.kv.stats().held_bytes
        if held_bytes > CACHE_BYTES:
            return None, (f"it held {size(held_bytes)}, and at most {size(CACHE_BYTES)} are saved")
        import torch
        from safetensors.torch import save

        snapshot = session.snapshot()
        assert snapshot.held is not None
        state = {
            "held": snapshot.held.record(),
            "owed": snapshot.pending_token,
            "shaped_by": snapshot.shaped_by,
        }
        tensors = {f"column.{name}": column for name, column in snapshot.held.columns.items()}
        tensors["fed"] = torch.tensor(snapshot.fed, dtype=torch.int64)
        data = save(tensors, {"identity": json.dumps(whole), "state": json.dumps(state)})
        mark = hashlib.sha256(data).hexdigest()
        file = f"cache-{mark[:16]}.safetensors"
        _write(folder, file, data)
        return {"file": file, "bytes": len(data), "sha256": mark}, ""

    def _name(self, name: str | None) -> bool:
        """Have a directory: a new one (True), or the one that there is under another name."""
        if name == self.name and name is not None:
            return False
        if name is not None and os.path.lexists(root() / name):
            raise UsageError(f"there is a chat {name} already", "choose another name")
        if self.name is not None and name is not None:
            os.rename(root() / self.name, root() / name)
            self.name = name
        elif self.name is None or not (root() / self.name).is_dir():
            self.close()
            for part in (root().parent, root()):
                part.parent.mkdir(parents=True, exist_ok=True)
                part.mkdir(mode=0o700, exist_ok=True)
            wanted = name or self.name or time.strftime("%Y-%m-%d-%H%M%S")
            self.name = _fresh(wanted)
            self._lock = _locked(root() / self.name, self.name)
            return True
        return False

    def close(self) -> None:
        """Let another process open the chat. Saving again goes on without the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_name(name: str) -> None:
    """Raises UsageError for a name that is no plain file name."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} cannot be the name of a chat",
            "letters, digits, dots, dashes and underscores, at most 64, beginning with a letter or "
            "digit",
        )


# -- reading back -------------------------------------------------------------------------


def _lines(name: str) -> list[dict[str, Any]]:
    """The transcript's lines, the header first, the checksum checked and left out."""
    check_name(name)
    try:
        with _opened(root() / name / _TRANSCRIPT) as file:
            data = file.read()
    except FileNotFoundError:
        raise UsageError(f"no saved chat {name!r}", "/load lists them") from None
    except OSError as error:
        raise UsageError(f"chat {name} cannot be read: {error.strerror}") from None
    with _as_damage(name):
        body, newline, end = data.removesuffix(b"\n").rpartition(b"\n")
        if json.loads(end) != {"kind": "end", "sha256": hashlib.sha256(body + newline).hexdigest()}:
            raise ValueError("the checksum of chat.jsonl does not fit: it was cut or edited")
        lines = [json.loads(line) for line in body.splitlines()]
        if lines[0]["kind"] != "chat":
            raise ValueError("no header")
        if lines[0]["identity"]["format"] != FORMAT:
            raise ValueError(f"format {lines[0]['identity']['format']!r:.20}, not {FORMAT}")
    return lines


def _snapshot(saved: Saved) -> ChatSnapshot:
    """The saved chat with its cache, checked against the transcript. Raises UsageError."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    from minikv.cache.snapshot import CacheSnapshot
    from minikv.chat.snapshot import ChatSnapshot

    top = saved.header
    if top["cache"] is None:
        raise UsageError(
            f"chat {saved.name} has no cache: {top['no_cache']}",
            "--reread takes the conversation up without it: the next question reads it again",
        )
    with _as_damage(saved.name):
        data = _part(saved.folder, top["cache"]["file"], top["cache"], 2 * CACHE_BYTES)
        length = int.from_bytes(data[:8], "little")
        written = json.loads(data[8 : 8 + length])["__metadata__"]
        if json.loads(written["identity"]) != top["identity"]:
            raise ValueError("the cache is of another chat or of another turn")
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        state = json.loads(written["state"])
        fed, pending_token, shaped_by = (
            tensors.pop("fed").tolist(),
            state["owed"],
            state["shaped_by"],
        )
        columns = {name.removeprefix("column."): tensor for name, tensor in tensors.items()}
        held = CacheSnapshot.read(state["held"], columns)
        if held.position != len(fed) or _fed_hash(fed) != top["identity"]["fed"]:
            raise ValueError("the tokens in the cache are not those of the transcript")
    return ChatSnapshot(
        held,
        saved.eviction,
        int(top["seed"]),
        _messages(saved),
        saved.documents,
        saved.pending,
        tuple(fed),
        pending_token,
        shaped_by,
        saved.turns,
        saved.curve,
    )


def _messages(saved: Saved) -> tuple[Any, ...]:
    """The transcript as the session has it."""
    from minikv.chat.transcript import Message

    opened = str(saved.header["opened_with"])
    system = [Message("system", opened)] if opened else []
    return (*system, *(message for turn in saved.turns for message in turn.messages()))


def _choice(identity: Mapping[str, Any]) -> EvictionConfig:
    value, unit = str(identity["budget"]).split()
    if unit not in ("rows", "share", "bytes") or Fraction(value) <= 0:
        raise ValueError(f"{identity['budget']!r:.40} is no budget")
    return EvictionConfig(
        str(identity["policy"]),
        str(identity["decode"]),
        Budget(unit, Fraction(value)),
        dict(identity["policy_options"]),
        dict(identity["decode_options"]),
        int(identity["stride"]),
    )


def _part(folder: Path, file: str, record: Mapping[str, Any], limit: int) -> bytes:
    """A file that the transcript names, whole and unchanged. Raises ValueError, OSError."""
    if _PART.fullmatch(file) is None:
        raise ValueError(f"{file!r:.80} is not a file of a chat")
    if not 0 <= record["bytes"] <= limit:
        raise ValueError(f"{file} is too large")
    with _opened(folder / file) as opened:
        data: bytes = opened.read(record["bytes"] + 1)
    if len(data) != record["bytes"]:
        raise ValueError(f"{file} is not as long as it was written: it was cut or edited")
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise ValueError(f"the checksum of {file} does not fit: it was edited or damaged")
    return data


@contextlib.contextmanager
def _as_damage(name: str) -> Iterator[None]:
    """Whatever a damaged file leads to becomes one UsageError with the reason."""
    try:
        yield
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        raise UsageError(f"chat {name} is damaged: {missing} is missing", _KEPT) from None
    except OSError as error:
        raise UsageError(f"chat {name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"chat {name} is damaged: {what:.200}", _KEPT) from None


_KEPT = "nothing of it was used; --reread works if only the cache is damaged"


# -- identity -----------------------------------------------------------------------------


def _model_identity(session: ChatSession) -> dict[str, object]:
    """Name and revision for people, and hashes of what the weights and the tokenizer are."""
    facts, folder = session.facts, _model_folder(session)
    named = {"model": facts.model, "revision": facts.revision}
    if folder is None:
        return {**named, "weights": "", "tokenizer": ""}
    if not facts.revision:
        named["model"] = "bundled" if folder == _bundled() else folder.name  # wherever it lies
    weights = hashlib.sha256()
    for file in ("config.json", "generation_config.json", "params.json"):
        _add_file(weights, folder / file)
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]):
        _add_file(weights, path)
    tokenizer = hashlib.sha256()
    for file in (
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
    ):
        _add_file(tokenizer, folder / file)
    return {**named, "weights": weights.hexdigest()[:32], "tokenizer": tokenizer.hexdigest()[:32]}


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    """Name, size and content; of a large file its beginning and 64 evenly spaced samples."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        digest.update(f"{path.name} {length}\n".encode())
        if length <= _SAMPLED:
            digest.update(file.read())
            return
        digest.update(file.read(1 << 20))
        for i in range(64):
            file.seek((length - 4096) * i // 63)
            digest.update(file.read(4096))


def _model_folder(session: ChatSession) -> Path | None:
    """Where the session's model was loaded from; None for one that came from no folder."""
    name = session.facts.model
    if not name:
        return None
    if name == "bundled":
        return _bundled()
    from minikv.models.hub import resolve

    return resolve(name, revision=session.facts.revision or None, offline=True).folder.resolve()


def _bundled() -> Path:
    from minikv.models import BUNDLED

    return BUNDLED


def _run(session: ChatSession) -> dict[str, object]:
    """The fields of `Settings` that build this session again, its policy aside."""
    facts, folder = session.facts, _model_folder(session)
    model = facts.model
    if folder is None or folder == _bundled():
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


def _hashes(documents: Collection[Document]) -> list[str]:
    return [hashlib.sha256(document.text.encode()).hexdigest() for document in documents]


def _fed_hash(fed: Collection[int]) -> str:
    return hashlib.sha256(",".join(map(str, fed)).encode()).hexdigest()


def _shown(value: object) -> str:
    """A value of an identity in a message; hashes are cut."""
    text = "nothing" if value is None else str(value) or "none"
    return f"{text[:12]}..." if re.fullmatch(r"[0-9a-f]{20,}", text) else text


# -- files --------------------------------------------------------------------------------


def _opened(path: Path) -> Any:
    """A regular file to read, no link. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "not a regular file")
    return open(handle, "rb")


def _write(folder: Path, name: str, data: bytes) -> None:
    """Put a file there in one step. Raises OSError, and leaves what was there."""
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    handle = os.open(temporary, flags, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _is_there(path: Path, length: int) -> bool:
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_size == length


def _prune(folder: Path, named: Collection[str]) -> None:
    """Remove what earlier saves, or one that was cut off, have left."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            old = _PART.fullmatch(name) is not None and name not in named
            if old or (name.startswith(".") and name.endswith(".tmp")):
                os.unlink(folder / name)


def _fresh(name: str) -> str:
    """Make a directory of this name, or of the next free one. Raises OSError."""
    for i in range(1, 1000):
        candidate = name if i == 1 else f"{name}-{i}"
        try:
            os.mkdir(root() / candidate, 0o700)
        except FileExistsError:
            continue
        return candidate
    raise OSError(0, f"no free name like {name}")


def _locked(folder: Path, name: str) -> int | None:
    """Hold the chat: an open handle, None where locks do not work. Raises UsageError if another
    process holds it."""
    try:
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None  # a read-only home: nobody can write there
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UsageError(
            f"chat {name} is open in another minikv", "leave it there, or open another chat"
        ) from None
    except OSError:
        os.close(handle)
        return None
    return handle


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"
    return explain(error).message
