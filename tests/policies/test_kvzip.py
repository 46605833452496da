"""KVzip's scores on cases that are small enough to work by hand, its requests, and what leaves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from views import build, looked

from minikv.policies.base import PromptView
from minikv.policies.kvzip import KVzip
from minikv.policies.outputs import output_lengths
from minikv.policies.repeats import RepeatView, Wording

WORDS = Wording((1, 2), (3,), (4,))


def kvzip(name: str = "kvzip", **options: object) -> KVzip:
    scorer = build(name, options).scorer
    assert isinstance(scorer, KVzip)
    return scorer


def keys(*logits: float) -> Tensor:
    """[1, n, 1]: with a query of 1 in one dimension, a key is its logit."""
    return torch.tensor(logits)[None, :, None]


def repeat_view(lengths: Tensor | None = None) -> RepeatView:
    """One KV head, two query heads. Row 0 is a first row; 1 and 2 are scored; 3 and 4 repeat them.

    Query head 0 asks with 1, head 1 with 2. exp(logit) of the keys: 1; 2, 3; 1, 4.
    """
    log = math.log
    return RepeatView(
        0,
        torch.tensor([1.0, 2.0])[None, :, None, None].expand(1, 2, 2, 1),
        torch.tensor([3, 4]),
        [(keys(0.0), torch.tensor([[0]]))],
        (keys(log(2), log(3)), torch.tensor([[1, 2]])),
        (keys(0.0, log(4)), torch.tensor([[3, 4]])),
        None,
        lambda: torch.tensor([[[1.0], [5.0]]]),
        lambda: torch.tensor([[[[3.0, 4.0]], [[0.0, 1.0]]]]),  # [H, G, D, hidden]: lengths 5 and 1
        lengths,
    )


def test_scores_worked_by_hand() -> None:
    """Query 3 sees all but the last key: head 0 gives 2/7 and 3/7, head 1 (squares) 4/15 and 9/15.
    Query 4 sees all: 2/11 and 3/11; 4/31 and 9/31. The largest of each count.

    With plus, |v W_O| is 5 and 25 of head 0, 1 and 5 of head 1; |h| is 2 at query 3 and 1 at query
    4. Head 0: 2/7 * 5 / 2 or 2/11 * 5, and 3/7 * 25 / 2 or 3/11 * 25; head 1: less."""
    found = kvzip().peak(repeat_view())
    torch.testing.assert_close(found, torch.tensor([[2 / 7, 9 / 15]]))
    view = repeat_view(torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(output_lengths(view), torch.tensor([[[5.0, 25.0], [1.0, 5.0]]]))
    found = kvzip("kvzip+").peak(view)
    torch.testing.assert_close(found, torch.tensor([[10 / 11, 75 / 11]]))


def test_the_rest_of_the_text_is_left_out() -> None:
    """A row that is in none of the parts takes no attention, and one that no query sees gets 0."""
    view = repeat_view()
    unseen = (view.chunk[0], torch.tensor([[1, -1]]))
    found = kvzip().peak(replace(view, first=(), chunk=unseen))
    torch.testing.assert_close(found, torch.tensor([[4 / 5, 0.0]]))


def test_what_is_asked_for() -> None:
    """The whole text in one, or chunk by chunk, each after the last tokens of the one before."""
    one = kvzip().second_pass(range(100, 110), 2, WORDS, 100)
    assert [(r.ids, r.begin, r.end) for r in one] == [((1, 2, 4, *range(102, 110)), 2, 10)]
    some = kvzip(chunk=16, overlap=3).second_pass(range(100, 150), 4, WORDS, 100)
    assert [(r.begin, r.end) for r in some] == [(4, 20), (20, 36), (36, 50)]
    assert some[0].ids == (1, 2, 4, *range(104, 120))
    assert some[1].ids == (3, 117, 118, 119, 4, *range(120, 136))
    assert some[2].ids == (3, 133, 134, 135, 4, *range(136, 150))
    # The overlap never reaches the first rows.
    some = kvzip(chunk=16, overlap=64).second_pass(range(100, 140), 4, WORDS, 1000)
    assert some[1].ids[1:17] == tuple(range(104, 120))


@pytest.mark.parametrize(
    ("room", "ends"),
    [(1000, [50]), (61, [50]), (53, [42, 50]), (40, [29, 50]), (27, [16, 32, 48, 50]), (26, [])],
)
def test_chunks_fit_the_room(room: int, ends: list[int]) -> None:
    """With requests of at most 11 tokens, a chunk has the others; below 16 there is no pass."""
    words = Wording((1,), (2, 3), (4,))
    some = kvzip().second_pass(range(50), 0, words, room)
    assert [r.end for r in some] == ends
    assert all(len(r.ids) <= room for r in some)


def prompt_view(
    worth: list[float], peak: list[float] | None, begin: int, budget: int = 4, *, asks: bool = False
) -> PromptView:
    """One head, positions 0, 1, ...; the last prompt begins at `begin`."""
    count = len(worth)
    return replace(
        looked(torch.zeros(1, 1, 1, count), budget=budget),
        mass=None,
        squares=None,
        carried={"worth": torch.tensor([worth])},
        turns=[(begin, count)],
        peak=None if peak is None else torch.tensor([peak]),
        asks=asks,
    )


def test_scores_are_kept_and_new_ones_stand_beside_them() -> None:
    view = prompt_view([0.5, 0.2, 0.0, 0.0], [0.0, 0.0, 0.4, 0.0], 2)
    scorer = kvzip()
    state = scorer.state(view)["worth"]
    torch.testing.assert_close(state, torch.tensor([[0.5, 0.2, 0.4, 1e-30]]), rtol=1e-6, atol=0.0)
    assert torch.equal(scorer.score(view), state)  # all of them have one


def test_a_text_that_always_has_room_is_above_every_score() -> None:
    state = kvzip().state(prompt_view([5.0, 0.0, 0.0], None, 1))["worth"][0]
    assert state[1] == state[2] > 1e6 > state[0] == 5.0


@pytest.mark.parametrize(
    ("budget", "order"),
    # Of 16 a quarter is for what was said: one row each more.
    [(4, [7, 8, 0, 2, 1, 3, 4, 5, 6]), (16, [5, 6, 7, 8, 0, 2, 1, 3, 4])],
)
def test_what_was_said_leaves_before_the_text_but_for_the_newest(
    budget: int, order: list[int]
) -> None:
    """Rows 3 to 6 are of an earlier question and its answer, 7 and 8 of this one."""
    view = prompt_view([0.5, 0.2, 0.3, *[0.0] * 6], None, 7, budget=budget, asks=True)
    scorer = kvzip(said=0.25, sinks=0)
    assert scorer.score(view)[0].argsort(descending=True, stable=True).tolist() == order
    assert scorer.state(view)["worth"][0].tolist() == view.carried["worth"][0].tolist()


def test_nothing_of_an_answer_is_scored() -> None:
    """Rows of an answer have 0 in the column; after a new text they leave first."""
    view = prompt_view([0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.1], 3, budget=4)
    score = kvzip(said=0.0).score(view)[0]
    assert score.argsort(descending=True, stable=True).tolist() == [0, 3, 1, 2]
