"""`minikv ask`: finds the question among the words of its line, and writes one answer, for
pipes."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import shlex
import sys
import termios
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

import typer

from minikv.chat.report import amount, percent_saved
from minikv.cli.asked import Question
from minikv.cli.chat.answer_commands import check
from minikv.cli.chat.turn import figures, open_chat, run_turn, thoughts_of, warn_of_toy
from minikv.cli.documents.named import STDIN, attach, opened, read_stdin
from minikv.cli.documents.text import Text, changes, decode, read_bytes
from minikv.cli.failures import Interrupts
from minikv.cli.saved.database import LAST
from minikv.cli.saved.keeper import Keeper
from minikv.cli.saved.transcript import resumed
from minikv.cli.screen import render
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clean, cut
from minikv.cli.settings.config import Interface
from minikv.cli.settings.flags import Call
from minikv.errors import UsageError
from minikv.models import refuse_without_torch
from minikv.settings import Generation, Settings

if TYPE_CHECKING:
    from minikv.chat.report import TurnReport
    from minikv.chat.session import ChatSession


_PATH = re.compile(r"[/\\~]|\.\w{1,8}$")


def sorted_out(question: str, files: Sequence[str]) -> tuple[str, list[str], str]:
    """The question, the files, and, if the question was not the first word, a line that says how
    they were read. Raises UsageError."""
    words = [question, *files]
    if question == "-" or (not _named(question) and all(map(_named, files))):
        return question, list(files), ""
    named = [word for word in words if _file(word)]
    asked = [word for word in words if not _file(word)]
    if not asked:
        raise UsageError(
            "there is no question: every word names a file",
            f"{_line('QUESTION', named)}; to ask a question that is the name of a file, use "
            "`minikv ask -`",
        )
    if len(asked) == 1:
        note = f"read as {_line(asked[0], named)}" if _file(question) else ""
        return asked[0], named, note
    if " " in question:
        return question, list(files), ""  # a file that is not there is said when it is read
    raise UsageError(
        f"{clean(', '.join(asked[:-1]))} and {clean(asked[-1])} name no file",
        f"if they are the question, put it in quotes: {_line(' '.join(asked), named)}",
    )


def _named(word: str) -> bool:
    """Whether a word names an existing file. A question mark alone makes no pattern, because
    questions have one."""
    path = os.path.expanduser(word)
    try:
        pattern = re.search(r"[*\[]", path) and next(glob.iglob(path), None) is not None
        return word == "-" or os.path.lexists(path) or bool(pattern)
    except ValueError:  # a NUL
        return False


def _file(word: str) -> bool:
    """Whether a word names a file, or looks like the path of one that is not there."""
    return _named(word) or not word or (" " not in word and bool(_PATH.search(word)))


def _line(question: str, files: Sequence[str]) -> str:
    """The line to type; FILE is in the place of files that were not named."""
    asked = question if question == "QUESTION" else shlex.quote(clean(question))
    named = [shlex.quote(clean(file)) for file in files] or ["FILE"]
    return " ".join(["minikv ask", asked, *named])


_ASKED = 60  # characters of the last question that are shown
_MOST = 0.5  # if a larger share of the tokens read was evicted, a line says so


def ask(
    asked: Question,
    settings: Settings,
    generation: Generation,
    interface: Interface,
    call: Call,
) -> None:
    """Answer on stdout. `asked.chat` asks in the saved chat of this name, and `asked.go_on` in that
    of the last `ask`, with that chat's settings except those that were typed; the chat is then
    saved with this turn. Exits with 130 if the user stopped the answer.

    The question "-" means the whole user message from standard input, verbatim except for one final
    line end, which `echo` adds. Otherwise piped input is the document if no file is named, or if
    one of the files is "-".
    """
    chat, go_on, as_json = asked.chat, asked.go_on, asked.as_json
    terminal, given = call.terminal, call.given
    terminal.thoughts = interface.thoughts
    question, files, note = sorted_out(asked.question, asked.files or [])
    if note:
        terminal.note(note)
    refuse_without_torch()
    settings.check_eviction()  # refuse a wrong policy before a large document is read
    if chat is not None and go_on:
        raise UsageError("--continue means the chat of the last ask", "give --chat NAME alone")
    name = LAST if go_on else (chat or "")
    go_on, remembers = go_on or chat is not None, settings.remember != "off"
    if name == LAST and not remembers:
        raise UsageError(
            "with --remember off no ask is saved that could be continued", "leave it out here"
        )
    own = settings
    if not go_on and settings.reuse == "recall":  # there is no later question
        settings = replace(settings, reuse="once")
    piped = "-" in (question, *files) or not (files or go_on)  # a chat has its documents
    question, texts = _inputs(question, files, terminal, piped=piped)
    interrupts = Interrupts()
    keeper, session, before = Keeper(terminal, active=go_on, asks=True), None, None
    try:
        if go_on:
            settings = resumed(settings, name, given)
        session = open_chat(settings, [] if go_on else texts, terminal, interrupts)
        keeper.attend(session)
        checks = settings.check == "on"
        if not (go_on or checks) and session.engine.kv.rules.cannot_recall is None:
            session.recall.kind = "none"  # a tier serves later questions, and --check
        if go_on:
            _take_up(keeper, session, name, given, texts, terminal)
            before = session.report
        if not piped and unread(sys.stdin):
            terminal.note("what is piped in was not read: `-` as a FILE reads it, too")
        if not (session.documents or session.pending):
            warn_of_toy(session, terminal, [question] if asked.question == "-" else [])
        answer = run_turn(session, question, generation, terminal, interrupts, show=not as_json)
        if checks:
            check(session, terminal, interrupts)
    finally:
        if session is not None and session.report is not before:
            if go_on:
                keeper.keep(session)
            elif remembers:  # for later questions, with the settings that were changed for this one
                session.reuse, session.recall.kind = own.reuse, own.tier
                keeper.keep_ask(session)
        if session is not None:
            session.recall.leave()
        keeper.close()
    report = session.report
    assert report is not None, "a finished turn has a report"
    if as_json or not interface.stats:
        _say_what_is_gone(report, terminal)
    if as_json:
        thoughts = thoughts_of(session.turns[-1])
        terminal.data(json.dumps({"answer": answer, **thoughts, **figures(report, terminal)}))
    if interface.stats:
        terminal.say(render.stats(report), "dim")
    elif not as_json:
        _say_why_it_ended(report, generation, terminal)
    if report.stop_reason == "user":
        raise typer.Exit(130)


def _take_up(
    keeper: Keeper,
    session: ChatSession,
    name: str,
    given: Collection[str],
    texts: Sequence[Text],
    terminal: Terminal,
) -> None:
    """Replace the session's chat by the saved one, with further documents."""
    keeper.load(session, name, given=given)
    count = len(session.turns)
    turns, under = amount(count, "turn"), session.eviction.pair
    asked = cut(" ".join(session.turns[-1].question.split()), _ASKED) if count else ""
    where = f"in chat {name}" if name != LAST else f'under {under}, after "{asked}"'
    terminal.note(f"{where} ({turns})")
    for line in changes(session.documents + session.pending):
        terminal.warn(line)
    attach(session, texts, terminal)


def _inputs(
    question: str, files: Sequence[str], terminal: Terminal, *, piped: bool
) -> tuple[str, list[Text]]:
    if question == "-":
        if "-" in files:
            raise UsageError(
                "standard input cannot be both the message and a document",
                'minikv ask "QUESTION" - takes a piped document, minikv ask - FILE a message',
            )
        if sys.stdin.isatty():
            raise UsageError("`minikv ask -` reads the message from standard input", "pipe one in")
        named = opened(files, terminal, lambda: b"")
        message = decode(read_stdin(terminal), STDIN)
        return re.sub(r"\r?\n\Z", "", message), named
    if files:
        return question, opened(files, terminal, lambda: read_stdin(terminal))
    if not piped or sys.stdin.isatty():
        return question, []
    data = read_stdin(terminal)
    if not data:
        raise UsageError(
            "no document: standard input is empty and no file was named",
            'minikv ask "QUESTION" FILE, or pipe the document in; a message without a '
            "document goes through `minikv ask -`",
        )
    return question, [read_bytes(data, STDIN)]


def unread(stream: TextIO) -> bool:
    """Whether something waits in a stream that is a pipe or a file."""
    try:
        return fcntl.ioctl(stream.fileno(), termios.FIONREAD, b"\0" * 4) != b"\0" * 4
    except (OSError, ValueError):  # a device, or a stream in memory
        return False


def _say_what_is_gone(report: TurnReport, terminal: Terminal) -> None:
    """Warn if most of the tokens read were evicted. Tokens that slide out of a window do not
    count."""
    tokens, kv = report.tokens, report.kv_bytes
    gone = tokens.evicted_total / tokens.seen_total if tokens.seen_total else 0.0
    if report.against_full.same is None and min(gone, kv.saved) >= _MOST:
        terminal.warn(
            f"{percent_saved(gone)} of the tokens read were evicted ({tokens.kept_mean:,.0f} of "
            f"{tokens.seen_total:,} tokens per head kept): the answer may miss something; a larger "
            "--budget keeps more"
        )


def _say_why_it_ended(report: TurnReport, generation: Generation, terminal: Terminal) -> None:
    if report.stop_reason == "length":
        terminal.note(f"stopped at --max-tokens {generation.max_tokens}")
    elif report.stop_reason == "context":
        terminal.note("stopped at the end of the model's context")
