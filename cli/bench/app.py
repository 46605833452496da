"""The flags of `minikv bench`. Nothing here imports torch."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from minikv.cli.bench import ending
from minikv.cli.failures import guard
from minikv.cli.terminal import Terminal
from minikv.policies import DEFAULT_BUDGET, DEFAULT_PROMPT

_MODEL, _CACHE, _OUTPUT, _ADVANCED = "Model", "KV cache", "Output", "Advanced"

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich", no_args_is_help=True)

Shape = Annotated[
    str,
    typer.Option(
        help="sizes of a network with random weights: llama-3-8b, tinyllama, s, ...",
        rich_help_panel=_MODEL,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="the directory of a real model, in place of --shape",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N", rich_help_panel=_MODEL)]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        help="number format of weights and cache; auto is bfloat16 for random weights",
        rich_help_panel=_MODEL,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        help="how matrices are kept, a list with commas: auto, int8, int4, int8+head, ...",
        rich_help_panel=_MODEL,
    ),
]
Policy = Annotated[str, typer.Option(help="a list with commas", rich_help_panel=_CACHE)]
Decode = Annotated[str, typer.Option(help="a list with commas", rich_help_panel=_CACHE)]
Budget = Annotated[str, typer.Option(help="a list with commas", rich_help_panel=_CACHE)]
Stride = Annotated[
    int,
    typer.Option(
        help="read prompts in blocks of so many rows under a step policy; 0: whole",
        rich_help_panel=_CACHE,
    ),
]
Kv = Annotated[
    Literal["auto", "int8"],
    typer.Option(
        help="what keys and values are kept in: auto is the number format of --dtype",
        rich_help_panel=_CACHE,
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "-o", metavar="NAME=VALUE", help="a setting of the policies", rich_help_panel=_CACHE
    ),
]
Length = Annotated[str, typer.Option(help="tokens of the prompt, a list with commas: 2048,8k")]
Repeat = Annotated[int, typer.Option(help="rounds, in which the systems take turns")]
Steps = Annotated[int, typer.Option(help="decode steps of a round; 0: 32, on a GPU 128")]
Peer = Annotated[
    bool, typer.Option("--peer/--no-peer", help="beside transformers, where it is installed")
]
Kernels = Annotated[
    Literal["auto", "triton", "torch"],
    typer.Option(help="who computes attention", rich_help_panel=_ADVANCED),
]
Threads = Annotated[
    int,
    typer.Option(help="on a CPU; 0: as many as the process may use", rich_help_panel=_ADVANCED),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="one JSON object: to FILE, or alone to stdout",
        rich_help_panel=_OUTPUT,
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="results and errors only", rich_help_panel=_OUTPUT)
]
Debug = Annotated[
    bool, typer.Option("--debug", help="tracebacks for errors", rich_help_panel=_ADVANCED)
]


@app.command(
    "decode",
    short_help="what a step costs after a prompt",
    help="minikv bench decode --policy adakv,snapkv --length 2048,8k --budget 512\n\n"
    "What a step costs after prompts of these lengths, the full cache first.",
)
def decode_(
    shape: Shape = "s",
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    policy: Policy = DEFAULT_PROMPT,
    decode: Decode = "auto",
    budget: Budget = DEFAULT_BUDGET,
    stride: Stride = 0,
    kv: Kv = "auto",
    options: Options = None,
    length: Length = "2048",
    steps: Steps = 0,
    repeat: Repeat = 3,
    peer: Peer = True,
    kernels: Kernels = "auto",
    threads: Threads = 0,
    as_json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    terminal = Terminal(quiet=quiet)
    with guard(terminal, debug=debug), ending.told():
        from minikv.cli.bench.asked import Asked
        from minikv.cli.bench.command import measure

        asked = Asked(
            shape,
            model,
            policy,
            decode,
            length,
            budget,
            device,
            dtype,
            weights,
            kv,
            kernels,
            threads,
            stride,
            tuple(options or ()),
            repeat,
            steps,
            peer,
        )
        measure("decode", asked, _command(), terminal, as_json)


@app.command(
    "prefill",
    short_help="what reading a prompt costs",
    help="minikv bench prefill --policy snapkv,h2o --length 8k --budget 512\n\n"
    "What reading prompts of these lengths costs, the full cache first.",
)
def prefill_(
    shape: Shape = "s",
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    policy: Policy = DEFAULT_PROMPT,
    decode: Decode = "auto",
    budget: Budget = DEFAULT_BUDGET,
    stride: Stride = 0,
    kv: Kv = "auto",
    options: Options = None,
    length: Length = "2048",
    repeat: Repeat = 3,
    peer: Peer = True,
    kernels: Kernels = "auto",
    threads: Threads = 0,
    as_json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    terminal = Terminal(quiet=quiet)
    with guard(terminal, debug=debug), ending.told():
        from minikv.cli.bench.asked import Asked
        from minikv.cli.bench.command import measure

        asked = Asked(
            shape,
            model,
            policy,
            decode,
            length,
            budget,
            device,
            dtype,
            weights,
            kv,
            kernels,
            threads,
            stride,
            tuple(options or ()),
            repeat,
            0,
            peer,
        )
        measure("prefill", asked, _command(), terminal, as_json)


@app.command(
    "kernels",
    short_help="each kernel against its floor",
    help="minikv bench kernels --shape llama-3-8b --length 1024,8k,32k\n\n"
    "Each kernel against the bytes it must move or the flops it must do: Triton's on a GPU, those "
    "in C on a CPU. --kernels torch measures their torch twins.",
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
    terminal = Terminal(quiet=quiet)
    with guard(terminal, debug=debug), ending.told():
        from minikv.cli.bench.asked import Asked
        from minikv.cli.bench.command import measure_kernels

        asked = Asked(shape, length=length, device=device, threads=threads, repeat=repeat)
        asked.check()
        measure_kernels(
            shape.lower(),
            asked.lengths(),
            device,
            kernels,
            threads,
            repeat,
            _command(),
            terminal,
            as_json,
        )


@app.command(
    "all",
    short_help="every figure that this machine can show, beside what it should be",
    help="minikv bench all --json figures.json\n\n"
    "Every figure that this machine can show, beside its goal. On a GPU: kernels, steps and "
    "prompts of Llama-3-8B's shape, a prompt of 128k tokens and one of 512k. On a CPU: a model of "
    "160 million parameters beside transformers, with --full also one of 1.1 billion.\n\n"
    "It ends in the time that --minutes gives it. What cannot be measured in it is named, with "
    "what it would take; FILE is written anew after every part.",
)
def all_(
    device: Device = "auto",
    minutes: Annotated[float, typer.Option(help="in which it ends, give or take an eighth")] = 8.0,
    full: Annotated[bool, typer.Option("--full", help="what takes long, too")] = False,
    repeat: Repeat = 3,
    peer: Peer = True,
    threads: Threads = 0,
    as_json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    terminal = Terminal(quiet=quiet)
    with guard(terminal, debug=debug), ending.told():
        from minikv.cli.bench.asked import Asked
        from minikv.cli.bench.command import measure_all

        Asked(device=device, threads=threads, repeat=repeat).check()
        measure_all(device, threads, repeat, peer, full, minutes, _command(), terminal, as_json)


def _command() -> list[str]:
    return ["minikv", *sys.argv[1:]]
