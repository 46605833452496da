"""Steps over the whole tier: those of a cache that evicts nothing, and a tier that stays."""

from __future__ import annotations

import pytest
import small
import torch
from tiers import tiered

from minikv.cache.tier_steps import TierSteps


@pytest.mark.parametrize("windows", [None, (None, 40), (40, 100)])
@pytest.mark.parametrize(("coded", "staged"), [(False, False), (False, True), (True, True)])
def test_steps_are_those_of_a_cache_without_eviction(
    windows: tuple[int | None, ...] | None, coded: bool, staged: bool
) -> None:
    net = small.network(layers=2, windows=windows)
    run = tiered(small.engine(net, "adakv", "roco", 60), coded=coded, staged=staged)
    ids, more = small.ids(150), small.ids(90, seed=4)
    run.recall(list(ids))
    tier = run.kv.tier
    assert tier is not None
    before = [
        {name: column.clone() for name, column in tier._rows.read(layer, 150).items()}
        for layer in range(2)
    ]
    dense = small.Dense(net)
    want = [dense.prompt(ids), *(dense.step(token) for token in more)]
    steps = TierSteps(tier, 149, run.kv.ops)
    got = [net.forward(torch.tensor([token]), steps) for token in (ids[-1], *more)]
    assert steps.position == 240
    for a, b in zip(got, want, strict=True):
        if coded:
            assert (a - b).abs().max() < 0.5 * b.abs().max()
        else:
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert (tier.length, tier.staging_nbytes) == (150, 0)
    for layer, columns in enumerate(before):
        for name, column in tier._rows.read(layer, 150).items():
            assert torch.equal(column, columns[name])
