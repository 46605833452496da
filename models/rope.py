"""Rotary position embedding: frequencies, scalings, and tables.

The layout is half-split, as in Hugging Face: dimension i is paired with i + D/2. Angles, cosines
and sines are computed in float32 and converted afterwards, because bfloat16 cannot represent all
positions above 256.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One model's rotary settings. Fields that a `kind` does not use keep their defaults.

    kind: "default", "linear" (arXiv 2306.15595), "dynamic" (only within its original length, where
    it equals "default"), "llama3" (Llama 3.1), "yarn" (arXiv 2309.00071), or "none": nothing is
    rotated. original: the positions of the pretraining, for llama3, yarn and query_beta.
    attention_factor: multiplies cosine and sine (yarn); None: computed from `factor`. query_beta: a
    query at position p is multiplied by 1 + query_beta ln(1 + floor(p / original)). factors: the
    divisor of each frequency, whatever the kind; (): none.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    query_beta: float = 0.0
    factors: tuple[float, ...] = ()


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """The angle per position of each pair, in radians, float32 [D/2] on the CPU; and the factor on
    cosine and sine."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (rope.theta**exponent)
    if rope.kind == "none":  # an angle of 0: cosine 1, sine 0, so a rotation changes no bit
        return inverse.zero_(), 1.0
    if rope.factors:
        inverse = inverse / torch.tensor(rope.factors)
    if rope.kind in ("default", "dynamic"):
        return inverse, 1.0
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    assert rope.kind == "yarn", rope.kind
    return _yarn(rope, inverse, head_dim), _yarn_attention(rope)


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones are kept, and those between
    are blended linearly."""
    turns = rope.original * inverse / (2 * math.pi)  # full turns within the original context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * inverse / rope.factor + keep * inverse


def _yarn(rope: RopeConfig, inverse: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071), NTK-by-parts: a ramp over the dimensions between beta_fast and
    beta_slow full turns."""

    def dimension(turns: float) -> float:
        ratio = math.log(rope.original / (turns * 2 * math.pi))
        return head_dim * ratio / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero: the ramp becomes a step
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)


def _yarn_attention(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


class Rotary:
    """Makes the tables for rotating queries and keys. inverse float32 [D/2]: the angle per
    position, in radians. scale: the factor on cosine and sine. Stores no table of all positions."""

    __slots__ = ("_sign", "_twice", "inverse", "scale")

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> None:
        inverse, self.scale = frequencies(rope, head_dim)
        self.inverse = inverse.to(device)
        self._twice = torch.cat((self.inverse, self.inverse))[None, None]
        self._sign = torch.ones_like(self._twice)
        self._sign[..., : head_dim // 2] = -1.0

    def table(self, start: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of the positions `start` to `start` + `count` - 1, [count, 1, D]
        each."""
        positions: float | Tensor = float(start)  # few operations for one, as in a decode step
        if count > 1:
            device = self.inverse.device
            positions = torch.arange(start, start + count, dtype=torch.float32, device=device)
            positions = positions[:, None, None]
        angle = self._twice * positions
        # The first half of a rotated vector subtracts the second half: the sign is in the table.
        cos, sin = angle.cos(), angle.sin().mul_(self._sign)
        if self.scale != 1.0:
            cos, sin = cos.mul_(self.scale), sin.mul_(self.scale)
        return cos.to(dtype), sin.to(dtype)


class Rotation:
    """How a network changes queries and keys according to their positions: `layers` has the
    `Rotary` of each layer, and layers with equal settings share one. Queries are multiplied by
    `scale`, and by the factor that `RopeConfig.query_beta` of the first layer defines."""

    def __init__(
        self,
        ropes: Sequence[RopeConfig],
        head_dim: int,
        device: torch.device | str = "cpu",
        scale: float = 1.0,
    ) -> None:
        made = {rope: Rotary(rope, head_dim, device) for rope in dict.fromkeys(ropes)}
        self.kinds = tuple(made.values())
        self.layers = tuple(made[rope] for rope in ropes)
        self.kind = tuple(self.kinds.index(one) for one in self.layers)  # by layer
        self._scale = None if scale == 1.0 else scale
        self._beta, self._original = ropes[0].query_beta, ropes[0].original

    def query_scale(self, start: int | Tensor, count: int) -> float | Tensor | None:
        """The factor on queries at positions `start` to `start` + `count` - 1: the same for all, or
        float32 [count, 1]; None: 1. start: a number, or all positions, int64 [count]; for a count
        of 1 also [], on the device."""
        if not self._beta:
            return self._scale
        if not isinstance(start, Tensor):
            if start + count <= self._original:
                return self._scale
            device = self.kinds[0].inverse.device
            start = torch.arange(start, start + count, device=device)
        grown = start.reshape(-1, 1).div(self._original, rounding_mode="floor")
        return grown.to(torch.float32).log1p().mul_(self._beta).add_(1.0).mul_(self._scale or 1.0)
