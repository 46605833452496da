"""Commands that turn a file into text: one per extension from the config, run without a shell.

A command is the user's own, but what it prints is not: time, output and message are bounded.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from minikv.cli.screen.text import clean
from minikv.errors import Interrupted, UsageError

TIMEOUT = 120.0
"""Seconds that a command may take."""

_TICK = 0.1  # seconds between two looks at the clock and at Ctrl-C
_PIECE = 1 << 16
_TAIL = 4096  # bytes of stderr that are kept


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a command. `code` is negative for a signal; `said` is stderr's last line."""

    code: int
    data: bytes
    said: str


class TooSlow(Exception):
    """A command was still running when its time was up."""


class TooMuch(Exception):
    """A command printed more than it may."""


def command_for(path: str, loaders: Mapping[str, str]) -> str | None:
    """The command for a file name, by its longest matching extension, any case; or None.

    `loaders` maps extensions, with or without their dot, to commands.
    """
    name = Path(path).name.lower()
    found = [e for e in loaders if name.endswith("." + e.lower().lstrip(".")) and e.strip(".")]
    return loaders[max(found, key=len)] if found else None


def load(
    command: str,
    path: str,
    shown: str,
    *,
    limit: int,
    timeout: float = TIMEOUT,
    stopped: Callable[[], bool] | None = None,
) -> tuple[bytes, str]:
    """What `command` prints for the file at `path`, and the program's name.

    "{path}" in the command becomes one argument, the absolute path, so that no file name can pass
    for an option. `shown` names the file in errors. At most `limit` bytes and `timeout` seconds;
    raises UsageError, and Interrupted once `stopped()` is true.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"the loader for {shown} cannot be read: {error}", _EXAMPLE) from None
    if not any("{path}" in word for word in words[1:]):
        raise UsageError(f"the loader for {shown} does not say where {{path}} goes", _EXAMPLE)
    program = clean(Path(words[0]).name)
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"{shown} needs {program}, which is not installed",
            "install it, or change the loader in the config",
        )
    absolute = os.path.abspath(path)
    arguments = [words[0], *(word.replace("{path}", absolute) for word in words[1:])]
    try:
        output = run(arguments, limit=limit, timeout=timeout, stopped=stopped)
    except Interrupted:
        raise Interrupted(f"stopped reading {shown}", "nothing was added") from None
    except TooSlow:
        raise UsageError(f"{shown}: {program} took more than {timeout:.0f} s") from None
    except TooMuch:
        raise UsageError(
            f"{shown}: {program} printed more than {limit >> 20} MiB",
            "no supported model can read that much text",
        ) from None
    except OSError as error:
        raise UsageError(f"{shown}: {program} cannot be run: {error.strerror}") from None
    if output.code:
        how = f"exit status {output.code}" if output.code > 0 else f"signal {-output.code}"
        said = f": {output.said}" if output.said else ""
        raise UsageError(f"{shown}: {program} failed with {how}{said}", "nothing was added")
    return output.data, program


_EXAMPLE = 'for example ".docx" = "pandoc -t plain {path}"'


def run(
    arguments: Sequence[str],
    data: bytes = b"",
    *,
    limit: int,
    timeout: float,
    memory: int | None = None,
    stopped: Callable[[], bool] | None = None,
) -> Output:
    """Run a command on `data` as its standard input, within limits of time and output.

    `memory` bounds its address space in bytes, where the system can (Linux), and then `timeout`
    its CPU time too. Raises TooSlow, TooMuch, Interrupted, OSError; the command and all it started
    have then been killed.
    """
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        process_group=0,  # so that its own children can be killed with it
    )
    try:
        # Before it gets any input.
        if memory is not None and hasattr(resource, "prlimit"):
            with contextlib.suppress(ProcessLookupError):
                seconds = int(timeout) + 1
                resource.prlimit(process.pid, resource.RLIMIT_AS, (memory, memory))
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (seconds, seconds + 5))
        out, err = _pump(process, data, limit, monotonic() + timeout, stopped)
    finally:
        _end(process)
    lines = clean(err.decode("utf-8", "replace")).strip().splitlines()
    said = " ".join(lines[-1].split())[:200] if lines else ""
    return Output(process.returncode, out, said)


def _pump(
    process: subprocess.Popen[bytes],
    data: bytes,
    limit: int,
    deadline: float,
    stopped: Callable[[], bool] | None,
) -> tuple[bytes, bytes]:
    """Write stdin and read stdout and stderr until the command ends. Returns stdout and the end of
    stderr."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = bytearray(), bytearray()
    rest = memoryview(data)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stderr, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        # A child of the command may keep the pipes open; we do not wait for it.
        while selector.get_map():
            if stopped is not None and stopped():
                raise Interrupted("stopped")
            if monotonic() > deadline:
                raise TooSlow
            ended = process.poll() is not None  # before reading: nothing is missed
            ready = selector.select(_TICK)
            if not ready and ended:
                break
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    try:
                        sent = os.write(key.fd, rest[:_PIECE]) if rest else 0
                    except BrokenPipeError:  # the command reads no more
                        sent = len(rest)
                    rest = rest[sent:]
                    if not rest:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                piece = os.read(key.fd, _PIECE)
                if not piece:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    err = (err + piece)[-_TAIL:]
                else:
                    out += piece
                    if len(out) > limit:
                        raise TooMuch
        while process.poll() is None:  # it closed its output, and has not ended yet
            if stopped is not None and stopped():
                raise Interrupted("stopped")
            if monotonic() > deadline:
                raise TooSlow
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TICK)
    return bytes(out), bytes(err)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the command's group, and close the pipes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
