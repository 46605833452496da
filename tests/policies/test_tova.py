"""TOVA: one victim for all heads of a layer."""

from __future__ import annotations

import pytest
import torch

from minikv.policies.tova import layer_mean


def test_tova_judges_a_layer_as_one() -> None:
    values = torch.tensor([[1.0, 2.0, 0.0], [3.0, 5.0, 9.0], [7.0, 7.0, 7.0]])
    pos = torch.tensor([[0, 1, -1], [1, 0, 2], [0, 1, 2]])
    mean = layer_mean(torch.cat((values, values + 1)), torch.cat((pos, pos)), heads=3, context=3)
    first, second, third = 13 / 3, 4.0, 8.0  # (1 + 5 + 7) / 3, (2 + 3 + 7) / 3, (9 + 7) / 2
    wanted = [[first, second], [second, first, third], [first, second, third]]
    found = [row[: len(want)] for row, want in zip(mean.tolist(), wanted * 2, strict=True)]
    assert found[:3] == [pytest.approx(want) for want in wanted]
    assert found[3:] == [pytest.approx([n + 1 for n in want]) for want in wanted]
