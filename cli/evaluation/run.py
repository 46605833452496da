"""The measurement itself: every policy and budget over the same questions, the full cache first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.chat.transcript import Document, Message
from minikv.cli.evaluation import intervals
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.measure import Shadow, agreement, negative_log_likelihood
from minikv.cli.evaluation.rereading import Rereading
from minikv.engine.engine import Engine
from minikv.errors import ContextError, UsageError

ANSWERED = ("needle", "facts", "followup", "file")
MEASURED = ("agree", "ppl", "loss")
TASKS = (*ANSWERED[:-1], *MEASURED)

Progress = Callable[[int, int], None]
"""(done, total): documents under a policy."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One task under one policy and budget.

    `score` is the mean over n questions (perplexity for ppl, attention lost for loss; n tokens),
    with its 95 % interval over documents, None of a single one; `by_question` by the question's
    number in its chat, `by_place` by needle depth and length; `held` the bytes held at the end over
    those of a full cache, mean over documents. `by_item` is each document's own mean (nats for
    ppl), so that policies can be compared in pairs.
    """

    task: str
    policy: str
    decode: str
    budget: str
    stride: int
    n: int
    score: float
    low: float | None
    high: float | None
    held: float
    by_item: list[float] = field(default_factory=list)
    by_question: list[float] = field(default_factory=list)
    by_place: list[tuple[float, int, float, int]] = field(default_factory=list)
    more: dict[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """As JSON has it, which knows no infinity."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def choices(
    policies: Sequence[str],
    budgets: Sequence[str],
    decodes: Sequence[str],
    seed: int,
    stride: int = 0,
    options: Mapping[str, object] | None = None,
) -> list[EvictionConfig]:
    """The full cache, then every policy with every decode policy and budget.

    An option goes to each policy that has it. Raises UsageError, also for one that none has, for
    options that contradict each other and for fewer rows than the policies need.
    """
    given, known = dict(options or {}), set()
    wanted = [EvictionConfig.read("full", "none")]
    for policy in policies:
        for decode in decodes:
            if policy == "full" and not EvictionConfig.read(policy, decode).evicts:
                continue  # the first row
            plain = EvictionConfig.read(policy, decode, "512", {}, seed, stride)
            takes = {*plain.policy_options, *plain.decode_options}
            known |= takes
            mine = {name: value for name, value in given.items() if name in takes}
            wanted += [EvictionConfig.read(policy, decode, b, mine, seed, stride) for b in budgets]
    for name in given:
        if name not in known:
            raise UsageError(
                f"none of these policies has an option {name!r}",
                f"they take: {', '.join(sorted(known)) or 'no options'}",
            )
    for eviction in wanted:
        least = eviction.least_rows()  # also refuses what contradicts itself
        if eviction.evicts and eviction.budget.unit == "rows" and eviction.budget.value < least:
            raise UsageError(
                f"budget {eviction.budget} is too small for {eviction.pair}",
                f"the smallest useful budget is {least} tokens per head",
            )
    return wanted


class _Sheet:
    """What one policy did, document by document; `held` is written last."""

    def __init__(self) -> None:
        self.answers: list[list[str]] = []
        self.values: list[list[float]] = []
        self.held: list[float] = []


class Run:
    """Some tasks over the same items, under every choice. The first is what `agree` compares with.

    `cells` are of the items that `measure` has finished, also after it was stopped.
    """

    def __init__(
        self,
        chat: ChatSession,
        tasks: Sequence[str],
        items: Sequence[Item],
        wanted: Iterable[EvictionConfig],
    ) -> None:
        self.chat, self.tasks, self.items, self.wanted = chat, tasks, items, list(wanted)
        self._passes = [t for t in tasks if t in ("ppl", "loss")]
        if len(self._passes) < len(tasks):
            self._passes.insert(0, "answers")
        self._sheets = {(p, i): _Sheet() for p in self._passes for i in range(len(self.wanted))}

    @property
    def completed(self) -> int:
        """Items that every choice has finished."""
        return min(len(sheet.held) for sheet in self._sheets.values())

    def check(self, name: str) -> None:
        """Raise ContextError for the first item that might not fit, called by file and line or as a
        document of the task `name`, and UsageError for a budget that is too small for any of them.
        Measures nothing, so that one item does not cost the others."""
        for eviction in self.wanted:
            self.chat.check(eviction)  # bytes are rows only beside a model
        most = self.chat.max_context
        for number, item in enumerate(self.items, 1):
            needed = max(_NEEDS[one](self.chat, item) for one in self._passes)
            if needed > most:
                raise ContextError(
                    f"{_called(item, name, number)}: needs {needed:,} tokens "
                    f"with its answers, and this model was trained for {most:,} positions",
                    "nothing was measured; leave it out, choose a smaller --length or a model with "
                    "a longer context",
                )
        self._check_shares(name)

    def _check_shares(self, name: str) -> None:
        """Raise UsageError where a share of the shortest first prompt is less than is needed."""
        shares = [c for c in self.wanted if c.evicts and c.budget.unit == "share"]
        if not shares or not self.items:
            return
        tokens, number = min(
            (_READS[one](self.chat, item), number)
            for number, item in enumerate(self.items, 1)
            for one in self._passes
        )
        for eviction in shares:
            rows, least = eviction.budget.rows(tokens, 1, 1), eviction.least_rows()
            if rows < least:
                percent = -(-100 * least // tokens)
                raise UsageError(
                    f"{_called(self.items[number - 1], name, number)}, the shortest: budget "
                    f"{eviction.budget} of {tokens:,} tokens is {rows} tokens per head, too small "
                    f"for {eviction.pair}",
                    f"nothing was measured; the smallest useful budget there is {least} rows per "
                    "head" + (f", or {percent}%" if percent <= 100 else ""),
                )

    def measure(self, progress: Progress) -> None:
        """Go through the items. A document is computed once for all policies that look at the same
        queries (see `Rereading`). Raises ContextError if an item does not fit."""
        chat, engine = self.chat, self.chat.engine
        chat.engine = Engine(Rereading(engine.network, engine.kv), engine.kv)
        done, total = 0, len(self.items) * len(self._sheets)
        try:
            for item in self.items:
                for (one, i), sheet in self._sheets.items():
                    progress(done, total)
                    chat.reset()
                    chat.configure(self.wanted[i])
                    if one == "answers":
                        sheet.answers.append(_answers(chat, item))
                    else:
                        sheet.values.append((_perplexity if one == "ppl" else _lost)(chat, item))
                    stats = chat.engine.kv.stats()
                    sheet.held.append(stats.held_bytes / max(stats.full_bytes, 1))
                    done += 1
            progress(done, total)
        finally:
            chat.engine = engine
            chat.reset()

    def cells(self) -> list[Cell]:
        """One for each task and choice, in this order; none if no item was finished."""
        done = self.completed
        if not done:
            return []
        cells = []
        for task in self.tasks:
            for i, eviction in enumerate(self.wanted):
                if task in ("ppl", "loss"):
                    cells.append(_measured(task, eviction, self._sheets[task, i], done))
                    continue
                sheet, base = self._sheets["answers", i], self._sheets["answers", 0].answers
                cells.append(_answered(task, self.items[:done], eviction, sheet, base[:done]))
        return cells


def _answers(chat: ChatSession, item: Item) -> list[str]:
    chat.attach(item.document, "report.txt")
    answers = []
    for question in item.questions:
        # Not stripped: the metrics know what white space means to them.
        answer = "".join(chat.ask(question, max_tokens=item.max_tokens))
        answers.append(answer.lstrip("\n").split("\n")[0] if item.first_line else answer)
    return answers


def _answered(
    task: str, items: Sequence[Item], eviction: EvictionConfig, sheet: _Sheet, base: list[list[str]]
) -> Cell:
    scores: list[list[float]] = []
    more: dict[str, float] = {}
    answers, held = sheet.answers[: len(items)], sheet.held[: len(items)]
    if task == "agree":
        pairs = [
            [agreement(a, b) for a, b in zip(mine, full, strict=True)]
            for mine, full in zip(answers, base, strict=True)
        ]
        scores = [[float(p.exact) for p in row] for row in pairs]
        flat = [p for row in pairs for p in row]
        firsts = sorted(p.first for p in flat if p.first is not None)
        more = {"rouge_l": _mean([p.rouge_l for p in flat])}
        if firsts:
            more["median_first_difference"] = float(firsts[len(firsts) // 2])
    else:
        for item, given in zip(items, answers, strict=True):
            scores.append(
                [
                    item.metric(a, right, item.classes)
                    for a, right in zip(given, item.right, strict=True)
                ]
            )
    low, high = intervals.of_shares(scores)
    longest = max(map(len, scores))
    by_question = [_mean([row[i] for row in scores if i < len(row)]) for i in range(longest)]
    places: dict[tuple[float, int], list[float]] = {}
    if task == "needle":
        for item, row in zip(items, scores, strict=True):
            assert item.where is not None
            places.setdefault(item.where, []).extend(row)
    every = [s for row in scores for s in row]
    return Cell(
        task,
        eviction.policy,
        eviction.decode,
        _budget(eviction),
        eviction.stride,
        len(every),
        _mean(every),
        low,
        high,
        _mean(held),
        [round(_mean(row), 4) for row in scores],
        by_question if longest > 1 else [],
        [(*where, _mean(s), len(s)) for where, s in sorted(places.items())],
        more,
    )


def _measured(task: str, eviction: EvictionConfig, sheet: _Sheet, done: int) -> Cell:
    """Mean over tokens and interval over documents; perplexity is the exponential of both."""
    rows = sheet.values[:done]
    values = [v for row in rows for v in row]
    center, (low, high) = _mean(values), intervals.of_means(rows)
    if task == "ppl":
        center = _exp(center)
        low, high = (low, high) if low is None or high is None else (_exp(low), _exp(high))
    return Cell(
        task,
        eviction.policy,
        eviction.decode,
        _budget(eviction),
        eviction.stride,
        len(values),
        center,
        low,
        high,
        _mean(sheet.held[:done]),
        [round(_mean(row), 4) for row in rows],
    )


def _perplexity(chat: ChatSession, item: Item) -> list[float]:
    """Nats of each token in the last quarter of the document."""
    return negative_log_likelihood(chat.engine, *_scored(chat, item))


def _scored(chat: ChatSession, item: Item) -> tuple[list[int], int]:
    """The document's tokens and how many of them are read as a prompt."""
    # Without what a chat begins with, a BOS above all, a real model's perplexity is off by far.
    start, ids = chat.start(), chat.tokenizer.encode(item.document)
    return start + ids, len(start) + max(1, 3 * len(ids) // 4)


def _lost(chat: ChatSession, item: Item) -> list[float]:
    """Attention lost at each token of the right answers, mean over layers."""
    kv, network = chat.engine.kv, chat.engine.network
    prompt = _opening(chat, item)
    answer = chat.tokenizer.encode(item.right[0][0])
    if len(prompt) + len(answer) > chat.max_context:
        raise ContextError("a document does not fit the model", "choose a smaller --length")
    if isinstance(network, Rereading) and not kv.stride:
        chat.engine.prompt(prompt)
        shadow = Shadow(kv, network.keys())
    else:
        shadow = Shadow(kv)
        kv.begin(len(prompt))
        network.forward(torch.tensor(prompt, device=kv.device), shadow)
    for token in answer:
        network.forward(torch.tensor([token], device=kv.device), shadow)
    return [float(x.mean()) for x in shadow.lost]


def _opening(chat: ChatSession, item: Item) -> list[int]:
    """The prompt with the document and its first question."""
    content = Document(item.document, "report.txt").rendered() + item.questions[0]
    return chat.template.opening([*chat.messages, Message("user", content)])


def _needs_to_answer(chat: ChatSession, item: Item) -> int:
    """Positions of all questions, if every answer is as long as it may be."""
    needed = len(_opening(chat, item)) + item.max_tokens
    for question in item.questions[1:]:
        asked = [Message("user", "a"), Message("assistant", "a"), Message("user", question)]
        needed += len(chat.template.following(asked)) + item.max_tokens
    return needed


_NEEDS: Mapping[str, Callable[[ChatSession, Item], int]] = {
    "answers": _needs_to_answer,
    "ppl": lambda chat, item: len(chat.start()) + len(chat.tokenizer.encode(item.document)),
    "loss": lambda chat, item: (
        len(_opening(chat, item)) + len(chat.tokenizer.encode(item.right[0][0]))
    ),
}

_READS: Mapping[str, Callable[[ChatSession, Item], int]] = {
    "answers": lambda chat, item: len(_opening(chat, item)),
    "ppl": lambda chat, item: _scored(chat, item)[1],
    "loss": lambda chat, item: len(_opening(chat, item)),
}
"""Tokens of the first prompt, which a share is of."""


def _called(item: Item, name: str, number: int) -> str:
    return item.source or f"{name}, document {number:,}"


def _budget(eviction: EvictionConfig) -> str:
    return str(eviction.budget) if eviction.evicts else "-"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
