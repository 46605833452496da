"""Random eviction takes every row alike."""

from __future__ import annotations

from dataclasses import replace

import torch
from small import victims
from views import asked, rule


def test_random_takes_every_row_alike() -> None:
    step = rule("random", {"sinks": 2, "recent": 3})
    rows, trials = 25, 4000
    pos = torch.arange(rows).expand(trials, rows)
    first = victims(step, asked(step, rows, pos, {}))
    counts = torch.bincount(first, minlength=rows).float()
    assert counts[:2].sum() == 0
    assert counts[-3:].sum() == 0
    free = counts[2:-3]
    chi = float(((free - trials / 20) ** 2 / (trials / 20)).sum())
    assert chi < 43.8  # 19 degrees of freedom, p = 0.001


def test_draws_are_keyed_by_layer_and_head() -> None:
    """Of heads of two layers at once, from layer 2 on: as of each layer alone."""
    pos = torch.arange(5).expand(6, 5)
    both = replace(asked(rule("random"), 9, pos, {}), layer=2, heads=3)
    each = [replace(both, layer=2 + i, pos=pos[:3]).uniform(7) for i in range(2)]
    assert torch.equal(both.uniform(7), torch.cat(each))
    assert both.uniform(7).unique().numel() == 30
