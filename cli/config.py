"""Settings from files and the environment, each with where it came from.

A flag wins over /set, that over MINIKV_* variables, those over ./minikv.toml, that over the user's
config.toml, that over the default. What a file says under an unknown key is an error, not a habit
that silently has no effect.
"""

from __future__ import annotations

import difflib
import math
import os
import stat
import textwrap
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from minikv.chat.eviction_config import MOST_STRIDE, read_budget
from minikv.chat.reuse import REUSES
from minikv.cli.terminal import Terminal, clean
from minikv.errors import UsageError
from minikv.loader import WEIGHTS, Settings
from minikv.policies import DEFAULT_BUDGET, DEFAULT_PROMPT, find, step_names

if TYPE_CHECKING:
    import typer

LOCAL = "minikv.toml"
PREFIX = "MINIKV_"
HOME = f"{PREFIX}HOME"
_LIMIT = 1 << 20  # bytes
_CHAT = ("ask", "chat")
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

Plain = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag that a file or a variable may set. `name` is the flag's parameter and the key.

    The default's type is the value's. `commands`: those it is for; empty for every one that has
    such a flag. `low`, `high`: the smallest and largest number.
    """

    name: str
    default: Plain
    help: str
    commands: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf

    @property
    def flag(self) -> str:
        """As it is typed."""
        return f"--{self.name.replace('_', '-')}"


SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("model", "", "a directory, a hub id or an alias; empty: the bundled model"),
        Setting("revision", "", "commit, branch or tag of a hub model"),
        Setting("offline", False, "never use the network"),
        Setting("device", "auto", "auto, cpu, cuda or cuda:N"),
        Setting(
            "dtype",
            "auto",
            "number format of the weights and the cache",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
        Setting(
            "threads",
            0,
            "threads on a CPU; 0: as many as the process may use",
            _CHAT,
            low=0,
            high=4096,
        ),
        Setting(
            "weights",
            "auto",
            "how weights are kept: plain, or on a CPU int8 or int4, and "
            "with +head what makes logits in int8",
            choices=WEIGHTS,
        ),
        Setting("kernels", "auto", "who computes attention", choices=("auto", "triton", "torch")),
        Setting("policy", DEFAULT_PROMPT, "what evicts when a prompt was read", _CHAT),
        Setting(
            "budget",
            DEFAULT_BUDGET,
            "rows per head (512), a share (20%) or bytes (64MiB)",
            (*_CHAT, "plan"),
        ),
        Setting("decode", "auto", "what evicts while the answer is written", _CHAT),
        Setting(
            "stride",
            0,
            "read prompts in blocks of so many rows; 0: whole",
            _CHAT,
            low=0,
            high=MOST_STRIDE,
        ),
        Setting("kv", "auto", "what keys and values are kept in", _CHAT, ("auto", "int8")),
        Setting(
            "reuse",
            "auto",
            "what a later question finds: read again, or the same cache",
            _CHAT,
            REUSES,
        ),
        Setting("system", "", "system prompt, or @FILE", _CHAT),
        Setting("pin_system", False, "rows of the system prompt never leave", _CHAT),
        Setting(
            "encoding_errors",
            "strict",
            "what invalid bytes in a document do",
            _CHAT,
            ("strict", "replace"),
        ),
        Setting("max_tokens", 512, "longest answer", _CHAT, low=1),
        Setting("temperature", 0.0, "0 always takes the likeliest token", _CHAT, low=0, high=100),
        Setting("top_k", 0, "draw from the k likeliest; 0: off", _CHAT, low=0, high=1 << 31),
        Setting(
            "top_p",
            1.0,
            "draw from the likeliest that make up this mass; 1: off",
            _CHAT,
            low=0,
            high=1,
        ),
        Setting(
            "min_p",
            0.0,
            "draw from those at least this share as likely as the best",
            _CHAT,
            low=0,
            high=1,
        ),
        Setting("seed", 0, "every draw follows from it", _CHAT),
        Setting("stats", False, "print what the turn cost", ("ask",)),
        Setting("quiet", False, "answers and errors only", _CHAT),
    )
}
"""Every key, by name. The defaults are those of the flags."""

_TABLES = {
    "aliases": "short names for --model",
    "loaders": "a command per extension that turns a file into text",
}


@dataclass(frozen=True, slots=True)
class Value:
    """A setting and where it came from: a variable or a file."""

    value: Plain
    origin: str


@dataclass(frozen=True, slots=True)
class Config:
    """What files and variables say. `notes` are warnings to show."""

    values: Mapping[str, Value] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    loaders: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def model(self, name: str | None) -> str | None:
        """What --model means: an alias stands for its model, an empty name for the bundled one."""
        return self.aliases.get(name, name) if name else None

    def default_map(self, commands: Mapping[str, Collection[str]]) -> dict[str, dict[str, Plain]]:
        """The flags' defaults as typer's context takes them. `commands`: parameters by command."""
        return {
            command: {
                name: value.value
                for name, value in self.values.items()
                if value.value != ""  # the same as saying nothing
                and name in parameters
                and command in (SETTINGS[name].commands or (command,))
            }
            for command, parameters in commands.items()
        }

    def origins(self, given: Collection[str]) -> dict[str, str]:
        """Where each setting's value came from; `given`: parameters typed on the command line."""
        return {
            name: setting.flag
            if name in given
            else self.values[name].origin
            if name in self.values
            else "default"
            for name, setting in SETTINGS.items()
        }


def load(environ: Mapping[str, str] | None = None, here: Path | None = None) -> Config:
    """Read the files and the variables. Raises UsageError naming the file (or the variable), the
    key and the nearest known one."""
    environ = os.environ if environ is None else environ
    values: dict[str, Value] = {}
    tables: dict[str, dict[str, str]] = {name: {} for name in _TABLES}
    local = (here or Path()) / LOCAL
    own = user_file(environ)
    for path, shown in ((own, short(own, environ) if own else ""), (local, f"./{LOCAL}")):
        if path is None or (raw := _read(path, shown)) is None:
            continue
        for key, value in raw.items():
            if key in _TABLES:
                if key == "loaders" and path is local:
                    # What lies in a folder may come from anyone; this would run it.
                    raise UsageError(
                        f"{shown}: [loaders] names commands to run, and is only read from "
                        f"{short(own, environ) if own else 'the user configuration'}",
                        "move it there",
                    )
                tables[key] |= _table(value, f"{shown}: [{key}]")
            elif key in SETTINGS:
                values[key] = Value(_checked(SETTINGS[key], value, f"{shown}: {key}"), shown)
            else:
                known = [*SETTINGS, *_TABLES]
                raise UsageError(f"{shown}: unknown key {_quoted(key)}", _nearest(key, known))
    notes = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable == HOME or not text:
            continue
        key = variable.removeprefix(PREFIX).lower()
        if key in SETTINGS:
            values[key] = Value(_parsed(SETTINGS[key], text, variable), variable)
        else:
            near = difflib.get_close_matches(key, SETTINGS, n=1, cutoff=0.6)
            guess = f"; did you mean {PREFIX}{near[0].upper()}?" if near else ""
            notes.append(f"the variable {clean(variable)} sets nothing{guess}")
    return Config(values, tables["aliases"], tables["loaders"], tuple(notes))


def user_file(environ: Mapping[str, str]) -> Path | None:
    """$MINIKV_HOME/config.toml, else under $XDG_CONFIG_HOME or ~/.config; None without a home."""
    if environ.get(HOME):
        return Path(environ[HOME]) / "config.toml"
    base = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(base):  # the standard says to ignore a relative one
        return Path(base) / "minikv" / "config.toml"
    home = environ.get("HOME")
    return Path(home) / ".config" / "minikv" / "config.toml" if home else None


def short(path: Path, environ: Mapping[str, str]) -> str:
    """A path for people: below home with a tilde."""
    home = environ.get("HOME")
    if home and path.is_relative_to(home) and home != "/":
        return clean(f"~/{path.relative_to(home)}")
    return clean(str(path))


def given(context: typer.Context) -> set[str]:
    """The parameters that were typed on the command line."""
    typed = set()
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            typed.add(name)
    return typed


def install(context: typer.Context, config: Config) -> None:
    """Make `config` the defaults of every command below `context`, and its object."""
    below = getattr(context.command, "commands", {})
    names = {name: [p.name for p in command.params] for name, command in below.items()}
    context.default_map = config.default_map(names)
    context.obj = config


def _read(path: Path, shown: str) -> dict[str, object] | None:
    """A TOML file; None if there is none. Raises UsageError for anything else."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {shown}: {reason}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UsageError(f"{shown} is not a regular file")
    with open(handle, "rb") as file:
        data = file.read(_LIMIT + 1)
    if len(data) > _LIMIT:
        raise UsageError(f"{shown} is larger than {_LIMIT >> 20} MiB")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown} is not valid UTF-8: byte {error.start:,}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(
            f"{shown} is not valid TOML: {clean(str(error))}",
            'for example: budget = "20%", or temperature = 0.7',
        ) from None


def _table(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be a table", 'for example: [aliases], then name = "model"')
    for name, text in value.items():
        if not isinstance(text, str) or not text:
            raise UsageError(f"{where}: {_quoted(name)} must be a text")
    return value


def _checked(setting: Setting, value: object, where: str) -> Plain:
    """A value of a file, in the type of the setting."""
    kind = type(setting.default)
    if kind is str and type(value) is int and setting.name == "budget":
        value = str(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or not isinstance(value, Plain):
        raise UsageError(f"{where} must be {_KINDS[kind]}, got {_quoted(value)}")
    return _possible(setting, value, where)


def _parsed(setting: Setting, text: str, variable: str) -> Plain:
    """A variable's text, in the type of the setting."""
    kind, value = type(setting.default), text.strip()
    try:
        if kind is bool:
            if value.lower() not in (*_YES, *_NO):
                raise ValueError
            return value.lower() in _YES
        made: Plain = kind(value)
    except ValueError:
        raise UsageError(f"{variable} must be {_KINDS[kind]}, got {_quoted(text)}") from None
    return _possible(setting, made, variable)


def _possible(setting: Setting, value: Plain, where: str) -> Plain:
    """The value, if there is such a one. Refused here, where it is known who said it."""
    if setting.choices and value not in setting.choices:
        raise UsageError(
            f"{where} must be one of {', '.join(setting.choices)}, got {_quoted(value)}"
        )
    if not isinstance(value, str):
        if not setting.low <= value <= setting.high:
            most = f" and at most {setting.high:,.0f}" if setting.high < math.inf else ""
            raise UsageError(f"{where} must be at least {setting.low:g}{most}, got {value}")
        return value
    try:
        _known(setting.name, value)
    except UsageError as error:
        raise UsageError(f"{where}: {clean(str(error))}", clean(error.hint)) from None
    return value


def _known(name: str, value: str) -> None:
    """Raise the UsageError that a flag of this value would raise; an empty one says nothing."""
    if name == "budget" and value:
        read_budget(value)
    elif name == "policy" and value and value not in step_names():  # those go with a stride
        find(value)
    elif name == "decode" and value not in ("", "auto"):
        find(value, step=True)
    elif name == "device" and value:
        Settings(device=value)


_KINDS: Mapping[type, str] = {
    str: "a text in quotes",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _quoted(value: object) -> str:
    """A value from outside, short and harmless."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    return "`minikv config init` writes a file with all keys"


# -- minikv config --------------------------------------------------------------------------


def show(config: Config, terminal: Terminal, *, as_json: bool = False) -> None:
    """Print every setting with its value and where it came from."""
    if as_json:
        from minikv.cli.ask import to_json

        rows = {
            name: {"value": config.values[name].value, "origin": config.values[name].origin}
            if name in config.values
            else {"value": setting.default, "origin": "default"}
            for name, setting in SETTINGS.items()
        }
        terminal.data(
            to_json(
                {
                    "settings": rows,
                    "aliases": dict(config.aliases),
                    "loaders": dict(config.loaders),
                }
            )
        )
        return
    origins = config.origins(())
    shown = {
        n: config.values[n].value if n in config.values else s.default for n, s in SETTINGS.items()
    }
    lines = listed({name: text(value) for name, value in shown.items()}, origins)
    for title, table in (("aliases", config.aliases), ("loaders", config.loaders)):
        lines += [f"[{title}]", *(f"{name} = {value}" for name, value in table.items())] * bool(
            table
        )
    terminal.data("\n".join(lines))


def listed(values: Mapping[str, str], origins: Mapping[str, str]) -> list[str]:
    """Lines of name, value and origin."""
    names = max(len(name) for name in values)
    wide = min(max(len(value) for value in values.values()), 24)
    return [
        f"{name:<{names}}  {textwrap.shorten(value, 60, placeholder='...') or '-':<{wide}}  "
        f"{origins.get(name, '')}".rstrip()
        for name, value in values.items()
    ]


def text(value: Plain) -> str:
    """A value as a file would have it, texts without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def paths(terminal: Terminal) -> None:
    """Print which files are read, the strongest first."""
    own = user_file(os.environ)
    for path in (Path(LOCAL).absolute(), own):
        if path is not None:
            terminal.data(f"{path}{'' if path.exists() else '  (not there)'}")


def init(terminal: Terminal) -> None:
    """Write a file with every key, commented out, where the user's own is read from.

    Raises UsageError if there is one, or if it cannot be written.
    """
    path = user_file(os.environ)
    if path is None:
        raise UsageError("there is no home directory", f"set {HOME} to a directory")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError:
        raise UsageError(f"{clean(str(path))} exists already", "edit it, or remove it") from None
    except OSError as error:
        raise UsageError(f"cannot write {clean(str(path))}: {error.strerror}") from None
    terminal.data(str(path))


def template() -> str:
    """A config.toml in which every key stands with its default, commented out."""
    lines = [
        "# Settings of minikv. A flag wins over these, and so do MINIKV_* variables and a",
        f"# {LOCAL} in the directory where minikv is started.",
        "",
    ]
    for setting in SETTINGS.values():
        value = text(setting.default)
        value = f'"{value}"' if isinstance(setting.default, str) else value
        lines += [f"# {setting.help}", f"# {setting.name} = {value}"]
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
