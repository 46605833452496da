"""The figures of a GPU: kernels, and steps and prompts of Llama-3-8B's shape."""

from __future__ import annotations

import torch

from minikv.choice import Choice
from minikv.cli.bench import kernels, machine, models, shapes
from minikv.cli.bench.everything import FULL, OURS, Everything, Part

_CHECKED = ("h2o", "tova", "roco", "hashevict")  # step policies whose share of a step is a goal
_SHAPE = "llama-3-8b"


def _kernels(every: Everything) -> None:
    """Every kernel against its floor."""
    sizes = every.spec(_SHAPE).sizes or shapes.SHAPES[_SHAPE]
    operations = kernels.who(every.device, "torch" if every.small else "auto", sizes.head_dim)
    lengths = tuple(every.tokens(n) for n in (1024, 8192, 32_768))
    table = list(kernels.cases(sizes, torch.bfloat16, lengths))
    for done, case in enumerate(table):
        every.progress(f"kernels: {case.name}, {case.case}", done, len(table))
        if kernels.missing(case, operations):
            every.notes.append(f"{case.name}: not in this version")
            continue
        try:
            every.timings.append(
                kernels.timed(case, operations, every.device, every.rates, every.repeat)
            )
        except torch.OutOfMemoryError:
            every.notes.append(f"{case.name}, {case.case}: out of memory")
    longest = f"{lengths[-1]:,}"
    mine = [t for t in every.timings if t.name == "ragged attention" and longest in t.case]
    even = next((t for t in mine if t.case == f"{longest} rows"), None)
    odd = next((t for t in mine if "most" in t.case), None)
    every.want(
        "decode attention at 32k rows, of copy", even.share if even else None, 0.80, 0.65, unit="%"
    )
    every.want(
        "uneven heads (4x) over even ones",
        odd.seconds / even.seconds if odd and even else None, 1.05, 1.15, at_least=False,
    )  # fmt: skip


def _step(every: Everything) -> None:
    """A whole step at 1k, beside transformers."""
    bench = every.bench(_SHAPE, (FULL, OURS), peer=True)
    try:
        bench.decode(every.tokens(1024))
    finally:
        every.taken(bench)
    share = every.figure("share", _SHAPE, "decode", "full", every.tokens(1024))
    every.want("decode step at 1k, of bytes over copy", share, 0.85, 0.75, unit="%")


def _eviction(every: Everything) -> None:
    """What step policies add to a step."""
    budgets = [str(every.tokens(n)) for n in (1024, 4096)]
    pairs = [FULL, *(("adakv", step, budget) for step in _CHECKED for budget in budgets)]
    bench = every.bench(_SHAPE, pairs)
    try:
        bench.decode(every.tokens(8192))
    finally:
        rows = every.taken(bench)
    for row in rows:
        if row.decode in _CHECKED:
            every.want(
                f"eviction per step, {row.decode} {row.budget}", row.evict,
                0.015 if row.decode == "hashevict" else 0.01, 0.03, at_least=False, unit="%",
            )  # fmt: skip


def _scoring(every: Everything) -> None:
    """Prompts at 8k and 32k, and what judging their rows adds."""
    judges = (("snapkv", 0.01, 0.02), ("nacl", 0.07, 0.10), ("h2o", 0.35, 0.50),
              ("streaming", 0.01, 0.02))  # fmt: skip
    names = {"snapkv": "window", "nacl": "NaCl's proxies", "h2o": "all column sums",
             "streaming": "selection and compaction alone"}  # fmt: skip
    budget = str(every.tokens(1024))
    bench = every.bench(_SHAPE, [FULL, *((name, "none", budget) for name, _, _ in judges)])
    try:
        for length in (8192, 32_768):
            bench.prefill(every.tokens(length))
    finally:
        every.taken(bench)
    for length in (8192, 32_768):
        share = every.figure("share", _SHAPE, "prefill", "full", every.tokens(length))
        every.want(f"prefill at {length:,}, of its floor", share, 0.80, 0.70, unit="%")
    for name, goal, first in judges:
        added = every.figure("evict", _SHAPE, "prefill", name, every.tokens(32_768))
        every.want(
            f"scoring at 32k: {names[name]}", added, goal, first, at_least=False, unit="%"
        )


def _peak(every: Everything) -> None:
    """What a prompt of 32k needs over the weights, beside the parts that it has to have."""
    net = models.network(every.spec(_SHAPE))
    cached = models.Cached(net, Choice.read("adakv", "roco", str(every.tokens(1024))))
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
        "tokens": tokens, "peak_over_weights": measured, "bound": sum(parts.values()),
        "parts": parts, "reported": stats.allocated_bytes, "allocator": held,
    }  # fmt: skip
    every.want(
        "peak over weights at 32k, over its parts",
        None if measured is None else measured / sum(parts.values()), 1.05, at_least=False,
    )  # fmt: skip
    every.want(
        "cache reported, off the allocator's figure by",
        None if not held else abs(stats.allocated_bytes - held) / held, 0.01, at_least=False,
        unit="%",
    )  # fmt: skip


def _long(every: Everything, thousands: int) -> dict[str, object]:
    """A prompt of so many thousand (1,024) tokens and then an answer at budget 1,024."""
    net = models.network(every.spec(_SHAPE))
    budget, steps = str(every.tokens(1024)), 4 if every.small else 512
    cached = models.Cached(net, Choice.read("adakv", "roco", budget))
    tokens = every.tokens(1024 * thousands)
    every.progress(f"{thousands}k tokens: reads", 0, 0)
    machine.forget_peak(every.device)
    read = cached.read(models.prompt(tokens, net.config.vocab), steps)
    highest = machine.peak(every.device)
    every.progress(f"{thousands}k tokens: writes", 0, 0)
    step = cached.write(steps)
    stats = cached.stats()
    cached.close()
    found: dict[str, object] = {
        "tokens": tokens, "budget": int(budget), "steps": steps, "read_s": read, "step_s": step,
        "weights": net.weight_bytes, "peak": highest, "held": stats.held_bytes,
        "full_would_hold": stats.full_bytes,
    }  # fmt: skip
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


PARTS: tuple[Part, ...] = (
    Part("decode step", _step),
    Part("kernels", _kernels),
    Part("eviction", _eviction),
    Part("scoring", _scoring),
    Part("peak", _peak),
    Part("128k tokens", _long_128k),
    Part("512k tokens", _long_512k, slow=True),
)
