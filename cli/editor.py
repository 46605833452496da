"""The line a user types: an editor with history and completion, or `input` where it cannot run.

Either way a message may have many lines: pasted, between triple quotation marks, or (in the editor)
with Alt-Enter. What is pasted, or typed while an answer was written, never sends itself in parts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import sys
import termios
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.cli.terminal import Terminal, clean

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

BLOCK = '"""'
ENTRIES = 1000
"""Messages that the history file keeps."""

_QUIET = 0.05  # seconds without a byte after which a paste has come whole
_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?<]*[ -/]*[@-~]|[O(]?.)?")  # what keys and replies send


class Cleared(Exception):
    """Ctrl-C on a line with text: the line is gone, nothing else happened."""


@dataclass(frozen=True, slots=True)
class Help:
    """What the editor knows about the chat.

    `words` gives what may follow a command ("/policy"), and with "" the commands themselves, with
    their slashes. `files` are the commands that are followed by paths. `toolbar` gives the line
    below the input.
    """

    words: Callable[[str], Sequence[str]]
    files: Collection[str] = ()
    toolbar: Callable[[], str] | None = None


def open_reader(terminal: Terminal, help: Help, history: Path | None) -> Callable[[], str]:
    """A function that asks for one message. Without `history` nothing is kept after the chat.

    It raises EOFError at the end of the input, KeyboardInterrupt on Ctrl-C, Cleared where that
    took a line away. Everything it shows goes to stderr.
    """
    if terminal.plain or not terminal.err.isatty():
        return lambda: _plain(terminal)
    try:
        return _editor(terminal, help, history)
    except ImportError:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # `input` then edits lines by itself
        return lambda: _plain(terminal)


def message(text: str) -> str:
    """What was typed as a line for the chat: a block loses its marks and is never a command."""
    stripped = text.strip()
    if not stripped.startswith(BLOCK):
        return text
    inner = stripped.removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")
    return re.sub(r"\A([ \t]*)/", r"\1//", inner)


def unfinished(text: str) -> bool:
    """Whether a block was opened and not closed."""
    stripped = text.strip()
    closed = len(stripped) >= 2 * len(BLOCK) and stripped.endswith(BLOCK)
    return stripped.startswith(BLOCK) and not closed


# -- without an editor -----------------------------------------------------------------------


def _plain(terminal: Terminal) -> str:
    text = _line(terminal, "> ")
    try:
        while True:
            rest = waiting(_QUIET) if sys.stdin.isatty() else ""
            if rest:
                text += "\n" + rest.removesuffix("\n")
            if rest and not rest.endswith("\n"):
                text += _line(terminal, "")  # the last pasted line waits for Enter
            elif unfinished(text):
                text += "\n" + _line(terminal, ". ")
            elif not rest:
                break
    except EOFError:
        pass
    except KeyboardInterrupt:
        raise Cleared from None
    return message(text)


def _line(terminal: Terminal, sign: str) -> str:
    terminal.err.write(sign)
    terminal.err.flush()
    return input()


def waiting(patience: float = 0.0) -> str:
    """What was typed or pasted on the terminal and nobody has read yet, without key sequences.

    `patience` is how many seconds to wait for its first byte.
    """
    fd = sys.stdin.fileno()
    try:
        before = termios.tcgetattr(fd)
        if os.tcgetpgrp(fd) != os.getpgrp():
            return ""  # in the background a read would stop the process
    except (OSError, termios.error):
        return ""
    # Without this a line that is not finished cannot be seen.
    now = [*before[:3], before[3] & ~termios.ICANON, *before[4:]]
    now[6] = [*before[6]]
    now[6][termios.VMIN], now[6][termios.VTIME] = 0, 0
    data = b""
    termios.tcsetattr(fd, termios.TCSANOW, now)
    try:
        while select.select([fd], [], [], patience)[0]:
            part = os.read(fd, 1 << 16)
            if not part:
                break
            data += part
            patience = _QUIET
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)
    text = _SEQUENCE.sub("", data.decode("utf-8", "replace")).replace("\r", "\n")
    return clean(text)


# -- the editor ------------------------------------------------------------------------------


def _editor(terminal: Terminal, help: Help, history: Path | None) -> Callable[[], str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.output import create_output
    from prompt_toolkit.styles import Style

    below = help.toolbar
    sign = "> " if terminal.ascii else "› "
    session: PromptSession[str] = PromptSession(
        output=create_output(stdout=terminal.err),
        history=_history(history) if history else InMemoryHistory(),
        completer=_completer(help),
        complete_while_typing=False,
        key_bindings=_keys(),
        multiline=True,
        prompt_continuation="  ",
        bottom_toolbar=below and (lambda: clean(below()).replace("\n", " ")),
        style=Style.from_dict({"bottom-toolbar": "noreverse"}),
        enable_open_in_editor=sys.stdout.isatty(),
        tempfile_suffix=".md",
        enable_suspend=True,
    )

    def edited() -> str:
        try:
            return message(session.prompt(sign, default=waiting().strip("\n")))
        except KeyboardInterrupt:
            if session.default_buffer.text:
                raise Cleared from None
            raise

    return edited


def _keys() -> KeyBindings:
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.keys import Keys

    keys = KeyBindings()
    writing = has_focus(DEFAULT_BUFFER)  # and not searching

    @keys.add("enter", filter=writing)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        # A terminal without bracketed paste sends a paste as keys, more of them at once than
        # anybody types.
        pasting = any(
            press.key != Keys.CPRResponse and press.data != "_Flush"
            for press in event.key_processor.input_queue
        )
        if pasting or unfinished(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=writing)
    @keys.add("c-j", filter=writing)
    def newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-g", filter=writing)
    def edit(event: KeyPressEvent) -> None:
        if sys.stdout.isatty():
            event.current_buffer.open_in_editor()

    return keys


def _completer(help: Help) -> Completer:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    class Commands(Completer):
        """Commands, and what may follow each of them."""

        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterable[Completion]:
            for text, length in complete(help, document.text_before_cursor):
                yield Completion(text, start_position=-length)

    return Commands()


def complete(help: Help, text: str) -> Iterator[tuple[str, int]]:
    """What could stand at the end of `text`, and how many characters of it that replaces."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return
    command, space, _ = text.partition(" ")
    if not space:
        yield from ((word, len(text)) for word in help.words("") if word.startswith(text))
        return
    word = re.split(r"(?<!\\) ", text)[-1]
    if command in help.files:
        yield from ((path, len(word)) for path in _paths(word))
    else:
        yield from ((name, len(word)) for name in help.words(command) if name.startswith(word))


def _paths(word: str) -> Iterator[str]:
    """Files and directories that begin like this, as a command line takes them."""
    typed = re.sub(r"\\(.)", r"\1", word)
    folder, _, start = typed.rpartition("/")
    shown = word[: word.rfind("/") + 1]
    where = os.path.expanduser(f"{folder}/") if "/" in typed else "."
    try:
        entries = sorted(os.scandir(where), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        name = entry.name
        hidden = name.startswith(".") and not start.startswith(".")
        # A name with control characters in it is for people who type it themselves.
        if name.startswith(start) and not hidden and clean(name) == name and "\n" not in name:
            with contextlib.suppress(OSError):
                yield shown + _escaped(name) + ("/" if entry.is_dir() else "")


def _escaped(name: str) -> str:
    return name if shlex.quote(name) == name else re.sub(r"([^\w./~-])", r"\\\1", name)


# -- history ---------------------------------------------------------------------------------


def _history(path: Path) -> History:
    from prompt_toolkit.history import History

    class Kept(History):
        """Messages in a file, where there can be one."""

        def load_history_strings(self) -> Iterable[str]:
            return reversed(read_history(path))

        def store_string(self, string: str) -> None:
            add_to_history(path, string)

    return Kept()


def read_history(path: Path) -> list[str]:
    """The messages kept, oldest first. A file that cannot be read is an empty one."""
    try:
        # Without O_NONBLOCK a named pipe would wait for a writer for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return []
    messages = []
    for line in lines[-ENTRIES:]:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, str):
                messages.append(entry)
    if len(lines) > ENTRIES:
        _rewrite(path, messages)
    return messages


def add_to_history(path: Path, text: str) -> None:
    """Keep a message, readable for its user alone. Where nothing can be written nothing is."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags, 0o600)
        try:
            os.fchmod(fd, 0o600)
            os.write(fd, f"{json.dumps(text)}\n".encode())
        finally:
            os.close(fd)


def _rewrite(path: Path, messages: Sequence[str]) -> None:
    """Shorten the file, in one step: a chat beside this one reads the old file or the new one."""
    other = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    with contextlib.suppress(OSError):
        fd = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(text)}\n" for text in messages)
            os.replace(other, path)
        except OSError:
            os.unlink(other)
