"""A document that many policies read is computed once."""

from __future__ import annotations

import pytest
import torch
from pairwise import some_by_day
from small import engine, ids, network

from minikv.cache.attend import Attend
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.eval.passes import Rereading
from minikv.engine.engine import Engine
from minikv.policies import default_step, prompt_names


@pytest.mark.parametrize("windows", some_by_day([None, (20, None, 30)], bool))
def test_a_document_read_once_is_as_if_each_had_read_it(
    windows: tuple[int | None, ...] | None,
) -> None:
    """Bit for bit, for every prompt policy: what is kept, the logits, those of a second prompt."""
    net, forwards = network(windows=windows), 0

    class Counted:
        rows = net.rows

        def forward(self, tokens: torch.Tensor, kv: Attend) -> torch.Tensor:
            nonlocal forwards
            forwards += len(tokens) == 150
            return net.forward(tokens, kv)

        hidden, logits = staticmethod(net.hidden), staticmethod(net.logits)

    kv = engine(net).kv
    shared = Engine(Rereading(Counted(), kv), kv)
    names = [*prompt_names(), "h2o+ada+pyramid", "kvcrush(h2o)", "snapkv+critical+turns"]
    names += ["queryspan+global"]
    for name in names:
        alone = engine(net, name, default_step(name), 40)
        shared.reset()
        kv.configure(EvictionConfig.read(name, budget=40).rules())
        for tokens in (ids(150), ids(20, seed=7)):
            assert torch.equal(alone.prompt(tokens), shared.prompt(tokens)), name
            for layer in range(3):
                for head in range(kv.shape.kv_heads):
                    assert torch.equal(alone.kv.kept(layer, head), kv.kept(layer, head)), name
            assert torch.equal(alone.step(5), shared.step(5)), name
    assert 1 < forwards < len(names) // 2


@pytest.mark.parametrize("decode", ["none", "roco"])
def test_a_document_is_repeated_once_for_all_budgets(decode: str) -> None:
    """Bit for bit: what is kept under each budget, and the logits of the prompt and of a question;
    other options and other tokens have a pass of their own."""
    net = network(windows=(None, 40, None))
    kv, texts = engine(net).kv, 0

    class Counted:
        rows = net.rows

        def forward(self, tokens: torch.Tensor, kv: Attend) -> torch.Tensor:
            nonlocal texts
            texts += len(tokens) > 20 and kv.position in (0, 150)
            return net.forward(tokens, kv)

    shared = Engine(Rereading(Counted(), kv), kv)  # type: ignore[arg-type]
    for seed in (1, 2):
        for name, budget, options in (
            ("kvzip", 20, {}),
            ("kvzip", 30, {}),
            ("kvzip+uniform", 30, {}),
            ("kvzip+", 30, {}),
            ("kvzip", 30, {"chunk": 60}),
            ("kvzip", 40, {}),
        ):
            alone = engine(net, name, decode, budget, prompt_options=options)
            shared.reset()
            kv.configure(EvictionConfig.read(name, decode, budget, options).rules())
            for tokens, asks in ((ids(150, seed=seed), False), (ids(9), True)):
                got = shared.prompt(tokens, None, 256, asks)
                assert torch.equal(alone.prompt(tokens, None, 256, asks), got), name
                for layer in range(3):
                    for head in range(kv.shape.kv_heads):
                        assert torch.equal(alone.kv.kept(layer, head), kv.kept(layer, head)), name
            assert torch.equal(alone.step(5), shared.step(5)), name
    # Read once; repeated for kvzip, for kvzip+, and in three chunks.
    assert texts == 2 * (1 + 1 + 1 + 3)
