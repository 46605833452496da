"""A document that many policies read is computed once."""

from __future__ import annotations

import pytest
import torch
from small import engine, ids, network

from minikv.cache.attend import Attend
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.evaluation.measure import Shadow
from minikv.cli.evaluation.rereading import Rereading
from minikv.engine.engine import Engine
from minikv.policies import default_step, prompt_names


@pytest.mark.parametrize("windows", [None, (20, None, 30)])
def test_a_document_read_once_is_as_if_each_had_read_it(
    windows: tuple[int | None, ...] | None,
) -> None:
    """Bit for bit, for every prompt policy: what is kept, the logits, those of a second prompt."""
    net, forwards = network(windows=windows), 0

    class Counted:
        def forward(self, tokens: torch.Tensor, kv: Attend) -> torch.Tensor:
            nonlocal forwards
            forwards += len(tokens) == 150
            return net.forward(tokens, kv)

    kv = engine(net).kv
    shared = Engine(Rereading(Counted(), kv), kv)
    names = [*prompt_names(), "h2o+ada+pyramid", "kvcrush(h2o)", "snapkv+critical+turns"]
    for name in names:
        alone = engine(net, name, default_step(name), 40)
        shared.reset()
        kv.configure(*EvictionConfig.read(name, budget=40).policies())
        for tokens in (ids(150), ids(20, seed=7)):
            assert torch.equal(alone.prompt(tokens), shared.prompt(tokens)), name
            for layer in range(3):
                for head in range(kv.shape.kv_heads):
                    assert torch.equal(alone.kv.kept(layer, head), kv.kept(layer, head)), name
            assert torch.equal(alone.step(5), shared.step(5)), name
    assert 1 < forwards < len(names) // 2


def test_loss_is_the_same_however_the_document_was_read() -> None:
    """The shadow given the keys, and the shadow that saw them pass."""
    net = network()
    kv = engine(net, "snapkv", "roco", 40).kv
    lost = []
    for given in (False, True):
        shared = Rereading(net, kv)
        Engine(shared, kv).reset()
        if given:
            Engine(shared, kv).prompt(ids(100))
            shadow = Shadow(kv, shared.keys())
        else:
            shadow = Shadow(kv)
            kv.begin(100)
            net.forward(torch.tensor(ids(100)), shadow)
        for token in range(5):
            net.forward(torch.tensor([token]), shadow)
        lost.append(torch.stack(shadow.lost))
    assert torch.equal(*lost)
    assert float(lost[0].min()) > 0.0
