"""The commands of the command line.

A command's flags are in its module, which is imported only when the command is typed. Nothing here
imports torch, so that `--help`, `--version` and `policies` answer at once.
"""

# Without `from __future__ import annotations`: typer needs the annotations as objects.
import atexit
import contextlib
import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import minikv
from minikv.cli.screen.terminal import Terminal, hush, open_streams
from minikv.cli.settings.help import Group, Later
from minikv.engine import threads

_MORE = "Look up, measure, set up"

app = typer.Typer(
    name="minikv",
    cls=Group,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help='echo "Velgate exports mostly salt." | minikv ask "What does Velgate export?"\n\n'
    "Chat with Llama and Mistral models over long documents, in as little memory as you allow. "
    "Without --model a small bundled model answers, so this runs anywhere. "
    "`minikv COMMAND --help` shows what a command takes.",
)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        typer.echo(f"minikv {minikv.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    elif context.invoked_subcommand not in ("config", "doctor", "policies"):
        from minikv.cli.failures import guard
        from minikv.cli.settings import config

        terminal = Terminal()
        with guard(terminal, debug=False):
            made = config.load()
            for note in made.notes:
                terminal.warn(note)
            config.install(context, made)


_COMMANDS = (
    ("ask", "arguments:ask", None, "one question, one answer; made for pipes"),
    ("chat", "arguments:chat", None, "questions and answers over documents, on a terminal"),
    ("serve", "arguments:serve", None, "answers for other programs, as OpenAI's API does"),
    (
        "eval",
        "arguments:evaluate",
        _MORE,
        "answer quality under each policy, compared with the full cache",
    ),
    ("plan", "plan:plan", None, "will it fit in memory? and what to do if not"),
    ("doctor", "doctor:doctor", None, "what this machine offers, and a self-test"),
    ("policies", "policies_command:policies", _MORE, "the eviction methods, one line each"),
    ("bench", "arguments:bench", _MORE, "speed of steps and prompts, compared with other systems"),
    ("config", "settings.command:config", _MORE, "settings from files and MINIKV_* variables"),
    ("models", "models_command:models", None, "list, download and remove models"),
    ("chats", "saved.commands:chats", None, "list, show and remove saved chats"),
    ("cache", "saved.commands:cache", _MORE, "prompts that were read and need not be read again"),
)
_GONE = {
    "demo": "minikv chat {sample} --budget 256",
    "report": "minikv chat --resume NAME, then /export report.html",
    "verify": "hf cache verify NAME compares the files of a model in the hub's cache",
    "config path": "`minikv config show` says which file each value comes from",
    "config show --json": "`minikv config show` prints one line for each setting",
    "chats --json": "`minikv chats` prints one line for each chat, which a pipe gets uncut",
    "chats show --json": "minikv chat --resume NAME, then /export chat.json",
    "cache --json": "`minikv cache` prints one line for each prompt, which a pipe gets uncut",
    "models --json": "`minikv models` prints one line for each model, which a pipe gets uncut",
    "policies --json": "`minikv policies show NAME` prints the options and their defaults",
    "doctor --json": "`minikv doctor` prints a line for each check, and exits with 1 if one failed",
    "bench kernels": "`minikv bench decode` and `minikv bench prefill` measure whole steps",
    "bench --model": "--shape takes the sizes of a network, such as llama-3-8b",
    "bench -m": "--shape takes the sizes of a network, such as llama-3-8b",
    "eval --csv": "--json has every figure",
    "eval --plot": "--json has every figure",
    "eval --map": "the table of the task needle shows scores by depth and length",
    "eval --truncate": "records that are too long are skipped and counted",
}
"""Commands and flags of earlier versions, with what to use instead."""


def _later(place: str) -> Callable[[], typer.Typer]:
    """A function that imports the module of a command, and returns its app."""

    def imported() -> typer.Typer:
        module, _, name = place.partition(":")
        made: typer.Typer = getattr(importlib.import_module(f"minikv.cli.{module}"), name)
        return made

    return imported


for _name, _place, _panel, _help in _COMMANDS:
    app.command(_name, cls=Later, rich_help_panel=_panel, short_help=_help)(_later(_place))


def run() -> None:
    """The entry point: like `app()`, with one-line usage errors."""
    open_streams()
    threads.wait_briefly()
    try:
        code = app(args=_resume_alone(sys.argv[1:]), prog_name="minikv", standalone_mode=False)
    except typer.TyperException as error:
        typed = [name for name, *_ in _COMMANDS if sys.argv[1:2] == [name]]
        command = " ".join(["minikv", *typed])
        message = _told(error.format_message()).replace(": Value error, ", ": ")
        if message:  # a command without a subcommand has shown its help
            Terminal().fail(message, f"`{command} --help` shows the usage")
        code = error.exit_code
    except typer.Abort:
        code = 130
    # The other errors come from typer's own output, such as --help: ours is guarded.
    except (SystemExit, BrokenPipeError):  # rich, typer: the reader has seen enough (`| head`)
        hush()
        code = 0
    except OSError as error:
        Terminal().fail(f"cannot write the output: {error.strerror}")
        hush()
        code = 1
    if "minikv.chat.stopping" in sys.modules:
        _exit_if_threads_remain(int(code or 0))
    sys.exit(code or 0)


def _told(message: str) -> str:
    """A message of typer, or, for a flag or command of earlier versions, what to use instead."""
    unknown = re.match(
        r"(?:No such (?:option: |command ')|Invalid value for .*?: Value error, ')([\w-]+)", message
    )
    if unknown is None:
        return message
    from minikv.cli.settings.config import worded
    from minikv.models import BUNDLED
    from minikv.settings import GONE

    name, command = unknown[1], sys.argv[1]
    below = " ".join(sys.argv[1:3])
    words = GONE.get(name.removeprefix("--").replace("-", "_")) if name[:2] == "--" else None
    words = words or _GONE.get(f"{below} {name}")
    words = words or _GONE.get(name if name == command else f"{command} {name}")
    if not words:
        return message
    sample = shlex.quote(str(BUNDLED / "sample.txt"))
    return f"{name} is gone: {worded(words).replace('{sample}', sample)}"


def _exit_if_threads_remain(code: int) -> None:
    """End the process now if another thread still works on something that Ctrl-C abandoned."""
    from minikv.chat.stopping import left

    if left():
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _resume_alone(arguments: list[str]) -> list[str]:
    """Handle options with an optional value: --resume without a name is the newest chat, and
    bench's --json without a file is standard output."""
    alone, kinds = {"--resume": "--resume="}, tuple[str, ...]()
    if arguments[:1] == ["bench"]:
        alone["--json"], kinds = "--json=-", ("decode", "prefill", "all")
    following = [*arguments[1:], "-"][: len(arguments)]
    return [
        alone[word] if word in alone and (after[:1] == "-" or after in kinds) else word
        for word, after in zip(arguments, following, strict=True)
    ]
