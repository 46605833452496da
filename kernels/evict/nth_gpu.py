"""The n-th lowest score of a head, in Triton, for a program that has the head.

Scores become ordered integers, four bytes a row, in memory. The integer is found two bits at a
time, by counting how many rows are lower. So the rows are read 16 times; nothing is sorted.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

NO_ORDER = tl.constexpr((1 << 31) - 1)  # of a row that may not leave; no score has it
_BITS = tl.constexpr(21)  # of a number of rows, so that an int64 holds three
MOST_ROWS = tl.constexpr(1 << 21)


@triton.jit
def ordered(score):
    """int32, larger for a larger score; a NaN comes after all numbers, and may leave, too."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 is 0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats have the reverse order
    return tl.where(score == score, bits, NO_ORDER - 1)


@triton.jit
def nth(orders, rows, rank, BN: tl.constexpr):
    """int32: the order of `rank`, counted from 0, among `rows` orders int32; `NO_ORDER` if there
    are not so many below it. And how many orders are lower. There are fewer than MOST_ROWS."""
    found = tl.full((), -(1 << 31), tl.int32)
    below = tl.full((), 0, tl.int64)
    for i in tl.range(0, 16):
        step = tl.full((), 1, tl.int32) << (30 - 2 * i)
        one = tl.zeros((BN,), tl.int32)
        two = tl.zeros((BN,), tl.int32)
        three = tl.zeros((BN,), tl.int32)
        for s in tl.range(0, rows, BN):
            j = s + tl.arange(0, BN)
            order = tl.load(orders + j, mask=j < rows, other=NO_ORDER)
            one += (order < found + step).to(tl.int32)
            two += (order < found + 2 * step).to(tl.int32)
            three += (order < found + 3 * step).to(tl.int32)
        # The three counts in one number, as each sum makes all threads wait for each other.
        each = one.to(tl.int64) | (two.to(tl.int64) << _BITS)
        each |= three.to(tl.int64) << (2 * _BITS)
        counts = tl.sum(each, 0)
        digit = tl.full((), 0, tl.int32)
        for d in tl.static_range(3):
            count = (counts >> (_BITS * d)) & (MOST_ROWS - 1)
            below = tl.where(count <= rank, count, below)
            digit += (count <= rank).to(tl.int32)
        found += digit * step
    return found, below
