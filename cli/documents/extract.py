"""Formats that need a large parser, read in a child process.

Such a parser has no limits of its own; the process has limits of memory, processor time and output.
A module that is run so calls `serve`.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from collections.abc import Callable

from minikv.cli.documents.loaders import TIMEOUT, run_for
from minikv.errors import UsageError

MEMORY = 1 << 30
"""Bytes of address space of the child."""

Child = Callable[[bytes, Callable[[str], object]], str]
"""Writes the text of a document. Returns why it cannot, as "what: hint", or ""."""

_REFUSED = 3  # exit code of a child that says why


def extract(
    module: str,
    data: bytes,
    shown: str,
    *,
    limit: int,
    timeout: float = TIMEOUT,
    stopped: Callable[[], bool] | None = None,
) -> str:
    """What the child of `module` writes for `data`, at most `limit` bytes; `shown` names the
    document in errors. Raises UsageError: refused by the child, damaged, too slow, too large; and
    Interrupted once `stopped()` is true."""
    # -P: nothing is imported from the directory that the user happens to be in.
    limits = (str(MEMORY), str(int(timeout) + 1))
    arguments = (sys.executable, "-P", "-m", module, *limits)
    output = run_for(shown, shown, arguments, data, limit=limit, timeout=timeout, stopped=stopped)
    if output.code == _REFUSED:
        what, _, hint = output.said.partition(": ")
        raise UsageError(f"{shown} {what}", hint)
    if output.code == -signal.SIGXCPU:  # the limit on processor time
        raise UsageError(f"{shown} took more than {timeout:.0f} s", "is the file damaged?")
    if output.code:
        said = f": {output.said}" if output.said else ""
        raise UsageError(f"{shown} cannot be read{said}", "is the file damaged?")
    return output.data.decode("utf-8", "replace")


def attempt(child: Child, data: bytes, write: Callable[[str], object]) -> str:
    """What `child` returns; an error as such a reason."""
    try:
        return child(data, write)
    except MemoryError:
        return f"needs more than {MEMORY >> 20} MiB to read: extract its text with another program"
    except Exception as error:  # a parser raises its own errors, and any other on odd files
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
