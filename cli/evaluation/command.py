"""`minikv eval`: what each policy costs in quality, at each budget, beside the full cache."""

from __future__ import annotations

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
    wanted_tasks = _list(names)
    for name in wanted_tasks:
        if name not in run.TASKS:
            raise UsageError(f"unknown task {name!r}", f"tasks: {', '.join(run.TASKS)}")
    if count < 1:
        raise UsageError(f"-n must be at least 1, got {count}")
    sizes = _numbers(lengths)
    choices = run.choices(_list(policies), _list(budgets), settings.decode, settings.seed)
    show.check(outputs)
    items: dict[str, list[Item]] = {path.name: list(read_items(path)) for path in files}
    terminal.status("loading the model")
    chat = build(settings)
    terminal.clear_status()
    codec, seed = chat.tokenizer, 900_000_000 + 10_000_000 * settings.seed
    for name in wanted_tasks:
        if name == "needle":
            made = tasks.needle(codec, sizes, count, seed)
        elif name == "followup":
            made = tasks.followup(codec, sizes[0], -(-count // tasks.FOLLOWUPS), seed)
        else:
            made = tasks.facts(codec, sizes[0], count, seed)
        items[name] = list(made)

    def progress(done: int, total: int, what: str) -> None:
        terminal.status(f"{what}  {done:,} of {total:,} documents")

    cells = []
    for name, mine in items.items():
        kind = name if name in run.TASKS else "file"
        made_cells = run.evaluate(chat, kind, mine, choices, progress)
        cells += [replace(cell, task=name) for cell in made_cells]
        terminal.clear_status()
        terminal.data(show.table(cells[-len(made_cells) :]) + "\n")
    facts: dict[str, object] = {
        "minikv": minikv.__version__, "model": chat.facts.model, "dtype": chat.facts.dtype,
        "device": chat.facts.device, "lengths": sizes, "count": count, "seed": settings.seed,
    }  # fmt: skip
    show.write(cells, facts, outputs)


def _list(text: str) -> list[str]:
    """What stands between commas; parentheses hold together."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in _list(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 64:
        raise UsageError(f"cannot read the lengths {text!r}", "give tokens, as in 1000,2000,4000")
    return numbers
