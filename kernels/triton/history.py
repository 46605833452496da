"""The history of each row, in Triton: what a prompt's or a block's queries add to it, in one
launch each, and the share of the bits that are set.

A program has some rows of one KV head. It packs the bits of up to 32 queries into one word and
shifts the register by them. Specification: `torch/history.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.torch.history import BITS, EVEN
from minikv.kernels.triton.step import popcount
from minikv.kernels.triton.tiles import FAR, head_stride, lines, typed
from minikv.kernels.triton.variants import Variant

_BITS = tl.constexpr(BITS)
_SHARE = tl.constexpr(1.0 - EVEN)
_COUNTED = 2048  # rows that a program of `_rows_seen` reads at once
_PACKED = 64  # rows of a program that reads the attention of 32 queries to each
_ROWS = 256  # rows of a program that reads the words only


@triton.jit
def _shift(words, new, here, there, inside, fresh, count, history):
    """Write the words of some rows after `count` (0 to 32) bits came in, which are uint64
    `fresh`."""
    for i in tl.static_range(len(words)):
        old = tl.load(words[i] + here, mask=inside, other=0).to(tl.uint64)
        wide = (old << count) | fresh
        word = wide.to(tl.uint32)
        if i == len(words) - 1:  # clear bits of queries older than `history`
            used = history - 32 * (len(words) - 1)
            word &= tl.full((), 0xFFFFFFFF, tl.uint32) >> (32 - used).to(tl.uint32)
        fresh = wide >> _BITS
        tl.store(new[i] + there, word.to(tl.int64), mask=inside)


@triton.jit(
    do_not_specialize=["pos_head", "queries", "rows", "window"],
    do_not_specialize_on_alignment=["q_pos", "k_pos"],
)
def _rows_seen(q_pos, k_pos, seen, pos_head, queries, rows, window, BN: tl.constexpr):
    h = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0)
    now = tl.load(q_pos + i)
    count = tl.zeros((BN,), tl.int32)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        at = tl.load(k_pos + h * pos_head + j, mask=j < rows, other=-1)
        count += ((at >= 0) & (at <= now) & (now - at < window)).to(tl.int32)
    tl.store(seen + h * queries + i, tl.sum(count, 0).to(tl.float32))


@triton.jit(
    do_not_specialize=["pos_head", "seen_head", "queries", "rows", "window"],
    do_not_specialize_on_alignment=["p", "q_pos", "k_pos"],
)
def _low_bits(
    p,
    q_pos,
    k_pos,
    seen,
    out,
    pos_head,
    seen_head,
    queries,
    rows,
    window,
    G: tl.constexpr,
    BN: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    i = tl.arange(0, _BITS)
    some = (i < queries)[:, None] & (j < rows)[None, :]
    total = tl.zeros((_BITS, BN), tl.float32)
    for g in tl.static_range(G):
        line = p + ((h * G + g) * queries + i) * rows
        total += tl.load(line[:, None] + j[None, :], mask=some, other=0.0)
    count = tl.load(seen + h * seen_head + i, mask=i < queries, other=1.0)
    count = tl.maximum(count, 1.0)  # a query that sees no row
    even = tl.div_rn(tl.full((_BITS,), 1.0, tl.float32), count) * _SHARE
    low = tl.div_rn(total, tl.full((_BITS, BN), 1.0, tl.float32) * G) < even[:, None]
    now = tl.load(q_pos + i, mask=i < queries, other=-1)[:, None]
    at = tl.load(k_pos + h * pos_head + j, mask=j < rows, other=-1)[None, :]
    low = low & some & (at >= 0) & (at <= now) & (now - at < window)
    place = tl.maximum(queries - 1 - i, 0).to(tl.uint32)
    bits = tl.sum(low.to(tl.uint32) << place[:, None], 0)
    tl.store(out + h * rows + j, bits.to(tl.int64), mask=j < rows)


@triton.jit(
    do_not_specialize=[
        "word_head",
        "queries_head",
        "bits_head",
        "pos_head",
        "rows",
        "end",
        "observed",
        "history",
    ],
    do_not_specialize_on_alignment=["queries", "bits", "pos"],
)
def _prompt_history(
    words,
    queries,
    bits,
    pos,
    new,
    new_queries,
    word_head,
    queries_head,
    bits_head,
    pos_head,
    rows,
    end,
    observed,
    history,
    BN: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < rows
    at = tl.load(pos + h * pos_head + j, mask=inside, other=-1)
    able = tl.minimum(tl.maximum(end - tl.maximum(at, end - observed), 0), observed).to(tl.uint64)
    fresh = tl.load(bits + h * bits_head + j, mask=inside, other=0).to(tl.uint64)
    fresh &= (tl.full((BN,), 1, tl.uint64) << able) - 1
    there = h * rows + j
    _shift(words, new, h * word_head + j, there, inside, fresh, able, history)
    had = tl.load(queries + h * queries_head + j, mask=inside, other=0.0)
    count = tl.minimum(had + able.to(tl.float32), history.to(tl.float32))
    tl.store(new_queries + there, count, mask=inside)


@triton.jit(
    do_not_specialize=["word_head", "queries_head", "seen_head", "count", "rows", "history"],
    do_not_specialize_on_alignment=["queries", "p", "seen"],
)
def _block_history(
    words,
    queries,
    p,
    seen,
    word_head,
    queries_head,
    seen_head,
    count,
    rows,
    history,
    BN: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < rows
    here = h * word_head + j
    for first in tl.range(0, count, _BITS):  # 32 queries at a time, the oldest first
        i = first + tl.arange(0, _BITS)
        line = p + (h * count + i) * rows
        some = (i < count)[:, None] & inside[None, :]
        given = tl.load(line[:, None] + j[None, :], mask=some, other=0.0)
        saw = tl.load(seen + h * seen_head + i, mask=i < count, other=1.0)
        even = tl.div_rn(tl.full((_BITS,), 1.0, tl.float32), saw)
        low = some & (given < even[:, None]) & (j[None, :] <= rows - count + i[:, None])
        coming = tl.minimum(count - first, _BITS)
        place = tl.maximum(first + coming - 1 - i, 0).to(tl.uint32)
        fresh = tl.sum(low.to(tl.uint32) << place[:, None], 0).to(tl.uint64)
        _shift(words, words, here, here, inside, fresh, coming.to(tl.uint64), history)
        tl.debug_barrier()  # other threads of the program may read these words next
    had = tl.load(queries + h * queries_head + j, mask=inside, other=0.0)
    had = tl.minimum(had + tl.minimum(rows - j, count).to(tl.float32), history.to(tl.float32))
    tl.store(queries + h * queries_head + j, had, mask=inside)


@triton.jit(
    do_not_specialize=["word_head", "queries_head", "rows"],
    do_not_specialize_on_alignment=["queries"],
)
def _low_share(words, queries, out, word_head, queries_head, rows, BN: tl.constexpr):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    below = tl.zeros((BN,), tl.uint32)
    for i in tl.static_range(len(words)):
        word = tl.load(words[i] + h * word_head + j, mask=j < rows, other=0)
        below += popcount(word.to(tl.uint32))
    used = tl.load(queries + h * queries_head + j, mask=j < rows, other=0.0)
    share = tl.div_rn(below.to(tl.float32) * -1.0, tl.maximum(used, 1.0))
    tl.store(out + h * rows + j, share, mask=j < rows)


def rows_seen(q_pos: Tensor, k_pos: Tensor, window: int | None, *, block: int = _COUNTED) -> Tensor:
    """See `torch.history.rows_seen`. `block`: rows that a program reads at once."""
    k_pos = lines(k_pos)
    heads, rows = k_pos.shape
    seen = torch.empty((heads, len(q_pos)), dtype=torch.float32, device=k_pos.device)
    _rows_seen[(len(q_pos), heads)](
        q_pos.contiguous(),
        k_pos,
        seen,
        head_stride(k_pos),
        len(q_pos),
        rows,
        FAR if window is None else window,
        BN=block,
    )
    return seen


def low_bits(p: Tensor, q_pos: Tensor, k_pos: Tensor, window: int | None) -> Tensor:
    """See `torch.history.low_bits`."""
    p, q_pos, k_pos = p.contiguous(), q_pos.contiguous(), lines(k_pos)
    heads, group, queries, rows = p.shape
    assert queries <= BITS
    seen = rows_seen(q_pos, k_pos, window)
    out = torch.empty((heads, rows), dtype=torch.int64, device=p.device)
    _low_bits[(max(1, -(-rows // _PACKED)), heads)](
        p,
        q_pos,
        k_pos,
        seen,
        out,
        head_stride(k_pos),
        head_stride(seen),
        queries,
        rows,
        FAR if window is None else window,
        G=group,
        BN=_PACKED,
    )
    return out


def prompt_history(
    words: Sequence[Tensor],
    queries: Tensor,
    bits: Tensor,
    pos: Tensor,
    end: int,
    observed: int,
    history: int,
) -> tuple[list[Tensor], Tensor]:
    """See `torch.history.prompt_history`."""
    assert observed <= BITS
    queries, bits, pos = lines(queries), lines(bits), lines(pos)
    new = [torch.empty(pos.shape, dtype=torch.int64, device=pos.device) for _ in words]
    new_queries = torch.empty(pos.shape, dtype=torch.float32, device=pos.device)
    heads, rows = pos.shape
    _prompt_history[(max(1, -(-rows // _ROWS)), heads)](
        tuple(words),
        queries,
        bits,
        pos,
        tuple(new),
        new_queries,
        _word_stride(words, history),
        *map(head_stride, (queries, bits, pos)),
        rows,
        end,
        observed,
        history,
        BN=_ROWS,
    )
    return new, new_queries


def block_history(
    words: Sequence[Tensor], queries: Tensor, p: Tensor, seen: Tensor, history: int
) -> None:
    """See `torch.history.block_history`."""
    p, seen = p.contiguous(), lines(seen)
    assert queries.stride(1) == 1
    heads, count, rows = p.shape
    _block_history[(-(-rows // _PACKED), heads)](
        tuple(words),
        queries,
        p,
        seen,
        _word_stride(words, history),
        head_stride(queries),
        head_stride(seen),
        count,
        rows,
        history,
        BN=_PACKED,
    )


def low_share(words: Sequence[Tensor], queries: Tensor) -> Tensor:
    """See `torch.history.low_share`."""
    queries = lines(queries)
    heads, rows = queries.shape
    out = torch.empty((heads, rows), dtype=torch.float32, device=queries.device)
    _low_share[(max(1, -(-rows // _ROWS)), heads)](
        tuple(words),
        queries,
        out,
        _word_stride(words),
        head_stride(queries),
        rows,
        BN=_ROWS,
    )
    return out


def _word_stride(words: Sequence[Tensor], history: int | None = None) -> int:
    """The stride between heads, which all words have."""
    assert history is None or len(words) == -(-history // BITS)
    assert all(word.stride(1) == 1 for word in words)
    strides = {head_stride(word) for word in words}
    assert len(strides) == 1
    return strides.pop()


def variants() -> list[Variant]:
    """Builds for the compile gate: for a model of G = 4, and for histories of 400 and 64."""
    kinds: dict[str, str | tuple[str, ...]] = dict.fromkeys(
        ("seen", "p", "queries", "new_queries"), "*fp32"
    )
    kinds |= dict.fromkeys(("q_pos", "k_pos", "pos", "bits"), "*i64")
    found = []
    constants: dict[str, object] = {"BN": _COUNTED}
    signature = typed(_rows_seen, kinds | {"queries": "i32"}, constants)
    found.append(Variant("seen-rows", _rows_seen, signature, constants))
    constants = {"G": 4, "BN": _PACKED}
    signature = typed(_low_bits, kinds | {"queries": "i32", "out": "*i64"}, constants)
    found.append(Variant("low-bits", _low_bits, signature, constants))
    for words in (13, 2):
        more = dict.fromkeys(("words", "new"), ("*i64",) * words) | {"out": "*fp32"}
        for fn, block in (
            (_prompt_history, _ROWS),
            (_block_history, _PACKED),
            (_low_share, _ROWS),
        ):
            constants = {"BN": block}
            name = f"{fn.__name__.strip('_').replace('_', '-')}-words{words}"
            found.append(Variant(name, fn, typed(fn, kinds | more, constants), constants))
    return found
