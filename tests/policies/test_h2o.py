"""H2O: sums of attention, and the newest half."""

from __future__ import annotations

import torch
from small import engine, ids, network


def test_h2o_columns_sum_to_the_queries() -> None:
    """H1: every query gives one unit of attention, and nothing was evicted before."""
    net = network()
    run = engine(net, "h2o", "h2o", 1000)
    run.prompt(ids(70))
    for token in range(5):
        run.step(token)
    run.prompt(ids(20, seed=2))
    for layer in range(3):
        index, live = run.kv.arena.index(layer)
        sums = run.kv.arena.columns["sum"][index].masked_fill(~live, 0.0).sum(1)
        assert torch.allclose(sums, torch.full_like(sums, 5.0 + 90.0 - 0.0), rtol=1e-4)


def test_h2o_keeps_the_newest_half() -> None:
    """As in the paper, at the prompt as well; `window` sets a number instead."""
    for options, newest in (({}, 30), ({"recent_share": 0.25}, 15), ({"window": 7}, 7)):
        run = engine(network(), "h2o", "none", 60, prompt_options=options)
        run.prompt(ids(200))
        for layer in range(3):
            for head in range(3):
                kept = run.kv.kept(layer, head)
                assert len(kept) == 60
                assert kept[-newest:].tolist() == list(range(200 - newest, 200))
