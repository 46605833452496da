"""The command `minikv bench`."""

import sys
from typing import Annotated, Any

import typer

from minikv.cli.bench.asked import Asked
from minikv.cli.measure import with_flags
from minikv.cli.settings.config import Interface
from minikv.cli.settings.flags import Call, Only, command, list_of
from minikv.models import refuse_without_torch
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Settings

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


def bench(
    call: Call,
    settings: Annotated[
        Settings,
        Only(
            "device dtype weights policy budget decode kv kernels threads options",
            list_of("policy", DEFAULT_PROMPT),
            list_of("budget", "512"),
            list_of("decode", "auto"),
        ),
    ],
    interface: Annotated[Interface, Only("quiet debug")],
    **asked: Any,
) -> None:
    refuse_without_torch()
    Asked(**asked).check()
    from minikv.cli.bench.speed import measure

    measure(Asked(**asked), settings, call.terminal, ["minikv", *sys.argv[1:]])


app.command(
    name="bench",
    help="minikv bench decode --shape tinyllama --length 2048,8k --policy adakv,h2o\n\n"
    "Measure decode steps and prompts on random weights of a given shape, in turns with the full "
    "cache and with transformers if it is installed. Of a step, also the share of its floor: the "
    "time in which this machine reads the bytes that the step must read.",
)(command(with_flags(bench, Asked)))
