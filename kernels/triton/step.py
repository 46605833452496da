"""The end of a decode step, in Triton: update the statistics and choose the victims of all heads in
one launch.

A program has one KV head of one layer and reads its rows in tiles, in as few passes as possible. It
makes one integer key of each row: the score in the upper bits, the position in the lower ones. The
row with the lowest key is the victim: the lowest score, and of equal scores the oldest row. H2O
narrows the choice to rows older than the n newest. Their limit is guessed and checked by counting,
which nearly always works; otherwise it is found by bisection on its bits. RoCo narrows it to the n
smallest variances, whose limit `nth` finds. Nothing is sorted. Specification: `torch/decode.py` for
`lowest_step`, for the rest the file of each policy in minikv/policies.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.torch.decode import Rows
from minikv.kernels.triton.nth import MOST_ROWS, NO_ORDER, nth, ordered
from minikv.kernels.triton.tiles import typed
from minikv.kernels.triton.variants import Variant

NONE = tl.constexpr((1 << 63) - 1)  # a key that no row has
_LAST = tl.constexpr((1 << 31) - 1)
_INFINITE = tl.constexpr(0x7F800000)  # the bits of float32 infinity
_SCALARS = ["width", "sinks", "recent", "pinned"]
_BLOCK, _WARPS = 1024, 8
_MAX_WORDS = 128  # the most words of history, 32 bits each


@triton.jit
def _mean_prob(logits, lse, head, width, j, ok, G: tl.constexpr):
    """The probabilities of rows j of a head, averaged over its G queries."""
    p = tl.zeros(j.shape, tl.float32)
    for g in tl.static_range(G):
        at = head * G + g
        x = tl.load(logits + at * width + j, mask=ok, other=-float("inf"))
        p += tl.exp(x - tl.load(lse + at))
    return tl.div_rn(p, G * 1.0)


@triton.jit
def _key(score, at):
    """An int64 key, ordered by score, then by position. The score must not be negative."""
    bits = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # -0 is 0
    return (bits.to(tl.int64) << 32) | at.to(tl.int64)


@triton.jit
def lower(best, row, key, j, evictable):
    """In each lane, the lower of the lowest key so far and the key of a row, if it may leave."""
    lower = evictable & (key < best)
    return tl.where(lower, key, best), tl.where(lower, j, row)


@triton.jit
def lowest(best, row):
    """The lowest key of all lanes, and its row; row 0 if no row may leave."""
    least = tl.min(best, 0)
    found = tl.min(tl.where(best == least, row, _LAST), 0)
    return least, tl.where(least == NONE, 0, found)


@triton.jit
def may_leave(at, unpinned, newest, sinks, recent, strict):
    """Which rows are evictable: see `Rows`. Not `strict`: the rows to use if none is evictable."""
    return unpinned & tl.where(strict, (at >= sinks) & (at <= newest - recent), at < newest)


@triton.jit
def signed_key(score, at):
    """An int64 key, ordered by score, then by position. For a NaN: NONE, the key of no row."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 is 0
    # The bits of negative floats have the reverse order.
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (bits.to(tl.int64) << 32) | at.to(tl.int64)
    return tl.where(score == score, key, NONE)


@triton.jit(do_not_specialize=["width"])
def _lowest(scores, allowed, start, length, cap, pos, accepted, free_slot, width, BN: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    if tl.load(accepted):
        count = tl.load(length + head).to(tl.int32)
        begin = tl.load(start + head)
        victim = tl.full((), -1, tl.int64)
        if count > tl.load(cap + head):
            best = tl.full((BN,), NONE, tl.int64)
            row = tl.zeros((BN,), tl.int32)
            for s in tl.range(0, count, BN):
                j = s + tl.arange(0, BN)
                ok = j < count
                here = head * width + j
                score = tl.load(scores + here, mask=ok, other=0.0)
                may = ok & (tl.load(allowed + here, mask=ok, other=0) != 0)
                at = tl.load(pos + begin + j, mask=ok, other=0)
                best, row = lower(best, row, signed_key(score, at), j, may)
            victim = begin + lowest(best, row)[1]
        tl.store(free_slot + head, victim)


@triton.jit(do_not_specialize=_SCALARS)
def _h2o(
    logits,
    lse,
    start,
    length,
    cap,
    pos,
    newest,
    accepted,
    free_slot,
    sums,
    newest_rows,
    width,
    sinks,
    recent,
    pinned,
    G: tl.constexpr,
    BN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    if tl.load(accepted):
        count = tl.load(length + head).to(tl.int32)
        begin = tl.load(start + head)
        now = tl.load(newest)
        wanted = tl.load(newest_rows + head)
        guess = now - wanted + 1  # if the head has the newest `wanted` positions
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
            total += _mean_prob(logits, lse, head, width, j, ok, G)
            tl.store(sums + where, total, mask=ok)
            at = tl.load(pos + where, mask=ok, other=-1)
            unpinned = ok & (at >= pinned)
            evictable = may_leave(at, unpinned, now, sinks, recent, True)
            best, row = lower(best, row, _key(total, at), j, evictable & (at < guess))
            seen += unpinned.to(tl.int32)
            late += (unpinned & (at >= guess)).to(tl.int32)
            some += evictable.to(tl.int32)
        victim = tl.full((), -1, tl.int64)
        if count > tl.load(cap + head):
            tl.debug_barrier()  # what other threads of the program stored is read below
            shown_rows = tl.sum(seen, 0)
            newer = tl.maximum(tl.minimum(wanted, shown_rows - 1), 1)
            least, found = lowest(best, row)
            if (least == NONE) | (newer != wanted) | (tl.sum(late, 0) != newer):
                strict = tl.sum(some, 0) > 0
                lo = tl.full((), -1, tl.int64)  # `newer` rows or more are this late
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
                    evictable = may_leave(at, ok & (at >= pinned), now, sinks, recent, strict)
                    key = _key(tl.load(sums + begin + j, mask=ok, other=0.0), at)
                    best, row = lower(best, row, key, j, evictable & (at < lo))
                    rest, other = lower(rest, other, key, j, evictable)
                least, found = lowest(best, row)
                if least == NONE:
                    least, found = lowest(rest, other)
            victim = begin + found
        tl.store(free_slot + head, victim)


@triton.jit
def _steadiness(total, power, seen):
    """Mean and variance (at least 0) of a row's probabilities, rounded as torch rounds them."""
    seen = tl.maximum(seen, 1.0)
    mean = tl.div_rn(total, seen)
    return mean, tl.maximum(tl.div_rn(power, seen) - mean * mean, 0.0)


@triton.jit
def load_steadiness(sums, squares, counted, where, ok):
    """`_steadiness` of rows; their statistics are loaded from memory."""
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
    accepted,
    free_slot,
    sums,
    squares,
    counted,
    steady_rows,
    width,
    sinks,
    recent,
    pinned,
    G: tl.constexpr,
    BN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    if tl.load(accepted):
        count = tl.load(length + head).to(tl.int32)
        begin = tl.load(start + head)
        now = tl.load(newest)
        over = count > tl.load(cap + head)
        n = tl.arange(0, BN)
        some = tl.zeros((BN,), tl.int32)
        if over:
            for s in tl.range(0, count, BN):
                at = tl.load(pos + begin + s + n, mask=s + n < count, other=-1)
                some += may_leave(at, at >= pinned, now, sinks, recent, True).to(tl.int32)
        strict = tl.sum(some, 0) > 0
        orders = logits + head * G * width  # where the logits of the head's first query were
        orders = orders.to(tl.pointer_type(tl.int32))
        some = tl.zeros((BN,), tl.int32)
        for s in tl.range(0, count, BN):
            j = s + n
            ok = j < count
            where = begin + j
            p = _mean_prob(logits, lse, head, width, j, ok, G)
            total = tl.load(sums + where, mask=ok, other=0.0) + p
            power = tl.load(squares + where, mask=ok, other=0.0) + p * p
            seen = tl.load(counted + where, mask=ok, other=0.0) + 1.0
            tl.store(sums + where, total, mask=ok)
            tl.store(squares + where, power, mask=ok)
            tl.store(counted + where, seen, mask=ok)
            variance = _steadiness(total, power, seen)[1]
            at = tl.load(pos + where, mask=ok, other=-1)
            evictable = may_leave(at, ok & (at >= pinned), now, sinks, recent, strict)
            tl.store(orders + j, tl.where(evictable, ordered(variance), NO_ORDER), mask=ok)
            some += evictable.to(tl.int32)
        victim = tl.full((), -1, tl.int64)
        if over:
            tl.debug_barrier()  # what other threads of the program stored is read below
            few = tl.maximum(tl.minimum(tl.load(steady_rows + head), tl.sum(some, 0)), 1)
            limit = nth(orders, count, few - 1, BN)[0]
            best = tl.full((BN,), NONE, tl.int64)
            row = tl.zeros((BN,), tl.int32)
            for s in tl.range(0, count, BN):
                j = s + n
                ok = j < count
                order = tl.load(orders + j, mask=ok, other=NO_ORDER)
                steady = (order <= limit) & (order < NO_ORDER)
                mean = load_steadiness(sums, squares, counted, begin + j, ok)[0]
                at = tl.load(pos + begin + j, mask=ok, other=-1)
                best, row = lower(best, row, _key(mean, at), j, steady)
            victim = begin + lowest(best, row)[1]
        tl.store(free_slot + head, victim)


@triton.jit
def popcount(x):
    """The number of set bits of 32-bit numbers. Triton's interpreter has no operation for it."""
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
    accepted,
    free_slot,
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
    if tl.load(accepted):
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
            carry = (_mean_prob(logits, lse, head, width, j, ok, G) < even).to(tl.uint32)
            below = tl.zeros((BN,), tl.uint32)
            for i in tl.static_range(len(words)):
                old = tl.load(words[i] + where, mask=ok, other=0).to(tl.uint32)
                new = (old << 1) | carry
                if i == len(words) - 1:
                    bits = history - 32 * (len(words) - 1)
                    new &= tl.full((), 0xFFFFFFFF, tl.uint32) >> (32 - bits).to(tl.uint32)
                carry = old >> 31
                tl.store(words[i] + where, new.to(tl.int64), mask=ok)
                below += popcount(new)
            seen_by = tl.load(queries + where, mask=ok, other=0.0) + 1.0
            seen_by = tl.minimum(seen_by, history.to(tl.float32))
            tl.store(queries + where, seen_by, mask=ok)
            fraction = tl.div_rn(below.to(tl.float32), tl.maximum(seen_by, 1.0))
            at = tl.load(pos + where, mask=ok, other=-1)
            unpinned = ok & (at >= pinned)
            # The row with the largest fraction leaves, so its key is the bits of infinity minus its
            # bits.
            most = tl.full((BN,), _INFINITE, tl.int32)
            inverted = most - fraction.to(tl.int32, bitcast=True)
            key = _key(inverted.to(tl.float32, bitcast=True), at)
            best, row = lower(best, row, key, j, may_leave(at, unpinned, now, sinks, recent, True))
            rest, other = lower(
                rest, other, key, j, may_leave(at, unpinned, now, sinks, recent, False)
            )
        victim = tl.full((), -1, tl.int64)
        if over:
            least, found = lowest(best, row)
            if least == NONE:
                least, found = lowest(rest, other)
            victim = begin + found
        tl.store(free_slot + head, victim)


@triton.jit
def _joined(logits, lse, head, width, j, ok, G: tl.constexpr, GROUP: tl.constexpr):
    """The attention that a head's queries give rows j, by GROUP: its mean or its sum; for "max" the
    largest logit."""
    if GROUP == "max":
        most = tl.full(j.shape, -float("inf"), tl.float32)
        for g in tl.static_range(G):
            x = tl.load(logits + (head * G + g) * width + j, mask=ok, other=-float("inf"))
            most = tl.maximum(most, x)
        return most
    p = _mean_prob(logits, lse, head, width, j, ok, G)
    return p * G if GROUP == "sum" else p


@triton.jit(do_not_specialize=["width"])
def _shift(
    logits,
    lse,
    start,
    length,
    accepted,
    seen,
    width,
    G: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    if tl.load(accepted):
        count = tl.load(length + head).to(tl.int32)
        begin = tl.load(start + head)
        n = tl.arange(0, BN)
        top = tl.full((), 0.0, tl.float32)
        total = tl.full((), 1.0, tl.float32)
        if GROUP == "max":  # the largest logits need a softmax of their own
            most = tl.full((BN,), -float("inf"), tl.float32)
            weight = tl.zeros((BN,), tl.float32)
            for s in tl.range(0, count, BN):
                x = _joined(logits, lse, head, width, s + n, s + n < count, G, GROUP)
                higher = tl.maximum(tl.maximum(most, x), -1e30)
                weight = weight * tl.exp(most - higher) + tl.exp(x - higher)
                most = higher
            top = tl.max(most, 0)
            total = tl.sum(weight * tl.exp(most - top), 0)
        for s in tl.range(0, count, BN):
            j = s + n
            ok = j < count
            carry = _joined(logits, lse, head, width, j, ok, G, GROUP)
            if GROUP == "max":
                carry = tl.div_rn(tl.exp(carry - top), total)
            for i in tl.static_range(len(seen)):
                old = tl.load(seen[i] + begin + j, mask=ok, other=0.0)
                tl.store(seen[i] + begin + j, carry, mask=ok)
                carry = old


def _head_args(
    logits: Tensor, lse: Tensor, rows: Rows, accepted: Tensor, free_slot: Tensor
) -> tuple[Tensor, ...]:
    """The first arguments of every policy's kernel."""
    args = (
        logits,
        lse,
        rows.start,
        rows.length,
        rows.cap,
        rows.pos,
        rows.newest,
        accepted,
        free_slot,
    )
    assert all(t.is_contiguous() for t in args)
    return args


def _scalars(logits: Tensor, rows: Rows) -> dict[str, int]:
    return {
        "width": logits.shape[-1],
        "sinks": rows.sinks,
        "recent": rows.recent,
        "pinned": rows.pinned,
    }


def lowest_step(
    scores: Tensor,
    allowed: Tensor,
    rows: Rows,
    accepted: Tensor,
    free_slot: Tensor,
    *,
    block: int = _BLOCK,
) -> None:
    """See `torch.decode.lowest_step`. `block`: rows that a program reads at once."""
    scores, allowed = scores.to(torch.float32).contiguous(), allowed.contiguous()
    layout = (rows.start, rows.length, rows.cap, rows.pos, accepted, free_slot)
    assert all(t.is_contiguous() for t in layout)
    assert scores.shape == allowed.shape, "there is a score for every column"
    _lowest[(free_slot.numel(),)](
        scores, allowed, *layout, width=scores.shape[-1], BN=block, num_warps=_WARPS
    )


def h2o_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    accepted: Tensor,
    free_slot: Tensor,
    sums: Tensor,
    newest_rows: Tensor,
    *,
    block: int = _BLOCK,
) -> None:
    """H2O (arXiv 2306.14048, section 4): add the step's probabilities to sums [R]; the row with the
    lowest sum is the victim.

    newest_rows int64 [L, H]: how many of a head's newest rows are kept. `block`: rows that a
    program reads at once.
    """
    _h2o[(free_slot.numel(),)](
        *_head_args(logits, lse, rows, accepted, free_slot),
        sums,
        newest_rows,
        **_scalars(logits, rows),
        G=logits.shape[2],
        BN=block,
        num_warps=_WARPS,
    )


def roco_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    accepted: Tensor,
    free_slot: Tensor,
    sums: Tensor,
    squares: Tensor,
    count: Tensor,
    steady_rows: Tensor,
    *,
    block: int = _BLOCK,
) -> None:
    """RoCo (arXiv 2402.06262, section 4.2): add the step's probability, its square and 1 to sums,
    squares and count [R]; of the rows with the smallest variances, the one with the lowest mean is
    the victim.

    steady_rows int64 [L, H]: how many rows with the smallest variances are candidates. `block`:
    rows that a program reads at once. Overwrites the logits of the first query of each group, whose
    memory takes the order of the variances.
    """
    assert logits.shape[-1] < MOST_ROWS.value
    _roco[(free_slot.numel(),)](
        *_head_args(logits, lse, rows, accepted, free_slot),
        sums,
        squares,
        count,
        steady_rows,
        **_scalars(logits, rows),
        G=logits.shape[2],
        BN=block,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )


def scissorhands_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    accepted: Tensor,
    free_slot: Tensor,
    words: Sequence[Tensor],
    queries: Tensor,
    history: int,
    window: Tensor,
    *,
    block: int = _BLOCK,
) -> None:
    """ScissorHands (arXiv 2305.17118, section 4): set a bit for each row that got less than a
    uniform share of this step's attention; the row with the largest share of set bits is the
    victim.

    words int64 [R] each: together a shift register of `history` bits per row, 32 in each; queries
    [R]: how many of the bits are in use; window int64 [L]: rows that a query of the layer sees at
    most. `block`: rows that a program reads at once.
    """
    assert len(words) == -(-history // 32) <= _MAX_WORDS
    _scissorhands[(free_slot.numel(),)](
        *_head_args(logits, lse, rows, accepted, free_slot),
        tuple(words),
        queries,
        window,
        history,
        **_scalars(logits, rows),
        H=logits.shape[1],
        G=logits.shape[2],
        BN=block,
        num_warps=_WARPS,
    )


def shift_step(
    logits: Tensor,
    lse: Tensor,
    rows: Rows,
    accepted: Tensor,
    seen: Sequence[Tensor],
    group: str,
    *,
    block: int = _BLOCK,
) -> None:
    """R-KV (arXiv 2505.24133): record this step's attention to each row; no row leaves.

    seen float32 [R] each: the attention of the last queries, the newest first; each moves on by one
    and the oldest is dropped. group: how the queries of a head are joined, "mean", "sum", or "max"
    of their logits. `block`: rows that a program reads at once.
    """
    given = (logits, lse, rows.start, rows.length, accepted)
    assert all(t.is_contiguous() for t in (*given, *seen))
    _shift[(rows.length.numel(),)](
        *given,
        tuple(seen),
        width=logits.shape[-1],
        G=logits.shape[2],
        BN=block,
        GROUP=group,
        num_warps=_WARPS,
    )


def variants(heads: int = 8, group: int = 4, history: int = 400) -> list[Variant]:
    """Builds for the compile gate, for a model of H KV heads of G queries."""
    common: dict[str, str | tuple[str, ...]] = {
        "scores": "*fp32",
        "allowed": "*i1",
        "logits": "*fp32",
        "lse": "*fp32",
        "start": "*i64",
        "length": "*i64",
        "cap": "*i64",
        "pos": "*i32",
        "newest": "*i64",
        "accepted": "*i1",
        "free_slot": "*i64",
        "sums": "*fp32",
        "squares": "*fp32",
        "counted": "*fp32",
        "newest_rows": "*i64",
        "steady_rows": "*i64",
        "words": ("*i64",) * -(-history // 32),
        "queries": "*fp32",
        "window": "*i64",
    }
    shapes = {"H": heads, "G": group, "BN": _BLOCK}
    found = []
    for name, fn in (
        ("lowest", _lowest),
        ("h2o", _h2o),
        ("roco", _roco),
        ("scissorhands", _scissorhands),
    ):
        constants: dict[str, object] = {k: v for k, v in shapes.items() if k in fn.arg_names}
        signature = typed(fn, common, constants)
        found.append(Variant(name, fn, signature, constants, warps=_WARPS))
    for joined in ("mean", "max"):
        constants = {"G": group, "BN": _BLOCK, "GROUP": joined}
        signature = typed(_shift, common | {"seen": ("*fp32",) * 8}, constants)
        found.append(Variant(f"shift-{joined}", _shift, signature, constants, warps=_WARPS))
    return found
