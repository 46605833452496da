"""Which decode policy follows the prompt policy, and what it takes over from it.

    python docs/measurements/hand_over.py run --minutes 8         # again until it says "complete"
    python docs/measurements/hand_over.py run --policy keydiff --documents 60 --more 0 \
        --budgets 64,128                                          # and snapkv
    python docs/measurements/hand_over.py write --json docs/measurements/hand_over.json

A slice adds a line per document and budget to files in --state. `write` makes the JSON of them, and
`results.py write` the tables of docs/results.md. Nothing is timed. --policy reads the prompt; every
decode policy then writes over the same rows. All are compared with `none`, which evicts nothing
while writing, in pairs: `lost` are answers that only `none` has right, `won` those that only the
other has, `p` is the sign test's. The interval is Student's t over documents.

`answer first` is no policy of minikv: the tokens of the answer leave before those that the question
chose, which keep their pooled score for good.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.evaluation import intervals
from minikv.cli.evaluation.chats import CHATS
from minikv.cli.evaluation.passes import PASSES
from minikv.cli.evaluation.rereading import Rereading
from minikv.cli.evaluation.tasks import TRAINED
from minikv.engine.engine import Engine
from minikv.policies.base import PromptView, StepPolicy, StepView, unprotected
from minikv.policies.snapkv import pool

SEED = 960_000_000  # of documents that training never used
BUDGETS = ("24", "64", "128", "256")
SMALL = {"window": 16}  # at a budget of 24, where a window of 32 does not fit
PAPER: Mapping[str, object] = {"pool": 1, "lead": 1}
DECIDING: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "none": ("none", {}),
    "roco": ("roco", {}),
    "roco lead=10": ("roco", {"lead": 10}),
    "roco lead=1": ("roco", {"lead": 1}),
    "roco pool=1 lead=1": ("roco", PAPER),
    "streaming": ("streaming", {}),
}
OTHERS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "roco lead=1000": ("roco", {"lead": 1000}),
    "roco pool=1": ("roco", {"pool": 1}),
    "roco pool=1 lead=1 recent=32": ("roco", {**PAPER, "recent": 32}),
    "h2o": ("h2o", {}),
    "tova": ("tova", {}),
    "random": ("random", {}),
    "answer first": ("none", {}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFirst(StepPolicy):
    """The lowest pooled score leaves; a row of the answer has 0, one of the question its mean."""

    name: str = "answer first"
    sinks: int = 4
    recent: int = 10
    observe: int = 32

    @property
    def columns(self) -> dict[str, torch.dtype]:
        return {"worth": torch.float32}

    def prompt(self, view: PromptView, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert view.mass is not None
        first = view.position - view.observed
        able = (view.position - view.pos.clamp(min=first)).clamp(min=1)
        mean, free = view.mass.mean(1) / able, view.live & (view.pos < first)
        return {"worth": torch.where(free, pool(mean, view.pos, free, 7, "max"), mean)}

    def score(self, view: StepView, count: int) -> tuple[Tensor, Tensor]:
        return view.columns["worth"], unprotected(view, self)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, default=Path("build/hand_over"))
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("run")
    one.add_argument("--minutes", type=float, default=8.0, help="begins no document after these")
    one.add_argument("--model", help="a folder; without it, the bundled one")
    one.add_argument("--tasks", default="interview")
    one.add_argument("--budgets", default=",".join(BUDGETS))
    one.add_argument("--length", type=int, default=1000)
    one.add_argument("--documents", type=int, default=180)
    one.add_argument("--more", type=int, default=40, help="of them also under the other policies")
    one.add_argument("--policy", default="adakv")
    one = commands.add_parser("write")
    one.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    args.state.mkdir(parents=True, exist_ok=True)
    {"run": run, "write": write}[args.what](args)


def run(args: argparse.Namespace) -> None:
    """Documents from where the last slice ended, each under every budget and policy."""
    began = time.monotonic()
    chat = minikv.load(args.model, policy="full", reuse="once")
    chat.recall.kind = "none"
    chat.engine = Engine(Rereading(chat.engine.network, chat.engine.kv), chat.engine.kv)
    model = Path(args.model).name if args.model else "bundled"
    work = {
        task: list(CHATS[task].make(chat.tokenizer, args.length, args.documents, SEED, TRAINED))
        for task in args.tasks.split(",")
    }
    for i in range(args.documents):
        for task, items in work.items():
            name = f"{model} {args.policy} {task} {args.length}"
            file = args.state / f"{name.replace(' ', '-')}.jsonl"
            done = {(r["document"], r["budget"]) for r in _rows(file)}
            for budget in args.budgets.split(","):
                if (i, budget) in done:
                    continue
                if time.monotonic() - began > args.minutes * 60:
                    print(f"document {i} of {args.documents}: again, please")
                    return
                which = DECIDING | (OTHERS if i < args.more else {})
                small = SMALL if int(budget) < 64 else {}
                scores = {}
                for label, (decode, options) in which.items():
                    made = EvictionConfig.read(args.policy, decode, budget, {**small, **options})
                    if int(budget) < made.least_rows():
                        continue
                    chat.reset()
                    chat.configure(made)
                    if label == "answer first":
                        chat.engine.kv.configure(replace(made.rules(), step=AnswerFirst()))
                    answers = PASSES["answers"].run(chat, items[i])
                    scores[label] = [
                        items[i].metric(answer, right, ())
                        for answer, right in zip(answers, items[i].right, strict=True)
                    ]
                row = {"run": name, "document": i, "budget": budget, "scores": scores}
                with file.open("a") as out:
                    out.write(json.dumps(row) + "\n")
    print("complete")


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()] if path.exists() else []


def write(args: argparse.Namespace) -> None:
    """The JSON, which `results.py write` makes a section of docs/results.md of."""
    cells: list[dict[str, object]] = []
    for path in sorted(args.state.glob("*.jsonl")):
        rows = _rows(path)
        for budget in sorted({str(row["budget"]) for row in rows}, key=int):
            mine = [row["scores"] for row in rows if row["budget"] == budget]
            for label in dict.fromkeys(label for scores in mine for label in scores):
                pairs = [(s[label], s["none"]) for s in mine if label in s]
                cells.append(
                    {"run": rows[0]["run"], "budget": budget, "decode": label, **_cell(pairs)}
                )
    args.json.write_text(json.dumps(cells, indent=1) + "\n")


def _cell(pairs: list[tuple[list[float], list[float]]]) -> dict[str, object]:
    """What one policy has right beside `none`, over [document](its scores, those of `none`)."""
    apart = [[a - b for a, b in zip(mine, none, strict=True)] for mine, none in pairs]
    low, high = intervals.of_means(apart)
    flat = [x for row in apart for x in row]
    lost, won = sum(x < 0 for x in flat), sum(x > 0 for x in flat)
    right = [x for mine, _ in pairs for x in mine]
    return {
        "documents": len(pairs),
        "score": 100 * sum(right) / len(right),
        "by_question": [
            100 * sum(mine[j] for mine, _ in pairs) / len(pairs) for j in range(len(pairs[0][0]))
        ],
        "minus_none": 100 * sum(flat) / len(flat),
        "low": None if low is None else 100 * low,
        "high": None if high is None else 100 * high,
        "lost": lost,
        "won": won,
        "p": _sign_test(lost, won),
    }


def _sign_test(lost: int, won: int) -> float:
    """Two-sided: how likely so uneven a split is where both are as likely."""
    n, few = lost + won, min(lost, won)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(few + 1)) / 2**n)


if __name__ == "__main__":
    main()
