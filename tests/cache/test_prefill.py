"""The end of a prompt: whatever fails, the old arena is as it was; on the way nothing is asked of
the device."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import small
import torch
from faults import Allocations, Fault
from layouts import HEADS, SIZE, filled, random
from spy import Spy
from torch import Tensor
from twins import contents
from views import build, kept

from minikv.cache.budget import Budget
from minikv.cache.earlier import EarlierRows
from minikv.cache.kv_cache import KVCache
from minikv.cache.prefill import Prefill
from minikv.cache.rules import Rules
from minikv.engine.engine import Engine
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import Evidence, PromptView, Scorer
from minikv.policies.parts import PromptPolicy


@pytest.mark.parametrize(
    ("prompt", "step", "budget", "windows"),
    [
        ("adakv", "roco", 40, None),
        ("full", "none", None, None),
        ("h2o", "h2o", 40, (None, 24)),
        ("full", "hashevict", 60, None),
    ],
)
def test_no_failure_changes_the_old_arena(
    prompt: str, step: str, budget: int | None, windows: tuple[int | None, ...] | None
) -> None:
    """Whichever allocation fails, in beginning, reading or ending a later prompt: position and
    rows are those of before, and the prompt can be read again."""
    net = small.network(layers=2, windows=windows)
    run, twin = (small.engine(net, prompt, step, budget) for _ in range(2))
    for each in (run, twin):
        each.prompt(small.ids(50), room=60)
        for token in small.ids(4):
            each.step(token)
    before, failed = contents(run.kv.arena), 0
    for at in itertools.chain(range(1, 40), itertools.count(40, 61)):
        try:
            with Allocations(Fault("allocation", at)):
                logits = run.prompt(small.ids(30, seed=1))
            break
        except (MemoryError, RuntimeError):
            failed += 1
            assert run.kv.position == 54
            assert not run.kv.reading
            assert contents(run.kv.arena) == before
    assert failed > 10
    assert torch.equal(logits, twin.prompt(small.ids(30, seed=1)))
    assert contents(run.kv.arena) == contents(twin.kv.arena)


def test_a_prompt_asks_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tables where it begins, for lengths and losses where it ends."""
    asked = []
    cpu = Tensor.cpu

    def listen(self: Tensor) -> Tensor:
        asked.append(self.shape)
        return cpu(self)

    net = small.network(windows=(None, 24, 60))
    kv: KVCache = small.scheduler(net, "adakv", "roco", 40)
    run = Engine(net, kv)
    run.prompt(small.ids(50))
    run.step(1)
    kv.settle()
    monkeypatch.setattr(Tensor, "cpu", listen)
    run.prompt(small.ids(30))
    assert len(asked) == 2


# -- what a policy may ask for besides --------------------------------------------------------


class Asks(Scorer):
    """Reads everything that `PromptView` has on demand; keeps the last rows."""

    evidence = Evidence(observe=5, asks=True, window=2, each_query=True, lengths=True)

    def __init__(self) -> None:
        self.seen: dict[int, PromptView] = {}
        self.given: dict[int, list[Tensor]] = {}

    def score(self, view: PromptView) -> Tensor:
        self.given[view.layer] = [*view.attention(slice(0, len(view.pos)))]
        self.seen[view.layer] = replace(view, lengths=view.lengths.clone())
        return view.pos.float()


def reading(scorer: Scorer) -> Engine:
    """An engine whose prompts this scorer judges, in chunks of 16 tokens."""
    net, policy = small.network(rows=16), PromptPolicy(name="asks", scorer=scorer)
    return Engine(net, small.over(net, Rules(policy, None, Budget.parse(20))))


@pytest.mark.parametrize("tokens", [50, 33])  # the last chunk has two tokens, or one
def test_each_query_and_the_length_of_its_input_are_shown(tokens: int) -> None:
    """The queries' attention sums to the mass; the lengths are those of the normed input."""
    scorer = Asks()
    run = reading(scorer)
    for i, layer in enumerate(run.network.layers):  # type: ignore[attr-defined]
        layer.attention_norm.fill_(1.0 + i)
    states: dict[int, list[Tensor]] = {}
    on_layer_input = Prefill._on_layer_input

    def listen(reading: Prefill, state: Tensor) -> None:
        at = len(states) - (not reading.layer_complete)
        states.setdefault(at, []).append(state.clone())
        on_layer_input(reading, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefill, "_on_layer_input", listen)
        run.prompt(small.ids(tokens))
    assert {*scorer.seen} == {*states} == {0, 1, 2}
    for at, view in scorer.seen.items():
        given = torch.stack(scorer.given[at])
        assert given.shape == (3, 2, 5, tokens)
        torch.testing.assert_close(given.sum(3), torch.ones(3, 2, 5))
        torch.testing.assert_close(given.sum(2), view.mass)
        want = torch.cat(states[at])[-5:].norm(dim=-1)
        torch.testing.assert_close(view.lengths, want)


EVEN = [20, 20, 20]


@pytest.mark.parametrize("listed", [False, True])
def test_the_first_earlier_rows_are_those_of_the_first_positions(listed: bool) -> None:
    """In any order, and fewer in a head that has lost some."""
    pos = torch.tensor([[3, 0, -1, 1], [5, -1, 2, 4]])
    column, index = torch.randn(8, 2), torch.arange(8).view(2, 4)
    key = column if listed else column.view(2, 4, 2)
    tables = (index[:, 0], index[:, 0], index[:, 0])
    held = EarlierRows(index, pos, key, key, listed, (column, column, pos), tables, False)
    for count, want in ((2, [[0, 1], [-1, -1]]), (9, [[0, 1, 3, -1], [2, 4, 5, -1]])):
        found, at = held.first(count)
        assert at.tolist() == want
        for head, place in (at >= 0).nonzero().tolist():
            row = index[head, pos[head] == at[head, place]]
            assert found[head, place].equal(column[row][0])


@pytest.mark.parametrize("kv", [None, torch.int8])
@pytest.mark.parametrize(
    ("layer", "capacity", "lengths", "free"),
    [
        *(
            (1, EVEN, lengths, free)
            for lengths in ([5, 5, 5], [5, 3, 5], [1, 5, 2], [1, 1, 1])
            for free in (None, 0, 1)
        ),
        (0, EVEN, [5, 5, 5], 0),  # the first row that there is
        (0, EVEN, [5, 5, 5], 1),
        (0, [20, 25, 15], [5, 5, 5], None),  # as many rows, but not at equal distances
        (0, EVEN, [5, 0, 1], None),
    ],
)
def test_a_prompt_attends_to_the_earlier_rows_that_are_held(
    layer: int, capacity: list[int], lengths: list[int], free: int | None, kv: torch.dtype | None
) -> None:
    """Whether heads are alike or not: to no padding, and to no row that was evicted. free: the head
    whose first row was. A head that holds nothing has no attention of its own."""
    arena = filled([60, 60], [lengths, lengths], kv)
    arena.lay(torch.tensor([capacity, capacity]))
    arena.length.copy_(torch.tensor([lengths, lengths]))
    arena.columns["pos"].copy_(torch.arange(len(arena.columns["pos"])) % 40)
    for scale in arena.scales:
        arena.columns[scale].fill_(0.01)
    if kv is None:
        arena.columns["k"] *= 0.02
    if free is not None:
        arena.free_slot[layer, free] = arena.start[layer, free]
    earlier = EarlierRows.of(Kernels(), arena, arena.layout(), layer)
    query = torch.randn(HEADS, 2, 4, SIZE, generator=random(1))
    out, lse = earlier.attention(Kernels(), query, torch.arange(50, 54), None)
    for h in range(HEADS):
        rows = torch.arange(lengths[h]) + arena.start[layer, h]
        rows = rows[rows != arena.free_slot[layer, h]]
        if len(rows):
            key, value = arena.read(Kernels(), "k", rows), arena.read(Kernels(), "v", rows)
            logits = query[h] @ key.T * SIZE**-0.5
            torch.testing.assert_close(out[h], logits.softmax(-1) @ value, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(lse[h], logits.logsumexp(-1))


class Later(Scorer):
    """Reads the moments of the queries from position 50 on."""

    evidence = Evidence(window=2, queries_from=50)

    def __init__(self) -> None:
        self.counts: list[int] = []

    def score(self, view: PromptView) -> Tensor:
        self.counts.append(view.queries.count)
        return view.pos.float()


@pytest.mark.parametrize(("tokens", "counted"), [(49, 49), (50, 50), (51, 1), (80, 30)])
def test_the_first_queries_are_counted_where_there_are_no_others(tokens: int, counted: int) -> None:
    scorer = Later()
    run = reading(scorer)
    run.prompt(small.ids(tokens))
    run.prompt(small.ids(30))
    assert scorer.counts == [counted] * 3 + [30 - max(0, 50 - tokens)] * 3


SLIDING = (24, None, 60)


@pytest.mark.parametrize(
    ("name", "windows"),
    [*((f"snapkv{part}", SLIDING) for part in ("", "+global", "+ada")), ("snapkv+global", None)],
)
def test_what_each_layer_lost_is_told(name: str, windows: tuple[int | None, ...] | None) -> None:
    """Of the attention of the last queries, the mean over a layer's heads; what slid out of a
    window was not lost."""
    made = build(name, {"window": 4, "kernel": 1})
    given: dict[int, list[dict[int, float]]] = {}

    def note(view: PromptView, scores: Tensor) -> None:
        mass = view.mass.mean(1).masked_fill(view.pos < 0, 0.0)
        mass = mass / mass.sum(1, keepdim=True)
        rows = zip(view.pos.tolist(), mass.tolist(), strict=True)
        given[view.layer] = [dict(zip(pos, row, strict=True)) for pos, row in rows]

    made = replace(made, scorer=Spy(made.scorer, note))
    net = small.network(windows=windows)
    run = Engine(net, small.over(net, Rules(made, None, Budget.parse(15))))
    for turn in range(2):
        run.prompt(small.ids(60, seed=turn))
        for layer, lost in enumerate(run.kv.state.outcome.lost):
            held = kept(run.kv)[3 * layer :][:3]
            stayed = [sum(map(given[layer][h].get, held[h])) for h in range(3)]
            assert lost == pytest.approx(1 - sum(stayed) / 3, abs=1e-5)
            assert lost > 0.01
    assert len({*run.kv.state.outcome.lost}) == 3


def test_a_layer_that_holds_nothing_has_no_earlier_rows() -> None:
    arena = filled([60, 60], [[1, 1, 1], [1, 0, 0]], None)
    arena.free_slot[1, 0] = arena.start[1, 0]
    found = [EarlierRows.of(Kernels(), arena, arena.layout(), layer) for layer in range(2)]
    assert [rows is None for rows in found] == [False, True]
