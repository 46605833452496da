"""The file of a chat's tier, with which the chat continues without reading again.

Until a chat is saved, its tier has a hidden name among the chats; then it is among the chat's
files. For a chat that is not saved, it is a file in the user's cache directory, without a name.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from minikv.chat.report import amount
from minikv.cli.failures import explain
from minikv.cli.paths import cache_folder, chats_folder, private
from minikv.cli.saved.identity import POLICY
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.cache.tier_file import FileRows
    from minikv.chat.recall import Place
    from minikv.chat.session import ChatSession
    from minikv.cli.saved.transcript import Saved

TIER = "tier.kv"
_WAITING = re.compile(r"\.tier-[0-9a-f]{16}\.kv")


def place(identity: Mapping[str, object], *, saved: bool) -> Place:
    """The place for the tier of a new chat. identity: of its session. Raises UsageError."""
    from minikv.chat.recall import Place
    from minikv.chat.store import sweep

    try:
        folder = private(chats_folder() if saved else cache_folder())
        sweep(folder, _WAITING)  # what was killed before its first save
    except OSError as error:
        raise UsageError(explain(error).message) from None
    return Place(folder / f".tier-{secrets.token_hex(8)}.kv", _own(identity), saved)


def _own(identity: Mapping[str, object]) -> dict[str, object]:
    """The part of a session's identity that its tier depends on: not policy, budget or --kv."""
    return {key: value for key, value in identity.items() if key not in (*POLICY, "kv")}


def find(
    session: ChatSession,
    saved: Saved,
    identity: Mapping[str, object],
    given: Collection[str],
    warn: Callable[[str], None],
) -> FileRows | None:
    """The tier of a saved chat, which may be the session's own. None if it has none that is of this
    model and, if the user gave it, of --tier-dtype, and that can be used. Warns where it is damaged
    or open elsewhere."""
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


def settle(session: ChatSession, name: str, identity: Mapping[str, object], *, whole: bool) -> None:
    """Put the session's tier among the files of a saved chat, if it is in a file; with `whole`,
    also a copy of one that is in memory, and all of it is on disk. Raises TierError, UsageError,
    OSError, and what torch raises when memory runs out; then it is where it was."""
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
