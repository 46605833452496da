"""`minikv bench`: its flags, what is refused before torch is loaded, and the run.

Whatever ends a run, what was measured by then is shown and written first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from minikv.chat.eviction_config import EvictionConfig, stated
from minikv.cli.bench.report import LEGEND, Report, header
from minikv.cli.failures import guard
from minikv.cli.help import Group
from minikv.cli.terminal import Terminal
from minikv.cli.values import read_count, read_list
from minikv.errors import UsageError
from minikv.models import refuse_without_torch
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import WEIGHTS, Settings

SHORTEST = 64
"""Fewest tokens of a prompt: shorter ones say nothing about a policy."""

_MOST_REPEAT, _MOST_STEPS = 1000, 100_000
_MODEL, _CACHE, _OUTPUT, _ADVANCED = "Model", "KV cache", "Output", "Advanced"


def _option(help: str, *names: str, panel: str | None = None, metavar: str | None = None) -> object:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


_Listed = Annotated[str, _option("comma-separated list")]


@dataclass(frozen=True, slots=True)
class Arguments:
    """What to measure: the flags of `bench decode` as they were typed. The other questions have
    some of them."""

    shape: Annotated[
        str, _option("sizes of a network with random weights: llama-3-8b, tinyllama, s, ...")
    ] = "s"
    model: Annotated[
        str | None,
        _option("the directory of a real model, in place of --shape", "--model", "-m"),
    ] = None
    device: Annotated[str, _option("auto, cpu, cuda or cuda:N", panel=_MODEL)] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _option(
            "number format of weights and cache; auto is bfloat16 for random weights", panel=_MODEL
        ),
    ] = "auto"
    weights: Annotated[
        str,
        _option(
            "formats of the weights, comma-separated: auto, int8, int4, int8+head, ...",
            panel=_MODEL,
        ),
    ] = "auto"
    policy: _Listed = DEFAULT_PROMPT
    decode: _Listed = "auto"
    budget: _Listed = "512"
    kv: Annotated[
        Literal["auto", "int8"],
        _option("number format of cached keys and values; auto: that of --dtype", panel=_CACHE),
    ] = "auto"
    length: Annotated[str, _option("tokens of the prompt, comma-separated: 2048,8k")] = "2048"
    steps: Annotated[int, _option("decode steps of a round; 0: 32, on a GPU 128")] = 0
    repeat: Annotated[int, _option("rounds; in each, every system is measured once")] = 3
    peer: Annotated[
        bool, _option("also measure transformers, if installed", "--peer/--no-peer")
    ] = True
    kernels: Annotated[
        Literal["auto", "triton", "torch"],
        _option("kernels of attention and eviction", panel=_ADVANCED),
    ] = "auto"
    threads: Annotated[
        int, _option("CPU threads; 0: as many as the process may use", panel=_ADVANCED)
    ] = 0
    as_json: Annotated[
        str | None,
        _option(
            "write one JSON object to FILE; without FILE, to stdout", "--json", metavar="[FILE]"
        ),
    ] = None
    quiet: Annotated[bool, _option("results and errors only", "--quiet", "-q", panel=_OUTPUT)] = (
        False
    )
    debug: Annotated[bool, _option("show tracebacks", "--debug", panel=_ADVANCED)] = False

    def check(self) -> None:
        """Raise UsageError for what no machine could measure."""
        Settings(device=self.device, kernels=self.kernels, kv=self.kv)  # refuses unknown values
        if self.model is not None and not Path(self.model).is_dir():
            hint = "or use --shape, which needs no weights"
            raise UsageError(f"--model {self.model} is not a directory", hint)
        for flag, value, most in (
            ("--repeat", self.repeat, _MOST_REPEAT),
            ("--steps", self.steps or 1, _MOST_STEPS),
        ):
            if not 1 <= value <= most:
                raise UsageError(f"{flag} must be 1 to {most:,}, got {value}")
        self.formats()
        self.lengths()
        self.evictions()

    @property
    def name(self) -> str:
        """The name of the network: the shape, or the model's directory."""
        return self.model or self.shape.lower()

    def formats(self) -> tuple[str, ...]:
        """The formats of the weights to measure. Raises UsageError."""
        found = read_list(self.weights, "--weights")
        for name in found:
            if name not in WEIGHTS:
                raise UsageError(f"unknown weights {name!r}", f"use {', '.join(WEIGHTS)}")
        return found

    def evictions(self) -> tuple[EvictionConfig, ...]:
        """The full cache first, then every policy with every decode policy and budget. Raises
        UsageError."""
        found = [EvictionConfig.read("full", "none")]
        for policy in read_list(self.policy, "--policy"):
            for decode in read_list(self.decode, "--decode"):
                if (policy, decode) in (("full", "auto"), ("full", "none")):
                    continue
                for budget in read_list(self.budget, "--budget"):
                    made = EvictionConfig.read(policy, decode, stated(budget))
                    if made not in found:
                        found.append(made)
        return tuple(found)

    def lengths(self) -> tuple[int, ...]:
        """Tokens of the prompts, in the order given. Raises UsageError."""
        parts = read_list(self.length, "--length")
        found = tuple(dict.fromkeys(read_count(part) for part in parts))
        if min(found) < SHORTEST:
            raise UsageError(f"--length must be at least {SHORTEST}, got {min(found)}")
        return found


def measure(
    questions: Sequence[str], asked: Arguments, command: Sequence[str], terminal: Terminal
) -> None:
    """Answer the questions: "decode", "prefill", "kernels". Raises UsageError, before torch is
    loaded where it can, ContextError, ModelError and MemoryShortError."""
    asked.check()
    report = Report(command, terminal, asked.as_json)
    terminal.status("starting")
    from minikv.cli.bench import kernels, machine, networks, speed

    device = machine.prepare(asked.device, asked.threads)
    shape = networks.find(asked.shape) if asked.model is None else None
    if asked.kernels == "triton" and device.type != "cuda":
        raise UsageError("no Triton kernels without a CUDA device", "use --kernels auto or torch")
    terminal.status("measuring the machine's bandwidth and products")
    rates, facts = machine.measure(device), machine.facts(device)
    report.record |= {"machine": facts, "versions": machine.versions(), "rates": asdict(rates)}
    report.show(header(facts, report.record["rates"], asked.name))
    done = False
    try:
        for question in questions:
            if question == "kernels":
                assert shape is not None
                kernels.measure(shape, asked, device, rates, report)
            else:
                speed.measure(asked, device, rates, report, decode=question == "decode")
        if report.failures:
            raise report.failures[0]
        done = True
    finally:
        if report.record["rows"]:
            wanted = report.record["wanted"]
            rounds = f"medians of {wanted['repeat']} rounds in turns; {wanted['steps']} steps a "
            report.show(f"{rounds}decode round; {wanted['dtype']}\n{LEGEND}")
        report.close(complete=done)


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


def _question(
    *questions: str,
    without: str = "",
    change: Callable[[Arguments], Arguments] = lambda x: x,
    **new: Any,
) -> Callable[..., None]:
    """A command whose flags are the fields of `Arguments`, except those named in `without`; `new`:
    other defaults."""

    def command(**given: Any) -> None:
        asked = replace(Arguments(**new), **given)
        terminal = Terminal(quiet=asked.quiet)
        with guard(terminal, debug=asked.debug):
            refuse_without_torch()
            measure(questions, change(asked), ["minikv", *sys.argv[1:]], terminal)

    hints = get_type_hints(Arguments, include_extras=True)
    flags = [
        Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=new.get(each.name, each.default),
            annotation=hints[each.name],
        )
        for each in fields(Arguments)
        if each.name not in without.split()
    ]
    command.__signature__ = Signature(flags)  # type: ignore[attr-defined]
    command.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return command


def _for_this_machine(asked: Arguments) -> Arguments:
    """A large model on a GPU, a small one on a CPU."""
    from minikv.cli.bench import machine

    gpu = machine.prepare(asked.device, asked.threads).type == "cuda"
    return replace(asked, shape="llama-3-8b" if gpu else "s")


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
)(_question("prefill", without="steps"))
_NO_MODEL = "model dtype weights policy decode budget kv steps peer"
app.command(
    "kernels",
    short_help="time of each kernel, and the least that the hardware allows",
    help="minikv bench kernels --shape llama-3-8b --length 1024,8k,32k\n\n"
    "The time of each kernel, and the least time for the bytes that it must move or the flops that "
    "it must do: Triton's kernels on a GPU, those in C on a CPU. --kernels torch measures the "
    "torch functions that specify them.",
)(_question("kernels", without=_NO_MODEL, shape="llama-3-8b", length="1024,8192", repeat=5))
app.command(
    "all",
    short_help="decode, prefill and kernels, in a size for this machine",
    help="minikv bench all --json figures.json\n\n"
    "Decode steps, prompts and kernels after 2,048 and 8,192 tokens: in Llama-3-8B's shape on a "
    "GPU, with 160 million parameters on a CPU. FILE is written again after every table.",
)(
    _question(
        *("decode", "prefill", "kernels"),
        without="shape model dtype policy decode kv kernels",
        change=_for_this_machine,
        length="2048,8192",
    )
)
