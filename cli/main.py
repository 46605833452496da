"""The commands of the command line. The flags of each are in `cli/entry/`.

Only the module of the command that is typed is imported, and nothing here imports torch, so that
`--help`, `--version` and `policies` answer at once.
"""

# Without `from __future__ import annotations`: typer needs the annotations as objects.
import atexit
import contextlib
import os
import sys
from typing import Annotated

import typer

import minikv
from minikv.cli.help import Group, Later
from minikv.cli.terminal import Terminal, hush, open_streams
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
        from minikv.cli import config
        from minikv.cli.failures import guard

        terminal = Terminal()
        with guard(terminal, debug=False):
            made = config.load()
            for note in made.notes:
                terminal.warn(note)
            config.install(context, made)


@app.command("ask", cls=Later, short_help="one question, one answer; made for pipes")
def ask() -> typer.Typer:
    from minikv.cli.entry.ask import app

    return app


@app.command("chat", cls=Later, short_help="questions and answers over documents, on a terminal")
def chat() -> typer.Typer:
    from minikv.cli.entry.chat import app

    return app


@app.command("demo", cls=Later, short_help="a guided chat of two minutes, with the bundled model")
def demo() -> typer.Typer:
    from minikv.cli.entry.demo import app

    return app


@app.command(
    "eval",
    cls=Later,
    rich_help_panel=_MORE,
    short_help="answer quality under each policy, compared with the full cache",
)
def evaluate() -> typer.Typer:
    from minikv.cli.eval.arguments import app

    return app


@app.command("plan", cls=Later, short_help="will it fit in memory? and what to do if not")
def plan() -> typer.Typer:
    from minikv.cli.entry.plan import app

    return app


@app.command("doctor", cls=Later, short_help="what this machine offers, and a self-test")
def doctor() -> typer.Typer:
    from minikv.cli.entry.doctor import app

    return app


@app.command(
    "verify",
    cls=Later,
    rich_help_panel=_MORE,
    short_help="compare a model's files with their checksums",
)
def verify() -> typer.Typer:
    from minikv.cli.entry.verify import app

    return app


@app.command(
    "report",
    cls=Later,
    rich_help_panel=_MORE,
    short_help="make a page from an exported chat; loads no model",
)
def report() -> typer.Typer:
    from minikv.cli.entry.report import app

    return app


@app.command(
    "policies", cls=Later, rich_help_panel=_MORE, short_help="the eviction methods, one line each"
)
def policies() -> typer.Typer:
    from minikv.cli.entry.policies import app

    return app


@app.command(
    "bench",
    cls=Later,
    rich_help_panel=_MORE,
    short_help="measure speed, and compare with the hardware's limits",
)
def bench() -> typer.Typer:
    from minikv.cli.bench.command import app

    return app


@app.command(
    "config",
    cls=Later,
    rich_help_panel=_MORE,
    short_help="settings from files and MINIKV_* variables",
)
def config() -> typer.Typer:
    from minikv.cli.entry.config import app

    return app


@app.command("models", cls=Later, short_help="list, download and remove models")
def models() -> typer.Typer:
    from minikv.cli.entry.models import app

    return app


@app.command("chats", cls=Later, short_help="list, show and remove saved chats")
def chats() -> typer.Typer:
    from minikv.cli.entry.chats import app

    return app


def run() -> None:
    """The entry point: like `app()`, with one-line usage errors."""
    open_streams()
    threads.wait_briefly()
    try:
        code = app(args=_resume_alone(sys.argv[1:]), prog_name="minikv", standalone_mode=False)
    except typer.TyperException as error:
        command = " ".join(["minikv", *_command_words(sys.argv[1:])])
        message = error.format_message().replace(": Value error, ", ": ")  # from its validation
        if message:  # a command without the name of one below it has shown its help
            Terminal().fail(message, f"`{command} --help` shows the usage")
        code = error.exit_code
    except typer.Abort:
        code = 130
    except OSError as error:  # from typer's own output, as of --help: ours is guarded
        Terminal().fail(f"cannot write the output: {error.strerror}")
        hush()
        code = 1
    if "minikv.chat.stopping" in sys.modules:
        _leave_what_goes_on(int(code or 0))
    sys.exit(code or 0)


def _leave_what_goes_on(code: int) -> None:
    """End the process now if another thread still works on something that Ctrl-C abandoned."""
    from minikv.chat.stopping import left

    if left():
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _resume_alone(arguments: list[str]) -> list[str]:
    """Options with an optional value: --resume without a name is the newest chat, and --json of
    bench without a file is standard output."""
    alone = {"--resume": "--resume="}
    if arguments[:1] == ["bench"]:
        alone["--json"] = "--json=-"
    return [
        alone[word]
        if word in alone and (i + 1 == len(arguments) or arguments[i + 1].startswith("-"))
        else word
        for i, word in enumerate(arguments)
    ]


def _command_words(arguments: list[str]) -> list[str]:
    names = (one.name for one in app.registered_commands)
    return arguments[:1] if arguments[:1] and arguments[0] in names else []
