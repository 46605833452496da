"""Commands about the last answer: /continue, /copy, /verify and --check, /undo and /retry; and
/refresh, about the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from minikv.chat.eviction_config import EvictionConfig, read_budget
from minikv.chat.report import amount
from minikv.cli.chat.settings_commands import reseeded
from minikv.cli.chat.slash import Command, Context
from minikv.cli.chat.turn import continue_turn, note_report, run_turn
from minikv.cli.failures import Interrupts
from minikv.cli.screen import render
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clipped, cut
from minikv.cli.settings.config import SETTINGS
from minikv.cli.settings.flags import values_of
from minikv.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from minikv.chat.answer import Verification
    from minikv.chat.session import ChatSession


MOST = 75_000
"""The most bytes that /copy sends: most terminals silently drop more."""
_TOKEN = 24  # most cells of a quoted token


def _continue(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    before = session.report
    try:
        continue_turn(session, context.generation, terminal, context.interrupts)
    finally:
        if session.report is not before and session.report is not None:
            note_report(session.report, terminal)


def _copy(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    if not session.turns:
        raise UsageError("there is no answer to copy", "ask something first")
    answer = session.turns[-1].answer.strip("\n")
    elsewhere = "/export FILE.html writes the chat to a file"
    size = len(answer.encode())
    if size > MOST:
        raise UsageError(
            f"the answer has {size:,} bytes, and a terminal's clipboard takes about {MOST:,}",
            elsewhere,
        )
    if not terminal.copy(answer):
        raise UsageError("/copy needs a terminal that takes escape sequences", elsewhere)
    count = len(answer)
    terminal.say(
        f"sent {amount(count, 'character')} to the terminal's clipboard, which "
        "not every terminal allows (OSC 52)"
    )


def _refresh(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    if session.recall.place and session.reuse in ("auto", "recall"):
        terminal.say("nothing to do: every question is answered from all that was read")
        return
    session.refresh()
    what = "the documents and all that was said" if session.documents else "all that was said"
    terminal.say(f"your next question reads {what} again")


# -- /verify and --check ---------------------------------------------------------------------


def _verify(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    known = session.report.against_full if session.report is not None else None
    if known is not None and known.same and not known.checked:
        terminal.say("as without eviction: nothing was evicted")
        return
    found = _written_again(session, terminal, context.interrupts)
    if found.differs or found.complete:
        terminal.say(shown(session.turns[-1].answer, found))
    if not found.complete:
        raise Interrupted(
            f"stopped verifying after {amount(len(found.tokens), 'token')}", "the chat is as it was"
        )


def check(session: ChatSession, terminal: Terminal, interrupts: Interrupts) -> bool:
    """Compare the last answer with the answer of a full cache, and say whether they agree. Stops
    when a key is typed, or at Ctrl-C. Returns False if this chat's answers cannot be compared."""
    report = session.report
    if report is None or report.against_full.same is not None or not report.tokens.generated:
        return True
    keyboard = terminal.keyboard
    typed = keyboard.waiting if keyboard is not None else lambda: False
    try:
        found = _written_again(session, terminal, interrupts, typed)
    except UsageError as error:
        terminal.note(f"  {terminal.words(str(error))}; answers are not checked from here on")
        return False
    except Interrupted as stopped:
        terminal.note(f"  {terminal.words(str(stopped))}")
        return True
    if found.differs or found.complete:
        terminal.note(f"  {session.report.against_full.words}" if session.report else "")
    return True


def _written_again(
    session: ChatSession,
    terminal: Terminal,
    interrupts: Interrupts,
    typed: Callable[[], bool] = lambda: False,
) -> Verification:
    """What `ChatSession.verify` finds. typed: whether to stop."""

    def show(done: int, total: int) -> None:
        terminal.frame(lambda: f"checking  {done:,} of {amount(total, 'token')}")
        if typed():
            session.cancel()

    with (
        terminal.silent(),
        closing(session.verify(progress=show)) as pieces,
        interrupts.stopping(session.cancel),
    ):
        for _ in pieces:
            pass
    found = session.verified
    assert found is not None
    return found


def shown(answer: str, found: Verification) -> str:
    """What /verify says: that the answers are the same, or both and where they first differ."""
    took = f"{found.seconds:.1f} s"
    if not found.differs:
        return (
            f"the same: {'all ' if found.same > 1 else ''}{amount(found.same, 'token')}, each "
            f"written from all that was read ({took})"
        )
    lines = []
    for name, text in (("the answer", answer), ("from all that was read", found.text)):
        rows = (text.strip() or "(empty)").split("\n")
        lines += [f"{name}:", *(f"    {row}".rstrip() for row in rows)]
    lines.append(
        f"the same: {amount(found.same, 'token')}; then the answer has {_quoted(found.was)}, and "
        f"from all that was read it is {_quoted(found.now)} ({took})"
    )
    return "\n".join(lines)


def _quoted(token: str | None) -> str:
    if token is None:
        return "its end"
    seen = clipped(token, _TOKEN)
    return f'"{seen}"' if seen else ascii(token)


# -- /undo and /retry ---------------------------------------------------------------------------

_RETRY = ("policy", "budget", "seed")


def _undo(context: Context, arguments: list[str]) -> None:
    session = context.session
    if len(arguments) > 1 or not all(a.isascii() and a.isdigit() for a in arguments):
        raise UsageError("/undo takes a number of turns", "/undo or /undo 2")
    waiting = list(session.pending)
    taken = session.undo(int(arguments[0]) if arguments else 1)
    for turn in reversed(taken):
        context.terminal.say(f"undone: {_line(turn.question)}")
    if session.reads_again or (session.turns and not session.log.ids):
        context.terminal.say("  your next question reads the rest of the conversation again")
    again = [d.name or render.PIPED for d in session.pending if d not in waiting]
    gone = [
        document.name or render.PIPED
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
            what = "all questions were undone" if session.undone else "no question was read yet"
            hint = "type one; the arrow up brings earlier ones back"
            raise UsageError(f"{what}: there is none to ask again", hint)
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
            if other and session.reads_again:
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
        return values_of(SETTINGS[flag.removeprefix("--")], word)
    given = {one.partition("=")[0] for one in before}
    return (f"--{name}" for name in _RETRY if f"--{name}" not in given and flag != "--seed")


COMMANDS = (
    Command(("continue",), "", "write more of an answer that was cut off", _continue),
    Command(("copy",), "", "the last answer to the clipboard", _copy),
    Command(("refresh",), "", "read everything again with the next question", _refresh),
    Command(
        ("verify",),
        "",
        "write the last answer again from all that was read, and show where the two differ",
        _verify,
    ),
    Command(("undo",), "[N]", "undo the last turn, or the last N", _undo),
    Command(
        ("retry",),
        "[--policy P] [--budget B] [--seed N]",
        "ask the last question again",
        _retry,
        follows=_after_retry,
    ),
)
