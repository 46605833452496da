"""The compressed cache of a saved chat: one safetensors file, with the identity it belongs to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.chat.report import size
from minikv.cli.saved.files import REREAD, damage, read_part, write_part
from minikv.cli.saved.identity import fed_hash
from minikv.cli.saved.transcript import Saved
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession
    from minikv.chat.snapshot import ChatSnapshot

CACHE_BYTES = 512 << 20
"""Bytes. If the cache is larger (mostly that of --policy full), the chat is saved without it."""


def write_cache(
    session: ChatSession, folder: Path, identity: Mapping[str, object]
) -> tuple[dict[str, object] | None, str]:
    """Write the cache. Returns the record of its file, or None and the reason. Raises OSError,
    MemoryError."""
    if not session.fed:
        return None, "nothing of it had been read when it was saved"
    held_bytes = session.engine.kv.stats().held_bytes
    if held_bytes > CACHE_BYTES:
        return None, f"it held {size(held_bytes)}, and at most {size(CACHE_BYTES)} are saved"
    import torch
    from safetensors.torch import save

    snapshot = session.snapshot()
    assert snapshot.held is not None
    state = {
        "held": snapshot.held.record(),
        "owed": snapshot.pending_token,
        "shaped_by": snapshot.evicted_for_turn,
        "rereads": snapshot.rereads,
    }
    tensors = {f"column.{name}": column for name, column in snapshot.held.columns.items()}
    tensors["fed"] = torch.tensor(snapshot.fed, dtype=torch.int64)
    try:
        data = save(tensors, {"identity": json.dumps(identity), "state": json.dumps(state)})
    except BaseException as error:
        # What its library raises where memory is short; it is no Exception and has no public name.
        if type(error).__name__ != "PanicException":
            raise
        raise MemoryError from None
    return write_part(folder, "cache", "safetensors", data), ""


def read_cache(saved: Saved) -> ChatSnapshot:
    """The chat with its cache, checked against the transcript. Raises UsageError."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    from minikv.cache.snapshot import CacheSnapshot

    top = saved.header
    if top["cache"] is None:
        raise UsageError(f"chat {saved.name} has no cache: {top['no_cache']}", REREAD)
    with damage(saved.name):
        data = read_part(saved.folder, top["cache"], 2 * CACHE_BYTES)
        length = int.from_bytes(data[:8], "little")
        written = json.loads(data[8 : 8 + length])["__metadata__"]
        if json.loads(written["identity"]) != top["identity"]:
            raise ValueError("the cache is of another chat or of another turn")
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        state = json.loads(written["state"])
        fed = tuple(tensors.pop("fed").tolist())
        columns = {name.removeprefix("column."): tensor for name, tensor in tensors.items()}
        held = CacheSnapshot.read(state["held"], columns)
        if held.position != len(fed) or fed_hash(fed) != top["identity"]["fed"]:
            raise ValueError("the tokens in the cache are not those of the transcript")
        cached = without_cache(saved)
        return replace(
            cached,
            held=held,
            known=(),
            fed=fed,
            pending_token=state["owed"],
            evicted_for_turn=state["shaped_by"],
            rereads=bool(state.get("rereads")),  # chats of older versions do not say
        )


def without_cache(saved: Saved) -> ChatSnapshot:
    """The chat without its cache: the next question reads the whole conversation again, except what
    a tier has of it."""
    from minikv.chat.snapshot import ChatSnapshot

    return ChatSnapshot(
        None,
        saved.eviction,
        int(saved.header["seed"]),
        saved.messages,
        saved.documents,
        saved.pending,
        turns=saved.turns,
        curve=saved.curve,
        known=saved.tokens,
    )
