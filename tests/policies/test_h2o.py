"""H2O: sums of attention, and the newest half."""

from __future__ import annotations

from dataclasses import replace

import torch
from small import engine, ids, network
from views import build, kept, read, view

from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.policies import step_policy


def test_h2o_keeps_the_newest_half() -> None:
    """As in the paper, at the prompt as well; `window` sets a number instead."""
    for options, newest in (({}, 30), ({"recent_share": 0.25}, 15), ({"window": 7}, 7)):
        run = engine(network(), "h2o", "none", 60, prompt_options=options)
        run.prompt(ids(200))
        for rows in kept(run.kv):
            assert len(rows) == 60
            assert rows[-newest:] == [*range(200 - newest, 200)]


def test_h2o_counts_what_rows_got_before_the_prompt() -> None:
    """Two query heads gave .1 and .3, .5 and .1, 0 and .2; before, the rows had 2, 0 and 1."""
    mass = torch.tensor([[[0.1, 0.5, 0.0], [0.3, 0.1, 0.2]]])
    seen = replace(view(mass, 3), carried={"sum": torch.tensor([[2.0, 0.0, 1.0]])})
    scorer = build("h2o").scorer
    torch.testing.assert_close(scorer.score(seen), torch.tensor([[2.2, 0.3, 1.1]]))
    torch.testing.assert_close(scorer.score(view(mass, 3)), torch.tensor([[0.2, 0.3, 0.1]]))
    average = build("h2o", {"average": True}).scorer  # over 3, 2 and 1 queries of this prompt
    torch.testing.assert_close(average.score(seen), torch.tensor([[0.2 / 3, 0.15, 0.1]]))


def test_a_later_prompt_of_h2o_keeps_what_earlier_ones_looked_at() -> None:
    """Two prompts: the rows that stay have the largest sums over both, softmax by softmax."""
    g = torch.Generator().manual_seed(0)
    query, key = 2 * torch.randn(70, 2, 8, generator=g), torch.randn(70, 2, 8, generator=g)
    p = torch.einsum("thd,nhd->htn", query.double(), key.double()) / 8**0.5
    p = p.masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    cache = KVCache(
        Shape(1, 2, 2, 8, (None,), 1 << 20),
        Rules(build("h2o"), step_policy("h2o"), Budget.parse(50)),
    )
    for lo, hi in ((0, 40), (40, 70)):
        read(cache, query[None], key[None], lo, hi)
    for head in range(2):
        both, second = p[head].sum(0)[:45], p[head, 40:].sum(0)[:45]
        want = [*sorted(both.topk(25).indices.tolist()), *range(45, 70)]
        assert cache.kept(0, head).tolist() == want
        assert want[:25] != sorted(second.topk(25).indices.tolist())


def test_h2o_chooses_one_row_at_least() -> None:
    """Beside the first rows and the newest, however large their share is."""
    run = engine(network(), "h2o", "none", 10, prompt_options={"recent_share": 0.95, "sinks": 4})
    run.prompt(ids(60))
    found = kept(run.kv)
    assert {(*rows[:4], *rows[5:]) for rows in found} == {(0, 1, 2, 3, 55, 56, 57, 58, 59)}
    assert len({rows[4] for rows in found}) > 1  # not one more of the newest
