"""The figures of a GPU: kernels, and steps and prompts of Llama-3-8B's shape."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minikv.cli.bench import kernels, machine, models, run, shapes
from minikv.cli.bench.everything import FULL, OURS, Everything, Part
from minikv.cli.bench.floors import Goal

_CHECKED = ("h2o", "tova", "roco", "hashevict")  # step policies whose share of a step is a goal
_PAIRS = tuple((step, budget) for step in _CHECKED for budget in (1024, 4096))
_PROMPTS = (8192, 32_768)
_JUDGES = (
    ("snapkv", "window", 0.01, 0.02),
    ("nacl", "NaCl's proxies", 0.07, 0.10),
    ("h2o", "all column sums", 0.35, 0.50),
    ("streaming", "selection and compaction alone", 0.01, 0.02),
)
"""Prompt policies: what they stand for, and what they may add to a prompt: goal, first."""

_SHAPE = "llama-3-8b"
_ATTENTION = "decode attention at 32k rows, of copy"
_UNEVEN = "uneven heads (4x) over even ones"
_STEP = "decode step at 1k, of bytes over copy"
_PEAK = "peak over weights at 32k, over its parts"
_HELD = "cache reported, off the allocator's figure by"


def _kernels(every: Everything) -> None:
    """Every kernel against its floor."""
    sizes = every.spec(_SHAPE).sizes or shapes.SHAPES[_SHAPE]
    operations = kernels.who(every.device, "torch" if every.small else "auto", sizes.head_dim)
    lengths = tuple(every.tokens(n) for n in (1024, 8192, 32_768))
    table = list(kernels.cases(sizes, torch.bfloat16, lengths))
    for done, case in enumerate(table):
        every.progress(f"kernels: {case.name}, {case.case}", done, len(table))
        if every.deadline.left <= 0:
            every.notes.append(f"kernels: {done} of {len(table)} cases, for time")
            break
        if kernels.missing(case, operations):
            every.notes.append(f"{case.name}: not in this version")
            continue
        try:
            every.timings.append(
                kernels.timed(case, operations, every.device, every.rates, every.repeat)
            )
        except Exception as error:  # one that does not compile says nothing about the others
            if not machine.healthy(every.device):
                raise
            every.notes.append(f"{case.name}, {case.case}: {run.one_line(error)}")
    longest = f"{lengths[-1]:,}"
    mine = [t for t in every.timings if t.name == "ragged attention" and longest in t.case]
    even = next((t for t in mine if t.case == f"{longest} rows"), None)
    odd = next((t for t in mine if "most" in t.case), None)
    every.reach(_ATTENTION, even.share if even else None)
    every.reach(_UNEVEN, odd.seconds / even.seconds if odd and even else None)


def _step(every: Everything) -> None:
    """A whole step at 1k, beside transformers."""
    bench = every.bench(_SHAPE, (FULL, OURS), peer=True)
    try:
        bench.decode(every.tokens(1024))
    finally:
        every.taken(bench)
    every.reach(_STEP, every.figure("share", _SHAPE, "decode", "full", every.tokens(1024)))


def _eviction(every: Everything) -> None:
    """What step policies add to a step."""
    pairs = [FULL, *(("adakv", step, str(every.tokens(n))) for step, n in _PAIRS)]
    bench = every.bench(_SHAPE, pairs)
    rows = bench.rows
    try:
        bench.decode(every.tokens(8192))
    finally:
        every.taken(bench)
        for step, n in _PAIRS:
            mine = (row for row in rows if (row.decode, row.budget) == (step, str(every.tokens(n))))
            row = next(mine, None)
            every.reach(_evicts(step, n), row.evict if row else None)


def _evicts(step: str, budget: int) -> str:
    return f"eviction per step, {step} {budget}"


def _scoring(every: Everything) -> None:
    """Prompts at 8k and 32k, and what judging their rows adds."""
    budget = str(every.tokens(1024))
    bench = every.bench(_SHAPE, [FULL, *((name, "none", budget) for name, *_ in _JUDGES)])
    try:
        for length in _PROMPTS:
            bench.prefill(every.tokens(length))
    finally:
        every.taken(bench)
        for length in _PROMPTS:
            share = every.figure("share", _SHAPE, "prefill", "full", every.tokens(length))
            every.reach(_prompt(length), share)
        for name, what, *_ in _JUDGES:
            added = every.figure("evict", _SHAPE, "prefill", name, every.tokens(_PROMPTS[-1]))
            every.reach(f"scoring at 32k: {what}", added)


def _prompt(length: int) -> str:
    return f"prefill at {length:,}, of its floor"


def _peak(every: Everything) -> None:
    """What a prompt of 32k needs over the weights, beside the parts that it has to have."""
    net = models.network(every.spec(_SHAPE))
    cached = every.cached(net, ("adakv", "roco", str(every.tokens(1024))))
    tokens, c = every.tokens(32_768), net.config
    ids = models.prompt(tokens, c.vocab)
    cached.read(ids)  # what is made once, as compiled kernels, is no part of a prompt
    cached.close()
    models.settle(every.device)
    before = machine.allocated(every.device)
    machine.forget_peak(every.device)
    cached.read(ids)
    stats, highest = cached.stats(), machine.peak(every.device)
    after = machine.allocated(every.device)
    item = net.dtype.itemsize
    parts = {
        "residual": tokens * c.hidden * item,
        "one_layer_kv": tokens * c.kv_heads * stats.row_bytes,
        "mlp_chunk": min(net.rows, tokens) * 2 * c.mlp * item,
        "arena": stats.allocated_bytes,
    }
    measured = None if highest is None or before is None else highest - before
    held = None if after is None or before is None else after - before
    every.figures["peak_32k"] = {
        "tokens": tokens,
        "peak_over_weights": measured,
        "bound": sum(parts.values()),
        "parts": parts,
        "reported": stats.allocated_bytes,
        "allocator": held,
    }
    none = "" if measured is not None else "no allocator that counts"
    every.reach(_PEAK, None if measured is None else measured / sum(parts.values()), none)
    every.reach(_HELD, abs(stats.allocated_bytes - held) / held if held else None, none)


def _long(every: Everything, thousands: int) -> dict[str, object]:
    """A prompt of so many thousand (1,024) tokens and then an answer at budget 1,024."""
    net = models.network(every.spec(_SHAPE))
    budget, steps = str(every.tokens(1024)), 4 if every.small else 512
    cached = every.cached(net, ("adakv", "roco", budget))
    tokens = every.tokens(1024 * thousands)
    every.progress(f"{thousands}k tokens: reads", 0, 0)
    machine.forget_peak(every.device)
    read = cached.read(models.prompt(tokens, net.config.vocab), steps)
    every.has_read(_SHAPE, tokens, read)
    highest = machine.peak(every.device)
    every.progress(f"{thousands}k tokens: writes", 0, 0)
    step = cached.write(steps)
    stats = cached.stats()
    cached.close()
    found: dict[str, object] = {
        "tokens": tokens,
        "budget": int(budget),
        "steps": steps,
        "read_s": read,
        "step_s": step,
        "weights": net.weight_bytes,
        "peak": highest,
        "held": stats.held_bytes,
        "full_would_hold": stats.full_bytes,
    }
    every.figures[f"prompt_{thousands}k"] = found
    return found


def _long_128k(every: Everything) -> None:
    """128k tokens, beside the longest prompt that a full cache holds."""
    found = _long(every, 128)
    every.progress("the longest prompt that a full cache holds", 0, 0)
    models.settle(every.device)
    net = models.network(every.spec(_SHAPE))
    found["longest_full_prompt"] = models.longest(net, models.POSITIONS)


def _long_512k(every: Everything) -> None:
    """512k tokens."""
    _long(every, 512)


def _reads(length: int, times: int) -> Callable[[Everything], float]:
    """What a part costs that reads a prompt so often."""
    return lambda every: times * every.reading(_SHAPE, length)


def _most(name: str, goal: float, first: float, unit: str = "%") -> Goal:
    """A figure that should be small."""
    return Goal(name, None, goal, first, False, unit)


PARTS: tuple[Part, ...] = (
    Part("decode step", _step, (Goal(_STEP, None, 0.85, 0.75, unit="%"),), cost=_reads(1024, 2)),
    Part(
        "kernels",
        _kernels,
        (Goal(_ATTENTION, None, 0.80, 0.65, unit="%"), _most(_UNEVEN, 1.05, 1.15, "x")),
    ),
    Part(
        "eviction",
        _eviction,
        tuple(
            _most(_evicts(step, n), 0.015 if step == "hashevict" else 0.01, 0.03)
            for step, n in _PAIRS
        ),
        cost=_reads(8192, 2),
    ),
    Part(
        "scoring",
        _scoring,
        (
            *(Goal(_prompt(length), None, 0.80, 0.70, unit="%") for length in _PROMPTS),
            *(_most(f"scoring at 32k: {what}", goal, first) for _, what, goal, first in _JUDGES),
        ),
        cost=_reads(8192, 4),
    ),
    Part(
        "peak",
        _peak,
        (Goal(_PEAK, None, 1.05, at_least=False), Goal(_HELD, None, 0.01, None, False, "%")),
        cost=_reads(32_768, 2),
    ),
    Part("128k tokens", _long_128k, cost=_reads(128 << 10, 1)),
    Part("512k tokens", _long_512k, cost=_reads(512 << 10, 1)),
)
