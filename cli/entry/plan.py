"""The flags of `minikv plan`."""

from typing import Annotated

import typer

from minikv.cli.config import Interface
from minikv.cli.entry.shared import MODEL, json, list_of
from minikv.cli.flags import Call, Only, command
from minikv.settings import Generation, Settings

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command(
    help="minikv plan -m meta-llama/Llama-3.1-8B-Instruct --memory 24GiB\n\n"
    "How much memory a model and its cache would need for a document of this length under several "
    "policies, how much is free, and flags with which it fits. Policies come from flags, not from "
    "minikv.toml or a variable. Downloads config.json only.",
)
@command
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
        typer.Option(
            metavar="N",
            help="length of the document: 8192, 100k, 32Ki; without it 4k, 16k and all that the "
            "model can read",
        ),
    ] = "",
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="plan for another machine with this much memory")
    ] = "",
    as_json: Annotated[
        bool, json("the forecast as one JSON object: bytes for each policy, and suggested flags")
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
