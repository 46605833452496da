"""What a saved cache belongs to (model, tokenizer, number formats, policies, budget), and the file
of a chat's tier, with which it continues without reading again.

Before the first save, a tier has a hidden name among the chats. For a chat that is not saved, it is
a file in the user's cache directory, without a name.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Collection, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minikv
from minikv.cache.budget import Budget
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.paths import cache_folder, chats_folder
from minikv.cli.saved.database import private
from minikv.errors import UsageError
from minikv.models.identity import digests

if TYPE_CHECKING:
    from minikv.cache.tier_file import FileRows
    from minikv.chat.recall import Place, Recall
    from minikv.chat.session import ChatSession


FORMAT = 1
POLICY = ("policy", "policy_options", "decode", "decode_options", "budget", "stride")
"""The fields of an identity that a loaded chat brings along, so that they need not agree."""

_UNITS = ("rows", "share", "bytes", "auto")


def identity(session: ChatSession, model: Mapping[str, object]) -> dict[str, object]:
    """The settings that a saved cache depends on. `model`: from `model_identity`."""
    eviction = session.eviction
    return {
        "format": FORMAT,
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


def tier_identity(identity: Mapping[str, object]) -> dict[str, object]:
    """The part of a session's identity that its tier depends on: not policy, budget or --kv."""
    return {key: value for key, value in identity.items() if key not in (*POLICY, "kv")}


def eviction_of(identity: Mapping[str, Any]) -> EvictionConfig:
    """The eviction settings of an identity. Raises ValueError, KeyError or TypeError."""
    value, unit = str(identity["budget"]).split()
    # Without this bound "1e9999999" would be computed to its last digit.
    written = re.fullmatch(r"\d{1,40}(/\d{1,40})?", value, re.ASCII)
    least = 0 if unit == "auto" else Fraction(1, 10**18)
    if unit not in _UNITS or written is None or Fraction(value) < least:
        raise ValueError(f"{identity['budget']!r:.40} is no budget")
    return EvictionConfig(
        str(identity["policy"]),
        str(identity["decode"]),
        Budget(unit, Fraction(value)),
        dict(identity["policy_options"]),
        dict(identity["decode_options"]),
        int(identity["stride"]),
    )


def differences(
    here: Mapping[str, object], header: Mapping[str, Any], stated: Collection[str]
) -> str:
    """In what the chat of this header differs from a session, in words; "" if in nothing. Policy
    and budget count only where the user `stated` them."""
    there = header["identity"]
    different = [
        key for key in here if (key not in POLICY or key in stated) and here[key] != there.get(key)
    ]
    if "weights" in different and "model" in different:
        different.remove("weights")
    return "; ".join(
        f"{key} {_shown(here[key])} here, {_shown(there.get(key))} there" for key in different
    )


def _shown(value: object) -> str:
    """A value of an identity in a message; hashes are cut."""
    text = "nothing" if value is None else str(value) or "none"
    return f"{text[:12]}..." if re.fullmatch(r"[0-9a-f]{20,}", text) else text


def model_identity(session: ChatSession) -> dict[str, object]:
    """Name and revision for people, and hashes of the weights and of the tokenizer."""
    facts, folder = session.facts, model_folder(session)
    named = {"model": facts.model, "revision": facts.revision}
    if folder is None:
        return {**named, "weights": "", "tokenizer": ""}
    if not facts.revision:
        named["model"] = "bundled" if folder == bundled() else folder.name  # in any place
    return {**named, **digests(folder)}


def model_folder(session: ChatSession) -> Path | None:
    """Where the session's model was loaded from; None for one that came from no folder."""
    name = session.facts.model
    if not name:
        return None
    if name == "bundled":
        return bundled()
    from minikv.models.hub import resolve

    return resolve(name, revision=session.facts.revision or None, offline=True).folder.resolve()


def bundled() -> Path:
    """The folder of the bundled model."""
    from minikv.models import BUNDLED

    return BUNDLED


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
    from minikv.cache.tier_file import FileRows, Header
    from minikv.cache.tier_rows import columns_of

    path = folder / TIER
    own = session.recall.file
    if not os.path.lexists(path) or (own is not None and own.is_at(path)):
        return None
    kv = session.engine.kv
    shape = kv.shape
    kinds = (columns_of(shape, kv.dtype, coded) for coded in (False, True))
    here = [Header(shape.layers, shape.kv_heads, kind, identity) for kind in kinds]
    rows = FileRows.open(path, pinned=kv.device.type == "cuda")
    if rows.header in here:
        return rows
    rows.close()
    return None


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
