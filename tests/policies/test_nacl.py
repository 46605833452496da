"""NaCl: a share of the rows is drawn in proportion to the score, the rest are the best."""

from __future__ import annotations

import torch
from views import build, choose, random_mass, view


def test_draws_repeat_with_the_seed_and_differ_between_layers() -> None:
    mass = random_mass()
    a, b, c, d = (
        choose(build("nacl", {"seed": seed}), view(mass, 32, layer), 3 * 60)
        for seed, layer in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert not torch.equal(a, d)


def test_nacl_draws_in_proportion_to_the_score() -> None:
    """Inclusion of a row when one is drawn: its share of the scores; even when it is hot."""
    weight = torch.cat((torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(1)))
    wanted = {1.0: weight[:4] / 10, 1e6: torch.full((4,), 0.25)}
    for temperature, want in wanted.items():
        policy = build(
            "nacl", {"proxies": 1, "sinks": 0, "random": 1.0, "temperature": temperature}
        )
        counts = torch.zeros(4)
        trials = 150
        for layer in range(trials):
            mass = weight.expand(40, 1, 5)
            counts += choose(policy, view(mass, 1, layer), 40 * 2)[:, :4].sum(0)
        n = trials * 40
        chi = float(((counts - n * want) ** 2 / (n * want)).sum())
        assert chi < 16.3, temperature  # 3 degrees of freedom, p = 0.001


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
