"""`minikv config`: which files are read, a file with every key, and every value in force."""

from __future__ import annotations

import contextlib
import json
import os
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Annotated, Any

import tomlkit
import typer
from tomlkit.exceptions import TOMLKitError

from minikv.cli.paths import config_file
from minikv.cli.saved.files import private, write
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clean
from minikv.cli.settings import completion
from minikv.cli.settings.config import (
    ALIASES,
    BUNDLED,
    LOCAL,
    SETTINGS,
    allowed,
    load,
    nearest,
    read_toml,
    short,
    user_file,
)
from minikv.cli.settings.flags import Call, Json, command, group
from minikv.cli.settings.values import listed, text
from minikv.errors import UsageError
from minikv.settings import Plain, refuse_gone, spelled

config = group(
    "minikv config init\n\nSettings from files and MINIKV_* variables.", no_args_is_help=True
)


@config.command()
@command
def show(call: Call, as_json: Json = False) -> None:
    """Every setting, its value and where it came from."""
    terminal, made = call.terminal, load()
    for note in made.notes:
        terminal.warn(note)
    values = {name: one.default for name, one in SETTINGS.items()}
    values |= {name: one.value for name, one in made.values.items()}
    origins = made.origins(())
    if as_json:
        rows = {name: {"value": values[name], "origin": origins[name]} for name in SETTINGS}
        tables = {"aliases": dict(made.aliases), "loaders": dict(made.loaders)}
        terminal.data(json.dumps({"settings": rows, **tables}))
        return
    lines = listed({name: text(value) for name, value in values.items()}, origins)
    for title, table in (("aliases", made.aliases), ("loaders", made.loaders)):
        if table:
            lines += [f"[{title}]", *(f"{name} = {value}" for name, value in table.items())]
    terminal.data("\n".join(lines))


@config.command("path")
@command
def paths(call: Call) -> None:
    """Which files are read, the strongest first."""
    own = user_file()
    for path in (Path(LOCAL).absolute(), own):
        if path is not None:
            call.terminal.data(f"{path}{'' if path.exists() else '  (not there)'}")


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
    key: Annotated[
        str, typer.Argument(help="a key from `minikv config show`", autocompletion=completion.keys)
    ],
    words: Annotated[
        list[str],
        typer.Argument(metavar="value", help="its value", autocompletion=completion.key_values),
    ],
) -> None:
    """minikv config set budget 20%

    Set a key in your own file; every other line stays. aliases.NAME is a short name for --model:
    minikv config set aliases.llama3 owner/name
    """
    terminal = call.terminal
    if alias := _alias(key):
        if len(words) != 1 or not words[0] or alias in (BUNDLED, words[0]):
            raise UsageError(
                f"{clean(alias)} cannot be an alias of {clean(' '.join(words)) or 'nothing'}",
                f"minikv config set {ALIASES}.NAME MODEL, with any other name but {BUNDLED}",
            )
        _write(alias, words[0], terminal, ALIASES)
        return
    name = key.lstrip("-").replace("-", "_")
    if name not in SETTINGS:
        refuse_gone(name, name)
        raise UsageError(f"there is no key {key!r}", nearest(name, [*SETTINGS, f"{ALIASES}.NAME"]))
    one = SETTINGS[name]
    if isinstance(one.default, tuple):
        value: object = [spelled(word) for word in words if word]
    elif len(words) == 1:
        value = one.parse(words[0])
    else:
        raise UsageError(f"{name} takes one value, got {' '.join(words)!r}", "quote a text")
    _write(name, allowed(one, value, name), terminal)


@config.command(short_help="Remove a key from your own file.")
@command
def unset(
    call: Call,
    key: Annotated[
        str, typer.Argument(help="a key of the file", autocompletion=completion.keys_set)
    ],
) -> None:
    """minikv config unset aliases.llama3

    Remove a key from your own file; every other line stays.
    """
    alias = _alias(key)
    known = read_toml(config_file(), short(config_file())) or {}
    own = known.get(ALIASES, {}) if alias else known
    name = alias or (key if key in known else key.lstrip("-").replace("-", "_"))
    if not isinstance(own, dict) or name not in own or isinstance(own[name], dict):
        raise UsageError(
            f"{clean(key)} is not set in {short(config_file())}",
            "`minikv config show` says where each value comes from",
        )
    _write(name, None, call.terminal, ALIASES if alias else "")


def _alias(key: str) -> str:
    """The NAME of aliases.NAME, which may have dots; else ""."""
    table, _, name = key.partition(".")
    return name if table == ALIASES else ""


def _write(name: str, value: Plain | None, terminal: Terminal, table: str = "") -> None:
    """Set or remove a key of the user's own file, and say what wins over it."""
    path = Path(os.path.realpath(config_file()))  # a link to it stays a link
    shown, shown_name = short(path), clean(f"{table}.{name}" if table else name)
    plain = re.fullmatch(r"[A-Za-z0-9_-]+", name)
    key = f"{table}.{name if plain else literal(name)}" if table else name
    line = f"{key} removed" if value is None else f"{key} = {literal(value)}"
    try:
        before = path.read_bytes().decode() if read_toml(path, shown) is not None else ""
        after = edited(before, name, value, table)
        private(path.parent)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        write(path.parent, path.name, after.encode())
        path.chmod(mode)
    except ValueError as error:
        raise UsageError(f"{shown}: {clean(str(error))}", f"edit it by hand: {line}") from None
    except OSError as error:
        raise UsageError(f"cannot write {shown}: {error.strerror}") from None
    terminal.data(line)
    terminal.note(f"in {shown}")
    with contextlib.suppress(UsageError):  # another file may be wrong
        made = load()
        origins = made.alias_files if table else made.origins(())
        origin = origins.get(name, "default")
        if value is None and origin != "default":
            terminal.warn(f"{origin} still sets {shown_name}")
        elif value not in ("", None) and origin != short(config_file()):
            terminal.warn(f"{origin} sets {shown_name}, too, and wins over it here")


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
        "# A command per extension that writes a file's text to standard output.",
        "# [loaders]",
        '# docx = "pandoc -t plain {path}"',
        "",
    ]
    return "\n".join(lines)


# -- one line of the file -------------------------------------------------------------------------


def literal(value: Plain) -> str:
    """A value as TOML writes it."""
    found: str = tomlkit.item(_listed(value)).as_string()
    return found


def edited(text: str, key: str, value: Plain | None, table: str = "") -> str:
    """The file's text with `key` set, or, with None, without it; `table`: the table that has it.
    All other lines, and their comments, stay as they are. Raises ValueError where that is not
    possible."""
    wanted = tomllib.loads(text)
    inner = wanted.setdefault(table, {}) if table else wanted
    if not isinstance(inner, dict):
        raise ValueError(f"{table} is no table")
    known = inner.pop(key, None) is not None
    tries = []
    if value is not None:
        inner[key] = _listed(value)
        if not (known or table):  # the key replaces the comment that `config init` wrote
            default = rf"(?m)^[ \t]*#[ \t]*{re.escape(key)}[ \t]*=.*$"
            tries.append(re.sub(default, lambda _: f"{key} = {literal(value)}", text, count=1))
    try:
        document: Any = tomlkit.parse(text)
        own = document.setdefault(table, tomlkit.table()) if table else document
        if value is None:
            del own[key]
        else:
            own[key] = _listed(value)
        tries.append(tomlkit.dumps(document))
    except TOMLKitError as error:
        raise ValueError(str(error)) from None
    for found in tries:
        with contextlib.suppress(tomllib.TOMLDecodeError):
            # Without its last key, a table may be gone.
            if ({table: {}} if table else {}) | tomllib.loads(found) == wanted:
                return found
    raise ValueError(f"the line of {key} cannot be changed safely")


def _listed(value: Plain) -> Any:
    return list(value) if isinstance(value, tuple) else value
