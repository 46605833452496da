"""What a policy costs that reads everything twice: reading with it beside reading without, and the
most bytes at once beside its plan, with what was read in RAM and in a file.

    python docs/measurements/second_pass.py --json docs/measurements/second_pass.json

Seconds are of the processor, on one thread and that of the file, so that what else runs counts
little. The baseline is SnapKV, which reads once and evicts. Each figure is the least of some
repeats. There are two networks, both in float32: the bundled one, and one with its heads, but of
more layers and with random weights.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from time import process_time

import torch

import minikv
from minikv.cache.kv_cache import KVCache
from minikv.cache.plan import peak as cache_peak
from minikv.chat import reading
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.fitting import Machine
from minikv.chat.recall import Recall
from minikv.chat.session import ChatSession
from minikv.cli.eval.tasks import facts
from minikv.engine.engine import Engine
from minikv.loader import output_of, shape_of
from minikv.models.config import ModelConfig
from minikv.models.llama import Llama

DEEP, CONTEXT = 16, 16_384
"""Layers and positions of the larger network."""
CASES = (("snapkv", "none"), ("kvzip", "ram"), ("kvzip", "file"), ("kvzip+", "file"))
"""Policies, each with the place of what is read twice."""


def deep(bundled: ModelConfig) -> ModelConfig:
    """The larger network."""
    return replace(bundled, layers=DEEP, max_context=CONTEXT, windows=(None,) * DEEP)


def read(
    network: Llama, choice: EvictionConfig, chat: ChatSession, ids: list[int], tier: str
) -> tuple[float, int]:
    """(seconds, the most bytes at once) of a prompt."""
    kv = KVCache(
        shape_of(network.config),
        choice.rules(),
        output=output_of(network),
        rotary=network.rotary.inverse,
    )
    network.use(kv.ops)
    kv.words = reading.wording(chat.tokenizer, chat.template)
    recall, engine = Recall(kv, tier), Engine(network, kv)
    if tier == "file":
        assert reading.keep(recall, choice.policy, reading.scoring(engine, [ids], 0, False))
    began = process_time()
    engine.prompt(ids, room=1)
    seconds = process_time() - began
    recall.scored()
    return seconds, kv.last_prompt.peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="2000,4000,7000")
    parser.add_argument("--deep", default="8000", help="lengths for the larger network")
    parser.add_argument("--budget", default="64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    chat = minikv.load(reuse="once", tier="none", threads=1)
    bundled = chat.engine.network
    assert isinstance(bundled, Llama)
    rows: list[dict[str, object]] = []
    for name, lengths in (("bundled", args.lengths), ("random", args.deep)):
        larger = name == "random"
        network = Llama(deep(bundled.config)).randomise(0) if larger else bundled
        for length in map(int, filter(None, lengths.split(","))):
            (item,) = facts(chat.tokenizer, length, 1, 900_000_000)
            ids, first = chat.tokenizer.encode(item.document), 0.0
            for policy, tier in CASES:
                choice = EvictionConfig.read(policy, "none", args.budget)
                tries = [read(network, choice, chat, ids, tier) for _ in range(args.repeats)]
                seconds, peak = min(tries)
                first = first or seconds
                shape = shape_of(network.config)
                machine = Machine(shape, torch.float32, torch.float32, lambda _: 0)
                plan, setup = machine.plan(choice, len(ids), 1)
                planned = cache_peak(plan, setup, in_file=tier == "file").reading
                row = {
                    "network": name,
                    "layers": network.config.layers,
                    "policy": policy,
                    "tier": tier,
                    "budget": args.budget,
                    "tokens": len(ids),
                    "seconds": round(seconds, 3),
                    "times": round(seconds / first, 2),
                    "peak": peak,
                    "planned": planned,
                    "load": round(os.getloadavg()[0], 1),
                }
                assert peak <= planned, row
                rows.append(row)
                print(json.dumps(row), flush=True)
                if args.json:  # also of a run that is stopped
                    args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
