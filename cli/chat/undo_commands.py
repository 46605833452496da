"""/undo and /retry: undo the last turns, or ask the last question again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from minikv.chat.eviction_config import EvictionConfig, read_budget
from minikv.cli.chat.settings_commands import reseeded
from minikv.cli.chat.slash import Command, Context
from minikv.cli.chat.turn import note_report, run_turn
from minikv.cli.screen import render
from minikv.cli.screen.text import cut
from minikv.cli.settings import values
from minikv.cli.settings.config import SETTINGS
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession

_RETRY = ("policy", "budget", "seed")


def _undo(context: Context, arguments: list[str]) -> None:
    session = context.session
    if len(arguments) > 1 or not all(a.isascii() and a.isdigit() for a in arguments):
        raise UsageError("/undo takes a number of turns", "/undo or /undo 2")
    waiting = list(session.pending)
    taken = session.undo(int(arguments[0]) if arguments else 1)
    for turn in reversed(taken):
        context.terminal.say(f"undone: {_line(turn.question)}")
    if session.turns and not session.fed and not (session.recall.tokens and session.recalls):
        context.terminal.say("  your next question reads the rest of the conversation again")
    again = [d.name or "the document" for d in session.pending if d not in waiting]
    gone = [
        document.name or "a document"
        for turn in taken
        for document in turn.documents
        if document not in session.pending
    ]
    if again:
        context.terminal.say(f"  {_list(again)} will be read with your next question")
    if gone:
        context.terminal.say(f"  {_list(gone)} came later and went too; /add brings it back")


def _retry(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    flags = _flags(arguments)
    eviction, seed = _settings(session, flags)
    session.check(eviction)  # before anything is undone
    if context.stopped is None or context.stopped not in session.undone[:1]:
        if not session.turns:
            raise UsageError(
                "no question was read yet that could be asked again",
                "type one; the arrow up brings back one that was stopped",
            )
        session.undo()
    question = session.undone[0].question
    own, other = (session.eviction, session.seed), eviction != session.eviction
    session.configure(eviction)
    session.seed = seed
    asked_with = session.undone[0].report
    same = asked_with.policy, asked_with.policy_options, asked_with.budget
    if session.fed and same != (
        eviction.policy,
        eviction.options_record(),
        eviction.budget_record(),
    ):
        session.refresh()  # the cache is another policy's
    if (eviction, seed) != own:
        terminal.say(f"for this answer: {render.policy_line(session)} · seed {seed}")
    terminal.say(f"asking again: {_line(question)}", "dim")
    before = session.turn
    try:
        run_turn(session, question, context.generation, terminal, context.interrupts)
    finally:
        session.configure(own[0])
        session.seed = own[1]
        if other and session.turn > before:
            session.refresh()  # the cache is another policy's
        if session.turn > before and session.report is not None:
            note_report(session.report, terminal)
            if other and not session.recall.place:
                terminal.note("  the next question reads all again, for the chat's own policy")
        context.stopped = session.undone[0] if session.undone else None
        if session.turn == before:
            terminal.say("  the question is undone; /retry asks it again")


def _flags(arguments: list[str]) -> dict[str, str]:
    """["--budget", "64", "--seed=2"] -> {"budget": "64", "seed": "2"}. Raises UsageError."""
    words = [part for word in arguments for part in word.split("=", 1)]
    flags, values = words[::2], words[1::2]
    for flag in flags:
        if flag not in [f"--{name}" for name in _RETRY]:
            raise UsageError(
                f"/retry does not take {flag!r}", "/retry --policy snapkv --budget 128 --seed 1"
            )
    if len(flags) > len(values):
        raise UsageError(f"/retry {flags[-1]} needs a value")
    return dict(zip([flag.removeprefix("--") for flag in flags], values, strict=True))


def _settings(session: ChatSession, flags: dict[str, str]) -> tuple[EvictionConfig, int]:
    """Policy, budget and seed to ask again with. Raises UsageError."""
    eviction, seed = session.eviction, session.seed
    if "seed" in flags:
        # A policy that draws follows the chat's seed, unless it was given one of its own.
        one, before = SETTINGS["seed"], seed
        seed = int(one.read(one.parse(flags["seed"]), "--seed"))  # type: ignore[arg-type]
        eviction = reseeded(eviction, seed, before)
    if "policy" in flags:
        eviction = replace(EvictionConfig.read(flags["policy"], seed=seed), budget=eviction.budget)
    if "budget" in flags:
        eviction = replace(eviction, budget=read_budget(flags["budget"]))
    return eviction, seed


def _line(text: str) -> str:
    """One line of a question, cut."""
    return cut(" ".join(text.split()), 70)


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _after_retry(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    flag = before[-1] if before else ""
    if flag in ("--policy", "--budget"):
        return values.values_of(SETTINGS[flag.removeprefix("--")], word)
    given = {one.partition("=")[0] for one in before}
    return (f"--{name}" for name in _RETRY if f"--{name}" not in given and flag != "--seed")


COMMANDS = (
    Command(("undo",), "[N]", "undo the last turn, or the last N", _undo),
    Command(
        ("retry",),
        "[--policy P] [--budget B] [--seed N]",
        "ask the last question again",
        _retry,
        follows=_after_retry,
    ),
)
