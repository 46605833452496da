"""KVCrush: its anchors. Which rows stay: see `test_selection`."""

from __future__ import annotations

import pytest
import torch
from views import build

from minikv.errors import UsageError
from minikv.policies.kvcrush import anchor


def test_kvcrush_anchors() -> None:
    marks = torch.tensor([True, False])  # what most rows have
    for kind, bits in (
        ("mean", [True, False]),
        ("inv_mean", [False, True]),
        ("zeros", [False, False]),
        ("ones", [True, True]),
        ("alternate", [False, True]),
    ):
        assert anchor(kind, marks, 0, 0).tolist() == bits, kind
    drawn = torch.stack([anchor("random", marks, 0, layer) for layer in range(400)])
    assert 0.4 < float(drawn.float().mean()) < 0.6


def test_a_bit_per_query_head_needs_attention() -> None:
    with pytest.raises(UsageError, match="bits=query needs a score from attention"):
        build("kvcrush(l2)", {"bits": "query"})
    build("kvcrush(snapkv)", {"bits": "query"})
