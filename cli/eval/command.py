"""`minikv eval`: the quality of each policy at each budget, compared with the full cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import minikv
from minikv.chat.session import ChatSession
from minikv.checks import quoted
from minikv.cli.eval import metrics, show, tasks
from minikv.cli.eval.cells import Cell
from minikv.cli.eval.fitting import TRUNCATIONS, fitted, told
from minikv.cli.eval.items import Item, together
from minikv.cli.eval.names import ANSWERED, MEASURED, TASKS
from minikv.cli.eval.passes import PASSES
from minikv.cli.eval.records import named, read_items
from minikv.cli.eval.run import REUSES, Run, choices, passes
from minikv.cli.eval.tasks import CHATS
from minikv.cli.progress import Live
from minikv.cli.terminal import Terminal
from minikv.cli.values import read_list
from minikv.errors import ContextError, UsageError
from minikv.loader import build
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Settings

_LONGEST = 10_000_000  # tokens of a made document


@dataclass(frozen=True, slots=True)
class Asked:
    """What `minikv eval` is to do. Strings are comma-separated lists.

    `tasks`: of `names.TASKS`. `files`: files of records. `lengths`: tokens of documents. `count`:
    questions of a task; `questions` of them are about the same document. `reuse`: what later
    questions are answered from. `truncate`: what is done with records that are too long.
    """

    tasks: str = ""
    files: Sequence[Path] = ()
    lengths: str = "2000"
    count: int = 40
    questions: int = 1
    reuse: str = "once"
    truncate: str = "none"
    outputs: show.Outputs = ()


@dataclass(frozen=True, slots=True)
class _Work:
    """Tasks over the same items. file: the name of their file. cut, skipped: how many of its
    records were too long, and cut or skipped."""

    run: Run
    file: str = ""
    cut: int = 0
    skipped: int = 0

    def told(self) -> str:
        """A line about records that were too long; empty where there are none."""
        skipped = self.skipped + self.run.skipped
        records = sum(len(item.questions) for item in self.run.items) + skipped
        return told(self.run.name, self.cut, skipped, records)

    def cells(self) -> list[Cell]:
        return [replace(cell, file=self.file) for cell in self.run.cells()]


def evaluate(asked: Asked, settings: Settings, terminal: Terminal) -> None:
    """Measure and print; policies and budgets of `settings` are lists with commas.

    Raises UsageError for anything that is wrong with them before a model is loaded.
    """
    wanted, finds = read_list(asked.tasks), read_list(asked.reuse, "--reuse")
    sizes = _checked(asked, wanted, finds)
    evictions = choices(
        read_list(settings.policy, "--policy"),
        read_list(settings.budget, "--budget"),
        read_list(settings.decode, "--decode"),
        settings.seed,
        settings.stride,
        settings.options,
    )
    show.check(asked.outputs, wanted)
    read = {path: list(read_items(path)) for path in asked.files}
    if any(item.metric is metrics.rouge_l for items in read.values() for item in items):
        metrics.rouge()
    terminal.status("loading the model")
    plain = replace(
        settings,
        policy=DEFAULT_PROMPT,
        budget="512",
        decode="auto",
        stride=0,
        options={},
        reuse="once",  # each run sets its own
    )
    chat = build(plain)
    terminal.status("looking whether all documents fit")
    measured = [name for name in wanted if name in MEASURED]
    made = [name for name in wanted if not read or name not in MEASURED]
    work = []
    alike = Counter(map(named, read))
    for path, records in read.items():
        name, kinds = named(path) if alike[named(path)] == 1 else str(path), ["file", *measured]
        needs = [PASSES[one] for one in passes(kinds)]
        items, cut, skipped = fitted(chat, records, needs, asked.truncate)
        run = Run(chat, kinds, together(items), evictions, finds, name=name, skips=True)
        work.append(_Work(run, name, cut, skipped))
    for kinds, items in _made(chat, made, sizes, asked, settings):
        run = Run(chat, kinds, items, evictions, finds, name=", ".join(kinds))
        work.append(_Work(run))
    _check_work(work)
    terminal.clear_status()
    facts: dict[str, object] = {
        "minikv": minikv.__version__,
        "model": chat.facts.model,
        "dtype": chat.facts.dtype,
        "device": chat.facts.device,
        "lengths": sizes,
        "count": asked.count,
        "questions": asked.questions,
        "seed": settings.seed,
        "options": dict(settings.options),
        "reuse": list(finds),
        "truncate": asked.truncate,
        "tier_dtype": settings.tier_dtype,
        "metrics": {
            each.run.name if kind == "file" else kind: ", ".join(
                dict.fromkeys(item.metric.__name__ for item in each.run.items)
            )
            for each in work
            for kind in each.run.tasks
            if kind in ANSWERED
        },
    }
    try:
        for each in work:
            _measure(each, terminal)
    except BaseException:
        _save(work, facts, asked.outputs, terminal)
        raise
    _write(work, facts, asked.outputs)


def _checked(asked: Asked, wanted: Sequence[str], finds: Sequence[str]) -> list[int]:
    """The lengths. Raises UsageError for arguments that cannot be measured."""
    for flag, given, known in (
        ("--tasks", wanted, TASKS),
        ("--reuse", finds, REUSES),
        ("--truncate", [asked.truncate], TRUNCATIONS),
    ):
        for name in given:
            if name not in known:
                what = f"unknown {flag.strip('-').removesuffix('s')} {name!r}"
                raise UsageError(what, f"{flag} takes: {', '.join(known)}")
    for flag, number in (("-n", asked.count), ("--questions", asked.questions)):
        if number < 1:
            raise UsageError(f"{flag} must be at least 1, got {number}")
    sizes = _numbers(asked.lengths)
    made = [name for name in wanted if not asked.files or name not in MEASURED]
    if set(made) - {"needle"} and sizes[0] < tasks.LEAST:
        raise UsageError(
            f"a document of {sizes[0]:,} tokens holds no fact to ask for",
            f"--length must be {tasks.LEAST} or more; only needle takes less",
        )
    for name in made:
        if name in CHATS and sizes[0] < CHATS[name].least:
            raise UsageError(
                f"a document of {sizes[0]:,} tokens is too short for the task {name}",
                f"--length must be {CHATS[name].least} or more",
            )
    return sizes


def _made(
    chat: ChatSession,
    names: Sequence[str],
    sizes: Sequence[int],
    asked: Asked,
    settings: Settings,
) -> Iterator[tuple[list[str], list[Item]]]:
    """(tasks, items) of documents that are made here."""
    codec, how = chat.tokenizer, tasks.manner(settings.model)
    seed, count = 900_000_000 + 10_000_000 * settings.seed, asked.count
    if "needle" in names:
        yield ["needle"], list(tasks.needle(codec, sizes, count, seed, how=how))
    for name, task in CHATS.items():
        if name in names:
            yield [name], list(task.items(codec, sizes[0], count, seed, how))
    same = [name for name in names if name != "needle" and name not in CHATS]
    if same:  # these look at the same documents, which are read once for all of them
        documents, each = -(-count // asked.questions), asked.questions
        yield same, list(tasks.facts(codec, sizes[0], documents, seed, how, each))


def _check_work(work: Sequence[_Work]) -> None:
    """Raise UsageError or ContextError if something cannot be measured, before the first run."""
    for each in work:
        if each.run.items:
            each.run.check()
    if work and not any(each.run.items for each in work):
        raise ContextError(
            "; ".join(each.told() for each in work),
            "nothing was measured; --truncate middle cuts records to the model's context",
        )


def _measure(each: _Work, terminal: Terminal) -> None:
    """Measure and print, with what was left out."""
    if each.run.items:
        each.run.measure(Live(terminal, each.run.name, "runs"))
        terminal.clear_status()
        terminal.data(show.table(each.cells()) + "\n")
    if line := each.told():
        terminal.say(line)


def _write(work: Sequence[_Work], facts: dict[str, object], outputs: show.Outputs) -> list[Path]:
    """Write what was measured, with the records that were skipped and cut; returns the files."""
    skipped = {e.run.name: n for e in work if (n := e.skipped + e.run.skipped)}
    facts = facts | {"skipped": skipped, "cut": {e.run.name: e.cut for e in work if e.cut}}
    items: dict[str, object] = {
        each.run.name: [
            {"source": item.source, "questions": item.questions, "right": item.right}
            for item in each.run.items
        ]
        for each in work
    }
    return show.write([cell for each in work for cell in each.cells()], facts, outputs, items)


def _save(
    work: Sequence[_Work], facts: dict[str, object], outputs: show.Outputs, terminal: Terminal
) -> None:
    """After an error, write what was measured until then. The caller still reports the error."""
    runs = [each.run for each in work]
    if not any(run.completed for run in runs):
        return
    done = {run.name: f"{run.completed:,} of {len(run.items):,}" for run in runs}
    note = "stopped; documents measured: " + "; ".join(f"{w}: {n}" for w, n in done.items())
    try:
        if paths := _write(work, facts | {"stopped_after": done}, outputs):
            note += f"; written to {', '.join(map(str, paths))}"
        for each in work:
            if 0 < each.run.completed < len(each.run.items):
                terminal.data(show.table(each.cells()) + "\n")
    except Exception as error:
        note += f"; not all was written: {error}"
    terminal.say(note)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in read_list(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 64 or max(numbers) > _LONGEST:
        what = f"cannot read the lengths {quoted(text)}"
        raise UsageError(what, "give tokens, as in 1000,2000,4000")
    return numbers
