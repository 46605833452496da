"""What prompt policies judge: a view of a prompt whose attention was made up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minikv import policies
from minikv.policies.base import Evidence, PromptPolicy, PromptView, Scorer


def build(name: str, options: Mapping[str, object] | None = None) -> PromptPolicy:
    made = policies.prompt_policy(name, options)
    assert made is not None
    return made


def view(mass: Tensor, observed: int = 1, layer: int = 0) -> PromptView:
    """A first prompt of N tokens, of whose queries `observed` gave mass [H, G, N]."""
    heads, _, rows = mass.shape
    pos = torch.arange(rows).expand(heads, rows)
    generator = torch.Generator().manual_seed(3)
    key = torch.randn(heads, rows, 8, generator=generator)
    return PromptView(layer, rows, pos, observed, mass, mass.mean(1) ** 2, lambda: key, lambda: key)


def choose(policy: PromptPolicy, seen: PromptView, total: int) -> Tensor:
    """bool [H, N] of the rows that stay, as a prompt asks for them."""
    return policy.keep(seen, total)


class Spy(Scorer):
    """Another scorer, whose scores are written down."""

    def __init__(self, of: Scorer, seen: list[Tensor]) -> None:
        self.of, self.seen = of, seen

    @property
    def evidence(self) -> Evidence:
        return self.of.evidence

    def protected(self, view: PromptView) -> Tensor:
        return self.of.protected(view)

    def score(self, view: PromptView) -> Tensor:
        self.seen.append(self.of.score(view))
        return self.seen[-1]


def random_mass(heads: int = 3, group: int = 2, rows: int = 120, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(heads, group, rows, generator=generator) ** 6
