"""Pinned rows stay, whatever the policy."""

from __future__ import annotations

import pytest
from refusals import refused
from small import engine, ids, network, scheduler
from views import kept

from minikv.cache.budget import Budget
from minikv.cache.rules import Rules
from minikv.chat.eviction_config import EvictionConfig
from minikv.engine.engine import Engine
from minikv.errors import UsageError


def test_pins_beyond_the_budget_are_refused() -> None:
    run = engine(network(), "adakv", "roco", 64)
    found = refused("too small for 40 pinned ones", run.kv.pin, 40)
    assert "is 73 tokens per head" in found.hint
    run.kv.pin(31)
    run.prompt(ids(200))


@pytest.mark.parametrize(
    ("pair", "stride"),
    [
        *((pair, 0) for pair in (("pyramidkv", "roco"), ("ada-pyramid", "h2o"))),
        (("snapkv+turns", "tova"), 0),
        *((("full", step), 16) for step in "roco h2o streaming hashevict l2 random".split()),
    ],
)
def test_pinned_rows_stay_in_every_layout(pair: tuple[str, str], stride: int, part: float) -> None:
    """Budgets by layer, and prompts in blocks, count what is pinned; too little is refused."""
    net = network()
    for budget in range(20, 130, 6 if part == 1.0 else 30):
        kv = scheduler(net, pair[0], pair[1], 128)
        rules = EvictionConfig.read(*pair, 128).rules()
        try:
            kv.configure(Rules(rules.prompt, rules.step, Budget.parse(budget), stride))
            kv.pin(20)
            run = Engine(net, kv)
            run.prompt(ids(200))
        except UsageError:
            assert budget < 120
            continue
        for token in range(20):
            run.step(token)
        run.prompt(ids(60, seed=4))
        assert all({*range(20)} <= {*rows} for rows in kept(kv))
