"""The flags of `minikv bench`, read and checked before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.measure import choices, lengths
from minikv.cli.settings.values import read_list
from minikv.errors import UsageError
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import WEIGHTS, Settings

SHORTEST = 64
"""Fewest tokens of a prompt: shorter ones say nothing about a policy."""

_LONGEST = 1 << 20
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
            ("--repeat", self.repeat, 1000),
            ("--steps", self.steps, 100_000),
        ):
            least = 0 if flag == "--steps" else 1
            if not least <= value <= most:
                raise UsageError(f"{flag} must be {least} to {most:,}, got {value}")
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
        return tuple(choices(self.policy, self.budget, self.decode))

    def lengths(self) -> tuple[int, ...]:
        """Tokens of the prompts, in the order given. Raises UsageError."""
        return lengths(self.length, SHORTEST, _LONGEST)
