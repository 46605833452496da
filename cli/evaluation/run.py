"""The measurement itself: every policy and budget over the same questions, the full cache first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

import torch

from minikv.choice import Choice
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.measure import Shadow, agreement, negative_log_likelihood
from minikv.cli.evaluation.metrics import interval
from minikv.errors import ContextError
from minikv.session import ChatSession, Document, Message

ANSWERED = ("needle", "facts", "followup", "file")
MEASURED = ("agree", "ppl", "loss")
TASKS = (*ANSWERED[:-1], *MEASURED)

Progress = Callable[[int, int, str], None]
"""(done, total, what is running)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One task under one policy and budget.

    `score` is the mean over n questions (perplexity for ppl, attention lost for loss), with its
    95 % interval; `by_question` by the question's number in its chat, `by_place` by needle depth
    and length; `held` the bytes held at the end over those of a full cache, mean over documents.
    """

    task: str
    policy: str
    decode: str
    budget: str
    n: int
    score: float
    low: float
    high: float
    held: float
    seconds: float
    by_question: list[float] = field(default_factory=list)
    by_place: list[tuple[float, int, float, int]] = field(default_factory=list)
    more: dict[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


def choices(
    policies: Sequence[str], budgets: Sequence[str], decode: str, seed: int
) -> list[Choice]:
    """The full cache, then every policy with every budget. Raises UsageError."""
    wanted = [Choice.read("full", "none")]
    for policy in policies:
        if policy != "full":
            wanted += [Choice.read(policy, decode, budget, {}, seed) for budget in budgets]
    return wanted


def evaluate(
    chat: ChatSession, task: str, items: Sequence[Item], wanted: Iterable[Choice],
    progress: Progress,
) -> list[Cell]:  # fmt: skip
    """One cell per choice. Raises ContextError if an item does not fit the model."""
    wanted = list(wanted)
    base: list[list[str]] = []
    cells = []
    for number, choice in enumerate(wanted):
        began = time.perf_counter()
        name = choice.policy if choice.policy == "full" else f"{choice.policy} {choice.budget}"

        def report(done: int, number: int = number, name: str = name) -> None:
            progress(number * len(items) + done, len(wanted) * len(items), f"{task}: {name}")

        chat.reset()
        chat.configure(choice)
        if task in ("ppl", "loss"):
            cells.append(_teacher_forced(chat, task, items, choice, report, began))
            continue
        answers, held = [], []
        for done, item in enumerate(items):
            report(done)
            answers.append(_answers(chat, item))
            stats = chat.engine.kv.stats()
            held.append(stats.held_bytes / stats.full_bytes)
        report(len(items))
        base = base or answers
        cells.append(_cell(task, items, choice, answers, base, _mean(held), began))
    chat.reset()
    return cells


def _answers(chat: ChatSession, item: Item) -> list[str]:
    chat.reset()
    chat.attach(item.document, "report.txt")
    answers = []
    for question in item.questions:
        answer = "".join(chat.ask(question, max_tokens=item.max_tokens)).strip()
        answers.append(answer.lstrip("\n").split("\n")[0] if item.first_line else answer)
    return answers


def _cell(
    task: str, items: Sequence[Item], choice: Choice, answers: list[list[str]],
    base: list[list[str]], held: float, began: float,
) -> Cell:  # fmt: skip
    scores: list[list[float]] = []
    more: dict[str, float] = {}
    if task == "agree":
        pairs = [agreement(a, b) for x, y in zip(answers, base, strict=True)
                 for a, b in zip(x, y, strict=True)]  # fmt: skip
        scores = [[float(p.exact)] for p in pairs]
        firsts = sorted(p.first for p in pairs if p.first is not None)
        more = {"rouge_l": _mean([p.rouge_l for p in pairs])}
        if firsts:
            more["median_first_difference"] = float(firsts[len(firsts) // 2])
    else:
        for item, given in zip(items, answers, strict=True):
            scores.append([
                item.metric(a, right, item.classes)
                for a, right in zip(given, item.right, strict=True)
            ])  # fmt: skip
    flat = [s for row in scores for s in row]
    score = _mean(flat)
    low, high = interval(score, len(flat))
    longest = max(map(len, scores))
    by_question = [_mean([row[i] for row in scores if i < len(row)]) for i in range(longest)]
    places: dict[tuple[float, int], list[float]] = {}
    for item, row in zip(items, scores, strict=True):
        if item.where is not None:
            places.setdefault(item.where, []).extend(row)
    return Cell(
        task, choice.policy, choice.decode, _budget(choice), len(flat), score, low, high, held,
        time.perf_counter() - began, by_question if longest > 1 else [],
        [(*where, _mean(s), len(s)) for where, s in sorted(places.items())], more,
    )  # fmt: skip


def _teacher_forced(
    chat: ChatSession, task: str, items: Sequence[Item], choice: Choice,
    report: Callable[[int], None], began: float,
) -> Cell:  # fmt: skip
    """ppl: the last quarter of each document; loss: the right answers to its questions."""
    values: list[float] = []
    held = []
    for done, item in enumerate(items):
        report(done)
        chat.reset()
        if task == "ppl":
            ids = chat.tokenizer.encode(item.document)[: chat.max_context - 1]
            values += negative_log_likelihood(chat.engine, ids, max(1, 3 * len(ids) // 4))
        else:
            values += _lost(chat, item)
        stats = chat.engine.kv.stats()
        held.append(stats.held_bytes / stats.full_bytes)
    report(len(items))
    mean = torch.tensor(values, dtype=torch.float64)
    center, error = float(mean.mean()), 1.96 * float(mean.std()) / len(values) ** 0.5
    low, high = center - error, center + error
    if task == "ppl":
        center, low, high = (float(torch.tensor(x).exp()) for x in (center, low, high))
    return Cell(
        task, choice.policy, choice.decode, _budget(choice), len(values), center, low, high,
        _mean(held), time.perf_counter() - began,
    )  # fmt: skip


def _lost(chat: ChatSession, item: Item) -> list[float]:
    """Attention lost at each token of the right answers, mean over layers."""
    kv, network = chat.engine.kv, chat.engine.network
    shadow = Shadow(kv)
    content = Document(item.document, "report.txt").rendered() + item.questions[0]
    prompt = chat.template.opening([Message("user", content)])
    answer = chat.tokenizer.encode(item.right[0][0])
    if len(prompt) + len(answer) > chat.max_context:
        raise ContextError("a document does not fit the model", "choose a smaller --length")
    kv.begin(len(prompt))
    network.forward(torch.tensor(prompt, device=kv.device), shadow)
    for token in answer:
        network.forward(torch.tensor([token], device=kv.device), shadow)
    return [float(x.mean()) for x in shadow.lost]


def _budget(choice: Choice) -> str:
    return str(choice.budget) if choice.evicts else "-"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
