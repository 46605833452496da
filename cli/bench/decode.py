"""The time of a decode step after a prompt, compared with the full cache, transformers and the
least that the hardware allows."""

from __future__ import annotations

from dataclasses import replace

import torch

from minikv.cli.bench import models
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.cached import Cached
from minikv.cli.bench.floors import Rates, decode_floor, overhead
from minikv.cli.bench.results import Results, Row
from minikv.cli.bench.turns import Entry, Run

_WARM = 3  # steps before those that count: the cache goes to the device, one step is captured


def measure(arguments: Arguments, device: torch.device, rates: Rates, results: Results) -> None:
    """Measure steps after prompts of every length. Rows are added length by length."""
    run = Run(arguments, device, rates, results)
    try:
        for length in arguments.lengths():
            _measure(run, length)
    finally:
        run.close()


def _measure(run: Run, length: int) -> None:
    what, ids = f"decode {length:,}", run.prompt(length)
    kv_bytes: dict[Entry, float] = {}  # that a step reads
    reading: dict[str, float] = {}  # bytes a second, of each form of the weights
    with run.systems() as entries:
        every = list(entries)

        def read(entry: Entry) -> None:
            system = entry.system
            run.read(entry, ids, every)
            if isinstance(system, Cached) and system.eviction.decode != "none":
                entry.base = system.without_policy()
            system.write(_WARM)
            if isinstance(system, Cached):
                kv_bytes[entry] = system.step_kv_bytes()

        def write(entry: Entry) -> None:
            system = entry.system
            system.write(_WARM)
            seconds = system.write(run.steps)
            if entry.base is not None and isinstance(system, Cached):
                entry.base.copy(system)
                entry.base.write(_WARM)
                entry.base_times.append(entry.base.write(run.steps))
            entry.times.append(seconds)  # last: a turn counts when all of it was measured

        run.each(f"{what}: reading", entries, read)
        try:
            for number in range(run.repeat):
                if run.device.type == "cpu":
                    # The rate of reading these very weights, the best of all rounds: it depends on
                    # where they are in memory, and on what else the machine does.
                    for form, net in run.networks.items():
                        reading[form] = max(reading.get(form, 0.0), models.reading_rate(net))
                run.each(f"{what}: round {number + 1} of {run.repeat}", entries, write)
        finally:
            measured = sorted((e for e in every if e.times), key=lambda e: e.eviction is None)
            run.results.add(
                [_row(run, length, e, measured, kv_bytes.get(e, 0.0), reading) for e in measured]
            )


def _row(
    run: Run,
    length: int,
    entry: Entry,
    entries: list[Entry],
    kv_bytes: float,
    reading: dict[str, float],
) -> Row:
    row, system = run.row("decode", length, entry, entries), entry.system
    if not isinstance(system, Cached):
        return row
    evict = overhead(entry.times, entry.base_times) if entry.base_times else None
    if entry.base is not None and entry.base.captured != system.captured:
        which = "with" if entry.base.captured else "without"
        run.results.note(
            f"decode {length:,}, {entry.label}: steps {which} eviction were not captured in a "
            "graph, the others were: what eviction adds is not known"
        )
        evict = None
    weights = models.step_bytes(system.net)
    stream = max(run.rates.stream, reading.get(entry.weights, 0.0))
    return replace(
        row,
        floor_s=decode_floor(weights, kv_bytes, stream),
        evict_share=evict,
        step_bytes={"weights": weights, "kv": kv_bytes},
        captured=system.captured,
        read_bytes_s=stream,
    )
