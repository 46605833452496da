"""From logits to the next token, in Triton. Specification: `torch/sampling.py`.

The best token takes two launches: the programs of the first read a tile of logits each, and one
program joins their results.

A draw does not sort the vocabulary. It looks for a place in the order of the logits at most three
times: where top_k ends, where the nucleus of top_p ends, and where the drawn token lies. Each is
the first logit up to which a sum is above a target: a sum of ones for top_k, else of masses. The
key of a logit has 33 bits and grows as the logit falls. A search finds 11 bits at a time: a launch
adds up the masses of all logits whose key begins as found so far, by the next 11 bits, and each
program of the next launch reads from these sums which bits come next. Two launches more find the
drawn token among equal logits. Masses are whole numbers, so their sums are exact in any order.

That is 6 launches that read the logits 5 times, and 2 more of each for top_k and for top_p. A radix
sort, as torch has, takes about 8 launches, of which 4 read and write every logit and its id. The
slowest case of the search is that most logits are equal: all are added to one address in turn.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.torch.sampling import scale
from minikv.kernels.triton.tiles import power, typed
from minikv.kernels.triton.variants import Variant

_BLOCK, _WARPS = 1024, 4
_TILES = 1024  # one build for up to so many tiles, which is enough for any vocabulary
_FAR = tl.constexpr((1 << 31) - 1)
_WHOLE = tl.constexpr(1 << 52)  # from here on a float64 has no fraction
_BITS = tl.constexpr(11)  # of a key that a level of a search finds; three levels find all
_BINS = tl.constexpr(1 << 11)
_COPIES = tl.constexpr(4)  # of the first level's sums: most logits share few leading bits


@triton.jit
def _first_best(value, index):
    """The largest value of a block, and of equal ones the smallest index."""
    most = tl.max(value, 0)
    return most, tl.min(tl.where(value == most, index, _FAR), 0)


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")  # NaN is not below anything


@triton.jit(do_not_specialize=["vocab", "rows"])
def _best_of_tile(logits, value, index, finite, table, vocab, rows, BN: tl.constexpr):
    """Grid (tiles,): the best logit of each tile, its index, and whether all are finite. With a
    table, its rows become zero."""
    tile = tl.program_id(0)
    j = tile * BN + tl.arange(0, BN)
    x = tl.load(logits + j, mask=j < vocab, other=-float("inf"))
    most, first = _first_best(tl.where(x == x, x, -float("inf")), j)
    tl.store(value + tile, most)
    tl.store(index + tile, first)
    tl.store(finite + tile, tl.min((_finite(x) | (j >= vocab)).to(tl.int32), 0))
    if table is not None:
        for row in range(tile, rows, tl.num_programs(0)):
            tl.store(table + row * _BINS + tl.arange(0, _BINS), tl.zeros((_BINS,), tl.int64))


@triton.jit
def _note(best, good, token, found, finite):
    """Write the token that was found, and whether all logits were finite."""
    tl.store(token, best)
    tl.store(found, best)
    tl.store(found + 1, good.to(tl.int64))
    tl.store(finite, good != 0)


@triton.jit(do_not_specialize=["tiles", "vocab"])
def _best_of_all(value, index, tile_finite, token, found, finite, tiles, vocab, TN: tl.constexpr):
    """Grid (1,): the best logit of all tiles."""
    b = tl.arange(0, TN)
    ok = b < tiles
    most = tl.load(value + b, mask=ok, other=-float("inf"))
    first = _first_best(most, tl.load(index + b, mask=ok, other=_FAR))[1]
    good = tl.min(tl.load(tile_finite + b, mask=ok, other=1), 0)
    _note(tl.minimum(first, vocab - 1).to(tl.int64), good, token, found, finite)


@triton.jit
def _key(x):
    """int64: 33 bits, which are larger for a smaller logit. 0 and -0 have the same."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF)
    return (bits.to(tl.int64) & 0xFFFFFFFF) << 1


@triton.jit
def _logit(key):
    """The logit that has this key."""
    bits = (key >> 1).to(tl.int32)
    return tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _chances(x, best, temperature):
    """float64: how many times as likely as the best logit these are."""
    return tl.exp((x.to(tl.float64) - best) / temperature)


@triton.jit
def _masses(chances, scale):
    """int64: the chances in units of 1 / scale, rounded; 0 for NaN. Adding 2^52 puts the whole
    number into the lowest bits."""
    whole = (chances * scale + _WHOLE).to(tl.int64, bitcast=True) & (_WHOLE - 1)
    return tl.where(chances <= 1, whole, 0)


@triton.jit
def _float64(bits):
    """The float64 with these bits. A float argument would be passed as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _sums(table, row, COPIES: tl.constexpr):
    """The sums in a row, or in as many rows as there are copies of it."""
    at = table + row * _BINS + tl.arange(0, _BINS)
    found = tl.load(at)
    for copy in tl.static_range(1, COPIES):
        found += tl.load(at + copy * _BINS)
    return found


@triton.jit
def _deeper(table, counts, row, counted, prefix, left, above, COPIES: tl.constexpr):
    """A level of a search. prefix: the leading bits of the key; above: the mass of all logits
    before these; left: what the target has above their sum. The result has the next bits, too."""
    masses = _sums(table, row, COPIES)
    by = masses
    if counted:
        by = _sums(counts, row, COPIES)
    left = tl.minimum(left, tl.sum(by, 0) - 1)  # else behind the last logit that has a mass
    digit = tl.minimum(tl.sum((tl.cumsum(by, 0) <= left).to(tl.int32), 0), _BINS - 1)
    before = tl.arange(0, _BINS) < digit
    left -= tl.sum(tl.where(before, by, 0), 0)
    above += tl.sum(tl.where(before, masses, 0), 0)
    return (prefix << _BITS) | digit, left, above


@triton.jit(
    do_not_specialize=[
        *("scale", "temperature", "top_k", "top_p", "min_p", "draw_count"),
        *("search", "searches", "tiles", "vocab"),
    ]
)
def _tally(
    logits,
    value,
    total,
    equal,
    table,
    notes,
    draws,
    first,
    position,
    scale: tl.int64,
    temperature: tl.int64,
    top_k: tl.int64,
    top_p: tl.int64,
    min_p: tl.int64,
    draw_count,
    search,
    searches,
    tiles,
    vocab,
    LEVEL: tl.constexpr,
    BN: tl.constexpr,
    TN: tl.constexpr,
):
    """Grid (tiles,): find the bits of the level before this one, and add up the masses by the next.
    The filters together keep the smallest of the masses that each of them keeps.

    value: the best logit of each tile; total: the mass of each tile, and then what `min_p` keeps of
    it, from level 0; equal: of level 3, how many logits of each tile are the drawn one. table: sums
    of masses, in a row for each copy of the first level and for levels 1 and 2 of each search;
    behind them, if top_k is on, counts for the first search. notes: prefix, left and above of each
    search after each level. search: of `searches`, the last of which is the draw."""
    tile = tl.program_id(0)
    b = tl.arange(0, TN)
    ok = b < tiles
    best = tl.max(tl.load(value + b, mask=ok, other=-float("inf")), 0).to(tl.float64)
    heat = _float64(temperature)
    unit = _float64(scale)
    counted = (search == 0) & (top_k > 0)
    counts = table + (_COPIES + 2 * searches) * _BINS
    row = _COPIES + 2 * search + LEVEL - 1
    note = notes + (3 * search + LEVEL - 1) * 3
    prefix = tl.zeros((), tl.int64)
    if LEVEL == 1:
        kept = tl.sum(tl.load(total + b, mask=ok, other=0), 0)
        if search > 0:
            after_count = (search == 1) & (top_k > 0)
            old = note - 6
            place, left, above = tl.load(old), tl.load(old + 1), tl.load(old + 2)
            place, left, above = _deeper(table, counts, row - 1, after_count, place, left, above, 1)
            mass = tl.maximum(_masses(_chances(_logit(place), best, heat), unit), 1)
            kept = above + (tl.where(after_count, left, left // mass) + 1) * mass
        if counted:
            left = top_k - 1
        elif search < searches - 1:
            left = tl.maximum(tl.ceil(kept.to(tl.float64) * _float64(top_p)).to(tl.int64), 1) - 1
        else:
            likely = tl.sum(tl.load(total + tiles + b, mask=ok, other=0), 0)
            at = tl.minimum(tl.maximum(tl.load(position) + 1 - tl.load(first), 0), draw_count - 1)
            left = (tl.minimum(kept, likely).to(tl.float64) * tl.load(draws + at)).to(tl.int64)
        prefix, left, above = _deeper(table, counts, 0, counted, prefix, left, prefix, _COPIES)
    if LEVEL > 1:
        prefix, left, above = tl.load(note - 3), tl.load(note - 2), tl.load(note - 1)
        prefix, left, above = _deeper(table, counts, row - 1, counted, prefix, left, above, 1)
    if LEVEL == 3:
        left //= tl.maximum(_masses(_chances(_logit(prefix), best, heat), unit), 1)
    if LEVEL > 0 and tile == 0:
        tl.store(note, prefix)
        tl.store(note + 1, left)
        tl.store(note + 2, above)
    j = tile * BN + tl.arange(0, BN)
    x = tl.load(logits + j, mask=j < vocab, other=-float("inf"))
    key = _key(x)
    here = (key >> (_BITS * (3 - LEVEL))) == prefix
    if LEVEL == 3:
        tl.store(equal + tile, tl.sum(here.to(tl.int32), 0))
    else:
        chances = _chances(x, best, heat)
        masses = _masses(chances, unit)
        if LEVEL == 0:
            row = tile % _COPIES
            tl.store(total + tile, tl.sum(masses, 0))
            likely = tl.where(chances >= _float64(min_p), masses, 0)
            tl.store(total + tiles + tile, tl.sum(likely, 0))
        here &= masses > 0
        to = row * _BINS + ((key >> (_BITS * (2 - LEVEL))) & (_BINS - 1))
        tl.atomic_add(table + to, masses, mask=here, sem="relaxed")
        if counted:
            tl.atomic_add(counts + to, here.to(tl.int64), mask=here, sem="relaxed")


@triton.jit(do_not_specialize=["tiles", "vocab"], do_not_specialize_on_alignment=["note"])
def _take(
    logits,
    tile_finite,
    equal,
    note,
    token,
    found,
    finite,
    tiles,
    vocab,
    BN: tl.constexpr,
    TN: tl.constexpr,
):
    """Grid (1,): the token that was drawn, by its key and the number of equal logits before it."""
    key, left = tl.load(note), tl.load(note + 1)
    b = tl.arange(0, TN)
    ok = b < tiles
    equals = tl.load(equal + b, mask=ok, other=0)
    tile = tl.minimum(tl.sum((ok & (tl.cumsum(equals, 0) <= left)).to(tl.int32), 0), tiles - 1)
    left -= tl.sum(tl.where(b < tile, equals, 0), 0)
    j = tile * BN + tl.arange(0, BN)
    same = _key(tl.load(logits + j, mask=j < vocab, other=-float("inf"))) == key
    best = tile * BN + tl.sum((tl.cumsum(same.to(tl.int32), 0) <= left).to(tl.int32), 0)
    good = tl.min(tl.load(tile_finite + b, mask=ok, other=1), 0)
    _note(tl.minimum(best, vocab - 1).to(tl.int64), good, token, found, finite)


def greedy(
    logits: Tensor, token: Tensor, found: Tensor, finite: Tensor, *, block: int = _BLOCK
) -> None:
    """See `torch.sampling.greedy`. `block`: logits that a program reads at once."""
    assert logits.is_contiguous()
    assert found.is_contiguous()
    vocab, tiles, most = _sizes(logits, block)
    value = torch.empty(tiles, dtype=torch.float32, device=logits.device)
    index, good = (torch.empty(tiles, dtype=torch.int32, device=logits.device) for _ in range(2))
    _best_of_tile[(tiles,)](logits, value, index, good, None, vocab, 0, BN=block, num_warps=_WARPS)
    _best_of_all[(1,)](
        value, index, good, token, found, finite, tiles, vocab, TN=most, num_warps=_WARPS
    )


def sample(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    draws: Tensor,
    first: Tensor,
    position: Tensor,
    token: Tensor,
    found: Tensor,
    finite: Tensor,
    *,
    block: int = _BLOCK,
) -> None:
    """See `torch.sampling.sample`. `block`: logits that a program reads at once."""
    assert draws.is_contiguous()
    assert found.is_contiguous()
    assert logits.is_contiguous()
    vocab, tiles, most = _sizes(logits, block)
    top_k = top_k if top_k < vocab else 0
    searches = 1 + (top_k > 0) + (top_p < 1.0)
    rows = _COPIES.value + 2 * searches + (_COPIES.value + 2 if top_k else 0)

    def room(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    value = room(tiles, dtype=torch.float32)
    index, good, equal = (room(tiles, dtype=torch.int32) for _ in range(3))
    total, table, notes = room(2, tiles), room(rows, _BINS.value), room(searches, 3, 3)
    _best_of_tile[(tiles,)](
        logits, value, index, good, table, vocab, rows, BN=block, num_warps=_WARPS
    )

    given = (logits, value, total, equal, table, notes, draws, first, position)
    unit, heat = _bits(scale(vocab)), _bits(temperature)
    settings = (unit, heat, top_k, _bits(top_p), _bits(min_p), len(draws))
    built = {"BN": block, "TN": most, "num_warps": _WARPS}

    def tally(search: int, level: int) -> None:
        places = (search, searches, tiles, vocab)
        _tally[(tiles,)](*given, *settings, *places, LEVEL=level, **built)

    tally(0, 0)
    for search in range(searches):
        tally(search, 1)
        tally(search, 2)
    tally(searches - 1, 3)
    last = notes[-1, 2]
    _take[(1,)](logits, good, equal, last, token, found, finite, tiles, vocab, **built)


def _sizes(logits: Tensor, block: int) -> tuple[int, int, int]:
    """The number of logits, of tiles, and of the lanes of a program that has all tiles."""
    tiles = -(-len(logits) // block)
    return len(logits), tiles, max(_TILES, power(tiles))


def _bits(number: float) -> int:
    """The bits of a float64 as an int64."""
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    kinds: dict[str, str | tuple[str, ...]] = {"logits": "*fp32", "value": "*fp32"}
    kinds |= dict.fromkeys(("index", "tile_finite", "equal"), "*i32") | {"draws": "*fp64"}
    kinds |= dict.fromkeys(("total", "table", "notes", "note"), "*i64")
    kinds |= dict.fromkeys(("first", "position", "token", "found"), "*i64")
    kinds |= dict.fromkeys(("scale", "temperature", "top_k", "top_p", "min_p"), "i64")
    builds: list[tuple[str, object, str, dict[str, object]]] = [
        ("best-of-tile", _best_of_tile, "*i32", {"table": None}),
        ("best-of-tile-zero", _best_of_tile, "*i32", {}),
        ("best-of-all", _best_of_all, "*i1", {}),
        ("take", _take, "*i1", {}),
    ]
    builds += [(f"tally-{level}", _tally, "", {"LEVEL": level}) for level in range(4)]
    found = []
    for name, fn, flag, more in builds:
        sizes: dict[str, object] = {"BN": _BLOCK, "TN": _TILES}
        names: list[str] = fn.arg_names  # type: ignore[attr-defined]
        fixed = {n: size for n, size in sizes.items() if n in names} | more
        open_kinds = {n: kind for n, kind in kinds.items() if n not in fixed}
        signature = typed(fn, open_kinds | {"finite": flag}, fixed)
        found.append(Variant(name, fn, signature, fixed, _WARPS))
    return found
