"""`/export FILE`: writes the chat as a page, Markdown or JSON, according to the file's name."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.chat.report import size
from minikv.cli.chat.slash import Command, Context
from minikv.cli.paths import write
from minikv.cli.screen.text import clean
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.cli.export.facts import ChatFacts

_FORCE = "--force"
_FORMATS = {".html": "page", ".md": "markdown", ".json": "json"}


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
    kind = _FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(
            f"cannot tell from {clean(path.name)!r} what to write",
            f"the name must end in one of {', '.join(_FORMATS)}",
        )
    _refuse(path, _FORCE in arguments)
    if not context.session.turns:
        raise UsageError("there is nothing to export yet", "ask a question first")
    from minikv.cli.export.facts import gather

    data = rendered(gather(context.session), kind).encode()
    _refuse(path, _FORCE in arguments)
    try:
        write(path.parent, path.name, data, 0o666)
    except OSError as error:
        raise _cannot(path, error) from None
    context.terminal.say(f"{clean(str(path))}: {size(len(data))}")


def rendered(facts: ChatFacts, kind: str) -> str:
    """The text of a file: "json", or a "page" or "markdown" without invisible characters."""
    from minikv.cli.export import page

    if kind == "json":
        return json.dumps(facts.to_dict(), indent=1) + "\n"
    return _visible(page.render(facts) if kind == "page" else page.as_markdown(facts))


def _visible(text: str) -> str:
    """`text` with names instead of the characters that `clean` drops (controls, bidi overrides,
    tags, lone surrogates), because an export shows every token."""
    return "".join(c if clean(c) else _name(ord(c)) for c in text) if clean(text) != text else text


def _name(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's control pictures, e.g. for ESC
    return f"⟨U+{code:04X}⟩"


def _refuse(path: Path, force: bool) -> None:
    """Raise UsageError if the path exists, is not a regular file, or has no directory."""
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
        follows=(_FORCE,),
    ),
)
