"""`minikv eval`: the quality of each policy at each budget, compared with the full cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.checks import quoted
from minikv.cli.eval import haystack, metrics, show, tasks
from minikv.cli.eval.fitting import TRUNCATIONS, fitted
from minikv.cli.eval.items import Item, together
from minikv.cli.eval.names import ANSWERED, BESIDE, TASKS
from minikv.cli.eval.passes import PASSES
from minikv.cli.eval.records import is_text, named, read_items
from minikv.cli.eval.run import REUSES, Run, choices, passes
from minikv.cli.eval.tasks import CHATS
from minikv.cli.screen.progress import Live
from minikv.cli.screen.terminal import Terminal
from minikv.cli.values import read_list
from minikv.errors import ContextError, UsageError
from minikv.loader import build
from minikv.models.bundled.world import Fact
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Settings

_LONGEST = 10_000_000  # tokens of a made document


@dataclass(frozen=True, slots=True)
class Asked:
    """What `minikv eval` is to do. Strings are comma-separated lists.

    `tasks`: of `names.TASKS`. `files`: records, or texts. `lengths`: tokens of documents. `count`:
    questions of a task; `questions` of them are about the same document. `reuse`: what later
    questions are answered from. `truncate`: what is done with records that are too long.
    `haystack`: a text whose parts are the documents; `needles`: facts to put into it, as
    `haystack.given_fact` reads them.
    """

    tasks: str = ""
    files: Sequence[Path] = ()
    lengths: str = "2000"
    count: int = 40
    questions: int = 1
    reuse: str = "once"
    truncate: str = "none"
    haystack: Path | None = None
    needles: Sequence[str] = ()
    outputs: show.Outputs = ()


def evaluate(asked: Asked, settings: Settings, terminal: Terminal) -> None:
    """Measure and print; policies and budgets of `settings` are lists with commas.

    Raises UsageError for anything that is wrong with them before a model is loaded.
    """
    wanted = read_list(asked.tasks)
    sizes = _checked(asked, wanted)
    evictions = choices(
        read_list(settings.policy, "--policy"),
        read_list(settings.budget, "--budget"),
        read_list(settings.decode, "--decode"),
        settings.seed,
        settings.stride,
        settings.options,
    )
    show.check(asked.outputs, wanted)
    given = [haystack.given_fact(text) for text in asked.needles]
    hay = haystack.read_text(asked.haystack) if asked.haystack else ""
    read = {path: _content(path) for path in asked.files}
    if any(item.metric is metrics.rouge_l for _, items in read.values() for item in items):
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
    runs = [
        *_of_files(chat, read, wanted, sizes[0], evictions, asked),
        *_of_made(chat, wanted, sizes, evictions, asked, settings, hay, given),
    ]
    _check(runs)
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
        "reuse": list(_finds(asked)),
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
    try:
        for run in runs:
            _measure(run, terminal)
    except BaseException:
        _save(runs, facts, asked.outputs, terminal)
        raise
    _write(runs, facts, asked.outputs)


def _checked(asked: Asked, wanted: Sequence[str]) -> list[int]:
    """The lengths. Raises UsageError for arguments that cannot be measured."""
    for flag, given, known in (
        ("--tasks", wanted, TASKS),
        ("--reuse", _finds(asked), REUSES),
        ("--truncate", [asked.truncate], TRUNCATIONS),
    ):
        for name in given:
            if name not in known:
                what = f"unknown {flag.strip('-').removesuffix('s')} {name!r}"
                raise UsageError(what, f"{flag} takes: {', '.join(known)}")
    for flag, number in (("-n", asked.count), ("--questions", asked.questions)):
        if number < 1:
            raise UsageError(f"{flag} must be at least 1, got {number}")
    if asked.needles and not asked.haystack:
        raise UsageError("--needle needs a text to be put into", "give it with --haystack TEXT")
    if "answers" in wanted and all(map(is_text, asked.files)):
        hint = "give a LongBench or RULER file, or --haystack TEXT with the tasks facts and needle"
        raise UsageError("answers are to the questions of records, and there are none", hint)
    chats = [name for name in wanted if name in CHATS]
    if asked.haystack and chats:
        hint = "--haystack goes with needle and facts, and agree, kl and ppl of them"
        raise UsageError(f"the task {chats[0]} is about a world of its own", hint)
    sizes = _numbers(asked.lengths)
    made = _made(asked, wanted)
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


Content = tuple[str, Sequence[Item]]
"""A text, or the items of records."""


def _content(path: Path) -> Content:
    return (haystack.read_text(path), ()) if is_text(path) else ("", list(read_items(path)))


def _made(asked: Asked, wanted: Sequence[str]) -> list[str]:
    """The tasks whose documents are not those of FILEs."""
    return [name for name in wanted if name not in ("answers", *BESIDE) or not asked.files]


def _of_files(
    chat: ChatSession,
    read: Mapping[Path, Content],
    wanted: Sequence[str],
    tokens: int,
    evictions: Sequence[EvictionConfig],
    asked: Asked,
) -> Iterator[Run]:
    """What is to be measured of each file: its records, or the parts of its text."""
    alike = Counter(map(named, read))
    for path, (text, records) in read.items():
        told: Any = {"name": named(path) if alike[named(path)] == 1 else str(path)}
        kinds = [name for name in wanted if name in BESIDE or (name == "answers" and not text)]
        kinds = kinds or ["ppl" if text else "answers"]
        if text:
            items = haystack.texts(chat.tokenizer, text, tokens, asked.count, str(path))
        else:
            needs = [PASSES[one] for one in passes(kinds, records)]
            fit, cut, skipped = fitted(chat, records, needs, asked.truncate)
            items = together(fit)
            told |= {"cut": cut, "skipped": skipped}
        yield Run(chat, kinds, items, evictions, _finds(asked), is_file=True, **told)


def _of_made(
    chat: ChatSession,
    wanted: Sequence[str],
    sizes: Sequence[int],
    evictions: Sequence[EvictionConfig],
    asked: Asked,
    settings: Settings,
    hay: str,
    given: Sequence[Fact],
) -> Iterator[Run]:
    """Documents that are made here, or parts of the text `hay` with facts."""
    codec, how, count = chat.tokenizer, tasks.manner(settings.model), asked.count
    seed = 900_000_000 + 10_000_000 * settings.seed
    names = _made(asked, wanted)
    made: list[tuple[list[str], Iterator[Item]]] = []
    beside = [name for name in names if name in BESIDE]
    alone = [] if "facts" in names else beside  # else they look at the same documents as facts
    if "needle" in names:
        if asked.haystack:
            needles = haystack.needle(codec, hay, sizes, count, seed, how, given)
        else:
            needles = tasks.needle(codec, sizes, count, seed, how=how)
        made.append((["needle", *alone], needles))
    for name, task in CHATS.items():
        if name in names:
            made.append(([name, *alone], task.items(codec, sizes[0], count, seed, how)))
    if "facts" in names or (names and not made):
        documents, each = -(-count // asked.questions), asked.questions
        if asked.haystack:
            facts = haystack.facts(codec, hay, sizes[0], documents, seed, how, each, given)
        else:
            facts = tasks.facts(codec, sizes[0], documents, seed, how, each)
        made.append(([name for name in names if name == "facts" or name in BESIDE], facts))
    for kinds, items in made:
        yield Run(chat, kinds, list(items), evictions, _finds(asked), name=", ".join(kinds))


def _finds(asked: Asked) -> Sequence[str]:
    return read_list(asked.reuse, "--reuse")


def _check(runs: Sequence[Run]) -> None:
    """Raise UsageError or ContextError if something cannot be measured, before the first run."""
    for run in runs:
        if run.items:
            run.check()
    if runs and not any(run.items for run in runs):
        raise ContextError(
            "; ".join(run.left_out() for run in runs),
            "nothing was measured; --truncate middle cuts records to the model's context",
        )


def _measure(run: Run, terminal: Terminal) -> None:
    """Measure and print, with what was left out."""
    if run.items:
        run.measure(Live(terminal, run.name, "runs"))
        terminal.clear_status()
        terminal.data(show.table(run.cells()) + "\n")
    if line := run.left_out():
        terminal.say(line)


def _write(runs: Sequence[Run], facts: dict[str, object], outputs: show.Outputs) -> list[Path]:
    """Write what was measured, with the records that were skipped and cut; returns the files."""
    facts |= {"skipped": {run.name: run.skipped for run in runs if run.skipped}}
    facts |= {"cut": {run.name: run.cut for run in runs if run.cut}}
    items: dict[str, object] = {
        run.name: [
            {"source": item.source, "questions": item.questions, "right": item.right}
            for item in run.items
        ]
        for run in runs
    }
    return show.write([cell for run in runs for cell in run.cells()], facts, outputs, items)


def _save(
    runs: Sequence[Run], facts: dict[str, object], outputs: show.Outputs, terminal: Terminal
) -> None:
    """After an error, write what was measured until then. The caller still reports the error."""
    if not any(run.completed for run in runs):
        return
    done = {run.name: f"{run.completed:,} of {len(run.items):,}" for run in runs}
    note = "stopped; documents measured: " + "; ".join(f"{w}: {n}" for w, n in done.items())
    try:
        if paths := _write(runs, facts | {"stopped_after": done}, outputs):
            note += f"; written to {', '.join(map(str, paths))}"
        for run in runs:
            if 0 < run.completed < len(run.items):
                terminal.data(show.table(run.cells()) + "\n")
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
