"""What is true of a chat and its cache between two operations, whatever happened before."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minikv.cache.stats import full_cache_bytes
from minikv.chat.session import ChatSession
from minikv.kernels.layer.plain import rotate
from minikv.models.llama import Llama


def first_keys(net: Llama, ids: list[int]) -> Tensor:
    """The keys [T, H, D] of the first layer for these tokens from position 0 on. A key of the first
    layer depends on its token and position alone."""
    c, layer = net.config, net.layers[0]
    normed = net._norm(net._embed(torch.tensor(ids)), layer.attention_norm)
    keys = layer.qkv(normed).view(len(ids), c.heads + 2 * c.kv_heads, c.head_dim)
    cos, sin = net.rotation.layers[0].table(0, len(ids), net.dtype)
    return rotate(keys[:, c.heads : c.heads + c.kv_heads], cos, sin)


def whole(session: ChatSession, *, keys: bool = True) -> None:
    """Assert that transcript, log, cache and tier agree, and that the cache is sound."""
    _transcript(session)
    _log(session)
    _rows(session)
    if keys and session.fed:
        _tokens(session)
    _tier(session)


def _transcript(session: ChatSession) -> None:
    system = [message for message in session.messages if message.role == "system"]
    assert session.turn == len(session.turns)
    said = [message for turn in session.turns for message in turn.messages()]
    assert session.messages == [*system, *said]
    assert session.documents == [d for turn in session.turns for d in turn.documents]
    assert session.report is (session.turns[-1].report if session.turns else None)
    assert len(session.curve) == 2 * len(session.turns)
    assert [report.turn for report in session.reports] == [*range(1, session.turn + 1)]
    assert not session.engine.kv.reading


def _log(session: ChatSession) -> None:
    """The tokens that were fed are those of the transcript, in their order."""
    kv, template = session.engine.kv, session.template
    assert kv.position == len(session.fed) == kv.stats().seen <= session.max_context
    if not session.fed:
        assert session.pending_token is None
        return
    assert session.report is not None
    assert session.report.tokens.seen_total == len(session.fed)
    owed = [] if session.pending_token is None else [session.pending_token]
    ids, at = [*session.fed, *owed], 0
    first = len(session.messages) - 2 * len(session.turns)
    for number, turn in enumerate(session.turns):
        messages = session.messages[: first + 2 * number + 1]
        prompt = template.following(messages) if number else template.opening(messages)
        assert ids[at : at + len(prompt)] == prompt, number
        at += len(prompt)
        text = session.tokenizer.encode(turn.answer)
        assert ids[at : at + len(text)] == text, number
        at += len(text)
    assert at == len(ids)


def kept_of(session: ChatSession, layer: int) -> list[list[int]]:
    """The positions that each KV head of a layer holds, ascending: `KVCache.kept` of all at once,
    which takes a third of the time of a machine that looks at them after every operation."""
    arena = session.engine.kv.arena
    index, live = arena.index(layer)
    nowhere = torch.iinfo(torch.int32).max
    found = arena.columns["pos"][index].masked_fill(~live, nowhere).sort().values.tolist()
    counts = live.sum(1).tolist()
    return [rows[:count] for rows, count in zip(found, counts, strict=True)]


def _rows(session: ChatSession) -> None:
    kv = session.engine.kv
    arena, end, shape = kv.arena, kv.position, kv.shape
    region = arena.region
    assert region[0] == 0
    assert region == sorted(region)
    assert all(len(column) == region[-1] for column in arena.columns.values())
    tables = arena.layout()
    rows = 0
    # These judge the newest tokens as all others, as their papers do.
    newest = session.report is not None and session.report.policy_options.get("recent") != 0
    for layer in range(shape.layers):
        start, capacity = tables.start[layer], tables.capacity[layer]
        length, slot = tables.length[layer], tables.free_slot[layer]
        assert bool(((length >= 0) & (length <= capacity)).all())
        if end:
            assert int(start[0]) >= region[layer]
            assert bool((start[:-1] + capacity[:-1] <= start[1:]).all()), "a row with two owners"
            assert int(start[-1] + capacity[-1]) <= region[layer + 1]
        assert bool(((slot == -1) | ((slot >= start) & (slot < start + length))).all())
        for kept, held in zip(kept_of(session, layer), tables.held[layer].tolist(), strict=True):
            assert len(kept) == held
            assert all(a < b for a, b in pairwise(kept)), "positions"
            assert not kept or 0 <= kept[0] <= kept[-1] < end
            if end and newest:
                assert kept[-1] == end - 1, "the newest token"
                if shape.windows[layer] is None:
                    assert kept[: kv.pinned] == [*range(kv.pinned)], "pinned tokens"
            if not session.eviction.evicts and not kv.stats().gaps and shape.windows[layer] is None:
                assert kept == [*range(end)]
            rows += len(kept)
    stats = kv.stats()
    assert stats.held_bytes == rows * arena.row_nbytes() <= stats.allocated_bytes
    assert stats.allocated_bytes == arena.nbytes + kv.decode.nbytes
    assert stats.state_bytes <= stats.held_bytes
    assert stats.full_bytes == full_cache_bytes(shape, end, kv.dtype.itemsize)
    heads = shape.layers * shape.kv_heads
    assert abs(stats.evicted - (stats.seen - rows / heads)) <= 0.5
    for name in arena.extra:
        for layer in range(shape.layers):
            index, live = arena.index(layer)
            assert bool(torch.isfinite(arena.columns[name][index[live]].double()).all()), name


def _tokens(session: ChatSession) -> None:
    """The keys in the first layer are those of the tokens in the log; all others are numbers."""
    kv: Any = session.engine.kv
    net: Any = session.engine.network
    arena, want = kv.arena, first_keys(net, session.fed)
    near = 0.05 if arena.coded or session.recall.dtype == "int8" else 1e-4
    for layer in range(kv.shape.layers):
        index, live = arena.index(layer)
        head, _ = live.nonzero(as_tuple=True)
        rows = index[live]
        for name in ("k", "v"):
            found = arena.read(kv.ops, name, rows)
            assert bool(torch.isfinite(found).all()), (name, layer)
            if name == "k" and layer == 0:
                at = arena.columns["pos"][rows].to(torch.int64)
                assert torch.allclose(found, want[at, head], atol=near, rtol=near)


def _tier(session: ChatSession) -> None:
    """Its tokens are the beginning of the conversation, and its keys are theirs."""
    tier: Any = session.engine.kv.tier
    if tier is None:
        assert session.recall.tokens == 0
        return
    ids = session.recall.ids
    assert tier.length == len(ids)
    assert tier.failed is None
    if not ids:
        return
    if file := session.recall.file:
        assert file.rows >= len(ids)
        assert file.ids[: len(ids)] == ids
    columns = tier.rows.read(0, max(tier.rows.rows, len(ids)) if file else len(ids))
    found = columns["k"][:, : len(ids)].float()
    if tier.coded:
        found = found * columns["k_scale"][:, : len(ids), None].float()
    want = first_keys(session.engine.network, ids).transpose(0, 1)  # type: ignore[arg-type]
    near = 0.05 if tier.coded else 1e-4
    assert torch.allclose(found, want, atol=near, rtol=near)
    if file:
        file.drop()
