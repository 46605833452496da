"""The commands of `minikv policies`, and their flags."""

from typing import Annotated

import typer

from minikv.cli import completion
from minikv.cli.entry.shared import Json
from minikv.cli.flags import Call, command
from minikv.cli.help import Group
from minikv.models import refuse_without_torch

app = typer.Typer(
    cls=Group,
    rich_markup_mode="rich",
    add_completion=False,
    help="minikv policies show adakv\n\nThe eviction methods, one line each.",
)


@app.callback(invoke_without_command=True)
@command
def policies(
    call: Call,
    as_json: Json = False,
) -> None:
    if call.subcommand is not None:
        return
    refuse_without_torch()
    from minikv.cli.screen import render

    call.terminal.data(render.policies(as_json=as_json))


@app.command(
    help="minikv policies show adakv\n\nOne method: its options, defaults and limits, and how it "
    "differs from its paper and the paper's code."
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
    refuse_without_torch()
    from minikv.cli.screen import render

    call.terminal.data(render.policy(name, as_json=as_json))
