"""Errors that a user may see, each with its documented exit code.

The message says in one line what happened and why. `hint` says what to do; Python shows it below
the message (as a note). Remedies are Python code in backquotes: `dtype="float32"`, `chat.reset()`.
The command line replaces them with its own flags and commands (`worded` in
`minikv.cli.settings.config`). The models package has its own errors with `exit_code` and `hint`
(`minikv.models.errors`), because it may not import from here.
"""

from __future__ import annotations


class MinikvError(Exception):
    """Base class of the runtime's errors. The guide lists the exit codes."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(hint)


class UsageError(MinikvError):
    """A flag, budget, policy, option or document that cannot be used."""

    exit_code = 2


class MemoryShortError(MinikvError):
    """The host or the device does not have enough memory."""

    exit_code = 4


class ContextError(MinikvError):
    """The text needs more positions than the model was trained for."""

    exit_code = 5


class NumericsError(MinikvError):
    """The network produced NaN or infinite logits; nothing was sampled from them."""


class Interrupted(MinikvError):
    """The user stopped a prompt; the cache is as it was before the prompt."""

    exit_code = 130
