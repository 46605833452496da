"""Whole prompts read with the Triton kernels keep the rows that they keep with torch."""

from __future__ import annotations

import pytest
import small
import torch
from triton_device import INTERPRETED, close

from minikv.engine.engine import Engine
from minikv.kernels.dispatch import Kernels

pytest.importorskip("triton", reason="no Triton on this system")


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
def test_prompts_read_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts and an answer between them: uneven heads, a sliding window, columns of a step
    policy. The same rows stay as with the twins."""
    from minikv.kernels.dispatch import on_gpu

    net = small.network(layers=2, heads=4, kv_heads=2, head_dim=16, windows=(None, 60), rows=16)
    logits, kept = {}, {}
    for triton in (False, True):
        kv = small.scheduler(net, "h2o+ada", "roco", 40)
        engine, found, rows = Engine(net, kv), [], []
        for turn, count in enumerate((50, 30)):
            ops = on_gpu() if triton else Kernels()
            with monkeypatch.context() as patch:
                patch.setattr(kv, "ops", ops)
                found.append(engine.prompt(small.ids(count, turn)))
            rows.append([kv.kept(layer, h).tolist() for layer in (0, 1) for h in (0, 1)])
            found += [engine.step(token) for token in small.ids(2, 7)]
        logits[triton], kept[triton] = torch.stack(found), rows
    assert kept[True] == kept[False]
    close(logits[True], logits[False], 1e-4)
