"""The flags of `minikv report`."""

from typing import Annotated

import typer

from minikv.cli.flags import Call, command

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command(
    help="minikv report chat.json -o report.html\n\n"
    "Make a report from what /export chat.json wrote in a chat. No model is needed.",
)
@command
def report(
    call: Call,
    source: Annotated[str, typer.Argument(metavar="CHAT.json")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="file to write: .html, .md or .json")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a file that exists")] = False,
) -> None:
    from minikv.cli.export.command import report as write

    write(source, out, force, call.terminal)
