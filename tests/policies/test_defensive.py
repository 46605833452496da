"""DefensiveKV: the worst case of each row, worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from views import build, looked

from minikv.policies.defensive import most_of, over_heads, worst_case


def scores(
    given: Tensor, value: Tensor | None = None, output: Tensor | None = None, **options: object
) -> Tensor:
    made = build("defensive", {"window": 1, "kernel": 1, "sinks": 0, **options})
    return made.scorer.score(looked(given, value, output=output, budget=3))


def test_a_query_is_pooled_and_keeps_its_sum() -> None:
    """kernel 3 over [0, 0, 6, 0, 3]: thirds of [0, 6, 6, 9, 3], which sum to 8, scaled to 9."""
    line = worst_case(
        torch.tensor([[[[0.0, 0.0, 6.0, 0.0, 3.0]]]]),
        torch.arange(5)[None],
        torch.ones(1, 5).bool(),
        3,
        1,
    )
    torch.testing.assert_close(line, torch.tensor([[0.0, 2.0, 2.0, 3.0, 1.0]]) * 9 / 8)


def test_the_worst_query_of_the_group_counts() -> None:
    """One query of one query head looks at a row: the mean would lose it, the most does not."""
    given = torch.full((1, 2, 3, 6), 0.1)
    given[0, 1, 2, 3] = 0.9
    # Rows of 0.1 are lifted to the mean of the five that are free: (4 x 0.1 + 0.9) / 5.
    want = torch.tensor([0.26, 0.26, 0.26, 0.9, 0.26, -torch.inf])
    torch.testing.assert_close(scores(given, values="none")[0], want)


def test_values_weigh_by_their_length_behind_the_output() -> None:
    """|v W|_1, the mean over the group's two heads: of v = 2 and W = [1, -1] and [0, 3], 5."""
    given = torch.full((1, 2, 2, 4), 0.25)
    value = torch.tensor([[[2.0], [1.0], [4.0], [1.0]]])
    output = torch.tensor([[[[1.0, -1.0]], [[0.0, 3.0]]]])
    found = scores(given, value, output)[0, :3]
    torch.testing.assert_close(found, 0.25 * torch.tensor([5.0, 2.5, 10.0]))


def test_sinks_are_protected_unless_that_is_off() -> None:
    """Attention sinks have values of little length; what the scorer protects gets no score."""
    given, value = torch.full((1, 1, 1, 9), 0.1), torch.ones(1, 9, 1)
    assert build("defensive").scorer.evidence.sinks == 4  # by default
    for sinks in (4, 0):
        found = scores(given, value, torch.ones(1, 1, 1, 1), sinks=sinks)[0, :8]
        assert found.isneginf().tolist() == [True] * sinks + [False] * (8 - sinks)


def test_the_release_weighs_values_by_their_share_of_all_heads() -> None:
    """Two heads that hold other positions: a position that one head has is all that head's."""
    norms = torch.tensor([[1.0, 3.0, 2.0], [4.0, 1.0, 0.0]])
    pos = torch.tensor([[0, 1, 4], [2, 1, -1]])
    want = torch.tensor([[1.0, 0.75, 1.0], [1.0, 0.25, 0.0]])
    torch.testing.assert_close(over_heads(norms, pos, 5), want)


def test_the_release_takes_most_of_the_attention_first() -> None:
    """Of 5, 3, 1 and 1 in 10: the rows before the one with which the share is reached."""
    mass = torch.tensor([[1.0, 5.0, 1.0, 3.0]])
    assert most_of(mass, 0.9, 9).tolist() == [[False, True, False, True]]
    assert most_of(mass, 0.8, 9).tolist() == [[False, True, False, False]]
    assert most_of(mass, 0.9, 1).tolist() == [[False, True, False, False]]
    given = (mass / 10)[:, None, None].expand(1, 1, 1, 4).clone()
    given = torch.cat((given, torch.zeros(1, 1, 1, 1)), -1)
    value = torch.tensor([[[9.0], [0.1], [5.0], [0.1], [1.0]]])
    output = torch.ones(1, 1, 1, 1)
    plain, sure = (scores(given, value, output, sure=share) for share in (0.0, 0.9))
    assert plain[0].argsort(descending=True).tolist()[:2] == [0, 2]
    assert set(sure[0].topk(3).indices.tolist()) == {0, 1, 3}


@pytest.mark.parametrize(
    ("values", "kernel", "sinks"), [("none", 3, 0), ("none", 3, 2), ("heads", 1, 0)]
)
def test_rows_of_later_turns_have_the_same_scores(values: str, kernel: int, sinks: int) -> None:
    """The same rows in another order, with padding behind, which counts for no head, whatever it
    holds; without sinks position 0 is free. They are pooled by position."""
    generator = torch.Generator().manual_seed(1)
    given = torch.rand(2, 2, 4, 12, generator=generator)
    value = torch.rand(2, 12, 3, generator=generator)
    output = torch.rand(2, 2, 3, 5, generator=generator)
    made = build("defensive", {"window": 2, "kernel": kernel, "values": values, "sinks": sinks})
    want = made.scorer.score(looked(given, value, output=output))
    order = torch.randperm(12, generator=generator)
    padded = torch.cat((given[..., order], torch.zeros(2, 2, 4, 3)), -1)
    rows = torch.cat((value[:, order], torch.full((2, 3, 3), 9.0)), 1)
    pos = torch.cat((order, torch.full((3,), -1))).expand(2, 15)
    found = made.scorer.score(looked(padded, rows, pos=pos, output=output))
    torch.testing.assert_close(found[:, :12], want[:, order])
    assert bool((found[:, 12:] == -torch.inf).all())


def test_heads_weighs_by_the_share_of_all_heads() -> None:
    """`values=heads` in the scores: of values 1 and 3 at a position, a quarter and three."""
    given = torch.full((2, 1, 1, 3), 0.25)
    value = torch.tensor([[[1.0], [1.0], [1.0]], [[3.0], [1.0], [1.0]]])
    output = torch.ones(2, 1, 1, 1)
    found = scores(given, value, output, values="heads")
    torch.testing.assert_close(found[:, :2], 0.25 * torch.tensor([[0.25, 0.5], [0.75, 0.5]]))


@pytest.mark.parametrize("numbers", [1, 30, 10**9])
def test_how_many_queries_are_taken_at_once_changes_nothing(numbers: int) -> None:
    draw = torch.Generator().manual_seed(0)
    given = torch.rand((2, 2, 40, 6), generator=draw)
    order, free = torch.arange(6).expand(2, 6), torch.ones(2, 6, dtype=torch.bool)
    whole = torch.stack([worst_case(given[:, :, i : i + 1], order, free, 3, 1) for i in range(40)])
    torch.testing.assert_close(worst_case(given, order, free, 3, numbers), whole.amax(0))
