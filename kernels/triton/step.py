"""Statistics and victims of a step for all layers and heads in one launch, in Triton.

A program has one KV head of one layer and walks its rows a tile at a time, in as few passes as the
answer takes. Scores are not negative, so their bits order as integers; a row's key is its score's
bits above its position, and the least key is the victim by the tie rule: the lowest score, of
equal ones the oldest. The scopes of H2O (an edge in positions) and RoCo (an edge in deviation) are
first guessed and checked by counting, which nearly always does; where it does not, the edge is
found by bisection on its bits, never by a sort. Specification: the `_step` functions of
`reference`, whose statistics and victims these are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.torch.reference import Rows
from minikv.kernels.triton.tiles import typed
from minikv.kernels.triton.variants import Variant

NONE = tl.constexpr((1 << 63) - 1)  # no row's key
_LAST = tl.constexpr((1 << 31) - 1)
_INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity
_SCALARS = ["width", "sinks", "recent", "pinned"]
_BLOCK, _WARPS = 1024, 8
_LAYER = (256, 32)  # rows of a head, and rows of another that they are compared with at once
_WORDS = 128  # most words of history: 32 queries each


@triton.jit
def _weight(logits, lse, head, width, j, ok, G: tl.constexpr):
    """What the step's query gave rows j of a head: the mean over its G queries."""
    p = tl.zeros(j.shape, tl.float32)
    for g in tl.static_range(G):
        at = head * G + g
        x = tl.load(logits + at * width + j, mask=ok, other=-float("inf"))
        p += tl.exp(x - tl.load(lse + at))
    return tl.div_rn(p, G * 1.0)


@triton.jit
def _key(score, at):
    """int64: orders by score (not negative), then by position."""
    bits = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # -0 is 0
    return (bits.to(tl.int64) << 32) | at.to(tl.int64)


@triton.jit
def lower(best, row, key, j, free):
    """Lane by lane the lower of the best key so far and a free row's."""
    lower = free & (key < best)
    return tl.where(lower, key, best), tl.where(lower, j, row)


@triton.jit
def lowest(best, row):
    """The least key of all lanes, and its row; row 0 where no row is free."""
    least = tl.min(best, 0)
    found = tl.min(tl.where(best == least, row, _LAST), 0)
    return least, tl.where(least == NONE, 0, found)


@triton.jit
def free_rows(at, shown, newest, sinks, recent, strict):
    """Rows that may leave; not `strict`: those that may if no others may. See `Rows`."""
    return shown & tl.where(strict, (at >= sinks) & (at <= newest - recent), at < newest)


@triton.jit(do_not_specialize=_SCALARS)
def _h2o(
    logits,
    lse,
    start,
    length,
    cap,
    pos,
    newest,
    go,
    hole,
    sums,
    young,
    width,
    sinks,
    recent,
    pinned,
    G: tl.constexpr,
    BN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    if tl.load(go):
        count = tl.load(length + head).to(tl.int32)
        begin = tl.load(start + head)
        now = tl.load(newest)
        wish = tl.load(young + head)
        guess = now - wish + 1  # if the `wish` newest rows of all are the head's newest
        n = tl.arange(0, BN)
        best = tl.full((BN,), NONE, tl.int64)
        row = tl.zeros((BN,), tl.int32)
        seen = tl.zeros((BN,), tl.int32)
        late = tl.zeros((BN,), tl.int32)
        some = tl.zeros((BN,), tl.int32)
        for s in tl.range(0, count, BN):
            j = s + n
            ok = j < count
            where = begin + j
            total = tl.load(sums + where, mask=ok, other=0.0)
            total += _weight(logits, lse, head, width, j, ok, G)
            tl.store(sums + where, total, mask=ok)
            at = tl.load(pos + where, mask=ok, other=-1)
            shown = ok & (at >= pinned)
            free = free_rows(at, shown, now, sinks, recent, True)
            best, row = lower(best, row, _key(total, at), j, free & (at < guess))
            seen += shown.to(tl.int32)
            late += (shown & (at >= guess)).to(tl.int32)
            some += free.to(tl.int32)
        victim = tl.full((), -1, tl.int64)
        if count > tl.load(cap + head):
            tl.debug_barrier()  # what other threads of the program stored is read below
            shown_rows = tl.sum(seen, 0)
            newer = tl.maximum(tl.minimum(wish, shown_rows - 1), 1)
            least, found = lowest(best, row)
            if (least == NONE) | (newer != wish) | (tl.sum(late, 0) != newer):
                strict = tl.sum(some, 0) > 0
                lo = tl.full((), -1, tl.int64)  # at least `newer` rows are this late
                hi = now + 1  # fewer are
                while lo + 1 < hi:
                    middle = (lo + hi) // 2
                    late = tl.zeros((BN,), tl.int32)
                    for s in tl.range(0, count, BN):
                        j = s + n
                        at = tl.load(pos + begin + j, mask=j < count, other=-1)
                        late += ((at >= pinned) & (at >= middle)).to(tl.int32)
                    enough = tl.sum(late, 0) >= newer
                    lo = tl.where(enough, middle, lo)
                    hi = tl.where(enough, hi, middle)
                best = tl.full((BN,), NONE, tl.int64)
                row = tl.zeros((BN,), tl.int32)
                rest = best
                other = row
                for s in tl.range(0, count, BN):
                    j = s + n
                    ok = j < count
                    at = tl.load(pos + begin + j, mask=ok, other=-1)
                    free = free_rows(at, ok & (at >= pinned), now, sinks, recent, strict)
                    key = _key(tl.load(sums + begin + j, mask=ok, other=0.0), at)
                    best, row = lower(best, row, key, j, free & (at < lo))
                    rest, other = lower(rest, other, key, j, free)
                least, found = lowest(best, row)
                if least == NONE:
                    least, found = lowest(rest, other)
            victim = begin + found
        tl.store(hole + head, victim)


@triton.jit(do_not_specialize=_SCALARS)
def _tova(
    logits,
    lse,
    start,
    length,
    cap,
    pos,
    newest,
    go,
    hole,
    width,
    sinks,
    recent,
    pinned,
    G: tl.constexpr,
    BN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    if tl.load(go):
        count = tl.load(length + head).to(tl.int32)
        begin = tl.load(start + head)
        now = tl.load(newest)
        victim = tl.full((), -1, tl.int64)
        if count > tl.load(cap + head):
            n = tl.arange(0, BN)
            best = tl.full((BN,), NONE, tl.int64)
            row = tl.zeros((BN,), tl.int32)
            rest = best
            other = row
            for s in tl.range(0, count, BN):
                j = s + n
                ok = j < count
                at = tl.load(pos + begin + j, mask=ok, other=-1)
                shown = ok & (at >= pinned)
                key = _key(_weight(logits, lse, head, width, j, ok, G), at)
                best, row = lower(best, row, key, j, free_rows(at, shown, now, sinks, recent, True))
                rest, other = lower(
                    rest, other, key, j, free_rows(at, shown, now, sinks, recent, False)
                )
            least, found = lowest(best, row)
            if least == NONE:
                least, found = lowest(rest, other)
            victim = begin + found
        tl.store(hole + head, victim)


@triton.jit(do_not_specialize=["width"])
def _weights(logits, lse, length, cap, go, weights, width, G: tl.constexpr, BN: tl.constexpr):
    """What each row of a head that is over was given: weights [L * H, width]."""
    head = tl.program_id(0).to(tl.int64)
    count = tl.load(length + head).to(tl.int32)
    if tl.load(go) & (count > tl.load(cap + head)):
        for s in tl.range(0, count, BN):
            j = s + tl.arange(0, BN)
            ok = j < count
            p = _weight(logits, lse, head, width, j, ok, G)
            tl.store(weights + head * width + j, p, mask=ok)


@triton.jit(do_not_specialize=_SCALARS)
def _tova_layer(
    weights,
    start,
    length,
    cap,
    pos,
    newest,
    go,
    hole,
    width,
    sinks,
    recent,
    pinned,
    H: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Judges by the mean of `weights` over the heads of the layer that hold the same position.

    Heads that evict together hold the same rows in the same order: a row's peer is looked for at
    its own place first, and among all rows of the other head only where it is not there.
    """
    head = tl.program_id(0).to(tl.int64)
    if tl.load(go):
        count = tl.load(length + head).to(tl.int32)
        begin = tl.load(start + head)
        now = tl.load(newest)
        victim = tl.full((), -1, tl.int64)
        if count > tl.load(cap + head):
            n = tl.arange(0, BN)
            m = tl.arange(0, BK)
            best = tl.full((BN,), NONE, tl.int64)
            row = tl.zeros((BN,), tl.int32)
            rest = best
            other = row
            for s in tl.range(0, count, BN):
                j = s + n
                ok = j < count
                at = tl.load(pos + begin + j, mask=ok, other=-1)
                shown = ok & (at >= pinned)
                total = tl.zeros((BN,), tl.float64)
                holders = tl.zeros((BN,), tl.int32)
                for h in tl.range(0, H):
                    peer = head // H * H + h
                    rows = tl.load(length + peer).to(tl.int32)
                    if rows > tl.load(cap + peer):
                        first = tl.load(start + peer)
                        given = weights + peer * width
                        hit = shown & (tl.load(pos + first + j, mask=j < rows, other=-2) == at)
                        total += tl.load(given + j, mask=hit, other=0.0).to(tl.float64)
                        holders += hit.to(tl.int32)
                        lost = shown & (hit == 0)
                        if tl.max(lost.to(tl.int32), 0) > 0:
                            for r in tl.range(0, rows, BK):
                                i = r + m
                                there = tl.load(pos + first + i, mask=i < rows, other=-2)
                                p = tl.load(given + i, mask=i < rows, other=0.0)
                                same = lost[:, None] & (at[:, None] == there[None, :])
                                found_p = tl.sum(tl.where(same, p[None, :], 0.0), 1)
                                total += found_p.to(tl.float64)
                                holders += tl.sum(same.to(tl.int32), 1)
                mean = (total / tl.maximum(holders, 1).to(tl.float64)).to(tl.float32)
                key = _key(mean, at)
                best, row = lower(best, row, key, j, free_rows(at, shown, now, sinks, recent, True))
                rest, other = lower(
                    rest, other, key, j, free_rows(at, shown, now, sinks, recent, False)
                )
            least, found = lowest(best, row)
            if least == NONE:
                least, found = lowest(rest, other)
            victim = begin + found
        tl.store(hole + head, victim)


@triton.jit
def _steadiness(total, power, seen):
    """Mean and variance of a row's stream, the latter clamped at 0; rounded as torch rounds."""
    seen = tl.maximum(seen, 1.0)
    mean = tl.div_rn(total, seen)
    return mean, tl.maximum(tl.div_rn(power, seen) - mean * mean, 0.0)


@triton.jit
def _noted(sums, squares, counted, where, ok):
    """`_steadiness` of rows whose statistics are in memory."""
    return _steadiness(
        tl.load(sums + where, mask=ok, other=0.0),
        tl.load(squares + where, mask=ok, other=0.0),
        tl.load(counted + where, mask=ok, other=0.0),
    )


@triton.jit(do_not_specialize=_SCALARS)
def _roco(
    logits,
    lse,
    start,
    length,
    cap,
    pos,
    newest,
    go,
    hole,
    sums,
    squares,
    counted,
    keep,
    width,
    sinks,
    recent,
    pinned,
    G: tl.constexpr,
    BN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    if tl.load(go):
        count = tl.load(length + head).to(tl.int32)
        begin = tl.load(start + head)
        now = tl.load(newest)
        n = tl.arange(0, BN)
        best = tl.full((BN,), NONE, tl.int64)
        row = tl.zeros((BN,), tl.int32)
        some = tl.zeros((BN,), tl.int32)
        for s in tl.range(0, count, BN):
            j = s + n
            ok = j < count
            where = begin + j
            p = _weight(logits, lse, head, width, j, ok, G)
            total = tl.load(sums + where, mask=ok, other=0.0) + p
            power = tl.load(squares + where, mask=ok, other=0.0) + p * p
            seen = tl.load(counted + where, mask=ok, other=0.0) + 1.0
            tl.store(sums + where, total, mask=ok)
            tl.store(squares + where, power, mask=ok)
            tl.store(counted + where, seen, mask=ok)
            mean = _steadiness(total, power, seen)[0]
            at = tl.load(pos + where, mask=ok, other=-1)
            free = free_rows(at, ok & (at >= pinned), now, sinks, recent, True)
            best, row = lower(best, row, _key(mean, at), j, free)
            some += free.to(tl.int32)
        victim = tl.full((), -1, tl.int64)
        if count > tl.load(cap + head):
            tl.debug_barrier()  # what other threads of the program stored is read below
            rows = tl.sum(some, 0)
            strict = rows > 0
            wish = tl.load(keep + head)
            # The free row of lowest mean is nearly always steady; then it is the victim.
            found = lowest(best, row)[1]
            edge = _noted(sums, squares, counted, begin + found, strict)[1]
            fewer = tl.zeros((BN,), tl.int32)
            for s in tl.range(0, count, BN):
                j = s + n
                ok = j < count
                at = tl.load(pos + begin + j, mask=ok, other=-1)
                free = free_rows(at, ok & (at >= pinned), now, sinks, recent, strict)
                spread = _noted(sums, squares, counted, begin + j, ok)[1]
                fewer += (free & (spread < edge)).to(tl.int32)
                if not strict:
                    some += free.to(tl.int32)
            nth = tl.maximum(tl.minimum(wish, tl.sum(some, 0)), 1)
            if (not strict) | (tl.sum(fewer, 0) >= nth):
                # The n-th smallest variance: the largest bits that fewer than n rows are below.
                limit = tl.full((), 0, tl.int32)
                for b in tl.range(0, 31):
                    tried = limit | (1 << (30 - b))
                    fewer = tl.zeros((BN,), tl.int32)
                    for s in tl.range(0, count, BN):
                        j = s + n
                        ok = j < count
                        at = tl.load(pos + begin + j, mask=ok, other=-1)
                        free = free_rows(at, ok & (at >= pinned), now, sinks, recent, strict)
                        spread = _noted(sums, squares, counted, begin + j, ok)[1]
                        bits = spread.to(tl.int32, bitcast=True) & 0x7FFFFFFF
                        fewer += (free & (bits < tried)).to(tl.int32)
                    limit = tl.where(tl.sum(fewer, 0) < nth, tried, limit)
                best = tl.full((BN,), NONE, tl.int64)
                row = tl.zeros((BN,), tl.int32)
                for s in tl.range(0, count, BN):
                    j = s + n
                    ok = j < count
                    at = tl.load(pos + begin + j, mask=ok, other=-1)
                    free = free_rows(at, ok & (at >= pinned), now, sinks, recent, strict)
                    mean, spread = _noted(sums, squares, counted, begin + j, ok)
                    bits = spread.to(tl.int32, bitcast=True) & 0x7FFFFFFF
                    best, row = lower(best, row, _key(mean, at), j, free & (bits <= limit))
                found = lowest(best, row)[1]
            victim = begin + found
        tl.store(hole + head, victim)


@triton.jit
def ones(x):
    """The set bits of 32-bit numbers; Triton has no instruction for it that its interpreter has."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101) >> 24


@triton.jit(do_not_specialize=[*_SCALARS, "history"])
def _scissorhands(
    logits,
    lse,
    start,
    length,
    cap,
    pos,
    newest,
    go,
    hole,
    words,
    queries,
    window,
    history,
    width,
    sinks,
    recent,
    pinned,
    H: tl.constexpr,
    G: tl.constexpr,
    BN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    if tl.load(go):
        count = tl.load(length + head).to(tl.int32)
        begin = tl.load(start + head)
        now = tl.load(newest)
        seen = tl.minimum(count.to(tl.int64), tl.load(window + head // H)).to(tl.float32)
        even = tl.div_rn(1.0, seen)
        over = count > tl.load(cap + head)
        n = tl.arange(0, BN)
        best = tl.full((BN,), NONE, tl.int64)
        row = tl.zeros((BN,), tl.int32)
        rest = best
        other = row
        for s in tl.range(0, count, BN):
            j = s + n
            ok = j < count
            where = begin + j
            carry = (_weight(logits, lse, head, width, j, ok, G) < even).to(tl.uint32)
            below = tl.zeros((BN,), tl.uint32)
            for i in tl.static_range(len(words)):
                old = tl.load(words[i] + where, mask=ok, other=0).to(tl.uint32)
                new = (old << 1) | carry
                if i == len(words) - 1:
                    bits = history - 32 * (len(words) - 1)
                    new &= tl.full((), 0xFFFFFFFF, tl.uint32) >> (32 - bits).to(tl.uint32)
                carry = old >> 31
                tl.store(words[i] + where, new.to(tl.int64), mask=ok)
                below += ones(new)
            asked = tl.load(queries + where, mask=ok, other=0.0) + 1.0
            asked = tl.minimum(asked, history.to(tl.float32))
            tl.store(queries + where, asked, mask=ok)
            share = tl.div_rn(below.to(tl.float32), tl.maximum(asked, 1.0))
            at = tl.load(pos + where, mask=ok, other=-1)
            shown = ok & (at >= pinned)
            # The largest share leaves: its bits are counted down from infinity's.
            most = tl.full((BN,), _INFINITE, tl.int32)
            turned = most - share.to(tl.int32, bitcast=True)
            key = _key(turned.to(tl.float32, bitcast=True), at)
            best, row = lower(best, row, key, j, free_rows(at, shown, now, sinks, recent, True))
            rest, other = lower(
                rest, other, key, j, free_rows(at, shown, now, sinks, recent, False)
            )
        victim = tl.full((), -1, tl.int64)
        if over:
            least, found = lowest(best, row)
            if least == NONE:
                least, found = lowest(rest, other)
            victim = begin + found
        tl.store(hole + head, victim)


def _rows(logits: Tensor, lse: Tensor, rows: Rows, go: Tensor, hole: Tensor) -> tuple[Tensor, ...]:
    """The arguments that every policy's kernel begins with."""
    given = (logits, lse, rows.start, rows.length, rows.cap, rows.pos, rows.newest, go, hole)
    assert all(t.is_contiguous() for t in given)
    return given


def _scope(logits: Tensor, rows: Rows) -> dict[str, int]:
    return {
        "width": logits.shape[-1],
        "sinks": rows.sinks,
        "recent": rows.recent,
        "pinned": rows.pinned,
    }


def h2o_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    hole: Tensor,
    sums: Tensor,
    young: Tensor,
    *,
    block: int = _BLOCK,
) -> None:
    """`reference.h2o_step` on the device; `block` rows at once."""
    _h2o[(hole.numel(),)](
        *_rows(logits, lse, rows, go, hole),
        sums,
        young,
        **_scope(logits, rows),
        G=logits.shape[2],
        BN=block,
        num_warps=_WARPS,
    )


def tova_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    hole: Tensor,
    *,
    layerwise: bool,
    weights: Tensor | None = None,
    block: int = _BLOCK,
) -> None:
    """`reference.tova_step` on the device; `block` rows at once. `layerwise` needs `weights`,
    float32 [L, H, C], to work with, allocated here if it is not given."""
    given = _rows(logits, lse, rows, go, hole)
    heads, group, width = logits.shape[1:]
    if not layerwise:
        _tova[(hole.numel(),)](*given, **_scope(logits, rows), G=group, BN=block, num_warps=_WARPS)
        return
    if weights is None:
        weights = logits.new_empty((*logits.shape[:2], width))
    _weights[(hole.numel(),)](
        logits,
        lse,
        rows.length,
        rows.cap,
        go,
        weights,
        width=width,
        G=group,
        BN=block,
        num_warps=_WARPS,
    )
    _tova_layer[(hole.numel(),)](
        weights,
        *given[2:],
        **_scope(logits, rows),
        H=heads,
        BN=min(block, _LAYER[0]),
        BK=_LAYER[1],
        num_warps=_WARPS,
    )


def roco_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    hole: Tensor,
    sums: Tensor,
    squares: Tensor,
    count: Tensor,
    keep: Tensor,
    *,
    block: int = _BLOCK,
) -> None:
    """`reference.roco_step` on the device; `block` rows at once."""
    _roco[(hole.numel(),)](
        *_rows(logits, lse, rows, go, hole),
        sums,
        squares,
        count,
        keep,
        **_scope(logits, rows),
        G=logits.shape[2],
        BN=block,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )


def scissorhands_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    go: Tensor,
    hole: Tensor,
    words: Sequence[Tensor],
    queries: Tensor,
    history: int,
    window: Tensor,
    *,
    block: int = _BLOCK,
) -> None:
    """`reference.scissorhands_step` on the device; `block` rows at once."""
    assert len(words) == -(-history // 32) <= _WORDS
    _scissorhands[(hole.numel(),)](
        *_rows(logits, lse, rows, go, hole),
        tuple(words),
        queries,
        window,
        history,
        **_scope(logits, rows),
        H=logits.shape[1],
        G=logits.shape[2],
        BN=block,
        num_warps=_WARPS,
    )


def variants(heads: int = 8, group: int = 4, history: int = 400) -> list[Variant]:
    """Every build of this file's kernels for a model of H KV heads of G queries."""
    common = {
        "logits": "*fp32",
        "lse": "*fp32",
        "start": "*i64",
        "length": "*i64",
        "cap": "*i64",
        "pos": "*i32",
        "newest": "*i64",
        "go": "*i1",
        "hole": "*i64",
        "weights": "*fp32",
        "sums": "*fp32",
        "squares": "*fp32",
        "counted": "*fp32",
        "young": "*i64",
        "keep": "*i64",
        "words": ("*i64",) * -(-history // 32),
        "queries": "*fp32",
        "window": "*i64",
    }
    shapes = {"H": heads, "G": group, "BN": _BLOCK}
    found = []
    for name, fn in (
        ("h2o", _h2o),
        ("tova", _tova),
        ("tova-weights", _weights),
        ("tova-layer", _tova_layer),
        ("roco", _roco),
        ("scissorhands", _scissorhands),
    ):
        constants: dict[str, object] = {k: v for k, v in shapes.items() if k in fn.arg_names}
        if fn is _tova_layer:
            constants |= {"BN": _LAYER[0], "BK": _LAYER[1]}
        signature = typed(fn, common, constants)  # type: ignore[arg-type]
        found.append(Variant(name, fn, signature, constants, warps=_WARPS, vector=False))
    return found
