"""What a policy costs that reads everything twice: reading with it beside reading without, and the
most bytes at once beside its plan.

    python docs/measurements/second_pass.py --json docs/measurements/second_pass.json

Seconds are of the processor, on one thread, so that what else runs counts little. The baseline is
SnapKV, which reads once and evicts. Each figure is the least of some repeats.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import process_time

import torch

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli import forecast
from minikv.cli.evaluation.tasks import facts
from minikv.models import BUNDLED
from minikv.models.config import ModelConfig


def read(chat: ChatSession, text: str, repeats: int) -> tuple[float, int, int]:
    """(seconds, the most bytes at once, tokens) of a document and a short question."""
    best, peak, tokens = float("inf"), 0, 0
    for _ in range(repeats):
        chat.reset()
        chat.attach(text)
        began = process_time()
        for _ in chat.ask("Who?", max_tokens=1):
            pass
        best = min(best, process_time() - began)
        assert chat.report is not None
        peak, tokens = chat.report.kv_bytes.peak_prefill, chat.report.tokens.prompt_new
    return best, peak, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="2000,4000,7000")
    parser.add_argument("--budget", default="64")
    parser.add_argument("--policies", default="snapkv,kvzip,kvzip+")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = ModelConfig.from_folder(BUNDLED)
    chat = minikv.load(reuse="once", tier="none", threads=1)
    rows: list[dict[str, object]] = []
    for length in map(int, args.lengths.split(",")):
        (item,) = facts(chat.tokenizer, length, 1, 900_000_000)
        first = 0.0
        for policy in args.policies.split(","):
            choice = EvictionConfig.read(policy, "none", args.budget)
            chat.configure(choice)
            seconds, peak, tokens = read(chat, item.document, args.repeats)
            first = first or seconds
            kv = forecast.begun(choice, config, torch.float32, tokens, 1)
            planned = forecast.peak(kv, choice, tokens)
            row = {
                "policy": policy,
                "budget": args.budget,
                "tokens": tokens,
                "seconds": round(seconds, 3),
                "times": round(seconds / first, 2),
                "peak": peak,
                "planned": planned,
            }
            assert peak <= planned, row
            rows.append(row)
            print(json.dumps(row))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
