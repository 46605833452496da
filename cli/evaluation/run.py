"""The measurement itself: every policy and budget over the same questions, the full cache first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.evaluation import cells
from minikv.cli.evaluation.cells import Cell
from minikv.cli.evaluation.chats import CHATS
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.passes import PASSES
from minikv.cli.evaluation.rereading import Rereading
from minikv.engine.engine import Engine
from minikv.errors import ContextError, UsageError

REUSES = ("once", "refresh", "blind", "recall")
"""What later questions may find here; `auto` is one of them, and which would not be seen."""

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


def reuses(wanted: Sequence[str]) -> list[str]:
    """Each of these once. Raises UsageError for what is not one of `REUSES`."""
    for name in wanted:
        if name not in REUSES:
            raise UsageError(f"unknown reuse {name!r}", f"--reuse takes: {', '.join(REUSES)}")
    return list(dict.fromkeys(wanted))


@dataclass(frozen=True, slots=True)
class _Choice:
    """A policy and budget, and what later questions find under it."""

    eviction: EvictionConfig
    reuse: str


class _Sheet:
    """What one policy did, document by document; `held` is written last."""

    def __init__(self) -> None:
        self.made: list[list[Any]] = []
        self.held: list[float] = []


class Run:
    """Some tasks over the same items, under every choice. The first is what `agree` compares with.

    Later questions find what each of `reuses` says. Without eviction that makes no difference, nor
    where there are no questions: these are measured under the first one alone. `cells` are of the
    items that `measure` has finished, also after it was stopped.
    """

    def __init__(
        self,
        chat: ChatSession,
        tasks: Sequence[str],
        items: Sequence[Item],
        wanted: Iterable[EvictionConfig],
        reuses: Sequence[str] = ("once",),
    ) -> None:
        self.chat, self.tasks, self.items, self.wanted = chat, tasks, items, list(wanted)
        names = dict.fromkeys(map(self._pass, tasks))
        self._passes = sorted(names, key=list(PASSES).index)
        # All policies of one reuse are neighbours: they read the same first prompt.
        self._choices = {
            one: [
                _Choice(eviction, reuse if eviction.evicts else "once")
                for number, reuse in enumerate(reuses if one == "answers" else reuses[:1])
                for eviction in self.wanted
                if eviction.evicts or not number
            ]
            for one in self._passes
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
            needed = max(PASSES[one].needs(self.chat, item) for one in self._passes)
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
        if why := self.chat.engine.kv.recalls:
            raise UsageError(
                f"--reuse recall cannot be had: {why}",
                "nothing was measured; measure that policy with --reuse once,refresh",
            )

    def _check_shares(self, name: str) -> None:
        """Raise UsageError where a share of the shortest first prompt is less than is needed."""
        shares = [c for c in self.wanted if c.evicts and c.budget.unit == "share"]
        if not shares or not self.items:
            return
        tokens, number = min(
            (PASSES[one].reads(self.chat, item), number)
            for number, item in enumerate(self.items, 1)
            for one in self._passes
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

    def measure(self, progress: Progress) -> None:
        """Go through the items. A document is computed once for all policies that look at the same
        queries (see `Rereading`). Raises ContextError if an item does not fit."""
        chat, engine = self.chat, self.chat.engine
        before = chat.reuse, chat.recall.kind
        chat.engine = Engine(Rereading(engine.network, engine.kv), engine.kv)
        done, total = 0, len(self.items) * len(self._sheets)
        try:
            for item in self.items:
                for (one, i), sheet in self._sheets.items():
                    progress(done, total)
                    chat.reset()
                    choice = self._choices[one][i]
                    chat.configure(choice.eviction)
                    chat.reuse = choice.reuse
                    # By name, so that one that does not fit is an error.
                    chat.recall.kind = "ram" if choice.reuse == "recall" else "none"
                    sheet.made.append(PASSES[one].run(chat, item))
                    sheet.held.append(1.0 - chat.engine.kv.stats().saved)
                    done += 1
            progress(done, total)
        finally:
            chat.engine = engine
            chat.reset()
            chat.reuse, chat.recall.kind = before

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
            for i in range(len(self._choices[self._pass(task)]))
        ]

    @staticmethod
    def _pass(task: str) -> str:
        return task if task in PASSES else "answers"

    def _cell(self, task: str, i: int) -> Cell:
        one = self._pass(task)
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
        return replace(cell, reuse=choice.reuse)


def _called(item: Item, name: str, number: int) -> str:
    return item.source or f"{name}, document {number:,}"
