"""What the rows under the budget lose, beside a slow computation that is obviously right."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
import small
import torch
from layouts import segment
from refusals import failing
from test_no_host_sync import FAR, GROUP, HEADS, SIZE, far, without_waiting
from tiers import served, tiered
from twins import contents
from views import kept

from minikv import policies
from minikv.cache.arena import Arena
from minikv.cache.budget import Budget
from minikv.cache.fidelity import Fidelity, LastToken, compared, divergence
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.engine.engine import Engine
from minikv.kernels.dispatch import Kernels
from minikv.models.llama import Llama

TOKENS = 150


class Kept:
    """`Attend` for one token in plain loops: over the rows that each head of a cache kept, whose
    keys and values are copied, the token's own row once."""

    def __init__(self, run: Engine) -> None:
        kv = run.kv
        self.shape, self.position = kv.shape, kv.position - 1
        self.rows = {}
        for layer in range(kv.shape.layers):
            for head in range(kv.shape.kv_heads):
                at = segment(kv.arena, "pos", layer, head).tolist()
                begin = int(kv.arena.start[layer, head])
                index = torch.arange(begin, begin + len(at))
                k, v = (kv.arena.read(kv.ops, name, index).clone() for name in "kv")
                self.rows[layer, head] = [
                    (p, k[i], v[i]) for i, p in enumerate(at) if p != self.position
                ]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = {
            head: [*self.rows[layer, head], (self.position, k[0, head], v[0, head])]
            for head in range(self.shape.kv_heads)
        }
        return self.mixed(layer, q[0], rows)[None]

    def mixed(self, layer: int, q: torch.Tensor, rows: dict) -> torch.Tensor:
        window = self.shape.windows[layer] or 1 << 30
        group = self.shape.heads // self.shape.kv_heads
        out = []
        for head in range(self.shape.heads):
            seen = [r for r in rows[head // group] if r[0] > self.position - window]
            logits = torch.stack([q[head] @ key / math.sqrt(len(key)) for _, key, _ in seen])
            weights = torch.softmax(logits, 0)
            out.append(sum(w * value for w, (_, _, value) in zip(weights, seen, strict=True)))
        return torch.stack(out)

    def advance(self, tokens: int) -> None:
        pass


class Tap:
    """The network, which notes the last token's query and output of attention in each layer."""

    def __init__(self, net: Llama) -> None:
        self.net = net
        self.last: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, ids: torch.Tensor, kv: object) -> torch.Tensor:
        tap, last = kv, self.last

        class Noted:
            position = tap.position

            def attend(self, layer, q, k, v):
                out = tap.attend(layer, q, k, v)
                last[layer] = q[-1].clone(), out[-1].clone()
                return out

            def advance(self, tokens):
                tap.advance(tokens)

        return self.net.forward(ids, Noted())


def slow(net: Llama, run: Engine, ids: list[int]) -> tuple[float, list[float]]:
    """KL(full || hot) and the error of each layer, from a cache that evicts nothing."""
    tap = Tap(net)
    full = Engine(tap, small.scheduler(net)).prompt(ids)
    rows = Kept(run)
    hot = net.forward(torch.tensor(ids[-1:]), rows)
    p, q = torch.softmax(full.double(), 0), torch.softmax(hot.double(), 0)
    kl = float(sum(a * (a.log() - b.log()) for a, b in zip(p, q, strict=True)))
    errors = []
    for layer in range(net.config.layers):
        query, exact = tap.last[layer]
        mine = {}
        for head in range(net.config.kv_heads):
            at = segment(run.kv.arena, "pos", layer, head).tolist()
            k = segment(run.kv.arena, "k", layer, head)
            v = segment(run.kv.arena, "v", layer, head)
            mine[head] = list(zip(at, k, v, strict=True))
        near = rows.mixed(layer, query, mine)
        errors.append(float((near - exact).norm() / exact.norm()))
    return kl, errors


@pytest.mark.parametrize(
    ("policy", "windows", "budget"),
    [
        *((policy, None, 48) for policy in served()),
        *(("adakv", windows, 37) for windows in ((None, 40), (40, 40))),
    ],
)
def test_the_figures_are_those_of_a_slow_computation(
    policy: str, windows: tuple[int | None, ...] | None, budget: int
) -> None:
    net = small.network(layers=2, windows=windows)
    run = tiered(small.engine(net, policy, "roco", budget))
    ids = small.ids(TOKENS)
    found = run.fidelity(ids[-1], run.recall(ids), small.VOCAB)
    kl, errors = slow(net, run, ids)
    assert kl > 1e-4
    assert found.kl_first_token == pytest.approx(kl, rel=1e-3, abs=1e-6)
    assert found.output_error_mean == pytest.approx(sum(errors) / 2, rel=1e-4)
    assert found.output_error_max == pytest.approx(max(errors), rel=1e-4)
    assert found.output_error_layer == errors.index(max(errors))


@pytest.mark.parametrize("policy", ["l2", "snapkv"])
def test_a_later_question_and_heads_without_the_tokens_row(policy: str) -> None:
    """A policy that protects no window may drop the row of the last token itself."""
    net = small.network(layers=2)
    least = {"recent": 0, "sinks": 0} if policy == "l2" else {}
    run = tiered(small.engine(net, policy, "none", 48 - 36 * len(least) // 2, prompt_options=least))
    ids = small.ids(TOKENS)
    run.recall(list(ids))
    for token in (3, 4):
        run.step(token)
    ids += [3, 4, *small.ids(9, seed=7)]
    found = run.fidelity(ids[-1], run.recall(ids), small.VOCAB)
    own = [len(ids) - 1 in rows for rows in kept(run.kv)]
    assert all(own) == (policy == "snapkv")
    kl, errors = slow(net, run, ids)
    assert found.kl_first_token == pytest.approx(kl, rel=1e-3, abs=1e-6)
    assert found.output_error_mean == pytest.approx(sum(errors) / 2, rel=1e-4)


@pytest.mark.parametrize("kv", [None, torch.int8])
@pytest.mark.parametrize("policy", ["adakv", "l2"])
def test_measuring_changes_no_bit(policy: str, kv: torch.dtype | None) -> None:
    net = small.network(layers=2)
    rules = Rules(policies.prompt_policy(policy), policies.step_policy("roco"), Budget.parse(48))
    run, plain = (tiered(Engine(net, small.over(net, rules, kv=kv))) for _ in range(2))
    ids = small.ids(TOKENS)
    logits, same = run.recall(list(ids)), plain.recall(list(ids))
    before = contents(run.kv.arena)
    found = run.fidelity(ids[-1], logits, small.VOCAB)
    assert found.kl_first_token is not None
    assert contents(run.kv.arena) == before == contents(plain.kv.arena)
    assert torch.equal(logits, same)
    for token in small.ids(12, seed=5):
        assert torch.equal(run.step(token), plain.step(token))


def test_an_error_in_the_middle_changes_no_bit() -> None:
    net = small.network(layers=2)
    run = tiered(small.engine(net, "adakv", "roco", 48))
    ids = small.ids(TOKENS)
    run.recall(ids)
    before = contents(run.kv.arena)
    last = LastToken(run.kv.shape, run.kv.arena, TOKENS - 1, run.kv.ops)

    last._ops = Mock(ragged_attention=failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        net.forward(torch.tensor(ids[-1:]), last)
    assert contents(run.kv.arena) == before


def test_what_lost_nothing_is_zero_and_measuring_without_memory_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = small.network(layers=2)
    run = tiered(small.engine(net, "adakv", "roco", 400))
    ids = small.ids(TOKENS)
    found = run.fidelity(ids[-1], run.recall(ids), small.VOCAB)
    assert (found.kl_first_token, found.output_error_max) == (0.0, 0.0)
    run = tiered(small.engine(net, "adakv", "roco", 48))
    logits = run.recall(ids)

    with monkeypatch.context() as patch:
        patch.setattr(LastToken, "output_errors", failing(MemoryError()))
        with pytest.raises(MemoryError):
            run.fidelity(ids[-1], logits, small.VOCAB)
    run.step(3)  # the chat continues, and the notes about the prompt are freed
    assert run.kv.last_token() is None


def test_the_divergence_of_known_distributions() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    want = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert float(divergence(p.log(), q.log())) == pytest.approx(want, abs=1e-6)
    assert float(divergence(p.log() + 3, p.log())) == pytest.approx(0.0, abs=1e-6)
    assert compared(p.log(), q.log(), torch.tensor([torch.nan])) == Fidelity()  # not measured


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("kv", [None, torch.int8])
def test_no_layer_waits_for_the_device(kv: torch.dtype | None, held: bool) -> None:
    shape = Shape(2, HEADS, HEADS * GROUP, SIZE, (None, 40), 4096)
    arena = Arena(2, HEADS, SIZE, torch.float32, FAR, {}, kv=kv, rows=[90, 90])
    last = object.__new__(LastToken)  # what is read once, when it is made
    last.shape, last.arena, last.position, last._ops = shape, arena, 149, Kernels()
    last.width, last._all_held = 32, held
    last._slot = far(2, HEADS, dtype=torch.int64)
    last._held = far(2, HEADS, dtype=torch.bool)
    last._oldest = far(2, dtype=torch.int64)
    with without_waiting():
        for layer in range(2):
            q, k = far(1, HEADS * GROUP, SIZE), far(1, HEADS, SIZE)
            assert last.attend(layer, q, k, k).shape == (1, HEADS * GROUP, SIZE)
        exact = [(q[0], q[0]), (q[0], q[0])]
        assert last.output_errors(exact).shape == (2,)
        divergence(far(97), far(97))
