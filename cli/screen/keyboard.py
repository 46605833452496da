"""Keeps the keys that are typed while no prompt is shown, without showing them, and gives them to
the next prompt in order.

A terminal that edits lines itself turns Enter into Ctrl-J, which is a new line for the line editor.
So while a chat works, its terminal passes keys on unchanged. Ctrl-C, Ctrl-Z and Ctrl-\\ stay
signals; prompt_toolkit's own raw mode would turn them into keys. A paste keeps its marks, so that
it stays one message.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding.key_processor import KeyPress

Mode = list[Any]
Handler = Callable[[int, FrameType | None], None]
_INPUT, _LOCAL, _SIGNS = 0, 3, 6  # indices into the result of tcgetattr
_MARKED, _UNMARKED = "\x1b[?2004h", "\x1b[?2004l"  # the marks of a paste


class Keyboard:
    """The keyboard of a chat with a line editor, from `open` to `close`.

    prompt_toolkit keeps the keys that were typed after an Enter, for the `input` of its line
    editor."""

    def __init__(self, stdin: TextIO, err: TextIO) -> None:
        self._number = stdin.fileno()
        self._err = err
        self._early = ""  # what was typed before there was a line editor
        self._input: Input | None = None
        self._asks = False
        self._before = _mode(self._number)
        self._open = contextlib.ExitStack()

    def open(self) -> None:
        """Switch the terminal's mode. The caller must already be prepared to call `close`, because
        a signal may end the program at any moment from here on."""
        # A shell that continues the chat may have changed the terminal.
        self._open.enter_context(resuming(self._resumed))
        self._wait()
        self._early = re.sub(r"\r?\n", "\r", self._typed())  # until now an Enter was a Ctrl-J

    def serve(self, input: Input) -> None:
        """From now on, a line editor reads from `input`. It receives the keys typed before."""
        from prompt_toolkit.input.typeahead import store_typeahead

        self._input = input
        store_typeahead(input, [*_keys(self._early), *self.take()])

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """A context for reading a line."""
        self._asks = True
        try:
            yield
        finally:
            self._asks = False
            self._wait()

    def take(self) -> list[KeyPress]:
        """Remove and return the keys that no prompt has used yet."""
        from prompt_toolkit.input.typeahead import get_typeahead

        return [] if self._input is None else get_typeahead(self._input)

    def close(self) -> None:
        """Restore the terminal's mode."""
        self._open.close()
        self._mark(_UNMARKED)
        _set(self._number, self._before)

    def waiting(self) -> bool:
        """Whether a key was typed that has not been read."""
        return bool(select.select([self._number], [], [], 0)[0])

    def _resumed(self) -> None:
        if not self._asks:
            self._wait()

    def _wait(self) -> None:
        if self._before is None:
            return
        mode = [*self._before]
        mode[_LOCAL] &= ~(termios.ECHO | termios.ICANON)
        mode[_INPUT] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
        mode[_SIGNS] = [*mode[_SIGNS]]
        mode[_SIGNS][termios.VMIN], mode[_SIGNS][termios.VTIME] = 1, 0
        self._mark(_MARKED)
        _set(self._number, mode)

    def _mark(self, sign: str) -> None:
        if _in_front(self._number):
            with contextlib.suppress(OSError, ValueError):
                self._err.write(sign)
                self._err.flush()

    def _typed(self) -> str:
        """The text that was typed and has not been read yet."""
        found = b""
        with contextlib.suppress(OSError):
            while (
                _in_front(self._number) and self.waiting() and (data := os.read(self._number, 4096))
            ):
                found += data
        return found.decode("utf-8", "replace")


def _keys(text: str) -> list[KeyPress]:
    """Parse a text from the terminal as keys."""
    from prompt_toolkit.input.vt100_parser import Vt100Parser

    found: list[KeyPress] = []
    Vt100Parser(found.append).feed_and_flush(text)
    return found


@contextlib.contextmanager
def unechoed(stream: TextIO) -> Iterator[None]:
    """A context in which the terminal of `stream` does not echo keys."""
    echoed = False

    def switch(on: bool = False) -> None:
        nonlocal echoed
        with contextlib.suppress(OSError, ValueError):
            number = stream.fileno()
            mode = _mode(number)
            if mode is not None and bool(mode[_LOCAL] & termios.ECHO) != on:
                echoed = True  # even if this process is in the background and cannot switch it off
                mode[_LOCAL] ^= termios.ECHO
                _set(number, mode)

    with resuming(switch):
        try:  # a signal may end the program at any moment
            switch()
            yield
        finally:
            if echoed:
                switch(True)


def resuming(act: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
    """A context in which `act` is called whenever the process continues after a stop, because the
    shell has used the terminal meanwhile."""
    before = signal.getsignal(signal.SIGCONT)

    def resumed(signum: int, frame: FrameType | None) -> None:
        if callable(before):
            before(signum, frame)
        act()

    return handled({signal.SIGCONT: resumed})


@contextlib.contextmanager
def handled(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """A context in which these functions handle the signals. It does nothing outside the main
    thread, which alone can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_front(number: int) -> bool:
    """Whether this process is in the foreground. The system stops a process in the background that
    uses the terminal."""
    try:
        return os.tcgetpgrp(number) == os.getpgrp()
    except OSError:
        return False


def _mode(number: int) -> Mode | None:
    try:
        return termios.tcgetattr(number)
    except termios.error:
        return None


def _set(number: int, mode: Mode | None) -> None:
    """Switch the terminal's mode, if possible."""
    if mode is not None and _in_front(number):
        with contextlib.suppress(termios.error):
            termios.tcsetattr(number, termios.TCSANOW, mode)
