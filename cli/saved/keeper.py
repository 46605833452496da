"""Saves chats to disk after every turn, and opens them later.

A chat is a directory with a file for its text and its compressed cache, and the tier if that is in
a file. Only the user can read them. Until a chat is saved, its tier has a hidden name among the
chats; then it is among the chat's files. For a chat that is not saved, it is a file in the user's
cache directory, without a name.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minikv.chat.report import amount
from minikv.cli.failures import explain
from minikv.cli.paths import chats_folder, private
from minikv.cli.saved.database import FILE, LAST, REREAD, ChatFile, check_name, new_folder, renew
from minikv.cli.saved.listing import Rows, damage, is_old
from minikv.cli.saved.transcript import (
    POLICY,
    Saved,
    differences,
    held,
    identity,
    model_identity,
    read,
    read_cache,
    read_from,
    rows_of,
)
from minikv.cli.screen.terminal import Terminal
from minikv.cli.settings.config import short
from minikv.errors import MinikvError, UsageError
from minikv.models.errors import ModelError

if TYPE_CHECKING:
    from minikv.cache.tier_file import FileRows
    from minikv.chat.eviction_config import EvictionConfig
    from minikv.chat.recall import Place
    from minikv.chat.session import ChatSession
    from minikv.chat.snapshot import ChatSnapshot


FAILURES = (MinikvError, ModelError, OSError, MemoryError, RuntimeError)
"""What saving a chat may raise, and using its tier; torch raises RuntimeError where memory or a
device fails."""


class Keeper:
    """Saves one chat at a time, and opens saved ones. An open chat is locked. name: its name.
    saved: whether a save has succeeded in this run. asks: whether a loaded `LAST` is saved under
    that name again; otherwise it gets a name of its own."""

    def __init__(self, terminal: Terminal, *, active: bool = True, asks: bool = False) -> None:
        self.active, self.saved, self._asks = active, False, asks
        self.name: str | None = None
        self._named = False  # whether the user named it, or saved it
        self._terminal = terminal
        self._file: ChatFile | None = None
        self._conversation = 0
        self._last: tuple[Any, ...] = ()  # the state that the file has
        self._model: tuple[str, dict[str, object]] | None = None
        self._said: set[str] = set()

    def attend(self, session: ChatSession) -> None:
        """Make this session put the file of its tier, if it needs one, beside its saved chat."""
        session.recall.where = lambda: place(
            self._identity(session), saved=self.active and self.name != LAST
        )

    def keep(self, session: ChatSession) -> None:
        """Save if anything has changed since the last save. If that fails, one warning says so, and
        the chat continues."""
        if not self.active or not self._changed(session):
            return
        first = self.name is None and not self.saved
        try:
            self._save(session)
        except FAILURES as error:
            self._warn(f"this chat is not saved: {explain(error).message}; it continues unsaved")
            return
        if first and self._terminal.err.isatty():
            where = short(chats_folder() / str(self.name))
            self._terminal.note(f"  saved with all its text in {where}; --no-save turns that off")

    def keep_ask(self, session: ChatSession) -> None:
        """Save the chat of an `ask` in place of the last one. If that fails, a warning says so."""
        folder = chats_folder() / LAST
        first = not folder.is_dir()
        try:
            private(folder)
            renew(LAST, rows_of(session, self._identity(session), ask=True))
        except FAILURES as error:
            self._warn(f"`ask --continue` cannot continue this: {explain(error).message}")
            return
        if first and self._terminal.err.isatty():
            self._terminal.note(
                f"  kept with all its text in {short(folder)}, for `minikv ask --continue`; "
                "--remember off keeps nothing"
            )

    def kept(self, session: ChatSession) -> str | None:
        """Save if necessary. Returns the chat's name; None if its present state is not saved, or if
        `close` would remove it."""
        self.keep(session)
        stays = self._named or bool(session.turns)
        return self.name if self.active and stays and not self._changed(session) else None

    def save(self, session: ChatSession, name: str | None = None, *, fork: bool = False) -> Path:
        """Save now; with a `name`, under that name from now on; with `fork`, as a copy under that
        name. Raises UsageError; with `fork`, nothing has changed then."""
        self._changed(session)
        if name is not None and (fork or name != self.name):
            check_name(name, own=True)
            if os.path.lexists(chats_folder() / name):
                raise UsageError(f"there is a chat {name} already", "choose another name")
        try:
            if fork and self.name is not None:
                self.keep(session)
                self._create(session, str(name), whole=True, forked=True)
            else:
                self._save(session, name, whole=True)
        except UsageError:
            raise
        except FAILURES as error:
            raise UsageError(f"the chat cannot be saved: {explain(error).message}") from None
        self.active = self._named = True
        return chats_folder() / str(self.name)

    def load(
        self, session: ChatSession, name: str, *, reread: bool = False, given: Collection[str] = ()
    ) -> Saved:
        """Replace the chat of `session` by a saved one, with its policy, budget and seed, except
        what the user stated (`given`, fields of `Settings`).

        Raises UsageError if the chat belongs to another model, tokenizer or number format, or if
        its files were changed; then nothing has changed here. If the chat has a tier of this model,
        --kv may differ and the cache may be damaged. Under another policy or budget, its cache is
        not used, and the next question recalls the conversation from the tier or reads it again.
        With `reread`, neither cache nor tier is used.
        """
        mine = self._file if name == self.name else None
        with contextlib.ExitStack() as undone, damage(name):
            if mine is None and is_old(chats_folder() / name):
                # What is refused is not converted.
                self._differs(session, read(name), reread=reread, spare=False)
            if mine is not None:
                mine.refresh()
            file = mine or undone.enter_context(contextlib.closing(held(name)))
            saved, rows = read_from(name, file.rows), None
            if not reread:
                here = self._identity(session)
                rows = find_tier(session, saved, here, given, self._terminal.warn)
            own = rows is not None and rows is session.recall.file
            if rows is not None and not own:
                undone.callback(rows.close)
            spare = rows is not None or name == LAST or saved.unread
            snapshot = self._snapshot(session, file.rows, saved, given, reread=reread, spare=spare)
            if "seed" in given:
                snapshot = replace(snapshot, seed=session.seed)
            session.restore(snapshot)
            undone.pop_all()
        if not own:
            session.recall.clear()
            try:
                if rows is not None:
                    session.recall.adopt(rows)
            except FAILURES as error:
                self._terminal.warn(f"the tier cannot be used: {explain(error).message}")
        for setting in {"reuse", "overflow", "system", "pin_system"}.difference(given):
            if setting in saved.facts:  # an earlier version did not save all of them
                setattr(session, setting, saved.facts[setting])
        if file is not mine:
            self.close()
        self._hold(file)
        self._named, self._conversation = True, session.conversation
        self._last = self._state(session)
        if name == LAST and not self._asks:
            self._leave()
        return saved

    def _snapshot(
        self,
        session: ChatSession,
        rows: Rows,
        saved: Saved,
        given: Collection[str],
        *,
        reread: bool,
        spare: bool,
    ) -> ChatSnapshot:
        """The chat with its cache; without it if the caller wants that, or if it cannot be used and
        is `spare`, because the chat has a tier. Raises UsageError, and `DAMAGE`."""
        eviction = _chosen(session.eviction, saved.eviction, given)
        differs = self._differs(session, saved, reread=reread, spare=spare)
        try:
            if not reread and not differs and eviction == saved.eviction:
                return read_cache(rows, saved, session.engine.kv)
        except UsageError as error:
            if not spare:
                raise
            if saved.facts["cache"]:
                self._terminal.warn(f"{error}; the tier is used in its place")
        snapshot = saved.without_cache(known=not reread)
        vocab = session.tokenizer.vocab
        if not all(0 <= id < vocab for id in snapshot.said.log.ids):
            raise ValueError("its tokens are not those of this model")
        return replace(snapshot, eviction=eviction)

    def _differs(self, session: ChatSession, saved: Saved, *, reread: bool, spare: bool) -> bool:
        """Whether the chat's cache is of another model or number format. Raises UsageError if the
        cache is needed."""
        there = saved.facts["identity"]
        found = "" if reread else differences(self._identity(session), there)
        if found and saved.name == LAST:
            raise UsageError(
                f"the last ask does not belong to this run: {found}",
                "-c continues it as it was: leave that flag out, or ask again without -c",
            )
        if found and not spare:
            raise UsageError(
                f"the cache of chat {saved.name} does not belong to this run: {found}", REREAD
            )
        return bool(found)

    def _identity(self, session: ChatSession) -> dict[str, object]:
        """The session's identity. The model's files are hashed once."""
        mark = f"{session.facts.model}@{session.facts.revision}"
        if self._model is None or self._model[0] != mark:
            self._model = mark, model_identity(session)
        return identity(session, self._model[1])

    def _changed(self, session: ChatSession) -> bool:
        """Whether there is something to save. Leaves the saved chat if the conversation is new."""
        if session.conversation != self._conversation:
            self._leave()
            self._conversation = session.conversation
        if not session.turns and self.name is None:
            return False
        return self._state(session) != self._last

    def _state(self, session: ChatSession) -> tuple[Any, ...]:
        texts = list(session.turns), list(session.pending)
        return *texts, session.eviction, session.seed, session.reuse, session.rereads

    def _save(self, session: ChatSession, name: str | None = None, *, whole: bool = False) -> None:
        """Save; with a `name`, under that name. whole: also save a tier that is in memory."""
        if self.name is None or not os.path.lexists(chats_folder() / self.name / FILE):
            name = name or self.name or time.strftime("%Y-%m-%d-%H%M%S")
            self._create(session, name, whole=whole)
            return
        file = self._file or self._hold(held(self.name))
        # After a save that fails, the next one takes nothing from the file.
        last, self._last = self._last, ()
        pairs = zip(session.turns, last[0] if last else (), strict=False)
        same = len([*takewhile(lambda pair: pair[0] is pair[1], pairs)])
        made = rows_of(session, self._identity(session), ask=self.name == LAST, same=same)
        file.write(made, same)
        if name is not None and name != self.name:
            file.rename(name)
            self.name = name
        self._settle(session, str(self.name), whole=whole)
        self._last, self.saved = self._state(session), True

    def _create(
        self, session: ChatSession, name: str, *, whole: bool, forked: bool = False
    ) -> None:
        """Save as a new chat, and save there from now on. After an error there is no such chat.
        forked: whether it is an error if its tier cannot be saved."""
        facts = self._identity(session)
        there = name == self.name and (chats_folder() / name).is_dir()  # only its file was removed
        if there:
            self._release()
        name = name if there else new_folder(name)
        with contextlib.ExitStack() as undone:
            if not there:
                undone.callback(shutil.rmtree, chats_folder() / name, ignore_errors=True)
            renew(name, rows_of(session, facts, ask=name == LAST))
            file = undone.enter_context(contextlib.closing(held(name)))
            self._settle(session, name, whole=whole, forked=forked)
            undone.pop_all()
        self._release()  # somebody may have removed the old file meanwhile
        self._hold(file)
        self._last, self.saved = self._state(session), True

    def _settle(
        self, session: ChatSession, name: str, *, whole: bool, forked: bool = False
    ) -> None:
        """Move the tier to the chat's other files. If that fails, the chat is saved without it."""
        try:
            if name != LAST:
                settle_tier(session, name, self._identity(session), whole=whole)
        except FAILURES as error:
            if forked:
                raise
            self._warn(f"this chat is saved without its tier: {explain(error).message}")

    def _hold(self, file: ChatFile) -> ChatFile:
        """Make this the chat's file. `_last` is empty, because its content is not known."""
        self._file, self.name, self._last = file, file.name, ()
        if not file.locks:
            self._warn(
                f"files in {short(chats_folder())} cannot be locked: keep this chat open in one "
                "minikv only"
            )
        return file

    def _warn(self, line: str) -> None:
        """Show a warning, but only once."""
        if line not in self._said:
            self._said.add(line)
            self._terminal.warn(line)

    def close(self) -> None:
        """Release the lock, so that another process can open the chat. A chat without a turn and
        without a name from the user is removed."""
        if self._file is not None and not self._named and self._last and not self._last[0]:
            shutil.rmtree(chats_folder() / str(self.name), ignore_errors=True)
            self.name = None
        self._release()

    def _leave(self) -> None:
        """Close the chat, so that the next one gets a name of its own."""
        self.close()
        self.name, self._named, self._last = None, False, ()

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _chosen(mine: EvictionConfig, own: EvictionConfig, given: Collection[str]) -> EvictionConfig:
    """The eviction settings of a saved chat (`own`), but those of the session (`mine`) where the
    user stated them."""
    fields = {"budget"} & set(given)
    if {"policy", "options", "stride"} & set(given):
        fields |= {"policy", "policy_options", "decode", "decode_options", "stride"}
    elif "decode" in given:
        fields |= {"decode", "decode_options"}
    return replace(own, **{field: getattr(mine, field) for field in fields})


# -- the tier ---------------------------------------------------------------------------------

TIER = "tier.kv"
_WAITING = re.compile(r"\.tier-[0-9a-f]{16}\.kv")


def place(identity: Mapping[str, object], *, saved: bool) -> Place:
    """The place for the tier of a new chat. identity: that of its session. Raises UsageError."""
    from minikv.chat.recall import Place
    from minikv.chat.store import cache_folder, sweep

    try:
        folder = private(chats_folder() if saved else cache_folder())
        sweep(folder, _WAITING)  # remains of chats that were killed before their first save
    except OSError as error:
        raise UsageError(explain(error).message) from None
    return Place(folder / f".tier-{secrets.token_hex(8)}.kv", _own(identity), saved)


def _own(identity: Mapping[str, object]) -> dict[str, object]:
    """The part of a session's identity that its tier depends on: not policy, budget or --kv."""
    return {key: value for key, value in identity.items() if key not in (*POLICY, "kv")}


def find_tier(
    session: ChatSession,
    saved: Saved,
    identity: Mapping[str, object],
    given: Collection[str],
    warn: Callable[[str], None],
) -> FileRows | None:
    """The tier of a saved chat, which may be the session's own. None if there is none, if it cannot
    be used, or if it is of another model, or of another --tier-dtype than the user stated. Warns if
    it is damaged or open elsewhere."""
    from minikv.cache.tier_file import FileRows, Header
    from minikv.cache.tier_rows import TierError, columns_of

    kv, recall, path = session.engine.kv, session.recall, chats_folder() / saved.name / TIER
    if recall.file is not None and recall.file.is_at(path):
        return recall.file
    if recall.kind == "none" or not os.path.lexists(path):
        return None
    try:
        rows = FileRows.open(path, pinned=kv.device.type == "cuda")
    except TierError as error:
        warn(f"the tier of chat {saved.name} cannot be used: {error}")
        return None
    dtypes = [recall.dtype] if "tier_dtype" in given else ["same", "int8"]
    kinds = [columns_of(kv.shape, kv.dtype, dtype == "int8") for dtype in dtypes]
    here = [Header(kv.shape.layers, kv.shape.kv_heads, kind, _own(identity)) for kind in kinds]
    if rows.header not in here:
        rows.close()
        return None
    if rows.damage:
        again = amount(max(0, len(saved.tokens) - rows.rows), "token")
        warn(f"the tier of chat {saved.name}: {rows.damage}; {again} are read again")
    return rows


def settle_tier(
    session: ChatSession, name: str, identity: Mapping[str, object], *, whole: bool
) -> None:
    """Move the session's tier, if it is in a file, to the files of a saved chat. whole: also write
    a copy of a tier that is in memory, and flush the file to disk. Raises TierError, UsageError,
    OSError, and what torch raises when memory runs out; the tier is then where it was."""
    recall, rows, path = session.recall, session.recall.file, chats_folder() / name / TIER
    if rows is not None and whole:
        rows.sync()
    if rows is None and not (whole and recall.tokens):
        return
    # A file without a name, on another disk, or of another chat is copied, as memory is.
    if rows is not None and (rows.is_at(path) or (not rows.kept and rows.move(path))):
        return
    copy = recall.write(place(identity, saved=True))
    try:
        copy.move(path)
    except BaseException:
        copy.close()
        raise
    if rows is None:
        copy.close()
    else:
        recall.move(copy)
