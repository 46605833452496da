"""The commands of `minikv models`, and their flags."""

from typing import Annotated

import typer

from minikv.cli.entry.shared import Json, Yes
from minikv.cli.flags import Call, Only, command
from minikv.cli.help import Group
from minikv.settings import Settings

app = typer.Typer(
    cls=Group,
    rich_markup_mode="rich",
    add_completion=False,
    help="minikv models pull HuggingFaceTB/SmolLM2-135M-Instruct\n\n"
    "The bundled model and those in the Hugging Face cache, with their sizes. Then the aliases, "
    "which `minikv config set aliases.NAME MODEL` sets.",
)


@app.callback(invoke_without_command=True)
@command
def models(call: Call, as_json: Json = False) -> None:
    if call.subcommand is not None:
        return
    from minikv.cli import models_command

    models_command.models(call.terminal, call.config.aliases, as_json=as_json)


@app.command(help="Download what minikv reads of a model, and print its folder.")
@command
def pull(
    call: Call,
    name: Annotated[str, typer.Argument(help="a hub id, as owner/name, or an alias")],
    settings: Annotated[Settings, Only("revision")],
) -> None:
    from minikv.cli import models_command

    models_command.pull(call.config.model(name) or name, settings.revision, call.terminal)


@app.command(
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
