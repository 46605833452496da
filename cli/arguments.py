"""The flags and arguments of every command; the docstring of each is its help.

`eval` and `bench` have theirs beside them. `main` imports this only when a command is typed, and a
command imports what it runs only when it runs.
"""

# Without `from __future__ import annotations`: typer needs the annotations as objects.
from collections.abc import Callable
from typing import Annotated, Any

import typer

from minikv.cli import completion
from minikv.cli.config import SAVED, Interface
from minikv.cli.flags import MODEL, Call, Only, command, list_of
from minikv.cli.help import Group
from minikv.settings import OUTPUT, Generation, Settings


def flag(name: str, help: str, **how: Any) -> Any:
    """A flag that is no setting. how: further arguments of typer's."""
    letters = how.pop("letters", ())
    return typer.Option(name, *letters, help=help, **how)


def json(what: str) -> Any:
    """A switch --json; `what` says what it prints."""
    return flag("--json", f"print {what}")


def alone(run: Callable[..., None]) -> typer.Typer:
    """The app of a command without others below it."""
    app = typer.Typer(rich_markup_mode="rich", add_completion=False)
    app.command()(command(run))
    return app


def group(help: str, *, no_args_is_help: bool = False) -> typer.Typer:
    """An app with commands below it."""
    return typer.Typer(
        cls=Group,
        rich_markup_mode="rich",
        add_completion=False,
        no_args_is_help=no_args_is_help,
        help=help,
    )


Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE", help="what to ask about: text, PDFs, directories, 'patterns'; - is stdin"
    ),
]
Json = Annotated[bool, json("one JSON object")]
Saved = Annotated[
    str, typer.Argument(help="a name from `minikv chats`", autocompletion=completion.saved)
]
Yes = Annotated[bool, flag("--yes", "do not ask", letters=["-y"])]


# -- questions ------------------------------------------------------------------------------------


@alone
def ask(
    call: Call,
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="the question; - reads the message from stdin")
    ],
    settings: Settings,
    generation: Generation,
    interface: Interface,
    files: Files = None,
    go_on: Annotated[
        bool,
        flag(
            "--continue",
            "ask in the chat that was saved last, and save question and answer there",
            rich_help_panel=SAVED,
        ),
    ] = False,
    chat: Annotated[
        str | None,
        flag(
            "--chat",
            "ask in this saved chat, and save question and answer there",
            metavar="NAME",
            autocompletion=completion.saved,
            rich_help_panel=SAVED,
        ),
    ] = None,
    as_json: Annotated[
        bool, json("one JSON object: the answer and the figures of the turn")
    ] = False,
) -> None:
    """minikv ask "Who runs the mill?" report.txt --budget 256 --stats

    Ask one question. Without FILEs, piped text is the document; with FILEs, stdin is read only for
    `-`. As the QUESTION, `-` reads the whole message from stdin, as it is but for the line end that
    `echo` adds.
    """
    from minikv.cli.ask import ask as run

    run(
        question,
        files or [],
        settings,
        generation,
        interface,
        call,
        as_json=as_json,
        chat=chat,
        go_on=go_on,
    )


@alone
def chat(
    call: Call,
    settings: Settings,
    generation: Generation,
    interface: Annotated[Interface, Only("encoding_errors chats_limit thoughts quiet plain debug")],
    files: Files = None,
    prompt: Annotated[
        str | None, flag("--prompt", "ask this first", letters=["-p"], metavar="QUESTION")
    ] = None,
    as_json: Annotated[
        bool,
        flag(
            "--json",
            "print a JSON object per turn, with its answer and figures; for piped questions",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    resume: Annotated[
        str | None,
        flag(
            "--resume",
            "continue a saved chat; without NAME, the last one",
            metavar="[NAME]",
            autocompletion=completion.saved,
        ),
    ] = None,
    reread: Annotated[
        bool,
        flag(
            "--reread",
            "with --resume: do not load the saved cache; the next question reads everything again",
            rich_help_panel=SAVED,
        ),
    ] = False,
    no_save: Annotated[
        bool, flag("--no-save", "do not save this chat", rich_help_panel=SAVED)
    ] = False,
    no_history: Annotated[
        bool,
        flag("--no-history", "do not store what is typed for later chats", rich_help_panel=SAVED),
    ] = False,
) -> None:
    """minikv chat report.txt --budget 256

    Chat about documents. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. With a
    FILE, questions can be piped in, one per line. With `-` as FILE, the document is piped in.

    While an answer is written, the cache holds only the tokens that its question needs. For the
    next question they are chosen again from all that was read: see --reuse and --tier.
    """
    from minikv.cli.chat import chat as run

    run(
        files or [],
        settings,
        generation,
        interface,
        call,
        first=prompt,
        as_json=as_json,
        resume=resume,
        reread=reread,
        save=not no_save,
        history=not no_history,
    )


@alone
def demo(call: Call, interface: Annotated[Interface, Only("plain debug")]) -> None:
    """minikv demo

    Five questions about the bundled document: which tokens are kept, what that saves, a follow-up
    that goes wrong, and what to do about it. It needs no files. Enter continues, q leaves.
    """
    from minikv.cli.demo import demo as run

    run(call.terminal, debug=interface.debug)


# -- this machine ---------------------------------------------------------------------------------


@alone
def plan(
    call: Call,
    settings: Annotated[
        Settings,
        Only(
            f"{MODEL} keep_packed policy budget decode stride kv tier options",
            list_of("policy", ""),
        ),
    ],
    generation: Annotated[Generation, Only("max_tokens")],
    interface: Annotated[Interface, Only("debug")],
    tokens: Annotated[
        str,
        flag(
            "--tokens",
            "length of the document: 8192, 100k, 32Ki; without it 4k, 16k and all that the model "
            "can read",
            metavar="N",
        ),
    ] = "",
    memory: Annotated[
        str, flag("--memory", "plan for another machine with this much memory", metavar="SIZE")
    ] = "",
    as_json: Annotated[
        bool, json("the forecast as one JSON object: bytes for each policy, and suggested flags")
    ] = False,
) -> None:
    """minikv plan -m meta-llama/Llama-3.1-8B-Instruct --memory 24GiB

    How much memory a model and its cache would need for a document of this length under several
    policies, how much is free, and flags with which it fits. Policies come from flags, not from
    minikv.toml or a variable. Downloads config.json only.
    """
    from minikv.cli.plan import plan as run

    run(
        settings,
        tokens,
        call.terminal,
        memory=memory,
        max_tokens=generation.max_tokens,
        as_json=as_json,
    )


@alone
def doctor(
    call: Call,
    settings: Annotated[Settings, Only("offline")],
    interface: Annotated[Interface, Only("debug")],
    as_json: Annotated[
        bool, json("the checks as one JSON object: ok, and the state, detail and hint of each")
    ] = False,
) -> None:
    """minikv doctor

    Check versions, processor, memory, hub and terminal, then test every policy on a tiny random
    model. Exit code 1 if a check failed.
    """
    from minikv.cli.doctor import doctor as run

    run(call.terminal, offline=settings.offline, as_json=as_json)


models = group(
    "minikv models pull HuggingFaceTB/SmolLM2-135M-Instruct\n\n"
    "The bundled model and those in the Hugging Face cache, with their sizes. Then the aliases, "
    "which `minikv config set aliases.NAME MODEL` sets."
)


@models.callback(invoke_without_command=True)
@command
def list_models(call: Call, as_json: Json = False) -> None:
    from minikv.cli import models_command

    models_command.models(call.terminal, call.config.aliases, as_json=as_json)


@models.command()
@command
def pull(
    call: Call,
    name: Annotated[str, typer.Argument(help="a hub id, as owner/name, or an alias")],
    settings: Annotated[Settings, Only("revision")],
) -> None:
    """Download what minikv reads of a model, and print its folder."""
    from minikv.cli import models_command

    models_command.pull(call.config.model(name) or name, settings.revision, call.terminal)


@models.command("rm")
@command
def remove_models(
    call: Call, names: Annotated[list[str], typer.Argument(metavar="NAME...")], yes: Yes = False
) -> None:
    """Remove models from the Hugging Face cache, and their packed weights. Of a model in a folder
    of your own, the packed weights only."""
    from minikv.cli import models_command

    models_command.remove(names, call.terminal, yes=yes)


# -- prompts that were read -----------------------------------------------------------------------

cache = group(
    "minikv cache\n\nThe prompts that were read and are kept for later, the last used first."
)


@cache.callback(invoke_without_command=True)
@command
def list_cache(call: Call, as_json: Json = False) -> None:
    from minikv.cli import cache_command

    cache_command.cache(call.terminal, as_json=as_json)


@cache.command("rm")
@command
def remove_cache(
    call: Call,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None,
    yes: Yes = False,
) -> None:
    """Remove these prompts, or all."""
    from minikv.cli import cache_command

    cache_command.remove(names or [], call.terminal, yes=yes)


# -- saved chats ----------------------------------------------------------------------------------

chats = group("minikv chats show NAME\n\nThe saved chats, the newest first.")


@chats.callback(invoke_without_command=True)
@command
def list_chats(
    call: Call, interface: Annotated[Interface, Only("chats_limit")], as_json: Json = False
) -> None:
    from minikv.cli.saved import chats as saved

    saved.chats(call.terminal, interface.chats_limit, as_json=as_json)


@chats.command("show")
@command
def show_chat(call: Call, name: Saved, as_json: Json = False) -> None:
    """What was said in a saved chat."""
    from minikv.cli.saved import chats as saved

    saved.show(name, call.terminal, as_json=as_json)


@chats.command("rm")
@command
def remove_chats(
    call: Call,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", autocompletion=completion.saved)
    ] = None,
    older: Annotated[
        str | None,
        flag(
            "--older",
            "all that were saved longer ago: 90min, 12h, 30d, 8w, 6mo or 1y",
            metavar="AGE",
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Remove saved chats, with the text that is stored in them: those that are named, or all that
    are --older than so long."""
    from minikv.cli.saved import chats as saved

    saved.remove(names or [], call.terminal, older=older, yes=yes)


@alone
def report(
    call: Call,
    source: Annotated[str, typer.Argument(metavar="CHAT.json")],
    out: Annotated[
        str | None, flag("--out", "file to write: .html, .md or .json", letters=["-o"])
    ] = None,
    force: Annotated[bool, flag("--force", "replace a file that exists")] = False,
) -> None:
    """minikv report chat.json -o report.html

    Make a report from what /export chat.json wrote in a chat. No model is needed.
    """
    from minikv.cli.export.command import report as run

    run(source, out, force, call.terminal)


# -- policies and settings ------------------------------------------------------------------------

policies = group("minikv policies show adakv\n\nThe eviction methods, one line each.")


@policies.callback(invoke_without_command=True)
@command
def list_policies(call: Call, as_json: Json = False) -> None:
    from minikv.cli.screen import render
    from minikv.models import refuse_without_torch

    refuse_without_torch()
    call.terminal.data(render.policies(as_json=as_json))


@policies.command("show")
@command
def show_policy(
    call: Call,
    name: Annotated[
        str,
        typer.Argument(help="a name from `minikv policies`", autocompletion=completion.rows),
    ],
    as_json: Json = False,
) -> None:
    """minikv policies show adakv

    One method: its options, defaults and limits, and how it differs from its paper and the paper's
    code.
    """
    from minikv.cli.screen import render
    from minikv.models import refuse_without_torch

    refuse_without_torch()
    call.terminal.data(render.policy(name, as_json=as_json))


config = group(
    "minikv config init\n\nSettings from files and MINIKV_* variables.", no_args_is_help=True
)


@config.command("path")
@command
def config_path(call: Call) -> None:
    """Which files are read, the strongest first."""
    from minikv.cli import config_command

    config_command.paths(call.terminal)


@config.command("init")
@command
def init_config(call: Call) -> None:
    """Write a commented file with every key."""
    from minikv.cli import config_command

    config_command.init(call.terminal)


@config.command("show")
@command
def show_config(call: Call, as_json: Json = False) -> None:
    """Every setting, its value and where it came from."""
    from minikv.cli import config_command

    config_command.show(call.terminal, as_json=as_json)


@config.command("set", short_help="Set a key, or an alias, in your own file.")
@command
def set_config(
    call: Call,
    key: Annotated[
        str, typer.Argument(help="a key from `minikv config show`", autocompletion=completion.keys)
    ],
    value: Annotated[
        list[str], typer.Argument(help="its value", autocompletion=completion.key_values)
    ],
) -> None:
    """minikv config set budget 20%

    Set a key in your own file; every other line stays. aliases.NAME is a short name for --model:
    minikv config set aliases.llama3 owner/name
    """
    from minikv.cli import config_command

    config_command.change(key, value, call.terminal)


@config.command("unset", short_help="Remove a key from your own file.")
@command
def unset_config(
    call: Call,
    key: Annotated[
        str, typer.Argument(help="a key of the file", autocompletion=completion.keys_set)
    ],
) -> None:
    """minikv config unset aliases.llama3

    Remove a key from your own file; every other line stays.
    """
    from minikv.cli import config_command

    config_command.unset(key, call.terminal)
