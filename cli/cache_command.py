"""`minikv cache`: prompts that were read and are kept for later chats; their removal."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from minikv.chat.report import size
from minikv.cli.paths import cache_folder
from minikv.cli.saved.chats import age
from minikv.cli.screen.text import clean, grid
from minikv.cli.settings.flags import Call, Json, Yes, command, group
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.store import Entry, Store

cache = group(
    "minikv cache\n\nThe prompts that were read and are kept for later, the last used first."
)


@cache.callback(invoke_without_command=True)
@command
def listed(call: Call, as_json: Json = False) -> None:
    from minikv.chat.store import taken

    terminal = call.terminal
    entries = _store().entries()
    rows = [
        {
            "name": one.path.name,
            "model": one.model,
            "documents": one.about,
            "tokens": one.tokens,
            "bytes": one.nbytes,
            "used": round(one.used),
        }
        for one in entries
    ]
    if as_json:
        terminal.data(json.dumps(rows))
        return
    if not entries:
        terminal.say(f"no prompt is kept in {cache_folder() / 'prompts'}")
        return
    lines = [("NAME", "TOKENS", "SIZE", "USED", "MODEL", "DOCUMENTS")]
    for one in entries:
        used, about = age(time.time() - one.used), clean(one.about) or "-"
        tokens, bytes_ = f"{one.tokens:,}", size(one.nbytes)
        lines.append((one.path.name, tokens, bytes_, used, clean(one.model), about))
    terminal.data(grid(lines, "<>>><<"), fold=True)
    count = "1 prompt" if len(entries) == 1 else f"{len(entries):,} prompts"
    terminal.say(f"{count}, {size(taken(entries))}")


@cache.command("rm")
@command
def remove(
    call: Call,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None,
    yes: Yes = False,
) -> None:
    """Remove these prompts, or all."""
    from minikv.chat.store import taken

    terminal, names = call.terminal, names or []
    store = _store()
    entries = {one.path.name: one for one in store.entries()}
    for name in names:
        if name not in entries:
            raise UsageError(f"no prompt {name!r} is kept", "`minikv cache` lists them")
    chosen: list[Entry] = [entries[name] for name in names or entries]
    rest = [one for one in entries.values() if one not in chosen]
    total, count = taken(entries.values()) - taken(rest), len(chosen)
    what = "1 prompt" if count == 1 else f"{count:,} prompts"
    if not chosen or not terminal.confirmed(f"remove {what}, {size(total)}?", yes=yes):
        terminal.say("nothing was removed")
        return
    for one in chosen:
        store.remove(one)
    terminal.note(f"removed {what}, {size(total)}")


def _store() -> Store:
    from minikv.chat.store import Store  # with torch

    return Store(cache_folder() / "prompts", 0, {})
