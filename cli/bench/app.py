"""The commands of `minikv bench`. Nothing here imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

import typer

from minikv.cli.bench import signals
from minikv.cli.bench.arguments import (
    Arguments,
    Debug,
    Device,
    Json,
    Kernels,
    Length,
    Peer,
    Quiet,
    Repeat,
    Shape,
    Threads,
)
from minikv.cli.failures import guard
from minikv.cli.help import Group
from minikv.cli.terminal import Terminal
from minikv.models import refuse_without_torch

app = typer.Typer(
    cls=Group,
    rich_markup_mode="rich",
    add_completion=False,
    no_args_is_help=True,
    help="minikv bench decode --shape tinyllama --length 2048,8192\n\n"
    "Measure whole steps and prompts on random weights of a given shape. Compare with the full "
    "cache, with transformers if it is installed, and with what this machine's rates allow.",
)


def _ended(terminal: Terminal, debug: bool) -> AbstractContextManager[object]:
    """Inside, errors become a line and an exit code, and signals act as Ctrl-C."""
    stack = ExitStack()
    stack.enter_context(guard(terminal, debug=debug))
    stack.enter_context(signals.caught())
    return stack


def _measure(question: str, arguments: Arguments) -> None:
    terminal = Terminal(quiet=arguments.quiet)
    with _ended(terminal, arguments.debug):
        refuse_without_torch()
        from minikv.cli.bench.command import measure

        measure(question, arguments, _command(), terminal)


def _question(name: str, *without: str) -> Callable[..., None]:
    """A command whose flags are the fields of `Arguments`, except those named in `without`."""

    def command(**given: Any) -> None:
        _measure(name, Arguments(**given))

    hints = get_type_hints(Arguments, include_extras=True)
    flags = [
        Parameter(
            each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name]
        )
        for each in fields(Arguments)
        if each.name not in without
    ]
    command.__signature__ = Signature(flags)  # type: ignore[attr-defined]
    command.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return command


app.command(
    "decode",
    short_help="time of a decode step after a prompt",
    help="minikv bench decode --policy adakv,snapkv --length 2048,8k --budget 512\n\n"
    "The time of a decode step after prompts of these lengths, the full cache first.",
)(_question("decode"))

app.command(
    "prefill",
    short_help="time to read a prompt",
    help="minikv bench prefill --policy snapkv,h2o --length 8k --budget 512\n\n"
    "The time to read prompts of these lengths, the full cache first.",
)(_question("prefill", "steps"))


@app.command(
    "kernels",
    short_help="time of each kernel, and the least that the hardware allows",
    help="minikv bench kernels --shape llama-3-8b --length 1024,8k,32k\n\n"
    "The time of each kernel, and the least time for the bytes that it must move or the flops that "
    "it must do: Triton's kernels on a GPU, those in C on a CPU. --kernels torch measures the "
    "torch functions that specify them.",
)
def kernels_(
    shape: Shape = "llama-3-8b",
    device: Device = "auto",
    length: Length = "1024,8192",
    repeat: Repeat = 5,
    kernels: Kernels = "auto",
    threads: Threads = 0,
    as_json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    arguments = Arguments(
        shape=shape,
        device=device,
        length=length,
        repeat=repeat,
        kernels=kernels,
        threads=threads,
        as_json=as_json,
        quiet=quiet,
        debug=debug,
    )
    _measure("kernels", arguments)


@app.command(
    "all",
    short_help="all measurements for this machine, each beside its goal",
    help="minikv bench all --json figures.json\n\n"
    "All measurements for this machine, each beside its goal. On a GPU: kernels, steps and "
    "prompts of Llama-3-8B's shape, a prompt of 128k tokens and one of 512k. On a CPU: a model of "
    "160 million parameters beside transformers, with --full also one of 1.1 billion.\n\n"
    "It ends within --minutes. It lists what did not fit in that time, and how long that would "
    "take. FILE is written again after every part.",
)
def all_(
    device: Device = "auto",
    minutes: Annotated[float, typer.Option(help="time limit, to within an eighth of it")] = 8.0,
    full: Annotated[bool, typer.Option("--full", help="also measure what takes long")] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(help="only the part with this name; may be given several times"),
    ] = None,
    repeat: Repeat = 3,
    peer: Peer = True,
    threads: Threads = 0,
    as_json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    arguments = Arguments(device=device, repeat=repeat, peer=peer, threads=threads, as_json=as_json)
    terminal = Terminal(quiet=quiet)
    with _ended(terminal, debug):
        refuse_without_torch()
        from minikv.cli.bench.command import measure_all

        measure_all(arguments, minutes, part or (), _command(), terminal, full=full)


def _command() -> list[str]:
    return ["minikv", *sys.argv[1:]]
