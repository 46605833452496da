"""A long prompt on a GPU under a small budget: time, memory, and what a full cache could hold."""

from __future__ import annotations

import torch

from minikv.cache.stats import POSITION_BYTES
from minikv.cli.bench import machine, models
from minikv.cli.bench.arguments import Arguments
from minikv.cli.bench.cached import Cached
from minikv.cli.bench.floors import Rates
from minikv.cli.bench.results import Results
from minikv.cli.bench.turns import spec_of
from minikv.models.llama import Llama


def measure(arguments: Arguments, device: torch.device, rates: Rates, results: Results) -> None:
    """The figure `prompt_Nk`: a prompt of N x 1,024 tokens, then an answer."""
    net = models.network(spec_of(arguments, device))
    (length,), steps = arguments.lengths(), arguments.steps or 512
    eviction, thousands = arguments.evictions()[-1], f"{length // 1024}k"
    cached = Cached(net, eviction)
    results.progress(f"{thousands} tokens: reading", 0, 0)
    machine.forget_peak(device)
    read = cached.read(models.prompt(length, net.config.vocab), steps)
    peak = machine.peak(device)
    results.progress(f"{thousands} tokens: writing", 0, 0)
    step = cached.write(steps)
    stats = cached.stats()
    cached.close()
    machine.settle(device)
    found = {
        "tokens": length,
        "budget": int(eviction.budget.value),
        "steps": steps,
        "read_s": read,
        "step_s": step,
        "weights": net.weight_bytes,
        "peak": peak,
        "held": stats.held_bytes,
        "full_would_hold": stats.full_bytes,
        "longest_full_prompt": _longest_full(net, stats.row_bytes),
    }
    results.add(figures={f"prompt_{thousands}": found})


def measure_peak(
    arguments: Arguments, device: torch.device, rates: Rates, results: Results
) -> None:
    """The figure `peak_32k`: what a prompt needs over the weights, beside the parts that it has to
    have, and the cache's own report beside the allocator's."""
    net = models.network(spec_of(arguments, device))
    (length,), cuda = arguments.lengths(), device.type == "cuda"
    cached = Cached(net, arguments.evictions()[-1])
    ids = models.prompt(length, net.config.vocab)
    cached.read(ids)  # what is made once, as compiled kernels, is no part of a prompt
    cached.close()
    machine.settle(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    machine.forget_peak(device)
    cached.read(ids)
    stats, peak, config, item = cached.stats(), machine.peak(device), net.config, net.dtype.itemsize
    after = torch.cuda.memory_allocated(device) if cuda else 0
    parts = {
        "residual": length * config.hidden * item,
        "one_layer_kv": length * config.kv_heads * stats.row_bytes,
        "mlp_chunk": min(net.rows, length) * 2 * config.mlp * item,
        "arena": stats.allocated_bytes,
    }
    found = {
        "tokens": length,
        "peak_over_weights": peak - before if cuda and peak is not None else None,
        "bound": sum(parts.values()),
        "parts": parts,
        "reported": stats.allocated_bytes,
        "allocator": after - before if cuda else None,
    }
    results.add(figures={"peak_32k": found})


def _longest_full(net: Llama, row_bytes: int) -> int | None:
    """The longest prompt, in whole thousands, that a full cache holds in the memory that is free
    beside the weights. None on a CPU, which promises memory that it does not have."""
    if net.device.type != "cuda":
        return None
    config, item = net.config, net.dtype.itemsize
    each = config.layers * config.kv_heads * (row_bytes + POSITION_BYTES) + config.hidden * item
    chunk = net.rows * (2 * config.mlp + 4 * config.hidden) * item
    free, _ = torch.cuda.mem_get_info(net.device)
    return min(models.POSITIONS, max(0, free - chunk) // each) // 1000 * 1000
