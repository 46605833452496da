"""The measurement itself: every policy and budget over the same questions, the full cache first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.evaluation import cells
from minikv.cli.evaluation.cells import Cell
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.passes import PASSES
from minikv.cli.evaluation.rereading import Rereading
from minikv.engine.engine import Engine
from minikv.errors import ContextError, UsageError

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


class _Sheet:
    """What one policy did, document by document; `held` is written last."""

    def __init__(self) -> None:
        self.made: list[list[Any]] = []
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
        names = dict.fromkeys(task if task in PASSES else "answers" for task in tasks)
        self._passes = sorted(names, key=list(PASSES).index)
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
            self.chat.check(eviction)  # bytes are tokens per head only beside a model
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
        chat.engine = Engine(Rereading(engine.network, engine.kv), engine.kv)
        done, total = 0, len(self.items) * len(self._sheets)
        try:
            for item in self.items:
                for (one, i), sheet in self._sheets.items():
                    progress(done, total)
                    chat.reset()
                    chat.configure(self.wanted[i])
                    sheet.made.append(PASSES[one].run(chat, item))
                    sheet.held.append(1.0 - chat.engine.kv.stats().saved)
                    done += 1
            progress(done, total)
        finally:
            chat.engine = engine
            chat.reset()

    def cells(self) -> list[Cell]:
        """One for each task and choice, in this order; none if no item was finished."""
        if not self.completed:
            return []
        return [self._cell(task, i) for task in self.tasks for i in range(len(self.wanted))]

    def _cell(self, task: str, i: int) -> Cell:
        done, eviction = self.completed, self.wanted[i]
        sheet = self._sheets[task if task in PASSES else "answers", i]
        made, held = sheet.made[:done], sheet.held[:done]
        if task in PASSES:
            return cells.measured(task, eviction, made, held)
        if task == "agree":
            return cells.agreeing(eviction, made, self._sheets["answers", 0].made[:done], held)
        return cells.answered(task, eviction, self.items[:done], made, held)


def _called(item: Item, name: str, number: int) -> str:
    return item.source or f"{name}, document {number:,}"
