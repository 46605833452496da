"""KVzip's scores on cases that are small enough to work by hand, its requests, and what leaves."""

from __future__ import annotations

import pytest
import torch
from views import build

from minikv.policies.base import PromptView
from minikv.policies.kvzip import KVzip
from minikv.policies.repeats import Wording

WORDS = Wording((1, 2), (3,), (4,))


def kvzip(name: str = "kvzip", **options: object) -> KVzip:
    scorer = build(name, options).scorer
    assert isinstance(scorer, KVzip)
    return scorer


def test_what_is_asked_for() -> None:
    """The whole text in one, or chunk by chunk, each after the last tokens of the one before."""
    one = kvzip().second_pass(range(100, 110), 2, WORDS, 100)
    assert [(r.ids, r.begin, r.end) for r in one] == [((1, 2, 4, *range(102, 110)), 2, 10)]
    some = kvzip(chunk=16, overlap=3).second_pass(range(100, 150), 4, WORDS, 100)
    assert [(r.begin, r.end) for r in some] == [(4, 20), (20, 36), (36, 50)]
    assert some[0].ids == (1, 2, 4, *range(104, 120))
    assert some[1].ids == (3, 117, 118, 119, 4, *range(120, 136))
    assert some[2].ids == (3, 133, 134, 135, 4, *range(136, 150))


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
    pos = torch.arange(count)[None]
    return PromptView(
        0,
        count,
        pos,
        0,
        None,
        None,
        lambda: torch.zeros(1, count, 1),
        lambda: torch.zeros(1, count, 1),
        {"worth": torch.tensor([worth])},
        turns=[(begin, count)],
        budget=budget,
        peak=None if peak is None else torch.tensor([peak]),
        asks=asks,
    )


def test_scores_are_kept_and_new_ones_stand_beside_them() -> None:
    view = prompt_view([0.5, 0.2, 0.0, 0.0], [0.0, 0.0, 0.4, 0.0], 2)
    scorer = kvzip()
    state = scorer.state(view)["worth"]
    torch.testing.assert_close(state, torch.tensor([[0.5, 0.2, 0.4, 1e-30]]), rtol=1e-6, atol=0.0)
    assert torch.equal(scorer.score(view), state)  # all of them have one


def test_what_was_said_leaves_before_the_text_but_for_the_newest() -> None:
    """Rows 3 to 6 are of an earlier question and its answer, 7 and 8 of this one."""
    worth = [0.5, 0.2, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    scorer = kvzip(said=0.25, sinks=0)
    view = prompt_view(worth, None, 7, budget=4, asks=True)
    order = scorer.score(view)[0].argsort(descending=True, stable=True).tolist()
    assert order == [7, 8, 0, 2, 1, 3, 4, 5, 6]
    assert scorer.state(view)["worth"][0].tolist() == view.carried["worth"][0].tolist()
    view = prompt_view(worth, None, 7, budget=16, asks=True)  # a quarter of it: one row each more
    order = scorer.score(view)[0].argsort(descending=True, stable=True).tolist()
    assert order == [5, 6, 7, 8, 0, 2, 1, 3, 4]
