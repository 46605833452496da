"""`minikv chat`: questions and answers over one cache until the user leaves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import typer

import minikv
from minikv.cli import commands, documents, render
from minikv.cli.build import Settings
from minikv.cli.command import Context, Leave
from minikv.cli.failures import show
from minikv.cli.interrupt import Interrupts
from minikv.cli.terminal import OutputError, Terminal
from minikv.cli.turn import Limits, open_chat, run_turn
from minikv.errors import ContextError, Interrupted, UsageError

if TYPE_CHECKING:
    from minikv.session import ChatSession

PROMPT = "› "


class Cleared(Exception):
    """Ctrl-C on a line with text: the line is gone, nothing else happened."""


def chat(
    files: Sequence[str],
    settings: Settings,
    limits: Limits,
    terminal: Terminal,
    *,
    errors: str,
) -> None:
    """Talk until /exit or Ctrl-D. Without a terminal, each line of standard input is a question;
    the exit code is then that of the first turn that failed."""
    typed = sys.stdin.isatty()
    if not typed and not files:
        raise UsageError(
            "standard input is not a terminal",
            "`minikv chat FILE` takes piped questions, one per line; "
            '`minikv ask "QUESTION" < FILE` takes a piped document',
        )
    settings.choice()
    texts = [documents.read_file(path, errors) for path in files]
    limits.check()
    session = open_chat(settings, texts, terminal)
    if typed:
        terminal.note(render.header(session, minikv.__version__))
        terminal.note(
            "\nType a question. /help for commands, Ctrl-C stops an answer, Ctrl-D leaves.\n"
        )
    code = converse(session, limits, terminal, errors=errors, typed=typed)
    if code and not typed:
        raise typer.Exit(code)


def converse(
    session: ChatSession, limits: Limits, terminal: Terminal, *, errors: str, typed: bool
) -> int:
    """The loop. Returns the exit code of the first failed line, 0 if none failed."""
    interrupts = Interrupts()
    context = Context(session, terminal, errors, limits, interrupts)
    read_line = _reader(terminal) if typed else _piped
    first_failure = 0
    while True:
        try:
            line = read_line()
        except EOFError:
            if typed:
                terminal.say("")
            return first_failure
        except Cleared:
            continue
        except KeyboardInterrupt:
            if not typed or interrupts.again():
                raise
            terminal.say("\nCtrl-D or /exit leaves")
            continue
        if not line.strip():
            continue
        before = session.turn
        # A Ctrl-C that comes in a command, or just after an answer, must not end the chat.
        with interrupts.stopping(lambda: None):
            try:
                if commands.is_command(line):
                    commands.execute(context, line)
                    continue
                run_turn(session, commands.literal(line), context.limits, terminal, interrupts)
            except Leave:
                return first_failure
            except (BrokenPipeError, OutputError):
                raise  # nobody would read the next answer either
            except Interrupted as stopped:
                terminal.say(f"{stopped}; {stopped.hint}")
            except Exception as error:
                # The session is as it was, or holds what was written; the chat goes on.
                code = show(terminal, error)
                first_failure = first_failure or code
                if isinstance(error, ContextError) and session.pending:
                    terminal.say(
                        "  the documents still wait for your next question; /reset drops them"
                    )
            if session.turn > before and session.report is not None:
                for part in session.report.lines():
                    terminal.note(f"  {part}")


def _piped() -> str:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    # Invalid bytes become lone surrogates, which the session refuses by name.
    return line.decode("utf-8", "surrogateescape").rstrip("\r\n")


def _reader(terminal: Terminal) -> Callable[[], str]:
    """The line editor, or plain `input` where it cannot run. Both write to stderr."""
    if os.environ.get("TERM") == "dumb" or not terminal.err.isatty():
        return lambda: _plain(terminal)
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.output import create_output
    except ImportError:
        return lambda: _plain(terminal)
    editor: PromptSession[str] = PromptSession(
        output=create_output(stdout=terminal.err),
        completer=WordCompleter(commands.names(), sentence=True),
        complete_while_typing=False,
    )

    def edited() -> str:
        try:
            return editor.prompt(PROMPT)
        except KeyboardInterrupt:
            if editor.default_buffer.text:
                raise Cleared from None
            raise

    return edited


def _plain(terminal: Terminal) -> str:
    terminal.err.write("> ")
    terminal.err.flush()
    return input()
