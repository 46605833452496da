"""Does a network of the sizes of an 8B model compute with the Triton kernels what it computes with
torch? Does a chat write the same with and without the kernels and the graph, and the same as on a
CPU? Each kernel alone is tested in tests/kernels (`run.py check`).

    python tests/gpu/smoke.py [--json FILE] [--part I/N] [--only CHECK ...]
    TRITON_INTERPRET=1 python tests/gpu/smoke.py --device cpu --small       tries it without a GPU

Checks are independent: one that fails is reported, and the next one runs. FILE is written after
each. Status 1 if any failed. GPU_TEST_SEED=N repeats the random numbers of a run.

In one process this takes five minutes on a GPU, nearly all of it for compiling. `run.py` starts N
processes, each with its own part.
"""

# ruff: noqa: E402 (where the package is has to be found first)

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import plain_tree

plain_tree.linked()
plain_tree.quick()

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import networks
from minikv.cli.bench.speed import Cached
from minikv.engine.capture import Eager
from minikv.engine.decode_loop import DecodeLoop
from minikv.engine.engine import Engine
from minikv.kernels import Segments, window_attention
from minikv.kernels.attention.plain import last_rows_attention
from minikv.kernels.decode import plain as decode
from minikv.kernels.dispatch import Kernels, on_gpu

SEED = int(os.environ.get("GPU_TEST_SEED") or int.from_bytes(os.urandom(3)))


@dataclass(frozen=True, slots=True)
class Check:
    """run(): what to say of it; it raises if something is wrong."""

    name: str
    run: Callable[[], str]


class Results:
    """What became of the checks, written to a file after each."""

    def __init__(self, path: Path | None, made: torch.Generator) -> None:
        self.path, self.made, self.done = path, made, list[dict[str, object]]()

    def run(self, check: Check) -> None:
        # The same random numbers, whatever runs before it in this process.
        self.made.manual_seed(SEED ^ zlib.crc32(check.name.encode()))
        began, state, trace = perf_counter(), "ok", ""
        self._note({"check": check.name, "state": "died", "said": "", "seconds": 0.0, "trace": ""})
        try:
            said = check.run()
        except Exception as error:
            state, trace = "FAILED", traceback.format_exc()
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        seconds = round(perf_counter() - began, 2)
        self.done.pop()
        self._note(
            {"check": check.name, "state": state, "said": said, "seconds": seconds, "trace": trace}
        )
        print(f"{state:6} {check.name:40} {seconds:6.1f} s  {said}", flush=True)

    def _note(self, one: dict[str, object]) -> None:
        self.done.append(one)
        if self.path is not None:
            self.path.write_text(json.dumps({"seed": SEED, "checks": self.done}, indent=1))

    @property
    def failed(self) -> list[object]:
        return [one["check"] for one in self.done if one["state"] != "ok"]


class Sizes:
    def __init__(self, small: bool, device: str) -> None:
        self.device, self.kind = torch.device(device), torch.bfloat16
        self.heads, self.group, self.size = (2, 2, 32) if small else (8, 4, 128)
        self.made = torch.Generator().manual_seed(SEED)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.made).to(self.kind).to(self.device)


def far(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    assert bool(torch.isfinite(got).all() == torch.isfinite(want).all()), "NaN or infinite"
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def near(bound: float, **pairs: tuple[Tensor, Tensor]) -> str:
    off = {name: far(*pair) for name, pair in pairs.items()}
    bad = {name: value for name, value in off.items() if not value <= bound}
    assert not bad, f"off by {bad}, {bound} allowed"
    return ", ".join(f"{name} {value:.1e}" for name, value in off.items())


def library(s: Sizes) -> str:
    """torch's own attention, called beneath its front door: results and log-sum-exps."""
    t, n = (256, 1024) if s.size > 100 else (8, 24)
    q = s.normal(t, s.heads, s.group, s.size).permute(1, 2, 0, 3)
    k, v = s.normal(s.heads, n, s.size), s.normal(s.heads, n, s.size)
    mixed, lse = last_rows_attention(q, k, v)
    slid, slid_lse = window_attention(q, k, v, t // 2)
    x = q.double() @ k.double()[:, None].transpose(2, 3) / s.size**0.5
    at = torch.arange(n, device=s.device)
    back = at[n - t :, None] - at
    x, y = (x.masked_fill((back < 0) | (back >= w), -torch.inf) for w in (n, t // 2))
    values = v.double()[:, None]
    return near(
        1e-2,
        mixed=(mixed, x.softmax(-1) @ values),
        lse=(lse, x.logsumexp(-1)),
        window=(slid, y.softmax(-1) @ values),
        window_lse=(slid_lse, y.logsumexp(-1)),
    )


def long_prompt(s: Sizes) -> str:
    """Attention of many rows, whichever library computes it, beside that of few at a time."""
    if s.device.type != "cuda":
        return "only on a GPU"
    rows, keys = 8192 + 2048 + 260, 8192 + 3 * 2048 + 13
    qkv = s.normal(rows, s.heads * (s.group + 1), s.size)[:, : s.heads * s.group]
    q = qkv.unflatten(1, (s.heads, s.group)).permute(1, 2, 0, 3)
    k, v = (s.normal(s.heads, keys + rows, s.size) for _ in range(2))
    mixed, lse = on_gpu().last_rows_attention(q, k, v)
    want, sums = last_rows_attention(q, k, v)
    return near(1e-2, mixed=(mixed, want)) + ", " + near(1e-5, lse=(lse, sums))


def far_rows(s: Sizes) -> str:
    """Rows beyond 2^31 numbers of k: 64-bit indices."""
    if s.device.type != "cuda":
        return "only on a GPU"
    last = (1 << 31) // s.size + 4096
    k = torch.empty(last + 512, s.size, dtype=s.kind, device=s.device)
    v = torch.empty_like(k)
    k[last:], v[last:] = s.normal(512, s.size), s.normal(512, s.size)
    q = s.normal(1, s.group, s.size)
    start, length = (torch.tensor([n], device=s.device) for n in (last, 512))
    got = on_gpu().ragged_attention(q, Segments(k, v, start, length, 512))
    near_rows = Segments(k[last:].clone(), v[last:].clone(), start * 0, length, 512)
    want = decode.ragged_attention(q, near_rows)
    return near(1e-2, mixed=(got[0], want[0]), lse=(got[1], want[1]))


QUESTIONS = ("What does Halhart Works make?", "Who runs it?", "What does Halhart Works make?")


def chats(
    device: str, dtype: str, policy: str, decode: str, document: str, weights: str = "auto"
) -> str:
    """Three turns: with the kernels and the graph, without the graph, with torch alone, and, in
    float32, on the CPU. There also the tokens that the first answer leaves in the cache."""
    import minikv

    how: Any = {"policy": policy, "decode": decode, "budget": 128}
    how |= {"dtype": dtype, "weights": weights}
    answers: dict[str, list[str]] = {}
    kept: dict[str, list[set[int]]] = {}
    ways = [("graph", device, "auto"), ("steps", device, "auto"), ("torch", device, "torch")]
    if dtype == "float32":
        ways.append(("cpu", "cpu", "torch"))
    for name, where, kernels in ways:
        chat = minikv.load(device=where, kernels=kernels, **how)
        if name == "steps":
            chat.engine._loop = None
        chat.attach(document, name="document")
        answers[name] = []
        for question in QUESTIONS:
            answers[name].append("".join(chat.ask(question, max_tokens=48)))
            if len(answers[name]) == 1 and name in ("graph", "cpu"):
                sides = chat.engine.kv.shape.layers, chat.engine.kv.shape.kv_heads
                held = (chat.kept(i, h) for i in range(sides[0]) for h in range(sides[1]))
                kept[name] = [{*rows.tolist()} for rows in held]
        if name != "torch":
            assert not chat.engine.notices, chat.engine.notices
        if name == "graph" and device != "cpu":
            assert chat.engine.kv.ops.name == "triton", chat.engine.kv.ops.name
            # These answers are short: without eviction every prompt moves the cache, and steps that
            # evict first are not launched ahead.
            short = policy == "full" or decode == "hashevict"
            assert chat.engine.captured or short, "no step was captured"
    others = {name: found for name, found in answers.items() if found != answers["graph"]}
    # In bfloat16 two orders of adding may differ at a near tie; in float32 not within 48 tokens.
    assert dtype != "float32" or "steps" not in others, answers
    said = f"{answers['graph'][0]!r}; otherwise: {others or 'the same'}"
    if "cpu" in kept:
        pairs = zip(kept["graph"], kept["cpu"], strict=True)
        same = mean(len(a & b) / len(a | b) for a, b in pairs)
        assert answers["cpu"][0] == answers["graph"][0], answers
        assert same > 0.98, f"{same:.1%} of the kept tokens are those of the CPU"
        said += f"; {same:.1%} of the kept tokens are those of the CPU"
    return said


def layers(device: str, weights: str, small: bool) -> Any:
    """Two layers of an 8B model."""
    llama = networks.llama(2, 64, 4, 2, 16, 128, 256)
    if not small:
        llama = networks.llama(2, 4096, 32, 8, 128, 14336, 128256)
    return networks.network(networks.Spec(llama, None, "bfloat16", device, weights))


def computed(device: str, policy: str, decode: str, weights: str, *, small: bool) -> str:
    """Are the logits of a prompt, of a step over what is left of it, and of a later prompt those
    that torch computes? Both have the same rows before the step."""
    net = layers(device, weights, small)
    eviction = EvictionConfig.read(policy, decode, "40" if small else "128")
    engines: list[Engine] = []
    for ops in (on_gpu(), Kernels()):
        engines.append(Cached(net, eviction).engine)
        engines[-1].kv.use(ops)
    ours, theirs = (engine.kv for engine in engines)
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def both(name: str, run: Callable[[Engine], Tensor]) -> None:
        made = []
        for engine in engines:
            net.use(engine.kv.ops)
            made.append(run(engine).clone())
        found[name] = made[0], made[1]

    prompts = [
        networks.prompt(n, net.config.vocab, seed=n) for n in ((50, 5) if small else (3000, 60))
    ]
    both("prompt", lambda engine: engine.prompt(prompts[0]))
    theirs.restore(ours.snapshot(), theirs.rules)
    both("step", lambda engine: engine.step(5))
    theirs.restore(ours.snapshot(), theirs.rules)
    both("later", lambda engine: engine.prompt(prompts[1]))
    return near(5e-2, **found)


def captured(device: str, policy: str, decode: str, weights: str, *, small: bool) -> str:
    """A long answer over the budget: is a step one graph, does the graph write what the same calls
    write uncaptured, and from when on does a step without `DecodeLoop` write something else?"""
    net = layers(device, weights, small)
    eviction = EvictionConfig.read(policy, decode, "128")
    steps, tokens, seconds = 12 if small else 64, dict[str, list[int]](), 0.0
    ids = networks.prompt(600 if small else 3000, net.config.vocab)
    for name in ("graph", "uncaptured", "host"):
        one = Cached(net, eviction)
        engine = one.engine
        if name == "uncaptured":
            engine._loop = DecodeLoop(net, engine.kv, Eager(), [])
        elif name == "host":
            engine._loop = None
        one.read(ids, 256)
        tokens[name] = []
        for _ in range(steps):
            one.write(1)
            tokens[name].append(one._token)
        if name == "graph" and device != "cpu":
            assert engine.captured, f"not captured: {engine.notices}"
            one.read(ids, 256)
            one.write(4)
            seconds = one.write(steps)
        assert not engine.notices, engine.notices
        one.close()
    assert tokens["uncaptured"] == tokens["graph"], f"the graph writes something else: {tokens}"
    pairs = enumerate(zip(tokens["graph"], tokens["host"], strict=True))
    first = next((i for i, (a, b) in pairs if a != b), None)
    # In bfloat16 two orders of adding may differ at a near tie, but not from the first tokens on.
    assert first is None or first > 8, f"the host has other tokens from step {first} on"
    return f"{seconds * 1e6:.0f} us a step (2 layers); the host's tokens: {first or 'all'}"


STEPS = (
    ("full", "none", "auto"),
    ("adakv", "roco", "auto"),
    ("adakv", "roco", "int8"),
    ("adakv", "roco", "int4"),
    ("h2o", "h2o", "auto"),
    ("adakv", "tova", "auto"),
    ("snapkv", "hashevict", "auto"),
    ("adakv", "streaming", "auto"),
)
"""Policy, step policy and weights of what is computed and captured."""


def checks(s: Sizes, device: str, *, small: bool) -> list[Check]:
    """All of them."""
    found = [
        Check("torch's attention", partial(library, s)),
        Check("attention of a long prompt", partial(long_prompt, s)),
        Check("beyond 2^31 numbers", partial(far_rows, s)),
    ]
    found += [
        Check(
            f"{name} {policy}+{decode}, {weights} weights",
            partial(run, device, policy, decode, weights, small=small),
        )
        for name, run in (("computed", computed), ("captured", captured))
        for policy, decode, weights in (STEPS[1:2] if small else STEPS)
    ]
    if not small:
        document = (Path(__file__).parents[2] / "models" / "bundled" / "sample.txt").read_text()
        found += [
            Check(f"chat {dtype} {policy}+{decode}, {weights} weights", partial(*run))
            for dtype, policy, decode, text, weights in (
                ("float32", "adakv", "roco", document, "auto"),
                ("bfloat16", "adakv", "roco", document, "auto"),
                ("float32", "full", "none", document[:9000], "auto"),
                ("bfloat16", "adakv", "roco", document, "int4"),
                ("float32", "snapkv", "hashevict", document, "auto"),
            )
            for run in [(chats, device, dtype, policy, decode, text, weights)]
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the checks of one process")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="these checks")
    asked = parser.parse_args()
    part, parts = map(int, asked.part.split("/"))
    s = Sizes(asked.small, asked.device)
    results = Results(asked.json, s.made)
    print(f"seed {SEED} (GPU_TEST_SEED repeats it), torch {torch.__version__}", flush=True)
    began = perf_counter()
    results.run(Check("torch", lambda: str(torch.ones(8, device=asked.device).sum().item())))
    if results.failed:
        return 1
    for check in checks(s, asked.device, small=asked.small)[part - 1 :: parts]:
        if asked.only is None or check.name in asked.only:
            results.run(check)
    if asked.device == "cuda":
        print(f"peak {torch.cuda.max_memory_allocated() >> 20} MiB")
    failed = results.failed
    ok, bad = len(results.done) - len(failed), ", ".join(map(str, failed)) or "none"
    seconds = perf_counter() - began
    print(f"{ok} of {len(results.done)} ok in {seconds:.0f} s; failed: {bad}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
