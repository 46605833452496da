"""A prompt that is read twice before anything leaves, against a full softmax with all masks."""

from __future__ import annotations

import itertools
import math
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layouts import segment
from pairwise import pairwise
from refusals import refused
from small import ids, network, over
from spy import Spy
from torch import Tensor
from twins import contents
from views import build, kept

from minikv import policies
from minikv.cache.budget import Budget
from minikv.cache.rules import Rules
from minikv.cache.tier import Tier
from minikv.cache.tier_file import FileRows, Header
from minikv.cache.tier_rows import TierError, columns_of
from minikv.engine.engine import Engine
from minikv.errors import ContextError
from minikv.models.llama import Llama
from minikv.policies.base import PromptView
from minikv.policies.repeats import Wording

WORDS = Wording((7, 8), (9, 7, 3), (5,))


class Listening:
    """A network's rows, and the lengths of each layer's input, as they pass by."""

    def __init__(self, net: Llama) -> None:
        self.net, self.forward = net, net.forward
        self.texts: list[list[int]] = []
        self.rows: list[list[tuple[Tensor, Tensor, Tensor]]] = []  # by text and layer: q, k, v
        self.inputs: list[list[Tensor]] = []
        net.forward = self._heard  # type: ignore[method-assign]

    def _heard(self, tokens: Tensor, kv: object) -> Tensor:
        layers = self.net.config.layers
        heard: list[list[tuple[Tensor, ...]]] = [[] for _ in range(layers)]
        states: list[list[Tensor]] = [[] for _ in range(layers)]
        outer, now = self, [0]

        class Between:
            position = kv.position  # type: ignore[attr-defined]
            advance = kv.advance  # type: ignore[attr-defined]

            def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                heard[layer].append((q.clone(), k.clone(), v.clone()))
                states[layer].append(now[0].clone())  # type: ignore[attr-defined]
                return kv.attend(layer, q, k, v)  # type: ignore[attr-defined, no-any-return]

            def on_layer_input(self, normed: Tensor) -> None:
                now[0] = normed  # type: ignore[call-overload]
                inner = kv.on_layer_input  # type: ignore[attr-defined]
                if inner is not None:
                    inner(normed)

        out = self.forward(tokens, Between())  # type: ignore[arg-type]
        outer.texts.append(tokens.tolist())
        outer.rows.append([tuple(map(torch.cat, zip(*each, strict=True))) for each in heard])  # type: ignore[misc]
        outer.inputs.append([torch.cat(each).double().norm(dim=-1) for each in states])
        return out


def made(
    net: Llama,
    name: str,
    budget: int,
    step: str = "none",
    *,
    kv: torch.dtype | None = None,
    words: Wording = WORDS,
    **options: object,
) -> tuple[Engine, dict[int, PromptView]]:
    policy = build(name, options)
    seen: dict[int, PromptView] = {}

    def note(view: PromptView, scores: Tensor) -> None:
        seen[view.layer] = replace(view, peak=None if view.peak is None else view.peak + 0)

    policy = replace(policy, scorer=Spy(policy.scorer, note))
    cache = over(net, Rules(policy, policies.step_policy(step), Budget.parse(budget)), kv=kv)
    cache.words = words
    return Engine(net, cache), seen


def texts(prompt: list[int], first: int, chunk: int, overlap: int = 8) -> list[list[int]]:
    """What is fed to score a prompt: written out."""
    found = []
    for begin in range(first, len(prompt), chunk):
        if begin == first:
            request = [7, 8]
        else:
            request = [9, 7, 3, *prompt[max(first, begin - overlap) : begin]]
        found.append([*request, 5, *prompt[begin : begin + chunk]])
    return found


def oracle(
    net: Llama, heard: Listening, tokens: int, first: int, chunk: int, plus: bool
) -> list[Tensor]:
    """By layer, float64 [H, N]: the scores of a first prompt, from all that was heard of it."""
    config, found = net.config, []
    for layer in range(config.layers):
        window = config.windows[layer] or 10**9
        worth = torch.zeros(config.kv_heads, tokens, dtype=torch.float64)
        _, k, v = heard.rows[0][layer]
        for i, begin in enumerate(range(first, tokens, chunk)):
            end = min(tokens, begin + chunk)
            q, own, _ = heard.rows[1 + i][layer]
            many = len(q)
            keys = torch.cat((k[:first], k[begin:end], own)).double()
            key_at = torch.cat(
                (torch.arange(first), torch.arange(begin, end), torch.arange(tokens, tokens + many))
            )
            at = torch.arange(tokens, tokens + many)
            distance = at[:, None] - key_at
            hidden = (distance < 0) | (distance >= window)
            for head in range(config.heads):
                h = head // (config.heads // config.kv_heads)
                logits = q[:, head].double() @ keys[:, h].T / math.sqrt(config.head_dim)
                p = logits.masked_fill(hidden, -math.inf).softmax(-1)[
                    :, first : first + end - begin
                ]
                if plus:
                    matrix = net.layers[layer].out.dense().double()  # [hidden, heads * D]
                    part = matrix[:, head * config.head_dim : (head + 1) * config.head_dim]
                    p = p * (v[begin:end, h].double() @ part.T).norm(dim=-1)
                    p = p / heard.inputs[1 + i][layer][:, None]
                worth[h, begin:end] = torch.maximum(worth[h, begin:end], p.amax(0))
        found.append(worth)
    return found


@pytest.mark.parametrize(
    ("name", "chunk", "windows", "sinks", "kv", "heads"),
    pairwise(
        ["kvzip", "kvzip+"],
        [16, 25, 200],
        [None, (20, None, 60)],
        [0, 2, 4],
        [None, torch.int8],
        [(6, 3), (4, 4), (6, 1)],
    ),
)
def test_scores_are_those_of_a_full_softmax(
    name: str,
    chunk: int,
    windows: tuple[int | None, ...] | None,
    sinks: int,
    kv: torch.dtype | None,
    heads: tuple[int, int],
) -> None:
    """max over the group and the repeat of softmax over {first rows, chunk, repeat so far}."""
    net = network(windows=windows, heads=heads[0], kv_heads=heads[1])
    heard = Listening(net)
    run, seen = made(net, name, 15, kv=kv, chunk=chunk, sinks=sinks)
    run.prompt(ids(60))
    assert heard.texts[1:] == texts(ids(60), sinks, chunk)
    worth = oracle(net, heard, 60, sinks, chunk, name == "kvzip+")
    for layer, view in seen.items():
        window = net.config.windows[layer]
        assert torch.equal(view.live, torch.arange(60).expand_as(view.pos) > 60 - (window or 99))
        torch.testing.assert_close(view.peak.double(), worth[layer], rtol=2e-4, atol=1e-6)
    assert (run.kv.position, len(seen)) == (60, 3)
    for token in ids(5):
        assert run.step(token).isfinite().all()


def filed(run: Engine, path: Path, *, staged: bool = False) -> FileRows:
    """Have what is read twice in a file. staged: as on a GPU, where a file's memory is not the
    staging buffer."""
    kv = run.kv
    columns = columns_of(kv.shape, kv.dtype, coded=False)
    rows = FileRows.create(path, Header(kv.shape.layers, kv.shape.kv_heads, columns))
    kv.scoring_tier = Tier(kv.shape, kv.dtype, kv.device, rows=rows)
    kv.scoring_tier._direct = not staged
    return rows


def same(one: Engine, other: Engine) -> None:
    """All rows with all of their columns, bit for bit."""
    assert contents(one.kv.arena) == contents(other.kv.arena)


def test_every_head_keeps_the_same_where_that_is_asked_for() -> None:
    run, _ = made(network(), "kvzip+uniform", 15)
    run.prompt(ids(60))
    assert {len(rows) for rows in kept(run.kv)} == {15}


@pytest.mark.parametrize(
    ("policy", "once", "step"),
    [
        *(("kvzip", "full", step) for step in ("roco", "scissorhands", "streaming", "none")),
        *(("kvzip+span", "snapkv+span", step) for step in ("roco", "h2o")),
    ],
)
def test_columns_come_from_the_prompt_itself(policy: str, once: str, step: str) -> None:
    """The step policy's columns are those of the prompt's own queries, whatever is repeated."""
    net = network()
    run, _ = made(net, policy, 15, step)
    run.prompt(ids(60))
    whole = Rules(policies.prompt_policy(once), policies.step_policy(step), Budget.parse(100))
    full = Engine(net, over(net, whole))
    full.prompt(ids(60))
    columns = policies.step_policy(step)
    names = ["k", "v", *(columns.columns if columns is not None else ())]
    for layer, h in itertools.product(range(3), range(3)):
        at = segment(run.kv.arena, "pos", layer, h).long()
        for name in names:
            mine = segment(run.kv.arena, name, layer, h)
            assert torch.equal(mine, segment(full.kv.arena, name, layer, h)[at]), name


def test_nothing_is_repeated_where_nothing_is_short() -> None:
    """A text that takes half the budget at most has room, and its rows stay beside a later one. A
    longer question leaves no room for the document, and is a text, too."""
    net = network()
    heard = Listening(net)
    run, _ = made(net, "kvzip", 40)
    run.prompt(ids(20))
    assert len(heard.texts) == 1
    run.prompt(ids(90, seed=1))
    assert heard.texts[2:] == texts(ids(90, seed=1), 0, 2000)
    assert all(set(range(20)) <= set(rows) for rows in kept(run.kv))
    assert sum(map(len, kept(run.kv))) == 40 * 9
    run.prompt(ids(20, seed=1), asks=True)
    run.prompt(ids(21, seed=2), asks=True)
    assert heard.texts[5:] == texts(ids(21, seed=2), 0, 2000)


def test_a_later_text_is_scored_beside_the_first() -> None:
    """Scores are kept: those of the first text decide again when the second one comes."""
    net = network()
    run, seen = made(net, "kvzip", 15)
    run.prompt(ids(60))
    first = {layer: view.peak for layer, view in seen.items()}
    before = kept(run.kv)
    run.prompt(ids(50, seed=1))
    rows = []
    for layer, view in seen.items():
        mine = first[layer]
        for h in range(3):
            for p, new in zip(view.pos[h].tolist(), view.peak[h].tolist(), strict=True):
                if p >= 0:
                    worth = float(mine[h, p]) if p < 60 else new
                    rows.append((4 <= p < 109, -max(worth, 1e-30), -p, 3 * layer + h))
    want: list[list[int]] = [[] for _ in range(9)]
    for _, _, p, head in sorted(rows)[: 15 * 9]:
        want[head].append(-p)
    assert kept(run.kv) == [sorted(some) for some in want]
    assert any(p < 60 and p >= 4 for some in want for p in some)
    assert all(
        {p for p in some if p < 60} <= set(old) for some, old in zip(want, before, strict=True)
    )


def test_one_cache_answers_many_questions() -> None:
    """Questions leave before the document: after ten of them it has lost no more than the largest
    one took, and the last one is there."""
    net = network()
    heard = Listening(net)
    run, _ = made(net, "kvzip", 40)
    run.prompt(ids(200))
    document = kept(run.kv)
    counts = []
    for turn in range(10):
        long = 6 + turn % 3
        begin = run.kv.position
        run.prompt(ids(long, seed=turn), asks=True)
        assert all(set(range(begin, begin + long)) <= set(rows) for rows in kept(run.kv))
        for token in ids(5, seed=90 + turn):
            run.step(token)
        now = kept(run.kv)
        stay = [{p for p in rows if p < 200} for rows in now]
        assert all(a <= set(b) for a, b in zip(stay, document, strict=True))
        counts.append(sum(map(len, stay)))
    assert len(heard.texts) == 2 + 10 + 50  # one repeat of the document, none of a question
    assert counts[-1] >= 9 * (40 - 10)  # a quarter of the budget is for what was said
    assert counts[3:] == [counts[3]] * 7


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_pass_that_fails_leaves_the_cache_as_it_was(
    call: int, in_file: bool, tmp_path: Path
) -> None:
    """Stopped in the prompt, in the first repeat and in the second; then it is read again."""
    net = network()
    run, twin = (made(net, "kvzip", 15, "roco", chunk=25)[0] for _ in range(2))
    if in_file:
        filed(run, tmp_path / "rows.kv")
    for each in (run, twin):
        each.prompt(ids(60))
        each.step(3)
    before, forward, calls = kept(run.kv), net.forward, list[int]()

    def fail(tokens: Tensor, kv: object) -> Tensor:
        calls.append(len(tokens))
        out = forward(tokens, kv)  # type: ignore[arg-type]
        if len(calls) == call:
            raise KeyboardInterrupt
        return out

    net.forward = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.prompt(ids(50, seed=1))
    net.forward = forward  # type: ignore[method-assign]
    assert calls == [50, 28, 37][:call]
    assert (kept(run.kv), run.kv.position, run.kv.reading) == (before, 61, None)
    assert torch.equal(run.prompt(ids(50, seed=1)), twin.prompt(ids(50, seed=1)))
    same(run, twin)


def test_a_shorter_chunk_where_few_positions_are_left() -> None:
    """The repeats stay in the trained context; where not even a short one fits, it is said before
    anything is read."""
    net = network(max_context=95)
    heard = Listening(net)
    run, _ = made(net, "kvzip", 15)
    run.prompt(ids(60))
    asked = len(WORDS.later) + 8 + len(WORDS.answer)
    assert heard.texts[1:] == texts(ids(60), 4, 35 - asked)
    assert max(map(len, heard.texts[1:])) <= 35
    run, _ = made(network(max_context=87), "kvzip", 15)
    refused("27 of 87 positions are left for that", run.prompt, ids(60), error=ContextError)
    assert run.kv.position == 0


# -- in a file -------------------------------------------------------------------------------------


POLICIES = ["kvzip", "kvzip+", "kvzip+uniform", "kvzip++uniform", "kvcrush(kvzip+)"]


@pytest.mark.parametrize(
    ("name", "step", "windows", "heads", "kv", "staged"),
    pairwise(
        POLICIES,
        ["none", "roco", "streaming"],
        [None, (20, None, 60), (40, 40, 40)],
        [(6, 3), (4, 4), (6, 1)],
        [None, torch.int8],
        [False, True],
    ),
)
def test_a_file_gives_what_ram_gives_bit_for_bit(
    name: str,
    step: str,
    windows: tuple[int | None, ...] | None,
    heads: tuple[int, int],
    kv: torch.dtype | None,
    staged: bool,
    tmp_path: Path,
) -> None:
    """Two texts, questions and answers, under random sizes, chunks and pins: every logit and every
    row is the same."""
    draw = random.Random(f"{name} {step} {windows} {heads} {kv}")
    net = network(windows=windows, heads=heads[0], kv_heads=heads[1], rows=draw.choice([9, 16, 64]))
    chunk, budget, pins = draw.choice([20, 30, 200]), draw.choice([16, 24]), draw.choice([0, 6])
    ram, disk = (made(net, name, budget, step, kv=kv, chunk=chunk)[0] for _ in range(2))
    rows = filed(disk, tmp_path / "rows.kv", staged=staged)
    for run in (ram, disk):
        run.kv.pin(pins)
    for turn, (tokens, asks) in enumerate([(50, False), (6, True), (30, False)]):
        text = ids(tokens + draw.randrange(9), seed=turn)
        found = [run.prompt(text, asks=asks) for run in (ram, disk)]
        assert torch.equal(*found)
        same(ram, disk)
        assert torch.equal(ram.step(3), disk.step(3))
    same(ram, disk)
    rows.close()


@pytest.mark.parametrize("how", ["full", "damaged", "short"])
def test_a_file_that_fails_is_said_and_changes_nothing(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the prompt was read; a byte turned; the end of the file is gone."""
    net = network()
    run, twin = (made(net, "kvzip", 15, chunk=25)[0] for _ in range(2))
    rows = filed(run, tmp_path / "rows.kv")
    calls, forward = itertools.count(1), net.forward

    def spoil(tokens: Tensor, kv: object) -> Tensor:
        if how == "full" or next(calls) == 2:
            if how == "damaged":
                with open(tmp_path / "rows.kv" / "rows", "r+b") as file:
                    file.seek(-9000, os.SEEK_END)
                    file.write(b"\xff" * 4096)
            elif how == "short":
                os.truncate(tmp_path / "rows.kv" / "rows", 5 * 4096)
            else:
                monkeypatch.setattr(os, "pwritev", lambda *given: 0)
        return forward(tokens, kv)  # type: ignore[arg-type]

    net.forward = spoil  # type: ignore[method-assign]
    with pytest.raises(TierError, match=r"rows\.kv"):
        run.prompt(ids(60))
    monkeypatch.undo()
    net.forward = forward  # type: ignore[method-assign]
    assert (run.kv.position, run.kv.reading, kept(run.kv)) == (0, None, [[]] * 9)
    rows.close()
    run.kv.scoring_tier = None
    assert torch.equal(run.prompt(ids(60)), twin.prompt(ids(60)))
    same(run, twin)


def test_what_a_prompt_is_scored_with_is_known_before_it_is_read() -> None:
    def more(tokens: int, position: int = 0, *, asks: bool = False) -> int:
        return run.kv.scoring_cost(tokens, position, asks=asks).tokens

    run, _ = made(network(), "kvzip", 15, chunk=25)
    whole = sum(map(len, texts(ids(60), 4, 25)))
    # 7 tokens are less than half of the budget.
    assert (more(60), more(7), more(7, 60, asks=True)) == (whole, 0, 0)
    assert not run.kv.scoring
    run, _ = made(network(), "kvzip", 15, chunk=25)
    run.kv.configure(Rules(run.kv.rules.prompt, None, Budget.parse("50%")))
    # Under its own share a text takes all of the budget, never less than half of it.
    assert (more(60), more(60, 10_000, asks=True)) == (whole, 0)
    # A share is counted once, by the first prompt under it.
    run.prompt(ids(100))
    assert run.kv.state.rows == 50
    assert more(27, 100, asks=True) > 0
    run.prompt(ids(27), asks=True)
    assert run.kv.state.rows == 50
