"""`minikv cache`: prompts that were read and need not be read again, and their removal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from minikv.chat.report import amount, size
from minikv.cli.paths import cache_folder
from minikv.cli.saved.chats import age
from minikv.cli.screen.text import clean, grid
from minikv.cli.settings.flags import Call, Yes, command, group
from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.chat.store import Store

cache = group(
    "minikv cache\n\nThe prompts that were read and are kept for later, the last used first."
)


@cache.callback(invoke_without_command=True)
@command
def prompts(call: Call) -> None:
    from minikv.chat.store import taken

    terminal = call.terminal
    entries = _store().entries()
    if not entries:
        terminal.say(f"no prompt is kept in {cache_folder() / 'prompts'}")
        return
    lines = [("NAME", "TOKENS", "SIZE", "USED", "MODEL", "DOCUMENTS")]
    for one in entries:
        used, about = age(time.time() - one.used), clean(one.about) or "-"
        tokens, bytes_ = f"{one.tokens:,}", size(one.nbytes)
        lines.append((one.path.name, tokens, bytes_, used, clean(one.model), about))
    terminal.data(grid(lines, "<>>><<"), fold=True)
    terminal.say(f"{amount(len(entries), 'prompt')}, {size(taken(entries))}")


@cache.command("rm")
@command
def forget(
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
    chosen = [entries[name] for name in names or entries]
    rest = [one for one in entries.values() if one not in chosen]
    total, what = taken(entries.values()) - taken(rest), amount(len(chosen), "prompt")
    if not chosen or not terminal.confirmed(f"remove {what}, {size(total)}?", yes=yes):
        terminal.say("nothing was removed")
        return
    for one in chosen:
        store.remove(one)
    terminal.note(f"removed {what}, {size(total)}")


def _store() -> Store:
    from minikv.chat.store import Store  # with torch

    return Store(cache_folder() / "prompts", 0, {})
