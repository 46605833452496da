"""`minikv eval`: the quality of each policy at each budget, compared with the full cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.checks import quoted
from minikv.cli.eval import fitting, metrics, plot, run, show, tasks
from minikv.cli.eval.cells import Cell
from minikv.cli.eval.files import Item, named, read_items, scored, together
from minikv.cli.eval.fitting import TRUNCATIONS, fitted
from minikv.cli.eval.names import ANSWERED, MEASURED, TASKS
from minikv.cli.eval.passes import PASSES
from minikv.cli.eval.tasks import CHATS
from minikv.cli.screen.terminal import Terminal
from minikv.cli.values import read_list
from minikv.errors import ContextError, UsageError
from minikv.loader import build
from minikv.models.bundled.exam import Codec
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Settings

_LONGEST = 10_000_000  # tokens of a made document


@dataclass(frozen=True, slots=True)
class Asked:
    """What `minikv eval` is to do. Strings are comma-separated lists.

    `tasks`: of `names.TASKS`. `files`: files of records. `lengths`: tokens of documents. `count`:
    questions of a task; `questions` of them are about the same document. `reuse`: what later
    questions are answered from. `truncate`: what is done with records that are too long. `outputs`:
    files for the results; `plot`: a file for a picture of them.
    """

    tasks: str = ""
    files: Sequence[Path] = ()
    lengths: str = "2000"
    count: int = 40
    questions: int = 1
    reuse: str = "once"
    truncate: str = "none"
    outputs: Sequence[Path] = ()
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class _Work:
    """Tasks over the same items. what: the names of the tasks, or of a file; file: the name of the
    file. cut, skipped: how many of its records were too long, and cut or skipped."""

    what: str
    one: run.Run
    file: str = ""
    cut: int = 0
    skipped: int = 0

    def cells(self) -> list[Cell]:
        """The cells, with the file's name."""
        return [replace(cell, file=self.file) for cell in self.one.cells()]

    def told(self) -> str:
        """A line about records that were too long; empty where there are none."""
        skipped = self.skipped + self.one.skipped
        records = sum(len(item.questions) for item in self.one.items) + skipped
        return fitting.told(self.what, self.cut, skipped, records)


def evaluate(asked: Asked, settings: Settings, terminal: Terminal) -> None:
    """Measure and print; policies and budgets of `settings` are lists with commas.

    Raises UsageError for anything that is wrong with them before a model is loaded.
    """
    wanted_tasks = read_list(asked.tasks)
    sizes = _checked(asked, wanted_tasks)
    finds = run.reuses(read_list(asked.reuse, "--reuse"))
    choices = run.choices(
        read_list(settings.policy, "--policy"),
        read_list(settings.budget, "--budget"),
        read_list(settings.decode, "--decode"),
        settings.seed,
        settings.stride,
        settings.options,
    )
    show.check(asked.outputs, wanted_tasks)
    if asked.plot is not None:
        plot.check(asked.plot)
    read: dict[Path, list[Item]] = {path: list(read_items(path)) for path in asked.files}
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
    terminal.clear_status()
    terminal.status("looking whether all documents fit")
    measured = [name for name in wanted_tasks if name in MEASURED]
    work = [_of_file(chat, asked, read, path, measured, choices, finds) for path in read]
    made = [name for name in wanted_tasks if not read or name not in MEASURED]
    how = tasks.manner(settings.model)
    for what, kinds, items in _made(chat.tokenizer, made, sizes, asked, settings.seed, how):
        work.append(_Work(what, run.Run(chat, kinds, items, choices, finds)))
    _checked_work(work)
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
        "reuse": finds,
        "truncate": asked.truncate,
        "tier_dtype": settings.tier_dtype,
        "metrics": {
            each.what if kind == "file" else kind: scored(each.one.items)
            for each in work
            for kind in each.one.tasks
            if kind in ANSWERED
        },
    }
    try:
        for each in work:
            _measure(each, terminal)
    except BaseException:
        _save(work, facts, asked.outputs, terminal)
        raise
    found = [cell for each in work for cell in each.cells()]
    show.write(found, facts | _too_long(work), asked.outputs, _items(work))
    if asked.plot is not None:
        plot.write(found, asked.plot)


def _checked(asked: Asked, wanted_tasks: Sequence[str]) -> list[int]:
    """The lengths. Raises UsageError for arguments that cannot be measured."""
    for name in wanted_tasks:
        if name not in TASKS:
            raise UsageError(f"unknown task {name!r}", f"tasks: {', '.join(TASKS)}")
    for flag, number in (("-n", asked.count), ("--questions", asked.questions)):
        if number < 1:
            raise UsageError(f"{flag} must be at least 1, got {number}")
    if asked.truncate not in TRUNCATIONS:
        raise UsageError(
            f"unknown way to truncate {asked.truncate!r}",
            f"--truncate takes: {', '.join(TRUNCATIONS)}",
        )
    sizes = _numbers(asked.lengths)
    made = [name for name in wanted_tasks if not asked.files or name not in MEASURED]
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


def _of_file(
    chat: ChatSession,
    asked: Asked,
    read: Mapping[Path, Sequence[Item]],
    path: Path,
    measured: Sequence[str],
    choices: Sequence[EvictionConfig],
    finds: Sequence[str],
) -> _Work:
    """The records of a file, and what else is to be measured of them."""
    kinds = ["file", *measured]
    passes = [PASSES[name] for name in run.passes(kinds)]
    found = fitted(chat, read[path], passes, asked.truncate)
    alike = Counter(map(named, read))
    name = named(path) if alike[named(path)] == 1 else str(path)
    one = run.Run(chat, kinds, together(found.items), choices, finds, skips=True)
    return _Work(name, one, name, found.cut, found.skipped)


def _made(
    codec: Codec,
    names: Sequence[str],
    sizes: Sequence[int],
    asked: Asked,
    settings_seed: int,
    how: tasks.Manner,
) -> Iterator[tuple[str, list[str], list[Item]]]:
    """(what, tasks, items) of documents that are made here."""
    seed, count = 900_000_000 + 10_000_000 * settings_seed, asked.count
    if "needle" in names:
        yield "needle", ["needle"], list(tasks.needle(codec, sizes, count, seed, how=how))
    for name, task in CHATS.items():
        if name in names:
            yield name, [name], list(task.items(codec, sizes[0], count, seed, how))
    same = [name for name in names if name != "needle" and name not in CHATS]
    if same:  # these look at the same documents, which are read once for all of them
        documents, each = -(-count // asked.questions), asked.questions
        items = list(tasks.facts(codec, sizes[0], documents, seed, how, each))
        yield ", ".join(same), same, items


def _checked_work(work: Sequence[_Work]) -> None:
    """Raise UsageError or ContextError if something cannot be measured, before the first run."""
    for each in work:
        if each.one.items:
            each.one.check(each.what)
    if work and not any(each.one.items for each in work):
        raise ContextError(
            "; ".join(each.told() for each in work),
            "nothing was measured; --truncate middle cuts records to the model's context",
        )


def _measure(each: _Work, terminal: Terminal) -> None:
    """Measure and print, with what was left out."""
    began = time.perf_counter()

    def progress(done: int, total: int) -> None:
        terminal.status(show.bar(done, total, time.perf_counter() - began, each.what))

    if each.one.items:
        each.one.measure(progress)
        terminal.clear_status()
        terminal.data(show.table(each.cells()) + "\n")
    if line := each.told():
        terminal.say(line)


def _too_long(work: Sequence[_Work]) -> dict[str, object]:
    """Records that were skipped and cut, by file."""
    return {
        "skipped": {e.what: n for e in work if (n := e.skipped + e.one.skipped)},
        "cut": {e.what: e.cut for e in work if e.cut},
    }


def _items(work: Sequence[_Work]) -> dict[str, object]:
    """The questions and the right answers, by task or file."""
    return {
        each.what: [
            {"source": item.source, "questions": item.questions, "right": item.right}
            for item in each.one.items
        ]
        for each in work
    }


def _save(
    work: Sequence[_Work], facts: dict[str, object], outputs: Sequence[Path], terminal: Terminal
) -> None:
    """After an error, write what was measured until then. The caller still reports the error."""
    if not any(each.one.completed for each in work):
        return
    done = {each.what: f"{each.one.completed:,} of {len(each.one.items):,}" for each in work}
    note = "stopped; documents measured: " + "; ".join(f"{w}: {n}" for w, n in done.items())
    try:
        cells = [cell for each in work for cell in each.cells()]
        paths = [p for p in outputs if not show.is_map(p) or any(c.by_place for c in cells)]
        if paths:
            facts = facts | _too_long(work) | {"stopped_after": done}
            show.write(cells, facts, paths, _items(work))
            note += f"; written to {', '.join(map(str, paths))}"
        for each in work:
            if 0 < each.one.completed < len(each.one.items):
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
    return list(dict.fromkeys(numbers))
