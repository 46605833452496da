"""The figures of minikv on a GPU.

    python tests/gpu/figures.py --json FILE [--seconds N] [--items NAME ...]
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

import plain_tree

plain_tree.linked()
plain_tree.quick()

import facts

from minikv.cache.plan import peak
from minikv.cache.tier import Tier
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.fitting import Machine
from minikv.cli.bench import networks
from minikv.cli.bench.speed import Cached, Transformers
from minikv.engine.capture import Eager, captured
from minikv.engine.decode_loop import DecodeLoop
from minikv.kernels import dispatch
from minikv.kernels.dispatch import on_gpu
from minikv.loader import shape_of, workspace
from minikv.models.llama import Llama

ROUNDS, STEPS, WARM = 3, 30, 6
_DTYPE = torch.bfloat16
_FEW = 1, 1, 1  # where nothing is measured
ROOM = 512  # steps that fit behind a prompt without eviction


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
        kernels = "auto" if self.gpu else "torch"
        self.ops, _ = dispatch.choose(self.device, kernels, self.sizes.head_dim, _DTYPE)
        self.found: dict[str, Any] = {"facts": {}, "items": {}, "rows": [], "rates": {}}
        if path.exists():
            self.found = json.loads(path.read_text())
        self.item = ""

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
        """Bytes a second of a copy; kept for a process that continues after this one."""
        known = self.found["rates"]
        if "copy" not in known:
            known["copy"] = networks.copy_rate(self.device, (1 if self.small else 2048) << 20, 5)
        return float(known["copy"])

    def tokens(self, thousands: float) -> int:
        """So many thousands of tokens; a few where nothing is measured."""
        return 96 + int(thousands) if self.small else int(thousands * 1024)

    def budget(self, rows: int) -> str:
        return str(40 + rows // 512 if self.small else rows)

    def memory(self) -> dict[str, int]:
        """Bytes of the allocator."""
        names = {"allocated": "memory_allocated", "peak": "max_memory_allocated"}
        names["reserved"] = "memory_reserved"
        return {key: getattr(torch.cuda, name)() * self.gpu for key, name in names.items()}

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
            one.engine._loop = DecodeLoop(net, one.engine.kv, Eager(), [])
        net.use(ops)
        networks.settle(self.device)
        before = self.memory()["allocated"]
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        ids = networks.prompt(tokens, net.config.vocab)
        read_s = one.read(ids, ROOM)
        memory, stats = self.memory(), one.engine.kv.stats()
        planned = self._planned(eviction, net, tokens)
        what = policy if policy == "full" else f"{policy} {self.budget(rows)} + {decode}"
        told: dict[str, Any] = {
            "tokens": tokens,
            "read_s": read_s,
            "tok_s": tokens / read_s,
            "evict_ms": one.engine.kv.state.evict_s * 1e3,
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
        networks.settle(self.device)

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
        clock = networks.Clock(self.device)
        return median(clock.each(body, 1 if self.small else rounds)) / calls * 1e6

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
    """Rates of the card."""
    bench.row("copy", gb_s=bench.copied / 1e9)
    side = 64 if bench.small else 8192
    a, b = (bench.normal(side, side) for _ in range(2))
    seconds = bench.us(lambda i: torch.mm(a, b), 2) / 1e6
    bench.row("product, bfloat16", tflops=2 * side**3 / seconds / 1e12)
    words = torch.ones((1 if bench.small else 1024) << 17, dtype=torch.int64, device=bench.device)
    us = bench.us(lambda i: torch.sum(words), 2)
    bench.row("read only", us=us, gb_s=words.nbytes / us / 1e3)


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
        networks.settle(bench.device)


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
    kv, engine, clock = kept.engine.kv, kept.engine, networks.Clock(bench.device)
    kv.use(bench.ops)
    bench.net.use(bench.ops)
    kv.tier = Tier(kv.shape, kv.dtype, kv.device)
    read_s = clock(lambda: engine.recall(ids))
    whole, seconds = [*ids, *asked], []
    logits: list[Tensor] = []
    for _ in range(3):
        seconds.append(clock(lambda: logits.append(engine.recall(whole))))
        kv.tier.truncate(tokens)
    rows = tokens * 2 * bench.sizes.kv_heads * bench.sizes.head_dim * 2 * bench.sizes.layers
    recalled = [kv.kept(layer, 0) for layer in (0, bench.sizes.layers - 1)]
    tier_bytes, kv.tier = kv.tier.rows.nbytes, None
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
        tier_bytes=tier_bytes,
        off=off(logits[-1], want),
        same=all(torch.equal(a, b) for a, b in zip(recalled, again, strict=True)),
    )
    kept.close()
    kept.engine._loop = None


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


FIRST = (
    Item("ceilings", 12, ceilings),
    Item("steps at 8k", 18, partial(steps, thousands=8)),
    Item("steps at 32k", 20, partial(steps, thousands=32)),
    Item("step policies", 40, evicting),
    Item("prompt ends", 22, ends),
    Item("steps at 128k", 48, long),
    Item("question", 20, question),
    Item("packed weights", 16, packed),
)
PEER = (Item("peer", 50, others),)


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
        known = {**networks.facts(bench.device), **networks.versions(), "commit": facts.commit()}
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
            networks.settle(bench.device)
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
    parser.add_argument("--profile", type=Path, help="kernels and their times, as text")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    items = [one for one in (*FIRST, *PEER) if one.name in asked.items]
    if not asked.items:
        items = list(FIRST)
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
