"""Runs other programs that turn a document into text, within limits of time and output: the loaders
of the configuration, one command per extension; and our own parsers in a child process.

A large parser has no limits of its own, so that process also has limits of memory and processor
time. A module that runs in it calls `serve`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from typing import IO

from minikv.cli.screen.text import clean
from minikv.errors import Interrupted, UsageError

TIMEOUT = 120.0
"""The most seconds for one document."""
MEMORY = 1 << 30
"""Bytes of address space of a child."""

Child = Callable[[bytes, Callable[[str], object]], str]
"""Writes the text of a document. Returns "", or why it cannot, as "what: hint"."""

_REFUSED = 3  # exit code of a child that gives the reason
_TICK = 0.1  # seconds between two checks of the clock and of Ctrl-C
_TAIL = 4096  # bytes of stderr that are read
_EXAMPLE = 'for example ".odt" = "pandoc -t plain {path}"'


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a command. `code` is negative for a signal; `said` is stderr's last line."""

    code: int
    data: bytes
    said: str


def command_for(path: str, loaders: Mapping[str, str]) -> str | None:
    """The command for a file name, by its longest matching extension, in any case; or None.

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
    """The output of `command` for the file at `path`, and the program's name. Runs it without a
    shell.

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
    absolute, told = os.path.abspath(path), f"{shown}: {program}"
    arguments = [words[0], *(word.replace("{path}", absolute) for word in words[1:])]
    output = run(arguments, told=told, limit=limit, timeout=timeout, stopped=stopped)
    if output.code:
        how = f"exit status {output.code}" if output.code > 0 else f"signal {-output.code}"
        said = f": {output.said}" if output.said else ""
        raise UsageError(f"{told} failed with {how}{said}", "nothing was added")
    return output.data, program


def extract(
    module: str,
    data: bytes,
    shown: str,
    *,
    limit: int,
    timeout: float = TIMEOUT,
    stopped: Callable[[], bool] | None = None,
) -> str:
    """The output of the child of `module` for `data`, at most `limit` bytes; `shown` names the
    document in errors. Raises UsageError if the child refuses it, or if it is damaged, too slow or
    too large; and Interrupted once `stopped()` is true."""
    # -P: import nothing from the current directory.
    limits = (str(MEMORY), str(int(timeout) + 1))
    arguments = (sys.executable, "-P", "-m", module, *limits)
    output = run(arguments, data, told=shown, limit=limit, timeout=timeout, stopped=stopped)
    if output.code == _REFUSED:
        what, _, hint = output.said.partition(": ")
        raise UsageError(f"{shown} {what}", hint)
    if output.code == -signal.SIGXCPU:  # the limit on processor time
        raise UsageError(f"{shown} took more than {timeout:.0f} s", "is the file damaged?")
    if output.code:
        said = f": {output.said}" if output.said else ""
        raise UsageError(f"{shown} cannot be read{said}", "is the file damaged?")
    return output.data.decode("utf-8", "replace")


def run(
    arguments: Sequence[str],
    data: bytes = b"",
    *,
    told: str = "",
    limit: int,
    timeout: float,
    stopped: Callable[[], bool] | None = None,
) -> Output:
    """Run a command on `data` as its standard input, within limits of time and output.

    Raises UsageError, which begins with `told`, and Interrupted, after killing the command and all
    that it started. Does not wait for output of the command's children after the command has ended.
    """
    many = f"{told} gave more than {limit >> 20} MiB of text"
    too_much = UsageError(many, "no supported model can read that much text")
    with _scratch() as given, _scratch() as out, _scratch() as err:
        given.write(data)
        given.seek(0)
        try:
            # In its own process group, so that its children can be killed with it.
            process = subprocess.Popen(
                arguments, stdin=given, stdout=out, stderr=err, process_group=0
            )
        except OSError as error:
            raise UsageError(f"{told} cannot be run: {error.strerror}") from None
        end = monotonic() + timeout
        try:
            while process.poll() is None:
                if stopped is not None and stopped():
                    raise Interrupted(f"stopped reading {told}", "nothing was added")
                if monotonic() > end:
                    what = f"{told} took more than {timeout:.0f} s"
                    raise UsageError(what, "extract its text with another program")
                if os.fstat(out.fileno()).st_size > limit:
                    raise too_much
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TICK)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # The command moved the shared positions in the files that both have open.
        printed = os.pread(out.fileno(), limit + 1, 0)
        if len(printed) > limit:
            raise too_much
        size = os.fstat(err.fileno()).st_size
        tail = os.pread(err.fileno(), _TAIL, max(0, size - _TAIL))
    lines = clean(tail.decode("utf-8", "replace")).strip().splitlines()
    said = " ".join(lines[-1].split())[:200] if lines else ""
    return Output(process.returncode, printed, said)


def _scratch() -> IO[bytes]:
    """A file in memory, if the system has such files: then no document is written to a disk."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("minikv"), "w+b")
    return TemporaryFile()


# -- in the child ---------------------------------------------------------------------------


def attempt(child: Child, data: bytes, write: Callable[[str], object]) -> str:
    """The result of `child`; an error becomes a reason."""
    try:
        return child(data, write)
    except MemoryError:
        return f"needs more than {MEMORY >> 20} MiB to read: extract its text with another program"
    except Exception as error:  # parsers raise all kinds of errors for odd files
        return f"cannot be read ({type(error).__name__}): is the file damaged?"


def serve(child: Child) -> None:
    """The child's program. Its arguments: bytes of address space, and seconds of processor time."""
    memory, seconds = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.setrecursionlimit(1000)
    out = sys.stdout.buffer
    why = attempt(child, sys.stdin.buffer.read(), lambda text: out.write(utf8(text)))
    out.flush()
    if why:
        sys.stderr.write(why)
        raise SystemExit(_REFUSED)


def utf8(text: str) -> bytes:
    """UTF-8, with surrogate pairs joined and lone surrogates replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
