"""What choosing victims adds to a step, in short turns: steps under a policy, and steps over the
same rows without one.

    python docs/measurements/evict.py --json docs/measurements/evict.json

A turn is eight steps of each. `minikv bench` takes 32, between which memory becomes quicker or
slower by more than what is looked for. The figure is the median over turns of the quotient of
neighbours; the quartiles stand beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import machine, models, shapes
from minikv.cli.bench.cached import Cached
from minikv.cli.bench.device import prepare

STEPS = 8


def measured(
    net: models.Llama, policy: str, decode: str, budget: str, tokens: int, turns: int
) -> dict[str, object]:
    """A row."""
    own = Cached(net, EvictionConfig.read(policy, decode, budget))
    own.read(models.prompt(tokens, net.config.vocab), STEPS * (turns + 2))
    own.write(STEPS)
    base = own.without_policy()
    base.copy(own)
    base.write(STEPS)
    times: list[tuple[float, float]] = []
    for turn in range(turns):  # each is first as often as the other
        if turn % 2:
            beside = base.write(STEPS)
            times.append((own.write(STEPS), beside))
        else:
            taken = own.write(STEPS)
            times.append((taken, base.write(STEPS)))
    low, added, high = statistics.quantiles([a / b - 1 for a, b in times], n=4)
    own.close()
    base.close()
    return {
        "policy": policy,
        "decode": decode,
        "budget": budget,
        "length": tokens,
        "turns": turns,
        "seconds": statistics.median(a for a, _ in times),
        "added": added,
        "quartiles": [low, high],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="s", help=", ".join(shapes.SHAPES))
    parser.add_argument("--tokens", default="2048,8192")
    parser.add_argument("--policy", default="adakv")
    parser.add_argument("--decode", default="roco,h2o,tova,scissorhands")
    parser.add_argument("--budget", default="512")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = prepare("cpu", 0)
    net = models.network(models.Spec(shapes.find(args.shape)))
    rows = []
    for tokens in map(int, args.tokens.split(",")):
        for decode in args.decode.split(","):
            row = measured(net, args.policy, decode, args.budget, tokens, args.turns)
            rows.append(row)
            low, high = row["quartiles"]  # type: ignore[misc]
            print(
                f"{tokens:6,} tokens  {decode:13} step {1e3 * float(str(row['seconds'])):6.2f} ms  "
                f"added {row['added']:+.1%} (quartiles {low:+.1%}, {high:+.1%})",
                flush=True,
            )
    if args.json:
        made = {"machine": machine.facts(device), "torch": torch.__version__, "rows": rows}
        args.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
