"""Products of few rows with weights in eight or four bits, in Triton, one launch each.

A step reads every weight once, so its time is that of reading the packed bytes. They are unpacked
in registers, to the numbers that models/linear_gpu.py defines, and multiplied by matrix
instructions. Sixteen rows of x take as long as one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.gpu import WIDE, Variant, typed, upcast

_ROWS = 16  # rows of x that a program multiplies: a matrix instruction takes no fewer
_OUT = 32  # rows of the weights that a program multiplies
_IN = 128  # columns of int8 weights that it reads at once
_UNPACKED = 8  # rows of the weights that a program unpacks


@triton.jit
def _rows_of(x, t, columns, ok_t, ok, N: tl.constexpr, UP: tl.constexpr):
    """x [T, N] at rows t and columns."""
    found = tl.load(
        x + t.to(tl.int64)[:, None] * N + columns[None, :],
        mask=ok_t[:, None] & ok[None, :],
        other=0.0,
    )
    return found.to(tl.float32) if UP else found


@triton.jit(do_not_specialize=["rows", "outputs"])
def _w8a16_product(
    x,
    codes,
    scales,
    out,
    rows,
    outputs,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    UP: tl.constexpr,
):
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ok_n, ok_t = n < outputs, t < rows
    row = codes + n.to(tl.int64)[:, None] * N
    total = tl.zeros([ROWS, OUT], tl.float32)
    for start in range(0, N, IN):
        j = start + tl.arange(0, IN)
        ok = j < N
        w = tl.load(row + j[None, :], mask=ok_n[:, None] & ok[None, :], other=0)
        here = _rows_of(x, t, j, ok_t, ok, N, UP)
        total = tl.dot(here, tl.trans(w.to(here.dtype)), total)
    by = tl.load(scales + n, mask=ok_n, other=0.0).to(tl.float32)
    target = out + t.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(
        target, (total * by[None, :]).to(out.dtype.element_ty), mask=ok_t[:, None] & ok_n[None, :]
    )


@triton.jit
def _unpacked(steps, by, middle, like: tl.constexpr):
    """middle + (steps - 8) * by for steps 0 to 15, rounded once to bfloat16."""
    made = (steps.to(tl.float32) - 8.0) * by[:, None] + middle[:, None]
    return made.to(tl.bfloat16).to(like)


@triton.jit(do_not_specialize=["rows", "outputs"])
def _w4a16_product(
    x,
    packed,
    scales,
    out,
    rows,
    outputs,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    UP: tl.constexpr,
):
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ok_n, ok_t = n < outputs, t < rows
    i = tl.arange(0, GROUP // 2)
    every = i >= 0
    row = packed + n.to(tl.int64)[:, None] * (N // 2) + i[None, :]
    pair = scales + n.to(tl.int64) * 2
    total = tl.zeros([ROWS, OUT], tl.float32)
    for g in range(0, N // GROUP):
        both = tl.load(row + g * (GROUP // 2), mask=ok_n[:, None], other=0)
        by = tl.load(pair, mask=ok_n, other=0.0).to(tl.float32)
        middle = tl.load(pair + 1, mask=ok_n, other=0.0).to(tl.float32)
        pair += outputs.to(tl.int64) * 2
        low = _rows_of(x, t, g * GROUP + i, ok_t, every, N, UP)
        total = tl.dot(low, tl.trans(_unpacked(both & 15, by, middle, low.dtype)), total)
        high = _rows_of(x, t, g * GROUP + GROUP // 2 + i, ok_t, every, N, UP)
        total = tl.dot(high, tl.trans(_unpacked(both >> 4, by, middle, high.dtype)), total)
    target = out + t.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=ok_t[:, None] & ok_n[None, :])


@triton.jit(do_not_specialize=["outputs"])
def _unpack_int4(
    packed,
    scales,
    out,
    outputs,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    OUT: tl.constexpr,
):
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    g = tl.program_id(1)
    ok = n < outputs
    i = tl.arange(0, GROUP // 2)
    row = packed + n.to(tl.int64)[:, None] * (N // 2) + g * (GROUP // 2) + i[None, :]
    both = tl.load(row, mask=ok[:, None], other=0)
    pair = scales + (g.to(tl.int64) * outputs + n) * 2
    by = tl.load(pair, mask=ok, other=0.0).to(tl.float32)
    middle = tl.load(pair + 1, mask=ok, other=0.0).to(tl.float32)
    target = out + n.to(tl.int64)[:, None] * N + g * GROUP + i[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(target, _unpacked(both & 15, by, middle, kind), mask=ok[:, None])
    tl.store(target + GROUP // 2, _unpacked(both >> 4, by, middle, kind), mask=ok[:, None])


def w8a16_product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x [t, n] times the transpose of scale [m] * codes int8 [m, n]: [t, m] in x's dtype."""
    x, (outputs, size) = x.contiguous(), codes.shape
    out = x.new_empty((len(x), outputs))
    _w8a16_product[(-(-outputs // _OUT), -(-len(x) // _ROWS))](
        x,
        codes,
        scale,
        out,
        len(x),
        outputs,
        N=size,
        ROWS=_ROWS,
        OUT=_OUT,
        IN=_IN,
        UP=upcast(x.dtype),
        num_warps=4,
        num_stages=4,
    )
    return out


def w4a16_product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x [t, n] times the transpose of what `unpack_int4_rows` makes: [t, m] in x's dtype."""
    x, (outputs, half) = x.contiguous(), packed.shape
    out = x.new_empty((len(x), outputs))
    _w4a16_product[(-(-outputs // _OUT), -(-len(x) // _ROWS))](
        x,
        packed,
        scales,
        out,
        len(x),
        outputs,
        N=2 * half,
        GROUP=2 * half // len(scales),
        ROWS=_ROWS,
        OUT=_OUT,
        UP=upcast(x.dtype),
        num_warps=4,
        num_stages=4,
    )
    return out


def unpack_int4_rows(packed: Tensor, scales: Tensor, out: Tensor) -> None:
    """packed uint8 [m, n / 2], scales bfloat16 [n / group, m, 2] -> out [m, n].

    The layout is that of models/linear_gpu.py.
    """
    outputs, half = packed.shape
    assert out.is_contiguous()
    _unpack_int4[(-(-outputs // _UNPACKED), len(scales))](
        packed,
        scales,
        out,
        outputs,
        N=2 * half,
        GROUP=2 * half // len(scales),
        OUT=_UNPACKED,
        num_warps=4,
    )


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    kinds = {
        "x": "*bf16",
        "out": "*bf16",
        "codes": "*i8",
        "packed": "*u8",
        "scales": "*bf16",
    }
    few: dict[str, object] = {"ROWS": _ROWS, "OUT": _OUT, "UP": False}
    found = []
    for name, fn, fixed, read, mma in (
        ("w8a16-product", _w8a16_product, {"N": 4096, "IN": _IN} | few, "codes", True),
        ("w4a16-product", _w4a16_product, {"N": 4096, "GROUP": 128} | few, "packed", True),
        ("w4a16-product-32", _w4a16_product, {"N": 960, "GROUP": 32} | few, "packed", True),
        ("unpack-int4", _unpack_int4, {"N": 4096, "GROUP": 128, "OUT": _UNPACKED}, "packed", False),
    ):
        stages = 4 if mma else 2
        # A row of a group of 32 has 16 bytes; the threads of a product take 4 of them each.
        reads = {read: 4 if name.endswith("32") else WIDE} if mma else {}
        found.append(Variant(name, fn, typed(fn, kinds, fixed), fixed, 4, stages, mma, reads))
    return found
