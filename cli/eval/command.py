"""`minikv eval`: the quality of each policy at each budget, compared with the full cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import amount
from minikv.chat.session import ChatSession
from minikv.cli.asked import Evaluation
from minikv.cli.documents.text import read_file
from minikv.cli.eval import tasks
from minikv.cli.eval.items import ANSWERED, BESIDE, TASKS, Item, is_text, named, read_items
from minikv.cli.eval.passes import PASSES, Memory, Rereading
from minikv.cli.eval.results import Cell, cell, table
from minikv.cli.eval.tasks import CHATS, Haystack
from minikv.cli.measure import Results, choices, lengths
from minikv.cli.screen.terminal import Terminal
from minikv.cli.settings.flags import read_list
from minikv.engine.engine import Engine
from minikv.errors import ContextError, UsageError
from minikv.loader import build
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Settings

REUSES = ("once", "refresh", "blind", "recall")
"""The values of --reuse that can be measured. Not `auto`, because the result would not show which
one it chose."""

Progress = Callable[[int, int], None]
"""(done, total): documents under a policy."""


_Choice = tuple[EvictionConfig, str]
"""A policy and budget, and the value of --reuse."""


class Run:
    """Some tasks over the same items, under every choice. `agree` compares with the first choice.

    Later questions are answered as each of `reuses` says. Without eviction, and where nothing is
    asked, that makes no difference, so only the first one is measured. `cells` covers the items
    that `measure` has finished, even after it was stopped. name: that of the tasks, or, with
    `is_file`, of a file of records, of which `skipped` were too long. An item that turns out not to
    fit is also removed from `items`.
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
        # All policies of one reuse come together, because they read the same first prompt.
        self._choices: dict[str, list[_Choice]] = {
            one: [
                (eviction, reuse if eviction.evicts else "once")
                for number, reuse in enumerate(_distinct(one, reuses))
                for eviction in self.wanted
                if eviction.evicts or not number
            ]
            for one in passes(tasks, items)
        }
        # [(pass, number of the choice)][document]: the results, and the share that was held
        self._made: dict[tuple[str, int], list[tuple[list[Any], float]]] = {
            (one, i): [] for one, these in self._choices.items() for i in range(len(these))
        }

    @property
    def completed(self) -> int:
        """Items that every choice has finished."""
        return min(map(len, self._made.values()))

    def check(self) -> None:
        """Raise ContextError for the first item that might not fit, named by file and line or as a
        document of the task, and UsageError for a budget that is too small for any of them. Called
        before measuring, so that one item does not cost the others."""
        for eviction, reuse in chain.from_iterable(self._choices.values()):
            self.chat.check(eviction)  # only with a model do bytes become tokens per head
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
        """Measure the items. A document is computed once for all policies that do not need the
        queries of all its tokens (see `Rereading`). Raises ContextError if a generated document
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
                # a document without is the same for all questions.
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
        # By name, so that an unsuitable one is an error.
        chat.recall.kind = "ram" if reuse == "recall" else "none"

    def cells(self) -> list[Cell]:
        """The cells of each task and choice, in this order; none if no item was finished."""
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
        said = f"{self.name}: of {amount(records, 'record')} {self.skipped:,} too long and skipped"
        return said if self.skipped else ""

    def _results(self, one: str, i: int) -> tuple[list[list[Any]], list[float]]:
        done = self._made[one, i][: self.completed]
        return [made for made, _ in done], [held for _, held in done]


def passes(tasks: Iterable[str], items: Sequence[Item]) -> list[str]:
    """The names of the passes that these tasks need, each once."""
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
    """The reuses that differ for a pass. The answer to a first question is the same under all that
    see the question; where nothing is asked, all are the same."""
    if one == "answers":
        return reuses
    if not PASSES[one].asks:
        return reuses[:1]
    found: dict[bool, str] = {}
    for reuse in reuses:
        found.setdefault(reuse == "blind", reuse)
    return list(found.values())


Wanted = Iterator[tuple[Sequence[str], Sequence[Item], dict[str, Any]]]
"""Tasks, their items, and further arguments of a `Run`."""


def evaluate(asked: Evaluation, settings: Settings, terminal: Terminal) -> None:
    """Measure and print. Policies and budgets of `settings` are lists with commas.

    Raises UsageError for wrong ones before a model is loaded.
    """
    files, wanted = asked.files or [], read_list(asked.tasks)
    wanted = wanted or (() if files else ("facts",))
    sizes = lengths(asked.length)
    reuses = read_list(asked.reuses, "--reuse")
    _check(asked, wanted, reuses, sizes[0])
    evictions = choices(
        settings.policy,
        settings.budget,
        settings.decode,
        settings.seed,
        settings.stride,
        settings.options,
    )
    results = Results(terminal, str(asked.as_json) if asked.as_json else None, {})
    given = [tasks.given_fact(text) for text in asked.needles or ()]
    hay = Haystack(read_file(str(asked.haystack)).text, given) if asked.haystack else None
    read = {
        path: read_file(str(path)).text if is_text(path) else list(read_items(path))
        for path in files
    }
    terminal.status("loading the model")
    plain: Any = {"budget": "512", "decode": "auto", "stride": 0, "options": {}}
    plain |= {"reuse": "once", "remember": "off"}
    chat = build(replace(settings, policy=DEFAULT_PROMPT, **plain))  # each run sets its own
    terminal.status("checking whether all documents fit")
    runs = [
        Run(chat, kinds, items, evictions, reuses, **told)
        for kinds, items, told in (
            *_of_files(chat, read, wanted, sizes[0], asked),
            *_of_made(chat, wanted, sizes, asked, settings, hay),
        )
    ]
    for run in runs:
        if run.items:
            run.check()
    if runs and not any(run.items for run in runs):
        raise ContextError("; ".join(run.left_out() for run in runs), "nothing was measured")
    terminal.clear_status()
    results.record["facts"] = {
        "minikv": minikv.__version__,
        "model": chat.facts.model,
        "dtype": chat.facts.dtype,
        "device": chat.facts.device,
        "lengths": sizes,
        "count": asked.count,
        "questions": asked.questions,
        "seed": settings.seed,
        "options": dict(settings.options),
        "metrics": {
            run.name if kind == "answers" else kind: ", ".join(
                dict.fromkeys(item.metric.__name__ for item in run.items)
            )
            for run in runs
            for kind in run.tasks
            if kind in ANSWERED
        },
    }
    _measure(runs, results)


def _check(asked: Evaluation, wanted: Sequence[str], reuses: Sequence[str], shortest: int) -> None:
    """Raise UsageError for arguments that cannot be measured."""
    for flag, names, known in (("--tasks", wanted, TASKS), ("--reuse", reuses, REUSES)):
        for name in names:
            if name not in known:
                what = f"unknown {flag.strip('-').removesuffix('s')} {name!r}"
                raise UsageError(what, f"{flag} takes: {', '.join(known)}")
    for flag, number in (("-n", asked.count), ("--questions", asked.questions)):
        if number < 1:
            raise UsageError(f"{flag} must be at least 1, got {number}")
    if asked.needles and not asked.haystack:
        raise UsageError("--needle needs a text to be put into", "give it with --haystack TEXT")
    if "answers" in wanted and all(map(is_text, asked.files or ())):
        hint = "give a file of records, or --haystack TEXT with the tasks facts and needle"
        raise UsageError("the task answers needs records, and there are none", hint)
    for name in _made(asked, wanted):
        if asked.haystack and name in CHATS:
            hint = "--haystack can be combined with needle and facts, and their agree, kl and ppl"
            raise UsageError(f"the task {name} makes its own documents", hint)
        least = CHATS[name].least if name in CHATS else 0 if name == "needle" else tasks.LEAST
        if shortest < least:
            raise UsageError(
                f"a document of {shortest:,} tokens is too short for the task {name}",
                f"--length must be {least} or more",
            )


# -- tasks and items -------------------------------------------------------------------------------


def _made(asked: Evaluation, wanted: Sequence[str]) -> list[str]:
    """The tasks whose documents do not come from files."""
    return [name for name in wanted if name not in ("answers", *BESIDE) or not asked.files]


def _of_files(
    chat: ChatSession,
    read: Mapping[Path, str | list[Item]],
    wanted: Sequence[str],
    tokens: int,
    asked: Evaluation,
) -> Wanted:
    """The tasks and items of each file: its records, or the parts of its text."""
    alike = Counter(map(named, read))
    for path, content in read.items():
        told: dict[str, Any] = {"name": named(path) if alike[named(path)] == 1 else str(path)}
        if isinstance(content, str):
            kinds = [name for name in wanted if name in BESIDE] or ["ppl"]
            items = tasks.texts(chat.tokenizer, content, tokens, asked.count, str(path))
        else:
            kinds = [name for name in wanted if name in ("answers", *BESIDE)] or ["answers"]
            items = [item for item in content if needs(chat, kinds, item) <= chat.max_context]
            told["skipped"] = len(content) - len(items)
        yield kinds, items, told | {"is_file": True}


def _of_made(
    chat: ChatSession,
    wanted: Sequence[str],
    sizes: Sequence[int],
    asked: Evaluation,
    settings: Settings,
    hay: Haystack | None,
) -> Wanted:
    """The tasks and items with generated documents, or parts of a text with facts."""
    codec, how, count = chat.tokenizer, tasks.manner(settings.model), asked.count
    seed = 900_000_000 + 10_000_000 * settings.seed
    names = _made(asked, wanted)
    beside = [name for name in names if name in BESIDE]
    alone = [] if "facts" in names else beside  # otherwise they use the documents of facts
    made: list[tuple[list[str], Iterator[Item]]] = []
    if "needle" in names:
        needles = tasks.needle(codec, sizes, count, seed, how=how, hay=hay)
        made.append((["needle", *alone], needles))
    for name, task in CHATS.items():
        if name in names:
            made.append(([name, *alone], task.items(codec, sizes[0], count, seed, how)))
    if "facts" in names or (names and not made):
        documents, each = -(-count // asked.questions), asked.questions
        facts = tasks.facts(codec, sizes[0], documents, seed, how, each, hay)
        made.append(([name for name in names if name == "facts" or name in BESIDE], facts))
    for kinds, items in made:
        yield kinds, list(items), {"name": ", ".join(kinds)}


def _measure(runs: Sequence[Run], results: Results) -> None:
    """Measure, print and write. After an error, the results so far are printed and written; the
    caller still reports the error."""
    shown = 0
    try:
        for run in runs:
            if run.items:
                run.measure(lambda done, total, run=run: results.progress(run.name, done, total))  # type: ignore[misc]
                results.show(table(run.cells(), results.terminal.columns))
            if line := run.left_out():
                results.terminal.say(line)
            shown += 1
    finally:
        if shown < len(runs) and any(run.completed for run in runs):
            done = {run.name: f"{run.completed:,} of {len(run.items):,}" for run in runs}
            results.record["facts"]["stopped_after"] = done
            if cells := runs[shown].cells():
                results.show(table(cells, results.terminal.columns))
            counts = "; ".join(f"{name}: {count}" for name, count in done.items())
            results.terminal.say(f"stopped; documents measured: {counts}")
        if any(run.completed for run in runs):
            _record(runs, results)
            results.write(last=True)


def _record(runs: Sequence[Run], results: Results) -> None:
    """Put the results into the record."""
    skipped = {run.name: run.skipped for run in runs if run.skipped}
    results.record["facts"] |= {"skipped": skipped}
    results.record |= {
        "cells": [cell.record() for run in runs for cell in run.cells()],
        "items": {
            run.name: [
                {"source": item.source, "questions": item.questions, "right": item.right}
                for item in run.items
            ]
            for run in runs
        },
    }
