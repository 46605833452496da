"""Pinned rows stay, whatever the policy."""

from __future__ import annotations

import pytest
from small import engine, ids, network, scheduler

from minikv.cache.budget import Budget
from minikv.cache.rules import Rules
from minikv.chat.eviction_config import EvictionConfig
from minikv.engine.engine import Engine
from minikv.errors import UsageError


def test_pins_beyond_the_budget_are_refused() -> None:
    run = engine(network(), "adakv", "roco", 64)
    with pytest.raises(UsageError) as refused:
        run.kv.pin(40)
    assert "too small for 40 pinned ones" in str(refused.value)
    assert "is 73 tokens per head" in refused.value.hint
    run.kv.pin(31)
    run.prompt(ids(200))


@pytest.mark.parametrize(
    ("pair", "stride"),
    [
        (("pyramidkv", "roco"), 0),
        (("ada-pyramid", "h2o"), 0),
        (("snapkv+turns", "tova"), 0),
        (("full", "roco"), 16),
        (("full", "h2o"), 16),
        (("full", "streaming"), 16),
        (("full", "hashevict"), 16),
        (("full", "l2"), 16),
        (("full", "random"), 16),
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
        for layer in range(3):
            for head in range(3):
                assert set(range(20)) <= set(kv.kept(layer, head).tolist())
