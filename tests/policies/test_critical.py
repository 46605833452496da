"""CriticalKV: values count."""

from __future__ import annotations

from dataclasses import replace

import torch
from views import build, choose, random_mass, view


def test_values_weigh_the_same_way_over_any_scorer() -> None:
    """Rows of ten times the value stay under CriticalKV, whatever the sign of the scores."""
    generator = torch.Generator().manual_seed(0)
    mass = random_mass(2, 2, 60)
    value = torch.randn(2, 60, 8, generator=generator)
    heavy = torch.arange(60) % 2 == 0
    value[:, heavy] *= 10.0
    matrix = torch.randn(2, 2, 8, 16, generator=generator)
    seen = replace(view(mass), value=lambda: value, output=lambda: matrix)
    for base in ("tova", "h2o", "l2", "keydiff", "streaming", "random"):
        options = {"by_score": 0.0}
        kept = choose(build(f"{base}+critical", options), seen, 2 * 30)
        plain = choose(build(base), seen, 2 * 30)
        more = kept[:, heavy].sum() - plain[:, heavy].sum()
        assert int(more) >= 4, base
