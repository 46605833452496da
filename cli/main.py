"""The command line: one function per command, which calls the command's own module.

`flags.command` adds the flags of the settings classes and turns errors into exit codes.
Nothing here imports torch: `--help`, `--version` and `policies` answer at once.
"""

# Without `from __future__ import annotations`: `flags.command` and typer need what the annotations
# stand for, and to evaluate each from its text takes 3 ms of every start.
import atexit
import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import minikv
from minikv.cli import completion, config
from minikv.cli.config import SETTINGS, Interface
from minikv.cli.failures import guard
from minikv.cli.flags import Call, Only, command
from minikv.cli.help import Bench, Group
from minikv.cli.terminal import Terminal, hush, open_streams
from minikv.engine import threads
from minikv.settings import CACHE, OUTPUT, Generation, Setting, Settings

_CHATS = "Saved chats"
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
policies_app = typer.Typer(cls=Group, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.add_typer(
    policies_app,
    name="policies",
    rich_help_panel=_MORE,
    short_help="the eviction methods, one line each",
    help="minikv policies show adakv\n\nThe eviction methods, one line each.",
)
app.add_typer(
    typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich", no_args_is_help=True),
    cls=Bench,
    name="bench",
    rich_help_panel=_MORE,
    short_help="how fast it is here, beside what the hardware allows",
    help="minikv bench decode --shape tinyllama --length 2048,8192\n\n"
    "Whole steps and prompts on random weights of a given shape, beside the full cache, "
    "transformers where it is installed, and what this machine's rates allow.",
)
config_app = typer.Typer(
    cls=Group, pretty_exceptions_enable=False, rich_markup_mode="rich", no_args_is_help=True
)
app.add_typer(
    config_app,
    name="config",
    rich_help_panel=_MORE,
    short_help="settings from files and MINIKV_* variables",
    help="minikv config init\n\nSettings from files and MINIKV_* variables.",
)

models_app = typer.Typer(cls=Group, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.add_typer(
    models_app,
    name="models",
    short_help="the models on this disk; fetch and remove",
    help="minikv models pull HuggingFaceTB/SmolLM2-135M-Instruct\n\n"
    "The bundled model and those in the Hugging Face cache, with their sizes.",
)
chats_app = typer.Typer(cls=Group, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.add_typer(
    chats_app,
    name="chats",
    short_help="the saved chats; show and remove",
    help="minikv chats show NAME\n\nThe saved chats, the newest first.",
)

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE", help="what to ask about: text, PDFs, directories, 'patterns'; - is stdin"
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]


def _json(what: str) -> object:
    """A switch --json; `what` says what it prints."""
    return typer.Option("--json", help=f"print {what}")


Json = Annotated[bool, _json("one JSON object")]


_MODEL = "model revision offline device dtype weights"


def _list_of(name: str, default: str) -> Setting:
    """A setting that takes several values."""
    return replace(SETTINGS[name], default=default, help="a list with commas")


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        typer.echo(f"minikv {minikv.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    elif context.invoked_subcommand not in ("config", "doctor", "policies", "chats"):
        terminal = Terminal()
        with guard(terminal, debug=False):
            made = config.load()
            for note in made.notes:
                terminal.warn(note)
            config.install(context, made)


@app.command(
    short_help="one question, one answer; made for pipes",
    help='minikv ask "Who runs the mill?" report.txt --budget 256 --stats\n\n'
    "Ask one question. Without FILEs, piped text is the document; with FILEs, stdin is read only "
    "for `-`. As the QUESTION, `-` reads the whole message from stdin, verbatim.",
)
@command
def ask(
    call: Call,
    question: Annotated[
        str,
        typer.Argument(metavar="QUESTION", help="the question; - reads the message from stdin"),
    ],
    settings: Settings,
    generation: Generation,
    interface: Interface,
    files: Files = None,
    go_on: Annotated[
        bool,
        typer.Option(
            "--continue",
            help="ask in the chat that was saved last; question and answer are saved there",
            rich_help_panel=_CHATS,
        ),
    ] = False,
    as_json: Annotated[
        bool, _json("one JSON object: the answer and the figures of the turn")
    ] = False,
) -> None:
    from minikv.cli.ask import ask as run_ask

    run_ask(
        question,
        files or [],
        settings,
        generation,
        call.terminal,
        errors=interface.encoding_errors,
        as_json=as_json,
        stats=interface.stats,
        loaders=call.config.loaders,
        go_on=go_on,
        given=call.given,
    )


@app.command(
    short_help="questions and answers over documents, on a terminal",
    help="minikv chat report.txt --budget 256\n\n"
    "Talk over documents. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. With "
    "FILEs, questions may be piped in, one per line; with the FILE `-`, the document is.\n\n"
    "Each answer is written from the tokens that its question needs. The next question looks at "
    "all that was read again; --reuse and --tier say how.",
)
@command
def chat(
    call: Call,
    settings: Settings,
    generation: Generation,
    interface: Annotated[Interface, Only("preset encoding_errors quiet plain debug")],
    files: Files = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="QUESTION", help="ask this first, then stay"),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="print a JSON object per turn, with its answer and figures; for piped questions",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[NAME]",
            help="go on with a saved chat; without NAME the last one",
            autocompletion=completion.saved,
        ),
    ] = None,
    reread: Annotated[
        bool,
        typer.Option(
            "--reread",
            help="with --resume: do not load the saved cache; the next question reads everything "
            "again",
            rich_help_panel=_CHATS,
        ),
    ] = False,
    no_save: Annotated[
        bool,
        typer.Option("--no-save", help="do not save this chat", rich_help_panel=_CHATS),
    ] = False,
    no_history: Annotated[
        bool,
        typer.Option(
            "--no-history",
            help="do not remember what is typed",
            rich_help_panel=_CHATS,
        ),
    ] = False,
) -> None:
    from minikv.cli.chat import chat as run_chat

    run_chat(
        files or [],
        settings,
        generation,
        call.terminal,
        errors=interface.encoding_errors,
        first=prompt,
        as_json=as_json,
        resume=resume,
        reread=reread,
        save=not no_save,
        given=call.given,
        config=call.config,
        history=not no_history,
        debug=interface.debug,
    )


@app.command(
    short_help="a guided chat of two minutes, with the bundled model",
    help="minikv demo\n\nFive questions about the bundled document: what is kept, what that saves, "
    "a follow-up that goes wrong, and what to do about it. Nothing to prepare. Enter goes on, q "
    "leaves.",
)
@command
def demo(call: Call, interface: Annotated[Interface, Only("plain debug")]) -> None:
    from minikv.cli.demo import demo as run_demo

    run_demo(call.terminal, debug=interface.debug)


@app.command(
    name="eval",
    rich_help_panel=_MORE,
    short_help="what each policy costs in quality, beside the full cache",
    help="minikv eval --tasks facts,needle --policy adakv,snapkv --budget 64,128,256\n\n"
    "Ask the same questions under every policy and budget, the full cache first. Tasks: needle, "
    "facts, agree (with the full cache's answer), ppl, loss (attention lost); and chats: followup "
    "(six questions), digits (32 and 64 digits), codes (the same in sixteen parts), several (three "
    "values), count, back (earlier answers), interview (four values in one "
    "answer), lists, passage (4 to 64 tokens to copy). FILEs are LongBench, LongBench v2 or RULER "
    "records, asked with their official prompts; agree, ppl and loss are then theirs.",
)
@command
def evaluate(
    call: Call,
    settings: Annotated[
        Settings,
        Only(
            f"{_MODEL} keep_packed threads policy budget decode stride kv tier_dtype options seed",
            _list_of("policy", "adakv,snapkv,streaming"),
            _list_of("budget", "128,256"),
            _list_of("decode", "auto"),
            replace(SETTINGS["seed"], help="seed of the documents and of random draws"),
        ),
    ],
    interface: Annotated[Interface, Only("quiet debug")],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="LongBench or RULER records")
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="a list with commas; facts by default, with FILEs none",
            autocompletion=completion.tasks,
        ),
    ] = "",
    length: Annotated[
        str, typer.Option(help="tokens of a document; needle takes a list with commas")
    ] = "2000",
    count: Annotated[
        int, typer.Option("--count", "-n", help="questions per task (needle: per place)")
    ] = 40,
    questions: Annotated[
        int,
        typer.Option(
            help="of these, about each document of facts, each asked as if it were the first"
        ),
    ] = 1,
    reuses: Annotated[
        str,
        typer.Option(
            "--reuse",
            help="what questions find: once (a cache evicted for the first one), refresh, blind "
            "(evicted before any question is seen), recall; a list with commas",
            rich_help_panel=CACHE,
        ),
    ] = "once",
    truncate: Annotated[
        str,
        typer.Option(
            help="records of FILEs that are too long: none (skip and count them) or middle (cut "
            "the middle out, as LongBench does)",
        ),
    ] = "none",
    as_json: Annotated[
        Path | None, typer.Option("--json", help="write the results and all answers here")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="write the results here", rich_help_panel=OUTPUT)
    ] = None,
    heat: Annotated[
        list[Path] | None,
        typer.Option("--map", help="a map of the needles, .png or .svg", rich_help_panel=OUTPUT),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="draw quality over budget here, .svg", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    from minikv.cli.evaluation.command import Asked
    from minikv.cli.evaluation.command import evaluate as run_evaluation

    asked = Asked(
        tasks=tasks or ("" if files else "facts"),
        files=files or [],
        lengths=length,
        count=count,
        questions=questions,
        reuse=reuses,
        truncate=truncate,
        outputs=[path for path in (as_json, csv, *(heat or [])) if path],
        plot=plot,
    )
    run_evaluation(asked, settings, call.terminal)


@app.command(
    short_help="will it fit in memory? and what to do if not",
    help="minikv plan -m meta-llama/Llama-3.1-8B-Instruct --memory 24GiB\n\n"
    "What a model and its cache would need for a document of this length, under several policies, "
    "beside the memory that is free, and flags with which it fits. Fetches config.json only.",
)
@command
def plan(
    call: Call,
    settings: Annotated[
        Settings,
        Only(f"{_MODEL} policy budget decode stride kv tier options", _list_of("policy", "")),
    ],
    generation: Annotated[Generation, Only("max_tokens")],
    interface: Annotated[Interface, Only("debug")],
    tokens: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="length of the document: 8192, 100k, 32Ki; without it 4k, 16k and all that the "
            "model can read",
        ),
    ] = "",
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="memory of another machine, such as 24GiB")
    ] = "",
    as_json: Annotated[
        bool, _json("the forecast as one JSON object: bytes for each policy, and what is suggested")
    ] = False,
) -> None:
    from minikv.cli.plan import plan as run_plan

    run_plan(
        settings,
        tokens,
        call.terminal,
        memory=memory,
        max_tokens=generation.max_tokens,
        as_json=as_json,
    )


@app.command(
    short_help="what this machine offers, and a self-test",
    help="minikv doctor\n\n"
    "Versions, processor, memory, hub and terminal; then every policy on a tiny random model. "
    "Exit code 1 if a check failed.",
)
@command
def doctor(
    call: Call,
    settings: Annotated[Settings, Only("offline")],
    interface: Annotated[Interface, Only("debug")],
    as_json: Annotated[
        bool, _json("the checks as one JSON object: ok, and of each its state, detail and hint")
    ] = False,
) -> None:
    from minikv.cli.doctor import doctor as run_doctor

    run_doctor(call.terminal, offline=settings.offline, as_json=as_json)


@app.command(
    rich_help_panel=_MORE,
    short_help="are a model's files what they should be, to the last bit?",
    help="minikv verify -m meta-llama/Llama-3.1-8B-Instruct\n\n"
    "Compare every file of a model that minikv reads with its checksum: weights, index, "
    "configuration, tokenizer, chat template. A model from the hub is compared with the hub's own "
    "checksums, without network. A directory is recorded at the first run, and compared from then "
    "on. Loading a model does not do this, because it would take longer than the loading. Exit "
    "code 1 if a file is not what it should be.",
)
@command
def verify(
    call: Call,
    settings: Annotated[Settings, Only("model revision")],
    interface: Annotated[Interface, Only("debug")],
    record: Annotated[
        bool,
        typer.Option("--record", help="record a directory anew: its files are right as they are"),
    ] = False,
    as_json: Annotated[
        bool, _json("the files as one JSON object: ok, and of each its state and checksums")
    ] = False,
) -> None:
    from minikv.cli.verify_command import verify as run_verify

    run_verify(settings.model, settings.revision, call.terminal, record=record, as_json=as_json)


@config_app.command(help="Which files are read, the strongest first.")
@command
def path(call: Call) -> None:
    from minikv.cli import config_command

    config_command.paths(call.terminal)


@config_app.command(help="Write a commented file with every key.")
@command
def init(call: Call) -> None:
    from minikv.cli import config_command

    config_command.init(call.terminal)


@config_app.command("show", help="Every setting, its value and where it came from.")
@command
def show_config(
    call: Call,
    as_json: Json = False,
) -> None:
    from minikv.cli import config_command

    made = config.load()
    for note in made.notes:
        call.terminal.warn(note)
    config_command.show(made, call.terminal, as_json=as_json)


@config_app.command(
    "set",
    help="minikv config set budget 20%\n\nSet a key in your own file; every other line stays.",
)
@command
def set_config(
    call: Call,
    key: Annotated[
        str,
        typer.Argument(help="a key from `minikv config show`", autocompletion=completion.keys),
    ],
    value: Annotated[
        list[str], typer.Argument(help="its value", autocompletion=completion.key_values)
    ],
) -> None:
    from minikv.cli import config_command

    config_command.change(key, value, call.terminal)


@models_app.callback(invoke_without_command=True)
@command
def models(call: Call, as_json: Json = False) -> None:
    if call.subcommand is not None:
        return
    from minikv.cli import models_command

    models_command.models(call.terminal, as_json=as_json)


@models_app.command(help="Download what minikv reads of a model, and print its folder.")
@command
def pull(
    call: Call,
    name: Annotated[str, typer.Argument(help="a hub id, as owner/name, or an alias")],
    settings: Annotated[Settings, Only("revision")],
) -> None:
    from minikv.cli import models_command

    models_command.pull(call.config.model(name) or name, settings.revision, call.terminal)


@models_app.command(
    "rm",
    help="Remove models from the Hugging Face cache, and their packed weights. Of a model in a "
    "folder of your own, the packed weights only.",
)
@command
def remove_models(
    call: Call,
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    yes: Yes = False,
) -> None:
    from minikv.cli import models_command

    models_command.remove(names, call.terminal, yes=yes)


@chats_app.callback(invoke_without_command=True)
@command
def chats(call: Call, as_json: Json = False) -> None:
    if call.subcommand is not None:
        return
    from minikv.cli import chats_command

    chats_command.chats(call.terminal, as_json=as_json)


@chats_app.command("show", help="What was said in a saved chat.")
@command
def show_chat(
    call: Call,
    name: Annotated[
        str, typer.Argument(help="a name from `minikv chats`", autocompletion=completion.saved)
    ],
    as_json: Json = False,
) -> None:
    from minikv.cli import chats_command

    chats_command.show(name, call.terminal, as_json=as_json)


@chats_app.command("rm", help="Remove saved chats, with the text that is stored in them.")
@command
def remove_chats(
    call: Call,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", autocompletion=completion.saved)],
    yes: Yes = False,
) -> None:
    from minikv.cli import chats_command

    chats_command.remove(names, call.terminal, yes=yes)


@app.command(
    rich_help_panel=_MORE,
    short_help="a page from an exported chat, without a model",
    help="minikv report chat.json -o report.html\n\n"
    "Make a report from what /export chat.json wrote in a chat. No model is needed.",
)
@command
def report(
    call: Call,
    source: Annotated[str, typer.Argument(metavar="CHAT.json")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="where to: .html, .md or .json")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a file that exists")] = False,
) -> None:
    from minikv.cli.export.command import report as write

    write(source, out, force, call.terminal)


@policies_app.callback(invoke_without_command=True)
@command
def policies(
    call: Call,
    as_json: Json = False,
) -> None:
    if call.subcommand is not None:
        return
    from minikv.cli import render

    call.terminal.data(render.policies(as_json=as_json))


@policies_app.command(
    help="minikv policies show adakv\n\nOne method: options, defaults, limits, and how it differs "
    "from its paper and release."
)
@command
def show(
    call: Call,
    name: Annotated[
        str,
        typer.Argument(help="a name from `minikv policies`", autocompletion=completion.rows),
    ],
    as_json: Json = False,
) -> None:
    from minikv.cli import render

    call.terminal.data(render.policy(name, as_json=as_json))


def run() -> None:
    """The entry point: like `app()`, with one-line usage errors."""
    open_streams()
    threads.wait_briefly()
    try:
        code = app(args=_resume_alone(sys.argv[1:]), prog_name="minikv", standalone_mode=False)
    except typer.TyperException as error:
        command = " ".join(["minikv", *_command_words(sys.argv[1:])])
        message = error.format_message().replace(": Value error, ", ": ")  # from its validation
        Terminal().fail(message, f"`{command} --help` shows the usage")
        code = error.exit_code
    except typer.Abort:
        code = 130
    except OSError as error:  # from typer's own output, as of --help: ours is guarded
        Terminal().fail(f"cannot write the output: {error.strerror}")
        hush()
        code = 1
    if "minikv.chat.stoppable" in sys.modules:
        _leave_what_goes_on(int(code or 0))
    sys.exit(code or 0)


def _leave_what_goes_on(code: int) -> None:
    """End the process now, if work that Ctrl-C left is still going on in another thread."""
    from minikv.chat.stoppable import left

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


_COMMANDS = (
    *("ask", "chat", "policies", "eval", "report", "plan", "doctor", "config", "bench"),
    *("models", "chats", "demo", "verify"),
)


def _command_words(arguments: list[str]) -> list[str]:
    return arguments[:1] if arguments[:1] and arguments[0] in _COMMANDS else []
