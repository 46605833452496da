"""`/export FILE` and `minikv report`: a chat as a file, in the format that its name says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.chat.report import size
from minikv.cli.command import Command, Context
from minikv.cli.export.files import refuse, write
from minikv.cli.saved.listing import listing
from minikv.cli.terminal import Terminal, clean
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession
    from minikv.cli.export.facts import ChatFacts

_FORCE = "--force"


def export(context: Context, arguments: list[str]) -> None:
    """Write the chat so far to a file. Raises UsageError, and then no file has changed."""
    names = [argument for argument in arguments if argument != _FORCE]
    if len(names) != 1 or (names[0].startswith("-") and len(names[0]) > 1):
        raise UsageError(
            "/export takes one file",
            f"/export report.html, chat.md or chat.json; {_FORCE} replaces a file that exists",
        )
    path = Path(os.path.expanduser(names[0]))
    # Refuse before reading the cache.
    page = _format(path)
    refuse(path, _FORCE in arguments)
    if not context.session.turns:
        raise UsageError("there is nothing to export yet", "ask a question first")
    from minikv.cli.export.facts import gather

    written = write(path, page(gather(context.session)), _FORCE in arguments)
    context.terminal.say(f"{clean(str(path))}: {size(written)}")


def report(source: str, out: str | None, force: bool, terminal: Terminal) -> None:
    """`minikv report CHAT.json [-o FILE]`: write a JSON export in another format, without loading a
    model. out: the file; by default the source's name with .html. Raises UsageError."""
    if not os.path.exists(source) and source in {entry.name for entry in listing()}:
        raise UsageError(
            f"{source} is a saved chat, and this takes an exported one",
            f"minikv chat --resume {source}, then /export chat.json",
        )
    path = Path(out) if out is not None else Path(source).with_suffix(".html")
    page = _format(path)
    refuse(path, force)
    from minikv.cli.export.read import read_file

    written = write(path, page(read_file(source)), force)
    terminal.say(f"{clean(str(path))}: {size(written)}")


def _format(path: Path) -> Callable[[ChatFacts], str]:
    kind = _FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(
            f"cannot tell from {clean(path.name)!r} what to write",
            f"the name must end in one of {', '.join(_FORMATS)}",
        )
    return kind


def _html(facts: ChatFacts) -> str:
    from minikv.cli.export.html import render

    return render(facts)


def _markdown(facts: ChatFacts) -> str:
    from minikv.cli.export.markdown import render

    return render(facts)


def _json(facts: ChatFacts) -> str:
    return json.dumps(facts.to_dict(), indent=1) + "\n"


_FORMATS: Mapping[str, Callable[[ChatFacts], str]] = {
    ".html": _html,
    ".htm": _html,
    ".md": _markdown,
    ".markdown": _markdown,
    ".json": _json,
}


def _after_export(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    return (_FORCE,) if word.startswith("-") else ()


COMMANDS = (
    Command(
        ("export",),
        "FILE.html|md|json [--force]",
        "write the chat as a report or a file",
        export,
        files=True,
        follows=_after_export,
    ),
)
