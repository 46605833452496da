"""Sizes of well-known networks, for weights that are random: names and numbers, no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from minikv.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a network of a Llama's make is built from. `heads` are query heads, H * G."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    theta: float = 1e4
    tied: bool = False

    @property
    def matrices(self) -> int:
        """Numbers in the matrices that every token of a prompt is multiplied with."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.layers * self.hidden * (2 * q + 2 * kv + 3 * self.mlp)

    @property
    def head(self) -> int:
        """Numbers in the matrix that makes logits."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        norms = (2 * self.layers + 1) * self.hidden
        return self.matrices + norms + self.head * (1 if self.tied else 2)

    def attention_flops(self, tokens: int) -> int:
        """Causal attention over a prompt: two products of every query with every row it sees."""
        pairs = tokens * (tokens + 1) // 2
        return 4 * self.layers * self.heads * self.head_dim * pairs

    def linear_flops(self, tokens: int) -> int:
        """The matrices over a prompt; logits of its last token only."""
        return 2 * (self.matrices * tokens + self.head)


SHAPES: Mapping[str, Sizes] = {
    "llama-3-8b": Sizes(32, 4096, 32, 8, 128, 14336, 128256, 5e5),
    "llama-2-7b": Sizes(32, 4096, 32, 32, 128, 11008, 32000),
    "mistral-7b": Sizes(32, 4096, 32, 8, 128, 14336, 32768, 1e6),  # v0.3: no sliding window
    "llama-3.2-1b": Sizes(16, 2048, 32, 8, 64, 8192, 128256, 5e5, tied=True),
    "tinyllama": Sizes(22, 2048, 32, 4, 64, 5632, 32000),  # M of docs/measurements
    "smollm2-135m": Sizes(30, 576, 9, 3, 64, 1536, 49152, 1e5, tied=True),
    "s": Sizes(16, 768, 12, 4, 64, 2048, 32000, 5e5),  # S of docs/measurements
    "tiny": Sizes(2, 64, 4, 2, 16, 128, 256),
}


def find(name: str) -> Sizes:
    """The sizes under a name, any case. Raises UsageError."""
    found = SHAPES.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), SHAPES, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"unknown shape {name!r}", f"{guess}shapes: {', '.join(SHAPES)}")
    return found
