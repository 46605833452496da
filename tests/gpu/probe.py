"""What decides how a step and a prompt are to be computed: products of one row, ways to attend
within a chunk of a prompt, and the time of a captured step, kernel by kernel.

    python tests/gpu/probe.py [--json FILE]
    python tests/gpu/probe.py --device cpu --small        tries it without a GPU

FILE is written after every part. A part that fails does not stop the next one. Status 1 if any did.
"""

# ruff: noqa: E402 (where the package is has to be found first)

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from plain_tree import linked

linked()

from minikv.cli.bench import machine
from minikv.engine.decode_loop import captured
from minikv.kernels import last_rows_attention, merge, rows_attention


@triton.jit
def gemv(x, w, y, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """y [N] = w [N, K] @ x [K], BN rows a program: what a simple kernel of our own reaches."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BN, BK), tl.float32)
    for s in tl.range(0, K, BK, num_stages=4):
        k = s + tl.arange(0, BK)
        part = tl.load(
            w + n.to(tl.int64)[:, None] * K + k[None, :], mask=(n < N)[:, None], other=0.0
        )
        total += part.to(tl.float32) * tl.load(x + k).to(tl.float32)[None, :]
    tl.store(y + n, tl.sum(total, 1).to(y.dtype.element_ty), mask=n < N)


def own_product(
    weights: list[Tensor], x: Tensor, y: Tensor, tile: tuple[int, int, int], i: int
) -> None:
    """`gemv` with one of the weights."""
    rows, inside = weights[i].shape
    bn, bk, warps = tile
    gemv[(-(-rows // bn),)](x, weights[i], y, rows, K=inside, BN=bn, BK=bk, num_warps=warps)


def mean_seconds(
    run: Callable[[int], object], device: torch.device, calls: int, rounds: int = 7
) -> float:
    """Seconds of a call, of so many different ones in a graph."""
    clock = machine.Clock(device)

    def body() -> None:
        for i in range(calls):
            run(i)

    body()
    if device.type == "cuda":
        torch.cuda.synchronize()
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            body()
        torch.cuda.synchronize()
        body = captured(body, stream)
    return median(clock.each(body, rounds)) / calls


def products(device: torch.device, small: bool) -> dict[str, Any]:
    """Seconds and share of the copy rate, of one row in bfloat16."""
    copy = machine.copy_rate(device, (4 if small else 1024) << 20, 5)
    found: dict[str, Any] = {"copy_bytes_s": copy}
    for name, rows, inside in (
        ("qkv", 6144, 4096),
        ("out", 4096, 4096),
        ("gate_up", 28672, 4096),
        ("down", 4096, 14336),
        ("head", 128256, 4096),
    ):
        if small:
            rows, inside = rows // 64, inside // 16
        nbytes = 2 * rows * inside
        count = 2 if small else max(2, (400 << 20) // nbytes)
        weights = [
            torch.randn(rows, inside, device=device, dtype=torch.bfloat16) for _ in range(count)
        ]
        x, y = weights[0][:1].clone(), torch.empty(rows, device=device, dtype=torch.bfloat16)
        ways: dict[str, Callable[[int], object]] = {
            "linear": lambda i, w=weights, x=x: F.linear(x, w[i])
        }
        if device.type == "cuda":
            for bn, bk, warps in ((4, 1024, 4), (8, 512, 4), (2, 2048, 4), (16, 512, 8)):
                ways[f"gemv {bn}x{bk}/{warps}"] = partial(
                    own_product, weights, x, y, (bn, bk, warps)
                )
        mine = {}
        for way, run in ways.items():
            seconds = mean_seconds(run, device, count)
            mine[way] = {"us": seconds * 1e6, "share_of_copy": nbytes / seconds / copy}
        if device.type == "cuda":
            ways["gemv 4x1024/4"](0)
            want = F.linear(x, weights[0])[0].float()
            mine["gemv_off"] = float((y.float() - want).norm() / want.norm())
        found[name] = mine
        best = max(
            (k for k in mine if k.startswith("gemv ")),
            key=lambda k: mine[k]["share_of_copy"],
            default="linear",
        )
        print(
            f"  {name:8} linear {mine['linear']['us']:7.1f} us "
            f"{mine['linear']['share_of_copy']:5.1%}   {best} {mine[best]['us']:7.1f} us "
            f"{mine[best]['share_of_copy']:5.1%}",
            flush=True,
        )
    return found


def chunks(device: torch.device, small: bool) -> dict[str, Any]:
    """A chunk of 2,048 rows over 2k to 32k: one call whose diagonal ends in the lower right corner,
    as a prompt makes it; two calls and a merge; and other kernels on a square."""
    heads, group, size, rows = 8, 4, 128, 16 if small else 2048
    found: dict[str, Any] = {}
    for n in (2 * rows, 4 * rows) if small else (2048, 8192, 32_768):
        q = torch.randn(rows, heads, group, size, device=device, dtype=torch.bfloat16).permute(
            1, 2, 0, 3
        )
        k, v = (torch.randn(heads, n, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        flops = 4 * heads * group * size * (rows * (n - rows) + rows * (rows + 1) // 2)
        mine: dict[str, Any] = {}
        want = last_rows_attention(q, k, v)

        def note(
            name: str, run: Callable[[int], object], mine: dict[str, Any] = mine, flops: int = flops
        ) -> None:
            seconds = mean_seconds(run, device, 3, 5)
            mine[name] = {"us": seconds * 1e6, "tflops": flops / seconds / 1e12}

        note("one call", lambda i, q=q, k=k, v=v: last_rows_attention(q, k, v))

        def two(i: int, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Any:
            first = k.shape[1] - q.shape[2]
            parts = [rows_attention(q, k[:, first:], v[:, first:], causal=True)]
            if first:
                parts.append(rows_attention(q, k[:, :first], v[:, :first]))
            return merge(parts)

        out = two(0)
        mine["one_call_off"] = float(
            (out[0].float() - want[0].float()).norm() / want[0].float().norm()
        )
        mine["one_call_lse_off"] = float((out[1] - want[1]).abs().max())
        note("two calls", two)
        found[str(n)] = mine
        print(
            "  "
            + f"{n:6} "
            + ", ".join(
                f"{name} {m['us']:.0f} us {m['tflops']:.0f} TFLOP/s"
                if isinstance(m, dict)
                else f"{name} {m:.1e}"
                for name, m in mine.items()
            ),
            flush=True,
        )
    if device.type == "cuda":
        n = 8192
        q = torch.randn(1, heads * group, n, size, device=device, dtype=torch.bfloat16)
        k, v = (
            torch.randn(1, heads, n, size, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        flops = 4 * heads * group * size * (n * (n + 1) // 2)
        wide = [t.repeat_interleave(group, 1) for t in (k, v)]
        ways = {
            "flash": lambda i: torch.ops.aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, True
            ),
            "cudnn": lambda i: torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, *wide, None, True, 0.0, True
            ),
            "sdpa": lambda i: F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ),
        }
        for name, run in ways.items():
            try:
                seconds = machine.Clock(device).each(lambda run=run: run(0), 5, warm=2)
                found[f"square {name}"] = flops / median(seconds) / 1e12
            except RuntimeError as error:
                found[f"square {name}"] = str(error)[:200]
            print(f"  8k x 8k {name}: {found[f'square {name}']}", flush=True)
    return found


def step(device: torch.device, small: bool) -> dict[str, Any]:
    """The kernels of a captured step, and the time in which none runs."""
    from torch.profiler import ProfilerActivity, profile

    from minikv.chat.eviction_config import EvictionConfig
    from minikv.cli.bench import models, shapes
    from minikv.cli.bench.cached import Cached

    net = models.network(
        models.Spec(
            shapes.Sizes(2, 64, 4, 2, 16, 128, 256) if small else shapes.find("llama-3-8b"),
            None,
            "bfloat16",
            str(device),
        )
    )
    found: dict[str, Any] = {}
    for decode in ("none", "roco", "hashevict", "streaming"):
        one = Cached(net, EvictionConfig.read("adakv", decode, "64" if small else "1024"))
        one.read(models.prompt(100 if small else 2048, net.config.vocab), 64)
        one.write(4)
        seconds = one.write(16)
        kinds = [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]
        steps = 4
        with profile(activities=kinds) as told:
            one.write(steps)
            if device.type == "cuda":
                torch.cuda.synchronize()
        table: dict[str, list[float]] = {}
        for event in told.events():
            spent = float(getattr(event, "device_time", 0.0) or getattr(event, "cpu_time", 0.0))
            entry = table.setdefault(event.name[:90], [0.0, 0.0])
            entry[0] += 1 / steps
            entry[1] += spent / steps
        busy = sum(us for _, us in table.values())
        rows = sorted(table.items(), key=lambda item: -item[1][1])
        found[decode] = {
            "step_us": seconds * 1e6,
            "captured": one.captured,
            "busy_us": busy,
            "launches": sum(n for n, _ in table.values()),
            "kernels": [{"name": name, "per_step": n, "us": us} for name, (n, us) in rows[:40]],
            "notices": one.notices,
        }
        print(
            f"  {decode}: step {seconds * 1e6:.0f} us, captured {one.captured}, "
            f"kernels {busy:.0f} us in {found[decode]['launches']:.0f} launches",
            flush=True,
        )
        if decode == "roco":
            for name, (n, us) in rows[:14]:
                print(f"    {us:8.1f} us {n:6.1f} x  {name[:70]}")
        one.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    device, failed = torch.device(asked.device), 0
    found: dict[str, Any] = {}
    for name, part in (("products", products), ("chunks", chunks), ("step", step)):
        began = perf_counter()
        print(name, flush=True)
        try:
            with torch.inference_mode():
                found[name] = part(device, asked.small)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            found[name] = f"{type(error).__name__}: {error}"[:400]
        print(f"  {perf_counter() - began:.0f} s", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if asked.json is not None:
            asked.json.write_text(json.dumps(found, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
