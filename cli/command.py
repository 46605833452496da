"""What a slash command is, and what it gets; the table of them is in `commands`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minikv.chat.reuse import REREAD_LIMIT
from minikv.cli.interrupt import Interrupts
from minikv.cli.saved.keeper import Keeper
from minikv.cli.terminal import Terminal
from minikv.settings import Generation

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession


class Leave(Exception):
    """The user wants to go."""


@dataclass(slots=True)
class Context:
    """What a command may touch. `errors`: how documents are decoded; `generation`: how the next
    answers are written; `keeper`: what saves the chat; `loaders`: a command per file extension;
    `origins`: where each setting's value came from; `offline`: whether the network was ruled out;
    `debug`: show where an error happened; `reread_limit`: how many tokens `--reuse auto` reads
    again without asking, 0 for any number."""

    session: ChatSession
    terminal: Terminal
    errors: str
    generation: Generation
    interrupts: Interrupts
    keeper: Keeper
    loaders: Mapping[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    offline: bool = False
    debug: bool = False
    reread_limit: int = REREAD_LIMIT


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command; `words` are its names, the first one shown. `run` raises UsageError.

    `raw`: the rest of the line is one argument, quotes and all.
    """

    words: tuple[str, ...]
    takes: str
    help: str
    run: Callable[[Context, list[str]], None]
    raw: bool = False
