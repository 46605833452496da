"""A question to the person at the terminal, before something is removed for good."""

from __future__ import annotations

import sys

from minikv.cli.terminal import Terminal, clean
from minikv.errors import UsageError


def confirmed(question: str, terminal: Terminal, *, yes: bool) -> bool:
    """Whether the user wants it; only "y" and "yes" say so. `yes`: do not ask. Raises UsageError
    where there is nobody to ask."""
    if yes:
        return True
    if not (sys.stdin.isatty() and terminal.err.isatty()):
        raise UsageError("nobody is here to ask", "--yes removes without asking")
    terminal.err.write(f"{clean(question)} [y/N] ")
    terminal.err.flush()
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        terminal.say("")
        return False
