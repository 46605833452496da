"""`minikv eval`: the quality of each policy at each budget, compared with the full cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import minikv
from minikv.chat.session import ChatSession
from minikv.cli.documents.text import read_file
from minikv.cli.eval import tasks
from minikv.cli.eval.arguments import Asked
from minikv.cli.eval.items import Item
from minikv.cli.eval.names import ANSWERED, BESIDE, TASKS
from minikv.cli.eval.records import is_text, named, read_items
from minikv.cli.eval.results import table
from minikv.cli.eval.run import REUSES, Run, needs
from minikv.cli.eval.tasks import CHATS, Haystack
from minikv.cli.measure import Results, choices, lengths
from minikv.cli.screen.terminal import Terminal
from minikv.cli.settings.values import read_list
from minikv.errors import ContextError, UsageError
from minikv.loader import build
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Settings

Wanted = Iterator[tuple[Sequence[str], Sequence[Item], dict[str, Any]]]
"""Tasks, the items that they are about, and more of a `Run`."""


def evaluate(asked: Asked, settings: Settings, terminal: Terminal) -> None:
    """Measure and print; policies and budgets of `settings` are lists with commas.

    Raises UsageError for anything that is wrong with them before a model is loaded.
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
    terminal.status("looking whether all documents fit")
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


def _check(asked: Asked, wanted: Sequence[str], reuses: Sequence[str], shortest: int) -> None:
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
        raise UsageError("answers are to the questions of records, and there are none", hint)
    for name in _made(asked, wanted):
        if asked.haystack and name in CHATS:
            hint = "--haystack goes with needle and facts, and agree, kl and ppl of them"
            raise UsageError(f"the task {name} is about a world of its own", hint)
        least = CHATS[name].least if name in CHATS else 0 if name == "needle" else tasks.LEAST
        if shortest < least:
            raise UsageError(
                f"a document of {shortest:,} tokens is too short for the task {name}",
                f"--length must be {least} or more",
            )


# -- what is measured -----------------------------------------------------------------------------


def _made(asked: Asked, wanted: Sequence[str]) -> list[str]:
    """The tasks whose documents are not those of FILEs."""
    return [name for name in wanted if name not in ("answers", *BESIDE) or not asked.files]


def _of_files(
    chat: ChatSession,
    read: Mapping[Path, str | list[Item]],
    wanted: Sequence[str],
    tokens: int,
    asked: Asked,
) -> Wanted:
    """What is to be measured of each file: its records, or the parts of its text."""
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
    asked: Asked,
    settings: Settings,
    hay: Haystack | None,
) -> Wanted:
    """Documents that are made here, or parts of a text with facts."""
    codec, how, count = chat.tokenizer, tasks.manner(settings.model), asked.count
    seed = 900_000_000 + 10_000_000 * settings.seed
    names = _made(asked, wanted)
    beside = [name for name in names if name in BESIDE]
    alone = [] if "facts" in names else beside  # else they look at the same documents as facts
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
    """Measure, print and write. After an error, what was measured until then is printed and
    written; the caller still reports the error."""
    shown = 0
    try:
        for run in runs:
            if run.items:
                run.measure(lambda done, total, run=run: results.progress(run.name, done, total))  # type: ignore[misc]
                results.show(table(run.cells()))
            if line := run.left_out():
                results.terminal.say(line)
            shown += 1
    finally:
        if shown < len(runs) and any(run.completed for run in runs):
            done = {run.name: f"{run.completed:,} of {len(run.items):,}" for run in runs}
            results.record["facts"]["stopped_after"] = done
            if cells := runs[shown].cells():
                results.show(table(cells))
            counts = "; ".join(f"{name}: {count}" for name, count in done.items())
            results.terminal.say(f"stopped; documents measured: {counts}")
        if any(run.completed for run in runs):
            _record(runs, results)
            results.write(last=True)


def _record(runs: Sequence[Run], results: Results) -> None:
    """Put what was measured into the record."""
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
