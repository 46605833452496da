"""`minikv bench all`: every figure that this machine can show, each beside what it should be.

The parts are in `on_cpu` and `on_gpu`. A part begins only while there is time left, so that the
whole ends in about the minutes it was given; what was not measured says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from minikv.choice import Choice
from minikv.cli.bench import kernels, models, run, shapes
from minikv.cli.bench.floors import Goal, Rates
from minikv.errors import MinikvError
from minikv.models.errors import ModelError

Progress = Callable[[str, int, int], None]

FULL = ("full", "none", "512")
OURS = ("adakv", "roco", "512")
"""The baseline and the pair that the goals name: policy, decode policy, budget."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some figures that are measured together. `slow`: only with --full."""

    name: str
    run: Callable[[Everything], None]
    slow: bool = False


class Everything:
    """What is measured so far: rows, kernels, goals, and figures that are neither."""

    def __init__(
        self, device: torch.device, rates: Rates, progress: Progress, *, repeat: int = 3,
        peer: bool = True, small: bool = False,
    ) -> None:  # fmt: skip
        """`small` takes tiny networks and short prompts: to see that all parts run."""
        self.device, self.rates, self.repeat, self.peer = device, rates, repeat, peer
        self.small = small
        self.rows: list[run.Row] = []
        self.timings: list[kernels.Timing] = []
        self.goals: list[Goal] = []
        self.figures: dict[str, object] = {}
        self.notes: list[str] = []
        self.progress = progress

    def go(self, parts: Sequence[Part], minutes: float, slow: bool) -> None:
        """Every part in order, as long as there is time."""
        until = perf_counter() + 60 * minutes
        for part in parts:
            if part.slow and not slow:
                self.notes.append(f"{part.name}: only with --full")
            elif perf_counter() > until:
                self.notes.append(f"{part.name}: no time left of {minutes:g} minutes")
            else:
                try:
                    part.run(self)
                except (MinikvError, ModelError, torch.OutOfMemoryError) as error:
                    self.notes.append(f"{part.name}: {' '.join(str(error).split())[:200]}")
                finally:
                    models.settle(self.device)

    # -- what parts are made of ---------------------------------------------------------------

    def spec(self, shape: str, weights: str = "auto") -> models.Spec:
        """A random network in bfloat16."""
        sizes = shapes.find("tiny" if self.small else shape)
        return models.Spec(sizes, None, "bfloat16", str(self.device), weights)

    def tokens(self, count: int) -> int:
        """So many, or few where the parts are only tried."""
        return max(64, count // 64) if self.small else count

    def bench(
        self, shape: str, choices: Sequence[tuple[str, str, str]],
        formats: tuple[str, ...] = ("auto",), *, peer: bool = False,
    ) -> run.Bench:  # fmt: skip
        """Of a shape under policies, given as (policy, decode policy, budget)."""
        gpu = self.device.type == "cuda"
        wanted = run.Wanted(
            self.spec(shape), shape, tuple(Choice.read(*each) for each in choices), (), formats,
            self.repeat, 4 if self.small else 128 if gpu else 32, peer and self.peer,
        )  # fmt: skip
        return run.Bench(wanted, self.rates, self.progress)

    def taken(self, bench: run.Bench) -> list[run.Row]:
        """Its rows, which are everything's from now on."""
        self.rows += bench.rows
        self.notes += [note for note in bench.notes if note not in self.notes]
        bench.close()
        return bench.rows

    def figure(
        self, what: str, model: str, kind: str, policy: str, length: int, weights: str = "auto"
    ) -> float | None:
        """`what` ("share", "evict", "vs_peer") of the newest row that is this one of minikv's."""
        wanted = (model, kind, policy, length, weights, "minikv")
        for row in reversed(self.rows):
            if (row.model, row.kind, row.policy, row.length, row.weights, row.system) == wanted:
                found: float | None = getattr(row, what)
                return found
        return None

    def want(
        self, name: str, measured: float | None, goal: float, first: float | None = None, *,
        at_least: bool = True, unit: str = "x", note: str = "",
    ) -> None:  # fmt: skip
        """A goal beside its figure."""
        self.goals.append(Goal(name, measured, goal, first, at_least, unit, note))
