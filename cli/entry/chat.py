"""The flags of `minikv chat`."""

from typing import Annotated

import typer

from minikv.cli import completion
from minikv.cli.config import Interface
from minikv.cli.entry.shared import SAVED, Files
from minikv.cli.flags import Call, Only, command
from minikv.settings import OUTPUT, Generation, Settings

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command(
    help="minikv chat report.txt --budget 256\n\n"
    "Chat about documents. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. With "
    "a FILE, questions can be piped in, one per line. With `-` as FILE, the document is piped in."
    "\n\n"
    "While an answer is written, the cache holds only the tokens that its question needs. For the "
    "next question they are chosen again from all that was read: see --reuse and --tier.",
)
@command
def chat(
    call: Call,
    settings: Settings,
    generation: Generation,
    interface: Annotated[Interface, Only("encoding_errors chats_limit quiet plain debug")],
    files: Files = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="QUESTION", help="ask this first"),
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
            help="continue a saved chat; without NAME, the last one",
            autocompletion=completion.saved,
        ),
    ] = None,
    reread: Annotated[
        bool,
        typer.Option(
            "--reread",
            help="with --resume: do not load the saved cache; the next question reads everything "
            "again",
            rich_help_panel=SAVED,
        ),
    ] = False,
    no_save: Annotated[
        bool,
        typer.Option("--no-save", help="do not save this chat", rich_help_panel=SAVED),
    ] = False,
    no_history: Annotated[
        bool,
        typer.Option(
            "--no-history",
            help="do not store what is typed for later chats",
            rich_help_panel=SAVED,
        ),
    ] = False,
) -> None:
    from minikv.cli.chat import chat as run_chat

    run_chat(
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
