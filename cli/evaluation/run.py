"""The measurement itself: every policy and budget over the same questions, the full cache first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from minikv.choice import Choice
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.measure import Shadow, agreement, negative_log_likelihood
from minikv.cli.evaluation.metrics import interval
from minikv.cli.evaluation.rereading import Rereading
from minikv.engine import Engine
from minikv.errors import ContextError, UsageError
from minikv.session import ChatSession, Document, Message

ANSWERED = ("needle", "facts", "followup", "file")
MEASURED = ("agree", "ppl", "loss")
TASKS = (*ANSWERED[:-1], *MEASURED)

Progress = Callable[[int, int], None]
"""(done, total): documents under a policy."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One task under one policy and budget.

    `score` is the mean over n questions (perplexity for ppl, attention lost for loss), with its
    95 % interval; `by_question` by the question's number in its chat, `by_place` by needle depth
    and length; `held` the bytes held at the end over those of a full cache, mean over documents.
    `by_item` is each document's own mean (nats for ppl), so that policies can be compared in pairs.
    """

    task: str
    policy: str
    decode: str
    budget: str
    stride: int
    n: int
    score: float
    low: float
    high: float
    held: float
    by_item: list[float] = field(default_factory=list)
    by_question: list[float] = field(default_factory=list)
    by_place: list[tuple[float, int, float, int]] = field(default_factory=list)
    more: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Policy and budget in a few words."""
        stride = f" /{self.stride}" if self.stride else ""
        return self.policy + stride + (f" {self.budget}" if self.budget != "-" else "")

    def record(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


def choices(
    policies: Sequence[str], budgets: Sequence[str], decodes: Sequence[str], seed: int,
    stride: int = 0, options: Mapping[str, object] | None = None,
) -> list[Choice]:  # fmt: skip
    """The full cache, then every policy with every decode policy and budget.

    An option goes to each policy that has it. Raises UsageError, also for one that none has.
    """
    given, known = dict(options or {}), set()
    wanted = [Choice.read("full", "none")]
    for policy in policies:
        for decode in decodes if policy != "full" else ():
            plain = Choice.read(policy, decode, "512", {}, seed, stride)
            takes = {*plain.policy_options, *plain.decode_options}
            known |= takes
            mine = {name: value for name, value in given.items() if name in takes}
            wanted += [Choice.read(policy, decode, b, mine, seed, stride) for b in budgets]
    for name in given:
        if name not in known:
            raise UsageError(
                f"none of these policies has an option {name!r}",
                f"they take: {', '.join(sorted(known)) or 'no options'}",
            )
    return wanted


class _Sheet:
    """What one policy did, document by document."""

    def __init__(self) -> None:
        self.answers: list[list[str]] = []
        self.values: list[list[float]] = []
        self.held: list[float] = []


def evaluate(
    chat: ChatSession, tasks: Sequence[str], items: Sequence[Item], wanted: Iterable[Choice],
    progress: Progress,
) -> list[Cell]:  # fmt: skip
    """One cell for each task and choice, in this order, all over the same items.

    The first choice is what `agree` compares with. A document is computed once for all policies
    that look at the same queries (see `Rereading`). Raises ContextError if an item does not fit.
    """
    wanted = list(wanted)
    engine = chat.engine
    chat.engine = Engine(Rereading(engine.network, engine.kv), engine.kv)
    passes = [t for t in tasks if t in ("ppl", "loss")]
    if len(passes) < len(tasks):
        passes.insert(0, "answers")
    sheets = {(one, i): _Sheet() for one in passes for i in range(len(wanted))}
    done = 0
    try:
        for item in items:
            for (one, i), sheet in sheets.items():
                progress(done, len(items) * len(sheets))
                chat.reset()
                chat.configure(wanted[i])
                if one == "answers":
                    sheet.answers.append(_answers(chat, item))
                else:
                    sheet.values.append((_perplexity if one == "ppl" else _lost)(chat, item))
                stats = chat.engine.kv.stats()
                sheet.held.append(stats.held_bytes / stats.full_bytes)
                done += 1
        progress(done, done)
    finally:
        chat.engine = engine
        chat.reset()
    cells = []
    for task in tasks:
        for i, choice in enumerate(wanted):
            if task in ("ppl", "loss"):
                cells.append(_measured(task, choice, sheets[task, i]))
                continue
            base = sheets["answers", 0].answers
            cells.append(_answered(task, items, choice, sheets["answers", i], base))
    return cells


def _answers(chat: ChatSession, item: Item) -> list[str]:
    chat.attach(item.document, "report.txt")
    answers = []
    for question in item.questions:
        answer = "".join(chat.ask(question, max_tokens=item.max_tokens)).strip()
        answers.append(answer.lstrip("\n").split("\n")[0] if item.first_line else answer)
    return answers


def _answered(
    task: str, items: Sequence[Item], choice: Choice, sheet: _Sheet, base: list[list[str]]
) -> Cell:
    scores: list[list[float]] = []
    more: dict[str, float] = {}
    if task == "agree":
        pairs = [agreement(a, b) for x, y in zip(sheet.answers, base, strict=True)
                 for a, b in zip(x, y, strict=True)]  # fmt: skip
        scores = [[float(p.exact)] for p in pairs]
        firsts = sorted(p.first for p in pairs if p.first is not None)
        more = {"rouge_l": _mean([p.rouge_l for p in pairs])}
        if firsts:
            more["median_first_difference"] = float(firsts[len(firsts) // 2])
    else:
        for item, given in zip(items, sheet.answers, strict=True):
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
    if task == "needle":
        for item, row in zip(items, scores, strict=True):
            assert item.where is not None
            places.setdefault(item.where, []).extend(row)
    return Cell(
        task, choice.policy, choice.decode, _budget(choice), choice.stride, len(flat), score, low,
        high, _mean(sheet.held), [round(_mean(row), 4) for row in scores],
        by_question if longest > 1 else [],
        [(*where, _mean(s), len(s)) for where, s in sorted(places.items())], more,
    )  # fmt: skip


def _measured(task: str, choice: Choice, sheet: _Sheet) -> Cell:
    """Mean and interval over tokens."""
    values = [v for row in sheet.values for v in row]
    mean = torch.tensor(values, dtype=torch.float64)
    center, error = float(mean.mean()), 1.96 * float(mean.std()) / len(values) ** 0.5
    low, high = center - error, center + error
    if task == "ppl":
        center, low, high = (float(torch.tensor(x).exp()) for x in (center, low, high))
    return Cell(
        task, choice.policy, choice.decode, _budget(choice), choice.stride, len(values), center,
        low, high, _mean(sheet.held), [round(_mean(row), 4) for row in sheet.values],
    )  # fmt: skip


def _perplexity(chat: ChatSession, item: Item) -> list[float]:
    """Nats of each token in the last quarter of the document."""
    ids = chat.tokenizer.encode(item.document)[: chat.max_context - 1]
    return negative_log_likelihood(chat.engine, ids, max(1, 3 * len(ids) // 4))


def _lost(chat: ChatSession, item: Item) -> list[float]:
    """Attention lost at each token of the right answers, mean over layers."""
    kv, network = chat.engine.kv, chat.engine.network
    content = Document(item.document, "report.txt").rendered() + item.questions[0]
    prompt = chat.template.opening([Message("user", content)])
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


def _budget(choice: Choice) -> str:
    return str(choice.budget) if choice.evicts else "-"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
