"""From logits to the next token, in Triton. Specification: `torch/sampling.py`.

Two launches each: the programs of the first read a tile of logits each, and one program joins their
results. For a draw, torch sorts the logits first. With the sums of the tiles, the second launch
looks into two tiles at most: the one in which the nucleus ends, and the one in which the drawn
token lies. Masses are whole numbers, so their sums equal torch's in any order.

Without the sort, each of these places would take a radix search: four passes over the logits, one
after the other, and two more for equal logits.
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


@triton.jit
def _first_best(value, index):
    """The largest value of a block, and of equal ones the smallest index."""
    most = tl.max(value, 0)
    return most, tl.min(tl.where(value == most, index, _FAR), 0)


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")  # NaN is not below anything


@triton.jit(do_not_specialize=["vocab"])
def _best_of_tile(logits, value, index, finite, vocab, BN: tl.constexpr):
    """Grid (tiles,): the best logit of each tile, its index, and whether all are finite."""
    tile = tl.program_id(0)
    j = tile * BN + tl.arange(0, BN)
    x = tl.load(logits + j, mask=j < vocab, other=-float("inf"))
    most, first = _first_best(tl.where(x == x, x, -float("inf")), j)
    tl.store(value + tile, most)
    tl.store(index + tile, first)
    tl.store(finite + tile, tl.min((_finite(x) | (j >= vocab)).to(tl.int32), 0))


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
def _chances(ranked, j, limit, temperature):
    """float64: how many times as likely as rank 0 the tokens of ranks j are; 0 from `limit` on."""
    best = tl.load(ranked).to(tl.float64)
    x = tl.load(ranked + j, mask=j < limit, other=0.0).to(tl.float64)
    return tl.where(j < limit, tl.exp((x - best) / temperature), 0.0)


@triton.jit
def _masses(chances, scale):
    """int64: the chances in units of 1 / scale, rounded. Adding 2^52 puts the whole number into the
    lowest bits."""
    return (chances * scale + _WHOLE).to(tl.int64, bitcast=True) & (_WHOLE - 1)


@triton.jit
def _float64(bits):
    """The float64 with these bits. A float argument would be passed as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _ranks(top_k, vocab):
    return tl.where((top_k > 0) & (top_k < vocab), top_k, vocab).to(tl.int32)


@triton.jit(do_not_specialize=["scale", "temperature", "top_k", "min_p", "tiles", "vocab"])
def _weigh(
    ranked,
    total,
    finite,
    scale: tl.int64,
    temperature: tl.int64,
    top_k: tl.int64,
    min_p: tl.int64,
    tiles,
    vocab,
    BN: tl.constexpr,
):
    """Grid (tiles,): the mass of each tile of sorted logits, the mass that `min_p` keeps of it, and
    whether all its logits are finite."""
    tile = tl.program_id(0)
    j = tile * BN + tl.arange(0, BN)
    chances = _chances(ranked, j, _ranks(top_k, vocab), _float64(temperature))
    masses = _masses(chances, _float64(scale))
    tl.store(total + tile, tl.sum(masses, 0))
    likely = tl.where(chances >= _float64(min_p), masses, 0)
    tl.store(total + tiles + tile, tl.sum(likely, 0))
    x = tl.load(ranked + j, mask=j < vocab, other=0.0)
    tl.store(finite + tile, tl.min(_finite(x).to(tl.int32), 0))


@triton.jit(
    do_not_specialize=["scale", "temperature", "top_k", "top_p", "draw_count", "tiles", "vocab"]
)
def _draw(
    ranked,
    ids,
    total,
    tile_finite,
    draws,
    first,
    position,
    token,
    found,
    finite,
    scale: tl.int64,
    temperature: tl.int64,
    top_k: tl.int64,
    top_p: tl.int64,
    draw_count,
    tiles,
    vocab,
    BN: tl.constexpr,
    TN: tl.constexpr,
):
    """Grid (1,): draw the token. The filters together keep the smallest of the masses that each of
    them keeps."""
    heat = _float64(temperature)
    nucleus = _float64(top_p)
    unit = _float64(scale)
    b = tl.arange(0, TN)
    ok = b < tiles
    n = tl.arange(0, BN)
    sums = tl.load(total + b, mask=ok, other=0)
    ends = tl.cumsum(sums, 0)
    limit = _ranks(top_k, vocab)
    kept = tl.sum(sums, 0)
    likely = tl.sum(tl.load(total + tiles + b, mask=ok, other=0), 0)
    if nucleus < 1:
        least = tl.maximum(tl.ceil(kept.to(tl.float64) * nucleus).to(tl.int64), 1)
        tile = tl.sum((ok & (ends < least)).to(tl.int32), 0)
        inner = tl.sum(tl.where(b < tile, sums, 0), 0)
        inner += tl.cumsum(_masses(_chances(ranked, tile * BN + n, limit, heat), unit), 0)
        kept = tl.min(tl.where(inner >= least, inner, kept), 0)
    target = tl.minimum(kept, likely).to(tl.float64)
    place = tl.load(position) + 1 - tl.load(first)
    place = tl.minimum(tl.maximum(place, 0), draw_count - 1)
    target = (target * tl.load(draws + place)).to(tl.int64)
    tile = tl.sum((ok & (ends <= target)).to(tl.int32), 0)
    inner = tl.sum(tl.where(b < tile, sums, 0), 0)
    inner += tl.cumsum(_masses(_chances(ranked, tile * BN + n, limit, heat), unit), 0)
    rank = tile * BN + tl.sum((inner <= target).to(tl.int32), 0)
    best = tl.load(ids + tl.minimum(rank, limit - 1))
    _note(best, tl.min(tl.load(tile_finite + b, mask=ok, other=1), 0), token, found, finite)


def greedy(
    logits: Tensor, token: Tensor, found: Tensor, finite: Tensor, *, block: int = _BLOCK
) -> None:
    """See `torch.sampling.greedy`. `block`: logits that a program reads at once."""
    assert logits.is_contiguous()
    assert found.is_contiguous()
    vocab, tiles, most = _sizes(logits, block)
    value = torch.empty(tiles, dtype=torch.float32, device=logits.device)
    index, good = (torch.empty(tiles, dtype=torch.int32, device=logits.device) for _ in range(2))
    _best_of_tile[(tiles,)](logits, value, index, good, vocab, BN=block, num_warps=_WARPS)
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
    vocab, tiles, most = _sizes(logits, block)
    ranked, ids = torch.sort(logits, descending=True, stable=True)
    total = torch.empty((2, tiles), dtype=torch.int64, device=logits.device)
    good = torch.empty(tiles, dtype=torch.int32, device=logits.device)
    unit, heat = _bits(scale(vocab)), _bits(temperature)
    _weigh[(tiles,)](
        ranked,
        total,
        good,
        unit,
        heat,
        top_k,
        _bits(min_p),
        tiles,
        vocab,
        BN=block,
        num_warps=_WARPS,
    )
    _draw[(1,)](
        ranked,
        ids,
        total,
        good,
        draws,
        first,
        position,
        token,
        found,
        finite,
        unit,
        heat,
        top_k,
        _bits(top_p),
        len(draws),
        tiles,
        vocab,
        BN=block,
        TN=most,
        num_warps=_WARPS,
    )


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
    kinds |= dict.fromkeys(("index", "tile_finite"), "*i32") | {"ranked": "*fp32"}
    kinds |= {"draws": "*fp64"}
    kinds |= dict.fromkeys(("ids", "total", "first", "position", "token", "found"), "*i64")
    kinds |= dict.fromkeys(("scale", "temperature", "top_k", "top_p", "min_p"), "i64")
    found = []
    for name, fn, flag in (
        ("best-of-tile", _best_of_tile, "*i32"),
        ("best-of-all", _best_of_all, "*i1"),
        ("weigh", _weigh, "*i32"),
        ("draw", _draw, "*i1"),
    ):
        sizes: dict[str, object] = {"BN": _BLOCK, "TN": _TILES}
        fixed = {n: size for n, size in sizes.items() if n in fn.arg_names}
        signature = typed(fn, kinds | {"finite": flag}, fixed)
        found.append(Variant(name, fn, signature, fixed, _WARPS))
    return found
