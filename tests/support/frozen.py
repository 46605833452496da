"""A record of kept rows and logits, to hold a rebuilding of the cache against.

    python tests/support/frozen.py write OLD.pt      at the commit before
    python tests/support/frozen.py write NEW.pt      at the commit after, on the same machine
    python tests/support/frozen.py compare OLD.pt NEW.pt

A conversation is a prompt, 64 steps of given tokens, a second prompt and 8 steps. Every pair of
policies is tried over a covering set of dtypes, heads, budgets, pins, windows, strides, int8 rows
and kernels. `compare` lists each conversation that kept other rows, with the place where it first
did, and the largest difference of logits in the others.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from pairwise import pairwise
from small import PAIRS, SOON, ids, network, shape

from minikv import policies
from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.engine.engine import Engine
from minikv.models.llama import Llama

Case = tuple[Any, ...]
FIRST, STEPS, SECOND, MORE = 90, 64, 40, 8
_SIDES = (
    ("gqa", "full"),
    ("float32", "bfloat16"),
    (48, 64, "60%"),
    (0, 3),  # pinned
    (False, True),  # windows
    (False, True),  # int8
    ("auto", "torch"),
)


def cases() -> list[Case]:
    """All conversations: (prompt policy, step policy, stride, and a value of each of `_SIDES`)."""
    strided = [(step, step, n) for step in policies.step_names() for n in (8, 32) if step != "none"]
    sides = pairwise(*_SIDES)
    return [(*pair, *side) for pair in [*((p, s, 0) for p, s in PAIRS), *strided] for side in sides]


def converse(case: Case) -> dict[str, Any]:
    """One conversation: what each head holds at four places, and all logits."""
    prompt, step, stride, heads, dtype, budget, pinned, slides, int8, kernels = case
    windows = (None, 50, None) if slides else None
    config = network(kv_heads=3 if heads == "gqa" else 6, windows=windows).config
    net = Llama(config, rows=32, dtype=getattr(torch, dtype)).randomise(0, std=0.3)
    options = SOON.get(step)
    rules = Rules(
        None if stride else policies.prompt_policy(prompt),
        policies.step_policy(step, options),
        Budget.parse(budget) if (prompt, step) != ("full", "none") else None,
        stride,
    )
    try:
        kv = KVCache(
            shape(net),
            rules,
            dtype=net.dtype,
            kv=torch.int8 if int8 else None,
            output=lambda i: (
                net.layers[i]
                .out.dense()
                .T.unflatten(0, (net.config.kv_heads, -1, net.config.head_dim))
            ),
            rotary=net.rotation,
            kernels=kernels,
        )
        kv.pin(pinned)
        net.use(kv.ops)
        engine = Engine(net, kv)
        logits, held = [engine.prompt(ids(FIRST, 1))], [_held(kv)]
        logits += [engine.step(token) for token in ids(STEPS, 2)]
        held.append(_held(kv))
        logits.append(engine.prompt(ids(SECOND, 3)))
        held.append(_held(kv))
        logits += [engine.step(token) for token in ids(MORE, 4)]
        held.append(_held(kv))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"held": held, "logits": torch.stack([row.float() for row in logits])}


def _held(kv: KVCache) -> list[list[list[int]]]:
    layers, heads = range(kv.shape.layers), range(kv.shape.kv_heads)
    return [[sorted(kv.kept(layer, head).tolist()) for head in heads] for layer in layers]


def _one(case: Case) -> tuple[Case, dict[str, Any]]:
    torch.set_num_threads(1)
    return case, converse(case)


def write(path: str) -> None:
    """Run every conversation, in two processes."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        torch.save(dict(pool.imap_unordered(_one, cases(), 8)), path)


def compare(old: str, new: str) -> int:
    """Print what differs; the number of conversations that kept other rows."""
    before, after = torch.load(old), torch.load(new)
    other, worst, refused = 0, 0.0, 0
    for case, was in before.items():
        now = after.get(case, {"error": "not there"})
        if "error" in was or "error" in now:
            refused += 1
            if was.get("error") != now.get("error"):
                print(case, was.get("error"), "->", now.get("error"))
                other += 1
            continue
        places = ("prompt", "steps", "second prompt", "more steps")
        pairs = zip(places, was["held"], now["held"], strict=True)
        parted = [place for place, one, two in pairs if one != two]
        apart = (was["logits"] - now["logits"]).abs().amax(1)
        if parted:
            other += 1
            print(case, "parted at", parted[0], "logits", apart[0].item(), apart.max().item())
        else:
            worst = max(worst, apart.max().item())
    print(f"{len(before)} conversations, {refused} refused; {other} kept other rows")
    print(f"largest difference of logits in the others: {worst:.2e}")
    return other


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2])
    else:
        sys.exit(bool(compare(*sys.argv[2:])))
