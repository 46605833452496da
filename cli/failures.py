"""Turns errors into one line, a hint and an exit code, with a traceback only under --debug. Turns
Ctrl-C and SIGTERM into flags, because an exception in the middle of a layer would leave the cache
inconsistent.

0 ok · 1 run-time or internal error · 2 usage · 3 model unavailable or unsupported · 4 out of memory
· 5 does not fit the context · 6 corrupt or unsafe model file · 130 interrupted
· 143 ended by SIGTERM or SIGHUP.
"""

from __future__ import annotations

import errno
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import monotonic
from types import FrameType

import typer

from minikv.cli.screen.keyboard import handled
from minikv.cli.screen.terminal import OutputError, Terminal, hush
from minikv.cli.screen.text import clean
from minikv.cli.settings.config import worded
from minikv.errors import Interrupted, MinikvError
from minikv.models.errors import ModelError

TWICE = 2.0
"""Seconds within which a second Ctrl-C exits at once."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived. Like KeyboardInterrupt, only the end of the program catches it."""


class Interrupts:
    """Counts Ctrl-C presses; shared between answers and the prompt line. ended: SIGTERM arrived."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._noticed = self._last
        self.ended = False

    def pressed(self) -> bool:
        """Whether Ctrl-C was pressed since the last call."""
        new = self._last > self._noticed
        self._noticed = self._last
        return new

    def forget(self) -> None:
        """Forget every earlier Ctrl-C, so that the next one counts as the first."""
        self._last = self._noticed = float("-inf")

    def again(self) -> bool:
        """Note a Ctrl-C now; True if the previous one was less than two seconds ago."""
        now = monotonic()
        twice = now - self._last < TWICE
        self._last = now
        return twice

    @contextmanager
    def stopping(self, cancel: Callable[[], None]) -> Iterator[None]:
        """A context in which the first Ctrl-C calls `cancel`, and a second raises
        KeyboardInterrupt. SIGTERM calls it too, and raises Terminated when the work is done, a
        second SIGTERM at once.
        """

        def handle(signum: int, frame: FrameType | None) -> None:
            if self.again():
                raise KeyboardInterrupt
            cancel()

        def finish(signum: int, frame: FrameType | None) -> None:
            if self.ended:
                raise Terminated
            self.ended = True
            cancel()

        with handled({signal.SIGINT: handle, **dict.fromkeys(ends(), finish)}):
            try:
                yield
            except Interrupted:
                if not self.ended:
                    raise
        if self.ended:
            raise Terminated


def ends() -> tuple[int, ...]:
    """The signals that end the program: SIGTERM, and the SIGHUP of a closed terminal, unless the
    program should outlive it (nohup)."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGTERM,)
    return signal.SIGTERM, signal.SIGHUP


def ending() -> AbstractContextManager[None]:
    """A context in which SIGTERM raises Terminated, so that the program can clean up."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    return handled(dict.fromkeys(ends(), end))


# The messages of torch's CPU allocator, which has no exception class.
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "could not create a primitive",  # oneDNN
    "can't start new thread",  # Python, without room for the stack
)


@dataclass(frozen=True, slots=True)
class Failure:
    """What to tell the user, and the exit code for scripts."""

    message: str
    hint: str
    code: int


def explain(error: Exception, *, chat: bool = False) -> Failure:
    """The line, hint and exit code for any exception. chat: as `worded`."""
    if isinstance(error, MinikvError | ModelError):
        return Failure(_line(error, chat), worded(error.hint, chat=chat), error.exit_code)
    if isinstance(error, OutputError):
        return Failure(_line(error), "", 1)
    if _is_memory(error):
        return Failure(
            f"out of memory: {_line(error) or 'the system refused'}",
            worded(
                "nothing was added to the chat; try a shorter document, a smaller `budget` or "
                '`dtype="bfloat16"`',
                chat=chat,
            ),
            4,
        )
    if isinstance(error, OSError) and error.errno is not None:
        name = f": {clean(str(error.filename))}" if error.filename is not None else ""
        return Failure(
            _cut(f"the system refused: {error.strerror or error.errno}{name}"),
            "--debug shows what minikv was doing",
            1,
        )
    return Failure(
        f"{type(error).__name__}: {_line(error)}",
        "this is a bug in minikv; --debug shows where it happened",
        1,
    )


def _is_memory(error: Exception) -> bool:
    """Whether memory was short, whatever raised the error."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY))
        # The loader of a library, whose message says no more.
        or (isinstance(error, ImportError) and "failed to map segment" in text)
    )


@contextmanager
def guard(terminal: Terminal, *, debug: bool) -> Iterator[None]:
    """Run a command; leave with the documented exit code, whatever happens inside."""
    try:
        with ending():
            yield
    except BrokenPipeError:
        # The reader has seen enough (`| head`), which is not an error.
        hush()
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        terminal.say("")
        raise typer.Exit(130) from None
    except Terminated:
        raise typer.Exit(143) from None
    except Exception as error:
        if isinstance(error, typer.Exit):
            raise
        if debug:
            terminal.say("".join(traceback.format_exception(error)))
        raise typer.Exit(show(terminal, error).code) from None
    finally:
        terminal.close()


def show(terminal: Terminal, error: Exception) -> Failure:
    """Print the failure and return it."""
    failure = explain(error, chat=terminal.chat)
    terminal.fail(failure.message, failure.hint)
    return failure


def _line(error: Exception, chat: bool = False) -> str:
    return _cut(" ".join(worded(str(error), chat=chat).split()))


def _cut(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]}…"
