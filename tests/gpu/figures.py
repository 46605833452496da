"""The figures of minikv on a GPU, and prompts by FlashAttention beside cuDNN.

    python tests/gpu/figures.py --json FILE [--seconds N] [--items NAME ...] [--second]
    TRITON_INTERPRET=1 python tests/gpu/figures.py --device cpu --small --json FILE
                                                                         tries it without a GPU

The network has the sizes of Llama 3 8B and random weights, in bfloat16; answers are greedy. One
process measures, so the weights are made once. Each item has an estimate, and is left out if there
is too little time for it. FILE is written after each. An item that hangs, or after which the GPU
answers no more, ends the process; another one then measures the rest.

Variants are measured in turns: in each of three rounds, every one of them writes 30 tokens. Their
medians are compared. The floor of a step is the bytes of weights, keys and values that it reads,
over the rate of a plain copy on this card. Seconds on the device are those between two events;
`wall` is the host's clock.
"""

# ruff: noqa: E402 (where the package is has to be found first)

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from plain_tree import linked

linked()
if os.environ.get("TRITON_INTERPRET") == "1":
    sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
    import quick_interpreter

    quick_interpreter.install()

import facts
import single_kernels

from minikv.cache.plan import peak
from minikv.cache.tier import Tier
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.fitting import Machine
from minikv.cli.bench import machine, networks
from minikv.cli.bench.systems import Cached, Transformers
from minikv.engine.capture import Eager, captured
from minikv.engine.decode_loop import DecodeLoop
from minikv.kernels import dispatch, rows_attention
from minikv.kernels.attention import plain as attention
from minikv.kernels.attention.cudnn import make_plans, planned
from minikv.kernels.dispatch import Kernels, on_gpu
from minikv.loader import shape_of, workspace
from minikv.models.llama import Llama

ROUNDS, STEPS, WARM = 3, 30, 6
_DTYPE = torch.bfloat16
_FEW = 1, 1, 1  # where nothing is measured
ROOM = 512  # steps that fit behind a prompt without eviction
CACHE = 128 << 20  # bytes; twice a GPU's cache, as inputs must not come from there


def flash() -> Kernels:
    """Prompts are read with FlashAttention 2, whatever their length."""
    found = on_gpu()
    found.last_rows_attention = attention.last_rows_attention  # type: ignore[method-assign]
    return found


@dataclass(frozen=True, slots=True)
class Item:
    """Figures that are measured together. seconds: about how long that takes."""

    name: str
    seconds: float
    run: Callable[[Bench], None]


@dataclass(eq=False, slots=True)
class Series:
    """A cache behind a prompt, whose steps are measured. `read_s`: of the prompt; `times` and
    `walls`: seconds of a step, by round."""

    case: str
    cached: Cached
    ops: Any
    read_s: float
    facts: dict[str, Any]
    times: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)

    def write(self, steps: int) -> None:
        """One round."""
        self.cached.net.use(self.ops)  # uncaptured steps look it up
        began = perf_counter()
        self.times.append(self.cached.write(steps))
        self.walls.append((perf_counter() - began) / steps)

    @property
    def ms(self) -> float:
        return median(self.times) * 1e3


class Bench:
    """What the items share, and what they found."""

    def __init__(self, path: Path, device: str, *, small: bool, profile: Path | None) -> None:
        self.path, self.device, self.small = path, torch.device(device), small
        self.profile = profile
        self.gpu = self.device.type == "cuda"
        self.rounds, self.steps, self.warm = _FEW if small else (ROUNDS, STEPS, WARM)
        self.sizes = networks.SHAPES["tiny" if small else "llama-3-8b"]
        head_dim = self.sizes.head_dim
        self.ops = dispatch.choose(self.device, "auto" if self.gpu else "torch", head_dim, _DTYPE)[
            0
        ]
        self.found: dict[str, Any] = {"facts": {}, "items": {}, "rows": [], "rates": {}}
        if path.exists():
            self.found = json.loads(path.read_text())
        self.item = ""

    def variant(self, make: Callable[[], Kernels]) -> Kernels:
        """Other kernels, which read prompts in chunks of the same length; without a GPU the same
        ones."""
        made = make() if self.gpu else self.ops
        made.prompt_rows = self.ops.prompt_rows
        return made

    def save(self) -> None:
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")

    def row(self, case: str, **figures: Any) -> None:
        """Note and print a row of figures."""
        self.found["rows"].append({"item": self.item, "case": case, **figures})
        self.save()
        print(f"  {line(self.found['rows'][-1])}", flush=True)

    @cached_property
    def net(self) -> Llama:
        return networks.network(networks.Spec(self.sizes, None, "bfloat16", str(self.device)))

    @cached_property
    def copied(self) -> float:
        """Bytes a second of a copy; kept for a process that goes on after this one."""
        known = self.found["rates"]
        if "copy" not in known:
            known["copy"] = machine.copy_rate(self.device, (1 if self.small else 2048) << 20, 5)
        return float(known["copy"])

    def tokens(self, thousands: float) -> int:
        """So many thousands of tokens; a few where nothing is measured."""
        return 96 + int(thousands) if self.small else int(thousands * 1024)

    def budget(self, rows: int) -> str:
        return str(40 + rows // 512 if self.small else rows)

    def memory(self) -> dict[str, int]:
        """Bytes of the allocator."""
        if not self.gpu:
            return {"allocated": 0, "peak": 0, "reserved": 0}
        return {
            "allocated": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }

    def start(
        self,
        policy: str,
        decode: str,
        rows: int,
        tokens: int,
        *,
        name: str = "",
        ops: Any = None,
        net: Llama | None = None,
        graph: bool = True,
        warm: bool = True,
    ) -> Series:
        """Read a prompt, and write some tokens."""
        net, ops = net or self.net, ops or self.ops
        eviction = EvictionConfig.read(policy, decode, self.budget(rows))
        one = Cached(net, eviction)
        one.engine.kv.use(ops)
        if not graph:
            one.engine._loop = None
        elif not self.gpu:
            one.engine._loop = DecodeLoop(net, one.engine.kv, Eager())
        net.use(ops)
        machine.settle(self.device)
        before = self.memory()["allocated"]
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        ids = networks.prompt(tokens, net.config.vocab)
        read_s = one.read(ids, ROOM)
        memory, stats = self.memory(), one.stats()
        planned = self._planned(eviction, net, tokens)
        what = policy if policy == "full" else f"{policy} {self.budget(rows)} + {decode}"
        told: dict[str, Any] = {
            "tokens": tokens,
            "read_s": read_s,
            "tok_s": tokens / read_s,
            "evict_ms": one.engine.kv.last_prompt.evict_s * 1e3,
            "memory": memory,
            "peak_over_before": memory["peak"] - before,
            "planned_over_weights": planned,
            "cache_allocated": memory["allocated"] - before,
            "cache_reported": stats.allocated_bytes,
        }
        if warm:
            one.write(self.warm)
        return Series(f"{what} at {tokens:,} {name}".strip(), one, ops, read_s, told)

    def _planned(self, eviction: EvictionConfig, net: Llama, tokens: int) -> int:
        """Bytes beside the weights, as `minikv plan` has them."""
        machine = Machine(
            shape_of(net.config), net.dtype, net.dtype, lambda _: 0, gpu=True, ops=on_gpu()
        )
        found = peak(*machine.plan(eviction, tokens, ROOM))
        work = workspace(net.config, tokens, net.dtype.itemsize, cuda=True)
        return max(found.reading, found.writing) + work

    def compare(self, series: Sequence[Series]) -> None:
        """Write tokens in turns, and note a row for each."""
        for _ in range(self.rounds):
            for one in series:
                one.write(self.steps)
        for one in series:
            self.step_row(one)

    def step_row(self, one: Series, **more: Any) -> None:
        cached = one.cached
        floor = networks.step_bytes(cached.net) + cached.step_kv_bytes()
        floor /= self.copied
        self.row(
            one.case,
            **one.facts,
            step_ms=one.ms,
            rounds_ms=[t * 1e3 for t in one.times],
            wall_ms=median(one.walls) * 1e3,
            floor_ms=floor * 1e3,
            share=floor * 1e3 / one.ms,
            captured=cached.engine.captured,
            notices=cached.engine.notices,
            reserved=self.memory()["reserved"],
            **more,
        )

    def close(self, *series: Series) -> None:
        for one in series:
            one.cached.close()
            one.cached.engine._loop = None  # with the memory of its graphs
        machine.settle(self.device)

    def us(self, run: Callable[[int], object], calls: int, rounds: int = 7) -> float:
        """Microseconds of a call, of so many different ones in a graph."""

        def body() -> None:
            for i in range(calls):
                run(i)

        body()
        if self.gpu:
            torch.cuda.synchronize()
            stream = torch.cuda.Stream(self.device)
            with torch.cuda.stream(stream):
                body()
            torch.cuda.synchronize()
            body = captured(body, stream)
        clock = machine.Clock(self.device)
        return median(clock.each(body, 1 if self.small else rounds)) / calls * 1e6

    def us_row(self, case: str, run: Callable[[int], object], calls: int, nbytes: int = 0) -> None:
        """A row of `us`, or of why it failed. nbytes: that a call moves."""
        try:
            us = self.us(run, calls)
        except RuntimeError as error:
            self.row(case, error=str(error)[:200])
            return
        self.row(case, us=us, **({"gb_s": nbytes / us / 1e3} if nbytes else {}))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def profiled(self, work: Callable[[], object], times: int) -> dict[str, Any]:
        """Launches, and the time in which a kernel runs, of one of `times` pieces of `work`."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        kind = ProfilerActivity.CUDA if self.gpu else ProfilerActivity.CPU
        with profile(activities=[kind]) as told:
            work()
            if self.gpu:
                torch.cuda.synchronize()
        table: dict[str, list[float]] = {}
        for event in told.events():
            if self.gpu and event.device_type != DeviceType.CUDA:
                continue  # a call on the host
            spent = float(getattr(event, "device_time", 0.0) or getattr(event, "cpu_time", 0.0))
            entry = table.setdefault(event.name[:90], [0.0, 0.0])
            entry[0] += 1 / times
            entry[1] += spent / times
        rows = sorted(table.items(), key=lambda item: -item[1][1])
        if self.profile is not None:
            with self.profile.open("a") as file:
                file.write(f"{self.item}\n")
                for name, (n, us) in rows[:60]:
                    file.write(f"  {us:9.1f} us {n:8.2f} x  {name}\n")
        return {
            "busy_us": sum(us for _, us in table.values()),
            "launches": sum(n for n, _ in table.values()),
            "kernels": [{"name": name, "times": n, "us": us} for name, (n, us) in rows[:25]],
        }


def line(row: dict[str, Any]) -> str:
    """A row of figures, short."""
    said = [f"{row['case']:44}"]
    for key, unit, digits in (
        ("tok_s", "tok/s", 0),
        ("step_ms", "ms", 3),
        ("share", "of floor", 3),
        ("us", "us", 1),
        ("tflops", "TFLOP/s", 0),
        ("gb_s", "GB/s", 0),
        ("added_us", "us more", 0),
        ("added", "of the step", 4),
        ("evict_share", "of the prompt", 4),
        ("evict_us", "us a layer to evict", 0),
        ("first_s", "s", 4),
        ("launches", "launches", 0),
        ("busy_us", "us busy", 0),
    ):
        if isinstance(row.get(key), int | float):
            said.append(f"{row[key]:,.{digits}f} {unit}")
    said += [f"{key} {row[key]}" for key in ("captured", "same", "off", "error") if key in row]
    if row.get("notices"):
        said.append(str(row["notices"]))
    return "  ".join(said)


# -- 1 ---------------------------------------------------------------------------------------------


def ceilings(bench: Bench) -> None:
    """Rates of the card; and the attention of a prompt by flash and by cuDNN."""
    began = perf_counter()
    if bench.gpu:
        make_plans(bench.normal(8, 4, 0, 128))
        torch.cuda.synchronize()
    bench.row("cuDNN's plans, and its start", first_s=perf_counter() - began)
    bench.row("copy", gb_s=bench.copied / 1e9)
    side = 64 if bench.small else 8192
    a, b = (bench.normal(side, side) for _ in range(2))
    seconds = bench.us(lambda i: torch.mm(a, b), 2) / 1e6
    bench.row("product, bfloat16", tflops=2 * side**3 / seconds / 1e12)
    words = torch.ones((1 if bench.small else 1024) << 17, dtype=torch.int64, device=bench.device)
    bench.us_row("read only", lambda i: torch.sum(words), 2, words.nbytes)
    heads, group, size = 8, 4, 128
    unit = 16 if bench.small else 2048
    for t, n, causal in (
        (unit, unit, True),
        (unit, 4 * unit, True),
        (unit, 16 * unit, True),
        (4 * unit, 4 * unit, True),
        (unit, unit, False),
        (unit, 4 * unit, False),
        (unit, 16 * unit, False),
        (4 * unit, 4 * unit, False),
    ):
        q = bench.normal(t, heads, group, size).permute(1, 2, 0, 3)
        k, v = (bench.normal(heads, n, size) for _ in range(2))
        pairs = t * (n - t) + t * (t + 1) // 2 if causal else t * n
        flops = 4 * heads * group * size * pairs
        name = f"{t:,} x {n:,}{' causal' if causal else ''}"

        def flash(i: int, q: Tensor = q, k: Tensor = k, v: Tensor = v, c: bool = causal) -> Any:
            if not bench.gpu:
                return rows_attention(q, k, v, causal=c)
            return attention.cuda_attention(q, k, v, causal=c)

        us = bench.us(flash, 2, 5)
        bench.row(f"flash {name}", us=us, tflops=flops / us / 1e6)
        if (causal and t != n) or not bench.gpu:  # cuDNN's mask begins in the upper left corner
            continue
        want = flash(0)
        try:
            began = perf_counter()
            got = planned(q, k, v, causal=causal)
            torch.cuda.synchronize()
            first = perf_counter() - began
            us = bench.us(lambda i, q=q, k=k, v=v, c=causal: planned(q, k, v, causal=c), 2, 5)
            bench.row(
                f"cuDNN {name}",
                us=us,
                tflops=flops / us / 1e6,
                first_s=first,
                off=off(got[0], want[0]),
                lse_off=float((got[1] - want[1]).abs().max()),
            )
        except RuntimeError as error:
            bench.row(f"cuDNN {name}", error=str(error)[:200])


def off(got: Tensor, want: Tensor) -> float:
    """The relative difference."""
    return float((got.double() - want.double()).norm() / want.double().norm())


# -- 2, 3, 7 ---------------------------------------------------------------------------------------


def steps(bench: Bench, thousands: float) -> None:
    """Prompts, and steps of the full cache and of adakv with roco."""
    tokens = bench.tokens(thousands)
    if thousands == 8:
        bench.close(bench.start("full", "none", 512, tokens))  # compiles; the clocks rise
    series = [
        bench.start("full", "none", 512, tokens),
        bench.start("adakv", "roco", 512, tokens),
        bench.start("adakv", "roco", 2048, tokens),
    ]
    bench.compare(series)
    if thousands == 8:
        for one in series[:2]:
            told = bench.profiled(lambda one=one: one.cached.write(4), 4)
            bench.row(f"kernels of {one.case}", **told)
    bench.close(*series)
    if thousands == 8:
        bench.row("adakv 512 + roco", same=same_tokens(bench, tokens))


def same_tokens(bench: Bench, tokens: int) -> str:
    """Whether a graph writes what its calls write uncaptured."""
    found = []
    for graph in (True, False):
        one = bench.start("adakv", "roco", 512, tokens, warm=False)
        engine = one.cached.engine
        if not graph:
            engine._loop = DecodeLoop(bench.net, engine.kv, Eager())
        found.append(written(one.cached, 2 if bench.small else 24))
        bench.close(one)
    first = next((i for i, (a, b) in enumerate(zip(*found, strict=True)) if a != b), None)
    return f"all {len(found[0])} tokens" if first is None else f"{first} tokens"


def written(cached: Cached, count: int) -> list[int]:
    """The next tokens."""
    found = []
    for _ in range(count):
        cached.write(1)
        found.append(cached._token)
    return found


def long(bench: Bench) -> None:
    """128k tokens: adakv first, then the full cache, one at a time."""
    for policy, decode in (("adakv", "roco"), ("full", "none")):
        one = bench.start(policy, decode, 2048, bench.tokens(128))
        bench.compare([one])
        bench.close(one)


# -- 5 ---------------------------------------------------------------------------------------------


def copy(to: Cached, of: Cached) -> None:
    """`to` holds the tokens that `of` holds, without what its policy notes about them."""
    held, kv = of.engine.kv.snapshot(), to.engine.kv
    columns = {name: held.columns[name] for name in kv.arena.columns}
    kv.restore(replace(held, columns=columns), to.eviction.rules())


def evicting(bench: Bench) -> None:
    """What a step policy adds to a step, over a cache that holds the same rows."""
    steps = "roco h2o hashevict streaming tova scissorhands l2 random rkv".split()
    every = [*((name, 1024) for name in steps), ("tova", 4096)]
    for decode, rows in every[:: 4 if bench.small else 1]:
        one = bench.start("adakv", decode, rows, bench.tokens(8))
        base = Cached(bench.net, EvictionConfig.read("full", "none"))
        base.engine.kv.use(bench.ops)
        bases = []
        for _ in range(bench.rounds):
            one.cached.write(bench.warm)  # the copy has moved the cache: steps are recorded again
            one.write(bench.steps)
            copy(base, one.cached)
            bench.net.use(bench.ops)
            base.write(bench.warm)
            bases.append(base.write(bench.steps))
        added = median(a - b for a, b in zip(one.times, bases, strict=True))
        more = {"base_ms": median(bases) * 1e3, "base_captured": base.engine.captured}
        bench.step_row(one, added_us=added * 1e6, added=added / median(bases), **more)
        base.close()
        base.engine._loop = None
        bench.close(one)


# -- 6 ---------------------------------------------------------------------------------------------


def ends(bench: Bench) -> None:
    """What eviction after a prompt takes, by the cache's own events."""
    layers = bench.sizes.layers
    for thousands in (8,) if bench.small else (8, 32):
        for policy in ("adakv", "snapkv", "h2o"):
            best: Series | None = None
            for _ in range(1 if bench.small or thousands > 8 else 2):
                one = bench.start(policy, "none", 512, bench.tokens(thousands), warm=False)
                bench.close(one)
                if best is None or one.facts["evict_ms"] < best.facts["evict_ms"]:
                    best = one
            assert best is not None
            evict_s = best.facts["evict_ms"] / 1e3
            bench.row(
                best.case,
                **best.facts,
                evict_us=evict_s / layers * 1e6,
                evict_share=evict_s / best.read_s,
            )
    one = bench.start("adakv", "none", 512, bench.tokens(8), warm=False)
    ids = networks.prompt(bench.tokens(8), bench.sizes.vocab)
    told = bench.profiled(lambda: one.cached.read(ids, ROOM), 1)
    bench.row(f"kernels of a prompt, {one.case}", **told)
    bench.close(one)


# -- 8 ---------------------------------------------------------------------------------------------


def memory(bench: Bench) -> None:
    """What stays reserved when a step is captured again and again."""
    one = bench.start("adakv", "roco", 512, bench.tokens(8))
    ids, reserved = networks.prompt(32, bench.sizes.vocab), [bench.memory()["reserved"]]
    recording, recorded = [], [0]
    loop = one.cached.engine._loop
    if loop is not None:  # how often a step is recorded
        record = loop._capture.record

        def counted(body: Callable[[], None]) -> Callable[[], None]:
            recorded[0] += 1
            return record(body)

        loop._capture.record = counted  # type: ignore[method-assign]
    for _ in range(2 if bench.small else 10):
        one.cached.read_on(ids, ROOM)
        first, second = (one.cached.write(bench.warm) * bench.warm for _ in range(2))
        recording.append(first - second)
        reserved.append(bench.memory()["reserved"])
    captured_last = one.cached.engine.captured
    bench.close(one)
    full = bench.start("full", "none", 512, bench.tokens(8))
    grown = [bench.memory()["reserved"]]
    for _ in range(2 if bench.small else 10):
        full.cached.read_on(ids, ROOM)
        full.cached.write(bench.warm)
        grown.append(bench.memory()["reserved"])
    bench.close(full)
    bench.row(
        "reserved after further turns",
        reserved=reserved,
        full_reserved=grown,
        captured=captured_last,
        recording_s=median(recording),
        recorded=recorded[0],
        grown_mib=[(r[-1] - r[1]) / 2**20 for r in (reserved, grown)],
    )


# -- 9 ---------------------------------------------------------------------------------------------

ALONE = {
    "ragged attention": "",
    "sdpa decode": "",
    "roco step": "",
    "lowest": "1,024",
    "hash append": "1,024",
    "observe": "",
    "rest of a layer": "",
}
"""Kernels that are measured alone, and which of their cases (a beginning)."""


def alone(bench: Bench) -> None:
    """Kernels in a graph, over more rows than the GPU's cache holds."""
    lengths = (16,) if bench.small else (1024, 8192, 32_768)
    for case in single_kernels.cases(bench.sizes, lengths):
        wanted = ALONE.get(case.name)
        if wanted is None or case.is_missing(bench.ops):
            continue
        if case.case.startswith("" if bench.small else wanted):
            count = 1 if bench.small else min(64, 1 + CACHE // case.nbytes)
            calls = [case.make(single_kernels.Draw(bench.device, seed)) for seed in range(count)]
            us = bench.us(lambda i, calls=calls: calls[i](bench.ops), count, 5)  # type: ignore[misc]
            floor = case.nbytes / bench.copied * 1e6
            bench.row(f"{case.name}, {case.case}", us=us, floor_us=floor, share=floor / us)


# -- 10 --------------------------------------------------------------------------------------------


def packed(bench: Bench) -> None:
    """Steps with packed weights, against the floor of their own bytes."""
    for form in ("int8", "int4"):
        spec = networks.Spec(bench.sizes, None, "bfloat16", str(bench.device), form)
        net = networks.network(spec)
        one = bench.start("adakv", "roco", 512, bench.tokens(8), name=form, net=net)
        bench.compare([one])
        bench.close(one)
        del one, net
        machine.settle(bench.device)


# -- 11 --------------------------------------------------------------------------------------------


def question(bench: Bench) -> None:
    """A question of 60 tokens behind 32k: over what was kept, and over the tier."""
    tokens, vocab = bench.tokens(32), bench.sizes.vocab
    one = bench.start("adakv", "roco", 512, tokens)
    asked = networks.prompt(60, vocab, seed=2)
    seconds = [one.cached.read_on(asked, ROOM) for _ in range(3)]
    began = perf_counter()
    one.cached.read_on(asked, ROOM)
    wall = perf_counter() - began
    told = bench.profiled(lambda: one.cached.read_on(asked, ROOM), 1)
    bench.row("60 tokens over adakv 512", first_s=median(seconds[1:]), wall_s=wall, **told)
    bench.close(one)

    ids = networks.prompt(tokens, vocab)
    kept = Cached(bench.net, EvictionConfig.read("adakv", "roco", bench.budget(512)))
    kv, engine, clock = kept.engine.kv, kept.engine, machine.Clock(bench.device)
    kv.use(bench.ops)
    bench.net.use(bench.ops)
    before = resident()
    kv.tier = Tier(kv.shape, kv.dtype, kv.device)
    read_s = clock(lambda: engine.recall(ids))
    grown, said = resident() - before, kv.tier.nbytes
    whole, seconds = [*ids, *asked], []
    logits: list[Tensor] = []
    for _ in range(3):
        seconds.append(clock(lambda: logits.append(engine.recall(whole))))
        kv.tier.truncate(tokens)
    rows = tokens * 2 * bench.sizes.kv_heads * bench.sizes.head_dim * 2 * bench.sizes.layers
    recalled = [kv.kept(layer, 0) for layer in (0, bench.sizes.layers - 1)]
    kv.tier, tier = None, kv.tier
    kept.engine.reset()
    want = engine.prompt(whole)
    again = [kv.kept(layer, 0) for layer in (0, bench.sizes.layers - 1)]
    bench.row(
        f"recall of {tokens:,} tokens and 60 more",
        first_s=min(seconds),
        rounds_s=seconds,
        gb_s=rows / min(seconds) / 1e9,
        read_and_kept_s=read_s,
        of_reading=min(seconds) / read_s,
        tier_bytes=said,
        resident_bytes=grown,
        off=off(logits[-1], want),
        same=all(torch.equal(a, b) for a, b in zip(recalled, again, strict=True)),
    )
    kept.close()
    kept.engine._loop = None
    # The rows themselves, beside those that a full cache has.
    full = bench.start("full", "none", 512, tokens, warm=False)
    arena, equal = full.cached.engine.kv.arena, []
    for layer in (0, bench.sizes.layers // 2, bench.sizes.layers - 1):
        stored = tier.rows.read(layer, tokens)
        for head in (0, bench.sizes.kv_heads - 1):
            begin = int(arena.start[layer, head])
            for name in ("k", "v"):
                here = arena.columns[name][begin : begin + tokens].cpu()
                equal.append(bool(torch.equal(here, stored[name][head])))
    bench.row("rows of the tier are those of a full cache", same=all(equal))
    bench.close(full)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/status") as file:
        found = next(one for one in file if one.startswith("VmRSS"))
    return int(found.split()[1]) * 1024


# -- prompts by flash and by cuDNN -----------------------------------------------------------------


def prompts(bench: Bench, lengths: Sequence[float]) -> None:
    """Prompts of several lengths: attention by flash and by cuDNN, and chunks of other lengths."""
    ways: tuple[tuple[str, Any, int | None], ...] = (
        ("flash, chunks of 2,048", bench.variant(flash), 2048),
        ("as it is", bench.ops, None),
        ("cuDNN, chunks of 2,048", bench.ops, 2048),
        ("flash", bench.variant(flash), None),
    )
    try:
        for thousands in lengths:
            best: dict[str, Series] = {}
            for _ in range(1 if bench.small or thousands > 32 else 3):
                for name, ops, chunk in ways[:2] if thousands > 32 else ways:
                    bench.net._given = chunk
                    one = bench.start(
                        "full", "none", 512, bench.tokens(thousands), name=name, ops=ops, warm=False
                    )
                    bench.net._given = None
                    bench.close(one)
                    if name not in best or one.read_s < best[name].read_s:
                        best[name] = one
            for one in best.values():
                bench.row(one.case, **one.facts)
    finally:
        bench.net._given = None


# -- 12 --------------------------------------------------------------------------------------------


def others(bench: Bench) -> None:
    """transformers with torch's attention, in a process of its own: prompts and steps."""
    system = Transformers(networks.Spec(bench.sizes, None, "bfloat16", str(bench.device)))
    for thousands in (2, 8, 32, 128):
        ids = networks.prompt(bench.tokens(thousands), bench.sizes.vocab)
        if thousands < 128:
            system.read(ids)
        read_s = min(system.read(ids) for _ in range(2 if 2 < thousands < 128 else 1))
        system.write(3)
        step = median(system.write(bench.steps) for _ in range(bench.rounds))
        name = f"transformers at {len(ids):,}"
        bench.row(name, tok_s=len(ids) / read_s, read_s=read_s, step_ms=step * 1e3)


def presses(bench: Bench) -> None:
    """kvpress, on transformers as above: prompts that leave 512 rows a head, and steps behind them.

    Needs kvpress and a transformers that it accepts.
    """
    import kvpress

    system = Transformers(networks.Spec(bench.sizes, None, "bfloat16", str(bench.device)))
    for thousands in (8, 32):
        ids = networks.prompt(bench.tokens(thousands), bench.sizes.vocab)
        ratio = 1 - int(bench.budget(512)) / len(ids)
        for name, press in (
            ("snapkv", kvpress.SnapKVPress(ratio, window_size=32)),
            ("adakv", kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, window_size=32))),
        ):
            times = []
            for _ in range(3):
                system.close()
                machine.settle(bench.device)
                before = bench.memory()["allocated"]
                torch.cuda.reset_peak_memory_stats(bench.device)
                with press(system.model):
                    times.append(system.read(ids))
                memory = bench.memory()
            read_s = min(times)
            machine.settle(bench.device)
            held = bench.memory()["allocated"] - before
            system.write(3)
            bench.row(
                f"kvpress {name} 512 at {len(ids):,}",
                tok_s=len(ids) / read_s,
                read_s=read_s,
                step_ms=median(system.write(bench.steps) for _ in range(bench.rounds)) * 1e3,
                cache_allocated=held,
                peak_over_before=memory["peak"] - before,
            )


FIRST = (
    Item("ceilings", 12, ceilings),
    Item("steps at 8k", 18, partial(steps, thousands=8)),
    Item("steps at 32k", 20, partial(steps, thousands=32)),
    Item("step policies", 40, evicting),
    Item("prompt ends", 22, ends),
    Item("steps at 128k", 48, long),
    Item("question", 20, question),
    Item("kernels", 14, alone),
    Item("packed weights", 16, packed),
    Item("memory", 8, memory),
)
SECOND = (
    Item("prompts", 40, partial(prompts, lengths=(2, 8, 9.5, 32))),
    Item("prompts at 128k", 50, partial(prompts, lengths=(128,))),
)
PEER = (Item("peer", 50, others), Item("kvpress", 40, presses))


# -- a process, and the one that starts it ---------------------------------------------------------


@contextmanager
def watched(seconds: float, bench: Bench) -> Iterator[None]:
    """End the process if this takes longer: a GPU that hangs cannot be interrupted."""

    def late() -> None:
        bench.found["items"][bench.item] |= {"state": "hung", "seconds": seconds}
        bench.save()
        print(f"  {bench.item} hangs: the process ends", flush=True)
        os._exit(4)

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def measure(bench: Bench, items: Sequence[Item], until: float) -> int:
    """Measure the items that are not measured yet. Status 3: the GPU does not answer any more."""
    if not bench.found["facts"]:
        known = {**machine.facts(bench.device), **machine.versions(), "commit": facts.commit()}
        known["driver"] = facts.said(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        )
        bench.found["facts"] = known
    for item in items:
        if item.name in bench.found["items"]:
            continue
        left, began = until - perf_counter(), perf_counter()
        mine = bench.found["items"][item.name] = {"state": "died", "seconds": 0.0}
        bench.item = item.name
        if left < item.seconds:
            mine["state"] = "left out"
            print(f"{item.name}: left out, {left:.0f} s are left", flush=True)
            bench.save()
            continue
        print(item.name, flush=True)
        bench.save()
        with watched(min(left, 2 * item.seconds + 20), bench):
            try:
                with torch.inference_mode():
                    item.run(bench)
                mine["state"] = "ok"
            except Exception as error:
                traceback.print_exc()
                said = f"{type(error).__name__}: {error}"[:400]
                mine |= {"state": "failed", "error": said, "trace": traceback.format_exc()[-2000:]}
        mine["seconds"] = round(perf_counter() - began, 1)
        bench.save()
        print(f"  {mine['state']} ({mine['seconds']} s)", flush=True)
        try:
            machine.settle(bench.device)
        except Exception as error:
            print(f"  the GPU does not answer any more: {error}"[:300], flush=True)
            return 3
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all of it [600]")
    parser.add_argument("--small", action="store_true", help="without a GPU, on tiny sizes")
    parser.add_argument("--items", nargs="+", default=[], metavar="NAME", help="only these")
    parser.add_argument("--second", action="store_true", help="the comparisons")
    parser.add_argument("--profile", type=Path, help="kernels and their times, as text")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    items = [one for one in (*FIRST, *SECOND, *PEER) if one.name in asked.items]
    if not asked.items:
        items = list(SECOND if asked.second else FIRST)
    if asked.alone:
        bench = Bench(asked.json, asked.device, small=asked.small, profile=asked.profile)
        return measure(bench, items, perf_counter() + asked.seconds)
    asked.json.unlink(missing_ok=True)
    until = perf_counter() + asked.seconds
    command, status = [sys.executable, __file__, "--alone", *sys.argv[1:]], 3
    while status and until - perf_counter() > 20:  # another process, for the items that are left
        left = ["--seconds", f"{until - perf_counter():.0f}"]
        status = subprocess.run([*command, *left]).returncode
        if status == 1:
            break
    found = json.loads(asked.json.read_text()) if asked.json.exists() else {"items": {}, "rows": []}
    for row in found["rows"]:
        print(f"{row['item'][:12]:12} {line(row)}"[:220])
    bad = [f"{name} ({one['state']})" for name, one in found["items"].items()]
    bad = [text for text in bad if not text.endswith("(ok)")]
    print(f"{len(found['items'])} items; not measured: {', '.join(bad) or 'none'}")
    return 1 if bad or not found["items"] else 0


if __name__ == "__main__":
    sys.exit(main())
