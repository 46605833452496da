"""The command `minikv bench`, and what it is asked."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from minikv.cli.measure import lengths
from minikv.cli.settings.config import Interface
from minikv.cli.settings.flags import Call, Only, alone, list_of
from minikv.errors import UsageError
from minikv.models import refuse_without_torch
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Settings


@dataclass(frozen=True, slots=True)
class Asked:
    """What `minikv bench` is to measure, as it was typed. Some strings are lists with commas."""

    question: Annotated[
        Literal["decode", "prefill", "all"],
        typer.Argument(
            metavar="[decode|prefill|all]",
            help="decode: the time of a step after a prompt; prefill: the time to read a prompt",
        ),
    ] = "all"
    shape: Annotated[
        str,
        typer.Option(
            help="sizes of a network with random weights: llama-3-8b, tinyllama, s, ...; auto: "
            "llama-3-8b on a GPU, else s (160 million parameters)"
        ),
    ] = "auto"
    length: Annotated[str, typer.Option(help="tokens of the prompt, comma-separated: 2048,8k")] = (
        "2048"
    )
    steps: Annotated[int, typer.Option(help="decode steps of a round; 0: 32, on a GPU 128")] = 0
    repeat: Annotated[int, typer.Option(help="rounds; in each, every system is measured once")] = 3
    peer: Annotated[
        bool, typer.Option("--peer/--no-peer", help="also measure transformers, if installed")
    ] = True
    as_json: Annotated[
        str | None,
        typer.Option(
            "--json",
            help="write a JSON object to FILE; without FILE, to stdout",
            metavar="[FILE]",
        ),
    ] = None

    def check(self) -> None:
        """Raise UsageError for what no machine could measure."""
        for flag, value, least, most in (
            ("--repeat", self.repeat, 1, 100),
            ("--steps", self.steps, 0, 10_000),
        ):
            if not least <= value <= most:
                raise UsageError(f"{flag} must be {least} to {most:,}, got {value}")
        lengths(self.length)


@alone
def app(
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
    asked: Asked,
) -> None:
    """minikv bench decode --shape tinyllama --length 2048,8k --policy adakv,h2o

    Measure decode steps and prompts on random weights of a given shape, in turns with the full
    cache and with transformers if it is installed. Of a step, also the share of its floor: the time
    in which this machine reads the bytes that the step must read.
    """
    refuse_without_torch()
    asked.check()
    from minikv.cli.bench.speed import measure

    measure(asked, settings, call.terminal, ["minikv", *sys.argv[1:]])
