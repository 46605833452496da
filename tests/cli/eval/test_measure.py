"""Perplexity, agreement and attention lost, each beside a plain way to compute it."""

from __future__ import annotations

import pytest
import torch
from small import engine, ids, network

from minikv.cache.attend import DenseAttend
from minikv.cli.eval import metrics
from minikv.cli.eval.measure import Shadow, agreement, negative_log_likelihood


def test_likeness_and_agreement() -> None:
    assert metrics.lcs("abcde", "ace") == 3
    assert metrics.likeness("a b c d", "a c d") == pytest.approx(6 / 7)
    assert metrics.likeness("", "") == 1.0
    assert agreement("a b c", "a b c").exact
    assert agreement("a b c", "a x c").first == 1
    assert agreement("a b", "a b c").first == 2
    assert not agreement("a b", "a b c").exact


def test_ppl_is_that_of_a_plain_forward() -> None:
    """Under the full cache, token by token or at once."""
    net = network()
    tokens = ids(60)
    losses = negative_log_likelihood(engine(net), tokens, 40)
    with torch.inference_mode():
        states = net.hidden(torch.tensor(tokens), DenseAttend((None,) * 3))
        want = torch.nn.functional.cross_entropy(
            net.logits(states[39:-1]), torch.tensor(tokens[40:]), reduction="none"
        )
    assert losses == pytest.approx(want.tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("windows", [None, (20, None, 30)])
def test_the_shadow_sees_what_was_lost(windows: tuple[int | None, ...] | None) -> None:
    net = network(windows=windows)
    for policy, step, nothing in (("full", "none", True), ("streaming", "streaming", False)):
        kv = engine(net, policy, step, 16).kv
        shadow = Shadow(kv)
        kv.begin(50)
        with torch.inference_mode():
            net.forward(torch.tensor(ids(50)), shadow)
            for token in range(6):
                net.forward(torch.tensor([token]), shadow)
        lost = torch.stack(shadow.lost)
        assert lost.shape == (6, 3)
        if nothing:
            assert float(lost.abs().max()) < 1e-5
        else:
            assert float(lost.min()) > 0.0
            assert float(lost.max()) < 1.0
