"""The flags of `minikv demo`."""

from typing import Annotated

import typer

from minikv.cli.config import Interface
from minikv.cli.flags import Call, Only, command

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command(
    help="minikv demo\n\nFive questions about the bundled document: which tokens are kept, what "
    "that saves, a follow-up that goes wrong, and what to do about it. It needs no files. Enter "
    "continues, q leaves.",
)
@command
def demo(call: Call, interface: Annotated[Interface, Only("plain debug")]) -> None:
    from minikv.cli.demo import demo as run_demo

    run_demo(call.terminal, debug=interface.debug)
