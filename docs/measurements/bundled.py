"""What the bundled model answers exactly, on fresh documents: full cache and under a budget.

    python docs/measurements/bundled.py --json docs/measurements/bundled.json

Documents come from the training world with seeds that training never used. An answer counts when it
equals the stated one, character by character. First, with the full cache, chats of four questions
about one document; then, per policy, one question that comes with its document of 4,000 tokens:
"1+" over all facts, "2+" over those whose answer takes two tokens and more. The first token of an
answer is decided before anything is evicted, so only "2+" tells policies apart.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import minikv
from minikv.chat.session import ChatSession
from minikv.cli.evaluation.intervals import wilson
from minikv.models.bundled.exam import exact, share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--single", type=int, default=200, help="documents for the budgeted runs")
    parser.add_argument("--lengths", default="2000,4000,7900")
    parser.add_argument("--budget", default="256")
    parser.add_argument("--policies", default="full,adakv,snapkv,streaming")
    parser.add_argument("--model", help="another directory than the bundled model's")
    parser.add_argument("--seed", type=int, default=777_000_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []

    def show(name: str, tokens: int, table: list[list[bool]], held: float, began: float) -> None:
        flat = [ok for row in table for ok in row]
        by_number = [sum(col) / len(col) for col in zip(*table, strict=True)]
        low, high = wilson(share(table), len(flat))
        rows.append(
            {
                "policy": name,
                "tokens": tokens,
                "n": len(flat),
                "exact": share(table),
                "low": low,
                "high": high,
                "by_question": by_number,
                "held_share": held,
                "seconds": round(time.time() - began, 1),
            }
        )
        print(
            f"{name:18} {tokens:6,} tokens  exact {share(table):6.1%} of {len(flat)} "
            f"[{low:.1%}, {high:.1%}]  by question "
            + " ".join(f"{share:.0%}" for share in by_number)
            + f"  held {held:.1%}",
            flush=True,
        )

    def saved(chat: ChatSession) -> float:
        stats = chat.engine.kv.stats()
        return stats.held_bytes / stats.full_bytes

    chat = minikv.load(args.model, policy="full")
    for tokens in map(int, args.lengths.split(",")):
        began = time.time()
        table = exact(chat, tokens, args.chats, 4, args.seed + tokens * 1000)
        show("full", tokens, table, saved(chat), began)
    for policy in args.policies.split(","):
        chat = minikv.load(args.model, policy=policy, budget=args.budget)
        name = policy if policy == "full" else f"{policy} {args.budget}"
        for least in (1, 2):
            began = time.time()
            table = exact(chat, 4000, args.single, 1, args.seed + least, least=least)
            show(f"{name}, {least}+", 4000, table, saved(chat), began)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
