"""NaCl: a share of the rows is drawn in proportion to the score, the rest are the best."""

from __future__ import annotations

import torch
from views import build, choose, random_mass, view


def test_draws_repeat_with_the_seed_and_differ_between_layers() -> None:
    mass = random_mass()
    a, b, c, d = (
        choose(build("nacl", {"seed": seed}), view(mass, 32, layer), 3 * 60)
        for seed, layer in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert not torch.equal(a, d)
