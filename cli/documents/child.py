"""Parses a document in a child process, within limits of time, output, memory and processor time,
because a large parser has no limits of its own.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from tempfile import TemporaryFile
from time import monotonic
from typing import IO

from minikv.cli.screen.text import clean
from minikv.errors import UsageError

TIMEOUT = 120.0
"""The most seconds for one document."""
MEMORY = 1 << 30
"""Bytes of address space of a child."""

Child = Callable[[bytes, Callable[[str], object]], str]
"""Writes the text of a document. Returns "", or why it cannot, as "what: hint"."""

_REFUSED = 3  # exit code of a child that gives the reason
_TICK = 0.1  # seconds between two checks of the clock
_TAIL = 4096  # bytes of stderr that are read


def extract(
    kind: str,
    data: bytes,
    shown: str,
    *,
    limit: int,
    timeout: float = TIMEOUT,
) -> str:
    """The text of `data`, "pdf" or "markup", at most `limit` bytes; `shown` names the document in
    errors. Raises UsageError if the child refuses it, or if it is damaged, too slow or too large.
    After any error, the child and all that it started are killed."""
    # -P: import nothing from the current directory.
    limits = (str(MEMORY), str(int(timeout) + 1))
    arguments = (sys.executable, "-P", "-m", "minikv.cli.documents.parsers", kind, *limits)
    too_slow = f"{shown} took more than {timeout:.0f} s"
    too_much = UsageError(
        f"{shown} gave more than {limit >> 20} MiB of text",
        "no supported model can read that much text",
    )
    with _scratch() as given, _scratch() as out, _scratch() as err:
        given.write(data)
        given.seek(0)
        # In its own process group, so that its children can be killed with it.
        process = subprocess.Popen(arguments, stdin=given, stdout=out, stderr=err, process_group=0)
        end = monotonic() + timeout
        try:
            while process.poll() is None:
                if monotonic() > end:
                    raise UsageError(too_slow, "extract its text with another program")
                if os.fstat(out.fileno()).st_size > limit:
                    raise too_much
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TICK)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # The child moved the shared positions in the files that both have open.
        printed = os.pread(out.fileno(), limit + 1, 0)
        size = os.fstat(err.fileno()).st_size
        tail = os.pread(err.fileno(), _TAIL, max(0, size - _TAIL))
    if len(printed) > limit:
        raise too_much
    lines = clean(tail.decode("utf-8", "replace")).strip().splitlines()
    said = " ".join(lines[-1].split())[:200] if lines else ""
    if process.returncode == _REFUSED:
        what, _, hint = said.partition(": ")
        raise UsageError(f"{shown} {what}", hint)
    if process.returncode == -signal.SIGXCPU:  # the limit on processor time
        raise UsageError(too_slow, "is the file damaged?")
    if process.returncode:
        raise UsageError(f"{shown} cannot be read{said and f': {said}'}", "is the file damaged?")
    return printed.decode("utf-8", "replace")


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


def serve(children: Mapping[str, Child]) -> None:
    """The child's program. Its arguments: the kind of document, bytes of address space, and seconds
    of processor time."""
    kind, memory, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.setrecursionlimit(1000)
    out = sys.stdout.buffer
    why = attempt(children[kind], sys.stdin.buffer.read(), lambda text: out.write(utf8(text)))
    out.flush()
    if why:
        sys.stderr.write(why)
        raise SystemExit(_REFUSED)


def utf8(text: str) -> bytes:
    """UTF-8, with surrogate pairs joined and lone surrogates replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
