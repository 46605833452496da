"""The commands of `minikv config`, and their flags."""

from typing import Annotated

import typer

from minikv.cli import completion, config
from minikv.cli.entry.shared import Json
from minikv.cli.flags import Call, command
from minikv.cli.help import Group

app = typer.Typer(
    cls=Group,
    rich_markup_mode="rich",
    add_completion=False,
    no_args_is_help=True,
    help="minikv config init\n\nSettings from files and MINIKV_* variables.",
)


@app.command(help="Which files are read, the strongest first.")
@command
def path(call: Call) -> None:
    from minikv.cli import config_command

    config_command.paths(call.terminal)


@app.command(help="Write a commented file with every key.")
@command
def init(call: Call) -> None:
    from minikv.cli import config_command

    config_command.init(call.terminal)


@app.command("show", help="Every setting, its value and where it came from.")
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


@app.command(
    "set",
    short_help="Set a key, or an alias, in your own file.",
    help="minikv config set budget 20%\n\nSet a key in your own file; every other line stays. "
    "aliases.NAME is a short name for --model: minikv config set aliases.llama3 owner/name",
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


@app.command(
    "unset",
    short_help="Remove a key from your own file.",
    help="minikv config unset aliases.llama3\n\nRemove a key from your own file; every other line "
    "stays.",
)
@command
def unset_config(
    call: Call,
    key: Annotated[
        str, typer.Argument(help="a key of the file", autocompletion=completion.keys_set)
    ],
) -> None:
    from minikv.cli import config_command

    config_command.unset(key, call.terminal)
