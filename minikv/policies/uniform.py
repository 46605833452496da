"""Every layer keeps the same: in place of the one budget for all layers that a method brings, as
`kvzip+uniform` (the release's uniform threshold, kvpress' `layerwise`)."""

from __future__ import annotations

from dataclasses import dataclass

from minikv.policies.base import LayerAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(LayerAllocator):
    """The plain answer, by a name."""
