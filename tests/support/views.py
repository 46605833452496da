"""Policies by name, and what they judge: views of prompts and steps that were made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minikv import policies
from minikv.cache.kv_cache import KVCache
from minikv.policies.base import PromptView, StepPolicy, StepView
from minikv.policies.parts import PromptPolicy


def build(name: str, options: Mapping[str, object] | None = None) -> PromptPolicy:
    made = policies.prompt_policy(name, options)
    assert made is not None
    return made


def rule(name: str, options: Mapping[str, object] | None = None) -> StepPolicy:
    made = policies.step_policy(name, options)
    assert made is not None
    return made


def view(mass: Tensor, observed: int = 1, layer: int = 0) -> PromptView:
    """A first prompt of N tokens, of whose queries `observed` gave mass [H, G, N]."""
    heads, _, rows = mass.shape
    pos = torch.arange(rows).expand(heads, rows)
    generator = torch.Generator().manual_seed(3)
    key = torch.randn(heads, rows, 8, generator=generator)
    return PromptView(layer, rows, pos, observed, mass, mass.mean(1) ** 2, lambda: key, lambda: key)


def looked(
    given: Tensor,
    value: Tensor | None = None,
    pos: Tensor | None = None,
    output: Tensor | None = None,
    budget: int = 0,
) -> PromptView:
    """A prompt of whose last W queries each is known: given [H, G, W, N]. value [H, N, D], output
    [H, G, D, hidden]; pos [H, N], or those of a first prompt."""
    heads, _, observed, rows = given.shape
    if pos is None:
        pos = torch.arange(rows).expand(heads, rows)
    mass, squares, end = given.sum(2), given.mean(1).square().sum(1), int(pos.max()) + 1
    fetched = torch.ones(heads, rows, 1) if value is None else value
    return PromptView(
        *(0, end, pos, observed, mass, squares, lambda: fetched, lambda: fetched),
        output=None if output is None else lambda: output,
        budget=budget,
        attention=lambda heads: given[heads],
        largest=lambda scale: (given if scale is None else given * scale[:, None]).amax(2),
    )


def asked(
    policy: StepPolicy,
    position: int,
    pos: Tensor,
    columns: Mapping[str, Tensor],
    *,
    count: int = 1,
    **more: Any,
) -> StepView:
    """Heads of one layer that are to give up `count` rows each. pos and columns [F, N]; cap: all
    rows but one, unless it is among `more`."""
    cap = more.pop("cap", torch.full((len(pos),), pos.shape[1] - 1))
    free = policy.free(pos, position, count)
    return StepView(position, pos, free, cap, count, 0, len(pos), columns.__getitem__, **more)


def choose(policy: PromptPolicy, seen: PromptView, total: int) -> Tensor:
    """bool [H, N] of the rows that stay, as a prompt asks for them."""
    return policy.keep(seen, total)


def kept(kv: KVCache) -> list[list[int]]:
    """The positions that each head of each layer holds."""
    heads = range(kv.shape.kv_heads)
    return [kv.kept(layer, h).tolist() for layer in range(kv.shape.layers) for h in heads]


def read(kv: KVCache, query: Tensor, key: Tensor, lo: int, hi: int) -> None:
    """The rows lo to hi - 1 as a prompt: query [L, N, H * G, D]; key [L, N, H, D], and as value."""
    kv.begin(hi - lo)
    for layer in range(len(key)):
        kv.attend(layer, *(x[layer, lo:hi] for x in (query, key, key)))
    kv.end(hi - lo)


def write(kv: KVCache, query: Tensor, key: Tensor, lo: int, hi: int) -> None:
    """The same rows as an answer."""
    for at in range(lo, hi):
        for layer in range(len(key)):
            kv.attend(layer, *(x[layer, at : at + 1] for x in (query, key, key)))
        kv.end(1)


def random_mass(heads: int = 3, group: int = 2, rows: int = 120) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(heads, group, rows, generator=generator) ** 6
