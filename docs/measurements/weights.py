"""What int8 and int4 weights cost and gain: errors, perplexity, answers, bytes, and products' time.

    python docs/measurements/weights.py --json docs/measurements/weights.json

The loss is the bundled model's, on fresh documents: each form beside bfloat16 and float32. The
products are those of a random Llama of 160 million parameters (S) and of TinyLlama's shape (M):
each form, torch's `F.linear` and oneDNN's prepacked product take turns within one run, with a
plain sum over the same weights, which shows the cost of reading them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from train import ASSISTANT, BOS, END, USER

import minikv.models as models
from minikv.cache.attend import DenseAttend
from minikv.kernels.dispatch import choose
from minikv.models.bundled import exam, world
from minikv.models.checkpoint import Checkpoint
from minikv.models.linear import Linear, Plain, kept, row_product
from minikv.models.weights import load_network
from minikv.pages import Pages

FORMS = (
    ("float32", "auto"),
    ("bfloat16", "auto"),
    ("bfloat16", "int8"),
    ("bfloat16", "int8+head"),
    ("bfloat16", "int4"),
    ("bfloat16", "int4+head"),
)
SHAPES = {
    "S q, k, v": (1280, 768),
    "S o": (768, 768),
    "S gate, up": (4096, 768),
    "S down": (768, 2048),
    "S head": (32000, 768),
    "M q, k, v": (2560, 2048),
    "M gate, up": (11264, 2048),
    "M down": (2048, 5632),
}
READ = 60e6  # bytes of different weights that a round goes through, beyond the caches


def loss(chats: int, context: int) -> list[dict[str, Any]]:
    """Each form on the same documents, answers and logits."""
    cases = documents(chats, context)
    checkpoint = Checkpoint.open(models.BUNDLED)
    config = models.load(None).config
    rows, exact = [], None
    for dtype, form in FORMS:
        net = load_network(checkpoint, config, dtype=getattr(torch, dtype), form=form)
        off, surprise, same, right, read, tokens, chosen = [], 0.0, 0, 0, 0, 0, []
        for number, (ids, answer) in enumerate(cases):
            with torch.inference_mode():
                states = net.hidden(torch.tensor(ids[:-1]), DenseAttend(config.windows))
                logits = net.logits(states)
            surprise += float(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
            read += len(ids) - 1
            tokens += len(answer)
            logits, target = logits[-len(answer) :].clone(), torch.tensor(answer)
            right += bool((logits.argmax(-1) == target).all())
            chosen.append(logits)
            if exact is not None:
                first = exact[number]
                off.append(float((logits - first).square().mean().sqrt() / first.std()))
                same += int((logits.argmax(-1) == first.argmax(-1)).sum())
        exact = exact or chosen
        rows.append(
            {
                "dtype": dtype,
                "weights": form,
                "weight_bytes": net.weight_bytes,
                "notes": list(net.config.notes),
                "chats": len(cases),
                "tokens": tokens,
                "logit_error": statistics.mean(off) if off else 0.0,
                "same_token": same / tokens if off else 1.0,
                "perplexity": math.exp(surprise / read),
                "exact_answers": right / chats,
            }
        )
    return rows


def documents(chats: int, context: int) -> list[tuple[list[int], list[int]]]:
    """Ids of a chat that ends with the answer to its one question, and the ids of that answer."""
    tokenizer, made = models.load(None).tokenizer, []
    for i in range(chats):
        doc = exam.fresh(tokenizer, context, 888_000_000 + i)
        question, answer = next(world.questions(random.Random(i), doc, 1))
        right = [*tokenizer.encode(answer), END]
        asked = [BOS, USER, *tokenizer.encode(f"{doc.text}\n\n{question}"), END, ASSISTANT]
        made.append((asked + right, right))
    return made


def products(
    names: list[str], counts: list[int], seconds: float, repeat: int
) -> list[dict[str, Any]]:
    """Microseconds of one product, the best of all rounds of a turn, and medians over turns."""
    rows = []
    for name in names:
        out, inside = SHAPES[name]
        copies = max(2, min(24, int(READ / (2 * out * inside))))
        room = Pages(torch.device("cpu")).empty
        small = [Plain(torch.randn(out, inside).mul_(0.02).bfloat16()) for _ in range(copies)]
        plain = [Plain(room(p.shape, torch.bfloat16).copy_(p.weight)) for p in small]
        packed = [torch.ops.mkldnn._reorder_linear_weight(p.weight, 1) for p in plain]
        forms: dict[str, list[Callable[[Tensor], object]]] = {
            "minikv": list(plain),
            "minikv, small pages": list(small),
            **{form: [kept(p, form, room) for p in plain] for form in ("int8", "int4")},
        }
        for matrix in (*plain, *small, *forms["int8"], *forms["int4"]):
            as_minikv(matrix)
        for count in counts:
            x = torch.randn(count, inside).bfloat16()
            turns: dict[str, list[Callable[[Tensor], object]]] = {
                "read": [lambda x, p=p: p.weight.view(torch.int64).sum() for p in plain],
                "F.linear": [lambda x, p=p: F.linear(x, p.weight) for p in small],
                **(
                    {"torch's own": [lambda x, p=p: row_product(x, p.weight) for p in plain]}
                    if count == 1
                    else {}
                ),
                "oneDNN prepacked": [
                    lambda x, p=p: torch.ops.mkldnn._linear_pointwise(x, p, None, "none", [], "")
                    for p in packed
                ],
                **forms,
            }
            taken: dict[str, list[float]] = {key: [] for key in turns}
            with torch.inference_mode():
                for _ in range(repeat):
                    for key, calls in turns.items():
                        taken[key].append(best(calls, x, seconds))
            micros = {key: 1e6 * statistics.median(times) for key, times in taken.items()}
            rows.append({"matrix": name, "rows": count, "microseconds": micros})
    return rows


def as_minikv(matrix: Linear) -> None:
    """Let a matrix be multiplied as `Llama.use` would have it."""
    ours = choose(torch.device("cpu"), "auto", 64, torch.bfloat16)[0]
    if ours.products:
        matrix.use(ours, torch.bfloat16)


def best(calls: list[Callable[[Tensor], object]], x: Tensor, seconds: float) -> float:
    """The shortest single call of rounds over all copies of the weights."""
    shortest, end = math.inf, time.perf_counter() + seconds
    while True:
        for call in calls:
            began = time.perf_counter()
            call(x)
            shortest = min(shortest, time.perf_counter() - began)
        if time.perf_counter() > end:
            return shortest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=160, help="0: products only")
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--matrices", default=",".join(n.replace(", ", "-") for n in SHAPES))
    parser.add_argument("--rows", default="1,16,128,1024")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each product and turn")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    losses = loss(args.chats, args.context) if args.chats else []
    for row in losses:
        print(
            f"{row['dtype']:9}{row['weights']:10}{row['weight_bytes'] / 1e6:6.1f} MB  logits off "
            f"by {row['logit_error']:.2%}  same token {row['same_token']:.1%}  perplexity "
            f"{row['perplexity']:.3f}  exact {row['exact_answers']:.1%}"
        )
        for note in row["notes"]:
            print(f"    {note}")
    names = [name.replace("-", ", ") for name in args.matrices.split(",")]
    counts = [int(count) for count in args.rows.split(",")]
    speeds = products(names, counts, args.seconds, args.repeat)
    for row in speeds:
        base = row["microseconds"]["F.linear"]
        ratios = "  ".join(f"{k} {base / v:.2f}" for k, v in row["microseconds"].items())
        print(f"{row['matrix']:11}{row['rows']:5} rows  F.linear {base:8.0f} us = 1; {ratios}")
    if args.json:
        facts = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "load_average": os.getloadavg()[0],
            "chats": args.chats,
            "context": args.context,
        }
        made = {"facts": facts, "loss": losses, "products": speeds}
        args.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
