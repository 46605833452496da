"""Peak resident memory while a long prompt is read: what was measured, and what it is made of.

    python docs/measurements/peak_memory.py --tokens 32768 --json docs/measurements/peak_memory.json

Each policy runs in its own process, on a random Llama with 16 layers. The peak is the kernel's
high-water mark of the process over the prompt, less what was resident before it (weights,
libraries, a short warm-up). The bound is the residual stream, one layer's keys and values, one MLP
chunk and the arena, as counted from their tensors.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field}")


def one(
    policy: str, tokens: int, width: int, layers: int, budget: int, dtype_name: str
) -> dict[str, object]:
    """Read one prompt under one policy; the figures in bytes."""
    import torch

    from minikv import policies
    from minikv.cache.budget import Budget
    from minikv.cache.kv_cache import KVCache
    from minikv.cache.rules import Rules
    from minikv.cache.stats import Shape
    from minikv.engine.engine import Engine
    from minikv.models.config import ModelConfig
    from minikv.models.llama import Llama
    from minikv.models.rope import RopeConfig

    config = ModelConfig(
        family="llama",
        layers=layers,
        heads=width // 128,
        kv_heads=width // 256,
        head_dim=64,
        hidden=width,
        mlp=width * 8 // 3,
        vocab=32000,
        norm_eps=1e-5,
        rope=RopeConfig(theta=5e5),
        max_context=1 << 20,
        windows=(None,) * layers,
    )
    dtype = getattr(torch, dtype_name)
    network = Llama(config, dtype=dtype).randomise(0)
    shape = Shape(layers, config.kv_heads, config.heads, 64, config.windows, config.max_context)
    step = policies.default_step(policy)

    def engine() -> Engine:
        cache = KVCache(
            shape,
            Rules(policies.prompt_policy(policy), policies.step_policy(step), Budget.parse(budget)),
            dtype=dtype,
        )
        return Engine(network, cache)

    ids = torch.randint(32000, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    engine().prompt(ids[:1200])
    Path("/proc/self/clear_refs").write_text("5")  # start a new high-water mark
    run, before, began = engine(), resident("VmRSS"), time.perf_counter()
    run.prompt(ids)
    seconds = time.perf_counter() - began
    stats = run.kv.stats()
    parts = {
        "residual": tokens * width * dtype.itemsize,
        "one_layer_kv": tokens * config.kv_heads * stats.row_bytes,
        "mlp_chunk": network.rows * 2 * config.mlp * dtype.itemsize,
        "arena": stats.allocated_bytes,
    }
    peak = resident("VmHWM") - before
    return {
        "policy": policy,
        "decode": step,
        "dtype": dtype_name,
        "tokens": tokens,
        "layers": layers,
        "width": width,
        "budget": budget,
        "peak_rss": peak,
        "bound": sum(parts.values()),
        "parts": parts,
        "ratio": round(peak / sum(parts.values()), 4),
        "held": stats.held_bytes,
        "full": stats.full_bytes,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policies", default="adakv,full")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        sizes = args.tokens, args.width, args.layers, args.budget
        print(json.dumps(one(args.one, *sizes, args.dtype)))
        return
    rows = []
    for policy in args.policies.split(","):
        command = [sys.executable, __file__, "--one", policy]
        for name in ("tokens", "width", "layers", "budget", "dtype"):
            command += [f"--{name}", str(getattr(args, name))]
        made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = json.loads(made)
        rows.append(row)
        mib = {k: v / 2**20 for k, v in row["parts"].items()}
        print(
            f"{policy:10} peak {row['peak_rss'] / 2**20:7.1f} MiB   bound "
            f"{row['bound'] / 2**20:7.1f} = "
            + " + ".join(f"{k} {v:.1f}" for k, v in mib.items())
            + f"   ratio {row['ratio']:.3f}   {row['seconds']} s"
        )
    if args.json:
        facts = {"machine": platform.machine(), "python": platform.python_version()}
        args.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
