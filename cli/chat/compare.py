"""`/compare`: the last question again, under other policies and under a full cache, side by side.

Every run is a separate conversation over the same network: the documents and the last question,
greedy, one cache after another. The running chat never changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from minikv.chat.eviction_config import EvictionConfig, read_budget
from minikv.chat.report import TurnReport, amount
from minikv.cli.chat.slash import Command, Context
from minikv.cli.screen.progress import Live
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clipped, folded, padded
from minikv.cli.settings import flags
from minikv.cli.settings.config import SETTINGS
from minikv.errors import Interrupted, UsageError
from minikv.policies import default_step
from minikv.settings import Generation, Settings

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession

NARROWEST = 80
"""On a narrower screen, the runs are listed one below another."""
ENOUGH = 16
"""The fewest tokens of an answer whose speed is compared."""
_COLUMN = 22  # fewest columns of a run next to others
_LABEL = 12  # columns of the names of the rows
_BUDGET = "512"
_USAGE = "/compare POLICY [POLICY ...] [budget=N], for example /compare streaming h2o budget=256"

Show = Callable[[int, int, int], None]
"""Shows the progress of a run: tokens read, of how many, and pieces of text written."""


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's answer: its text, its tokens, and what the turn cost."""

    label: str
    text: str
    tokens: tuple[int, ...]
    report: TurnReport

    @property
    def speed(self) -> float | None:
        """Tokens per second while writing; None if there were too few."""
        return self.report.rate.decode_tok_s if self.report.tokens.generated >= ENOUGH else None


@dataclass(slots=True)
class Stop:
    """Set by Ctrl-C. The running session stops at its next safe point, and no other one starts."""

    session: ChatSession | None = None
    asked: bool = False

    def __call__(self) -> None:
        self.asked = True
        if self.session is not None:
            self.session.cancel()


def _compare(context: Context, arguments: list[str]) -> None:
    session, terminal, given = context.session, context.terminal, context.generation
    if session.report is None:
        raise UsageError("no question to compare answers to", "ask one first")
    question, choices = session.turns[-1].question, read_choices(session, arguments)
    for eviction in choices:
        beside(session, eviction)  # raises for a wrong pair before anything runs
    greedy = Generation(given.max_tokens, stop=given.stop, max_thoughts=given.max_thoughts)
    runs: list[Run] = []
    stop, told = Stop(), {*session.report.warnings}

    def notice(line: str) -> None:
        """Show a warning of a run, unless this chat or another run has shown it."""
        if line not in told:
            told.add(line)
            terminal.warn(f"{name}: {line}")

    try:
        with context.interrupts.stopping(stop):
            # The full cache is the largest, so it runs first: its errors then cost no time.
            for eviction in (choices[-1], *choices[:-1]):
                name, stop.session = label(eviction), beside(session, eviction)
                live = _live(terminal, name)
                runs.append(run(stop.session, name, question, greedy, live, stop, notice))
                stop.session = None  # so that only one cache exists in addition to the chat's
    finally:
        if len(runs) > 1:  # also after Ctrl-C
            runs = [*runs[1:], runs[0]]
            width = terminal.screen.width
            terminal.say(table(question, len(session.turns) - 1, runs, width))


def _live(terminal: Terminal, name: str) -> Show:
    reading = Live(terminal, f"{name}: reading")

    def show(done: int, total: int, written: int) -> None:
        if written:
            terminal.frame(lambda: f"{name}: writing  {written:,}")
        else:
            reading(done, total)

    return show


def _after_compare(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    if word.startswith("budget="):
        return [f"budget={budget}" for budget in SETTINGS["budget"].examples]
    given = [one.partition("=")[0] for one in before]
    return [one for one in (*flags.policies(word), "budget=") if one.rstrip("=") not in given]


COMMANDS = (
    Command(
        ("compare",),
        "[POLICY ...] [budget=N]",
        "the last question again under other policies and a full cache, side by side",
        _compare,
        follows=_after_compare,
    ),
)


# -- the runs -------------------------------------------------------------------------------


def read_choices(session: ChatSession, arguments: Sequence[str]) -> list[EvictionConfig]:
    """The policies to run: the chat's own with its options, the named ones, and finally full. While
    `--budget auto` evicts nothing, they run with `_BUDGET`. Raises UsageError.
    """
    own, budget = session.eviction, session.eviction.budget
    if budget.unit == "auto":  # its meaning in this chat
        budget = replace(budget, unit="rows") if budget.value else read_budget(_BUDGET)
    choices = [own] if own.may_evict else []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option == "budget" and value:
            budget = read_budget(value)
        elif equals:
            raise UsageError(f"/compare takes policies and budget=N, got {argument!r}", _USAGE)
        elif not own.may_evict or argument != own.policy:
            choices.append(EvictionConfig.read(argument, seed=session.seed))
    choices = [replace(one, budget=budget) for one in choices]
    choices = [one for n, one in enumerate(choices) if one.evicts and one not in choices[:n]]
    if not choices:
        raise UsageError("nothing to compare a full cache to: this chat evicts nothing", _USAGE)
    return [*choices, EvictionConfig.read("full", seed=session.seed)]


def label(eviction: EvictionConfig) -> str:
    """A run's name: policy, the policy while writing if that is another one, and budget."""
    if not eviction.evicts:
        return "full"
    name = eviction.policy
    if eviction.decode not in (eviction.policy, default_step(eviction.policy)):
        name += f" then {eviction.decode}"
    if eviction.stride:
        name += f" stride {eviction.stride}"
    return f"{name} {eviction.budget}"


def beside(session: ChatSession, eviction: EvictionConfig) -> ChatSession:
    """A new chat with the same documents, over the same network, tokenizer and template, with its
    own cache. If the chat has a tier with exact rows, the new chat reads them instead of the
    documents. Raises UsageError if policy and budget cannot be combined."""
    from minikv.cache.kv_cache import KVCache
    from minikv.chat.recall import Recall
    from minikv.chat.session import ChatSession
    from minikv.engine.engine import Engine

    kv = session.engine.kv
    own = KVCache(
        kv.shape,
        eviction.rules(),
        dtype=kv.dtype,
        device=kv.device,
        kv=kv.kv,
        output=kv.output,
        rotary=kv.rotary,
    )
    other = ChatSession(
        Engine(session.engine.network, own),
        session.tokenizer,
        session.template,
        Settings(
            seed=session.seed,
            system=session.system,
            pin_system=session.pin_system,
            # It asks only once. If its policy cannot use the tier, it reads everything.
            reuse="auto" if session.reuse == "recall" else session.reuse,
            fidelity="off",
        ),
        max_context=session.max_context,
        eviction=eviction,
        facts=session.facts,
    )
    if session.recall.tokens and session.recall.dtype == "same":
        other.recall = Recall.lent(session.recall, own, getattr(session.engine.network, "rows", 1))
    other.words = session.words
    for document in session.documents:
        other.attach(document.text, document.name)
    return other


def run(
    session: ChatSession,
    name: str,
    question: str,
    greedy: Generation,
    show: Show,
    stop: Stop,
    notice: Callable[[str], None] | None = None,
) -> Run:
    """Ask in a fresh chat. Raises the session's errors, and Interrupted once stopped."""
    stopped = Interrupted(f"stopped comparing at {name}", "the chat is as it was")
    thoughts, pieces = 0, list[str]()

    def reading(done: int, total: int) -> None:
        if stop.asked:
            raise stopped
        show(done, total, 0)

    def thinking(piece: str, tokens: int) -> None:
        nonlocal thoughts
        thoughts = tokens
        show(0, 0, tokens)

    how = {"progress": reading, "notice": notice, "thinking": thinking}
    try:
        for piece in session.ask(question, **asdict(greedy), **how):  # type: ignore[arg-type]
            pieces.append(piece)
            show(0, 0, thoughts + len(pieces))
    except Interrupted:
        raise stopped from None
    if stop.asked:
        raise stopped
    report = session.report
    assert report is not None
    tokens = session.fed[report.tokens.prompt_new + report.tokens.prompt_reused :]
    tokens += [] if session.pending_token is None else [session.pending_token]
    return Run(name, "".join(pieces), tuple(tokens), report)


# -- the table ------------------------------------------------------------------------------


def same_as(tokens: Sequence[int], full: Sequence[int]) -> str:
    """How many of its first tokens an answer has in common with the full cache's."""
    count = amount(len(full), "token")
    if tokens == full:
        every = count if len(full) == 1 else f"all {count}"
        return every if full else "both are empty"
    both = zip(tokens, full, strict=False)
    first = next((i for i, (a, b) in enumerate(both) if a != b), min(len(tokens), len(full)))
    return f"first {first:,} of {count}" if first else f"none of {count}"


def facts(one: Run, full: Run) -> dict[str, str]:
    """The rows of a run, in order; figures that were not measured say so."""
    tokens, rate = one.report.tokens, one.report.rate
    faster = ""
    if one is not full and one.speed and full.speed:  # rounded down, so that it is never too high
        faster = f", x{math.floor(100 * one.speed / full.speed + 1e-9) / 100:.2f} of full"
    recalled = f"{amount(tokens.prompt_new, 'token')}, {tokens.prompt_reused:,} from the tier"
    return {
        "answer": one.text.strip() or "(empty)",
        "same as full": "-" if one is full else same_as(one.tokens, full.tokens),
        "memory": one.report.memory,
        "kept a head": (
            f"{tokens.kept_mean:,.1f} of {tokens.seen_total:,}, "
            f"{tokens.kept_min:,} to {tokens.kept_max:,}"
        ),
        "read": recalled if tokens.prompt_reused else _rate(rate.prefill_tok_s),
        "write": _rate(rate.decode_tok_s) + faster,
    }


def _rate(value: float | None) -> str:
    return "not measured" if value is None else f"{value:,.1f} tok/s"


def table(question: str, before: int, runs: Sequence[Run], width: int) -> str:
    """The runs side by side, or one below the other on a narrow screen; the full cache is last.

    Says what was run, and that the `before` earlier questions were left out.
    """
    rows = [facts(one, runs[-1]) for one in runs]
    lines = [f"question: {clipped(question, width - 11)}"]
    column = (width - _LABEL - 1) // len(runs)
    if width >= NARROWEST and column >= _COLUMN:
        cells = [("", *(one.label for one in runs))]
        cells += [(name, *(row[name] for row in rows)) for name in rows[0]]
        lines += _set(cells, column)
    else:
        for one, row in zip(runs, rows, strict=True):
            below = _set([*row.items()], width - _LABEL - 3)
            lines += [one.label, *(f"  {line}" for line in below)]
    lines.append(
        "each run is a fresh conversation: the chat's documents and this question, greedy; the "
        "chat itself is as it was"
    )
    if before:
        several = f"the {before:,} questions before it and their answers"
        left = "the question before it and its answer" if before == 1 else several
        lines.append(f"{left} are in none of the runs")
    return "\n".join(lines)


def _set(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Rows of cells as lines: a name, and columns of this width with two blanks at their ends."""
    wide = (_LABEL + 1, *[width] * (len(rows[0]) - 1))
    return [
        "".join(map(padded, line, wide)).rstrip()
        for name, *cells in rows
        for line in zip_longest([name], *(folded(cell, width - 2) for cell in cells), fillvalue="")
    ]
