"""The arithmetic of choosing rows, in Triton. Each operation is one launch, or a few.

There are few heads, so for numbers per head one program compares each with each instead of sorting.
Rows are not sorted either. The k-th largest order key is found in three launches: two count the
keys by ten bits each, and the third lists the keys that share the twenty bits of the k-th, usually
a few. Its program that ends last searches the list. For a few rows one program searches them all.
Specification: `torch/selection.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import head_stride, lines, power, typed
from minikv.kernels.triton.variants import Variant

_ROWS = 1024  # of a head, in one program or one round of it
_MANY, _WARPS = 4096, 16  # rows of a round, and warps, of a program that has all rows of a head
_LINE = 256  # rows of a program of `_pool`, which loads many numbers for each
_UNROLLED = 64  # numbers that it loads for a row without a loop
_FEW, _FEW_IN_ALL = 4096, 8192  # rows of a head and of a layer that one program searches alone
_SEARCHED, _SEARCHERS = 2048, 8  # rows of a round of that program, and its warps
_BINS = 1024  # values of the digits by which keys are counted
_LEAST = tl.constexpr(-(1 << 63))  # `torch.selection.NOT_FREE`
_MOST = tl.constexpr((1 << 63) - 1)


# -- rows -------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["pos_head", "rows", "sinks", "young", "pinned"],
    do_not_specialize_on_alignment=["pos"],
)
def _divide(pos, stays, free, counts, pos_head, rows, sinks, young, pinned, BN: tl.constexpr):
    h = tl.program_id(0).to(tl.int64)
    heads = tl.num_programs(0)
    staying = tl.zeros((BN,), tl.int32)
    own = tl.zeros((BN,), tl.int32)
    rest = tl.zeros((BN,), tl.int32)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        inside = j < rows
        at = tl.load(pos + h * pos_head + j, mask=inside, other=-1)
        live = at >= 0
        stay = ((at < sinks) | (at >= young) | (at < pinned)) & live
        go = live & (stay == 0)
        tl.store(stays + h * rows + j, stay, mask=inside)
        tl.store(free + h * rows + j, go, mask=inside)
        staying += stay.to(tl.int32)
        own += (stay & (at >= pinned)).to(tl.int32)
        rest += go.to(tl.int32)
    tl.store(counts + h, tl.sum(staying, 0))
    tl.store(counts + heads + h, tl.sum(own, 0))
    tl.store(counts + 2 * heads + h, tl.sum(rest, 0))


@triton.jit(
    do_not_specialize=["scores_head", "pos_head", "free_head", "rows"],
    do_not_specialize_on_alignment=["scores", "pos", "free"],
)
def _order_key(scores, pos, free, out, scores_head, pos_head, free_head, rows, BN: tl.constexpr):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < rows
    bits = (tl.load(scores + h * scores_head + j, mask=inside, other=0.0) + 0.0).to(
        tl.int32, bitcast=True
    )
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    at = tl.load(pos + h * pos_head + j, mask=inside, other=0)
    ok = tl.load(free + h * free_head + j, mask=inside, other=0) != 0
    key = (bits << 32) | tl.maximum(at, 0)
    tl.store(out + h * rows + j, tl.where(ok, key, _LEAST), mask=inside)


@triton.jit
def _rank(counts):
    """int32: which of the largest keys is looked for, counted from 1. If that is more than there
    are, the number does not matter."""
    return tl.minimum(tl.maximum(tl.load(counts), 1), 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _high(key):
    """int32: the first 20 bits of a key, in the order of keys, from 0 on."""
    return ((key >> 44) + (1 << 19)).to(tl.int32)


@triton.jit
def _digit(counts, k, BINS: tl.constexpr):
    """Which digit the k-th largest number has, or -1 if there are fewer; and its rank among those
    of this digit. counts int32 [BINS]: how many have each."""
    i = tl.arange(0, BINS)
    count = tl.load(counts + i)
    digit = tl.sum((tl.cumsum(count, 0, reverse=True) >= k).to(tl.int32), 0) - 1
    return digit, k - tl.sum(tl.where(i > digit, count, 0), 0)


@triton.jit
def _edge(keys, rows, k, BN: tl.constexpr, CACHE: tl.constexpr):
    """int64: the k-th largest of `rows` keys, or another number that is above exactly as many; the
    key of rows that are not free, which do not count, if there are fewer than k others.

    The keys between `lo` and `hi` are divided into four at each pass. CACHE: how they are read."""
    low = tl.full((BN,), _MOST, tl.int64)
    high = tl.full((BN,), _LEAST, tl.int64)
    many = tl.zeros((BN,), tl.int32)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        key = tl.load(keys + j, mask=j < rows, other=_LEAST, cache_modifier=CACHE)
        low = tl.minimum(low, tl.where(key > _LEAST, key, _MOST))
        high = tl.maximum(high, key)
        many += (key > _LEAST).to(tl.int32)
    lo = tl.min(low, 0)
    hi = tl.max(high, 0)
    have = tl.sum(many, 0)  # how many are at least `lo`: never fewer than k
    enough = have >= k
    while (have > k) & (lo < hi):
        step = tl.maximum((hi >> 2) - (lo >> 2), 1)  # their difference may need 65 bits
        begin = lo
        one = tl.zeros((BN,), tl.int32)
        two = tl.zeros((BN,), tl.int32)
        three = tl.zeros((BN,), tl.int32)
        for s in tl.range(0, rows, BN):
            j = s + tl.arange(0, BN)
            key = tl.load(keys + j, mask=j < rows, other=_LEAST, cache_modifier=CACHE)
            one += (key >= begin + step).to(tl.int32)
            two += (key >= begin + 2 * step).to(tl.int32)
            three += (key >= begin + 3 * step).to(tl.int32)
        # Two counts in one number, as each sum makes all threads wait for each other.
        both = tl.sum(one.to(tl.int64) | (two.to(tl.int64) << 32), 0)
        last = tl.sum(three, 0)
        for d in tl.static_range(3):
            if d == 2:
                count = last
            else:
                count = (both >> (32 * d)).to(tl.int32)
            start = begin + (d + 1) * step
            hi = tl.where(count < k, tl.minimum(hi, start - 1), hi)
            lo = tl.where(count >= k, start, lo)
            have = tl.where(count >= k, count, have)
    return tl.where(enough, lo, _LEAST)


@triton.jit
def _numbers(
    keys,
    whose,
    free,
    many,
    rows,
    free_head,
    edge,
    all_,
    more,
    have,
    heads,
    HP: tl.constexpr,
    BN: tl.constexpr,
    LISTED: tl.constexpr,
):
    """int64 [HP]: how many of the layer's `all_` best rows each head holds. Of equal keys, the
    first heads get theirs. LISTED: of the `many` keys, `whose` names the head; more int32 [HP] has
    the better ones that are not listed, have int32 [HP] the free rows. Else the keys are those of
    all heads, and nothing is counted yet."""
    tied = tl.zeros((HP,), tl.int32)
    for s in tl.range(0, many, BN):
        j = s + tl.arange(0, BN)
        inside = j < many
        if LISTED:
            key = tl.load(keys + j, mask=inside, other=_LEAST, cache_modifier=".cg")
            h = tl.load(whose + j, mask=inside, other=0, cache_modifier=".cg")
        else:
            key = tl.load(keys + j, mask=inside, other=_LEAST)
            h = j // rows
            ok = tl.load(free + h.to(tl.int64) * free_head + j % rows, mask=inside, other=0) != 0
            have += tl.histogram(h, HP, mask=inside & ok)
        more += tl.histogram(h, HP, mask=inside & (key > edge))
        tied += tl.histogram(h, HP, mask=inside & (key == edge))
    one = (tied > 0).to(tl.int32)
    some = more + ((one > 0) & (tl.cumsum(one, 0) <= all_ - tl.sum(more, 0))).to(tl.int32)
    some = tl.where(all_ > 0, some, 0)
    return tl.where(all_ >= tl.sum(have, 0), have, some).to(tl.int64)


@triton.jit(
    do_not_specialize=["counts_head", "rows"],
    do_not_specialize_on_alignment=["key", "counts"],
)
def _tally(
    key,
    tallies,
    counts,
    counts_head,
    rows,
    EACH: tl.constexpr,
    LATER: tl.constexpr,
    BINS: tl.constexpr,
    BN: tl.constexpr,
):
    """Count keys by their first digit; LATER: by the second, those that have the first digit of the
    key that is looked for. EACH: for each head, not for all together."""
    h = tl.program_id(1).to(tl.int64)
    line = h * EACH
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    mine = tl.load(key + h * rows + j, mask=j < rows, other=_LEAST)
    ok = mine > _LEAST
    high = _high(mine)
    to = tallies + line * BINS
    if LATER:
        first, _ = _digit(to, _rank(counts + line * counts_head), BINS)
        ok = ok & (high // BINS == first)
        if EACH:
            to += tl.num_programs(1) * BINS
        else:
            to += BINS
        found = tl.histogram(high % BINS, BINS, mask=ok)
    else:
        found = tl.histogram(high // BINS, BINS, mask=ok)
    tl.atomic_add(to + tl.arange(0, BINS), found, mask=found > 0, sem="relaxed")


@triton.jit(
    do_not_specialize=["free_head", "counts_head", "rows"],
    do_not_specialize_on_alignment=["key", "free", "counts"],
)
def _settle(
    key,
    free,
    tallies,
    notes,
    listed,
    whose,
    counts,
    out,
    free_head,
    counts_head,
    rows,
    EACH: tl.constexpr,
    BINS: tl.constexpr,
    HP: tl.constexpr,
    BN: tl.constexpr,
):
    """List the keys that have both digits of the one that is looked for. The program that ends last
    finds it among them. EACH: it is the result int64 [H]; else `wanted` is.

    notes int32, zeros: the length of each list, how many programs ended; without EACH for each head
    how many better keys are not listed, and how many rows are free."""
    h = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    line = h * EACH
    lists = heads if EACH else 1
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < rows
    mine = tl.load(key + h * rows + j, mask=inside, other=_LEAST)
    first, left = _digit(tallies + line * BINS, _rank(counts + line * counts_head), BINS)
    second, left = _digit(tallies + (lists + line) * BINS, left, BINS)
    prefix = first * BINS + second
    high = _high(mine)
    take = ((mine > _LEAST) & (high == prefix)).to(tl.int32)
    begin = tl.atomic_add(notes + line, tl.sum(take, 0), sem="relaxed")
    place = line * rows + begin + tl.cumsum(take, 0) - 1
    tl.store(listed + place, mine, mask=take > 0)
    ended = notes + lists
    sums = notes + 2 * lists
    if EACH == 0:
        tl.store(whose + place, tl.zeros((BN,), tl.int32) + tl.program_id(1), mask=take > 0)
        ok = tl.load(free + h * free_head + j, mask=inside, other=0) != 0
        more = ((mine > _LEAST) & (high > prefix)).to(tl.int32)
        tl.atomic_add(sums + h, tl.sum(more, 0), sem="relaxed")
        tl.atomic_add(sums + heads + h, tl.sum(ok.to(tl.int32), 0), sem="relaxed")
    # As in decode.py: the barrier puts what all threads wrote before the count, and the atomic puts
    # that before what the program that counts last reads.
    tl.debug_barrier()
    others = tl.atomic_add(ended + line, 1, sem="acq_rel", scope="gpu")
    if others == tl.num_programs(0) * (heads // lists) - 1:
        many = tl.load(notes + line, cache_modifier=".cg")
        edge = _edge(listed + line * rows, many, left, BN, ".cg")
        if EACH:
            tl.store(out + h, edge)
        else:
            i = tl.arange(0, HP)
            real = i < heads
            some = tl.load(sums + i, mask=real, other=0, cache_modifier=".cg")
            have = tl.load(sums + heads + i, mask=real, other=0, cache_modifier=".cg")
            all_ = tl.load(counts)
            result = _numbers(
                listed, whose, free, many, 1, 0, edge, all_, some, have, heads, HP, BN, True
            )
            tl.store(out + i, result, mask=real)


@triton.jit(
    do_not_specialize=["free_head", "counts_head", "also_head", "rows"],
    do_not_specialize_on_alignment=["key", "free", "counts", "also"],
)
def _chosen(
    key,
    free,
    edges,
    counts,
    also,
    out,
    free_head,
    counts_head,
    also_head,
    rows,
    ALSO: tl.constexpr,
    ALONE: tl.constexpr,
    BN: tl.constexpr,
):
    """ALONE: one program has the whole head, and finds the edge itself."""
    h = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + h * counts_head)
    begin = tl.program_id(0) * BN
    if ALONE:
        edge = _edge(key + h * rows, rows, _rank(counts + h * counts_head), BN, "")
        end = rows
    else:
        edge = tl.load(edges + h)
        end = begin + BN
    for s in tl.range(begin, end, BN):
        j = s + tl.arange(0, BN)
        inside = j < rows
        ok = tl.load(free + h * free_head + j, mask=inside, other=0) != 0
        mine = ok & (tl.load(key + h * rows + j, mask=inside, other=0) >= edge) & (count > 0)
        if ALSO:
            mine = mine | (tl.load(also + h * also_head + j, mask=inside, other=0) != 0)
        tl.store(out + h * rows + j, mine, mask=inside)


@triton.jit(
    do_not_specialize=["free_head", "heads", "rows"],
    do_not_specialize_on_alignment=["key", "free", "total"],
)
def _wanted(key, free, total, out, free_head, heads, rows, HP: tl.constexpr, BN: tl.constexpr):
    """Of few rows: one program finds the edge of all heads and counts."""
    i = tl.arange(0, HP)
    many = heads * rows
    edge = _edge(key, many, _rank(total), BN, "")
    none = tl.zeros((HP,), tl.int32)
    all_ = tl.load(total)
    result = _numbers(
        key, key, free, many, rows, free_head, edge, all_, none, none, heads, HP, BN, False
    )
    tl.store(out + i, result, mask=i < heads)


@triton.jit
def _joined(values, at: tl.constexpr, queries, G: tl.constexpr, JOIN: tl.constexpr):
    """The scores of some rows of one head: the G numbers of `values` from `at` on. JOIN 0: as they
    are. Else they are divided by `queries`, then joined: by the mean (1), the sum (2) or the
    maximum (3)."""
    found = values[at]
    if JOIN != 0:
        by = tl.full(found.shape, 1.0, tl.float32) * queries
        found = tl.div_rn(found, by)
        for g in tl.static_range(1, G):
            value = tl.div_rn(values[at + g], by)
            found = tl.maximum(found, value) if JOIN == 3 else found + value
        if JOIN == 1:
            found = tl.div_rn(found, tl.full(found.shape, 1.0, tl.float32) * G)
    return found


@triton.jit
def _row(p, order, rows, early):
    """The rows at the places `p` by position, and which places there are."""
    there = (p >= 0) & (p < rows)
    row = tl.load(order + p, mask=there & (p < early), other=0)
    return tl.where(p < early, row, p), there


@triton.jit(
    do_not_specialize=[
        "scores_line",
        "scores_group",
        "free_head",
        "heads",
        "rows",
        "early",
        "queries",
    ],
    do_not_specialize_on_alignment=["scores", "free"],
)
def _pool(
    scores,
    order,
    free,
    out,
    scores_line,
    scores_group,
    free_head,
    heads,
    rows,
    early,
    queries,
    G: tl.constexpr,
    KERNEL: tl.constexpr,
    MAX: tl.constexpr,
    JOIN: tl.constexpr,
    UNROLL: tl.constexpr,
    BN: tl.constexpr,
):
    """UNROLL: all neighbours are loaded before any is divided. A division has branches, and no load
    is moved before a branch; so in a loop they wait for each other."""
    line = tl.program_id(1).to(tl.int64)
    h = line % heads
    place = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = place < rows
    BLANK: tl.constexpr = -float("inf") if MAX else 0.0
    scores += line * scores_line
    order += h * early
    free += h * free_head
    found = tl.full((BN,), BLANK, tl.float32)
    first = place - KERNEL // 2
    if UNROLL:
        at = ()
        for i in tl.static_range(KERNEL):
            row, there = _row(first + i, order, rows, early)
            at += (row, there)  # type: ignore[assignment]
        ok = ()
        for i in tl.static_range(KERNEL):
            there = at[2 * i + 1]
            some = tl.load(free + at[2 * i], mask=there, other=0) != 0
            ok += (there & some,)  # type: ignore[assignment]
        values = ()
        for i in tl.static_range(KERNEL):
            for g in tl.static_range(G):
                value = tl.load(scores + g * scores_group + at[2 * i], mask=ok[i], other=0.0)
                values += (value,)  # type: ignore[assignment]
        for i in tl.static_range(KERNEL):
            value = tl.where(ok[i], _joined(values, i * G, queries, G, JOIN), BLANK)
            found = tl.maximum(found, value) if MAX else found + value
    else:
        for i in tl.range(0, KERNEL):
            row, there = _row(first + i, order, rows, early)
            real = there & (tl.load(free + row, mask=there, other=0) != 0)
            values = ()
            for g in tl.static_range(G):
                value = tl.load(scores + g * scores_group + row, mask=real, other=0.0)
                values += (value,)  # type: ignore[assignment]
            value = tl.where(real, _joined(values, 0, queries, G, JOIN), BLANK)
            found = tl.maximum(found, value) if MAX else found + value
    if not MAX:
        found = tl.div_rn(found, tl.full((BN,), 1.0, tl.float32) * KERNEL)
    row, _ = _row(place, order, rows, early)
    mine = tl.load(free + row, mask=inside, other=0) != 0
    tl.store(out + line * rows + row, tl.where(mine, found, -float("inf")), mask=inside)


@triton.jit(
    do_not_specialize=["mass_head", "mass_group", "keep_head", "pos_head", "rows"],
    do_not_specialize_on_alignment=["mass", "keep", "pos"],
)
def _stayed(
    mass,
    keep,
    pos,
    out,
    mass_head,
    mass_group,
    keep_head,
    pos_head,
    rows,
    G: tl.constexpr,
    BN: tl.constexpr,
):
    h = tl.program_id(0).to(tl.int64)
    stays = tl.zeros((BN,), tl.float32)
    whole = tl.zeros((BN,), tl.float32)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        inside = j < rows
        live = tl.load(pos + h * pos_head + j, mask=inside, other=-1) >= 0
        kept = tl.load(keep + h * keep_head + j, mask=inside, other=0) != 0
        for g in tl.static_range(G):
            value = tl.load(mass + h * mass_head + g * mass_group + j, mask=live, other=0.0)
            whole += value
            stays += tl.where(kept, value, 0.0)
    tl.store(out + h, tl.sum(stays, 0) / tl.sum(whole, 0))


# -- numbers per head -------------------------------------------------------------------------


@triton.jit
def ranks(mine, ok, i):
    """The rank of each number in ascending order (of equal numbers, the first comes first), and a
    matrix [each, other]: whether the other comes before."""
    other = mine[None, :]
    first = (other < mine[:, None]) | ((other == mine[:, None]) & (i[None, :] < i[:, None]))
    first = first & ok[None, :]
    return tl.sum(first.to(tl.int64), 1), first


@triton.jit
def filled(used, ok, i, total):
    """`torch.selection.fill`."""
    rank, first = ranks(used, ok, i)
    after = ok[None, :] & (first == 0) & (i[None, :] != i[:, None])
    above = tl.sum(tl.where(after, used[None, :], 0), 1)
    lifted = tl.sum((ok & (used * (rank + 1) + above <= total)).to(tl.int64), 0)
    edge = ok & (rank == tl.maximum(lifted - 1, 0))
    spare = total - tl.sum(tl.where(edge, above, 0), 0)
    level = spare // tl.maximum(lifted, 1)
    low = ok & (used <= level)
    extra = low & (tl.cumsum(low.to(tl.int64), 0) <= spare - level * lifted)
    return tl.where(lifted > 0, tl.maximum(used, level) + extra.to(tl.int64), used)


@triton.jit(do_not_specialize=["total", "heads"], do_not_specialize_on_alignment=["staying"])
def _remaining(staying, out, total, heads, HP: tl.constexpr):
    i = tl.arange(0, HP)
    tl.store(out, tl.maximum(total - tl.sum(tl.load(staying + i, mask=i < heads, other=0), 0), 0))


@triton.jit(
    do_not_specialize=["need_head", "most_head", "heads", "times", "even", "parts"],
    do_not_specialize_on_alignment=["need", "most", "total"],
)
def _share(
    need, most, total, out, need_head, most_head, heads, times, even, parts, HP: tl.constexpr
):
    i = tl.arange(0, HP)
    ok = i < heads
    all_ = tl.load(total)
    want = tl.load(need + i * need_head, mask=ok, other=0) * times + all_ * even
    limit = tl.load(most + i * most_head, mask=ok, other=0)
    all_ = tl.minimum(all_, tl.sum(limit, 0))
    full = limit * parts
    rank, first = ranks(full - want, ok, i)
    # How much is left for a head and those after it, when the heads before it are full.
    left = tl.where(first, full[None, :], tl.where(ok[None, :], want[None, :], 0))
    spare = all_ * parts - tl.sum(left, 1)
    share = heads - rank
    open_ = tl.max(tl.where(ok & ((full - want) * share >= spare), share, 0), 0)
    open_ = tl.where(open_ == 0, heads, open_)
    lift = tl.sum(tl.where(ok & (share == open_), spare, 0), 0)
    unit = open_ * parts
    exact = tl.minimum(want * open_ + lift, limit * unit)
    counts = exact // unit
    rest = exact - counts * unit
    place, _ = ranks(-rest, ok, i)
    more = place < all_ - tl.sum(tl.where(ok, counts, 0), 0)
    tl.store(out + i, counts + more.to(tl.int64), mask=ok)


@triton.jit(
    do_not_specialize=["heads", "least"],
    do_not_specialize_on_alignment=["counts", "sure", "free"],
)
def _ensure_least(counts, sure, free, out, heads, least, HP: tl.constexpr):
    i = tl.arange(0, HP)
    ok = i < heads
    mine = tl.load(counts + i, mask=ok, other=0)
    rich = mine + tl.load(sure + i, mask=ok, other=0)
    lack = tl.minimum(least - rich, tl.load(free + i, mask=ok, other=0) - mine)
    lack = tl.where(ok, tl.maximum(lack, 0), 0)
    given = tl.zeros((HP,), tl.int64)
    wanted = tl.sum(lack, 0)
    able = wanted
    while able > 0:  # the head with the most rows gives one; of equal heads, the first
        left = tl.where(ok & (given < mine) & (rich - given > least), rich - given, -1)
        top = tl.max(left, 0)
        who = tl.min(tl.where(left == top, i, HP), 0)
        given += ((i == who) & (top >= 0)).to(tl.int64)
        able = tl.where(top < 0, 0, able - 1)
    got = tl.minimum(tl.maximum(tl.sum(given, 0) - tl.cumsum(lack, 0) + lack, 0), lack)
    tl.store(out + i, mine - given + got, mask=ok)


# -- launches ----------------------------------------------------------------------------------


def _grid(rows: int, lines: int) -> tuple[int, int]:
    return max(1, -(-rows // _ROWS)), lines


def divide(pos: Tensor, sinks: int, young: int, pinned: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `torch.selection.divide`."""
    pos = lines(pos)
    heads, rows = pos.shape
    stays = torch.empty((heads, rows), dtype=torch.bool, device=pos.device)
    free = torch.empty_like(stays)
    counts = torch.empty((3, heads), dtype=torch.int64, device=pos.device)
    numbers = head_stride(pos), rows, sinks, young, pinned
    _divide[(heads,)](pos, stays, free, counts, *numbers, BN=_MANY, num_warps=_WARPS)
    return stays, free, counts


def remaining(total: int, staying: Tensor) -> Tensor:
    """See `torch.selection.remaining`."""
    staying = staying.contiguous()
    out = torch.empty((), dtype=torch.int64, device=staying.device)
    _remaining[(1,)](staying, out, total, len(staying), HP=power(len(staying)))
    return out


def order_key(scores: Tensor, pos: Tensor, free: Tensor) -> Tensor:
    """See `torch.selection.order_key`."""
    scores, pos, free = lines(scores.to(torch.float32)), lines(pos), lines(free)
    heads, rows = scores.shape
    out = torch.empty((heads, rows), dtype=torch.int64, device=scores.device)
    _order_key[_grid(rows, heads)](
        scores,
        pos,
        free,
        out,
        *(head_stride(t) for t in (scores, pos, free)),
        rows,
        BN=_ROWS,
    )
    return out


def best(
    scores: Tensor,
    pos: Tensor,
    free: Tensor,
    counts: Tensor,
    most: int,
    key: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """See `torch.selection.best`."""
    key, free = order_key(scores, pos, free) if key is None else key, lines(free)
    more = free if also is None else lines(also)
    heads, rows = key.shape
    alone = rows <= _FEW
    out = torch.empty((heads, rows), dtype=torch.bool, device=key.device)
    _chosen[(1, heads) if alone else _grid(rows, heads)](
        key,
        free,
        counts if alone else _settled(key, free, counts, each=True),
        counts,
        more,
        out,
        head_stride(free),
        head_stride(counts),
        head_stride(more),
        rows,
        ALSO=also is not None,
        ALONE=alone,
        BN=_SEARCHED if alone else _ROWS,
        num_warps=_SEARCHERS if alone else 4,
    )
    return out


def wanted(
    scores: Tensor, pos: Tensor, free: Tensor, total: Tensor, most: int, key: Tensor | None = None
) -> Tensor:
    """See `torch.selection.wanted`."""
    key, free = order_key(scores, pos, free) if key is None else key, lines(free)
    heads, rows = key.shape
    if key.numel() > _FEW_IN_ALL:
        return _settled(key, free, total, each=False)
    out = torch.empty(heads, dtype=torch.int64, device=key.device)
    numbers = head_stride(free), heads, rows
    sizes = {"HP": _heads(heads), "BN": _SEARCHED}
    _wanted[(1,)](key, free, total, out, *numbers, **sizes, num_warps=_SEARCHERS)
    return out


def _settled(key: Tensor, free: Tensor, counts: Tensor, *, each: bool) -> Tensor:
    """int64 [H]. each: of each head's order keys, the one of rank counts[h], or another with which
    as many are chosen. Else `torch.selection.wanted`, with counts int64 [] as its total."""
    heads, rows = key.shape
    lists = heads if each else 1
    tallied, noted = 2 * lists * _BINS, 2 * lists + 2 * heads
    zeros = torch.zeros(tallied + noted, dtype=torch.int32, device=key.device)
    tallies, notes = zeros[:tallied], zeros[tallied:]
    out = torch.empty(heads, dtype=torch.int64, device=key.device)
    listed = torch.empty_like(key)
    whose = notes if each else torch.empty_like(key, dtype=torch.int32)
    stride = head_stride(counts) if each else 0
    grid = _grid(rows, heads)
    for later in (False, True):
        given = key, tallies, counts, stride, rows
        _tally[grid](*given, EACH=int(each), LATER=later, BINS=_BINS, BN=_ROWS)
    _settle[grid](
        key,
        free,
        tallies,
        notes,
        listed,
        whose,
        counts,
        out,
        head_stride(free),
        stride,
        rows,
        EACH=int(each),
        BINS=_BINS,
        HP=_heads(heads),
        BN=_ROWS,
    )
    return out


def _heads(heads: int) -> int:
    """How many heads a kernel counts rows for: one for every thread of a warp, or more."""
    return max(32, power(heads))


def pool(scores: Tensor, order: Tensor, free: Tensor, kernel: int, how: str) -> Tensor:
    """See `torch.selection.pool`."""
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    _launch_pool(scores, order, free, out, (scores.shape[-1], 0, 1, 1, 0), kernel, how)
    return out


def pool_mass(
    mass: Tensor, queries: int, join: str, order: Tensor, free: Tensor, kernel: int, how: str
) -> Tensor:
    """See `torch.selection.pool_mass`."""
    mass = lines(mass)
    heads, group, rows = mass.shape
    out = torch.empty((heads, rows), dtype=torch.float32, device=mass.device)
    layout = head_stride(mass), mass.stride(1), group, queries, _JOINS.index(join)
    _launch_pool(mass, order, free, out, layout, kernel, how)
    return out


_JOINS = ("", "mean", "sum", "max")


def _launch_pool(
    scores: Tensor,
    order: Tensor,
    free: Tensor,
    out: Tensor,
    layout: tuple[int, int, int, int, int],
    kernel: int,
    how: str,
) -> None:
    """layout: the strides between lines and in a group, its heads, the number of queries, and how
    the heads are joined."""
    free, order = lines(free), order.contiguous()
    heads, rows = free.shape
    line, member, group, queries, join = layout
    _pool[(max(1, -(-rows // _LINE)), out.numel() // max(1, rows))](
        scores,
        order,
        free,
        out,
        line,
        member,
        head_stride(free),
        heads,
        rows,
        order.shape[1],
        queries,
        G=group,
        KERNEL=kernel,
        MAX=how == "max",
        JOIN=join,
        UNROLL=kernel * group <= _UNROLLED,
        BN=_LINE,
    )


def stayed(mass: Tensor, keep: Tensor, pos: Tensor) -> Tensor:
    """See `torch.selection.stayed`."""
    mass, keep, pos = lines(mass), lines(keep), lines(pos)
    heads, group, rows = mass.shape
    out = torch.empty(heads, dtype=torch.float32, device=mass.device)
    strides = head_stride(mass), mass.stride(1), head_stride(keep), head_stride(pos)
    _stayed[(heads,)](mass, keep, pos, out, *strides, rows, G=group, BN=_MANY, num_warps=_WARPS)
    return out


def share(need: Tensor, times: int, even: int, parts: int, most: Tensor, total: Tensor) -> Tensor:
    """See `torch.selection.share`."""
    out = torch.empty(len(need), dtype=torch.int64, device=need.device)
    numbers = need.stride(0), most.stride(0), len(need), times, even, parts
    _share[(1,)](need, most, total, out, *numbers, HP=power(len(need)))
    return out


def ensure_least(counts: Tensor, sure: Tensor, free: Tensor, least: int) -> Tensor:
    """See `torch.selection.ensure_least`."""
    counts, sure, free = (t.contiguous() for t in (counts, sure, free))
    out = torch.empty_like(counts)
    _ensure_least[(1,)](counts, sure, free, out, len(counts), least, HP=power(len(counts)))
    return out


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    lists = dict.fromkeys(("pos", "key", "order", "edges", "listed"), "*i64")
    lists |= dict.fromkeys(("counts", "staying", "need", "most", "total"), "*i64")
    lists |= dict.fromkeys(("tallies", "notes", "whose"), "*i32")
    masks = dict.fromkeys(("keep", "stays", "free", "also"), "*i1")
    numbers = dict.fromkeys(("scores", "mass"), "*fp32")
    rows: dict[str, object] = {"BN": _ROWS}
    many: dict[str, object] = {"BN": _MANY}
    alone: dict[str, object] = {"BN": _SEARCHED}
    heads: dict[str, object] = {"HP": 32}
    line: dict[str, object] = {"MAX": True, "JOIN": 1, "BN": _LINE}
    each: dict[str, object] = {"EACH": 1, "BINS": _BINS} | rows
    layer: dict[str, object] = each | {"EACH": 0}
    chosen: dict[str, object] = {"ALSO": True, "ALONE": False}
    longs = {"out": "*i64"}
    bits = {"out": "*i1"}
    found = []
    for name, fn, kinds, constants, warps in (
        ("divide", _divide, {}, many, _WARPS),
        ("order-key", _order_key, longs, rows, 4),
        ("chosen", _chosen, bits, rows | chosen, 4),
        ("chosen-alone", _chosen, bits, alone | chosen | {"ALONE": True}, _SEARCHERS),
        ("tally", _tally, {}, each | {"LATER": False}, 4),
        ("tally-later", _tally, {}, layer | {"LATER": True}, 4),
        ("settle-each", _settle, longs, each | heads, 4),
        ("settle", _settle, longs, layer | heads, 4),
        ("wanted", _wanted, longs, heads | alone, _SEARCHERS),
        ("pool", _pool, {"out": "*fp32"}, line | {"G": 4, "KERNEL": 7, "UNROLL": True}, 4),
        ("pool-far", _pool, {"out": "*fp32"}, line | {"G": 4, "KERNEL": 33, "UNROLL": False}, 4),
        ("stayed", _stayed, {"out": "*fp32"}, many | {"G": 4}, _WARPS),
        ("remaining", _remaining, longs | {"total": "i32"}, heads, 4),
        ("share", _share, longs, heads, 4),
        ("ensure-least", _ensure_least, longs | {"sure": "*i64", "free": "*i64"}, heads, 4),
    ):
        signature = typed(fn, lists | masks | numbers | kinds, constants)
        found.append(Variant(name, fn, signature, constants, warps))
    return found
