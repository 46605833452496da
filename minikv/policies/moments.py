"""Statistics of a prompt's queries, computed without storing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from minikv.policies.selection import blocks


class Rotary(Protocol):
    """A layer's angle per position, in radians: inverse [D / 2]. Layers with the same rotation
    share one object."""

    inverse: Tensor


class Rotation(Protocol):
    """How a network changes queries and keys according to their positions."""

    @property
    def layers(self) -> Sequence[Rotary]:
        """By layer."""
        ...

    def query_scale(self, start: Tensor, count: int) -> float | Tensor | None:
        """The factor on `count` queries at positions `start` [count], in addition to the rotation:
        one number, or [count, 1]; None: 1."""
        ...


def unrotated(q: Tensor, angle: Tensor, scale: float | Tensor | None) -> Tensor:
    """Queries [..., T, D] before they were rotated by angle [..., T, D / 2], in radians, and
    multiplied by `scale` (see `Rotation.query_scale`)."""
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    if scale is not None:
        cos, sin = cos / scale, sin / scale
    one, two = q.chunk(2, -1)
    return torch.cat((one * cos + two * sin, two * cos - one * sin), -1)


def before_rotation(q: Tensor, rotation: Rotation, layer: int, at: Tensor) -> Tensor:
    """Queries [..., T, D] of a layer at the positions int64 [T], before they were rotated and
    scaled."""
    angle = at[:, None].to(torch.float64) * rotation.layers[layer].inverse.to(torch.float64)
    return unrotated(q, angle, rotation.query_scale(at, len(at)))


class Moments:
    """Running mean and covariance of a layer's queries before rotation."""

    def __init__(
        self, heads: int, group: int, size: int, device: torch.device, most: int = 1 << 16
    ) -> None:
        """most: about how many numbers are computed at once."""
        self.count, self._most = 0, most
        self._sum = torch.zeros((heads, group, size), dtype=torch.float64, device=device)
        self._outer = torch.zeros((heads, group, size, size), dtype=torch.float64, device=device)

    def add(self, q: Tensor, rotation: Rotation, layer: int, at: Tensor) -> None:
        """Add queries [H, G, T, D] of a layer, at the positions int64 [T]."""
        self.count += q.shape[2]
        for some in blocks(len(q), q[0].numel(), self._most):
            back = before_rotation(q[some].to(torch.float64), rotation, layer, at)
            self._sum[some] += back.sum(2)
            self._outer[some] += back.transpose(2, 3) @ back

    def normal(self, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [H, G, D] and covariance [H, G, D, D] (population), float32, after the map `turn`
        float32 [D, D]."""
        mean = self._sum / max(1, self.count)
        covariance = self._outer / max(1, self.count) - mean[..., None] * mean[..., None, :]
        mean, covariance = mean.to(torch.float32), covariance.to(torch.float32)
        return mean @ turn.T, turn @ covariance @ turn.T
