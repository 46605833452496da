"""What eviction costs whole answers: facts out of real text, and long texts while they are written.

    python docs/measurements/answers.py facts --model FOLDER --texts TEXTS.json.gz > facts.jsonl
    python docs/measurements/answers.py writing ... > writing.jsonl
    python docs/measurements/answers.py report *.jsonl

`facts` puts four facts (a number, a name, a word, a place) into about 1,000 tokens of a text and
asks for each, with the question in the prompt, or with `blind` after the policy has chosen.
`writing` feeds the next true tokens of a text one by one, and compares with a full cache. `loops`
lets each policy write on its own. Each document is read once; its queries, keys and values go to
the caches of all policies, which then write side by side, so a step computes one product for all.

A policy is written as on the command line of minikv: `adakv+span:decay=0.9;recent=10>h2o:sinks=4`
has the options of both sides, and `none` writes where no step policy is named. Options of TEXTS:
{name: text}. With --worker I of --workers N a process takes each N-th document.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import itertools
import json
import math
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.prefill import Prefill
from minikv.cache.rules import Rules
from minikv.cache.second_pass import SecondPass
from minikv.chat.reading import wording
from minikv.cli.eval.intervals import wilson
from minikv.loader import output_of, shape_of
from minikv.models import load
from minikv.models.templates import Message
from minikv.policies import prompt_policy, step_policy
from minikv.policies.base import StepPolicy, StepView

SEEN = "adakv,snapkv,adakv+span,snapkv+span,chunkkv,h2o,queryspan,queryspan:gate=0"
UNSEEN = "kvzip,kvzip+,kvzip+span,kvzip+uniform,keydiff,expected,ada-expected,adakv,random"
STEPS = (
    "adakv>none,adakv>h2o,adakv>tova,adakv>streaming,adakv>roco,adakv>roco:lead=1;pool=1,"
    "adakv>rkv:buffer=16,adakv>vase:buffer=16;window=16,adakv>triattention:buffer=16,adakv>random"
)
CITIES = "Lisbon Bergen Krakow Porto Ghent Turin Malmo Graz Vilnius Tampere Basel Zagreb".split()
FIRST = "Ottoline Bartholomew Zephyrine Casimir Philippa Thaddeus Marguerite Leopold".split()
LAST = "Vandermeer Okonkwo-Hale Szczepanski Featherstonehaugh Abernathy Lindqvist Moreau".split()
WORDS = "marzipan tortoise lantern glacier saffron anvil juniper parachute obsidian kettle".split()
PLACES = "Port Ellory|Saint Maubrac|Upper Kelvinhead|Lake Tarnowitz|New Quillfordshire".split("|")

Row = dict[str, Any]


@dataclass(frozen=True)
class Fact:
    kind: str
    sentence: str
    question: str
    answer: str


def made_facts(rng: random.Random) -> list[Fact]:
    """One fact of each kind."""
    number = str(rng.randrange(10_000, 100_000))
    name = f"{rng.choice(FIRST)} {rng.choice(LAST)}"
    word, place = rng.choice(WORDS), rng.choice(PLACES)
    city, other = rng.sample(CITIES, 2)
    found = [
        ("number", f"The access code of the {city} office is {number}.", number),
        ("name", f"The head librarian of the {other} archive is {name}.", name),
        ("word", f"The secret password of the night guard is {word}.", word),
        ("place", f"The annual meeting of the beekeepers takes place in {place}.", place),
    ]
    asked = [
        f"What is the access code of the {city} office?",
        f"Who is the head librarian of the {other} archive?",
        "What is the secret password of the night guard?",
        "Where does the annual meeting of the beekeepers take place?",
    ]
    made = [Fact(*one[:2], ask, one[2]) for one, ask in zip(found, asked, strict=True)]
    rng.shuffle(made)
    return made


def with_facts(text: str, new: Sequence[Fact]) -> str:
    """The text with the facts between its sentences, spread evenly."""
    parts = re.split(r"(?<=[.!?])\s+", text)
    for i, fact in reversed(list(enumerate(new))):
        parts.insert(1 + (2 * i + 1) * (len(parts) - 1) // (2 * len(new)), fact.sentence)
    return " ".join(parts)


@dataclass(frozen=True)
class Choice:
    """Two policies with their options, as text, and a budget; "full" evicts nothing."""

    name: str
    budget: int = 0

    def rules(self, tape: Tape) -> Rules:
        prompt, _, step = self.name.partition(">")
        name, given = _named(step or "none")
        if name == "triattention":
            writes: StepPolicy | None = TriAttention.of(tape, int(given["buffer"]))
        else:
            writes = step_policy(name, given)
        return Rules(prompt_policy(*_named(prompt)), writes, Budget.parse(self.budget))


def _named(text: str) -> tuple[str, dict[str, str]]:
    name, _, given = text.partition(":")
    return name, dict(one.split("=", 1) for one in given.split(";") if one)


class Model:
    """A network, and caches for it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.loaded = load(args.model, device=args.device, dtype=args.dtype, offline=True)
        self.network, self.kernels = self.loaded.network, args.kernels
        self.tokenizer, self.device = self.loaded.tokenizer, self.network.device
        self.words = wording(self.tokenizer, self.loaded.template)

    def cache(self, rules: Rules | None = None) -> KVCache:
        kv = KVCache(
            shape_of(self.loaded.config),
            rules,
            dtype=self.network.dtype,
            device=self.device,
            output=output_of(self.network),
            rotary=self.network.rotation,
            kernels=self.kernels,
        )
        kv.words = self.words
        return kv

    def ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(list(tokens), device=self.device)

    def step(self, kvs: Sequence[KVCache], tokens: Sequence[int]) -> Tensor:
        """Feed each cache its next token, all in one pass through the network. Returns the logits
        [n, V]."""
        net = self.network
        x = net._embed(self.ids(tokens))
        angles = []
        for kind in net.rotation.kinds:
            tables = [kind.table(kv.position, 1, net.dtype) for kv in kvs]
            angles.append(tuple(torch.cat(side) for side in zip(*tables, strict=True)))
        wide = x.new_empty(len(kvs), 2 * self.loaded.config.mlp)
        for index in range(len(net.layers)):
            x = net._layer(index, x, _Several(kvs), [(angles, None)], wide, False)
        for kv in kvs:
            kv.advance(1)
        return net.logits(net._norm(x, net.norm))


@dataclass
class _Several:
    """`Attend` of one token for each of several caches."""

    kvs: Sequence[KVCache]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        each = zip(self.kvs, q.split(1), k.split(1), v.split(1), strict=True)
        return torch.cat([kv.attend(layer, *rows) for kv, *rows in each])


@dataclass
class _Listener:
    """`Attend` of a prompt that notes what passes: queries, keys, values, and norms of inputs."""

    kv: KVCache
    notes: list[list[tuple[Tensor, ...]]]
    norms: Tensor | None = None

    @property
    def position(self) -> int:
        return self.kv.position

    def watch(self, states: Tensor) -> None:
        self.norms = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.norms is not None
        self.notes[layer].append((q.clone(), k.clone(), v.clone(), self.norms))
        return self.kv.attend(layer, q, k, v)

    def advance(self, tokens: int) -> None:
        self.kv.advance(tokens)


class Tape:
    """A text as one full cache read it, to be played to other caches. The attention of a chunk is
    computed for the first of them only.

    states: of all tokens, after the final norm [T, hidden].
    """

    def __init__(self, model: Model) -> None:
        self.model, self.full = model, model.cache()
        self.chunks: list[list[tuple[Tensor, ...]]] = [[] for _ in model.network.layers]
        self.ids: list[int] = []
        self.states = torch.empty(0, model.loaded.config.hidden, device=model.device)
        self._sums: dict[tuple[int, ...], Tensor] = {}
        self._scored: dict[object, SecondPass] = {}

    def read(self, ids: Sequence[int]) -> None:
        """Read on."""
        self.full.begin(len(ids))
        fed = self.model.ids(ids)
        states = self.model.network.hidden(fed, _Listener(self.full, self.chunks))
        self.states, self.ids = torch.cat((self.states, states)), [*self.ids, *ids]

    def cut(self, tokens: int, chunks: int) -> None:
        """Keep only the first `tokens` tokens, which were read in so many chunks."""
        self._scored.clear()
        for layer in self.chunks:
            for gone in layer[chunks:]:
                self._sums = {k: s for k, s in self._sums.items() if k[0] != gone[0].data_ptr()}
            del layer[chunks:]
        self.ids, self.states = self.ids[:tokens], self.states[:tokens]

    def logits(self, begin: int, end: int) -> Tensor:
        """What the full cache says after the tokens `begin` to `end` - 1 [n, V]."""
        return self.model.network.logits(self.states[begin:end])

    def play(self, kv: KVCache, room: int) -> None:
        """Have a new cache read it as one prompt."""
        ops = kv.ops
        kv.ops = self._remembering(ops)
        kv.begin(len(self.ids), room)
        if isinstance(kv.reading, Prefill) and kv.reading.glancing:
            kv.reading.predict(self._predicted())
        for layer, chunks in enumerate(self.chunks):
            for q, k, v, norms in chunks:
                if kv.watch is not None:
                    kv.watch(norms)
                kv.attend(layer, q, k, v)
        if isinstance(kv.reading, SecondPass):
            assert kv.rules.prompt is not None
            first = self._scored.setdefault(kv.rules.prompt.scorer, kv.reading)
            if first is not kv.reading:
                kv.reading.score_as(first)
            for repeat, text in kv.reading.texts(self.ids):
                self.model.network.forward(self.model.ids(repeat.ids), text)
                del text
        kv.advance(len(self.ids))
        kv.ops = ops

    def _predicted(self) -> Tensor:
        """float32 [T]: the probability of each token."""
        found = torch.zeros(len(self.ids), device=self.model.device)
        for lo in range(0, len(self.ids) - 1, 128):
            hi = min(lo + 128, len(self.ids) - 1)
            logs = self.logits(lo, hi).log_softmax(1)
            found[lo + 1 : hi + 1] = logs.gather(
                1, self.model.ids(self.ids[lo + 1 : hi + 1])[:, None]
            )[:, 0].exp()
        return found

    def _remembering(self, ops: Any) -> Any:
        """The kernels, but attention to the tape's own queries is known after the first time; its
        outputs, which nobody needs, are not computed again."""
        made, attention = copy.copy(ops), ops.last_rows_attention
        own = {chunk[0].data_ptr() for layer in self.chunks for chunk in layer}

        def remembered(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            if query.data_ptr() not in own:
                return attention(query, key, value)
            name = query.data_ptr(), *key.shape
            if name not in self._sums:
                self._sums[name] = attention(query, key, value)[1]
            return query, self._sums[name]

        made.last_rows_attention = remembered
        return made


@dataclass(frozen=True, kw_only=True, eq=False)
class TriAttention(StepPolicy):
    """TriAttention (arXiv 2604.04921), for comparison only. It needs numbers of each head that are
    no column: the mean of the queries before rotation and the mean of their lengths, by frequency.
    The release takes them from other texts, beforehand; here they are those of the prompt.

    centre complex [L, H, G, D / 2]; extra float32: mean length - |centre|; angle [D / 2].
    """

    centre: Tensor
    extra: Tensor
    angle: Tensor
    buffer: int
    name: str = "triattention"
    sinks: int = 4
    recent: int = 10

    @property
    def block(self) -> int:  # type: ignore[override]
        return self.buffer

    @staticmethod
    def of(tape: Tape, buffer: int) -> TriAttention:
        angle, found = tape.model.network.rotation.layers[0].inverse, []
        for chunks in tape.chunks:
            q = _pairs(torch.cat([chunk[0] for chunk in chunks]))  # [T, heads, D / 2]
            at = torch.arange(len(q), device=q.device)[:, None] * angle
            back = (q * torch.polar(torch.ones_like(at), -at)[:, None])[4:]
            found.append(torch.stack((back.mean(0), back.abs().mean(0) + 0j)))
        both = torch.stack(found, 1)  # [2, L, heads, D / 2]
        both = both.view(2, len(found), tape.chunks[0][0][1].shape[1], -1, len(angle))
        extra = both[1].real - both[0].abs()
        return TriAttention(centre=both[0], extra=extra, angle=angle, buffer=buffer)

    def score(self, view: StepView) -> Tensor:
        assert view.keys is not None
        each = torch.arange(len(view.pos), device=view.pos.device)
        layer, head = view.layer + each // view.heads, each % view.heads
        keys = _pairs(view.keys(each))  # [F, N, D / 2]
        at = view.position + 2 ** torch.arange(17, device=each.device)  # the release's distances
        angles = at[:, None] * self.angle
        turn = torch.polar(torch.ones_like(angles), angles).mean(0)
        query = self.centre[layer, head] * turn  # [F, G, D / 2]
        scores = (query @ keys.conj().transpose(1, 2)).real
        scores = scores + self.extra[layer, head] @ keys.abs().transpose(1, 2)
        return scores.amax(1).nan_to_num(0.0, 0.0, 0.0)


def _pairs(x: Tensor) -> Tensor:
    """[..., D] -> complex [..., D / 2], the numbers that are rotated together."""
    return torch.complex(*x.float().chunk(2, -1))


# -- facts ----------------------------------------------------------------------------------------


def facts_of(model: Model, name: str, text: str, args: argparse.Namespace) -> Iterator[Row]:
    """Four questions about one document, under every choice."""
    rng = random.Random(f"{args.seed} {name}")
    new = made_facts(rng)
    text = with_facts(text, new)
    prompts = [_opening(model, f"{text}\n\n{fact.question} {args.ask}") for fact in new]
    begin = _shared([*prompts, _opening(model, f"{text}\n\n!")])
    tape = Tape(model)
    tape.read(prompts[0][:begin])
    chunks, held = len(tape.chunks[0]), tape.full.snapshot()
    choices = [Choice(p, b) for p in args.policies.split(",") for b in _numbers(args.budgets)]
    blind: list[tuple[Choice, KVCache, Any]] = []
    if args.blind:
        for choice in choices:
            kv = model.cache(choice.rules(tape))
            tape.play(kv, args.answer + 64)
            blind.append((choice, kv, kv.snapshot()))
    for fact, prompt in zip(new, prompts, strict=True):
        tape.cut(begin, chunks)
        tape.full.restore(held)
        tape.read(prompt[begin:])
        logits = [tape.logits(len(prompt) - 1, len(prompt))]
        named, kvs = [Choice("full")], [tape.full]
        for choice in [] if args.blind else choices:
            kv = model.cache(choice.rules(tape))
            tape.play(kv, args.answer)
            named, kvs, logits = [*named, choice], [*kvs, kv], [*logits, logits[0]]
        for choice, kv, state in blind:
            kv.restore(state)
            kv.begin(len(prompt) - begin, args.answer, asks=True)
            found = model.network.forward(model.ids(prompt[begin:]), kv)
            named, kvs, logits = [*named, choice], [*kvs, kv], [*logits, found[None]]
        answers = written(model, kvs, torch.cat(logits), args.answer)
        for choice, answer in zip(named, answers, strict=True):
            said = model.tokenizer.decode(answer)
            yield {
                "document": name,
                "kind": fact.kind,
                "policy": choice.name,
                "budget": choice.budget,
                "right": _plain(fact.answer) in _plain(said),
                "same": _shared([answer, answers[0]]),
                "of": len(answers[0]),
                "answer": said,
            }


def written(model: Model, kvs: list[KVCache], logits: Tensor, most: int) -> list[list[int]]:
    """What each cache writes, greedily, side by side."""
    stops, size = model.loaded.config.stop_ids, model.tokenizer.largest + 1
    answers: list[list[int]] = [[] for _ in kvs]
    alive = list(range(len(kvs)))
    while alive:
        chosen = logits[:, :size].argmax(1).tolist()
        for i, token in zip(alive, chosen, strict=True):
            answers[i].append(token)
        going = [i for i in alive if answers[i][-1] not in stops and len(answers[i]) < most]
        alive = going
        if alive:
            logits = model.step([kvs[i] for i in alive], [answers[i][-1] for i in alive])
    return answers


# -- while an answer is written -------------------------------------------------------------------


def writing_of(model: Model, name: str, text: str, args: argparse.Namespace) -> Iterator[Row]:
    """The true tokens after a text, under every choice: KL from the full cache and loss, for each
    token."""
    ids = model.tokenizer.encode(text)
    if len(ids) < args.tokens + args.answer + 1:
        return
    ids = ids[: args.tokens + args.answer + 1]
    tape = Tape(model)
    tape.read(ids[: args.tokens])
    kvs, named = [], []
    for policy in args.policies.split(","):
        for budget in _numbers(args.budgets):
            named.append(Choice(policy, budget))
            kvs.append(model.cache(named[-1].rules(tape)))
            tape.play(kvs[-1], args.answer)
    tape.read(ids[args.tokens : -1])
    kls: list[list[float]] = [[] for _ in kvs]
    losses: list[list[float]] = [[] for _ in (*kvs, 0)]
    for at in range(args.tokens, len(ids) - 1):
        exact = tape.logits(at, at + 1).log_softmax(1)
        near = model.step(kvs, [ids[at]] * len(kvs)).log_softmax(1)
        kl = (exact.exp() * (exact - near)).sum(1)
        nats = -torch.cat((near, exact))[:, ids[at + 1]]
        for found, values in ((kls, kl), (losses, nats)):
            for row, value in zip(found, values.tolist(), strict=True):
                row.append(round(value, 4))
    yield {"document": name, "policy": "full", "budget": 0, "loss": losses[-1]}
    for choice, kv, kl_, loss in zip(named, kvs, kls, losses[:-1], strict=True):
        yield {
            "document": name,
            "policy": choice.name,
            "budget": choice.budget,
            "kl": kl_,
            "loss": loss,
            "kept": round(kv.stats().kept_mean, 1),
        }


def loops_of(model: Model, name: str, text: str, args: argparse.Namespace) -> Iterator[Row]:
    """What each choice writes on its own: how much of it repeats itself."""
    prompt = _opening(model, f"{text}\n\n{args.ask}")
    tape = Tape(model)
    tape.read(prompt)
    kvs, named = [tape.full], [Choice("full")]
    for policy in args.policies.split(","):
        for budget in _numbers(args.budgets):
            named.append(Choice(policy, budget))
            kvs.append(model.cache(named[-1].rules(tape)))
            tape.play(kvs[-1], args.answer)
    logits = tape.logits(len(prompt) - 1, len(prompt)).expand(len(kvs), -1)
    for choice, answer in zip(
        named, answers := written(model, kvs, logits, args.answer), strict=True
    ):
        fours = list(zip(*(answer[i:] for i in range(4)), strict=False))
        yield {
            "document": name,
            "policy": choice.name,
            "budget": choice.budget,
            "tokens": len(answer),
            "again": 1 - len(set(fours)) / max(1, len(fours)),
            "same": _shared([answer, answers[0]]),
            "answer": model.tokenizer.decode(answer),
        }


def _opening(model: Model, text: str) -> list[int]:
    return model.loaded.template.opening([Message("user", text)])


def _shared(lists: Sequence[Sequence[int]]) -> int:
    """How many first items they share."""
    same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*lists, strict=False))
    return sum(1 for _ in same)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


# -- reports --------------------------------------------------------------------------------------


def report(rows: list[Row]) -> Iterator[str]:
    """Tables of the rows of each task, pooled."""
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task]
        yield f"\n{task}: {len({row['document'] for row in mine})} documents"
        make = {"facts": _facts_table, "writing": _writing_table, "loops": _loops_table}
        yield from make[task.partition(" ")[0]](mine)


def _cells(rows: list[Row]) -> dict[tuple[int, str], list[Row]]:
    cells: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["budget"], row["policy"]), []).append(row)
    return dict(sorted(cells.items(), key=lambda cell: cell[0][0]))


def _facts_table(rows: list[Row]) -> Iterator[str]:
    """Only questions that the full cache answers count, but for `others`. `same tokens`: the mean
    number before the answer differs from the full cache's; `of`: how many that has."""
    key = lambda row: (row["document"], row["kind"])  # noqa: E731
    known = {key(row) for row in rows if row["policy"] == "full" and row["right"]}
    kinds = sorted({row["kind"] for row in rows})
    heads = "budget", "policy", "n", "right", "95 %", *kinds, "same tokens", "of", "others"
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * (8 + len(kinds))
    for (budget, policy), cell in _cells(rows).items():
        asked = [row for row in cell if key(row) in known]
        right = sum(row["right"] for row in asked)
        low, high = wilson(right / max(1, len(asked)), len(asked))
        each = [[row["right"] for row in asked if row["kind"] == kind] for kind in kinds]
        shares = " | ".join(f"{sum(one)} of {len(one)}" for one in each)
        more = sum(row["right"] for row in cell) - right
        same, of = (sum(row[name] for row in asked) / max(1, len(asked)) for name in ("same", "of"))
        yield (
            f"| {budget or '-'} | {policy} | {len(asked)} | {right / max(1, len(asked)):.1%} | "
            f"{low:.0%} to {high:.0%} | {shares} | {same:.1f} | {of:.1f} | "
            f"{more} of {len(cell) - len(asked)} |"
        )


def _writing_table(rows: list[Row]) -> Iterator[str]:
    """KL per token from the full cache over the first 5, 64 and all tokens, and its difference from
    the first policy of the same budget with a bootstrap interval over documents."""
    yield (
        "| budget | policy | n | KL 5 | KL 64 | KL all | against the first | 95 % | worse in | "
        "nats above full | last half | kept |"
    )
    yield "|" + "---|" * 12
    exact = {row["document"]: row["loss"] for row in rows if row["policy"] == "full"}
    first: dict[str, list[float]] = {}
    for (_, policy), cell in _cells(rows).items():
        if policy == "full":
            continue
        by = {row["document"]: row["kl"] for row in cell}
        if cell[0]["budget"] != first.get("budget"):
            first = {"budget": cell[0]["budget"], **by}  # type: ignore[dict-item]
        apart = [_mean(kl) - _mean(first[name]) for name, kl in by.items() if name in first]
        low, high = _bootstrap(apart)
        means = [_mean([_mean(kl[:n]) for kl in by.values()]) for n in (5, 64, None)]
        nats = _mean([_mean(row["loss"]) - _mean(exact[row["document"]]) for row in cell])
        late = _mean([_mean(kl[len(kl) // 2 :]) for kl in by.values()])
        yield (
            f"| {cell[0]['budget']} | {policy} | {len(by)} | {means[0]:.3f} | {means[1]:.3f} | "
            f"{means[2]:.3f} | {_mean(apart):+.3f} | {low:+.3f} to {high:+.3f} | "
            f"{sum(d > 0 for d in apart)} of {len(apart)} | {nats:+.3f} | {late:.3f} | "
            f"{_mean([row['kept'] for row in cell]):.0f} |"
        )


def _loops_table(rows: list[Row]) -> Iterator[str]:
    yield "| budget | policy | n | tokens | repeated 4-grams | loops (over half) | same tokens |"
    yield "|" + "---|" * 7
    for (budget, policy), cell in _cells(rows).items():
        again = [row["again"] for row in cell]
        yield (
            f"| {budget or '-'} | {policy} | {len(cell)} | "
            f"{_mean([r['tokens'] for r in cell]):.0f} | {_mean(again):.2f} | "
            f"{sum(a > 0.5 for a in again)} of {len(cell)} | "
            f"{_mean([r['same'] for r in cell]):.1f} |"
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _bootstrap(values: Sequence[float], draws: int = 4000) -> tuple[float, float]:
    rng = random.Random(0)
    means = sorted(_mean(rng.choices(values, k=len(values))) for _ in range(draws))
    return means[draws // 40], means[-draws // 40]


# -- the command line -----------------------------------------------------------------------------


def documents(model: Model, args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """This worker's documents: about --tokens tokens of text, and for `writing` those that follow.
    After the first parts of all texts come their second parts, and so on."""
    with gzip.open(args.texts, "rt", encoding="utf-8") as file:
        texts = json.load(file)
    # Some tokens more, as the text of the tokens may be fewer tokens.
    size = args.tokens + (args.answer + 20 if args.task == "writing" else 0)
    for number in range(args.first + args.worker, args.first + args.documents, args.workers):
        name = sorted(texts, key=lambda name: random.Random(name).random())[number % len(texts)]
        ids = model.tokenizer.encode(texts[name])
        begin = number // len(texts) * args.tokens
        if len(ids) >= begin + size:
            yield f"{name}+{begin}", model.tokenizer.decode(ids[begin : begin + size]).strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("facts", "writing", "loops", "report"))
    parser.add_argument("files", nargs="*", help="for report: what the other tasks printed")
    parser.add_argument("--model")
    parser.add_argument("--texts", help="a .json.gz of {name: text}")
    parser.add_argument("--policies", default="")
    parser.add_argument("--budgets", default="128")
    parser.add_argument("--tokens", type=int, default=950, help="of a document")
    parser.add_argument("--answer", type=int, help="the most tokens of an answer")
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first document")
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no document later")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--ask", help="what is added to a question; for loops: the question")
    parser.add_argument("--blind", action="store_true", help="evict before the question is seen")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.task == "report":
        lines = (line for file in args.files for line in Path(file).read_text().splitlines())
        print("\n".join(report([json.loads(line) for line in lines])))
        return
    began, blind = time.monotonic(), args.task == "facts" and args.blind
    defaults = {"facts": (UNSEEN if blind else SEEN, 24, "Answer in one short sentence.")}
    defaults |= {"writing": (STEPS, 500, ""), "loops": (STEPS, 600, "Write a long essay about it.")}
    policies, answer, ask = defaults[args.task]
    args.policies, args.answer = args.policies or policies, args.answer or answer
    args.ask = ask if args.ask is None else args.ask
    torch.set_num_threads(args.threads)
    model = Model(args)
    measure = {"facts": facts_of, "writing": writing_of, "loops": loops_of}[args.task]
    for name, text in documents(model, args):
        if time.monotonic() - began > args.seconds:
            break
        with torch.inference_mode():
            for row in measure(model, name, text, args):
                print(json.dumps({"task": args.task + " unseen" * blind, **row}), flush=True)
        print(f"{time.monotonic() - began:.0f} s: {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
