"""The flags of `minikv bench`, read and checked before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import place, shapes
from minikv.cli.commands import read_pairs
from minikv.cli.plan import read_count
from minikv.errors import UsageError
from minikv.settings import WEIGHTS, Settings

LEAST = 64
"""Fewest tokens of a prompt: shorter ones say nothing about a policy."""

MOST_REPEAT, MOST_STEPS = 1000, 100_000


@dataclass(frozen=True, slots=True)
class Asked:
    """The flags of `bench decode` and `bench prefill`, as they were typed."""

    shape: str = "s"
    model: str | None = None
    policy: str = "adakv"
    decode: str = "auto"
    length: str = "2048"
    budget: str = "512"
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    kv: str = "auto"
    kernels: str = "auto"
    threads: int = 0
    stride: int = 0
    options: tuple[str, ...] = ()
    repeat: int = 3
    steps: int = 0
    peer: bool = True

    def check(self) -> None:
        """Raise UsageError for what no machine could measure."""
        Settings(device=self.device, kernels=self.kernels, kv=self.kv)  # refuses what is not there
        if self.model is None:
            shapes.find(self.shape)
        elif not Path(self.model).is_dir():
            raise UsageError(
                f"--model {self.model} is not a directory",
                "or use --shape, which needs no weights",
            )
        for flag, value, most in (
            ("--repeat", self.repeat, MOST_REPEAT),
            ("--steps", self.steps or 1, MOST_STEPS),
        ):
            if not 1 <= value <= most:
                raise UsageError(f"{flag} must be 1 to {most:,}, got {value}")
        place.check_threads(self.threads)

    def formats(self) -> tuple[str, ...]:
        """How matrices are kept, each in turn. Raises UsageError."""
        found = read_list(self.weights, "--weights")
        for name in found:
            if name not in WEIGHTS:
                raise UsageError(f"unknown weights {name!r}", f"use {', '.join(WEIGHTS)}")
        return found

    def choices(self) -> tuple[EvictionConfig, ...]:
        """The full cache first, then every policy with every decode policy and budget. Raises
        UsageError."""
        given = read_pairs(list(self.options))
        found = [EvictionConfig.read("full", "none")]
        for policy in read_list(self.policy, "--policy"):
            for decode in read_list(self.decode, "--decode"):
                for budget in read_list(self.budget, "--budget"):
                    if (policy, decode) in (("full", "auto"), ("full", "none")):
                        continue
                    made = EvictionConfig.read(policy, decode, budget, given, stride=self.stride)
                    if made not in found:
                        found.append(made)
        return tuple(found)

    def lengths(self) -> tuple[int, ...]:
        """Tokens of the prompts, in the order given. Raises UsageError."""
        parts = read_list(self.length, "--length")
        found = tuple(dict.fromkeys(read_count(part) for part in parts))
        if min(found) < LEAST:
            raise UsageError(f"--length must be at least {LEAST}, got {min(found)}")
        return found


def read_list(text: str, flag: str) -> tuple[str, ...]:
    """What stands between commas. Raises UsageError if it is nothing."""
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise UsageError(f"{flag} names nothing", "give one or more, with commas between them")
    return parts
