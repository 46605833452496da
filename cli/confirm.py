"""A question to the person at the terminal, before something is removed for good."""

from __future__ import annotations

import sys

from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clean
from minikv.errors import UsageError


def confirmed(question: str, terminal: Terminal, *, yes: bool) -> bool:
    """Whether the user agrees, with "y" or "yes". `yes`: do not ask. Raises UsageError if standard
    input is not a terminal."""
    if yes:
        return True
    if not (sys.stdin.isatty() and terminal.err.isatty()):
        raise UsageError("cannot ask: no terminal to answer on", "--yes removes without asking")
    terminal.err.write(f"{clean(question)} [y/N] ")
    terminal.err.flush()
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        terminal.say("")
        return False
