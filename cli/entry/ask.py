"""The flags of `minikv ask`."""

from typing import Annotated

import typer

from minikv.cli import completion
from minikv.cli.config import Interface
from minikv.cli.entry.shared import SAVED, Files, json
from minikv.cli.flags import Call, command
from minikv.settings import Generation, Settings

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command(
    help='minikv ask "Who runs the mill?" report.txt --budget 256 --stats\n\n'
    "Ask one question. Without FILEs, piped text is the document; with FILEs, stdin is read only "
    "for `-`. As the QUESTION, `-` reads the whole message from stdin, as it is but for the line "
    "end that `echo` adds.",
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
            help="ask in the chat that was saved last, and save question and answer there",
            rich_help_panel=SAVED,
        ),
    ] = False,
    chat: Annotated[
        str | None,
        typer.Option(
            "--chat",
            metavar="NAME",
            help="ask in this saved chat, and save question and answer there",
            autocompletion=completion.saved,
            rich_help_panel=SAVED,
        ),
    ] = None,
    as_json: Annotated[
        bool, json("one JSON object: the answer and the figures of the turn")
    ] = False,
) -> None:
    from minikv.cli.ask import ask as run_ask

    run_ask(
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
