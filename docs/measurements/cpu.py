"""What a CPU's kernels do beside plain torch: packing, attention of a prompt, what its queries give
each row, how parts of it are joined, its products with packed weights, and drawing a token.

    GOMP_SPINCOUNT=2000 python docs/measurements/cpu.py --json docs/measurements/cpu.json

(So does minikv itself wait for its threads.) With `--only PART,...` the file keeps its other parts.

Everything is measured in turns within one run, so that a busy machine slows all alike: read the
ratios. Seconds of the processor stand beside those of the clock, as the former do not depend on
who else computes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from minikv.cli.doctor import cpu_facts
from minikv.engine.sampling import Sampling, pick
from minikv.kernels import Queries, dispatch
from minikv.kernels.attention import cpu as merge
from minikv.kernels.attention import cpu as prefill
from minikv.kernels.attention import plain as attention
from minikv.kernels.mass import cpu as attention_mass
from minikv.kernels.mass import plain as mass_in_torch
from minikv.kernels.native import choice
from minikv.kernels.product import cpu as in_c
from minikv.models.linear import Int4, Int8, Linear, Plain, kept
from minikv.pages import Pages

PARTS = (
    "packing",
    "prompts",
    "prompts32",
    "statistics",
    "products",
    "sampling",
)
ROWS, COLUMNS = 28672, 4096  # gate and up of a layer of Llama-3-8B
SAMPLINGS = {
    "greedy": Sampling(),
    "temperature 0.7": Sampling(0.7),
    "top_p 0.9": Sampling(0.7, top_p=0.9),
    "top_k 40": Sampling(0.7, top_k=40),
    "min_p 0.05": Sampling(0.7, min_p=0.05),
    "temperature 2, flat": Sampling(2.0),
    "temperature 1, all equal": Sampling(1.0),
}
HEADS = {"S": (4, 3, 64), "M": (4, 8, 64), "8B": (8, 4, 128)}  # KV heads, group, head size


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock, and of this process on all processors."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used


def packed(repeat: int) -> list[dict[str, Any]]:
    """GB/s of bfloat16 weights, C and torch in turns, into memory that is there already."""
    room = Pages(torch.device("cpu")).empty
    weight = room((ROWS, COLUMNS), torch.bfloat16)
    weight.copy_(torch.randn(COLUMNS, COLUMNS).mul_(0.02).repeat(7, 1))
    rows = []
    for form in ("int8", "int4"):
        made = {name: kept(Plain(weight), form, room, by) for name, by in BY.items()}
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in (*BY, "read")}
        for _ in range(repeat):
            for name, matrix in made.items():
                took[name].append(timed(lambda matrix=matrix: matrix.pack(0, weight)))
            took["read"].append(timed(lambda: weight.view(torch.int64).sum()))
        rate = {
            name: {
                "gb_s": weight.nbytes / 1e9 / median(clock for clock, _ in times),
                "gb_cpu_s": weight.nbytes / 1e9 / median(used for _, used in times),
            }
            for name, times in took.items()
        }
        rows.append({"form": form, **rate})
    return rows


BY = {"C": lambda: in_c, "torch": dispatch.Kernels}


def prompts(repeat: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """GFLOP/s of the last 1,024 queries over all rows in `dtype`, C and torch in turns."""
    ways = {"C in float32": prefill.FLOAT.last_rows_attention}
    if dtype == torch.bfloat16 and prefill.BF16.available():
        ways["C"] = prefill.BF16.last_rows_attention
    if dtype == torch.bfloat16 and prefill.TILES.available():
        ways["C with tiles"] = prefill.TILES.last_rows_attention
    ways["torch"] = attention.last_rows_attention
    rows = []
    for name, (heads, group, size) in HEADS.items():
        for keys in (1024, 2048, 8192):
            q = torch.randn(1024, heads, group, size).to(dtype).permute(1, 2, 0, 3)
            k, v = torch.randn(2, heads, keys, size).to(dtype).unbind(0)
            flops = 4 * heads * group * size * 1024 * (keys - 512)
            took: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for turn in range(repeat + 1):
                for way, work in ways.items():
                    seconds = timed(lambda work=work, q=q, k=k, v=v: work(q, k, v))
                    if turn:
                        took[way].append(seconds)
            rate = {
                way: {
                    "gflop_s": flops / 1e9 / median(clock for clock, _ in times),
                    "gflop_cpu_s": flops / 1e9 / median(used for _, used in times),
                }
                for way, times in took.items()
            }
            rows.append({"shape": name, "rows": keys, **rate})
    return rows


def statistics(repeat: int) -> list[dict[str, Any]]:
    """What the last queries give every row ("mass"), the most that one gives ("peak"), and joining
    the outputs of five parts ("merge"): seconds, C and torch in turns. Rates are of products, of
    all rows, also those that a query does not see."""
    made = []
    for name, (heads, group, size) in HEADS.items():
        for queries, keys in ((32, 2048), (32, 8192), (1024, 2048), (1024, 8192)):
            q = torch.randn(queries, heads, group, size).bfloat16().permute(1, 2, 0, 3)
            k = torch.randn(heads, keys, size).bfloat16()
            at, row = torch.arange(keys - queries, keys), torch.arange(keys)[None]
            parts = [(k, row)]
            asked = Queries(q, at, None)
            lse = mass_in_torch.rows_lse(asked, parts)
            asked = asked._replace(lse=lse)
            sums, squares = torch.zeros(heads, group, keys), torch.zeros(heads, keys)
            outs = [(torch.randn_like(q), lse + i) for i in range(5)]
            calls: dict[str, dict[str, Callable[[], object]]] = {
                "mass": {},
                "peak": {},
                "merge": {},
            }
            for way, own in (("C", attention_mass), ("torch", mass_in_torch)):
                add = own.add_attention_mass
                calls["mass"][way] = partial(add, sums, squares, asked, parts[0])
                calls["peak"][way] = partial(own.peak_attention, asked, parts, 0)
            calls["merge"] = {
                "C": partial(merge.merge, outs),
                "torch": partial(attention.merge, outs),
            }
            flops = 2 * heads * group * size * queries * keys
            for what, ways in calls.items():
                taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
                for _ in range(repeat + 1):
                    for way, call in ways.items():
                        taken[way].append(timed(call))
                row_of = {"shape": name, "what": what, "queries": queries, "rows": keys}
                for way, times in taken.items():
                    clock, used = (median(each) for each in zip(*times[1:], strict=True))
                    row_of[way] = {"seconds": clock, "cpu_seconds": used}
                    if what != "merge":
                        row_of[way]["gflop_cpu_s"] = flops / 1e9 / used
                made.append(row_of)
    return made


def products(repeat: int) -> list[dict[str, Any]]:
    """A matrix [4096, 4096] times so many rows, in turns: in bfloat16, packed weights that are
    unpacked ("unpacked": torch's kernel for few rows), and products of integers. Different weights
    follow each other, more than the caches hold. One row is compared with a plain read of the
    bytes.
    """
    made = []
    weights = [torch.randn(COLUMNS, COLUMNS).to(torch.bfloat16) for _ in range(4)]
    forms: dict[str, list[Linear]] = {}
    for name, rows in (("bfloat16", None), ("bfloat16 in float32", 2)):
        plain = [Plain(weight) for weight in weights]
        for each in plain:
            each.float_rows = rows
        forms[name] = list(plain)
    for form in ("int8", "int4"):
        for how in ("unpacked", "integers", "tiles"):
            if how == "tiles" and not prefill.TILES.available():
                continue
            matrices = [kept(Plain(weight), form) for weight in weights]
            forms[f"{form}, {how}"] = matrices
            for matrix in matrices:
                matrix.use(_products(how), torch.bfloat16)
    held = {form: forms[f"{form}, integers"] for form in ("int8", "int4")}
    for rows in (1, 8, 32, 128, 512, 1024, 4096):
        x = torch.randn(rows, COLUMNS).to(torch.bfloat16)
        out = torch.empty(rows, COLUMNS, dtype=torch.bfloat16)
        calls: dict[str, list[Callable[[], object]]] = {
            name: [partial(matrix, x, out) for matrix in matrices]
            for name, matrices in forms.items()
        }
        if rows == 1:
            for form, matrices in held.items():
                calls[f"{form}, a plain read"] = [partial(read, matrix) for matrix in matrices]
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(repeat + 1):
            for name, each in calls.items():
                taken[name].extend(timed(call) for call in each[: 1 if rows > 512 else None])
        row: dict[str, Any] = {"rows": rows, "load_average": os.getloadavg()[0]}
        for name, times in taken.items():
            clock, used = (
                median(part) for part in zip(*times[len(times) // (repeat + 1) :], strict=True)
            )
            row[name] = {"ms": 1e3 * clock, "processor_ms": 1e3 * used}
            form = name.partition(",")[0]
            if rows == 1 and form in held:
                row[name]["gb_cpu_s"] = held[form][0].nbytes / 1e9 / used
        made.append(row)
        print(json.dumps(row), flush=True)
    return made


def read(matrix: Linear) -> None:
    """All bytes of a packed matrix."""
    assert isinstance(matrix, Int8 | Int4)
    for part in matrix.parts().values():
        if part.dtype is not torch.bfloat16 or part.dim() > 1:
            part.view(-1).view(torch.int64).sum()


def _products(how: str) -> dispatch.Kernels:
    """The kernels that multiply "integers" or "tiles"; or only those that unpack."""
    ops = dispatch.Kernels()
    ops.products = how != "unpacked"
    if how == "integers":
        ops.int8_product, ops.int4_product = products.int8_product, products.int4_product
        ops.integer_prompts = True
    elif how == "tiles":
        ops.rows_product = products.rows_product
    return ops


def sampling(repeat: int) -> list[dict[str, Any]]:
    """`pick` with C's kernels and with torch's, in turns: one token from random logits (of a
    standard deviation of 3, "flat" of 0.1), another place in the conversation each time."""
    ways = {
        name: dispatch.choose(torch.device("cpu"), kernels, 64, torch.bfloat16)[0]
        for name, kernels in (("C", "auto"), ("torch", "torch"))
    }
    rows, threads = [], torch.get_num_threads()
    for vocab in (32_000, 128_256):
        spread = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
        for used in sorted({1, threads}):
            torch.set_num_threads(used)
            for name, how in SAMPLINGS.items():
                by = 0.0 if "equal" in name else 0.1 if "flat" in name else 3.0
                logits = by * spread
                took: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
                for turn in range(20 * repeat + 1):
                    for way, ops in ways.items():
                        draw = partial(pick, logits, vocab, how, 1, turn, ops)
                        took[way].append(timed(draw))
                row: dict[str, Any] = {"vocab": vocab, "threads": used, "how": name}
                for way, times in took.items():
                    clock, process = (median(part) for part in zip(*times[1:], strict=True))
                    row[way] = {"ms": 1e3 * clock, "processor_ms": 1e3 * process}
                rows.append(row)
                print(json.dumps(row), flush=True)
    torch.set_num_threads(threads)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    only = args.only.split(",")
    found: dict[str, Any] = {
        "facts": {
            "processor": cpu_facts()[0],
            "class": choice.processor(),
            "choices": choice.describe(choice.processor()),
            "bfloat16_prompt_attention": prefill.BF16.available(),
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "load_average": os.getloadavg()[0],
        }
    }
    print(json.dumps(found["facts"], indent=1))
    measure: dict[str, Callable[[int], list[dict[str, Any]]]] = {
        "packing": packed,
        "prompts": partial(prompts, dtype=torch.bfloat16),
        "prompts32": partial(prompts, dtype=torch.float32),
        "statistics": statistics,
        "products": products,
        "sampling": sampling,
    }
    with torch.inference_mode():
        found |= {name: measure[name](args.repeat) for name in PARTS if name in only}
    for name in PARTS:
        for row in found.get(name, []):
            print(name, json.dumps(row))
    if args.json:
        if len(only) < len(PARTS) and args.json.exists():
            found = {**found, **json.loads(args.json.read_text()), **{n: found[n] for n in only}}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
