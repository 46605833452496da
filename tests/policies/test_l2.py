"""Key norm: the release's whole layers. Norms: see `test_fixtures`."""

from __future__ import annotations

import torch
from small import engine, ids, network
from views import build


def test_skipped_layers_keep_every_row_above_the_budget() -> None:
    """As in the release. Other layers keep the budget, and an answer evicts as ever."""
    run = engine(network(), "l2", "l2", 30, prompt_options={"skip": 2})
    for turn in range(2):
        before = run.kv.position
        run.prompt(ids(70, seed=turn))
        held = run.kv.arena.held
        assert (held[0] == held[1]).all()
        assert (held[2] == 30).all()
        if not turn:
            assert (held[:2] == 70).all()
        else:  # the first answer's tokens took the place of others
            assert (held[:2] == 70 + before - 3).all()
        for token in range(3):
            run.step(token)
        assert torch.equal(run.kv.arena.held, held)


def test_skip_goes_before_a_pyramid() -> None:
    rows = build("l2+pyramid", {"skip": 1}).layer_rows(4, 40, 500, 15)
    plain = build("l2+pyramid").layer_rows(4, 40, 500, 15)
    assert rows == [500, *plain[1:]]
    assert build("l2", {"skip": 9}).layer_rows(2, 40, 500, 15) == [500, 500]
