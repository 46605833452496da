"""The time to read a prompt, compared with the full cache, transformers and the least that the
hardware allows."""

from __future__ import annotations

from dataclasses import replace

import torch

from minikv.cli.bench import machine
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.floors import Rates, overhead, prefill_floor
from minikv.cli.bench.results import Results, Row
from minikv.cli.bench.turns import Entry, Run

_WARM = 512  # tokens of a prompt that is not measured, on a CPU; a GPU is warmed with a whole one


def measure(arguments: Arguments, device: torch.device, rates: Rates, results: Results) -> None:
    """Measure prompts of every length, each in a new conversation. Adds rows length by length."""
    run = Run(arguments, device, rates, results)
    try:
        for length in arguments.lengths():
            _measure(run, length)
    finally:
        run.close()


def _measure(run: Run, length: int) -> None:
    what, ids = f"prefill {length:,}", run.prompt(length)
    with run.systems() as entries:
        every = list(entries)

        def warm(entry: Entry) -> None:
            entry.system.read(ids if run.device.type == "cuda" else ids[:_WARM])
            entry.close()

        def read(entry: Entry) -> None:
            entry.times.append(run.read(entry, ids))
            entry.close()

        run.each(f"{what}: warming up", entries, warm)
        try:
            for number in range(run.repeat):
                run.each(f"{what}: round {number + 1} of {run.repeat}", entries, read)
        finally:
            measured = sorted((e for e in every if e.times), key=lambda e: e.eviction is None)
            if measured:
                rate = _attention_rate(run, length)
                run.results.add([_row(run, length, e, measured, rate) for e in measured])


def _row(run: Run, length: int, entry: Entry, entries: list[Entry], attention: float) -> Row:
    row, own = run.row("prefill", length, entry, entries), entry.eviction
    if own is None:
        return row
    full = next((e for e in entries if e.full and e.weights == entry.weights), None)
    return replace(
        row,
        floor_s=prefill_floor(run.sizes, length, run.rates.product(run.dtype), attention),
        evict_share=overhead(entry.times, full.times) if full and own.evicts else None,
    )


def _attention_rate(run: Run, length: int) -> float:
    """Flops a second that attention could have: on a GPU those of torch's own at this length; on a
    CPU, whose kernels are faster than torch's, those of a large product."""
    if run.device.type != "cuda":
        return run.rates.product(run.dtype)
    if length not in run.attention:
        sizes, dtype = run.sizes, getattr(torch, run.dtype)
        run.attention[length] = machine.attention_rate(
            run.device, dtype, sizes.heads, sizes.kv_heads, sizes.head_dim, length
        )
    return run.attention[length]
