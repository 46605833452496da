"""`minikv bench`: its commands and the run.

Whatever ends a run, what was measured by then is shown and written first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import typer

from minikv.cli.bench.arguments import Arguments
from minikv.cli.failures import guard
from minikv.cli.help import Group
from minikv.cli.measure import Results, with_flags
from minikv.cli.screen.terminal import Terminal
from minikv.errors import UsageError
from minikv.models import refuse_without_torch

_LEGEND = """\
floor: share of what bandwidth and products measured in this run allow
x full, x HF: times as fast as the full cache, as transformers (sdpa)"""


def measure(
    questions: Sequence[str], asked: Arguments, command: Sequence[str], terminal: Terminal
) -> None:
    """Answer the questions: "decode", "prefill", "kernels". Raises UsageError, before torch is
    loaded where it can, ContextError, ModelError and MemoryShortError."""
    asked.check()
    record = {"command": " ".join(command), "complete": False, "rows": [], "kernels": []}
    results = Results(terminal, asked.as_json, record)
    terminal.status("starting")
    from minikv.cli.bench import kernels, machine, networks, speed

    device = machine.prepare(asked.device, asked.threads)
    shape = networks.find(asked.shape) if asked.model is None else None
    if asked.kernels == "triton" and device.type != "cuda":
        raise UsageError("no Triton kernels without a CUDA device", "use --kernels auto or torch")
    terminal.status("measuring the machine's bandwidth and products")
    rates, facts, made = machine.measure(device), machine.facts(device), results.record
    made |= {"machine": facts, "versions": machine.versions(), "rates": asdict(rates)}
    results.show(machine.header(facts, rates, asked.name))
    try:
        for question in questions:
            if question == "kernels":
                assert shape is not None
                kernels.measure(shape, asked, device, rates, results)
            else:
                speed.measure(asked, device, rates, results, decode=question == "decode")
        if results.failures:
            raise results.failures[0]
        made["complete"] = True
    finally:
        if made["rows"]:
            wanted = made["wanted"]
            rounds = f"medians of {wanted['repeat']} rounds in turns; {wanted['steps']} steps a "
            results.show(f"{rounds}decode round; {wanted['dtype']}\n{_LEGEND}")
        if made["complete"] or made["rows"] or made["kernels"]:
            results.write(last=True)


# -- commands -----------------------------------------------------------------------------------

app = typer.Typer(
    cls=Group,
    rich_markup_mode="rich",
    add_completion=False,
    no_args_is_help=True,
    help="minikv bench decode --shape tinyllama --length 2048,8192\n\n"
    "Measure whole steps and prompts on random weights of a given shape. Compare with the full "
    "cache, with transformers if it is installed, and with what this machine's rates allow.",
)


def _add(
    name: str,
    short: str,
    help: str,
    *questions: str,
    without: str = "",
    change: Callable[[Arguments], Arguments] = lambda asked: asked,
    **new: Any,
) -> None:
    """A command whose flags are the fields of `Arguments`, except those named in `without`; `new`:
    other defaults."""

    def command(**given: Any) -> None:
        asked = replace(Arguments(**new), **given)
        terminal = Terminal(quiet=asked.quiet)
        with guard(terminal, debug=asked.debug):
            refuse_without_torch()
            measure(questions or (name,), change(asked), ["minikv", *sys.argv[1:]], terminal)

    made = with_flags(command, Arguments, without.split(), **new)
    app.command(name, short_help=short, help=f"minikv bench {help}")(made)


def _for_this_machine(asked: Arguments) -> Arguments:
    """A large model on a GPU, a small one on a CPU."""
    from minikv.cli.bench import machine

    gpu = machine.prepare(asked.device, asked.threads).type == "cuda"
    return replace(asked, shape="llama-3-8b" if gpu else "s")


_add(
    "decode",
    "time of a decode step after a prompt",
    "decode --policy global-span,snapkv --length 2048,8k --budget 512\n\n"
    "The time of a decode step after prompts of these lengths, the full cache first.",
)
_add(
    "prefill",
    "time to read a prompt",
    "prefill --policy snapkv,h2o --length 8k --budget 512\n\n"
    "The time to read prompts of these lengths, the full cache first.",
    without="steps",
)
_add(
    "kernels",
    "time of each kernel, and the least that the hardware allows",
    "kernels --shape llama-3-8b --length 1024,8k,32k\n\n"
    "The time of each kernel, and the least time for the bytes that it must move or the flops that "
    "it must do: Triton's kernels on a GPU, those in C on a CPU. --kernels torch measures the "
    "torch functions that specify them.",
    without="model dtype weights policy decode budget kv steps peer",
    shape="llama-3-8b",
    length="1024,8192",
    repeat=5,
)
_add(
    "all",
    "decode, prefill and kernels, in a size for this machine",
    "all --json figures.json\n\n"
    "Decode steps, prompts and kernels after 2,048 and 8,192 tokens: in Llama-3-8B's shape on a "
    "GPU, with 160 million parameters on a CPU. FILE is written again after every table.",
    *("decode", "prefill", "kernels"),
    without="shape model dtype policy decode kv kernels",
    change=_for_this_machine,
    length="2048,8192",
)
