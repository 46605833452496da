"""What decides how a step and a prompt are to be computed: the rest of a layer, torch's and our
own; the time of a captured step, kernel by kernel; chunks of a prompt in several lengths, and ways
to attend within one; a draw beside a sort of the vocabulary; and products of one row.

    python tests/gpu/probe.py [--json FILE]
    TRITON_INTERPRET=1 python tests/gpu/probe.py --device cpu --small     tries it without a GPU

FILE is written after every part. A part that fails does not stop the next one. Status 1 if any did.
"""

# ruff: noqa: E402 (where the package is has to be found first)

from __future__ import annotations

import argparse
import json
import os
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
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from plain_tree import linked

linked()
if os.environ.get("TRITON_INTERPRET") == "1":
    sys.path.insert(0, str(Path(__file__).parents[1] / "kernels/triton"))
    import quick_interpreter

    quick_interpreter.install()

from minikv.cli.bench import machine
from minikv.engine.decode_loop import captured
from minikv.kernels import last_rows_attention, merge, rows_attention
from minikv.kernels.triton import rest
from minikv.kernels.triton.append_product import append_product
from minikv.kernels.triton.table import Triton
from minikv.models.linear import Linear, Plain
from minikv.models.linear_gpu import Int4OnGpu, Int8OnGpu, as_read, kept_on
from minikv.pages import Pages


def mean_seconds(
    run: Callable[[int], object], device: torch.device, calls: int, rounds: int = 7
) -> float:
    """Seconds of a call, of so many different ones in a graph."""
    clock = machine.Clock(device)

    def body() -> None:
        for i in range(calls):
            run(i)

    if device.type == "cuda":
        body()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            body()
        torch.cuda.synchronize()
        body = captured(body, stream)
    return median(clock.each(body, rounds)) / calls


FORMS = ("auto", "int8", "int4")
TILES = {
    rest.PLAIN: ((8, 1024, 4), (4, 1024, 4), (16, 1024, 4), (8, 512, 2), (4, 2048, 8)),
    rest.EIGHT: ((4, 2048, 4), (2, 2048, 4), (8, 1024, 2), (4, 1024, 2)),
    rest.FOUR: ((4, 4096, 4), (2, 4096, 4), (8, 2048, 2), (4, 2048, 2)),
}
"""Rows, columns and warps of a program of our own product."""


def matrix(device: torch.device, rows: int, columns: int, form: str) -> Linear:
    """Random weights, kept as on a GPU."""
    plain = Plain(torch.randn(rows, columns, device=device, dtype=torch.bfloat16) / columns**0.5)
    made = kept_on(torch.device("cuda"), plain, form, Pages(device).empty)
    if isinstance(made, Int8OnGpu | Int4OnGpu):
        made.ops = Triton()
    return made


def own_product(made: Linear, tile: tuple[int, int, int]) -> rest.Product:
    """The product with a matrix in our own kernel."""
    read = as_read(made)
    assert read is not None
    found = rest.product_of(read, torch.bfloat16, rest.Config(*tile))
    assert found is not None
    return found


def products(device: torch.device, small: bool) -> dict[str, Any]:
    """Seconds and share of the copy rate, of one row in bfloat16: torch's product ("torch"; packed
    weights in Triton), and our own one in several tiles."""
    copy = machine.copy_rate(device, (4 if small else 1024) << 20, 5)
    found: dict[str, Any] = {"copy_bytes_s": copy}
    for name, rows, inside in (
        ("qkv", 6144, 4096),
        ("out", 4096, 4096),
        ("gate_up", 28672, 4096),
        ("down", 4096, 14336),
    ):
        if small:
            rows, inside = rows // 2048, inside // 32  # a program takes tens of milliseconds
        for form in FORMS:
            one = matrix(device, rows, inside, form)
            count = 1 if small else max(2, (400 << 20) // one.nbytes)
            kept = [one, *(matrix(device, rows, inside, form) for _ in range(count - 1))]
            x = torch.randn(1, inside, device=device, dtype=torch.bfloat16)
            out = torch.empty(1, rows, device=device, dtype=torch.bfloat16)
            ways: dict[str, Callable[[int], object]] = {"torch": lambda i, k=kept, x=x: k[i](x)}
            read = as_read(one)
            assert read is not None
            tiles = TILES[rest.product_of(read, torch.bfloat16).form]  # type: ignore[union-attr]
            for tile in tiles[:1] if small else tiles:
                own = [own_product(m, tile) for m in kept]
                run = partial(_multiplied, own, x, out)
                ways["own " + "x".join(map(str, tile))] = run
            mine: dict[str, Any] = {}
            for way, call in ways.items():
                seconds = mean_seconds(call, device, count, 1 if small else 7)
                mine[way] = {"us": seconds * 1e6, "share_of_copy": one.nbytes / seconds / copy}
            want = one(x).float()
            ways["own " + "x".join(map(str, tiles[0]))](0)
            mine["off"] = float((out.float() - want).norm() / want.norm())
            best = min((k for k in mine if k.startswith("own ")), key=lambda k: mine[k]["us"])
            mine["own_by_torch"] = mine[best]["us"] / mine["torch"]["us"]
            found[f"{name} {form}"] = mine
            print(
                f"  {name:8} {form:5} torch {mine['torch']['us']:7.1f} us "
                f"{mine['torch']['share_of_copy']:5.1%}   {best} {mine[best]['us']:7.1f} us "
                f"{mine[best]['share_of_copy']:5.1%}   ratio {mine['own_by_torch']:.2f}",
                flush=True,
            )
    return found


def _multiplied(own: list[rest.Product], x: Tensor, out: Tensor, i: int) -> object:
    return own[i](x, out, rest.KEEP)


def layers(device: torch.device, small: bool) -> dict[str, Any]:
    """Seconds of all behind attention in a layer, with the next one's queries, keys and values: the
    separate calls ("separate"), our own products, and these launched before the kernel in front has
    ended ("early"; without a GPU of compute capability 9.0 the same as "own"). Then, with our own
    products, what a layer is without attention where a kernel of its own rotates and writes the new
    row ("six" launches, with attention), and where the product does ("five").

    Where `own_by_separate` is above 1, set `products` of kernels/triton/table.py to False; where
    `early_by_own` is below 1, set `EARLY` of kernels/triton/rest.py to True; where `five_by_six` is
    above 1, take `layers` and `step_arena` out of kernels/triton/table.py."""
    hidden, mlp, attended = (32, 32, 32) if small else (4096, 14336, 4096)
    heads, group, size = (1, 1, 8) if small else (8, 4, 128)
    rows = heads * (group + 2) * size
    ops = Triton()
    slot = torch.arange(heads, device=device)[None] * 8
    new = slot[0], torch.zeros((), dtype=torch.int64, device=device)
    k, v = (torch.zeros(8 * heads, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    pos = torch.zeros(8 * heads, dtype=torch.int32, device=device)
    turn = [torch.ones(1, 1, size, device=device, dtype=torch.bfloat16) for _ in range(2)]
    arena = ops.step_arena(
        {"k": k, "v": v, "pos": pos},
        (),
        new[1],
        slot,
        slot,
        slot,
        (None,),
        slot[:, 0],
        None,
        None,
        torch.zeros(heads, dtype=torch.int32, device=device),
    )
    assert arena is not None
    found: dict[str, Any] = {}
    shapes = ((hidden, attended), (2 * mlp, hidden), (hidden, mlp), (rows, hidden))
    for form in FORMS:
        calls = 1 if small else 2
        kept = [[matrix(device, *shape, form) for shape in shapes] for _ in range(calls)]
        norms = [torch.ones(hidden, device=device, dtype=torch.bfloat16) for _ in range(2)]
        x = torch.randn(1, hidden, device=device, dtype=torch.bfloat16)
        mixed = torch.randn(1, attended, device=device, dtype=torch.bfloat16)
        made, made_early = (
            [rest.rest(*map(as_read, four), *norms, 1e-5, early=early) for four in kept]  # type: ignore[arg-type]
            for early in (False, True)
        )

        def separate(
            i: int,
            kept: list[list[Linear]] = kept,
            norms: list[Tensor] = norms,
            x: Tensor = x,
            mixed: Tensor = mixed,
        ) -> Tensor:
            out, gate_up, down, following = kept[i]
            normed = ops.add_norm(x, out(mixed), norms[0], 1e-5)
            owed = down(ops.silu_mul(gate_up(normed)))
            return following(ops.add_norm(x, owed, norms[1], 1e-5))

        def own(i: int, made: list[Any] = made, x: Tensor = x, mixed: Tensor = mixed) -> Tensor:
            product: Tensor = made[i](x, mixed)
            return product

        def six(i: int, made: list[Any] = made, x: Tensor = x, mixed: Tensor = mixed) -> Tensor:
            qkv = made[i](x, mixed).view(-1, size)
            return ops.rotate_append(qkv, *turn, *new, k, v, pos, ())[0]

        def five(i: int, made: list[Any] = made, x: Tensor = x, mixed: Tensor = mixed) -> Tensor:
            made[i].add(x, mixed)
            return append_product(made[i].following, x, *turn, arena, 0)

        ways = {
            "separate": separate,
            "own": own,
            "early": partial(own, made=made_early),
            "six": six,
            "five": five,
        }
        mine = {
            name: mean_seconds(run, device, calls, 1 if small else 7) * 1e6
            for name, run in ways.items()
        }
        mine["early_by_own"] = mine["early"] / mine["own"]
        mine["five_by_six"] = mine["five"] / mine["six"]
        mine["own_by_separate"] = mine["own"] / mine["separate"]
        nbytes = sum(one.nbytes for one in kept[0])
        mine["own_bytes_s"] = nbytes / mine["own"] * 1e6
        found[form] = mine
        print(
            f"  {form:5} separate {mine['separate']:7.1f} us, own {mine['own']:7.1f} us, "
            f"ratio {mine['own_by_separate']:.2f}, {mine['own_bytes_s'] / 1e9:.0f} GB/s, "
            f"early / own {mine['early_by_own']:.2f}, five / six {mine['five_by_six']:.2f}",
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


def lengths(device: torch.device, small: bool) -> dict[str, Any]:
    """The products of a layer of a prompt, in chunks of several lengths: microseconds a row. Where
    longer chunks take clearly less, raise `CUDA_ROWS` of models/llama.py."""
    hidden, mlp, rows = (32, 32, 48) if small else (4096, 14336, 6144)
    shapes = ((rows, hidden), (hidden, hidden), (2 * mlp, hidden), (hidden, mlp))
    found: dict[str, Any] = {}
    for form in FORMS:
        weights = [matrix(device, *shape, form) for shape in shapes]
        mine: dict[str, float] = {}
        for n in (8, 16) if small else (1024, 2048, 4096, 8192):
            given = [
                torch.randn(n, columns, device=device, dtype=torch.bfloat16)
                for columns in sorted({columns for _, columns in shapes})
            ]
            fitting = [next(x for x in given if x.shape[1] == columns) for _, columns in shapes]
            run = partial(_each_product, weights, fitting)
            mine[str(n)] = mean_seconds(run, device, 1, 1 if small else 5) * 1e6 / n
        found[form] = mine
        print(f"  {form:5} us a row: " + ", ".join(f"{n} {us:.3f}" for n, us in mine.items()))
    return found


def _each_product(weights: list[Linear], given: list[Tensor], _: int) -> None:
    for one, x in zip(weights, given, strict=True):
        one(x)


def draws(device: torch.device, small: bool) -> dict[str, Any]:
    """A draw by search, and the sort alone that it does without."""
    logits = 3 * torch.randn(300 if small else 128_256, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    point = torch.full((1,), 0.5, dtype=torch.float64, device=device)
    written = zero[None].clone(), zero.repeat(2), zero.bool()
    found: dict[str, Any] = {}
    for kind, given in (
        ("float32", logits),
        ("bfloat16", logits.bfloat16().float()),
        ("equal", torch.zeros_like(logits)),
    ):
        ways: dict[str, Callable[[int], object]] = {
            "sort": lambda i, x=given: torch.sort(x, descending=True, stable=True)
        }
        for top_k, top_p in ((0, 1.0), (0, 0.9), (40, 0.9)):
            how = 0.8, top_k, top_p, 0.0
            ways[f"top_k {top_k} top_p {top_p}"] = lambda i, x=given, how=how: Triton.sample(
                x, *how, point, zero, zero, *written
            )
        found[kind] = {name: mean_seconds(run, device, 3, 5) * 1e6 for name, run in ways.items()}
        print(f"  {kind}: " + ", ".join(f"{name} {us:.0f} us" for name, us in found[kind].items()))
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
    parts = (
        ("layers", layers),
        ("step", step),
        ("lengths", lengths),
        ("chunks", chunks),
        ("draws", draws),
        ("products", products),
    )
    for name, part in parts:
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
