"""DropKV: the score is what really happens to the output when a row leaves."""

from __future__ import annotations

import pytest
import torch
from views import build, looked

from minikv.policies.dropkv import output_changes


@pytest.mark.parametrize("sharp", [2.0, 8.0, 16.0])
def test_it_is_the_change_of_a_softmax_that_is_shared_out_anew(sharp: float) -> None:
    """Also where one row has all but a millionth of the attention."""
    generator = torch.Generator().manual_seed(0)
    logits = sharp * torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    value = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    before, want = logits.softmax(-1) @ value, torch.zeros(2, 7, dtype=torch.float64)
    for j in range(7):
        without = logits.clone()
        without[..., j] = -torch.inf
        want[:, j] = (without.softmax(-1) @ value - before).square().sum((1, 2))
    found = output_changes(logits.softmax(-1).float()[None], value.float()[None], 1e-20, 1)[0]
    torch.testing.assert_close(found, want.float(), rtol=2e-5, atol=1e-9)


def test_scores_are_the_pooled_mean_of_the_group_and_the_window_stays() -> None:
    given = torch.zeros(1, 2, 1, 5)
    given[0, 0, 0], given[0, 1, 0] = torch.tensor([0.25, 0.75, 0, 0, 0]), torch.tensor(0.2)
    value = torch.tensor([[[0.0], [4.0], [0.0], [0.0], [0.0]]])
    one, two = output_changes(given, value, 1e-6, 1)[0]
    plain = build("dropkv", {"window": 1, "kernel": 1}).scorer.score(looked(given, value))[0]
    torch.testing.assert_close(plain[:4], (one + two)[:4] / 2)
    assert plain[4] == -torch.inf
    pooled = build("dropkv", {"window": 1, "kernel": 3}).scorer.score(looked(given, value))[0]
    torch.testing.assert_close(pooled[2], plain[1:4].sum() / 3)
    assert build("dropkv").scorer.protected(looked(torch.zeros(1, 1, 1, 40))) == (0, 32)


def test_a_padded_row_that_holds_anything_changes_nothing() -> None:
    given = torch.tensor([[[[0.5, 0.25, 0.25, 0.0]]]])
    value = torch.tensor([[[1.0], [2.0], [3.0], [torch.nan]]])
    pos = torch.tensor([[0, 1, 2, -1]])
    made = build("dropkv", {"window": 1, "kernel": 1}).scorer
    found = made.score(looked(given, value, pos))[0]
    torch.testing.assert_close(found[:3], made.score(looked(given[..., :3], value[:, :3]))[0])


def test_a_row_that_has_all_the_attention_is_worth_a_number() -> None:
    found = output_changes(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[1.0], [2.0]]]), 1e-6, 1)
    assert bool(torch.isfinite(found).all())
