"""`/export FILE` and `minikv report`: a chat as a file, in the format that its name says."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.chat.report import size
from minikv.cli.chat.slash import Command, Context
from minikv.cli.saved import files
from minikv.cli.saved.listing import listing
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clean
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
    kind = _format(path)
    refuse(path, _FORCE in arguments)
    if not context.session.turns:
        raise UsageError("there is nothing to export yet", "ask a question first")
    from minikv.cli.export.facts import gather

    written = write(path, _rendered(gather(context.session), kind), _FORCE in arguments)
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
    kind = _format(path)
    refuse(path, force)
    from minikv.cli.export.read import read_file

    written = write(path, _rendered(read_file(source), kind), force)
    terminal.say(f"{clean(str(path))}: {size(written)}")


_FORMATS = {
    ".html": "page",
    ".htm": "page",
    ".md": "markdown",
    ".markdown": "markdown",
    ".json": "json",
}


def _format(path: Path) -> str:
    kind = _FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(
            f"cannot tell from {clean(path.name)!r} what to write",
            f"the name must end in one of {', '.join(_FORMATS)}",
        )
    return kind


def _rendered(facts: ChatFacts, kind: str) -> str:
    from minikv.cli.export import markdown, page

    if kind == "json":
        return json.dumps(facts.to_dict(), indent=1) + "\n"
    return page.render(facts) if kind == "page" else markdown.render(facts)


def _after_export(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    return (_FORCE,) if word.startswith("-") else ()


def refuse(path: Path, force: bool) -> None:
    """Raise UsageError if `write` would not start: the path exists, is no regular file, or has no
    directory."""
    shown = clean(str(path))
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UsageError(f"no directory {clean(str(path.parent))}", "make it first") from None
        return
    except OSError as error:
        raise _cannot(path, error) from None
    if not stat.S_ISREG(mode):
        raise UsageError(f"{shown} is not a regular file", "choose another name")
    if not force:
        raise UsageError(f"{shown} exists", "--force replaces it, or choose another name")


def write(path: Path, text: str, force: bool = False) -> int:
    """Write `text` as UTF-8; return the number of bytes. Raises UsageError, and then no file has
    changed."""
    refuse(path, force)
    data = text.encode()
    try:
        files.write(path.parent, path.name, data, 0o666)
    except OSError as error:
        raise _cannot(path, error) from None
    return len(data)


def _cannot(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write {clean(str(path))}: {error.strerror or error}", "nothing was written"
    )


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
