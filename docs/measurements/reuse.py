"""What later questions in a chat are answered with, by --reuse: once, refresh and blind.

    python docs/measurements/reuse.py --json docs/measurements/reuse.json

The chats of `minikv eval --tasks followup`: a fresh document and six questions about it, one after
the other. An answer counts when it equals the stated one, character by character.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import minikv
from minikv.chat.session import ChatSession
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.intervals import wilson
from minikv.cli.evaluation.tasks import FOLLOWUPS, followup


def asked(chat: ChatSession, item: Item) -> list[bool]:
    """Whether each answer is right."""
    chat.reset()
    chat.attach(item.document, "report.txt")
    return [
        "".join(chat.ask(question, max_tokens=item.max_tokens)).strip() in wanted
        for question, wanted in zip(item.questions, item.right, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--length", type=int, default=2000, help="tokens of a document")
    parser.add_argument("--budget", default="128")
    parser.add_argument("--policy", default="adakv")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    runs = [("full", "once"), *((args.policy, reuse) for reuse in ("once", "refresh", "blind"))]
    for policy, reuse in runs:
        chat = minikv.load(policy=policy, budget=args.budget)
        chat.reuse = reuse
        items = followup(chat.tokenizer, args.length, args.documents, args.seed)
        table = [asked(chat, item) for item in items]
        later = [ok for row in table for ok in row[1:]]
        mean = sum(later) / len(later)
        low, high = wilson(mean, len(later))
        by_question = [sum(column) / len(table) for column in zip(*table, strict=True)]
        rows.append(
            {
                "policy": policy,
                "budget": args.budget if policy != "full" else "-",
                "reuse": reuse,
                "documents": len(table),
                "tokens": args.length,
                "n": len(later),
                "later": mean,
                "low": low,
                "high": high,
                "by_question": by_question,
            }
        )
        print(
            f"{policy:8} {reuse:8} question 1 to {FOLLOWUPS}: "
            + " ".join(f"{share:4.0%}" for share in by_question)
            + f"   2 to {FOLLOWUPS}: {mean:.0%} of {len(later)} [{low:.0%}, {high:.0%}]",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
