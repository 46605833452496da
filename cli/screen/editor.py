"""Reads the user's messages with prompt_toolkit, with the chat's commands, keys and history.

A message may have several lines: pasted, between triple quotation marks, or with Alt-Enter or
Ctrl-J. Enter alone sends the text before it, even if it was typed while an answer was written.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style

from minikv.cli.failures import Terminated, ends
from minikv.cli.paths import private
from minikv.cli.screen.keyboard import handled
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clean


class HistoryFile(FileHistory):
    """prompt_toolkit's file of messages. If it cannot be written, the chat continues without it."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            if _is_private(Path(os.fsdecode(self.filename))):
                super().store_string(string)


def history_in(path: Path | None) -> History:
    """The messages in this file, which is created if necessary; only those of this chat if there is
    no path, or if the file cannot be used."""
    with contextlib.suppress(OSError):
        if path is not None:
            private(path.parent)
            if _is_private(path):
                return HistoryFile(path)
    return InMemoryHistory()


def _is_private(path: Path) -> bool:
    """Create the file if necessary, and let only its user read it. False if it is not a regular
    file. Raises OSError."""
    # These flags follow no link, and do not wait for the reader of a pipe.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return False
        os.fchmod(file.fileno(), 0o600)
    return True


BLOCK = '"""'


@dataclass(frozen=True, slots=True)
class Help:
    """What the editor needs from the chat.

    words(words of a command line): completions of the last word; for the first word, the commands
    with their slashes. files(command): whether paths may follow it. toolbar(columns): the line
    below the input.
    """

    words: Callable[[Sequence[str]], Iterable[str]]
    files: Callable[[str], bool] = lambda command: False
    toolbar: Callable[[int], str] | None = None


def open_reader(terminal: Terminal, help: Help, history: Path | None) -> Callable[[], str]:
    """Return a function that reads one message. history: the file of earlier messages; None: keep
    them only during this chat.

    The function raises EOFError at the end of the input and KeyboardInterrupt on Ctrl-C. In the
    line editor, Ctrl-C on a line with text returns "". Everything is shown on stderr. A plain
    terminal has no line editor: the terminal edits lines itself.
    """
    keyboard = terminal.keyboard
    if keyboard is None:
        return lambda: _input(terminal.err)
    toolbar = help.toolbar
    output = create_output(stdout=terminal.err)
    session: PromptSession[str] = PromptSession(
        terminal.writable("› "),
        output=output,
        history=history_in(history),
        completer=Commands(help),
        complete_while_typing=False,
        key_bindings=_keys(),
        multiline=True,
        prompt_continuation="  ",
        bottom_toolbar=toolbar
        and (lambda: terminal.writable(toolbar(output.get_size().columns)).replace("\n", " ")),
        style=Style.from_dict({"bottom-toolbar": "noreverse"}),
        enable_open_in_editor=sys.stdout.isatty(),
        tempfile_suffix=".md",
        enable_suspend=True,
    )
    keyboard.serve(session.input)

    def read() -> str:
        try:
            with keyboard.asking(), _ending(session.app) as begins:
                return message(session.prompt(pre_run=begins).strip("\n"))
        except KeyboardInterrupt:
            if session.default_buffer.text:
                return ""
            raise

    return read


@contextlib.contextmanager
def _ending(app: Application[str]) -> Iterator[Callable[[], None]]:
    """A context in which the signals of `ends` end the prompt as a key would, so that its toolbar
    is removed. They end the chat even if the prompt has just been answered. The prompt must call
    the given function when it begins: asyncio loses an exception that a signal raised before."""
    came = False

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        if app.loop is None or not app.is_running:
            raise Terminated
        app.loop.call_soon_threadsafe(leave)

    def leave() -> None:
        if not app.is_done:
            app.exit(exception=Terminated())

    def begins() -> None:
        if came:
            leave()

    try:
        with handled(dict.fromkeys(ends(), end)):
            yield begins
    finally:
        if came:
            raise Terminated


def message(text: str) -> str:
    """The typed text as a message. A block loses its quotation marks and is never a command."""
    stripped = text.strip()
    if not stripped.startswith(BLOCK):
        return text
    inner = stripped.removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")
    return re.sub(r"\A([ \t]*)/", r"\1//", inner)


def unfinished(text: str) -> bool:
    """Whether a block was begun with triple quotation marks and not ended."""
    stripped = text.strip()
    closed = len(stripped) >= 2 * len(BLOCK) and stripped.endswith(BLOCK)
    return stripped.startswith(BLOCK) and not closed


def _input(err: TextIO) -> str:
    def line(sign: str) -> str:
        err.write(sign)
        err.flush()
        return input()

    text = line("> ")
    while unfinished(text):
        text += "\n" + line(". ")
    return message(text)


def _keys() -> KeyBindings:
    keys = KeyBindings()
    writing = has_focus(DEFAULT_BUFFER)  # not while the history is searched

    @keys.add("enter", filter=writing)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if unfinished(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=writing)
    @keys.add("c-j", filter=writing)
    def newline(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.insert_text("\n")

    @keys.add("c-g", filter=writing)
    def edit(event: KeyPressEvent) -> None:
        if sys.stdout.isatty():
            event.current_buffer.open_in_editor()

    return keys


class Commands(Completer):
    """Completes commands and their arguments."""

    def __init__(self, help: Help) -> None:
        self._help = help

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or text.startswith("//") or "\n" in text:
            return
        *before, last = re.split(r"(?<!\\) +", text)
        words = [re.sub(r"\\(.)", r"\1", one) for one in (*before, last)]
        for candidate in self._help.words(words):
            if candidate.startswith(words[-1]) and clean(candidate) == candidate:
                yield Completion(_escaped(candidate), start_position=-len(last))
        if before and self._help.files(before[0]):
            yield from map(Completion, _paths(last))


def _escaped(word: str) -> str:
    return re.sub(r"([^\w@%+=:,./~?()-])", r"\\\1", word)


def _paths(word: str) -> Iterator[str]:
    """The rest of each path that begins with `word`, escaped as in a command line."""
    typed = re.sub(r"\\(.)", r"\1", word)
    hidden = os.path.basename(typed).startswith(".")

    def offered(path: str) -> bool:
        name = os.path.basename(path)
        # Names with control characters are not offered, but a user can type them.
        return (hidden or not name.startswith(".")) and clean(name) == name and "\n" not in name

    completer = PathCompleter(file_filter=offered, expanduser=True)
    for found in completer.get_completions(Document(typed), CompleteEvent()):
        yield _escaped(found.text) + ("/" if found.display_text.endswith("/") else "")
