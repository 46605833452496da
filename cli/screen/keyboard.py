"""Keys typed while no prompt is shown: they are kept without being shown, and read in order later.

A terminal that edits lines itself turns Enter into Ctrl-J, which is a new line for the line editor.
So while a chat works, its terminal passes keys on unchanged. Ctrl-C, Ctrl-Z and Ctrl-\\ stay
signals, which prompt_toolkit's own raw mode would turn into keys. A paste keeps its marks, so that
it stays one message. Without the line editor, the terminal still edits lines, but does not show
them.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

Mode = list[Any]
_INPUT, _LOCAL, _SIGNS = 0, 3, 6  # places in what tcgetattr gives
_MARKED, _UNMARKED = "\x1b[?2004h", "\x1b[?2004l"  # the marks of a paste


class Ahead(Protocol):
    """Input that a reader of lines took from the terminal and has not returned yet."""

    def take(self) -> list[Any]:
        """Return all of it; nothing is left."""

    def put(self, held: list[Any]) -> None:
        """Put it back."""

    def read(self, text: str) -> list[Any]:
        """A text from the terminal, in the form that `take` returns."""


class Lines:
    """Lines for `input()`."""

    def __init__(self) -> None:
        self.waiting: list[str] = []

    def take(self) -> list[str]:
        held, self.waiting = self.waiting, []
        return held

    def put(self, held: list[str]) -> None:
        self.waiting = [*held, *self.waiting]

    def read(self, text: str) -> list[str]:
        return text.splitlines()


class Keyboard:
    """The terminal of a chat, from `open` to `close`. `editor`: its lines are read by the line
    editor, otherwise by `input()`.

    `early` is what was typed before, as the line editor would have got it. `ahead` is what the
    reader of lines holds.
    """

    def __init__(self, stdin: TextIO, err: TextIO, *, editor: bool) -> None:
        self.editor = editor
        self.early = ""
        self.ahead: Ahead = Lines()
        self._number = stdin.fileno()
        self._err = err
        self._asks = False
        self._before = _mode(self._number)
        self._open = contextlib.ExitStack()

    def open(self) -> None:
        """Switch the terminal. The caller must already hold this keyboard and close it, because
        from here on a signal may end the program at any moment."""
        # A shell that continues the chat may have changed the terminal.
        self._open.enter_context(_resuming(self._resumed))
        self._wait()
        if self.editor:  # until now an Enter was a Ctrl-J
            self.early = re.sub(r"\r?\n", "\r", self._typed())

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Around the reading of a line. `input()` gets the terminal in its original mode."""
        self._asks = True
        if not self.editor:
            _set(self._number, self._before)
        try:
            yield
        finally:
            self._asks = False
            self._wait()

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Around a question of minikv: what was typed before does not answer it, and is kept."""
        held = [*self.ahead.take(), *self.ahead.read(self._typed())]
        try:
            yield
        finally:
            self.ahead.put(held)

    def close(self) -> None:
        """Restore the terminal's mode."""
        self._open.close()
        self._mark(_UNMARKED)
        _set(self._number, self._before)

    def waiting(self) -> bool:
        """Whether something was typed that has not been read: a key, or a line where the terminal
        edits lines itself."""
        return bool(select.select([self._number], [], [], 0)[0])

    def _resumed(self) -> None:
        if not self._asks:
            self._wait()

    def _wait(self) -> None:
        if self._before is None:
            return
        mode = [*self._before]
        mode[_LOCAL] &= ~termios.ECHO
        if self.editor:
            mode[_LOCAL] &= ~termios.ICANON
            mode[_INPUT] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
            mode[_SIGNS] = [*mode[_SIGNS]]
            mode[_SIGNS][termios.VMIN], mode[_SIGNS][termios.VTIME] = 1, 0
            self._mark(_MARKED)
        _set(self._number, mode)

    def _mark(self, sign: str) -> None:
        if self.editor and _in_front(self._number):
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


@contextlib.contextmanager
def unechoed(stream: TextIO, moved: Callable[[], None]) -> Iterator[None]:
    """Inside, the terminal of `stream` does not echo keys. `moved` is called when the process
    continues after it was stopped, because the shell has then written to the terminal."""
    echoed = False

    def switch(on: bool) -> None:
        nonlocal echoed
        with contextlib.suppress(OSError, ValueError):
            number = stream.fileno()
            mode = _mode(number)
            if mode is not None and bool(mode[_LOCAL] & termios.ECHO) != on:
                echoed = True  # also in the background, where it cannot be switched off
                mode[_LOCAL] ^= termios.ECHO
                _set(number, mode)

    def resumed() -> None:
        switch(False)
        moved()

    with _resuming(resumed):
        try:  # a signal may end the program at any moment
            switch(False)
            yield
        finally:
            if echoed:
                switch(True)


@contextlib.contextmanager
def _resuming(act: Callable[[], object]) -> Iterator[None]:
    """Inside, `act` is called when the process continues after it was stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may install handlers
        return
    before = signal.getsignal(signal.SIGCONT)

    def resumed(signum: int, frame: Any) -> None:
        if callable(before):
            before(signum, frame)
        act()

    try:
        signal.signal(signal.SIGCONT, resumed)
        yield
    finally:
        signal.signal(signal.SIGCONT, before)


def _in_front(number: int) -> bool:
    """Whether this process is in the foreground. In the background, the system would stop it when
    it uses the terminal."""
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
    """Switch the terminal, if that is possible."""
    if mode is not None and _in_front(number):
        with contextlib.suppress(termios.error):
            termios.tcsetattr(number, termios.TCSANOW, mode)
