"""Gives every layer the same budget. Replaces the one budget for all layers of a method, as in
`kvzip+uniform` (the uniform threshold of KVzip's release, `layerwise` in kvpress)."""

from __future__ import annotations

from dataclasses import dataclass

from minikv.policies.base import LayerAllocator
from minikv.policies.facts import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(LayerAllocator):
    """The default allocator, with a name for use in compositions."""


LAYERS = Part("uniform", Uniform, "every layer keeps the same")
