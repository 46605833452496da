"""The measurement itself: every policy and budget over the same questions, the full cache first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby
from typing import Any

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.eval.items import Item
from minikv.cli.eval.passes import PASSES, Memory
from minikv.cli.eval.rereading import Rereading
from minikv.cli.eval.results import Cell, cell
from minikv.engine.engine import Engine
from minikv.errors import ContextError, UsageError

REUSES = ("once", "refresh", "blind", "recall")
"""The values of --reuse that can be measured. Not `auto`: which one it took would not be shown."""

Progress = Callable[[int, int], None]
"""(done, total): documents under a policy."""


_Choice = tuple[EvictionConfig, str]
"""A policy and budget, and the value of --reuse."""


class Run:
    """Some tasks over the same items, under every choice. The first is what `agree` compares with.

    Later questions are answered from what each of `reuses` says. Without eviction that makes no
    difference, nor where nothing is asked: these are measured under the first one alone. `cells`
    are of the items that `measure` has finished, also after it was stopped. `name`: of the tasks,
    or, with `is_file`, of a file of records, of which `skipped` were too long. One that turns out
    not to fit is left out of `items` as well.
    """

    def __init__(
        self,
        chat: ChatSession,
        tasks: Sequence[str],
        items: Sequence[Item],
        wanted: Iterable[EvictionConfig],
        reuses: Sequence[str] = ("once",),
        *,
        name: str = "",
        is_file: bool = False,
        skipped: int = 0,
    ) -> None:
        self.chat, self.tasks, self.items, self.wanted = chat, tasks, list(items), list(wanted)
        self.name, self.is_file, self.skipped = name, is_file, skipped
        # All policies of one reuse are neighbours: they read the same first prompt.
        self._choices: dict[str, list[_Choice]] = {
            one: [
                (eviction, reuse if eviction.evicts else "once")
                for number, reuse in enumerate(_distinct(one, reuses))
                for eviction in self.wanted
                if eviction.evicts or not number
            ]
            for one in passes(tasks, items)
        }
        # [(pass, number of the choice)][document]: what was measured, and the share that was held
        self._made: dict[tuple[str, int], list[tuple[list[Any], float]]] = {
            (one, i): [] for one, these in self._choices.items() for i in range(len(these))
        }

    @property
    def completed(self) -> int:
        """Items that every choice has finished."""
        return min(map(len, self._made.values()))

    def check(self) -> None:
        """Raise ContextError for the first item that might not fit, called by file and line or as a
        document of the task, and UsageError for a budget that is too small for any of them.
        Measures nothing, so that one item does not cost the others."""
        for eviction, reuse in chain.from_iterable(self._choices.values()):
            self.chat.check(eviction)  # bytes are tokens per head only beside a model
            if reuse == "recall" and eviction.evicts:
                self.chat.configure(eviction)
                if why := self.chat.engine.kv.rules.cannot_recall:
                    raise UsageError(
                        f"--reuse recall is not possible: {why}",
                        "nothing was measured; measure that policy with --reuse once,refresh",
                    )
        most = self.chat.max_context
        for number, item in enumerate(self.items, 1):
            needed = needs(self.chat, self.tasks, item)
            if needed > most:
                raise ContextError(
                    f"{item.source or f'{self.name}, document {number:,}'}: needs {needed:,} "
                    f"tokens with its answers, and this model was trained for {most:,} positions",
                    "nothing was measured; leave it out, choose a smaller --length or a model with "
                    "a longer context",
                )

    def measure(self, progress: Progress) -> None:
        """Go through the items. A document is computed once for all policies that do not need the
        queries of all its tokens (see `rereading`). Raises ContextError if a document that was made
        does not fit."""
        chat, engine = self.chat, self.chat.engine
        before = chat.reuse, chat.recall.kind
        chat.engine = Engine(Rereading(engine.network, engine.kv), engine.kv)
        each = len(self._made)
        try:
            for item in list(self.items):
                done = self.completed
                try:
                    self._measure(item, progress)
                except ContextError:
                    if not self.is_file:
                        raise
                    for made in self._made.values():
                        del made[done:]
                    del self.items[done]
                    self.skipped += 1
            progress(len(self.items) * each, len(self.items) * each)
        finally:
            chat.engine = engine
            chat.reset()
            chat.reuse, chat.recall.kind = before

    def _measure(self, item: Item, progress: Progress) -> None:
        """One item, under every choice."""
        chat, total = self.chat, len(self.items) * len(self._made)
        for one, these in self._choices.items():
            memory: Memory = {}
            for reuse, group in groupby(enumerate(these), key=lambda choice: choice[1][1]):
                neighbours, blind = list(group), reuse == "blind"
                # A document with its question is read once for all policies, question by question;
                # one without is the same for all questions.
                parts = [item] if blind or not PASSES[one].asks else list(item.single())
                found: dict[int, list[Any]] = {i: [] for i, _ in neighbours}
                for number, part in enumerate(parts, 1):
                    for i, choice in neighbours:
                        progress(sum(map(len, self._made.values())), total)
                        self._prepare(*choice)
                        found[i] += PASSES[one].run(chat, part, memory)
                        if number == len(parts):
                            held = 1.0 - chat.engine.kv.stats().saved
                            self._made[one, i].append((found[i], held))

    def _prepare(self, eviction: EvictionConfig, reuse: str) -> None:
        """An empty chat under this choice."""
        chat = self.chat
        chat.reset()
        chat.configure(eviction)
        chat.reuse = reuse
        # By name, so that one that does not fit is an error.
        chat.recall.kind = "ram" if reuse == "recall" else "none"

    def cells(self) -> list[Cell]:
        """One for each task and choice, in this order; none if no item was finished."""
        if not self.completed:
            return []
        items, file = self.items[: self.completed], self.name if self.is_file else ""
        found = []
        for task in self.tasks:
            one = pass_of(task, self.items)
            full, _ = self._results(one, 0)
            for i, choice in enumerate(self._choices[one]):
                made, held = self._results(one, i)
                found.append(cell(task, *choice, items, made, full, held, file))
        return found

    def left_out(self) -> str:
        """A line about records that were too long; empty where there are none."""
        records = sum(len(item.questions) for item in self.items) + self.skipped
        said = f"{self.name}: of {records:,} records {self.skipped:,} too long and skipped"
        return said if self.skipped else ""

    def _results(self, one: str, i: int) -> tuple[list[list[Any]], list[float]]:
        done = self._made[one, i][: self.completed]
        return [made for made, _ in done], [held for _, held in done]


def passes(tasks: Iterable[str], items: Sequence[Item]) -> list[str]:
    """The names of what has to be done for these tasks, each once."""
    return sorted({pass_of(task, items) for task in tasks}, key=list(PASSES).index)


def needs(chat: ChatSession, tasks: Iterable[str], item: Item) -> int:
    """The most positions that these tasks of the item take, with the longest answers."""
    return max(PASSES[one].needs(chat, item) for one in passes(tasks, [item]))


def pass_of(task: str, items: Sequence[Item]) -> str:
    """The pass that a task of these items needs."""
    if task in ("agree", "kl"):
        return "beside" if items and items[0].questions else "text"
    return "text" if task == "ppl" else "answers"


def _distinct(one: str, reuses: Sequence[str]) -> Sequence[str]:
    """Those of the reuses that differ for a pass. The answer to a first question is the same under
    all that see the question; where nothing is asked, all are the same."""
    if one == "answers":
        return reuses
    if not PASSES[one].asks:
        return reuses[:1]
    found: dict[bool, str] = {}
    for reuse in reuses:
        found.setdefault(reuse == "blind", reuse)
    return list(found.values())
