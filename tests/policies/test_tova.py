"""TOVA: one victim for all heads of a layer."""

from __future__ import annotations

import torch
from small import engine, ids, network

from minikv.policies.tova import layer_mean


def test_tova_judges_a_layer_as_one() -> None:
    values = torch.tensor([[1.0, 2.0, 0.0], [3.0, 5.0, 9.0], [7.0, 7.0, 7.0]])
    pos = torch.tensor([[0, 1, -1], [1, 0, 2], [0, 1, 2]])
    layer = torch.tensor([0, 0, 1])
    mean = layer_mean(values, pos, layer)
    assert mean[0, :2].tolist() == [3.0, 2.5]
    assert mean[1].tolist() == [2.5, 3.0, 9.0]
    assert mean[2].tolist() == [7.0] * 3


def test_tova_keeps_the_heads_of_a_layer_alike() -> None:
    net = network()
    run = engine(net, "tova", "tova", 40)
    run.prompt(ids(100))
    for token in range(30):
        run.step(token)
    for layer in range(3):
        held = [run.kv.kept(layer, h).tolist() for h in range(3)]
        assert held[0] == held[1] == held[2]
        assert len(held[0]) == 40
        assert held[0][-1] == run.kv.position - 1
