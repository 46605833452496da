"""The commands of `minikv chats`, and their flags."""

from typing import Annotated

import typer

from minikv.cli import completion
from minikv.cli.config import Interface
from minikv.cli.entry.shared import Json, Yes
from minikv.cli.flags import Call, Only, command
from minikv.cli.help import Group

app = typer.Typer(
    cls=Group,
    rich_markup_mode="rich",
    add_completion=False,
    help="minikv chats show NAME\n\nThe saved chats, the newest first.",
)


@app.callback(invoke_without_command=True)
@command
def chats(
    call: Call,
    interface: Annotated[Interface, Only("chats_limit")],
    as_json: Json = False,
) -> None:
    if call.subcommand is not None:
        return
    from minikv.cli.saved import chats as saved

    saved.chats(call.terminal, interface.chats_limit, as_json=as_json)


@app.command("show", help="What was said in a saved chat.")
@command
def show_chat(
    call: Call,
    name: Annotated[
        str, typer.Argument(help="a name from `minikv chats`", autocompletion=completion.saved)
    ],
    as_json: Json = False,
) -> None:
    from minikv.cli.saved import chats as saved

    saved.show(name, call.terminal, as_json=as_json)


@app.command(
    "rm",
    help="Remove saved chats, with the text that is stored in them: those that are named, or all "
    "that are --older than so long.",
)
@command
def remove_chats(
    call: Call,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", autocompletion=completion.saved)
    ] = None,
    older: Annotated[
        str | None,
        typer.Option(
            "--older",
            metavar="AGE",
            help="all that were saved longer ago: 90min, 12h, 30d, 8w, 6mo or 1y",
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    from minikv.cli.saved import chats as saved

    saved.remove(names or [], call.terminal, older=older, yes=yes)
