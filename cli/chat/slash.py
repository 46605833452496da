"""The types of a slash command and of its arguments. `slash_commands` has the table of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minikv.cli.failures import Interrupts
from minikv.cli.saved.keeper import Keeper
from minikv.cli.screen.terminal import Terminal
from minikv.settings import Generation

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession
    from minikv.chat.transcript import Turn


class Leave(Exception):
    """The user leaves the chat."""


@dataclass(slots=True)
class Context:
    """The objects that a command may read and change. generation: how the next answers are written.
    keeper: saves the chat. began: the settings with which the chat started. origins: where each
    setting's value came from. debug: show where an error happened. checks: compare answers with
    those of a cache without eviction. stopped: the turn whose question was asked again and then
    stopped."""

    session: ChatSession
    terminal: Terminal
    generation: Generation
    interrupts: Interrupts
    keeper: Keeper
    began: Mapping[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    debug: bool = False
    checks: bool = False
    stopped: Turn | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command. words: its names, of which the first is shown. run: raises UsageError.

    raw: the rest of the line, quotes included, is one argument. For Tab: files: whether paths may
    follow. follows: other words that may follow (a flag anywhere, another word as the first), or a
    function that returns them, given the chat, the words between the command and the word being
    typed, and that word.
    """

    words: tuple[str, ...]
    takes: str
    help: str
    run: Callable[[Context, list[str]], None]
    raw: bool = False
    files: bool = False
    follows: tuple[str, ...] | Callable[[ChatSession, Sequence[str], str], Iterable[str]] = ()
