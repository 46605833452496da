"""Makes the flags of a command from settings classes, and settings from typed values; and parses,
shows and completes the values of flags.

A command is a function with a parameter `settings: Settings` (and `generation: Generation`,
`interface: Interface`); typer sees a flag for every field instead. Only the options of policies
load torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from minikv.checks import quoted
from minikv.cli.eval.items import TASKS
from minikv.cli.failures import guard
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import cells, cut, padded
from minikv.cli.settings import config
from minikv.cli.settings.config import SETTINGS, Config
from minikv.cli.settings.help import Group
from minikv.errors import UsageError
from minikv.policies import find, part_names, prompt_names
from minikv.settings import CACHE, Setting, settings_of, spelled

MODEL = "model revision offline device dtype weights"
"""The settings that determine which model is loaded, where and in which format."""


def list_of(name: str, default: str) -> Setting:
    """A setting that takes several values."""
    return replace(SETTINGS[name], default=default, help="comma-separated list", later=None)


class Only:
    """In `Annotated[Settings, Only("model device")]`: the fields that the command has as flags, in
    this order. changed: settings that replace those of the same name in the class."""

    def __init__(self, names: str, *changed: Setting) -> None:
        self.names = names.split()
        self.changed = {one.name: one for one in changed}


@dataclass(frozen=True, slots=True)
class Call:
    """An argument of every command. given: the parameters that were typed. values: every setting,
    from a flag, a variable, a file or its default."""

    terminal: Terminal
    config: Config
    given: Collection[str] = ()
    values: dict[str, Any] = field(default_factory=dict)


def command(run: Callable[..., None]) -> Callable[..., None]:
    """Make `run` a function for typer: without its first parameter `call: Call`, and with a flag
    for each field of its dataclasses, which are classes of settings or have fields annotated with
    typer's options. Its errors become a line and an exit code. It is not called if a subcommand
    runs."""
    made = inspect.signature(run, eval_str=True)
    parameters = [inspect.Parameter("context", _KIND, annotation=typer.Context)]
    groups: dict[str, tuple[type, Mapping[str, Setting]]] = {}
    for one in list(made.parameters.values())[1:]:
        noted = get_origin(one.annotation) is Annotated
        kind, *notes = get_args(one.annotation) if noted else (one.annotation,)
        if not is_dataclass(kind):
            parameters.append(one.replace(kind=_KIND))
            continue
        assert isinstance(kind, type)
        every = Only(" ".join(each.name for each in fields(kind)))
        only = next((note for note in notes if isinstance(note, Only)), every)
        known = {**settings_of(kind), **only.changed}
        groups[one.name] = kind, known
        if not known:
            parameters += inspect.signature(kind, eval_str=True).parameters.values()
            continue
        for name in only.names:
            parameters.append(_OPTIONS if name == "options" else _parameter(known[name]))

    def called(context: typer.Context, **typed: Any) -> None:
        if context.invoked_subcommand is not None:
            return
        terminal = Terminal(quiet=typed.get("quiet", False), plain=typed.get("plain", False))
        debug = typed.get("debug", False)
        if not terminal.live:  # the hub library reads this when imported
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        if not debug:  # it logs every attempt; our own error reports the last one
            os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        with guard(terminal, debug=debug):
            _check_cwd_exists()
            known, given = context.obj or Config(), config.given(context)
            call = Call(terminal, known, given, {name: known.value(name) for name in SETTINGS})
            for name, (kind, settings) in groups.items():
                own = {each.name for each in fields(kind)} & set(typed)
                read = {key: typed.pop(key) for key in own}
                if settings:
                    read = _read(read, settings, call)
                    call.values.update(read)
                typed[name] = kind(**read)
            run(call, **typed)

    # Join the lines of each paragraph of its docstring: typer would keep some of the line ends.
    paragraphs = (inspect.getdoc(run) or "").split("\n\n")
    called.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    called.__name__ = run.__name__
    # The signature that typer reads. Parameters without a default must come first.
    parameters.sort(key=lambda one: one.default is not _EMPTY)
    vars(called)["__signature__"] = inspect.Signature(parameters)
    vars(called)["__wrapped__"] = run
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def flag(name: str, help: str, panel: str | None = None, **how: Any) -> Any:
    """A flag that is no setting. name: its spellings. panel: as in `Setting`. how: further
    arguments for typer."""
    return typer.Option(*name.split(), help=help, rich_help_panel=panel, **how)


def json_flag(what: str) -> Any:
    """A switch --json. what: the description of its output."""
    return flag("--json", f"print {what}")


def alone(run: Callable[..., None]) -> typer.Typer:
    """The app of a command without subcommands."""
    app = typer.Typer(rich_markup_mode="rich", add_completion=False)
    app.command()(command(run))
    return app


def group(help: str, *, no_args_is_help: bool = False) -> typer.Typer:
    """An app with subcommands."""
    return typer.Typer(
        cls=Group,
        rich_markup_mode="rich",
        add_completion=False,
        no_args_is_help=no_args_is_help,
        help=help,
    )


Yes = Annotated[bool, flag("--yes -y", "do not ask")]


def _check_cwd_exists() -> None:
    """Raise UsageError if the current directory was deleted: relative paths mean nothing there, and
    torch would abort the process."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the current directory cannot be read: {error.strerror}",
            "it was deleted or moved; change to another one with cd",
        ) from None


# -- values ----------------------------------------------------------------------------------------

_SCALES = {"": 1, "k": 10**3, "ki": 1 << 10, "m": 10**6, "mi": 1 << 20}
_MOST = 1 << 30  # tokens


def read_list(text: str, flag: str = "") -> tuple[str, ...]:
    """The values between commas, each once. Raises UsageError if there is none, but only with the
    name of a `flag`."""
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if flag and not parts:
        raise UsageError(f"{flag} names nothing", "give one or more, with commas between them")
    return parts


def read_pairs(pairs: list[str]) -> dict[str, object]:
    """["window=16"] -> {"window": "16"}. Raises UsageError on anything else."""
    options: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise UsageError(f"an option is name=value, got {pair!r}", "for example -o window=16")
        options[name] = value
    return options


def read_count(text: str, flag: str) -> int:
    """ "100k", "32Ki", "1.5M" or "8192" as the number of tokens of a flag. Raises UsageError."""
    found = re.fullmatch(r"([\d,_]{0,30}\d(?:\.\d{1,18})?)\s*([kKmM]i?)?", text.strip())
    if found:
        number = Fraction(found[1].replace(",", "").replace("_", ""))
        number *= _SCALES[(found[2] or "").lower()]
        if number.denominator == 1 and 1 <= number <= _MOST:
            return int(number)
    raise UsageError(
        f"cannot read the number of tokens {quoted(text)}",
        f"for example {flag} 8192, 100k or 32Ki",
    )


def listed(values: Mapping[str, str], origins: Mapping[str, str]) -> list[str]:
    """Lines of name, value and origin."""
    names = max(len(name) for name in values)
    wide = min(max(cells(value) for value in values.values()), 24)
    return [
        f"{name:<{names}}  {padded(cut(' '.join(value.split()), 60) or '-', wide)}  "
        f"{origins.get(name, '')}".rstrip()
        for name, value in values.items()
    ]


def text(value: object) -> str:
    """A value in the form of a file, but a text without quotes."""
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)


def policies(word: str = "") -> list[str]:
    """The prompt policies; after a "+", the parts that can be added to one."""
    begin, plus, _ = word.rpartition("+")
    if not plus:
        return prompt_names()
    return [f"{begin}+{part}" for part in part_names()]


def options_of(policy: str) -> list[str]:
    """The options of a policy, as `NAME=`; none for an unknown policy."""
    with contextlib.suppress(UsageError):
        return [f"{option.name}=" for option in find(policy).options]
    return []


def values_of(setting: Setting, word: str = "") -> Sequence[str]:
    """The values of a setting, or examples of them."""
    if type(setting.default) is bool:
        return ("on", "off")
    if setting.name == "policy":
        return policies(word)
    return setting.choices or setting.words or setting.examples


def completed(setting: Setting) -> Callable[[str], list[str]] | None:
    """The function that completes a flag's value in the shell, the last one after commas. None if
    there is nothing to complete, or if the shell can do that itself."""
    if setting.name == "model":
        return _aliases
    if not values_of(setting) or type(setting.default) is bool:
        return None

    def complete(incomplete: str) -> list[str]:
        before, comma, word = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in values_of(setting, word)]

    return complete


def policy_options(ctx: typer.Context, incomplete: str) -> list[str]:
    """After -o: the options of --policy and --decode."""
    names = (ctx.params.get("policy"), ctx.params.get("decode"))
    return list(dict.fromkeys(one for name in names if name for one in options_of(name)))


def tasks(incomplete: str) -> list[str]:
    """The names that `minikv eval --tasks` takes."""
    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{task}" for task in TASKS]


def saved(incomplete: str = "") -> list[str]:
    """The saved chats, the newest first."""
    from minikv.cli.saved.listing import listing  # late: --help needs no chats

    with contextlib.suppress(UsageError):
        return [entry.name for entry in listing()]
    return []


def _aliases(incomplete: str) -> list[str]:
    with contextlib.suppress(UsageError):
        return list(config.load().aliases)
    return []


# -- parameters ------------------------------------------------------------------------------------

_KIND, _EMPTY = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
_OPTIONS = inspect.Parameter(
    "options",
    _KIND,
    default=None,
    annotation=Annotated[
        list[str] | None,
        flag(
            "-o",
            "option of the policy; `minikv policies show NAME` lists them",
            CACHE,
            metavar="NAME=VALUE",
            autocompletion=policy_options,
        ),
    ],
)


@functools.cache  # most settings are flags of several commands
def _parameter(one: Setting) -> inspect.Parameter:
    """The flag of a setting. Its value is a switch, a list of texts, or a text for
    `Setting.read`."""
    kind: Any = {bool: bool, tuple: list[str]}.get(type(one.default), str)
    word = "|".join(one.choices) or _WORDS.get(type(one.default))
    option = flag(
        " ".join([one.flag, *one.letters]),
        one.help,
        None if one.common else one.panel,
        metavar=one.takes or word,
        autocompletion=completed(one),
    )
    shown = str(one.default) if kind is str else one.default
    return inspect.Parameter(one.name, _KIND, default=shown, annotation=Annotated[kind, option])


_WORDS: Mapping[type, str] = {int: "N", float: "N", str: "TEXT", tuple: "TEXT"}


def _read(typed: Mapping[str, Any], known: Mapping[str, Setting], call: Call) -> dict[str, Any]:
    """The values of the fields: texts are parsed, an alias becomes its model, @FILE the text of the
    file, and -o a mapping. Raises UsageError."""
    made: dict[str, Any] = {}
    for name, value in typed.items():
        if name == "options":
            made[name] = read_pairs(value or [])
        elif isinstance(value, str):
            made[name] = known[name].read(known[name].parse(value), known[name].flag)
        elif name == "stop":
            texts = value or ()
            made[name] = tuple(map(spelled, texts) if name in call.given else texts)
        else:
            made[name] = value
    if "model" in made:
        made["model"] = call.config.model(made["model"])
    if "revision" in made:
        made["revision"] = made["revision"] or None
    if made.get("system", "").startswith("@"):
        made["system"] = file_text(made["system"][1:], typed="system" in call.given)
    return made


def file_text(path: str, *, typed: bool) -> str:
    """The text of a file. A pipe is read only if the user typed its name: a configuration file,
    which may be anyone's, could otherwise make minikv wait forever."""
    from minikv.cli.documents.text import read_file

    if not path:
        raise UsageError('`system="@"` names no file')
    shown = quoted("@" + path)
    try:
        file = Path(path).expanduser()
        special = not typed and file.exists() and not (file.is_file() or file.is_dir())
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such user
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read the system prompt {shown}: {reason}") from None
    if special:
        raise UsageError(
            f"the system prompt {shown} is not a regular file",
            "a pipe is read only if it is typed: --system @FILE",
        )
    return read_file(str(file)).text.strip()
