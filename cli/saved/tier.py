"""The tier of a chat on disk, beside its transcript: the chat can continue without reading again.

Before the first save, it has a hidden name among the chats. For a chat that is not saved, it is a
file in the user's cache directory, without a name.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.cli.paths import cache_folder, chats_folder
from minikv.cli.saved.files import private
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.cache.tier_file import FileRows
    from minikv.chat.recall import Place, Recall
    from minikv.chat.session import ChatSession

TIER = "tier.kv"
_WAITING = re.compile(r"\.tier-[0-9a-f]{16}\.kv")


def place(identity: Mapping[str, object], *, saved: bool) -> Place:
    """The place for the tier of a new chat. Raises UsageError."""
    from minikv.chat.recall import Place

    try:
        folder = private(chats_folder() if saved else cache_folder())
        _sweep(folder)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UsageError(f"{error.strerror}{where}") from None
    return Place(folder / f".tier-{secrets.token_hex(8)}.kv", identity, saved)


def _sweep(folder: Path) -> None:
    """Remove the tiers of chats that were killed before their first save."""
    from minikv.cache.tier_file import is_open, remove

    for name in filter(_WAITING.fullmatch, os.listdir(folder)):
        with contextlib.suppress(OSError):
            if not is_open(folder / name):
                remove(folder / name)


def find(session: ChatSession, folder: Path, identity: Mapping[str, object]) -> FileRows | None:
    """The tier of a saved chat; None if it has none, or one of another model, or the session has it
    already. Raises TierError where it is damaged or open elsewhere."""
    from minikv.cache.tier_file import FileRows, Header, header_of
    from minikv.cache.tier_rows import columns_of

    path = folder / TIER
    own = session.recall.file
    if not os.path.lexists(path) or (own is not None and own.is_at(path)):
        return None
    kv = session.engine.kv
    shape = kv.shape
    kinds = (columns_of(shape, kv.dtype, coded) for coded in (False, True))
    here = [Header(shape.layers, shape.kv_heads, kind, identity) for kind in kinds]
    if header_of(path) not in here:
        return None
    return FileRows.open(path, pinned=kv.device.type == "cuda")


def settle(
    session: ChatSession, folder: Path, identity: Mapping[str, object], *, whole: bool
) -> None:
    """Put the session's tier among the chat's files, if it is in a file; with `whole`, also copy
    one that is in memory, and sync it to disk. Raises TierError and OSError."""
    recall, path = session.recall, folder / TIER
    rows = recall.file
    if rows is None and whole and recall.tokens:
        _copied(recall, folder, identity).close()
    # A file without a name, on another disk, or of another chat is copied.
    if rows is not None and not rows.is_at(path) and (rows.kept or not rows.move(path)):
        recall.move(_copied(recall, folder, identity))
    if recall.file is not None and whole:
        recall.file.sync()


def taken_out(session: ChatSession, folder: Path) -> None:
    """Move the session's tier out of this folder, which is about to be removed, if it is there."""
    rows = session.recall.file
    if rows is not None and rows.is_at(folder / TIER):
        with contextlib.suppress(OSError, UsageError):
            rows.move(session.recall.where().path)
            rows.kept = False


def _copied(recall: Recall, folder: Path, identity: Mapping[str, object]) -> FileRows:
    """Copy the tier to disk. The copy replaces any other tier in the folder."""
    from minikv.chat.recall import Place

    path = folder / f".{TIER}.{secrets.token_hex(8)}.tmp"
    copy = recall.write(Place(path, identity, named=True))
    try:
        copy.move(folder / TIER)
    except BaseException:
        copy.close()
        raise
    return copy
