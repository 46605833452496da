"""Chats on disk: saved after every turn, and continued later where they ended.

One directory per chat: `chat.jsonl`, a file per document with its text, the compressed cache, and
the tier if it is in a file. All of it is checked before any of it is used. Only the user can read
the files.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.cli.config import short
from minikv.cli.failures import explain
from minikv.cli.paths import chats_folder
from minikv.cli.saved.cache import read_cache, without_cache, write_cache
from minikv.cli.saved.files import (
    REREAD,
    TRANSCRIPT,
    all_or_nothing,
    check_name,
    damage,
    holds,
    lock,
    new_folder,
    written,
)
from minikv.cli.saved.identity import (
    POLICY,
    differences,
    document_hashes,
    fed_hash,
    identity,
    model_identity,
    tier_identity,
)
from minikv.cli.saved.listing import listing
from minikv.cli.saved.tier import TIER, find, place, settle
from minikv.cli.saved.transcript import Saved, TurnLines, read, texts_of, write_chat
from minikv.cli.terminal import Terminal
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.cache.tier_file import FileRows
    from minikv.chat.recall import Place
    from minikv.chat.session import ChatSession
    from minikv.chat.snapshot import ChatSnapshot

_FIELDS = {"options": ("policy_options", "decode_options")}
"""Field of an identity -> the setting that sets it, where the names differ."""


class Keeper:
    """Saves one chat at a time, and opens saved ones. A chat that is open here is locked."""

    def __init__(self, terminal: Terminal, *, active: bool = True) -> None:
        self.active = active
        self.name: str | None = None
        self._terminal = terminal
        self._lock: int | None = None
        self._written: tuple[int, ...] | None = None  # see `written`, by this keeper
        self._conversation = 0
        self._last: tuple[object, ...] = ()
        self._model: tuple[str, dict[str, object]] | None = None
        self._warned: set[str] = set()
        self._told = False
        self._lines = TurnLines()
        self.saved = False  # whether a save has succeeded in this run

    def attend(self, session: ChatSession) -> None:
        """If this session needs a file for its tier, put that file among the files of its chat."""

        def where() -> Place:
            return place(tier_identity(self._identity(session)), saved=self.active)

        session.recall.where = where

    def keep(self, session: ChatSession) -> None:
        """Save if anything changed since the last save. Never raises: if saving fails, one warning
        says so, and the chat continues."""
        if not self.active or not self._changed(session):
            return
        try:
            made = self._save(session, None)
        except Exception as error:
            reason = _reason(error)
            if reason not in self._warned:
                self._warned.add(reason)
                self._terminal.warn(f"this chat is not saved: {reason}; it continues unsaved")
            return
        if made and not self._told and self._terminal.err.isatty():
            assert self.name is not None
            self._told = True
            where = short(chats_folder() / self.name)
            self._terminal.note(f"  saved with all its text in {where}; --no-save turns that off")

    def kept(self, session: ChatSession) -> str | None:
        """Save what was not saved yet. The chat's name; None if it is not saved as it is now."""
        self.keep(session)
        return self.name if self.active and not self._changed(session) else None

    def save(self, session: ChatSession, name: str | None = None) -> Path:
        """Save now; with a `name`, under that name from now on. Raises UsageError if that fails."""
        if name is not None:
            check_name(name)
        self._changed(session)
        try:
            self._save(session, name, whole=True)
        except (OSError, MemoryError) as error:
            raise UsageError(f"the chat cannot be saved: {_reason(error)}") from None
        self.active = True
        assert self.name is not None
        return chats_folder() / self.name

    def fork(self, session: ChatSession, name: str) -> Path:
        """Save under a new name, and save there from now on; what was saved before stays as it is.
        On UsageError nothing has changed."""
        check_name(name)
        self._changed(session)
        if self.name is None:
            return self.save(session, name)
        if self.active:
            self.keep(session)
        before, handle, self._lock, self.name = self.name, self._lock, None, None
        try:
            self._save(session, name, whole=True, forked=True)
        except BaseException as error:
            self.name, self._lock = before, handle
            if isinstance(error, UsageError) or not isinstance(error, Exception):
                raise
            raise UsageError(f"the chat cannot be copied: {_reason(error)}") from None
        if handle is not None:
            os.close(handle)
        self.active = True
        return chats_folder() / name

    def load(
        self,
        session: ChatSession,
        name: str,
        *,
        reread: bool = False,
        given: Collection[str] = (),
    ) -> Saved:
        """Replace the chat of `session` by a saved one, with its policy, budget and seed.

        `given`: fields of `Settings` that the user stated. A chat that was saved with other values
        is refused, and so is one with another model, tokenizer or dtype, or with changed files. But
        if the chat has a tier of this model, policy, budget and --kv may differ, and the cache may
        be damaged. With `reread`, cache and tier are not used: the next question reads the whole
        conversation again. On UsageError nothing has changed.
        """
        check_name(name)
        if not (chats_folder() / name / TRANSCRIPT).exists():
            near = [entry.name for entry in listing()[:3]]
            hint = f"the last ones: {', '.join(near)}" if near else "/save NAME names a chat"
            raise UsageError(f"no saved chat {name!r}", hint)
        handle = None if name == self.name else lock(name)
        rows: FileRows | None = None
        try:
            saved = read(name)
            stated = [field for flag in given for field in _FIELDS.get(flag, (flag,))]
            if not reread:
                rows = self._tier(session, saved, given)
            own = session.recall.file
            kept = not reread and own is not None and own.is_at(saved.folder / TIER)
            tier = kept or rows is not None
            with damage(name):
                snapshot = self._snapshot(session, saved, stated, reread, tier=tier)
                if "seed" in given:
                    snapshot = replace(snapshot, seed=session.seed)
                session.restore(snapshot)
        except BaseException:
            if rows is not None:
                rows.close()
            if handle is not None:
                os.close(handle)
            raise
        if not kept:
            session.recall.clear()
        if rows is not None:
            self._adopt(session, rows)
        if "reuse" not in given:  # chats of versions without --reuse go on as this one does
            session.reuse = saved.header.get("reuse", session.reuse)
        if "system" not in given:
            session.system = str(saved.header["system"])
        if "pin_system" not in given:
            session.pin_system = bool(saved.header["pin_system"])
        if name != self.name:
            self.close()
            self._lock = handle
        self.name, self._conversation = name, session.conversation
        self._last, self._written = self._state(session), written(name)
        return saved

    def _snapshot(
        self,
        session: ChatSession,
        saved: Saved,
        stated: Collection[str],
        reread: bool,
        *,
        tier: bool,
    ) -> ChatSnapshot:
        """The chat with its cache; without it if the caller wants that, or if there is a `tier` and
        the cache cannot be used. Raises UsageError."""
        if not (reread or (tier and differences(self._identity(session), saved.header, stated))):
            self._refuse(session, saved, stated)
            try:
                snapshot = read_cache(saved)
                rules, kv = snapshot.eviction.rules(), session.engine.kv
                if snapshot.held is None or kv.accepts(snapshot.held, rules):
                    return snapshot
                raise UsageError(
                    f"the cache of chat {saved.name} is of another version of minikv: "
                    f"{snapshot.eviction.pair} stored other figures per token then",
                    REREAD,
                )
            except UsageError as error:
                if not tier:
                    raise
                if saved.header["cache"] is not None:
                    self._terminal.warn(f"{error}; the tier is used in its place")
        snapshot = without_cache(saved)
        if reread:
            snapshot = replace(snapshot, known=())
        vocab = session.tokenizer.vocab
        with damage(saved.name):
            if not all(0 <= id < vocab for id in snapshot.known):
                raise ValueError("its tokens are not those of this model")
        if set(stated) & set(POLICY):
            snapshot = replace(snapshot, eviction=session.eviction)
        return snapshot

    def _tier(self, session: ChatSession, saved: Saved, given: Collection[str]) -> FileRows | None:
        """The chat's tier, if it has one that can be used. If it is damaged, a warning says so."""
        from minikv.cache.tier_rows import TierError

        recall = session.recall
        if recall.kind == "none":
            return None
        try:
            rows = find(session, saved.folder, tier_identity(self._identity(session)))
        except TierError as error:
            self._terminal.warn(f"the tier of chat {saved.name} cannot be used: {error}")
            return None
        if rows is None:
            return None
        if "tier_dtype" in given and dict(recall.columns) != dict(rows.header.columns):
            rows.close()
            self._terminal.note("the tier has another number format than --tier-dtype says")
            return None
        if rows.damage:
            again = max(0, len(saved.tokens) - rows.rows)
            self._terminal.warn(
                f"the tier of chat {saved.name}: {rows.damage}; {again:,} tokens are read again"
            )
        return rows

    def _adopt(self, session: ChatSession, rows: FileRows) -> None:
        from minikv.cache.tier_rows import TierError

        try:
            session.recall.adopt(rows)
        except (TierError, MemoryError, RuntimeError) as error:
            self._terminal.warn(f"the tier cannot be used: {_reason(error)}")

    def _identity(self, session: ChatSession) -> dict[str, object]:
        """The session's identity. The model's files are hashed once."""
        mark = f"{session.facts.model}@{session.facts.revision}"
        if self._model is None or self._model[0] != mark:
            self._model = mark, model_identity(session)
        return identity(session, self._model[1])

    def _refuse(self, session: ChatSession, saved: Saved, stated: Collection[str]) -> None:
        """Raise a UsageError that lists every difference between the chat and this session."""
        found = differences(self._identity(session), saved.header, stated)
        if found:
            raise UsageError(
                f"the cache of chat {saved.name} does not belong to this run: {found}", REREAD
            )

    def _changed(self, session: ChatSession) -> bool:
        """Whether there is something to save. A new conversation gets a new name."""
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
            session.rereads,
        )

    def _save(
        self, session: ChatSession, name: str | None, *, whole: bool = False, forked: bool = False
    ) -> bool:
        """Save. Returns whether that made a new saved chat. whole: also save a tier that is in
        memory. forked: fail if the tier cannot be saved."""
        before = self.name
        self._hold()
        made = self._name(name)
        try:
            self._put(session, whole, forked)
        except BaseException:
            if made:  # an empty directory would be no chat
                assert self.name is not None
                shutil.rmtree(chats_folder() / self.name, ignore_errors=True)
                self.close()
                self.name = before
            raise
        self.saved = True
        return made

    def _put(self, session: ChatSession, whole: bool, forked: bool) -> None:
        """Write tier, cache, documents and transcript. The transcript is written last and replaces
        the old one in one step, so that every file it names exists."""
        assert self.name is not None
        folder = chats_folder() / self.name
        texts = texts_of(session)
        documents = [document for turn in session.turns for document in turn.documents]
        facts = {
            **self._identity(session),
            "system": session.system,
            "turns": len(session.turns),
            "documents": document_hashes(documents),
            "fed": fed_hash(session.fed),
            "shaped_by": session.evicted_for_turn,
        }
        self._settle(session, folder, whole, forked)
        with all_or_nothing(folder):
            cache, why = write_cache(session, folder, facts)
            write_chat(session, folder, texts, facts, cache, why, self._lines)
        self._written = written(self.name)
        self._last = self._state(session)

    def _hold(self) -> None:
        """If the file of the lock was removed or exchanged, lock the chat again. Raises UsageError
        if another minikv has the chat now, or has saved it meanwhile."""
        if self.name is None or self._lock is None or holds(self.name, self._lock):
            return
        handle = lock(self.name)
        if handle is None:
            return
        if written(self.name) not in (None, self._written):
            os.close(handle)
            raise UsageError(
                f"another minikv has saved chat {self.name}, whose lock was removed",
                "/fork NAME saves this one beside it",
            )
        os.close(self._lock)
        self._lock = handle

    def _settle(self, session: ChatSession, folder: Path, whole: bool, forked: bool) -> None:
        """Put the tier among the chat's files. If that fails, the chat is saved without it."""
        from minikv.cache.tier_rows import TierError

        try:
            settle(session, folder, tier_identity(self._identity(session)), whole=whole)
        except (TierError, OSError) as error:
            if forked:
                raise
            reason = _reason(error)
            if reason not in self._warned:
                self._warned.add(reason)
                self._terminal.warn(f"this chat is saved without its tier: {reason}")

    def _name(self, name: str | None) -> bool:
        """Make a directory for the chat (returns True), or rename the one that it has."""
        if name == self.name and name is not None:
            return False
        if name is not None and os.path.lexists(chats_folder() / name):
            raise UsageError(f"there is a chat {name} already", "choose another name")
        if self.name is not None and name is not None:
            os.rename(chats_folder() / self.name, chats_folder() / name)
            self.name = name
        elif self.name is None or not (chats_folder() / self.name).is_dir():
            self.close()
            wanted = name or self.name or time.strftime("%Y-%m-%d-%H%M%S")
            self.name = new_folder(wanted)
            self._lock = lock(self.name)
            return True
        return False

    def close(self) -> None:
        """Release the lock, so that another process can open the chat."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"
    return explain(error).message
