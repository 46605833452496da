"""The real command line, forked from a process that has torch already.

An interpreter of its own takes two seconds, most of them for torch. Here one server imports all
that once, and every run is a fork of it: a session of its own with its own streams, environment and
folder, which enters where the installed command enters. What hangs on how the interpreter starts
(encodings, imports, the hub's variables) needs a process of its own and not this.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pty
import resource
import signal
import struct
import sys
import tempfile
import termios
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from terminals import Terminals

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    """torch prompt_toolkit minikv.cli.main minikv.cli.chat.command minikv.cli.chat.ask
    minikv.cli.screen.markdown minikv.cli.export.facts minikv.models minikv.engine.engine
    minikv.cache.kv_cache minikv.chat.session minikv.cache.snapshot""".split()
)
Presses = Mapping[tuple[str, int], int]
"""How often Ctrl-C is pressed at which moment: ("load", 1), ("chunk", 2) or ("token", 5) is the
first report of loaded weights, the second of a read prompt, the fifth token of the answers."""


@dataclass(frozen=True)
class Done:
    """A run that has ended."""

    code: int
    out: str
    err: str


def run(
    *arguments: str,
    stdin: str | bytes = b"",
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    presses: Presses | None = None,
    limits: Mapping[int, int] | None = None,
    pace: float | None = None,
    code: str = "",
    output: str = "",
    errors: str = "",
) -> Done:
    """minikv with files for its streams, until it ends. `stdin` is what it can read. `limits`: of
    the system's resources, as `resource.RLIMIT_FSIZE`. pace: over a fake model (`fake_main`).
    `code` is run in the place of the command. `output`, `errors`: its stdout and stderr, in
    place of files."""
    with tempfile.TemporaryDirectory() as place:
        given, out, err = (Path(place, name) for name in ("in", "out", "err"))
        given.write_bytes(stdin.encode() if isinstance(stdin, str) else stdin)
        streams = (str(given), output or str(out), errors or str(err))
        process = _start(Start(arguments, streams, env, folder, presses, pace, limits, code))
        process.join(120)
        if process.is_alive():
            process.kill()
            raise AssertionError("still running")
        ends = ((output, out), (errors, err))
        said = ["" if given else path.read_bytes().decode() for given, path in ends]
        return Done(process.exitcode, *said)


class Piped:
    """minikv, or `code`, with a pipe for each of its streams. The end of the `with` kills it."""

    def __init__(self, *arguments: str, pace: float | None = None, code: str = "") -> None:
        with tempfile.TemporaryDirectory() as place:
            paths = [os.path.join(place, name) for name in ("in", "out", "err")]
            for path in paths:
                os.mkfifo(path)
            held = os.open(paths[0], os.O_RDWR)  # opening the other end does not wait then
            ends = [os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in paths[1:]]
            start = Start(arguments, tuple(paths), pace=pace, code=code)
            self.process = _start(start)
            self.stdin = open(paths[0], "wb", buffering=0)  # noqa: SIM115
            os.close(held)
        for end in ends:
            os.set_blocking(end, True)
        self.stdout, self.stderr = (open(end, "rb") for end in ends)  # noqa: SIM115

    def __enter__(self) -> Piped:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.join()
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """Its exit code."""
        self.process.join(60)
        assert not self.process.is_alive(), "still running"
        return int(self.process.exitcode)


class Forked(Terminals):
    """minikv on a pseudo-terminal."""

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str],
        folder: Path | None = None,
        columns: int = 100,
        pace: float | None = None,
    ) -> None:
        """pace: over a fake model, with so many seconds for each of its steps (`fake_main`)."""
        self.fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.modes = termios.tcgetattr(theirs)
        """Of the terminal, before the command began."""
        self.process = _start(Start(arguments, (os.ttyname(theirs),) * 3, env, folder, pace=pace))
        os.close(theirs)
        self.pid = self.process.pid
        self.seen, self.at = "", 0
        self.prompt = "> " if env.get("TERM", "dumb") == "dumb" else "\x1b[?25h"

    def ended(self) -> int | None:
        return None if self.process.is_alive() else int(self.process.exitcode)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        os.close(self.fd)


@dataclass(frozen=True)
class Start:
    """What a process begins with; see `run`. streams: paths of its stdin, stdout and stderr."""

    arguments: tuple[str, ...]
    streams: tuple[str, ...]
    env: Mapping[str, str] | None = None
    folder: Path | None = None
    presses: Presses | None = None
    pace: float | None = None
    limits: Mapping[int, int] | None = None
    code: str = ""


def _start(start: Start) -> Any:
    """A process that has its streams open when this returns."""
    ready, told = _SERVER.Pipe(duplex=False)
    env, folder = {**os.environ, **(start.env or {})}, start.folder or Path.cwd()
    process = _SERVER.Process(target=_enter, args=(replace(start, env=env, folder=folder), told))
    process.start()
    told.close()  # else the end of a process that fails before it tells is not seen
    ready.recv()
    return process


def _enter(start: Start, told: Any) -> None:
    os.setsid()
    modes = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT)
    for number, (path, mode) in enumerate(zip(start.streams, modes, strict=True)):
        handle = os.open(path, os.O_RDWR if path.startswith("/dev/") else mode)
        os.dup2(handle, number)
        os.close(handle)
    stream = partial(open, encoding="utf-8", closefd=False)
    sys.stdin, sys.stdout = stream(0), stream(1, "w")
    sys.stderr = stream(2, "w", errors="backslashreplace")
    told.send(True)
    os.environ.clear()
    os.environ.update(start.env or {})
    os.chdir(start.folder or ".")
    for kind, most in (start.limits or {}).items():
        resource.setrlimit(kind, (most, most))
    sys.argv = ["minikv", *start.arguments]
    if start.code:
        exec(compile(start.code, "code", "exec"), {"__name__": "__main__"})
        return
    if start.presses:
        _press_at(start.presses)
    if start.pace is not None:
        from fake_main import use_fake

        use_fake(start.pace)
    from minikv.cli.__main__ import run as command

    command()


def _press_at(presses: Presses) -> None:
    """A real SIGINT at exact moments of loading, reading and writing."""
    from minikv.cli.screen.progress import Loading
    from minikv.engine.engine import Engine

    seen: Counter[str] = Counter()
    step, weights = Engine.next, Loading.weights

    def press(moment: str) -> None:
        seen[moment] += 1
        for _ in range(presses.get((moment, seen[moment]), 0)):
            os.kill(os.getpid(), signal.SIGINT)

    def reading(how: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Engine, ids: Any, progress: Any = None, room: int = 256, *more: Any) -> Any:
            def told(done: int, total: int) -> None:
                press("chunk")
                progress(done, total)

            return how(self, ids, told, room, *more)

        return read

    def writing(self: Engine, *how: Any, **more: Any) -> Any:
        press("token")
        return step(self, *how, **more)

    def loading(self: Loading, done: int, total: int) -> None:
        press("load")
        weights(self, done, total)

    for name in ("prompt", "recall"):
        setattr(Engine, name, reading(getattr(Engine, name)))
    Engine.next, Loading.weights = writing, loading  # type: ignore[method-assign]
