"""Commands that turn a file into text: one per extension from the config, run without a shell.

A command is the user's own, but what it prints is not: time, output and message are bounded.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from typing import IO

from minikv.cli.screen.text import clean
from minikv.errors import Interrupted, UsageError

TIMEOUT = 120.0
"""Seconds that one document may take."""

_TICK = 0.1  # seconds between two looks at the clock and at Ctrl-C
_TAIL = 4096  # bytes of stderr that are read


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
    told = f"{shown}: {program}"
    output = run_for(shown, told, arguments, limit=limit, timeout=timeout, stopped=stopped)
    if output.code:
        how = f"exit status {output.code}" if output.code > 0 else f"signal {-output.code}"
        said = f": {output.said}" if output.said else ""
        raise UsageError(f"{shown}: {program} failed with {how}{said}", "nothing was added")
    return output.data, program


_EXAMPLE = 'for example ".odt" = "pandoc -t plain {path}"'


def run_for(
    shown: str,
    told: str,
    arguments: Sequence[str],
    data: bytes = b"",
    *,
    limit: int,
    timeout: float,
    stopped: Callable[[], bool] | None,
) -> Output:
    """`run`, for the document `shown`. Raises UsageError, which begins with `told`, and
    Interrupted."""
    try:
        return run(arguments, data, limit=limit, timeout=timeout, stopped=stopped)
    except Interrupted:
        raise Interrupted(f"stopped reading {shown}", "nothing was added") from None
    except TooSlow:
        what, hint = f"took more than {timeout:.0f} s", "extract its text with another program"
    except TooMuch:
        what = f"gave more than {limit >> 20} MiB of text"
        hint = "no supported model can read that much text"
    except OSError as error:
        what, hint = f"cannot be run: {error.strerror}", ""
    raise UsageError(f"{told} {what}", hint)


def _scratch() -> IO[bytes]:
    """A file in memory, where the system has such: no document is written to a disk there."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("minikv"), "w+b")
    return TemporaryFile()


def run(
    arguments: Sequence[str],
    data: bytes = b"",
    *,
    limit: int,
    timeout: float,
    stopped: Callable[[], bool] | None = None,
) -> Output:
    """Run a command on `data` as its standard input, within limits of time and output.

    Raises TooSlow, TooMuch, Interrupted, OSError; the command and all it started have then been
    killed. What a child of the command prints after it has ended is not waited for.
    """
    with _scratch() as given, _scratch() as out, _scratch() as err:
        given.write(data)
        given.seek(0)
        # In a group of its own, so that its children can be killed with it.
        process = subprocess.Popen(arguments, stdin=given, stdout=out, stderr=err, process_group=0)
        end = monotonic() + timeout
        try:
            while process.poll() is None:
                if stopped is not None and stopped():
                    raise Interrupted("stopped")
                if monotonic() > end:
                    raise TooSlow
                if os.fstat(out.fileno()).st_size > limit:
                    raise TooMuch
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TICK)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # The command moved the ends of the files that both have open.
        printed = os.pread(out.fileno(), limit + 1, 0)
        if len(printed) > limit:
            raise TooMuch
        size = os.fstat(err.fileno()).st_size
        tail = os.pread(err.fileno(), _TAIL, max(0, size - _TAIL))
    lines = clean(tail.decode("utf-8", "replace")).strip().splitlines()
    said = " ".join(lines[-1].split())[:200] if lines else ""
    return Output(process.returncode, printed, said)
