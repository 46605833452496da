"""Attention of a decode step, in Triton: one query per head over ragged segments of the arena.

This is Flash-Decoding (split-KV attention) in one launch instead of two. The rows of a head are
divided among several programs, in pieces of the same size for all heads, so that the programs of
the grid suffice for any lengths. The lengths are read on the device, and the grid is the same at
every step, so that one CUDA graph serves all steps. A program has one piece, and its number is that
of its partial result. Few rows are divided among fewer programs, because joining parts takes time
too. The programs count the finished parts of a head. The one that finishes the last part joins all
of them by their log-sum-exp, in the order of the rows, so the result does not depend on which
program was last. The G query heads of a KV head share a tile of 16 rows, the fewest that matrix
instructions allow. Specification: `plain.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.decode.plain import Segments
from minikv.kernels.gpu import power, upcast
from minikv.kernels.gpu import width as columns

_LOG2E = tl.constexpr(1.4426950408889634)
_UNIT = tl.constexpr(16)  # rows; all pieces but the last of a head have a multiple


@triton.jit
def _at_index(values, at, index):
    """values[index] of a tile in registers; 0 if there is no such index."""
    return tl.sum(tl.where(at == index, values, 0), 0)


@triton.jit
def _join(
    part,
    part_lse,
    out,
    lse,
    head,
    first,
    count,
    G: tl.constexpr,
    D: tl.constexpr,
    GJ: tl.constexpr,
    DP: tl.constexpr,
    BU: tl.constexpr,
    BW: tl.constexpr,
):
    """Join the `count` parts of a head, from `first` on, to its output.

    BU * BW parts are read at once: all threads together hold the numbers of BW parts, and each
    thread holds its numbers of BU such lots. So threads need nothing from each other until the end,
    and no load waits for another one.
    """
    g = tl.arange(0, GJ)
    d = tl.arange(0, DP)
    i = tl.arange(0, BW)
    real = (g < G)[:, None] & (d < D)[None, :]
    most = tl.full((GJ, BW), -1e30, tl.float32)
    weight = tl.zeros((GJ, BW), tl.float32)
    out_sum = tl.zeros((GJ, BW, DP), tl.float32)
    for s in tl.range(0, count, BU * BW):
        top = most
        read = ()
        # Bypass the L1 cache of this multiprocessor: others wrote the parts in this launch.
        for u in tl.static_range(BU):
            j = s + u * BW + i
            ok = (j < count)[None, :] & (g < G)[:, None]
            at = (first + j)[None, :] * G + g[:, None]
            sums = tl.load(part_lse + at, mask=ok, other=-float("inf"), cache_modifier=".cg")
            parts = tl.load(
                part + at[:, :, None] * D + d[None, None, :],
                mask=ok[:, :, None] & (d < D)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            read += (sums, parts)  # type: ignore[assignment]
            top = tl.maximum(top, sums)
        fade = tl.exp2(most - top)
        out_sum *= fade[:, :, None]
        weight *= fade
        for u in tl.static_range(BU):
            w = tl.exp2(read[2 * u] - top)
            out_sum += read[2 * u + 1] * w[:, :, None]
            weight += w
        most = top
    top = tl.max(most, 1)
    fade = tl.exp2(most - top[:, None])
    weight = tl.sum(weight * fade, 1)
    mixed = tl.sum(out_sum * fade[:, :, None], 1)
    some = weight > 0
    weight = tl.where(some, weight, 1.0)
    to = head * G + g
    mixed = (mixed / weight[:, None]).to(out.dtype.element_ty)
    tl.store(out + to[:, None] * D + d[None, :], mixed, mask=real)
    tl.store(lse + to, tl.where(some, (top + tl.log2(weight)) / _LOG2E, -float("inf")), mask=g < G)


# Slices of the layers may have any alignment, and one build must serve all layers.
@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["start", "length", "pos", "oldest", "logits", "lse"],
)
def split(
    q,
    k,
    v,
    k_scale,
    v_scale,
    start,
    length,
    pos,
    oldest,
    logits,
    width,
    scale,
    part,
    part_lse,
    arrived,
    out,
    lse,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    HP: tl.constexpr,
    GP: tl.constexpr,
    GJ: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
    BU: tl.constexpr,
    BW: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
    LOGITS: tl.constexpr,
    SCALED: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (P,), P >= H. part [P, G, D] and part_lse [P, G] in base 2, float32; arrived int32 [H],
    zeros before and after."""
    program = tl.program_id(0)
    heads = tl.arange(0, HP)
    rows = tl.load(length + heads, mask=heads < H, other=0).to(tl.int32)
    starts = tl.load(start + heads, mask=heads < H, other=0)
    units = tl.cdiv(rows, _UNIT)
    total = tl.sum(units, 0)
    # Units of a piece. A head has at most one piece that is not full, so the grid always suffices
    # for the larger number, and often for the smaller one.
    small = tl.maximum(tl.cdiv(total, P), LEAST)
    large = tl.maximum(tl.cdiv(total, P - H + 1), LEAST)
    pieces, more = tl.cdiv(units, large), tl.cdiv(units, small)
    fits = tl.sum(more, 0) <= P
    pieces = tl.where(fits, more, pieces)
    piece = tl.where(fits, small, large) * _UNIT
    ends = tl.cumsum(pieces, 0)
    head = tl.sum((ends <= program).to(tl.int32), 0)
    if head < H:
        count = _at_index(pieces, heads, head)
        before = _at_index(ends, heads, head) - count
        begin = _at_index(starts, heads, head)
        row = (program - before) * piece
        stop = tl.minimum(row + piece, _at_index(rows, heads, head))
        n = tl.arange(0, BN)
        g = tl.arange(0, GP)
        d = tl.arange(0, DP)
        real = d < D
        if WINDOW:
            edge = tl.load(oldest)
        most = tl.full((GP,), -float("inf"), tl.float32)
        weights = tl.zeros((GP, BN), tl.float32)
        out_sum = tl.zeros((GP, DP), tl.float32)
        for s in tl.range(row, stop, BN, num_stages=STAGES):
            at = begin + s  # 64 bits: an arena may have more than 2^31 numbers
            ok = s + n < stop
            tile = at * D + (n[:, None] * D + d[None, :])
            inside = ok[:, None] & real[None, :]
            # Loaded again in every tile, although they are the same: so they arrive together with
            # the first keys, which would otherwise wait for them.
            query = tl.load(
                q + (head * G + g)[:, None] * D + d[None, :],
                mask=((g < G) & (tl.full((GP,), s, tl.int32) < stop))[:, None] & real[None, :],
                other=0.0,
            )
            if UPCAST:
                query = query.to(tl.float32)
            keys = tl.load(k + tile, mask=inside, other=0)
            values = tl.load(v + tile, mask=inside, other=0)
            if SCALED or UPCAST:
                keys = keys.to(query.dtype)
                values = values.to(query.dtype)
            # For float32, three products of halves: nearly the precision of float32.
            x = tl.dot(query, tl.trans(keys), input_precision="tf32x3") * scale
            if SCALED:
                x *= tl.load(k_scale + at + n, mask=ok, other=0.0).to(tl.float32)[None, :]
            if WINDOW:
                ok = ok & (tl.load(pos + at + n, mask=ok, other=0) >= edge)
            x = tl.where(ok[None, :], x, -float("inf"))
            if LOGITS:
                where = (head * G + g).to(tl.int64)[:, None] * width + (s + n)[None, :]
                tl.store(logits + where, x, mask=(g < G)[:, None] & (s + n < stop)[None, :])
            x *= _LOG2E
            top = tl.maximum(most, tl.max(x, 1))
            if WINDOW:  # no row seen yet: avoids inf - inf
                top = tl.maximum(top, -1e30)
            fade = tl.exp2(most - top)
            p = tl.exp2(x - top[:, None])
            weights = weights * fade[:, None] + p  # summed once, at the end: warps share a row
            if SCALED:
                p *= tl.load(v_scale + at + n, mask=ok, other=0.0).to(tl.float32)[None, :]
            out_sum = tl.dot(
                p.to(values.dtype), values, out_sum * fade[:, None], input_precision="tf32x3"
            )
            most = top
        weight = tl.sum(weights, 1)
        some = weight > 0
        weight = tl.where(some, weight, 1.0)
        sums = tl.where(some, most + tl.log2(weight), -float("inf"))
        out_sum = out_sum / weight[:, None]
        to = program * G + g
        tl.store(part_lse + to, sums, mask=g < G)
        mine = (g < G)[:, None] & real[None, :]
        tl.store(part + to[:, None] * D + d[None, :], out_sum, mask=mine)
        # One thread counts for its program. The barrier puts the stores of all threads before the
        # count. The atomic (acquire and release) puts them before the reads of the program that
        # counts last.
        tl.debug_barrier()
        others = tl.atomic_add(arrived + head, 1, sem="acq_rel", scope="gpu")
        if others == count - 1:
            tl.store(arrived + head, 0)  # for the next launch
            _join(part, part_lse, out, lse, head, before, count, G, D, GJ, DP, BU, BW)
    if (program < H) & (_at_index(rows, heads, program) == 0):  # no program has a part of this head
        none = (tl.arange(0, GJ) < G)[:, None] & (tl.arange(0, DP) < D)[None, :]
        to = program * G + tl.arange(0, GJ)
        blank = tl.zeros((GJ, DP), out.dtype.element_ty)
        tl.store(out + to[:, None] * D + tl.arange(0, DP)[None, :], blank, mask=none)
        endless = tl.full((GJ,), -float("inf"), tl.float32)
        tl.store(lse + to, endless, mask=tl.arange(0, GJ) < G)


@dataclass(frozen=True, slots=True)
class Config:
    """block: rows of a tile; programs: their number, at least one per head; each has `warps` warps,
    loads `stages` tiles ahead, and has at least `least` rows if its head has as many; joined: how
    many numbers of parts a thread reads at once."""

    block: int
    warps: int
    stages: int
    programs: int
    least: int = 64
    joined: int = 64

    def grid(self, heads: int) -> int:
        """The number of programs of a launch for `heads` heads."""
        return max(self.programs, heads)


_TILE = 32768  # bytes of k and v in a tile; twice as many where one program has a multiprocessor
_DEEP = {(8, 0), (9, 0), (10, 0), (10, 3)}
"""Compute capabilities with at least 163 KiB of shared memory, enough for a tile of twice the size
and two more that are loaded ahead. Others have 99 KiB."""


def configure(
    size: int, dtype: torch.dtype, device: torch.device, capability: tuple[int, int] | None = None
) -> Config:
    """The configuration for head size D, the dtype of the rows and a compute capability."""
    processors = 5  # in the interpreter
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        processors, capability = facts.multi_processor_count, (facts.major, facts.minor)
    deep = capability in _DEEP and size <= 128
    row = 2 * columns(size) * dtype.itemsize
    if deep and dtype.itemsize == 2:
        # Among the best of 25 on an H100: fewer programs make fewer parts, which uneven heads need.
        # The other GPUs with as much shared memory were not measured.
        return Config(max(16, min(128, 2 * _TILE // row)), 8, 3, processors, joined=32)
    most = 64 if dtype == torch.int8 else 128  # int8 needs registers for the converted numbers
    warps = 8 if size > 128 and dtype.itemsize != 2 else 4
    joined = 64 if size <= 128 else 32
    stages = 3 if deep else 2
    return Config(max(16, min(most, _TILE // row)), warps, stages, 2 * processors, joined=joined)


def workspace(
    heads: int, group: int, size: int, config: Config, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Memory for the parts that programs exchange, for H heads of G queries of size D: [P, G, D]
    and their log-sum-exps [P, G]."""
    part, lse = (config.grid(heads), group, size), (config.grid(heads), group)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    return torch.empty(part, **float32), torch.empty(lse, **float32)


def _tiles(heads: int, group: int, size: int, config: Config) -> dict[str, int]:
    """Constants of `split`."""
    numbers = power(group) * columns(size)  # of a part, padded
    threads = 32 * config.warps
    lots = max(1, min(16, 4 * threads // numbers))  # 4 numbers are 16 bytes
    deep = max(1, min(16, config.joined * threads // (lots * numbers)))
    padded = {"HP": power(heads), "GP": max(16, power(group)), "GJ": power(group)}
    blocks = {"BN": config.block, "BU": deep, "BW": lots, "LEAST": -(-config.least // _UNIT.value)}
    sizes = {"H": heads, "G": group, "D": size, "P": config.grid(heads), "DP": columns(size)}
    return {**sizes, **padded, **blocks, "STAGES": config.stages}


def ragged_attention(
    q: Tensor,
    rows: Segments,
    logits: Tensor | None = None,
    lse: Tensor | None = None,
    arrived: Tensor | None = None,
    config: Config | None = None,
    space: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """See `plain.ragged_attention`. All tensors are contiguous; the width is not needed.

    `space`: memory between programs, from `workspace` for this `config`; allocated if None.
    """
    k, v, start, length, _, pos, oldest, k_scale, v_scale = rows
    assert all(t.is_contiguous() for t in (q, k, v, start, length))
    heads, group, size = q.shape
    config = config or configure(size, k.dtype, q.device)
    space = space or workspace(heads, group, size, config, q.device)
    out = torch.empty_like(q)
    if lse is None:
        lse = torch.empty((heads, group), dtype=torch.float32, device=q.device)
    if arrived is None:
        arrived = torch.zeros(heads, dtype=torch.int32, device=q.device)
    seen = None if oldest is None else pos
    many = 0 if logits is None else logits.shape[-1]
    split[(config.grid(heads),)](
        *(q, k, v, k_scale, v_scale, start, length, seen, oldest, logits, many),
        *(1.0 / math.sqrt(size), *space, arrived, out, lse),
        **_tiles(heads, group, size, config),
        WINDOW=oldest is not None,
        LOGITS=logits is not None,
        SCALED=k_scale is not None,
        UPCAST=upcast(q.dtype),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out, lse
