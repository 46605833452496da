"""Reads settings from files and the environment, each with its origin.

A flag wins over MINIKV_* variables, these over ./minikv.toml, that over the user's config.toml, and
that over the default. An unknown key in a file is an error, because a setting that silently has no
effect is hard to notice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.checks import guess, quoted
from minikv.cli import paths
from minikv.cli.screen.text import clean
from minikv.errors import UsageError
from minikv.settings import (
    ADVANCED,
    OUTPUT,
    Generation,
    Plain,
    Setting,
    Settings,
    refuse_gone,
    setting,
    settings_of,
)

if TYPE_CHECKING:
    import typer

BUNDLED = "bundled"
"""The name of the model that comes with minikv."""
LOCAL = "minikv.toml"
ALIASES = "aliases"
"""The table of short names for --model."""
PREFIX = "MINIKV_"
_LIMIT = 64 << 10  # bytes of a file
_DOTS = 2000
"""The most dots in a file: for a key with n parts, tomllib stores n keys of up to n parts."""
_OTHERS = (paths.HOME, "MINIKV_NATIVE", "MINIKV_API_KEY")
"""Variables that are not settings; see `kernels.native.build` and `minikv serve`."""
SAVED = "Saved chats"
"""A panel of --help-all."""


@dataclass(frozen=True, slots=True)
class Interface:
    """Settings for what a command reads and shows, not for what it computes.

    stats: print what the answer cost to stderr
    thoughts: of a reasoning model's thoughts, show all (show), the end while they are written and
        then one line (fold), or nothing (hide)
    quiet: answers and errors only
    plain: no Markdown, colours or progress lines
    debug: show tracebacks
    """

    stats: bool = setting(False, OUTPUT, commands=("ask",), common=True)
    thoughts: str = setting(
        "fold",
        OUTPUT,
        commands=("ask", "chat"),
        choices=("show", "fold", "hide"),
        takes="HOW",
        live=True,
    )
    quiet: bool = setting(
        False, OUTPUT, letters=("-q",), commands=("ask", "chat"), common=True, live=True
    )
    plain: bool = setting(False, OUTPUT, in_file=False)
    debug: bool = setting(False, ADVANCED, in_file=False)


SETTINGS: Mapping[str, Setting] = {
    name: one for name, one in settings_of(Settings, Generation, Interface).items() if one.in_file
}
"""The settings that a file or a variable may set, by key. The defaults are those of the flags."""


@dataclass(frozen=True, slots=True)
class Config:
    """The settings from files and variables. sources: the file or variable of each value, and of
    each alias as aliases.NAME. notes: warnings to show."""

    values: Mapping[str, Plain] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def value(self, name: str) -> Plain:
        """The value of a setting from a variable, a file or the flag's default."""
        return self.values.get(name, SETTINGS[name].default)

    def model(self, name: str | None) -> str | None:
        """The model for a value of --model: an alias means its model; an empty name, and the name
        that minikv itself shows, mean the bundled one."""
        name = self.aliases.get(name, name) if name else None
        return None if name == BUNDLED and not Path(name).is_dir() else name

    def origins(self, given: Collection[str]) -> dict[str, str]:
        """The origin of each setting's value. given: parameters typed on the command line."""
        return {
            name: setting.flag if name in given else self.sources.get(name, "default")
            for name, setting in SETTINGS.items()
        }


def load(environ: Mapping[str, str] | None = None, here: Path | None = None) -> Config:
    """Read the files and the variables. Raises UsageError, which names the file or variable, the
    key and the nearest known one."""
    environ = os.environ if environ is None else environ
    values: dict[str, Plain] = {}
    aliases: dict[str, str] = {}
    sources: dict[str, str] = {}
    local = (here or Path()) / LOCAL
    own = user_file()
    for path, shown in ((own, short(own) if own else ""), (local, f"./{LOCAL}")):
        if path is None or (raw := read_toml(path, shown)) is None:
            continue
        for key, value in raw.items():
            if key == ALIASES:
                found = _aliases(value, f"{shown}: [{key}]")
                aliases |= found
                sources |= {f"{ALIASES}.{name}": shown for name in found}
            elif key in SETTINGS:
                values[key] = SETTINGS[key].read_whole(value, f"{shown}: {key}")
                sources[key] = shown
            else:
                refuse_gone(key, f"{shown}: {key}", f"minikv config unset {key} removes it")
                known = [*SETTINGS, ALIASES]
                raise UsageError(f"{shown}: unknown key {quoted(key)}", nearest(key, known))
    notes = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in _OTHERS or not text:
            continue
        key = variable.removeprefix(PREFIX).lower()
        refuse_gone(key, variable)
        if one := SETTINGS.get(key):
            values[key] = one.read_whole(one.parse(text), variable)
            sources[key] = variable
        else:
            near = guess(key, SETTINGS)
            notes.append(f"the variable {clean(variable)} sets nothing; {near}".rstrip("; "))
    return Config(values, aliases, sources, tuple(notes))


def user_file() -> Path | None:
    """The path of the user's own file, which may be missing; None without a home directory."""
    try:
        return paths.config_file()
    except UsageError:
        return None


def short(path: Path) -> str:
    """A path for people, with a tilde for the home directory."""
    home = os.environ.get("HOME")
    if home and path.is_relative_to(home) and home != "/":
        return clean(f"~/{path.relative_to(home)}")
    return clean(str(path))


def given(context: typer.Context) -> set[str]:
    """The parameters that were typed on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def install(context: typer.Context, config: Config) -> None:
    """Take the defaults of the command that follows from `config`, and pass `config` on as the
    context's object."""
    command = context.invoked_subcommand or ""
    below = getattr(context.command, "commands", {}).get(command)
    defaults = {
        name: value
        for name, value in config.values.items()
        if value != ""  # the same as no value
        and name in [one.name for one in (below.params if below else ())]
        and command in (SETTINGS[name].commands or (command,))
    }
    context.default_map, context.obj = {command: defaults}, config


def read_toml(path: Path, shown: str) -> dict[str, object] | None:
    """Read a TOML file; None if it does not exist. Raises UsageError for anything else."""
    try:
        with paths.opened(path, links=True) as file:
            data = file.read(_LIMIT + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {shown}: {reason}") from None
    if len(data) > _LIMIT:
        raise UsageError(f"{shown} is larger than {_LIMIT >> 10} KiB")
    import tomllib  # most people have no such file, and the import is slow

    try:
        text = data.decode("utf-8-sig")
        if text.count(".") > _DOTS:
            raise UsageError(
                f"{shown} has more than {_DOTS:,} dots",
                'a long text can be in its own file: system = "@FILE"',
            )
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown} is not valid UTF-8: byte {error.start:,}") from None
    except (ValueError, RecursionError) as error:  # e.g. for a number of 5,000 digits
        raise UsageError(
            f"{shown} is not valid TOML: {clean(str(error))}",
            'for example: budget = "20%", or temperature = 0.7',
        ) from None


def _aliases(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be a table", 'for example: [aliases], then name = "model"')
    for name, text in value.items():
        if not isinstance(text, str) or not text:
            raise UsageError(f"{where}: {quoted(name)} must be a text")
    return value


def nearest(key: str, known: Iterable[str]) -> str:
    """A hint about the key that was probably meant."""
    return f"{guess(key, known)}`minikv config init` writes a file with all keys"


# -- messages --------------------------------------------------------------------------------------

_CODE = re.compile(r"`([^`\n]+)`")
_CALL = re.compile(r"chat\.(\w+)\(([^()]*)\)")
_SET = re.compile(r"chat\.(\w+) = (.+)")


def worded(text: str, *, chat: bool = False) -> str:
    """A message with its remedies in Python as they are typed: `dtype="float32"` becomes --dtype
    float32, `chat.undo(2)` /undo 2, `chat.reuse = "once"` /set reuse once. chat: what a chat can
    change is changed there, so `policy` becomes /policy and `top_k` /set top_k. Other backquotes
    stay as they are."""
    return _CODE.sub(lambda found: _worded(found[1], chat) or found[0], text)


def _worded(code: str, chat: bool) -> str:
    if call := _CALL.fullmatch(code):
        return f"/{call[1]} {_plain(call[2])}".rstrip()
    if change := _SET.fullmatch(code):
        return f"/set {change[1]} {_plain(change[2])}"
    settings = [_setting(argument, chat) for argument in code.split(", ")]
    return " ".join(settings) if all(settings) else ""


def _setting(argument: str, chat: bool) -> str:
    name, _, value = argument.partition("=")
    if name not in SETTINGS:
        return ""
    shown = SETTINGS[name].flag
    if chat and SETTINGS[name].live:
        shown = f"/{name}" if name in ("policy", "system") else f"/set {name}"
    return f"{shown} {'' if value == 'True' else _plain(value)}".rstrip()


def _plain(value: str) -> str:
    return value.strip("\"'")
