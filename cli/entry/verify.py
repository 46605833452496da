"""The flags of `minikv verify`."""

from typing import Annotated

import typer

from minikv.cli.config import Interface
from minikv.cli.entry.shared import json
from minikv.cli.flags import Call, Only, command
from minikv.settings import Settings

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command(
    help="minikv verify -m meta-llama/Llama-3.1-8B-Instruct\n\n"
    "Compare every file of a model that minikv reads with its checksum: weights, index, "
    "configuration, tokenizer, chat template. A model from the hub is compared with the hub's own "
    "checksums, without network. For a directory, the first run records checksums and later runs "
    "compare with them. Loading a model does not do this, because it would take longer than the "
    "loading. Exit code 1 if a file is not what it should be.",
)
@command
def verify(
    call: Call,
    settings: Annotated[Settings, Only("model revision")],
    interface: Annotated[Interface, Only("debug")],
    record: Annotated[
        bool,
        typer.Option("--record", help="record the checksums of a directory's present files"),
    ] = False,
    as_json: Annotated[
        bool, json("the files as one JSON object: ok, and the state and checksums of each")
    ] = False,
) -> None:
    from minikv.cli.verify_command import verify as run_verify

    run_verify(settings.model, settings.revision, call.terminal, record=record, as_json=as_json)
