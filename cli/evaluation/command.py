"""`minikv eval`: what each policy costs in quality, at each budget, beside the full cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import minikv
from minikv.cli.build import Settings, build
from minikv.cli.evaluation import run, show, tasks
from minikv.cli.evaluation.files import Item, read_items
from minikv.cli.terminal import Terminal
from minikv.errors import UsageError


def evaluate(
    names: str, files: Sequence[Path], policies: str, budgets: str, lengths: str, count: int,
    settings: Settings, outputs: Sequence[Path], terminal: Terminal,
) -> None:  # fmt: skip
    """Measure and print; `names`, `policies`, `budgets` and `lengths` are lists with commas.

    Raises UsageError for anything that is wrong with them before a model is loaded.
    """
    wanted_tasks = list(dict.fromkeys(_list(names)))
    for name in wanted_tasks:
        if name not in run.TASKS:
            raise UsageError(f"unknown task {name!r}", f"tasks: {', '.join(run.TASKS)}")
    if count < 1:
        raise UsageError(f"-n must be at least 1, got {count}")
    sizes = _numbers(lengths)
    choices = run.choices(
        _list(policies, "--policy"), _list(budgets, "--budget"),
        _list(settings.decode, "--decode"), settings.seed, settings.stride,
        settings.options,
    )  # fmt: skip
    show.check(outputs)
    read: dict[Path, list[Item]] = {path: list(read_items(path)) for path in files}
    terminal.status("loading the model")
    chat = build(replace(settings, decode="auto", stride=0, options={}))
    terminal.clear_status()
    codec, seed = chat.tokenizer, 900_000_000 + 10_000_000 * settings.seed
    work = [(path.name, ["file"], list(items)) for path, items in read.items()]
    if "needle" in wanted_tasks:
        work.append(("needle", ["needle"], list(tasks.needle(codec, sizes, count, seed))))
    if "followup" in wanted_tasks:
        chats = -(-count // tasks.FOLLOWUPS)
        made = list(tasks.followup(codec, sizes[0], chats, seed))
        work.append(("followup", ["followup"], made))
    same = [name for name in wanted_tasks if name not in ("needle", "followup")]
    if same:  # these look at the same documents, which are read once for all of them
        made = list(tasks.facts(codec, sizes[0], count, seed))
        work.append((", ".join(same), same, made))

    cells = []
    for what, kinds, items in work:
        began = time.perf_counter()

        def progress(done: int, total: int, what: str = what, began: float = began) -> None:
            terminal.status(show.bar(done, total, time.perf_counter() - began, what))

        mine = run.evaluate(chat, kinds, items, choices, progress)
        if kinds == ["file"]:
            mine = [replace(cell, task=what) for cell in mine]
        cells += mine
        terminal.clear_status()
        terminal.data(show.table(mine) + "\n")
    facts: dict[str, object] = {
        "minikv": minikv.__version__, "model": chat.facts.model, "dtype": chat.facts.dtype,
        "device": chat.facts.device, "lengths": sizes, "count": count, "seed": settings.seed,
        "options": dict(settings.options),
    }  # fmt: skip
    show.write(cells, facts, outputs)


def _list(text: str, flag: str = "") -> list[str]:
    """What stands between commas. Raises UsageError if it is nothing, where that is a `flag`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if flag and not parts:
        raise UsageError(f"{flag} names nothing", "give one or more, with commas between them")
    return parts


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in _list(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 64:
        raise UsageError(f"cannot read the lengths {text!r}", "give tokens, as in 1000,2000,4000")
    return numbers
