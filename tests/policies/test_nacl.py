"""NaCl: a share of the rows is drawn in proportion to the score, the rest are the best."""

from __future__ import annotations

from dataclasses import replace

import torch
from small import engine, ids, network
from spy import Spy
from torch import Tensor
from views import build, choose, random_mass, view

from minikv.cache.rules import Rules


def test_draws_repeat_with_the_seed_and_differ_between_layers() -> None:
    mass = random_mass()
    a, b, c, d = (
        choose(build("nacl", {"seed": seed}), view(mass, 32, layer), 3 * 60)
        for seed, layer in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert not torch.equal(a, d)


def test_nacl_draws_a_share_and_keeps_its_sizes() -> None:
    mass = random_mass()
    for share in (0.0, 0.35, 1.0):
        kept = choose(build("nacl", {"random": share}), view(mass, 32), 3 * 60)
        assert kept.sum(1).tolist() == [60] * 3
        assert bool(kept[:, :4].all())
        assert bool(kept[:, -32:].all())
        best = choose(build("nacl", {"random": 0.0}), view(mass, 32), 3 * 60)
        same = int((kept & best).sum())
        assert same == 180 if share == 0 else same < 180


def test_nacl_draws_in_proportion_to_the_score() -> None:
    """Inclusion of a row when one is drawn: its share of the scores; even when it is hot."""
    weight = torch.cat((torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(1)))
    wanted = {1.0: weight[:4] / 10, 1e6: torch.full((4,), 0.25)}
    for temperature, want in wanted.items():
        policy = build(
            "nacl", {"proxies": 1, "sinks": 0, "random": 1.0, "temperature": temperature}
        )
        counts = torch.zeros(4)
        trials = 300
        for layer in range(trials):
            mass = weight.expand(40, 1, 5)
            counts += choose(policy, view(mass, 1, layer), 40 * 2)[:, :4].sum(0)
        n = trials * 40
        chi = float(((counts - n * want) ** 2 / (n * want)).sum())
        assert chi < 16.3, temperature  # 3 degrees of freedom, p = 0.001


def test_proxies_that_are_all_queries_are_h2o() -> None:
    """N1: the same scores, so the same rows, if both protect the same."""
    net = network()
    kept = []
    for name, options in (
        ("nacl", {"proxies": 90, "sinks": 0, "random": 0.0}),
        ("h2o", {"window": 1}),
    ):
        run = engine(net, name, "none", 91, prompt_options=options)
        seen: list[Tensor] = []
        policy = run.kv.rules.prompt
        assert policy is not None
        scorer = Spy(policy.scorer, lambda _, scores, seen=seen: seen.append(scores))
        run.kv.configure(Rules(replace(policy, scorer=scorer), None, run.kv.rules.budget))
        run.prompt(ids(90))
        run.prompt(ids(9, seed=1))
        kept.append(seen[0] if seen else torch.empty(0))
    assert kept[0].shape[1] == 99
    # The second prompt of 9 has 9 queries in both cases.
    assert torch.allclose(kept[0], kept[1], rtol=1e-4, atol=1e-6)


def test_a_draw_follows_ranks_where_scores_are_no_weights() -> None:
    """Better rows are drawn more often although a norm's scores are negative."""
    mass = random_mass(1, 1, 60)
    seen = view(mass)
    order = (-seen.key().norm(dim=-1))[0].argsort(descending=True)
    hits = torch.zeros(60)
    for seed in range(300):
        options = {"random": 1.0, "seed": seed, "sinks": 0, "recent": 0}
        hits += choose(build("l2+draw", options), seen, 15)[0]
    assert float(hits[order[:15]].sum()) > 2.0 * float(hits[order[-15:]].sum())
