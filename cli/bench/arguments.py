"""The flags of `minikv bench`, read and checked before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from minikv.chat.eviction_config import EvictionConfig, stated
from minikv.cli.bench import device
from minikv.cli.values import read_count, read_list, read_pairs
from minikv.errors import UsageError
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import WEIGHTS, Settings

SHORTEST = 64
"""Fewest tokens of a prompt: shorter ones say nothing about a policy."""

_MOST_REPEAT, _MOST_STEPS = 1000, 100_000
_MODEL, _CACHE, _OUTPUT, _ADVANCED = "Model", "KV cache", "Output", "Advanced"


def _option(help: str, *names: str, panel: str | None = None, metavar: str | None = None) -> object:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


Shape = Annotated[
    str,
    _option("sizes of a network with random weights: llama-3-8b, tinyllama, s, ..."),
]
Device = Annotated[str, _option("auto, cpu, cuda or cuda:N", panel=_MODEL)]
Length = Annotated[str, _option("tokens of the prompt, comma-separated: 2048,8k")]
Repeat = Annotated[int, _option("rounds; in each, every system is measured once")]
Peer = Annotated[bool, _option("also measure transformers, if installed", "--peer/--no-peer")]
Kernels = Annotated[
    Literal["auto", "triton", "torch"],
    _option("kernels of attention and eviction", panel=_ADVANCED),
]
Threads = Annotated[int, _option("CPU threads; 0: as many as the process may use", panel=_ADVANCED)]
Json = Annotated[
    str | None,
    _option("write one JSON object to FILE; without FILE, to stdout", "--json", metavar="[FILE]"),
]
Quiet = Annotated[bool, _option("results and errors only", "--quiet", "-q", panel=_OUTPUT)]
Debug = Annotated[bool, _option("show tracebacks", "--debug", panel=_ADVANCED)]
_Listed = Annotated[str, _option("comma-separated list")]


@dataclass(frozen=True, slots=True)
class Arguments:
    """What to measure. The fields are the flags of `bench decode` and `bench prefill`, as they
    were typed; the other questions use some of them."""

    shape: Shape = "s"
    model: Annotated[
        str | None,
        _option("the directory of a real model, in place of --shape", "--model", "-m"),
    ] = None
    device: Device = "auto"
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
    stride: Annotated[
        int,
        _option(
            "read prompts in blocks of this many tokens and evict after each; 0: in one piece",
            panel=_CACHE,
        ),
    ] = 0
    kv: Annotated[
        Literal["auto", "int8"],
        _option("number format of cached keys and values; auto: that of --dtype", panel=_CACHE),
    ] = "auto"
    options: Annotated[
        list[str] | None,
        _option("option of the policies", "-o", panel=_CACHE, metavar="NAME=VALUE"),
    ] = None
    length: Length = "2048"
    steps: Annotated[int, _option("decode steps of a round; 0: 32, on a GPU 128")] = 0
    repeat: Repeat = 3
    peer: Peer = True
    kernels: Kernels = "auto"
    threads: Threads = 0
    as_json: Json = None
    quiet: Quiet = False
    debug: Debug = False

    def check(self) -> None:
        """Raise UsageError for what no machine could measure."""
        Settings(device=self.device, kernels=self.kernels, kv=self.kv)  # refuses what is not there
        if self.model is None:
            from minikv.cli.bench import shapes  # --help needs none of them

            shapes.find(self.shape)
        elif not Path(self.model).is_dir():
            raise UsageError(
                f"--model {self.model} is not a directory",
                "or use --shape, which needs no weights",
            )
        for flag, value, most in (
            ("--repeat", self.repeat, _MOST_REPEAT),
            ("--steps", self.steps or 1, _MOST_STEPS),
        ):
            if not 1 <= value <= most:
                raise UsageError(f"{flag} must be 1 to {most:,}, got {value}")
        device.check_threads(self.threads)
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
        given = read_pairs(self.options or [])
        found = [EvictionConfig.read("full", "none")]
        for policy in read_list(self.policy, "--policy"):
            for decode in read_list(self.decode, "--decode"):
                for budget in read_list(self.budget, "--budget"):
                    if (policy, decode) in (("full", "auto"), ("full", "none")):
                        continue
                    made = EvictionConfig.read(
                        policy, decode, stated(budget), given, stride=self.stride
                    )
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
