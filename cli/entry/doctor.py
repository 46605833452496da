"""The flags of `minikv doctor`."""

from typing import Annotated

import typer

from minikv.cli.config import Interface
from minikv.cli.entry.shared import json
from minikv.cli.flags import Call, Only, command
from minikv.settings import Settings

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command(
    help="minikv doctor\n\n"
    "Check versions, processor, memory, hub and terminal, then test every policy on a tiny random "
    "model. Exit code 1 if a check failed.",
)
@command
def doctor(
    call: Call,
    settings: Annotated[Settings, Only("offline")],
    interface: Annotated[Interface, Only("debug")],
    as_json: Annotated[
        bool, json("the checks as one JSON object: ok, and the state, detail and hint of each")
    ] = False,
) -> None:
    from minikv.cli.doctor import doctor as run_doctor

    run_doctor(call.terminal, offline=settings.offline, as_json=as_json)
