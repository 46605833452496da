"""Spans: what a row of the text passes on to the rows after it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from views import build, looked

from minikv.policies import find, step_policy
from minikv.policies.base import PromptView
from minikv.policies.selection import SURE, ranked
from minikv.policies.span import carry


def falling(decay: float, tokens: int) -> torch.Tensor:
    at = torch.arange(tokens, dtype=torch.float64)
    return torch.cat((at * math.log(decay), torch.zeros(1)))


@pytest.mark.parametrize(
    ("worth", "pos", "want"),
    [
        # At position 2 the own .6 is more than a quarter.
        ([1.0, 0.0, 0.6, 0.0], [0, 1, 2, 3], [1.0, 0.5, 0.6, 0.3]),
        # Rows that left do not shorten the way: from 2 to 5 it falls three times, not once.
        ([0.0, 1.0, 0.0, 0.0], [8, 2, 5, -1], [0.5**6, 1.0, 0.5**3]),
    ],
)
def test_worth_is_carried_on_with_decay(
    worth: list[float], pos: list[int], want: list[float]
) -> None:
    found = carry(torch.tensor([worth]), torch.tensor([pos]), falling(0.5, 9))
    torch.testing.assert_close(found[0, : len(want)], torch.tensor(want))


def test_a_long_text_keeps_its_precision() -> None:
    """Far into a text a decay of one token is still that decay."""
    worth = torch.zeros(1, 200_000)
    worth[0, 199_000] = 1.0
    found = carry(worth, torch.arange(200_000)[None], falling(0.95, 200_000))
    torch.testing.assert_close(found[0, 199_001:199_004], 0.95 ** torch.tensor([1.0, 2.0, 3.0]))


def scores(name: str, seen: PromptView, **options: object) -> torch.Tensor:
    policy = build(name, options)
    return policy.scores(seen, policy.scorer.free(seen))


def test_global_span_by_hand() -> None:
    """Two query heads whose values count 1 and 7 times: 5 times, as the root of the mean of 1 and
    49. The queries' inputs have lengths 1 and 2.

    Row 0: the most of .4 / 1 and .4 / 2, times 5, is 2. It is carried on with decay 1/2."""
    given = torch.zeros(1, 2, 2, 4)
    given[0, :, 0] = torch.tensor([[0.4, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.01]])
    given[0, :, 1] = torch.tensor([[0.0, 0.0, 0.1, 0.0], [0.4, 0.0, 0.0, 0.0]])
    seen = replace(
        looked(given, output=torch.tensor([[[[1.0]], [[7.0]]]])), lengths=torch.tensor([1.0, 2.0])
    )
    found = scores("global-span", seen, window=2, sinks=0, recent=0, decay=0.5)[0]
    torch.testing.assert_close(found, torch.tensor([2.0, 1.0, 0.5, 0.25]))


@pytest.mark.parametrize("name", ["snapkv", "adakv", "h2o", "chunkkv", "keydiff", "defensive"])
def test_any_scores_are_carried_on(name: str) -> None:
    """Against the sentence that defines it, row by row: a row's worth, or the most that a row
    before it passes on. Sinks pass nothing on. Of scores that do not add up, ranks are carried."""
    draw = torch.Generator().manual_seed(5)
    value = torch.rand(2, 14, 3, generator=draw)
    output = torch.rand(2, 2, 3, 5, generator=draw)
    seen = looked(torch.rand(2, 2, 3, 14, generator=draw), value, output=output, budget=6)
    mine = {one.name for one in find(f"{name}+span").prompt_options}
    options = {key: 2 for key in ("window", "sinks", "recent") if key in mine}
    policy = build(f"{name}+span", {"decay": 0.8, "first": 3, **options})
    own, free = policy.scorer.score(seen), policy.scorer.free(seen)
    if name == "keydiff":
        own = ranked(own, seen.pos, free)
    found = policy.scores(seen, free)
    for h in range(2):
        for at in range(14):
            passed = [0.8 ** (at - i) * float(own[h, i]) for i in range(3, at + 1)]
            want = max(float(own[h, at]), *passed, 0.0)
            if bool(free[h, at]):
                assert float(found[h, at]) == pytest.approx(want, rel=1e-5), (h, at)


def test_less_is_passed_on_to_the_next_sentence() -> None:
    """A sentence ends with the token 1, another with 3; the row of token 2 has left. Half of a
    worth is passed on to the next token, and a tenth of that to the next sentence."""
    given = torch.tensor([[[[1.0, 0.0, 0.0, 0.0, 0.0]]]])
    pos, output = torch.tensor([[0, 1, 3, 4, 5]]), torch.ones(1, 1, 1, 1)
    seen = replace(looked(given, None, pos, output), sentences=torch.tensor([0, 0, 1, 1, 2, 2]))
    found = scores("global-span", seen, decay=0.5, across=0.1)[0]
    wanted = torch.tensor([1.0, 0.5, 0.125 * 0.1, 0.0625 * 0.01, 0.03125 * 0.01])
    torch.testing.assert_close(found, wanted)


def test_many_sentences_keep_their_precision() -> None:
    """Far into a text the next sentence gets `across` times `decay` of the last token's worth."""
    pos = torch.tensor([[199_998, 199_999]])
    given, output = torch.tensor([[[[1.0, 0.0]]]]), torch.ones(1, 1, 1, 1)
    sentences = torch.arange(200_000)
    seen = replace(looked(given, None, pos, output), sentences=sentences)
    found = scores("global-span", seen, decay=0.9, across=0.3)[0]
    torch.testing.assert_close(found, torch.tensor([1.0, 0.27]))


def test_what_only_has_to_stay_is_not_carried_on() -> None:
    """As KVzip says of its newest rows: 0.3 and 0.1 are carried on, not the score between them."""
    given = torch.tensor([[0.0, 0.3, 10 * SURE, 0.1, 0.0]])
    seen = replace(
        looked(torch.zeros(1, 1, 1, 5)), carried={"worth": given}, asks=True, turns=((0, 5),)
    )
    found = scores("kvzip+span", seen, decay=0.5, first=0)[0]
    torch.testing.assert_close(found[[1, 3]], torch.tensor([0.3, 0.1]))


def test_a_step_policy_begins_with_what_was_passed_on() -> None:
    """Rows 3 and 6 get attention; the text after them, which an answer is copied from, keeps what
    is passed on. Padding and sinks pass nothing on, and no row loses anything."""
    given = torch.zeros(1, 2, 2, 9)
    given[0, 0, 0, 3], given[0, :, 1, 6], given[0, :, :, 0] = 0.8, 0.5, 0.9
    pos = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, -1]])
    seen = replace(looked(given, pos=pos), carried={"sum": torch.zeros(1, 9)})
    policy, step = build("snapkv+span", {"decay": 0.5, "first": 1}), step_policy("h2o")
    assert policy.carry is not None
    assert step is not None
    noted = policy.carry.noted(seen, squares=False)
    found = step.init(noted)["sum"][0]
    sums = torch.tensor([1.8, 0.0, 0.0, 0.4, 0.2, 0.1, 0.5, 0.25])
    torch.testing.assert_close(found[:8], sums)
    assert noted.squares is None

    noted = policy.carry.noted(seen, squares=True)
    assert noted.mass is not None
    assert noted.squares is not None
    torch.testing.assert_close(noted.mass[0, 0, :8], sums)
    squares = torch.tensor([1.62, 0.0, 0.0, 0.16, 0.08, 0.04, 0.25, 0.125])
    torch.testing.assert_close(noted.squares[0, :8], squares)
