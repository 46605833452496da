"""Keys and values kept as int8 with a scale per row: what is stored, its cost and its loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from refusals import refused
from small import PAIRS, by_day, engine, ids, network
from torch import Tensor

import minikv
from minikv import kernels
from minikv.engine.engine import Engine
from minikv.kernels.decode import plain_cpu as decode_cpu

int8 = partial(engine, kv=torch.int8)


def coded(run: Engine) -> dict[tuple[int, int, int], tuple[bytes, float]]:
    """(layer, head, position) -> the codes and the scale of the key held there."""
    arena, found = run.kv.arena, {}
    for layer in range(len(arena.start)):
        index, live = arena.index(layer)
        for h in range(arena.heads):
            for row in index[h, live[h]].tolist():
                at = layer, h, int(arena.columns["pos"][row])
                key = arena.columns["k"][row].numpy().tobytes()
                found[at] = key, float(arena.columns["k_scale"][row])
    return found


@pytest.mark.parametrize("attend", [kernels.ragged_attention, decode_cpu.ragged_attention])
def test_float16_does_not_overflow_before_the_scale(attend: Callable[..., Any]) -> None:
    q, k = torch.full((1, 1, 128), 5.0).half(), torch.ones(3, 128).half()
    codes, scale = kernels.to_codes(k)  # 127 x 5 x 128 is more than float16 holds
    start, length = torch.tensor([0]), torch.tensor([3])
    got, _ = attend(q, kernels.Segments(codes, codes, start, length, 3, None, None, scale, scale))
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, torch.ones(1, 1, 128).half(), atol=1e-3, rtol=0)


def test_a_row_of_zeros_stays_zero_and_nan_stays_nan() -> None:
    x = torch.tensor([[0.0, 0.0], [float("nan"), 1.0]])
    back = kernels.from_codes(*kernels.to_codes(x), torch.float32)
    assert back[0].tolist() == [0.0, 0.0]
    assert back[1].isnan().all()


@pytest.mark.parametrize(("prompt", "step"), by_day(PAIRS))
def test_three_turns_under_every_pair(prompt: str, step: str) -> None:
    """Nothing unwritten is read, and a row's codes are those it was born with."""
    run = int8(network(windows=(30, None, None)), prompt, step, 48)
    before: dict[tuple[int, int, int], tuple[bytes, float]] = {}
    for turn in range(3):
        assert run.prompt(ids(90 - 40 * (turn > 0), seed=turn)).isfinite().all()
        for answer in ([], ids(9, seed=turn)):
            for token in answer:
                assert run.step(token).isfinite().all()
            now = coded(run)
            assert all(before[at] == now[at] for at in before.keys() & now.keys())
        before = now


def test_a_step_policy_that_reads_prompts_goes_on_too() -> None:
    run = int8(network(), "full", "h2o", 40, stride=8)
    for turn in range(2):
        assert run.prompt(ids(60, seed=turn)).isfinite().all()
        assert run.step(3).isfinite().all()


def logits(run: Engine) -> Tensor:
    run.prompt(ids(200))
    return torch.stack([run.step(token) for token in ids(5, seed=1)])


def test_the_loss_is_small_and_there() -> None:
    """A prompt is mixed before its rows are stored; an answer sees codes."""
    net = network(layers=2)
    exact, got = logits(engine(net, budget=48)), logits(int8(net, budget=48))
    error = float((got - exact).norm() / exact.norm())
    assert 0 < error < 0.02


def test_the_bytes_are_counted_as_they_are() -> None:
    net = network(head_dim=8)
    for kv, row in ((torch.int8, 2 * 8 + 8 + 4), (None, 2 * 8 * 4 + 4)):
        run = engine(net, "snapkv", "none", 48, kv=kv)
        run.prompt(ids(100))
        stats = run.kv.stats()
        assert stats.held_bytes == 3 * 3 * 48 * row
        assert stats.full_bytes == 3 * 3 * 100 * (2 * 8 * 4 + 4)  # in the network's dtype
        assert stats.state_bytes == 0
        assert stats.allocated_bytes >= stats.held_bytes


def test_a_snapshot_holds_the_codes_and_another_dtype_refuses_them() -> None:
    net = network()
    run = int8(net, "adakv", "roco", 48)
    run.prompt(ids(90))
    held = run.kv.snapshot()
    want = [run.step(token) for token in ids(4, seed=1)]
    kv = run.kv
    kv.restore(held, kv.rules)
    assert all(torch.equal(run.step(t), w) for t, w in zip(ids(4, seed=1), want, strict=True))
    other = engine(net, "adakv", "roco", 48).kv
    with pytest.raises(ValueError):
        other.restore(held, other.rules)


def test_a_chat_with_codes_says_so_and_holds_about_half() -> None:
    said, records = [], []
    for kv in ("auto", "int8"):
        chat = minikv.load(budget=256, kv=kv)
        chat.attach("The mill is run by Anna. " * 60, name="mill.txt")
        said.append("".join(chat.ask("Who runs the mill?", max_tokens=8)))
        records.append(chat.report)
    assert [record.kv_dtype for record in records] == [records[0].dtype, "int8"]
    assert records[0].kv_bytes.full == records[1].kv_bytes.full
    wide, narrow = (r.kv_bytes.held - r.kv_bytes.policy_state for r in records)
    size, item = 64, 4 if records[0].dtype == "float32" else 2
    assert narrow / wide == pytest.approx((2 * size + 8 + 4) / (2 * size * item + 4), rel=0.02)
    assert said[0] == said[1]


def test_what_cannot_be_kept_is_refused() -> None:
    refused("int3", minikv.load, kv="int3")
