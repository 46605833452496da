"""`minikv ask`: one question, one answer, made for pipes."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from minikv.cli import documents, render
from minikv.cli.documents import Text
from minikv.cli.interrupt import Interrupts
from minikv.cli.terminal import Terminal
from minikv.cli.turn import open_chat, run_turn
from minikv.errors import UsageError
from minikv.settings import Generation, Settings

if TYPE_CHECKING:
    from minikv.chat.report import TurnReport

STDIN = "standard input"
_PATIENCE = 3.0  # seconds without input on a pipe before we say that we wait for it


def ask(
    question: str,
    files: Sequence[str],
    settings: Settings,
    generation: Generation,
    terminal: Terminal,
    *,
    errors: str,
    as_json: bool,
    stats: bool,
    loaders: Mapping[str, str] = documents.NO_LOADERS,
) -> None:
    """Answer on stdout. Leaves with 130 when the user stopped the answer.

    `question` "-" is the whole user message from standard input, verbatim; otherwise what is piped
    in is a document, before the named files.
    """
    settings.eviction()  # refuse a wrong policy before a large document is read
    question, texts = _inputs(question, files, errors, loaders, terminal)
    interrupts = Interrupts()
    session = open_chat(settings, texts, terminal, interrupts)
    answer = run_turn(session, question, generation, terminal, interrupts, show=not as_json)
    report = session.report
    assert report is not None, "a finished turn has a report"
    if as_json:
        terminal.data(json.dumps({"answer": answer, **report.to_dict()}))
    if stats:
        terminal.say(render.stats(report), "dim")
    elif not as_json:
        _say_why_it_ended(report, generation, terminal)
    if report.stop_reason == "user":
        raise typer.Exit(130)


def _inputs(
    question: str,
    files: Sequence[str],
    errors: str,
    loaders: Mapping[str, str],
    terminal: Terminal,
) -> tuple[str, list[Text]]:
    named = [documents.read_file(path, errors, loaders) for path in files if path != "-"]
    if question == "-":
        if sys.stdin.isatty():
            raise UsageError("`minikv ask -` reads the message from standard input", "pipe one in")
        message, note = documents.decode(_read_stdin(terminal), STDIN, errors)
        if note:
            terminal.warn(note)
        return message, named
    texts: list[Text] = []
    if "-" in files or not sys.stdin.isatty():
        data = _read_stdin(terminal)
        if data or "-" in files:
            texts.append(documents.read_bytes(data, STDIN, errors))
        elif not files:
            raise UsageError(
                "no document: standard input is empty and no file was named",
                'minikv ask "QUESTION" FILE, or pipe the document in; a message without a '
                "document goes through `minikv ask -`",
            )
    return question, texts + named


def _read_stdin(terminal: Terminal) -> bytes:
    """What is piped in, at most one byte over the size limit."""
    stream = sys.stdin.buffer
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        mode = 0  # not a real file: a test's buffer
    if stat.S_ISDIR(mode):
        raise UsageError("standard input is a directory")
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        ready, _, _ = select.select([stream], [], [], _PATIENCE)
        if not ready:
            terminal.say("reading standard input; `< /dev/null` if there is nothing to read")
    return stream.read(documents.MAX_BYTES + 1)


def _say_why_it_ended(report: TurnReport, generation: Generation, terminal: Terminal) -> None:
    if report.stop_reason == "length":
        terminal.note(f"stopped at --max-tokens {generation.max_tokens}")
    elif report.stop_reason == "context":
        terminal.note("stopped at the end of the model's context")
