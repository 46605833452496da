"""ScissorHands: how many of the last queries gave a row little."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts import segment
from small import ids, network, over, scheduler, victims
from torch import Tensor
from views import asked, looked

from minikv.chat.eviction_config import EvictionConfig
from minikv.engine.engine import Engine
from minikv.policies.scissorhands import ScissorHands
from minikv.policies.selection import ones


@pytest.mark.parametrize("window", [5, 63, 64, 65, 128, 129])
def test_scissorhands_counts_the_last_queries(window: int) -> None:
    """C1: the shift register against an explicit recount, rows joining along the way."""
    step = ScissorHands(sinks=4, recent=10, history=window)
    rows, generator = 12, torch.Generator().manual_seed(5)
    columns = {name: torch.zeros(rows, dtype=dtype) for name, dtype in step.columns.items()}
    history: list[Tensor] = []
    for i in range(140):
        p = torch.rand(rows, generator=generator)
        seen = torch.full((rows,), 2.0)
        if i == 60:  # row 3 is overwritten by a newcomer
            for column in columns.values():
                column[3] = 0
            for bits in history:
                bits[3] = False
        step.update(columns, p, lambda seen=seen: seen)  # type: ignore[misc]
        history.append(p < 0.5)
        want = torch.stack(history[-window:]).sum(0)
        words = [column for name, column in columns.items() if name.startswith("bits")]
        assert torch.stack([ones(word) for word in words]).sum(0).tolist() == want.tolist()
        assert columns["lows"].tolist() == want.tolist()
    assert columns["queries"][0] == min(140, window)
    assert columns["queries"][3] == min(80, window)


def test_scissorhands_takes_uniform_attention_for_enough() -> None:
    """C2: exactly a uniform share is not below it, for any number of rows."""
    step = ScissorHands(sinks=4, recent=10, history=50)
    for rows in range(1, 400):
        columns = {name: torch.zeros(rows, dtype=dtype) for name, dtype in step.columns.items()}
        seen = torch.full((rows,), float(rows))
        step.update(columns, torch.full((rows,), 1.0 / rows), lambda seen=seen: seen)  # type: ignore[misc]
        assert int(columns["bits0"].sum()) == 0, rows


@pytest.mark.parametrize(
    ("tokens", "history"), [(90, 400), (90, 20), (90, 64), (90, 65), (20, 400), (12, 400)]
)
def test_scissorhands_counts_a_prompts_last_queries(tokens: int, history: int) -> None:
    """Every one of them for itself, and a row only from its own query on."""
    options: dict[str, object] = {"history": history}
    net, seen = network(), [list[Tensor](), list[Tensor](), list[Tensor]()]
    kv = scheduler(net, "full", "scissorhands", 512, step_options=options)
    attend = kv.attend

    def listen(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen[layer].append(torch.cat((q, k), 1))
        return attend(layer, q, k, v)

    kv.attend = listen  # type: ignore[method-assign]
    Engine(net, kv).prompt(ids(tokens))
    last, arena = min(32, history, tokens), kv.arena
    for layer in range(3):
        query, key = torch.cat(seen[layer]).split((6, 3), 1)
        logits = torch.einsum("thgd,nhd->hgtn", query.unflatten(1, (3, 2)), key) * 8**-0.5
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        p = logits.masked_fill(hidden, -torch.inf).softmax(-1).mean(1)
        low = (p < 1.0 / torch.arange(1, tokens + 1)[:, None]) & ~hidden
        below = low[:, tokens - last :].sum(1)
        for head in range(3):
            order = segment(arena, "pos", layer, head).long()
            words = [segment(arena, n, layer, head) for n in arena.extra if n.startswith("bits")]
            found = torch.stack([ones(word.long()) for word in words]).sum(0)
            assert found.tolist() == below[head, order].tolist()
            assert segment(arena, "lows", layer, head).tolist() == found.tolist()
            able = (tokens - order).clamp(max=last)
            assert segment(arena, "queries", layer, head).long().tolist() == able.tolist()


def test_scissorhands_counts_relative_to_a_rows_age() -> None:
    """6 of 10 queries gave the first row little, 3 of 4 the second, 9 of 20 the third."""
    step = ScissorHands(sinks=0, recent=1, history=32)
    below = torch.tensor([[6.0, 3.0, 9.0, 0.0]])
    queries = torch.tensor([[10.0, 4.0, 20.0, 1.0]])
    columns = {"lows": below, "queries": queries}
    seen = asked(step, 13, torch.tensor([[3, 9, 1, 12]]), columns)
    scores = step.worth(seen)
    torch.testing.assert_close(scores, torch.tensor([[-0.6, -0.75, -0.45, torch.inf]]))
    assert victims(step, seen).tolist() == [1]


def test_beside_a_prompt_policy_with_scores_of_its_own() -> None:
    """A short prompt under kvzip: its scores are carried beside the words, and are no word."""
    net = network(layers=2)
    kv = over(net, EvictionConfig.read("kvzip", "scissorhands", 200).rules())
    run = Engine(net, kv)
    for count in (30, 40, 300):
        assert bool(torch.isfinite(run.prompt(ids(count))).all())
        assert bool(torch.isfinite(run.step(3)).all())


def test_queries_of_earlier_turns_are_not_counted_again() -> None:
    """A conversation that is read again shows 32 queries, of which four are the last turn's; of
    those a row has only the ones from its own on. What was counted before moves up."""
    step = ScissorHands(sinks=0, recent=1, history=70)
    pos = torch.tensor([[3, 96, 98, 99, -1]])
    given = replace(looked(torch.zeros(1, 1, 1, 5), pos=pos), mass=None, squares=None)
    below = torch.full_like(pos, (1 << 32) - 1)
    seen = replace(given, turns=[(0, 96), (96, 100)], below=lambda: below)
    old = {
        "bits0": torch.tensor([[0b101, 0, 0, 0, 0]]),
        "bits1": torch.zeros(1, 5, dtype=torch.int64),
        "queries": torch.tensor([[39.0, 0.0, 0.0, 0.0, 0.0]]),
    }
    found = step.init(replace(seen, carried=old))
    assert found["bits0"].tolist()[0][:4] == [0b1011111, 0b1111, 0b11, 0b1]
    old["bits0"][0, 0] |= (0b1011 << 60) - (1 << 64)
    moved = step.init(replace(seen, carried=old))
    assert [moved["bits0"][0, 0], moved["bits1"][0, 0]] == [0b1011111, 0b1011]
    assert found["bits1"].tolist()[0][:4] == [0, 0, 0, 0]
    assert found["queries"].tolist()[0][:4] == [43.0, 4.0, 2.0, 1.0]


def test_ones_counts_the_bits_of_a_word() -> None:
    numbers = [0, 1, 0xFFFFFFFF, 0x80000000, 0x12345678, 0xDEADBEEF, (1 << 63) - 1, 0x5A << 55]
    assert ones(torch.tensor(numbers)).tolist() == [n.bit_count() for n in numbers]
    assert ones(torch.tensor([-1, -(1 << 63)])).tolist() == [64, 1]
