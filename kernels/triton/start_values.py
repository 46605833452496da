"""The columns of step policies after a prompt, in Triton, in one launch. Specification: the
`prompt` of each policy, in minikv/policies."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import head_stride, lines, typed
from minikv.kernels.triton.variants import Variant

_BLOCK = 256
_INTEGERS = [
    "mass_head",
    "mass_group",
    "squares_head",
    "pos_head",
    "totals_head",
    "old_head",
    "counts_head",
    "rows",
    "early",
    "group",
    "position",
    "observed",
    "before",
    "kernel",
]


@triton.jit
def _sums(mass, squares, row, ok, mass_group, group):
    """The mean of the heads' attention mass, and the sum of squares, of some rows of a head."""
    total = tl.zeros(row.shape, tl.float32)
    for g in tl.range(0, group):
        total += tl.load(mass + g * mass_group + row, mask=ok, other=0.0)
    total = tl.div_rn(total, tl.full(row.shape, 1.0, tl.float32) * group)
    return total, tl.load(squares + row, mask=ok, other=0.0)


@triton.jit
def _queries(at, position, observed, CAUSAL: tl.constexpr):
    """float32: how many of the last queries could see the rows at these positions."""
    if CAUSAL:
        able = tl.minimum(position - tl.maximum(at, position - observed), observed)
        found = tl.maximum(able, 0)
    else:
        found = tl.where(at >= 0, observed, 0)
    return found.to(tl.float32)


@triton.jit(
    do_not_specialize=_INTEGERS,
    do_not_specialize_on_alignment=["mass", "squares", "pos", "totals", "old", "counts"],
)
def _roco_start(
    mass,
    squares,
    pos,
    order,
    totals,
    old,
    counts,
    new_totals,
    new_squares,
    new_counts,
    mass_head,
    mass_group,
    squares_head,
    pos_head,
    totals_head,
    old_head,
    counts_head,
    rows,
    early,
    group,
    position,
    observed,
    before,
    kernel,
    lead,
    lead_square,
    CAUSAL: tl.constexpr,
    POOL: tl.constexpr,
    BN: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = place < rows
    mass += h * mass_head
    squares += h * squares_head
    pos += h * pos_head
    order += h * early
    row = tl.load(order + place, mask=inside & (place < early), other=0)
    row = tl.where(place < early, row, place)
    at = tl.load(pos + row, mask=inside, other=-1)
    count = _queries(at, position, observed, CAUSAL)
    total, square = _sums(mass, squares, row, inside, mass_group, group)
    if POOL:
        best = tl.full((BN,), -float("inf"), tl.float32)
        best_square = best
        for i in tl.range(0, kernel):
            p = place - kernel // 2 + i
            there = (p >= 0) & (p < rows)
            other = tl.load(order + p, mask=there & (p < early), other=0)
            other = tl.where(p < early, other, p)
            where = tl.load(pos + other, mask=there, other=-1)
            free = there & (where >= 0) & (where < before)
            seen = tl.maximum(_queries(where, position, observed, CAUSAL), 1.0)
            one, two = _sums(mass, squares, other, free, mass_group, group)
            best = tl.where(free, tl.maximum(best, tl.div_rn(one, seen)), best)
            best_square = tl.where(free, tl.maximum(best_square, tl.div_rn(two, seen)), best_square)
        pooled = (at >= 0) & (at < before)
        total = tl.where(pooled, best * count, total)
        square = tl.where(pooled, best_square * count, square)
    had = tl.load(totals + h * totals_head + row, mask=inside, other=0.0)
    here = h * rows + row
    tl.store(new_totals + here, had + lead * total, mask=inside)
    had = tl.load(old + h * old_head + row, mask=inside, other=0.0)
    tl.store(new_squares + here, had + lead_square * square, mask=inside)
    had = tl.load(counts + h * counts_head + row, mask=inside, other=0.0)
    tl.store(new_counts + here, had + count, mask=inside)


def roco_start(
    mass: Tensor,
    squares: Tensor,
    pos: Tensor,
    order: Tensor,
    old: Sequence[Tensor],
    position: int,
    observed: int,
    before: int,
    kernel: int,
    lead: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """RoCo's sums, squares and counts float32 [H, N] after a prompt (minikv/policies/roco.py).

    old: the same before it. before: rows at lower positions are pooled, over `kernel` (odd) rows in
    the order of positions. lead: how many times attention counts. Other arguments: as in
    `PromptView`, whose `order` is int64 [H, B].
    """
    mass, squares, pos, order = lines(mass), lines(squares), lines(pos), order.contiguous()
    had = [lines(t) for t in old]
    heads, group, rows = mass.shape
    made = [torch.empty((heads, rows), dtype=torch.float32, device=mass.device) for _ in range(3)]
    _roco_start[(max(1, -(-rows // _BLOCK)), heads)](
        mass,
        squares,
        pos,
        order,
        *had,
        *made,
        head_stride(mass),
        mass.stride(1),
        *map(head_stride, (squares, pos, *had)),
        rows,
        order.shape[1],
        group,
        position,
        observed,
        before,
        kernel,
        float(lead),
        float(lead**2),
        CAUSAL=causal,
        POOL=kernel > 1,
        BN=_BLOCK,
        enable_fp_fusion=False,  # a product is rounded before it is added, as torch does
    )
    return made[0], made[1], made[2]


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    floats = ("mass", "squares", "totals", "old", "counts")
    made = ("new_totals", "new_squares", "new_counts")
    kinds = dict.fromkeys((*floats, *made), "*fp32") | dict.fromkeys(("pos", "order"), "*i64")
    kinds |= dict.fromkeys(("lead", "lead_square"), "fp32")
    found = []
    for pool in (True, False):
        constants: dict[str, object] = {"CAUSAL": pool, "POOL": pool, "BN": _BLOCK}
        signature = typed(_roco_start, kinds, constants)
        found.append(Variant(f"roco-start-pool{int(pool)}", _roco_start, signature, constants))
    return found
