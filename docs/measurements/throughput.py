"""Reading and writing speed and peak memory, beside transformers' generate on the same weights.

    python docs/measurements/throughput.py --json docs/measurements/throughput.json

A random Llama of about 160 million parameters (16 layers, width 768, 12 query and 4 KV heads of 64)
reads a prompt and writes greedily. Each system runs in its own process; the systems take turns,
`--repeat` times, and medians are printed. Reading is the first token's time, writing is the rest.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

LAYERS, WIDTH, HEADS, KV_HEADS, SIZE, MLP, VOCAB = 16, 768, 12, 4, 64, 2048, 32000


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field}")


def prompt(tokens: int) -> list[int]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB, (tokens,), generator=generator).tolist()


def network(dtype: str):  # type: ignore[no-untyped-def]
    """The random model, as minikv runs it."""
    import torch

    from minikv.models.config import ModelConfig
    from minikv.models.llama import Llama
    from minikv.models.rope import RopeConfig

    config = ModelConfig(
        family="llama", layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, head_dim=SIZE,
        hidden=WIDTH, mlp=MLP, vocab=VOCAB, norm_eps=1e-5, rope=RopeConfig(theta=5e5),
        max_context=1 << 17, windows=(None,) * LAYERS,
    )  # fmt: skip
    return Llama(config, dtype=getattr(torch, dtype)).randomise(0)


def ours(policy: str, budget: int, dtype: str, tokens: int, new: int) -> dict[str, float]:
    from minikv import policies
    from minikv.budget import Budget
    from minikv.engine import Engine
    from minikv.scheduler import Scheduler
    from minikv.stats import Shape

    net = network(dtype)
    c = net.config
    cache = Scheduler(
        Shape(c.layers, c.kv_heads, c.heads, c.head_dim, c.windows, c.max_context),
        policies.prompt_policy(policy), policies.step_policy(policies.default_step(policy)),
        Budget.parse(budget), dtype=net.dtype,
    )  # fmt: skip
    engine = Engine(net, cache)
    engine.prompt(prompt(64))
    for token in range(3):
        engine.step(token)
    engine.reset()
    ids = prompt(tokens)
    began = time.perf_counter()
    token = int(engine.prompt(ids, room=new).argmax())
    read = time.perf_counter()
    for _ in range(new - 1):
        token = int(engine.step(token).argmax())
    ended = time.perf_counter()
    return {"read": tokens / (read - began), "write": (new - 1) / (ended - read)}


def theirs(dtype: str, tokens: int, new: int) -> dict[str, float]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=LAYERS, vocab_size=VOCAB,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=SIZE,
        max_position_embeddings=1 << 17, tie_word_embeddings=False, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    model.load_state_dict(dict(network(dtype).tensors()))

    def generate(ids: list[int], count: int) -> float:
        inputs = torch.tensor([ids])
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                inputs, attention_mask=torch.ones_like(inputs), min_new_tokens=count,
                max_new_tokens=count, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return time.perf_counter() - began

    generate(prompt(64), 3)
    ids = prompt(tokens)
    first = generate(ids, 1)
    whole = generate(ids, new)
    return {"read": tokens / first, "write": (new - 1) / (whole - first)}


def one(system: str, args: argparse.Namespace) -> dict[str, float]:
    if system == "transformers":
        made = theirs(args.dtype, args.tokens, args.new)
    else:
        made = ours(system, args.budget, args.dtype, args.tokens, args.new)
    return made | {"peak_rss": resident("VmHWM")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--systems", default="transformers,full,adakv")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one, args)))
        return
    systems = args.systems.split(",")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for _ in range(args.repeat):
        for name in systems:
            command = [sys.executable, __file__, "--one", name]
            for flag in ("tokens", "new", "budget", "dtype"):
                command += [f"--{flag}", str(getattr(args, flag))]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            runs[name].append(json.loads(out.splitlines()[-1]))
    rows = []
    for name in systems:
        middle = {k: statistics.median(r[k] for r in runs[name]) for k in runs[name][0]}
        rows.append({"system": name, **middle, "runs": runs[name]})
    base = rows[0]
    print(f"{args.dtype}, {args.tokens} tokens read, {args.new} written, budget {args.budget}")
    for row in rows:
        print(
            f"{row['system']:14} read {row['read']:8.1f} tok/s = {row['read'] / base['read']:.2f}  "
            f"write {row['write']:6.2f} tok/s = {row['write'] / base['write']:.2f}  "
            f"peak {row['peak_rss'] / 2**20:7.0f} MiB"
        )
    if args.json:
        facts = {
            "machine": platform.machine(), "python": platform.python_version(),
            "dtype": args.dtype, "tokens": args.tokens, "new": args.new, "budget": args.budget,
        }  # fmt: skip
        args.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
