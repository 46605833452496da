"""The measurement itself: every policy and budget over the same questions, the full cache first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

from minikv.chat.eviction_config import EvictionConfig, stated
from minikv.chat.session import ChatSession
from minikv.cli.eval import cells
from minikv.cli.eval.cells import Cell
from minikv.cli.eval.files import Item
from minikv.cli.eval.passes import PASSES
from minikv.cli.eval.rereading import Rereading, Restoring
from minikv.cli.eval.tasks import CHATS
from minikv.errors import ContextError, UsageError

REUSES = ("once", "refresh", "blind", "recall")
"""The values of --reuse that can be measured. Not `auto`: which one it took would not be shown."""

Progress = Callable[[int, int], None]
"""(done, total): documents under a policy."""


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
    options that contradict each other and for fewer tokens per head than the policies need.
    """
    given, known = dict(options or {}), set()
    wanted = [EvictionConfig.read("full", "none")]
    for policy in policies:
        for decode in decodes:
            if policy == "full" and not EvictionConfig.read(policy, decode).may_evict:
                continue  # the first row
            plain = EvictionConfig.read(policy, decode, "512", {}, seed, stride)
            takes = {*plain.policy_options, *plain.decode_options}
            known |= takes
            mine = {name: value for name, value in given.items() if name in takes}
            wanted += [
                EvictionConfig.read(policy, decode, stated(budget), mine, seed, stride)
                for budget in budgets
            ]
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


def reuses(wanted: Sequence[str]) -> list[str]:
    """Each of these once. Raises UsageError for what is not one of `REUSES`."""
    for name in wanted:
        if name not in REUSES:
            raise UsageError(f"unknown reuse {name!r}", f"--reuse takes: {', '.join(REUSES)}")
    return list(dict.fromkeys(wanted))


@dataclass(frozen=True, slots=True)
class _Choice:
    """A policy and budget, and the value of --reuse."""

    eviction: EvictionConfig
    reuse: str


class _Sheet:
    """The results of one policy, by document; `held` is written last."""

    def __init__(self) -> None:
        self.made: list[list[Any]] = []
        self.held: list[float] = []

    def cut(self, documents: int) -> None:
        """Keep the results of the first `documents` documents only."""
        del self.made[documents:], self.held[documents:]


class Run:
    """Some tasks over the same items, under every choice. The first is what `agree` compares with.

    Questions find what each of `reuses` says. Without eviction that makes no difference, nor where
    there are no questions: these are measured under the first one alone. `cells` are of the items
    that `measure` has finished, also after it was stopped. `skips`: an item that turns out not to
    fit is left out of `items` and counted in `skipped`.
    """

    def __init__(
        self,
        chat: ChatSession,
        tasks: Sequence[str],
        items: Sequence[Item],
        wanted: Iterable[EvictionConfig],
        reuses: Sequence[str] = ("once",),
        *,
        skips: bool = False,
    ) -> None:
        self.chat, self.tasks, self.items, self.wanted = chat, tasks, list(items), list(wanted)
        self.skips, self.skipped = skips, 0
        # All policies of one reuse are neighbours: they read the same first prompt.
        self._choices = {
            one: [
                _Choice(eviction, reuse if eviction.evicts else "once")
                for number, reuse in enumerate(_distinct(one, reuses))
                for eviction in self.wanted
                if eviction.evicts or not number
            ]
            for one in passes(tasks)
        }
        self._sheets = {
            (one, i): _Sheet() for one, these in self._choices.items() for i in range(len(these))
        }

    @property
    def completed(self) -> int:
        """Items that every choice has finished."""
        return min(len(sheet.held) for sheet in self._sheets.values())

    def check(self, name: str) -> None:
        """Raise ContextError for the first item that might not fit, called by file and line or as a
        document of the task `name`, and UsageError for a budget that is too small for any of them.
        Measures nothing, so that one item does not cost the others."""
        for choice in chain.from_iterable(self._choices.values()):
            self.chat.check(choice.eviction)  # bytes are tokens per head only beside a model
            self._check_recall(choice)
        most = self.chat.max_context
        for number, item in enumerate(self.items, 1):
            needed = max(PASSES[one].needs(self.chat, item) for one in self._choices)
            if needed > most:
                raise ContextError(
                    f"{_called(item, name, number)}: needs {needed:,} tokens "
                    f"with its answers, and this model was trained for {most:,} positions",
                    "nothing was measured; leave it out, choose a smaller --length or a model with "
                    "a longer context",
                )
        self._check_shares(name)

    def _check_recall(self, choice: _Choice) -> None:
        """Raise UsageError for a policy that cannot choose from a tier."""
        if choice.reuse != "recall" or not choice.eviction.evicts:
            return
        self.chat.configure(choice.eviction)
        if why := self.chat.engine.kv.rules.cannot_recall:
            raise UsageError(
                f"--reuse recall cannot be had: {why}",
                "nothing was measured; measure that policy with --reuse once,refresh",
            )

    def _check_shares(self, name: str) -> None:
        """Raise UsageError where a share of the shortest first prompt is less than is needed."""
        shares = [c for c in self.wanted if c.evicts and c.budget.unit == "share"]
        if not shares or not self.items:
            return
        with _reading(self.chat, blind=self._blind):
            tokens, number = min(
                (PASSES[one].reads(self.chat, item), number)
                for number, item in enumerate(self.items, 1)
                for one in self._choices
            )
        for eviction in shares:
            each, least = eviction.budget.rows(tokens, 1, 1), eviction.least_rows()
            if each < least:
                percent = -(-100 * least // tokens)
                raise UsageError(
                    f"{_called(self.items[number - 1], name, number)}, the shortest: budget "
                    f"{eviction.budget} of {tokens:,} tokens is {each} tokens per head, too small "
                    f"for {eviction.pair}",
                    f"nothing was measured; the smallest useful budget there is {least} tokens per "
                    "head" + (f", or {percent}%" if percent <= 100 else ""),
                )

    @property
    def _blind(self) -> bool:
        """Something is evicted before its question is seen."""
        return any(c.reuse == "blind" for c in chain.from_iterable(self._choices.values()))

    def measure(self, progress: Progress) -> None:
        """Go through the items. A document is computed once for all policies that do not need the
        queries of all its tokens, and evicted once for all questions that are asked apart and find
        it evicted (see `rereading`). Raises ContextError if an item does not fit, unless such are
        skipped."""
        chat, engine = self.chat, self.chat.engine
        before = chat.reuse, chat.recall.kind
        chat.engine = restoring = Restoring(Rereading(engine.network, engine.kv), engine.kv)
        each = len(self._sheets)
        try:
            for item in list(self.items):
                done = self.completed
                total = len(self.items) * each

                def tick(made: int, done: int = done, total: int = total) -> None:
                    progress(done * each + made, total)

                try:
                    self._measure(item, restoring, tick)
                except ContextError:
                    if not self.skips:
                        raise
                    for sheet in self._sheets.values():
                        sheet.cut(done)
                    del self.items[done]
                    self.skipped += 1
            progress(len(self.items) * each, len(self.items) * each)
        finally:
            chat.engine = engine
            chat.reset()
            chat.reuse, chat.recall.kind = before

    def _measure(self, item: Item, engine: Restoring, tick: Callable[[int], None]) -> None:
        """One item, under every choice."""
        chat, made = self.chat, 0
        for one, these in self._choices.items():
            for reuse, group in groupby(enumerate(these), key=lambda choice: choice[1].reuse):
                choices, blind = list(group), reuse == "blind"
                engine.remembers = blind and item.apart
                # A document with its question is read once for all policies, question by question;
                # one without is the same for all questions.
                parts = [item] if blind or not PASSES[one].asks else list(item.single())
                found: list[list[Any]] = [[] for _ in choices]
                for number, part in enumerate(parts, 1):
                    for mine, (i, choice) in zip(found, choices, strict=True):
                        tick(made)
                        self._prepare(choice)
                        mine += PASSES[one].run(chat, part)
                        if number == len(parts):
                            sheet = self._sheets[one, i]
                            sheet.made.append(mine)
                            sheet.held.append(1.0 - chat.engine.kv.stats().saved)
                            made += 1

    def _prepare(self, choice: _Choice) -> None:
        """An empty chat under this choice."""
        chat = self.chat
        chat.reset()
        chat.configure(choice.eviction)
        chat.reuse = choice.reuse
        # By name, so that one that does not fit is an error.
        chat.recall.kind = "ram" if choice.reuse == "recall" else "none"

    def answers(self) -> list[list[list[str]]]:
        """[choice][document][question], in the order of the cells of one task."""
        return [
            self._sheets["answers", i].made[: self.completed]
            for i in range(len(self._choices["answers"]))
        ]

    def cells(self) -> list[Cell]:
        """One for each task and choice, in this order; none if no item was finished."""
        if not self.completed:
            return []
        return [
            self._cell(task, i)
            for task in self.tasks
            for i in range(len(self._choices[_pass(task)]))
        ]

    def _cell(self, task: str, i: int) -> Cell:
        one = _pass(task)
        done, choice, sheet = self.completed, self._choices[one][i], self._sheets[one, i]
        eviction, made, held = choice.eviction, sheet.made[:done], sheet.held[:done]
        if task in PASSES:
            return replace(cells.measured(task, eviction, made, held), reuse=choice.reuse)
        full = self._sheets["answers", 0].made[:done]
        if task == "agree":
            cell = cells.agreeing(eviction, made, full, held)
        else:
            cell = cells.answered(task, eviction, self.items[:done], made, held)
            if task in CHATS:
                cell = cells.beside(cell, made, full)
        if any(item.apart for item in self.items[:done]):  # no question is the second one
            cell = replace(cell, by_question=[])
        return replace(cell, reuse=choice.reuse)


def _pass(task: str) -> str:
    return task if task in PASSES else "answers"


def passes(tasks: Iterable[str]) -> list[str]:
    """The names of what has to be done for these tasks, each once."""
    return sorted({_pass(task) for task in tasks}, key=list(PASSES).index)


def _distinct(one: str, reuses: Sequence[str]) -> Sequence[str]:
    """Those of the reuses that differ for a pass. The attention of a first question's answer is the
    same under all that see the question; where nothing is asked, all are the same."""
    if one == "answers":
        return reuses
    if not PASSES[one].asks:
        return reuses[:1]
    found: dict[bool, str] = {}
    for reuse in reuses:
        found.setdefault(reuse == "blind", reuse)
    return list(found.values())


@contextmanager
def _reading(chat: ChatSession, *, blind: bool) -> Iterator[None]:
    """The chat as it reads a document, before its question or with it."""
    before = chat.reuse
    chat.reuse = "blind" if blind else "once"
    try:
        yield
    finally:
        chat.reuse = before


def _called(item: Item, name: str, number: int) -> str:
    return item.source or f"{name}, document {number:,}"
