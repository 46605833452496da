"""`minikv eval`: the quality of each policy at each budget, compared with the full cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import minikv
from minikv.chat.session import ChatSession
from minikv.cli.documents.text import read_file
from minikv.cli.eval import metrics, pictures, tasks
from minikv.cli.eval.asked import Asked
from minikv.cli.eval.items import Item, together
from minikv.cli.eval.names import ANSWERED, BESIDE, TASKS
from minikv.cli.eval.passes import PASSES, TRUNCATIONS, fitted
from minikv.cli.eval.records import is_text, named, read_items
from minikv.cli.eval.results import table
from minikv.cli.eval.run import REUSES, Run, passes
from minikv.cli.eval.tasks import CHATS, Haystack
from minikv.cli.measure import Results, check_file, choices, lengths
from minikv.cli.screen.terminal import Terminal
from minikv.cli.settings.values import read_list
from minikv.errors import ContextError, UsageError
from minikv.loader import build
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Settings

_LONGEST = 10_000_000  # tokens of a made document
_PICTURES = (".png", ".svg")


def evaluate(asked: Asked, settings: Settings, terminal: Terminal) -> None:
    """Measure and print; policies and budgets of `settings` are lists with commas.

    Raises UsageError for anything that is wrong with them before a model is loaded.
    """
    files, wanted = asked.files or [], read_list(asked.tasks)
    wanted = wanted or (() if files else ("facts",))
    sizes = lengths(asked.length, 64, _LONGEST)
    reuses = read_list(asked.reuses, "--reuse")
    _check_asked(asked, wanted, reuses, sizes[0])
    evictions = choices(
        settings.policy,
        settings.budget,
        settings.decode,
        settings.seed,
        settings.stride,
        settings.options,
    )
    if asked.as_json:
        check_file("--json", asked.as_json, (".json",))
    results = Results(terminal, str(asked.as_json) if asked.as_json else None, {})
    _check_pictures(asked, wanted)
    given = [tasks.given_fact(text) for text in asked.needles or ()]
    hay = Haystack(read_file(str(asked.haystack)).text, given) if asked.haystack else None
    read = {path: _content(path) for path in files}
    if any(item.metric is metrics.rouge_l for _, items in read.values() for item in items):
        metrics.rouge()
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
    _check_runs(runs)
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
        "reuse": list(reuses),
        "truncate": asked.truncate,
        "haystack": asked.haystack and str(asked.haystack),
        "tier_dtype": settings.tier_dtype,
        "metrics": {
            run.name if kind == "answers" else kind: ", ".join(
                dict.fromkeys(item.metric.__name__ for item in run.items)
            )
            for run in runs
            for kind in run.tasks
            if kind in ANSWERED
        },
    }
    _measure(runs, asked, results)


# -- what is refused ------------------------------------------------------------------------------


def _check_asked(asked: Asked, wanted: Sequence[str], reuses: Sequence[str], shortest: int) -> None:
    """Raise UsageError for arguments that cannot be measured."""
    for flag, names, known in (
        ("--tasks", wanted, TASKS),
        ("--reuse", reuses, REUSES),
        ("--truncate", [asked.truncate], TRUNCATIONS),
    ):
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
        hint = "give a LongBench or RULER file, or --haystack TEXT with the tasks facts and needle"
        raise UsageError("answers are to the questions of records, and there are none", hint)
    chats = [name for name in wanted if name in CHATS]
    if asked.haystack and chats:
        hint = "--haystack goes with needle and facts, and agree, kl and ppl of them"
        raise UsageError(f"the task {chats[0]} is about a world of its own", hint)
    made = _made(asked, wanted)
    if set(made) - {"needle"} and shortest < tasks.LEAST:
        raise UsageError(
            f"a document of {shortest:,} tokens holds no fact to ask for",
            f"--length must be {tasks.LEAST} or more; only needle takes less",
        )
    for name in made:
        if name in CHATS and shortest < CHATS[name].least:
            raise UsageError(
                f"a document of {shortest:,} tokens is too short for the task {name}",
                f"--length must be {CHATS[name].least} or more",
            )


def _check_pictures(asked: Asked, wanted: Sequence[str]) -> None:
    """Raise UsageError for pictures that cannot be drawn."""
    drawn = [("--map", path) for path in asked.heat or ()]
    for flag, path in [*drawn, *([("--plot", asked.plot)] if asked.plot else [])]:
        check_file(flag, path, _PICTURES)
        if flag == "--map" and "needle" not in wanted:
            raise UsageError("there is nothing to map", "maps are made of the task needle")
        if util.find_spec("matplotlib") is None:
            what = f"{flag} needs matplotlib, which is not installed"
            raise UsageError(what, "pip install 'minikv[plot]'")


def _check_runs(runs: Sequence[Run]) -> None:
    """Raise UsageError or ContextError if something cannot be measured, before the first run."""
    for run in runs:
        if run.items:
            run.check()
    if runs and not any(run.items for run in runs):
        raise ContextError(
            "; ".join(run.left_out() for run in runs),
            "nothing was measured; --truncate middle cuts records to the model's context",
        )


# -- what is measured -----------------------------------------------------------------------------

Content = tuple[str, Sequence[Item]]
"""A text, or the items of records."""
Wanted = Iterator[tuple[Sequence[str], Sequence[Item], dict[str, Any]]]
"""Tasks, the items that they are about, and more of a `Run`."""


def _content(path: Path) -> Content:
    return (read_file(str(path)).text, ()) if is_text(path) else ("", list(read_items(path)))


def _made(asked: Asked, wanted: Sequence[str]) -> list[str]:
    """The tasks whose documents are not those of FILEs."""
    return [name for name in wanted if name not in ("answers", *BESIDE) or not asked.files]


def _of_files(
    chat: ChatSession,
    read: Mapping[Path, Content],
    wanted: Sequence[str],
    tokens: int,
    asked: Asked,
) -> Wanted:
    """What is to be measured of each file: its records, or the parts of its text."""
    alike = Counter(map(named, read))
    for path, (text, records) in read.items():
        told: dict[str, Any] = {"name": named(path) if alike[named(path)] == 1 else str(path)}
        kinds = [name for name in wanted if name in BESIDE or (name == "answers" and not text)]
        kinds = kinds or ["ppl" if text else "answers"]
        if text:
            items = tasks.texts(chat.tokenizer, text, tokens, asked.count, str(path))
        else:
            needs = [PASSES[one] for one in passes(kinds, records)]
            fit, cut, skipped = fitted(chat, records, needs, asked.truncate)
            items = together(fit)
            told |= {"cut": cut, "skipped": skipped}
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
    made: list[tuple[list[str], Iterator[Item]]] = []
    beside = [name for name in names if name in BESIDE]
    alone = [] if "facts" in names else beside  # else they look at the same documents as facts
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


def _measure(runs: Sequence[Run], asked: Asked, results: Results) -> None:
    """Measure, print and write. After an error, what was measured until then is printed and
    written; the caller still reports the error."""
    terminal = results.terminal
    try:
        for run in runs:
            if run.items:
                run.measure(lambda done, total, run=run: results.progress(run.name, done, total))  # type: ignore[misc]
                results.show(table(run.cells()))
            if line := run.left_out():
                terminal.say(line)
    except BaseException:
        if any(run.completed for run in runs):
            done = {run.name: f"{run.completed:,} of {len(run.items):,}" for run in runs}
            results.record["facts"]["stopped_after"] = done
            note = "; ".join(f"{name}: {count}" for name, count in done.items())
            try:
                paths = _write(runs, asked, results)
                note += f"; written to {', '.join(map(str, paths))}" if paths else ""
                for run in runs:
                    if 0 < run.completed < len(run.items):
                        results.show(table(run.cells()))
            except Exception as error:
                note += f"; not all was written: {error}"
            terminal.say(f"stopped; documents measured: {note}")
        raise
    _write(runs, asked, results)


def _write(runs: Sequence[Run], asked: Asked, results: Results) -> list[Path]:
    """Write what was measured; returns the files. A map needs a needle."""
    cells = [cell for run in runs for cell in run.cells()]
    facts = results.record["facts"]
    facts |= {"skipped": {run.name: run.skipped for run in runs if run.skipped}}
    facts |= {"cut": {run.name: run.cut for run in runs if run.cut}}
    results.record |= {
        "cells": [cell.record() for cell in cells],
        "items": {
            run.name: [
                {"source": item.source, "questions": item.questions, "right": item.right}
                for item in run.items
            ]
            for run in runs
        },
    }
    results.write()
    maps = (asked.heat or []) if any(cell.by_place for cell in cells) else []
    plots = [asked.plot] if asked.plot else []
    for path in (*maps, *plots):
        draw = pictures.needle_map if path in maps else pictures.quality
        try:
            draw(cells, path)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return [*([asked.as_json] if asked.as_json else []), *maps, *plots]
