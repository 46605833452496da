"""The arithmetic of KVCrush, in Triton. Counts of bits are whole numbers, so the order in which
they are added does not matter. Specification: `torch/crush.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import lines, power, typed
from minikv.kernels.triton.variants import Variant

_ROWS = 1024


@triton.jit(
    do_not_specialize=["pos_head", "free_head", "mark_head", "mark_bit", "bits", "rows"],
    do_not_specialize_on_alignment=["marks", "goal", "pos", "free"],
)
def _tally(
    marks,
    goal,
    pos,
    free,
    steps,
    mark_head,
    mark_bit,
    pos_head,
    free_head,
    bits,
    rows,
    BN: tl.constexpr,
):
    """Add what the set bits of each row change of the distance at its position."""
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < rows
    at = tl.load(pos + h * pos_head + j, mask=inside, other=-1)
    ok = tl.load(free + h * free_head + j, mask=inside, other=0) != 0
    change = tl.zeros((BN,), tl.int32)
    for b in tl.range(0, bits):
        mark = tl.load(marks + h * mark_head + b * mark_bit + j, mask=inside, other=0) != 0
        sign = 1 - 2 * tl.load(goal + h * bits + b).to(tl.int32)
        change += tl.where(mark, sign, 0)
    tl.atomic_add(steps + at, change, mask=ok & (change != 0))


@triton.jit(
    do_not_specialize=["pos_head", "free_head", "chosen_head", "bits", "rows"],
    do_not_specialize_on_alignment=["goal", "pos", "free", "chosen"],
)
def _keys(
    goal,
    pos,
    free,
    chosen,
    steps,
    key,
    left,
    pos_head,
    free_head,
    chosen_head,
    bits,
    rows,
    LAST,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    h = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BP)
    far = tl.sum(tl.load(goal + b, mask=b < bits, other=0).to(tl.int64), 0)
    count = tl.zeros((BN,), tl.int64)
    for s in tl.range(0, rows, BN):
        j = s + tl.arange(0, BN)
        inside = j < rows
        at = tl.load(pos + h * pos_head + j, mask=inside, other=-1)
        ok = tl.load(free + h * free_head + j, mask=inside, other=0) != 0
        ok = ok & (tl.load(chosen + h * chosen_head + j, mask=inside, other=0) == 0)
        distance = far + tl.load(steps + at, mask=ok, other=0).to(tl.int64)
        tl.store(key + h * rows + j, tl.where(ok, (distance << 40) | at, LAST), mask=inside)
        count += ok.to(tl.int64)
    tl.store(left + h, tl.sum(count, 0))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["left", "count"])
def _represent(chosen, order, left, count, rows, ENDS: tl.constexpr, BN: tl.constexpr):
    h = tl.program_id(1).to(tl.int64)
    j = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    have = tl.load(left + h)
    want = tl.load(count + h)
    if ENDS:  # the nearest whole number; of two, the even one, as `round` does
        parts = tl.maximum(want - 1, 1)
        far = j * (have - 1)
        rank = far // parts
        twice = 2 * (far - rank * parts)
        rank += ((twice > parts) | ((twice == parts) & (rank % 2 == 1))).to(tl.int64)
    else:
        rank = j * (have // tl.maximum(want, 1))
    rank = tl.where(have <= want, j, rank)
    valid = j < tl.minimum(have, want)
    row = tl.load(order + h * rows + rank, mask=valid, other=0)
    tl.store(chosen + h * rows + row, j >= 0, mask=valid)


def crush_keys(
    marks: Tensor, goal: Tensor, pos: Tensor, free: Tensor, chosen: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """See `torch.crush.crush_keys`."""
    marks, pos, free, chosen = (lines(t) for t in (marks, pos, free, chosen))
    goal = goal.contiguous()
    heads, bits, rows = marks.shape
    steps = torch.zeros(position, dtype=torch.int32, device=pos.device)
    key = torch.empty((heads, rows), dtype=torch.int64, device=pos.device)
    left = torch.empty(heads, dtype=torch.int64, device=pos.device)
    strides = marks.stride(0), marks.stride(1), pos.stride(0), free.stride(0)
    _tally[(max(1, -(-rows // _ROWS)), heads)](
        marks, goal, pos, free, steps, *strides, bits, rows, BN=_ROWS
    )
    _keys[(heads,)](
        goal,
        pos,
        free,
        chosen,
        steps,
        key,
        left,
        *(t.stride(0) for t in (pos, free, chosen)),
        goal.numel(),
        rows,
        torch.iinfo(torch.int64).max,
        BP=power(goal.numel()),
        BN=_ROWS,
    )
    return key, left


def represent(
    chosen: Tensor, order: Tensor, left: Tensor, count: Tensor, how: str, most: int
) -> None:
    """See `torch.crush.represent`."""
    order = order.contiguous()
    assert chosen.is_contiguous()
    heads, rows = order.shape
    if most:
        _represent[(-(-most // _ROWS), heads)](
            chosen, order, left, count, rows, ENDS=how == "ends", BN=_ROWS
        )


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    kinds = dict.fromkeys(("marks", "goal", "free", "chosen"), "*i1") | {"steps": "*i32"}
    kinds |= dict.fromkeys(("pos", "key", "left", "order", "count"), "*i64") | {"LAST": "i64"}
    rows: dict[str, object] = {"BN": _ROWS}
    found = []
    for fn, constants in (
        (_tally, rows),
        (_keys, rows | {"BP": 32}),
        (_represent, rows | {"ENDS": True}),
    ):
        name = "crush-" + fn.__name__.strip("_")
        found.append(Variant(name, fn, typed(fn, kinds, constants), constants))
    return found
