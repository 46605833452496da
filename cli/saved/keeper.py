"""Chats on disk: saved after every turn, and continued later where they ended.

A directory per chat, with a file for its text and its compressed cache, and the tier if that is in
a file. Only the user can read them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minikv.chat.report import amount
from minikv.chat.transcript import TokenLog
from minikv.cli.failures import explain
from minikv.cli.paths import chats_folder
from minikv.cli.saved.database import (
    FILE,
    LAST,
    REREAD,
    ChatFile,
    check_name,
    damage,
    new_folder,
    private,
    renew,
)
from minikv.cli.saved.identity import (
    POLICY,
    TIER,
    differences,
    find,
    identity,
    model_identity,
    place,
    settle,
    taken_out,
    tier_identity,
)
from minikv.cli.saved.transcript import Saved, held, read_cache, read_from, rows_of, texts_of
from minikv.cli.screen.terminal import Terminal
from minikv.cli.settings.config import short
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.cache.tier_file import FileRows
    from minikv.chat.recall import Place
    from minikv.chat.session import ChatSession
    from minikv.chat.snapshot import ChatSnapshot

_FIELDS = {"options": ("policy_options", "decode_options")}
"""Field of an identity -> the setting that sets it, where the names differ."""


class Keeper:
    """Saves one chat at a time, and opens saved ones. A chat that is open here is locked. name: of
    the chat; saved: whether a save has succeeded in this run. asks: a loaded `LAST` is saved in its
    place; otherwise it continues under a name of its own."""

    def __init__(self, terminal: Terminal, *, active: bool = True, asks: bool = False) -> None:
        self.active, self.saved, self._asks = active, False, asks
        self.name: str | None = None
        self._named = False  # or saved, by the user
        self._terminal = terminal
        self._file: ChatFile | None = None
        self._conversation = 0
        self._last: tuple[Any, ...] = ()  # the state that is in the file
        self._model: tuple[str, dict[str, object]] | None = None
        self._warned: set[str] = set()
        self._told = False

    def attend(self, session: ChatSession) -> None:
        """If this session needs a file for its tier, put that file among the files of its chat."""

        def where() -> Place:
            saved = self.active and self.name != LAST
            return place(tier_identity(self._identity(session)), saved=saved)

        session.recall.where = where

    def keep(self, session: ChatSession) -> None:
        """Save if anything changed since the last save. Never raises: if saving fails, one warning
        says so, and the chat continues."""
        if not self.active or not self._changed(session):
            return
        try:
            made = self._save(session, None)
        except Exception as error:
            self._warn(f"this chat is not saved: {_reason(error)}; it continues unsaved")
            return
        if made and not self._told and self._terminal.err.isatty():
            assert self.name is not None
            self._told = True
            where = short(chats_folder() / self.name)
            self._terminal.note(f"  saved with all its text in {where}; --no-save turns that off")

    def keep_ask(self, session: ChatSession) -> None:
        """Keep the chat of an `ask` in the place of the last one. Never raises, as `keep`."""
        folder = chats_folder() / LAST
        first = not folder.is_dir()
        try:
            private(folder)
            facts = self._identity(session)
            renew(LAST, rows_of(session, facts, ask=True))
        except Exception as error:
            self._warn(f"`ask --continue` cannot continue this: {_reason(error)}")
            return
        if first and self._terminal.err.isatty():
            self._terminal.note(
                f"  kept with all its text in {short(folder)}, for `minikv ask --continue`; "
                "--remember off keeps nothing"
            )

    def kept(self, session: ChatSession) -> str | None:
        """Save what was not saved yet. The chat's name; None if it is not saved as it is now, or
        will not stay."""
        self.keep(session)
        stays = self._named or bool(session.turns)
        return self.name if self.active and stays and not self._changed(session) else None

    def save(self, session: ChatSession, name: str | None = None) -> Path:
        """Save now; with a `name`, under that name from now on. Raises UsageError if that fails."""
        if name is not None:
            check_name(name, own=True)
        self._changed(session)
        try:
            self._save(session, name, whole=True)
        except (OSError, MemoryError) as error:
            raise UsageError(f"the chat cannot be saved: {_reason(error)}") from None
        self.active = self._named = True
        assert self.name is not None
        return chats_folder() / self.name

    def fork(self, session: ChatSession, name: str) -> Path:
        """Save under a new name, and save there from now on; what was saved before stays as it is.
        On UsageError nothing has changed."""
        check_name(name, own=True)
        self._changed(session)
        if self.name is None:
            return self.save(session, name)
        if self.active:
            self.keep(session)
        before = self.name, self._file, self._last
        self.name, self._file, self._last = None, None, ()
        try:
            self._save(session, name, whole=True, forked=True)
        except BaseException as error:
            self.name, self._file, self._last = before
            if isinstance(error, UsageError) or not isinstance(error, Exception):
                raise
            raise UsageError(f"the chat cannot be copied: {_reason(error)}") from None
        if before[1] is not None:
            before[1].close()
        self.active = self._named = True
        return chats_folder() / name

    def load(
        self, session: ChatSession, name: str, *, reread: bool = False, given: Collection[str] = ()
    ) -> Saved:
        """Replace the chat of `session` by a saved one, with its policy, budget and seed.

        `given`: fields of `Settings` that the user stated. A chat that was saved with other values
        is refused, and so is one with another model, tokenizer or dtype, or with changed files. But
        if the chat has a tier of this model, policy, budget and --kv may differ, and the cache may
        be damaged. With `reread`, cache and tier are not used: the next question reads the whole
        conversation again. On UsageError nothing has changed.
        """
        from minikv.cache.tier_rows import TierError

        mine = self._file if name == self.name else None
        with contextlib.ExitStack() as undone:
            file = mine or undone.enter_context(contextlib.closing(held(name)))
            saved = read_from(file)
            stated = [field for flag in given for field in _FIELDS.get(flag, (flag,))]
            rows = None if reread else self._tier(session, saved, given)
            if rows is not None:
                undone.callback(rows.close)
            own = session.recall.file
            kept = not reread and own is not None and own.is_at(chats_folder() / name / TIER)
            tier = kept or rows is not None or name == LAST
            with damage(name):
                snapshot = self._snapshot(session, file, saved, stated, reread=reread, tier=tier)
                if "seed" in given:
                    snapshot = replace(snapshot, seed=session.seed)
                session.restore(snapshot)
            undone.pop_all()
        if not kept:
            session.recall.clear()
        if rows is not None:
            try:
                session.recall.adopt(rows)
            except (TierError, MemoryError, RuntimeError) as error:
                self._terminal.warn(f"the tier cannot be used: {_reason(error)}")
        for setting in {"reuse", "overflow", "system", "pin_system"}.difference(given):
            if setting in saved.facts:  # else it was saved by an earlier version
                setattr(session, setting, saved.facts[setting])
        if file is not mine:
            self.close()
        self.name, self._named, self._conversation = name, True, session.conversation
        self._hold(file)
        self._last = self._state(session)
        if name == LAST and not self._asks:
            self.close()
            self.name, self._named, self._last = None, False, ()
        return saved

    def _snapshot(
        self,
        session: ChatSession,
        file: ChatFile,
        saved: Saved,
        stated: Collection[str],
        *,
        reread: bool,
        tier: bool,
    ) -> ChatSnapshot:
        """The chat with its cache; without it if the caller wants that, or if there is a `tier` and
        the cache cannot be used. Raises UsageError."""
        here = self._identity(session)
        found = "" if reread else differences(here, saved.facts, stated)
        if saved.name == LAST and (other := differences(here, saved.facts, ())) and not reread:
            raise UsageError(f"the last ask does not belong to this run: {other}")
        if found and not tier:
            raise UsageError(
                f"the cache of chat {saved.name} does not belong to this run: {found}", REREAD
            )
        if not reread and not found:
            try:
                snapshot = read_cache(file, saved)
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
                if saved.facts["cache"]:
                    self._terminal.warn(f"{error}; the tier is used in its place")
        snapshot = saved.without_cache()
        if reread:
            snapshot = replace(snapshot, said=replace(snapshot.said, log=TokenLog()))
        vocab = session.tokenizer.vocab
        with damage(saved.name):
            if not all(0 <= id < vocab for id in snapshot.said.log.ids):
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
        belongs = tier_identity(self._identity(session))
        try:
            rows = find(session, chats_folder() / saved.name, belongs)
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
                f"the tier of chat {saved.name}: {rows.damage}; {amount(again, 'token')} are "
                "read again"
            )
        return rows

    def _identity(self, session: ChatSession) -> dict[str, object]:
        """The session's identity. The model's files are hashed once."""
        mark = f"{session.facts.model}@{session.facts.revision}"
        if self._model is None or self._model[0] != mark:
            self._model = mark, model_identity(session)
        return identity(session, self._model[1])

    def _changed(self, session: ChatSession) -> bool:
        """Whether there is something to save. A new conversation gets a new name."""
        if session.conversation != self._conversation:
            self.close()
            self.name, self._named, self._last = None, False, ()
            self._conversation = session.conversation
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
        memory. forked: fail if the tier cannot be saved; otherwise the chat is saved without it."""
        from minikv.cache.tier_rows import TierError

        before = self.name
        made = self._place(name)
        assert self.name is not None
        folder = chats_folder() / self.name
        try:
            if self._file is None:
                there = os.path.lexists(folder / FILE)
                self._hold(held(self.name) if there else ChatFile(self.name, new=True))
            assert self._file is not None
            texts_of(session)  # raises, if at all, before the tier is moved
            facts = self._identity(session)
            if self.name != LAST:
                try:
                    settle(session, folder, tier_identity(facts), whole=whole)
                except (TierError, OSError) as error:
                    if forked:
                        raise
                    self._warn(f"this chat is saved without its tier: {_reason(error)}")
            pairs = zip(session.turns, self._last[0] if self._last else (), strict=False)
            same = len([*takewhile(lambda pair: pair[0] is pair[1], pairs)])
            rows = rows_of(session, facts, ask=self.name == LAST, same=same)
            self._file.write(rows, same)
        except BaseException:
            if made:  # an empty directory would be no chat
                taken_out(session, folder)
                shutil.rmtree(folder, ignore_errors=True)
                self._release()
                self.name = before
            raise
        self._last = self._state(session)
        self.saved = True
        return made

    def _place(self, name: str | None) -> bool:
        """Make a directory for the chat (returns True), or rename the one that it has."""
        if name not in (None, self.name) and os.path.lexists(chats_folder() / str(name)):
            raise UsageError(f"there is a chat {name} already", "choose another name")
        if self._file is not None and self._file.gone:
            self._release()
            self._last = ()
        if self._file is not None:
            self._file.check()
        if self.name is None or not (chats_folder() / self.name).is_dir():
            self.name = new_folder(name or self.name or time.strftime("%Y-%m-%d-%H%M%S"))
            return True
        if name not in (None, self.name):
            self._release()
            os.rename(chats_folder() / self.name, chats_folder() / str(name))
            self.name = name
        return False

    def _hold(self, file: ChatFile) -> None:
        """From now on this is the chat's file."""
        self._file = file
        if not file.locks:
            self._warn(
                f"files in {short(chats_folder())} cannot be locked: keep this chat open in one "
                "minikv only"
            )

    def _warn(self, line: str) -> None:
        """Warn, but not twice of the same."""
        if line not in self._warned:
            self._warned.add(line)
            self._terminal.warn(line)

    def close(self) -> None:
        """Release the lock, so that another process can open the chat. One without a turn, which
        the user did not name, is removed."""
        if self._file is not None and not self._named and self._last and not self._last[0]:
            shutil.rmtree(chats_folder() / str(self.name), ignore_errors=True)
            self.name = None
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"
    return explain(error).message
