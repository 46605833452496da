"""Every policy, budget and task on the bundled model, and what the papers claim beside it.

    python docs/measurements/results.py run        # hours of one core; --only NAME for a part
    python docs/measurements/results.py write      # docs/results.md from docs/measurements/results/

`run` calls `minikv eval`; the commands are in RUNS and are printed in docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import unseen  # beside this file

from minikv.cli.eval import intervals

HERE = Path(__file__).parent
FOLDER = HERE / "results"
OUT = HERE.parent / "results.md"

PROMPT = (
    "streaming,random,l2,keydiff,expected,tova,h2o,snapkv,pyramidkv,adakv,ada-pyramid,nacl,"
    "kvcrush,kvcrush(h2o),adakv+critical+turns"
)
STEP = "streaming,random,l2,hashevict,tova,scissorhands,h2o,roco"
PAPER = "-o pool=1 -o lead=1"  # RoCo writes as in the paper; its default is newer
SMALL = "-o window=16 -o proxies=16"  # at a budget of 32, windows of 32 leave nothing
BUDGETS = "64,128,256,512"
WRITING = "none,roco,streaming,tova,h2o,rkv"  # each with its default
RUNS = {
    "facts": f"--tasks facts,agree,loss --policy '{PROMPT}' --budget {BUDGETS} -n 200",
    "followup": f"--tasks followup --policy '{PROMPT}' --budget {BUDGETS} -n 204",
    "facts-32": f"--tasks facts,agree,loss --policy '{PROMPT}' --budget 32 {SMALL} -n 200",
    "followup-32": f"--tasks followup --policy '{PROMPT}' --budget 32 {SMALL} -n 204",
    "share": "--tasks facts --policy h2o,nacl,snapkv,adakv,kvcrush --budget 20%,25% -n 200",
    "stride": f"--tasks facts --stride 32 --policy {STEP} --budget 128 --length 1000 -n 200",
    "stride-more": f"--tasks facts --stride 32 --policy {STEP} --budget 64,256,512 --length 1000"
    " -n 200",
    "stride-32": f"--tasks facts --stride 16 --policy {STEP} --budget 32 --length 1000 -n 200",
    "decode": f"--tasks ppl --policy snapkv --decode none,{STEP} --budget {BUDGETS} -n 10",
    "sixteen": "--tasks facts --policy defensive+global,defensive,snapkv --length 1500 --budget 16"
    " -o window=8 -o recent=4 -n 200",
    "decode-default": f"--tasks ppl --policy snapkv --decode {WRITING} --budget {BUDGETS} -n 10",
    "decode-32": f"--tasks ppl --policy snapkv --decode none,{STEP} --budget 32 -o window=16 -n 10",
    "needle": f"--tasks needle --policy '{PROMPT}' --budget {BUDGETS} --length 1000 -n 40",
    "needle-32": f"--tasks needle --policy '{PROMPT}' --budget 32 {SMALL} --length 1000 -n 40",
    "ppl": f"--tasks ppl --policy '{PROMPT}' --budget {BUDGETS} -n 10",
    "ppl-32": f"--tasks ppl --policy '{PROMPT}' --budget 32 {SMALL} -n 10",
}


def arguments(name: str) -> str:
    """What follows `minikv eval` in a run."""
    plain = "--stride" in RUNS[name] or name in ("decode-default", "sixteen")
    return RUNS[name] if plain else f"{RUNS[name]} {PAPER}"


STRIDES, EVERY = "stride-32,stride,stride-more", ("32", "64", "128", "256", "512")
FACTS, FOLLOWUP, DECODE = "facts-32,facts", "followup-32,followup", "decode-32,decode"
SMALL_BUDGETS = ("32", "64", "128")


@dataclass(frozen=True, slots=True)
class Claim:
    """`better` scores above `worse` in the runs' task at these budgets, says `source`."""

    text: str
    source: str
    run: str
    task: str
    better: str
    worse: str
    budgets: tuple[str, ...]
    decode: bool = False  # the names are decode policies


CLAIMS = (
    Claim(
        "Ada-SnapKV over SnapKV at small budgets",
        "Ada-KV",
        FACTS,
        "facts",
        "adakv",
        "snapkv",
        SMALL_BUDGETS,
    ),
    Claim("the same, by attention lost", "Ada-KV", FACTS, "loss", "adakv", "snapkv", SMALL_BUDGETS),
    Claim("the same, over six questions", "Ada-KV", FOLLOWUP, "followup", "adakv", "snapkv", EVERY),
    Claim("RoCo over H2O", "EasyKV", STRIDES, "facts", "roco", "h2o", EVERY),
    Claim("H2O over ScissorHands", "EasyKV", STRIDES, "facts", "h2o", "scissorhands", EVERY),
    Claim("ScissorHands over TOVA", "EasyKV", STRIDES, "facts", "scissorhands", "tova", EVERY),
    Claim("TOVA over streaming", "EasyKV", STRIDES, "facts", "tova", "streaming", EVERY),
    Claim("HashEvict over L2", "HashEvict", STRIDES, "facts", "hashevict", "l2", EVERY),
    Claim("RoCo over H2O, while writing", "EasyKV", DECODE, "ppl", "roco", "h2o", EVERY, True),
    Claim(
        "HashEvict over L2, while writing",
        "HashEvict",
        DECODE,
        "ppl",
        "hashevict",
        "l2",
        EVERY,
        True,
    ),
    Claim("NaCl over H2O at 20 %", "NaCl", "share", "facts", "nacl", "h2o", ("20%",)),
    Claim("KVCrush over its base", "KVCrush", FACTS, "facts", "kvcrush", "snapkv", EVERY),
    Claim("KVCrush over its base", "KVCrush", FACTS, "facts", "kvcrush(h2o)", "h2o", EVERY),
    Claim("4 times smaller within 1 %", "KVCrush", "share", "facts", "kvcrush", "full", ("25%",)),
    Claim("4 times smaller within 1 %", "Ada-KV", "share", "facts", "adakv", "full", ("25%",)),
    Claim("4 times smaller within 1 %", "SnapKV", "share", "facts", "snapkv", "full", ("25%",)),
    Claim("4 times smaller within 1 %", "NaCl", "share", "facts", "nacl", "full", ("25%",)),
)
LOWER = ("loss", "ppl")  # tasks where less is better


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "write"))
    parser.add_argument("--only", default=",".join(RUNS), help="runs, with commas")
    parser.add_argument("--model", help="another directory than the bundled model's")
    args = parser.parse_args()
    if args.what == "write":
        OUT.write_text(page())
        return
    FOLDER.mkdir(exist_ok=True)
    model = ["-m", args.model] if args.model else []
    for name in args.only.split(","):
        command = ["minikv", "eval", *shlex.split(arguments(name)), *model, "--quiet"]
        print(shlex.join(command), file=sys.stderr, flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        path = FOLDER / f"{name}.json"
        subprocess.run(
            [*command, "--json", str(path)], check=True, env=environment, stdout=subprocess.DEVNULL
        )
        path.write_text(
            json.dumps(kept(json.loads(path.read_text())), separators=(",", ":")) + "\n"
        )


def kept(written: dict[str, object]) -> dict[str, object]:
    """What the tables are made of: without the questions and every answer."""
    cells = written["cells"]
    assert isinstance(cells, list)
    plain = [{k: v for k, v in c.items() if k not in ("answers", "scores")} for c in cells]
    return {"facts": written["facts"], "cells": plain}


Cells = list[dict[str, object]]


def load(name: str) -> Cells:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text())["cells"] if path.exists() else []


def find(cells: Cells, task: str, policy: str, budget: str, decode: bool = False) -> dict | None:
    for cell in cells:
        name = cell["decode" if decode else "policy"]
        if cell["task"] != task:
            continue
        if cell["policy"] == policy == "full" or (name == policy and cell["budget"] == budget):
            return cell
    return None


def figure(task: str, cell: dict | None) -> str:
    if cell is None:
        return "-"
    if task == "ppl":
        return f"{cell['score']:.2f}"
    return f"{round(100 * cell['score'], 1) + 0.0:.1f}"  # never -0.0


def table(task: str, runs: list[str], decode: bool = False) -> list[str]:
    """A row per policy, a column per budget; the full cache first."""
    cells = [cell for name in runs for cell in load(name) if cell["task"] == task]
    if not cells:
        return ["Not measured yet.", ""]
    budgets = sorted(
        {c["budget"] for c in cells if c["budget"] != "-"}, key=lambda b: int(b.rstrip("%"))
    )
    key = "decode" if decode else "policy"
    names = list(dict.fromkeys(c[key] for c in cells if c["policy"] != "full"))
    full = find(cells, task, "full", "-")
    what = {
        "ppl": "perplexity, lower is better",
        "loss": "% of attention lost, lower is better",
        "agree": "% of answers equal to the full cache's",
    }.get(task, "% exact answers")
    lines = [f"{what}; {sample(task, cells)}", ""]
    lines += ["| policy | " + " | ".join(budgets) + " |", "|---" * (len(budgets) + 1) + "|"]
    lines.append(f"| full cache | {' | '.join([figure(task, full)] * len(budgets))} |")
    for name in names:
        row = [figure(task, find(cells, task, name, b, decode)) for b in budgets]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return [*lines, ""]


def sample(task: str, cells: Cells) -> str:
    """What a cell is the mean of, and how wide the intervals are that the runs wrote beside it."""
    counts = {(c["n"], len(c["by_item"])) for c in cells}
    if len(counts) > 1:
        raise ValueError(f"{task}: cells of unlike size: {sorted(counts)}")
    n, items = counts.pop()
    unit = {"ppl": "tokens", "loss": "answer tokens"}.get(task, "answers")
    of = f"{n:,} {unit} of {items} documents" if n != items else f"{n} documents, one answer each"
    scale, digits, points = (1, 2, "") if task == "ppl" else (100, 1, " points")
    halves = [scale * (c["high"] - c["low"]) / 2 for c in cells if c["policy"] != "full"]
    few, many = (f"{h:.{digits}f}" for h in (min(halves), max(halves)))
    wide = f"{few} to {many}{points}"
    return f"a cell: {of}.\nHalf of a policy's 95 % interval, from cell to cell: {wide}."


def by_question(runs: list[str]) -> list[str]:
    cells = [cell for name in runs for cell in load(name) if cell["task"] == "followup"]
    if not cells:
        return ["Not measured yet.", ""]
    most, chats = max(len(c["by_question"]) for c in cells), len(cells[0]["by_item"])
    bounds = [(share, *intervals.wilson(share, chats)) for share in (0.0, 0.1, 0.25, 0.5)]
    ends = [f"{100 * low:.0f} to {100 * high:.0f} at {100 * s:.0f} %" for s, low, high in bounds]
    lines = [
        f"A cell is the share of {chats} chats with this question right. Its 95 % interval",
        f"(Wilson) is {', '.join(ends)};",
        "above 50 % the same mirrored.",
        "",
        "| policy | budget | " + " | ".join(f"Q{i + 1}" for i in range(most)) + " |",
        "|---" * (most + 2) + "|",
    ]
    names = list(dict.fromkeys(c["policy"] for c in cells))
    for cell in sorted(cells, key=lambda c: names.index(c["policy"])):  # its budgets together
        row = " | ".join(f"{100 * s:.0f}" for s in cell["by_question"])
        line = f"| {cell['policy']} | {cell['budget']} | {row} |"
        if line not in lines:  # the full cache is in each run
            lines.append(line)
    return [*lines, ""]


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of a - b over the same documents with its 95 % interval; of documents with one answer,
    how many only a and only b has right."""

    mean: float
    low: float
    high: float
    alone: tuple[int, int] | None


def difference(a: Sequence[float], b: Sequence[float], shares: bool) -> Difference:
    """Tango's interval where each document is right or wrong, Student's t for means otherwise.

    t has no width at all where no document differs, which of a few documents proves little.
    """
    pairs = [x - y for x, y in zip(a, b, strict=True)]
    mean = sum(pairs) / len(pairs)
    if shares and set(pairs) <= {-1.0, 0.0, 1.0}:
        more, less = pairs.count(1.0), pairs.count(-1.0)
        low, high = -_tango(less, more, len(pairs)), _tango(more, less, len(pairs))
        return Difference(mean, low, high, (more, less))
    low, high = intervals.of_means([[pair] for pair in pairs])
    assert low is not None
    assert high is not None
    return Difference(mean, low, high, None)


def _tango(more: int, less: int, n: int) -> float:
    """Upper end of the score interval for the difference of two paired shares (Tango, Statistics in
    Medicine 17, 1998): `more` and `less` of n pairs differ, up and down."""
    low, high = (more - less) / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        b = (2 * n - more + less) * middle - more - less
        c = -less * middle * (1 - middle)
        down = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)  # likeliest share of `less`
        variance = n * (2 * down + middle * (1 - middle))
        if (n * middle - more + less) ** 2 < 1.96**2 * variance:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def verdict(claim: Claim, low: float, high: float) -> str:
    if "within" in claim.text:  # not worse by more than a point
        if low >= -0.01:
            return "agrees"
        return "disagrees" if high < -0.01 else "undecided"
    if claim.task in LOWER:
        low, high = -high, -low
    if low > 0:
        return "agrees"
    return "disagrees" if high < 0 else "no difference seen"


def claims() -> list[str]:
    lines = [
        "| claim | from | where | budget | difference, 95 % interval | alone right | here |",
        "|---" * 7 + "|",
    ]
    for claim in CLAIMS:
        cells = [cell for name in claim.run.split(",") for cell in load(name)]
        for budget in claim.budgets:
            a = find(cells, claim.task, claim.better, budget, claim.decode)
            b = find(cells, claim.task, claim.worse, budget, claim.decode)
            if a is None or b is None:
                continue
            found = difference(a["by_item"], b["by_item"], claim.task not in LOWER)
            scale, digits, unit = (1, 3, "nats") if claim.task == "ppl" else (100, 1, "points")
            ends = (found.mean, found.low, found.high)
            mean, low, high = (f"{round(scale * x, digits) + 0.0:+.{digits}f}" for x in ends)
            alone = f"{found.alone[0]} : {found.alone[1]}" if found.alone else ""
            names = f"{claim.better} - {claim.worse}, {claim.task}"
            lines.append(
                f"| {claim.text} | {claim.source} | {names} | {budget} "
                f"| {mean} ({low} to {high}) {unit} | {alone} "
                f"| {verdict(claim, found.low, found.high)} |"
            )
    return [*lines, ""]


def writing() -> list[str]:
    """The decode policies beside `none`, with their defaults, while prose is written."""
    cells = load("decode-default")
    lines = [
        "| decode policy | budget | perplexity | minus `none`, nats | tokens held |",
        "|---" * 5 + "|",
    ]
    for cell in cells:
        if cell["policy"] == "full":
            continue
        none = find(cells, "ppl", "none", cell["budget"], decode=True)
        found = difference(cell["by_item"], none["by_item"], shares=False)
        apart = f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
        lines.append(
            f"| {cell['decode']} | {cell['budget']} | {cell['score']:.3f} "
            f"| {'' if cell is none else apart} | {100 * cell['held']:.1f} % |"
        )
    return [*lines, ""] if cells else ["Not measured yet.", ""]


def page() -> str:
    commands = [
        f"minikv eval {arguments(name)} --json docs/measurements/results/{name}.json"
        for name in RUNS
        if (FOLDER / f"{name}.json").exists()
    ]
    lines = [
        "# Every policy at every budget",
        "",
        (HERE / "results-notes.md").read_text().strip(),
        "",
        "## What the papers claim, and what was seen here",
        "",
        "Differences are over the same documents, in pairs. Nats are the mean of the documents'",
        "own means. In facts a document is one answer, so its intervals are Tango's score",
        "interval, over 200 documents. `alone right` counts the documents that only the first",
        "or only the second policy has right. Elsewhere intervals are Student's t (followup 34",
        "documents, loss 200, ppl 10). `no difference seen` means that the interval includes",
        "zero, not that there is no difference. `undecided` means that it reaches past the one",
        "point that is claimed. Each row stands alone: of so many intervals at 95 %, two or",
        "three may miss by chance.",
        "",
        *claims(),
        "## facts: one question, which comes with its document of 2,000 tokens",
        "",
        *table("facts", ["facts-32", "facts"]),
        "The same with budgets that are a share of the document:",
        "",
        *table("facts", ["share"]),
        "A budget of 16, over documents of 1,500 tokens. A window of 8 tokens and 4 newest ones",
        "leave room in it; with the defaults no windowed method has any:",
        "",
        *table("facts", ["sixteen"]),
        "## followup: six questions about one document, in one chat",
        "",
        *table("followup", ["followup-32", "followup"]),
        "Exact answers in %, by the question's number:",
        "",
        *by_question(["followup-32", "followup"]),
        "## agree: the full cache's answer, word for word",
        "",
        *table("agree", ["facts-32", "facts"]),
        "## loss: attention that fell on evicted tokens while the right answer was written",
        "",
        *table("loss", ["facts-32", "facts"]),
        "## needle: one fact in a text of 1,000 tokens, at five depths",
        "",
        *table("needle", ["needle-32", "needle"]),
        "## ppl: the last quarter of a document, token by token",
        "",
        *table("ppl", ["ppl-32", "ppl"]),
        "## Step policies that read the prompt, in blocks of 32 tokens (`--stride 32`)",
        "",
        "The facts task on documents of 1,000 tokens. Tokens are scored before the question is",
        "known. At a budget of 32 the blocks have 16 tokens.",
        "",
        *table("facts", STRIDES.split(",")),
        "## Step policies while writing, after SnapKV at the prompt",
        "",
        "The last quarter of a document is written under the budget.",
        "",
        *table("ppl", ["decode-32", "decode"], decode=True),
        "The same, with the defaults of today, and how much of the document and the text each",
        "holds at the end:",
        "",
        *writing(),
        *unseen.section(),
        "## The commands",
        "",
        "```sh",
        *commands,
        *unseen.commands(),
        "python docs/measurements/results.py write   # this page",
        "```",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
