"""`minikv config`: shows every value in use, writes a file with every key, and changes keys."""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import MutableMapping
from pathlib import Path
from typing import Annotated, Any

import tomlkit
import typer
from tomlkit.exceptions import TOMLKitError

from minikv.cli.paths import config_file, private, write
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clean
from minikv.cli.settings.config import (
    ALIASES,
    BUNDLED,
    LOCAL,
    SETTINGS,
    load,
    nearest,
    read_toml,
    short,
)
from minikv.cli.settings.flags import Call, command, group, listed, text
from minikv.errors import UsageError
from minikv.settings import Plain, refuse_gone

config = group(
    "minikv config init\n\nSettings from files and MINIKV_* variables.", no_args_is_help=True
)


@config.command()
@command
def show(call: Call) -> None:
    """Every setting, its value and where it came from."""
    made = load()
    for note in made.notes:
        call.terminal.warn(note)
    values = {name: text(made.value(name)) for name in SETTINGS}
    lines = listed(values, made.origins(()))
    if made.aliases:
        lines += [f"[{ALIASES}]", *(f"{name} = {value}" for name, value in made.aliases.items())]
    call.terminal.data("\n".join(lines))


@config.command()
@command
def init(call: Call) -> None:
    """Write a commented file with every key."""
    path = config_file()
    try:
        private(path.parent)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError:
        raise UsageError(f"{clean(str(path))} exists already", "edit it, or remove it") from None
    except OSError as error:
        raise UsageError(f"cannot write {clean(str(path))}: {error.strerror}") from None
    call.terminal.data(str(path))


@config.command("set", short_help="Set a key, or an alias, in your own file.")
@command
def change(
    call: Call,
    key: Annotated[str, typer.Argument(help="a key from `minikv config show`")],
    words: Annotated[list[str], typer.Argument(metavar="VALUE", help="its value")],
) -> None:
    """minikv config set budget 20%

    Set a key in your own file; every other line stays. aliases.NAME is a short name for --model:
    minikv config set aliases.llama3 owner/name
    """
    table, name = _place(key)
    if table:
        if len(words) != 1 or not words[0] or name in (BUNDLED, words[0]):
            raise UsageError(
                f"{clean(name)} cannot be an alias of {clean(' '.join(words)) or 'nothing'}",
                f"minikv config set {ALIASES}.NAME MODEL, with any other name but {BUNDLED}",
            )
        _write(table, name, words[0], call.terminal)
        return
    name = name.lstrip("-").replace("-", "_")
    if name not in SETTINGS:
        refuse_gone(name, name)
        raise UsageError(f"there is no key {key!r}", nearest(name, [*SETTINGS, f"{ALIASES}.NAME"]))
    one = SETTINGS[name]
    _write("", name, one.read_whole(one.parse_words(words), name), call.terminal)


@config.command(short_help="Remove a key from your own file.")
@command
def unset(call: Call, key: Annotated[str, typer.Argument(help="a key of the file")]) -> None:
    """minikv config unset aliases.llama3

    Remove a key from your own file; every other line stays.
    """
    _write(*_place(key), None, call.terminal)


def _place(key: str) -> tuple[str, str]:
    """The table of a key, "" if none, and the key in it; only `aliases.NAME`, where NAME may have
    dots, has a table."""
    table, _, name = key.partition(".")
    return (table, name) if table == ALIASES and name else ("", key)


def _write(table: str, name: str, value: Plain | None, terminal: Terminal) -> None:
    """Set or, with None, remove a key of the user's own file, and warn if another setting overrides
    it."""
    path = Path(os.path.realpath(config_file()))  # a link to it stays a link
    shown, full = short(path), clean(f"{table}.{name}" if table else name)
    try:
        before = path.read_bytes().decode() if read_toml(path, shown) is not None else ""
        document = tomlkit.parse(before)
        own: Any = document.setdefault(table, tomlkit.table()) if table else document
        if not isinstance(own, MutableMapping):
            raise ValueError(f"{table} is not a table")
        if value is None:
            name = name if name in own else name.lstrip("-").replace("-", "_")
            if name not in own or (name == ALIASES and not table):
                hint = "`minikv config show` says where each value comes from"
                raise UsageError(f"{full} is not set in {shown}", hint)
            del own[name]
        else:
            own[name] = list(value) if isinstance(value, tuple) else value
        private(path.parent)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        write(path.parent, path.name, tomlkit.dumps(document).encode())
        path.chmod(mode)
    except (ValueError, TOMLKitError) as error:
        raise UsageError(f"{shown}: {clean(str(error))}", "edit it by hand") from None
    except OSError as error:
        raise UsageError(f"cannot write {shown}: {error.strerror}") from None
    key = f"{table}.{tomlkit.key(name).as_string()}" if table else name
    terminal.data(f"{key} removed" if value is None else f"{key} = {own[name].as_string()}")
    terminal.note(f"in {shown}")
    with contextlib.suppress(UsageError):  # another file may be invalid
        origin = load().sources.get(f"{table}.{name}" if table else name, "default")
        if value is None and origin != "default":
            terminal.warn(f"{origin} still sets {full}")
        elif value not in ("", None) and origin != short(config_file()):
            terminal.warn(f"{origin} also sets {full}, and wins over it here")


def template() -> str:
    """A config.toml with every key and its default, commented out."""
    lines = [
        "# Settings of minikv. A flag wins over these, and so do MINIKV_* variables and a",
        f"# {LOCAL} in the directory where minikv is started.",
        "",
    ]
    for setting in SETTINGS.values():
        value = text(setting.default)
        value = f'"{value}"' if isinstance(setting.default, str) else value
        lines += textwrap.wrap(setting.help, 88, initial_indent="# ", subsequent_indent="# ")
        lines.append(f"# {setting.name} = {value}")
    lines += [
        "",
        "# Short names for --model.",
        "# [aliases]",
        '# llama3 = "meta-llama/Meta-Llama-3-8B-Instruct"',
        "",
    ]
    return "\n".join(lines)
