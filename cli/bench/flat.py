"""A step late in a long conversation beside one early in it, under the same budget.

The conversation is read as 16 prompts, each of which ends with an eviction. That takes a sixteenth
of the attention of one long prompt, and leaves as many tokens per head.
"""

from __future__ import annotations

import torch

from minikv.cli.bench import models
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.cached import Cached
from minikv.cli.bench.floors import Rates
from minikv.cli.bench.results import Results
from minikv.cli.bench.turns import spec_of

_PROMPTS = 16


def measure(arguments: Arguments, device: torch.device, rates: Rates, results: Results) -> None:
    """The figure `flat`: seconds of a step after one prompt, and after 16 of them, in turns."""
    net = models.network(spec_of(arguments, device))
    (length,), steps, rounds = arguments.lengths(), arguments.steps or 32, 2 * arguments.repeat
    ids, eviction = models.prompt(length, net.config.vocab), arguments.evictions()[-1]
    early, late = Cached(net, eviction), Cached(net, eviction)
    early.read(ids)
    for done in range(_PROMPTS):
        results.progress(f"decode at {_PROMPTS * length:,}: reading", done, _PROMPTS)
        late.read_on(ids)
    times: tuple[list[float], list[float]] = ([], [])
    for system in (early, late):
        system.write(steps)  # not measured
    for done in range(rounds):
        results.progress(f"decode at {length:,} and {_PROMPTS * length:,}", done, rounds)
        for taken, system in zip(times, (early, late), strict=True):
            taken.append(system.write(steps))
    found = {
        "turn": length,
        "turns": _PROMPTS,
        "early_s": times[0],
        "late_s": times[1],
        "early_rows": early.stats().kept_mean,
        "late_rows": late.stats().kept_mean,
    }
    results.add(figures={"flat": found})
