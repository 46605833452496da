"""Random networks, minikv as a system that is measured, and transformers beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import networks, systems
from minikv.cli.bench.systems import Cached, Transformers

TINY = networks.find("tiny")
FULL = EvictionConfig.read("full", "none")


def test_random_weights_are_finite_and_no_two_heads_are_alike() -> None:
    net = networks.network(networks.Spec(TINY, dtype="float32"))
    for name, tensor in net.tensors():
        assert bool(tensor.isfinite().all())
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all())
        else:
            assert 0.015 < float(tensor.std()) < 0.025
    named = dict(net.tensors())
    first, second = (named[f"model.layers.{i}.self_attn.q_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first[:16], first[16:32])


def test_a_block_that_is_smaller_than_a_matrix_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "_BLOCK", 97)
    net = networks.plain(networks.Spec(TINY, dtype="float32"))
    flat = dict(net.tensors())["lm_head.weight"].view(-1)
    assert torch.equal(flat[:97], flat[97:194])
    assert torch.equal(flat[: len(flat) % 97], flat[-(len(flat) % 97) :])
    assert bool((flat != 0).any())


def test_step_bytes_leave_the_input_embedding_out_unless_it_is_the_head() -> None:
    net = networks.network(networks.Spec(TINY))
    assert net.weight_bytes == 2 * TINY.parameters
    assert networks.step_bytes(net) == 2 * (TINY.parameters - TINY.vocab * TINY.hidden)
    tied = replace(TINY, tied=True)
    net = networks.network(networks.Spec(tied))
    assert networks.step_bytes(net) == net.weight_bytes == 2 * tied.parameters


def test_no_step_is_launched_beyond_those_that_are_timed() -> None:
    cached, asked = Cached(networks.network(networks.Spec(TINY)), FULL), list[bool]()
    cached.read(networks.prompt(16, TINY.vocab))
    step = cached.engine.next

    def noted(*args: object, ahead: bool) -> int:
        asked.append(ahead)
        return step(*args, ahead=ahead)  # type: ignore[arg-type]

    cached.engine.next = noted  # type: ignore[method-assign]
    cached.write(3)
    assert asked == [True, True, False]
    assert cached.engine.kv.position == 16 + 3


@pytest.mark.skipif(not systems.installed(), reason="transformers is not there")
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_with_the_same_weights(tied: bool) -> None:
    spec = networks.Spec(replace(TINY, tied=tied), dtype="float32")
    theirs, ours = Transformers(spec), Cached(networks.network(spec), FULL)
    ids = networks.prompt(70, TINY.vocab)
    with torch.inference_mode():
        logits = theirs.model(torch.tensor([ids])).logits[0, -1]
    assert torch.allclose(ours.engine.prompt(ids), logits, atol=1e-5)
    for system in (theirs, ours):
        system.read(ids)
        system.write(3)
    assert theirs._cache.get_seq_length() == 73
    assert ours._token == int(theirs._token)  # greedy both
