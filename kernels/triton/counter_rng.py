"""Counter-based random numbers, in Triton. Specification: `minikv/policies/counter_rng.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

_MIX = tuple(
    tl.constexpr(number - (1 << 64))
    for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_STEP, _FIRST, _SECOND = _MIX


@triton.jit
def _shifted(x, bits: tl.constexpr):
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _mixed(x):
    """One round of splitmix64."""
    x = x.to(tl.int64) + _STEP
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


@triton.jit
def chained(seed, layer, head, position):
    """The state after the keys that all rows of a head share."""
    state = _mixed(seed.to(tl.int64) ^ _mixed(layer))
    state = _mixed(state ^ _mixed(head))
    return _mixed(state ^ _mixed(position))


@triton.jit
def drawn(state, at):
    """The numbers of rows at positions `at`, float32 in (0, 1)."""
    bits = _shifted(_mixed(state ^ _mixed(at)), 41)
    return (bits.to(tl.float32) + 0.5) * (1.0 / (1 << 23))
