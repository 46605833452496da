"""`minikv eval`: what each policy costs in quality, at each budget, beside the full cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import minikv
from minikv.cli.evaluation import metrics, run, show, tasks
from minikv.cli.evaluation.cells import Cell
from minikv.cli.evaluation.chats import CHATS
from minikv.cli.evaluation.files import Item, read_items, scored
from minikv.cli.evaluation.names import ANSWERED, TASKS
from minikv.cli.terminal import Terminal
from minikv.cli.values import read_list
from minikv.errors import UsageError
from minikv.loader import build
from minikv.policies import DEFAULT_BUDGET, DEFAULT_PROMPT
from minikv.settings import Settings

Runs = Sequence[tuple[str, run.Run]]
"""Each with the name of its tasks or its file."""


def evaluate(
    names: str,
    files: Sequence[Path],
    lengths: str,
    count: int,
    settings: Settings,
    outputs: Sequence[Path],
    terminal: Terminal,
    reuse: str = "once",
) -> None:
    """Measure and print; `names`, `lengths`, `reuse` and the policies and budgets of `settings` are
    lists with commas.

    Raises UsageError for anything that is wrong with them before a model is loaded.
    """
    wanted_tasks = read_list(names)
    for name in wanted_tasks:
        if name not in TASKS:
            raise UsageError(f"unknown task {name!r}", f"tasks: {', '.join(TASKS)}")
    if count < 1:
        raise UsageError(f"-n must be at least 1, got {count}")
    sizes = _numbers(lengths)
    if set(wanted_tasks) - {"needle"} and sizes[0] < tasks.LEAST:
        raise UsageError(
            f"a document of {sizes[0]:,} tokens holds no fact to ask for",
            f"--length must be {tasks.LEAST} or more; only needle takes less",
        )
    for name in wanted_tasks:
        if name in CHATS and sizes[0] < CHATS[name].least:
            raise UsageError(
                f"a document of {sizes[0]:,} tokens is too short for the task {name}",
                f"--length must be {CHATS[name].least} or more",
            )
    finds = run.reuses(read_list(reuse, "--reuse"))
    choices = run.choices(
        read_list(settings.policy, "--policy"),
        read_list(settings.budget, "--budget"),
        read_list(settings.decode, "--decode"),
        settings.seed,
        settings.stride,
        settings.options,
    )
    show.check(outputs, wanted_tasks)
    read: dict[Path, list[Item]] = {path: list(read_items(path)) for path in files}
    if any(item.metric is metrics.rouge_l for items in read.values() for item in items):
        metrics.rouge()
    terminal.status("loading the model")
    plain = replace(
        settings,
        policy=DEFAULT_PROMPT,
        budget=DEFAULT_BUDGET,
        decode="auto",
        stride=0,
        options={},
        reuse="once",  # each run sets its own
    )
    chat = build(plain)
    terminal.clear_status()
    codec, seed = chat.tokenizer, 900_000_000 + 10_000_000 * settings.seed
    how = tasks.manner(settings.model)
    alike = Counter(path.name for path in read)
    work = [
        (path.name if alike[path.name] == 1 else str(path), ["file"], items)
        for path, items in read.items()
    ]
    if "needle" in wanted_tasks:
        made = list(tasks.needle(codec, sizes, count, seed, how=how))
        work.append(("needle", ["needle"], made))
    for name, task in CHATS.items():
        if name in wanted_tasks:
            made = list(task.items(codec, sizes[0], count, seed, how))
            work.append((name, [name], made))
    same = [name for name in wanted_tasks if name != "needle" and name not in CHATS]
    if same:  # these look at the same documents, which are read once for all of them
        made = list(tasks.facts(codec, sizes[0], count, seed, how))
        work.append((", ".join(same), same, made))
    terminal.status("looking whether all documents fit")
    runs = [(what, run.Run(chat, kinds, items, choices, finds)) for what, kinds, items in work]
    for what, one in runs:
        one.check(what)
    terminal.clear_status()

    facts: dict[str, object] = {
        "minikv": minikv.__version__,
        "model": chat.facts.model,
        "dtype": chat.facts.dtype,
        "device": chat.facts.device,
        "lengths": sizes,
        "count": count,
        "seed": settings.seed,
        "options": dict(settings.options),
        "reuse": finds,
        "tier_dtype": settings.tier_dtype,
        "metrics": {
            what if kind == "file" else kind: scored(one.items)
            for what, one in runs
            for kind in one.tasks
            if kind in ANSWERED
        },
    }
    try:
        for what, one in runs:
            began = time.perf_counter()

            def progress(done: int, total: int, what: str = what, began: float = began) -> None:
                terminal.status(show.bar(done, total, time.perf_counter() - began, what))

            one.measure(progress)
            terminal.clear_status()
            terminal.data(show.table(_cells(what, one)) + "\n")
    except BaseException:
        _save(runs, facts, outputs, terminal)
        raise
    show.write([cell for what, one in runs for cell in _cells(what, one)], facts, outputs)


def _cells(what: str, one: run.Run) -> list[Cell]:
    """With the file's name for a task."""
    cells = one.cells()
    return [replace(cell, task=what) for cell in cells] if one.tasks == ["file"] else cells


def _save(
    runs: Runs, facts: dict[str, object], outputs: Sequence[Path], terminal: Terminal
) -> None:
    """Write what was measured before something went wrong, which stays the error to report."""
    if not any(one.completed for _, one in runs):
        return
    done = {what: f"{one.completed:,} of {len(one.items):,}" for what, one in runs}
    note = "stopped; documents measured: " + "; ".join(f"{w}: {n}" for w, n in done.items())
    try:
        cells = [cell for what, one in runs for cell in _cells(what, one)]
        paths = [p for p in outputs if not show.is_map(p) or any(c.by_place for c in cells)]
        if paths:
            show.write(cells, {**facts, "stopped_after": done}, paths)
            note += f"; written to {', '.join(map(str, paths))}"
        for what, one in runs:
            if 0 < one.completed < len(one.items):
                terminal.data(show.table(_cells(what, one)) + "\n")
    except Exception as error:
        note += f"; not all was written: {error}"
    terminal.say(note)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in read_list(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 64:
        raise UsageError(f"cannot read the lengths {text!r}", "give tokens, as in 1000,2000,4000")
    return list(dict.fromkeys(numbers))
