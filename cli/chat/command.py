"""`minikv chat`: questions and answers over one cache until the user leaves."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import typer

import minikv
from minikv.cli.asked import Talk
from minikv.cli.chat import slash_commands
from minikv.cli.chat.answer_commands import check
from minikv.cli.chat.slash import Context, Leave
from minikv.cli.chat.turn import note_report, open_chat, run_turn
from minikv.cli.documents.named import attach, opened, piped_document, piped_lines
from minikv.cli.documents.text import changes
from minikv.cli.failures import Interrupts, show
from minikv.cli.paths import history_file
from minikv.cli.saved.commands import origins_of, summary
from minikv.cli.saved.keeper import Keeper
from minikv.cli.saved.listing import newest
from minikv.cli.saved.transcript import resumed
from minikv.cli.screen import render
from minikv.cli.screen.terminal import OutputError, Terminal
from minikv.cli.settings.config import Interface
from minikv.cli.settings.flags import Call
from minikv.errors import ContextError, Interrupted, UsageError
from minikv.models import refuse_without_torch
from minikv.settings import Generation, Settings

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession
    from minikv.cli.screen.editor import Help


def chat(
    asked: Talk,
    settings: Settings,
    generation: Generation,
    interface: Interface,
    call: Call,
) -> None:
    """Chat until /exit or Ctrl-D. Without a terminal, each line of standard input is a question;
    the exit code is then that of the first turn that failed. Typed settings (`call.given`) win over
    those of a resumed chat."""
    files, first, resume = asked.files or [], asked.prompt, asked.resume
    terminal, config, given = call.terminal, call.config, call.given
    terminal.thoughts = interface.thoughts
    piped = piped_document(terminal) if "-" in files else b""
    typed = sys.stdin.isatty()
    if first is not None and not first.strip():
        raise UsageError("--prompt is empty", 'chat -p "What is it about?" FILE')
    if not typed and not files and resume is None and first is None:
        raise UsageError(
            "standard input is not a terminal",
            "`minikv chat FILE` takes piped questions, one per line; "
            '`minikv ask "QUESTION" < FILE` takes a piped document',
        )
    if asked.reread and resume is None:
        raise UsageError(
            "--reread opens a saved chat without its cache, and needs --resume",
            "minikv chat --resume NAME --reread",
        )
    if resume is not None:  # any refusal comes before the model is loaded
        resume = resume or newest()
        settings = resumed(settings, resume, given)
    refuse_without_torch()
    settings.check_eviction()
    texts = opened(files, terminal, lambda: piped)
    if typed:
        terminal.open_keyboard()
    keeper = Keeper(terminal, active=not asked.no_save)
    interrupts = Interrupts()
    session = open_chat(settings, [] if resume is not None else texts, terminal, interrupts)
    keeper.attend(session)
    origins = config.origins(given)
    if resume is not None:
        began = perf_counter()
        saved = keeper.load(session, resume, reread=asked.reread, given=given)
        origins |= origins_of(session, saved, given)
        terminal.note(summary(session, saved, perf_counter() - began))
        for line in changes(session.documents + session.pending):
            terminal.warn(line)
        attach(session, texts, terminal)
    terminal.records = asked.as_json
    if typed:
        terminal.note(render.header(session, minikv.__version__, generation.max_tokens))
        terminal.note(
            "\nType a question. /help for commands, Ctrl-C stops an answer, Ctrl-D leaves.\n"
        )
    try:
        context = Context(
            session,
            terminal,
            generation,
            interrupts,
            keeper,
            call.values,
            origins,
            debug=interface.debug,
            checks=settings.check == "on",
        )
        read_line: Callable[[], str] = piped_lines().__next__
        if typed:
            from minikv.cli.screen.editor import open_reader

            history = None if asked.no_history else history_file()
            read_line = open_reader(terminal, _help(session), history)
        if first is not None:
            read_line = _after(first, read_line, terminal)
        code = converse(context, read_line, typed=typed)
    finally:
        whole = keeper.kept(session) is not None  # a signal may have come before it was saved
        session.recall.leave()
        keeper.close()
        if keeper.saved and keeper.name:
            state = "" if whole else ", as it was last saved"
            terminal.note(f"minikv chat --resume {keeper.name} continues this chat{state}")
    if code and not typed:
        raise typer.Exit(code)


def converse(context: Context, read_line: Callable[[], str], *, typed: bool) -> int:
    """The chat's loop. Returns the exit code of the first failed line, 0 if none failed."""
    session, terminal, interrupts = context.session, context.terminal, context.interrupts
    terminal.chat = True
    first_failure = 0
    while True:
        try:
            line = read_line()
        except (EOFError, StopIteration):
            if typed:
                terminal.say("")
            return first_failure
        except KeyboardInterrupt:
            if not typed or interrupts.again():
                raise
            terminal.say("\nCtrl-D or /exit leaves")
            continue
        if not line.strip():
            continue
        before, command = session.turn, slash_commands.is_command(line)
        report, literal = session.report, slash_commands.literal(line)
        if typed:
            interrupts.forget()  # a line was sent since, so an earlier Ctrl-C does not count
        else:
            interrupts.pressed()
        # A Ctrl-C that comes in a command, or just after an answer, must not end the chat.
        with interrupts.stopping(lambda: None):
            try:
                if command:
                    with terminal.silent():
                        slash_commands.execute(context, line)
                else:
                    run_turn(session, literal, context.generation, terminal, interrupts)
            except Leave:
                return first_failure
            except (BrokenPipeError, OutputError):
                raise  # nobody would read the next answer either
            except Interrupted as stopped:
                terminal.say(terminal.words(f"{stopped}; {stopped.hint}"))
            except Exception as error:
                # The session is as before, or has the part that was written; the chat continues.
                if context.debug:
                    terminal.say("".join(traceback.format_exception(error)))
                failure = show(terminal, error)
                if terminal.records and not command and session.report is report:
                    said = {"error": failure.message, "code": failure.code}
                    terminal.data(json.dumps({"question": literal, **said}))
                first_failure = first_failure or failure.code
                if isinstance(error, ContextError) and session.pending:
                    terminal.say(
                        "  the documents stay for your next question; /docs numbers them, "
                        "/drop NUMBER removes one"
                    )
            # A command that asks (/retry) has shown its own lines.
            if not command and session.turn > before and session.report is not None:
                note_report(session.report, terminal)
                if typed and session.report.stop_reason == "length":
                    terminal.note("  /continue writes more of this answer")
                if context.checks:
                    context.checks = check(session, terminal, interrupts)
            context.keeper.keep(session)
        # As in a shell, stopping an answer also drops the lines typed ahead.
        if interrupts.pressed() and terminal.keyboard is not None:
            terminal.keyboard.take()


def _after(question: str, read_line: Callable[[], str], terminal: Terminal) -> Callable[[], str]:
    """A function that returns the question first, as if it had been typed, and then the results of
    `read_line`."""
    waiting = [question]

    def read() -> str:
        if not waiting:
            return read_line()
        text = waiting.pop()
        terminal.note(f"› {text}", "")
        return re.sub(r"\A(\s*)/", r"\1//", text)  # a question, even if it begins like a command

    return read


def _help(session: ChatSession) -> Help:
    """The completions and the toolbar of the line editor."""
    from minikv.cli.screen.editor import Help

    words, toolbar = partial(slash_commands.following, session), partial(render.toolbar, session)
    return Help(words, slash_commands.takes_files, toolbar)
