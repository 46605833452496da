"""docs/results.md: what eviction costs answers, and beside it what papers claim.

    python docs/measurements/results.py run        # hours of one core; --only NAME for a part
    python docs/measurements/results.py write      # docs/results.md from docs/measurements/results/

`run` calls `minikv eval`; the commands are in RUNS and are printed in docs/results.md. The table of
whole answers stands in results-notes.md, with its commands.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    "facts": f"--tasks facts --policy '{PROMPT}' --budget {BUDGETS} -n 200 {PAPER}",
    "facts-32": f"--tasks facts --policy '{PROMPT}' --budget 32 {SMALL} -n 200 {PAPER}",
    "share": "--tasks facts --policy h2o,nacl,snapkv,adakv,kvcrush --budget 20%,25% -n 200"
    f" {PAPER}",
    "stride": f"--tasks facts --stride 32 --policy {STEP} --budget 128 --length 1000 -n 200",
    "stride-more": f"--tasks facts --stride 32 --policy {STEP} --budget 64,256,512 --length 1000"
    " -n 200",
    "stride-32": f"--tasks facts --stride 16 --policy {STEP} --budget 32 --length 1000 -n 200",
    "followup-reuse": "--tasks followup --policy global-span,adakv --budget 128 --length 2000"
    " --reuse recall,once -n 600",
    "decode-default": f"--tasks ppl --policy snapkv --decode {WRITING} --budget {BUDGETS} -n 10",
}
WHERE = {
    "facts": "facts-32,facts",
    "stride": "stride-32,stride,stride-more",
    "share": "share",
}
"""The runs of what a claim is about."""


@dataclass(frozen=True, slots=True)
class Claim:
    """`better` scores above `worse` in `where` at these budgets, says `source`."""

    text: str
    source: str
    where: str
    better: str
    worse: str
    budgets: str


_SMALL, _EVERY = "32,64,128", "32,64,128,256,512"
CLAIMS = [
    Claim(*row)
    for row in (
        ("Ada-SnapKV over SnapKV at small budgets", "Ada-KV", "facts", "adakv", "snapkv", _SMALL),
        ("RoCo over H2O", "EasyKV", "stride", "roco", "h2o", _EVERY),
        ("H2O over ScissorHands", "EasyKV", "stride", "h2o", "scissorhands", _EVERY),
        ("ScissorHands over TOVA", "EasyKV", "stride", "scissorhands", "tova", _EVERY),
        ("TOVA over streaming", "EasyKV", "stride", "tova", "streaming", _EVERY),
        ("HashEvict over L2", "HashEvict", "stride", "hashevict", "l2", _EVERY),
        ("NaCl over H2O at 20 %", "NaCl", "share", "nacl", "h2o", "20%"),
        ("KVCrush over its base", "KVCrush", "facts", "kvcrush", "snapkv", _EVERY),
        ("KVCrush over its base", "KVCrush", "facts", "kvcrush(h2o)", "h2o", _EVERY),
        ("4 times smaller within 1 %", "KVCrush", "share", "kvcrush", "full", "25%"),
        ("4 times smaller within 1 %", "Ada-KV", "share", "adakv", "full", "25%"),
        ("4 times smaller within 1 %", "SnapKV", "share", "snapkv", "full", "25%"),
        ("4 times smaller within 1 %", "NaCl", "share", "nacl", "full", "25%"),
    )
]


def kept(written: dict[str, Any]) -> dict[str, Any]:
    """What the tables are made of: without the questions and every answer."""
    plain = [
        {k: v for k, v in c.items() if k not in ("answers", "scores")} for c in written["cells"]
    ]
    return {"facts": written["facts"], "cells": plain}


Cells = list[dict[str, Any]]


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


def figure(cell: dict | None) -> str:
    return "-" if cell is None else f"{round(100 * cell['score'], 1) + 0.0:.1f}"  # never -0.0


def table(runs: str) -> list[str]:
    """Of facts: a row per policy, a column per budget; the full cache first."""
    cells = [cell for name in runs.split(",") for cell in load(name) if cell["task"] == "facts"]
    budgets = sorted({c["budget"] for c in cells if c["budget"] != "-"}, key=int)
    names = list(dict.fromkeys(c["policy"] for c in cells if c["policy"] != "full"))
    full = find(cells, "facts", "full", "-")
    lines = [sample(cells), "", "| policy | " + " | ".join(budgets) + " |"]
    lines.append("|---" * (len(budgets) + 1) + "|")
    lines.append(f"| full cache | {' | '.join([figure(full)] * len(budgets))} |")
    for name in names:
        row = [figure(find(cells, "facts", name, b)) for b in budgets]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return [*lines, ""]


def sample(cells: Cells) -> str:
    """What a cell is the mean of, and how wide the intervals are that the runs wrote beside it."""
    counts = {(c["n"], len(c["by_item"])) for c in cells}
    if len(counts) > 1:
        raise ValueError(f"cells of unlike size: {sorted(counts)}")
    halves = [100 * (c["high"] - c["low"]) / 2 for c in cells if c["policy"] != "full"]
    return (
        f"% exact answers; a cell: {counts.pop()[0]} documents, one answer each.\n"
        f"Half of a policy's 95 % interval: {min(halves):.1f} to {max(halves):.1f} points."
    )


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
        low, high = intervals.tango(more, less, len(pairs))
        return Difference(mean, low, high, (more, less))
    low, high = intervals.of_means([[pair] for pair in pairs])
    assert low is not None
    assert high is not None
    return Difference(mean, low, high, None)


def verdict(claim: Claim, low: float, high: float) -> str:
    if "within" in claim.text:  # not worse by more than a point
        if low >= -0.01:
            return "agrees"
        return "disagrees" if high < -0.01 else "undecided"
    if low > 0:
        return "agrees"
    return "disagrees" if high < 0 else "no difference seen"


def claims() -> list[str]:
    lines = [
        "| claim | from | where | budget | points, 95 % interval | alone right | here |",
        "|---" * 7 + "|",
    ]
    for claim in CLAIMS:
        cells = [c for name in WHERE[claim.where].split(",") for c in load(name)]
        for budget in claim.budgets.split(","):
            a = find(cells, "facts", claim.better, budget)
            b = find(cells, "facts", claim.worse, budget)
            if a is None or b is None:
                continue
            found = difference(a["by_item"], b["by_item"], shares=True)
            ends = (found.mean, found.low, found.high)
            mean, low, high = (f"{round(100 * x, 1) + 0.0:+.1f}" for x in ends)
            alone = f"{found.alone[0]} : {found.alone[1]}" if found.alone else ""
            names = f"{claim.better} - {claim.worse}, {claim.where}"
            lines.append(
                f"| {claim.text} | {claim.source} | {names} | {budget} "
                f"| {mean} ({low} to {high}) | {alone} "
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
    return [*lines, ""]


# -- the question was not seen --------------------------------------------------------------------

UNSEEN = HERE / "unseen.json"
Row = dict[str, Any]
"""One method at a length and a budget."""


def unseen(length: int) -> list[Row]:
    """Those of a length, with the full cache, for which nothing differs."""
    rows: list[Row] = json.loads(UNSEEN.read_text())
    return [r for r in rows if r["length"] == length]


def lengths() -> list[int]:
    return sorted({row["length"] for row in json.loads(UNSEEN.read_text())})


def unseen_table(rows: Sequence[Row], budgets: Sequence[str], names: Sequence[str]) -> list[str]:
    """A row for each method, a column for each budget; the full cache first."""
    by = {(row["method"], row["budget"]): row for row in rows}
    least, fewest = min(row["n"] for row in rows), min(row["documents"] for row in rows)
    lines = [f"A cell: {least:,} answers of {fewest:,} documents, or more.", ""]
    lines += ["| method | " + " | ".join(budgets) + " |", "|---" * (len(budgets) + 1) + "|"]
    full = [told(by["full", "-"])] * len(budgets)
    lines.append(f"| full cache | {' | '.join(full)} |")
    for name in names:
        row = [told(by[name, b]) if (name, b) in by else "" for b in budgets]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return [*lines, ""]


def told(row: Row) -> str:
    """A share with its interval, in %."""
    return f"{100 * row['score']:.1f} ({100 * row['low']:.0f}-{100 * row['high']:.0f})"


# -- the page -------------------------------------------------------------------------------------


def later_tables() -> list[str]:
    """Later questions of a chat, and one cache for many questions."""
    cells = load("followup-reuse")

    def later(policy: str, reuse: str) -> str:
        cell = next(c for c in cells if c["policy"] == policy and c["reuse"] == reuse)
        return f"{100 * sum(cell['by_question'][1:]) / 5:.1f}"

    lines = [
        "Six questions in each of 100 chats about documents of 2,000 tokens, at a budget of 128:",
        "% exact answers to questions 2 to 6. `recall`, the default of a chat, reads each question",
        "with all that was read before; `once` with the tokens kept for the first question:",
        "",
        "| policy | recall | once |",
        "|---|---|---|",
        f"| full cache | {later('full', 'once')} | |",
    ]
    for name in ("global-span", "adakv"):
        lines.append(f"| {name} | {later(name, 'recall')} | {later(name, 'once')} |")
    lines += [
        "",
        "The document was evicted before a question was seen (one cache, many questions): % exact",
        "answers at a budget of 128:",
        "",
        "| policy | 2,000 tokens | 8,000 tokens |",
        "|---|---|---|",
    ]
    for name in ("full", "kvzip", "keydiff", "snapkv", "adakv"):
        rows = [_one(unseen(n), name, "-" if name == "full" else "128") for n in lengths()]
        called = "full cache" if name == "full" else name
        lines.append(f"| {called} | {' | '.join(map(told, rows))} |")
    return [*lines, ""]


def _one(rows: Sequence[Row], method: str, budget: str) -> Row:
    return next(row for row in rows if (row["method"], row["budget"]) == (method, budget))


def commands() -> list[str]:
    found = [
        f"minikv eval {RUNS[name]} --json docs/measurements/results/{name}.json"
        for name in RUNS
        if (FOLDER / f"{name}.json").exists()
    ]
    rows = [row for row in json.loads(UNSEEN.read_text()) if row["budget"] != "-"]
    every = ",".join(dict.fromkeys(row["method"] for row in rows if "[" not in row["method"]))
    small = {row["method"] for row in rows if row["budget"] == "24" and "[" not in row["method"]}
    plain = "minikv eval --tasks facts --questions 5 --seed 2 --reuse blind -n 250"
    for length in lengths():
        found.append(f"{plain} --length {length} --policy {every} --budget 48,64,128,256")
        found.append(f"{plain} --length {length} --policy {','.join(sorted(small))} --budget 24,32")
    return [*found, "python docs/measurements/results.py write   # this page"]


def page() -> str:
    notes = dict(
        part.split("\n", 1) for part in (HERE / "results-notes.md").read_text().split("\n## ")
    )

    def note(name: str) -> list[str]:
        return [notes[name].strip(), ""]

    rows = unseen(2000)
    budgets = sorted({row["budget"] for row in rows} - {"-"}, key=int)
    names = list(dict.fromkeys(row["method"] for row in rows if row["budget"] != "-"))
    lines = [
        "# What stays, and what it costs the answers",
        "",
        *note("# Introduction"),
        "## Whole answers",
        "",
        *note("Whole answers"),
        "## Later questions",
        "",
        *later_tables(),
        "## Short answers: one question, which comes with its document of 2,000 tokens",
        "",
        *table(WHERE["facts"]),
        *note("Short answers"),
        "## Step policies that read the prompt, in blocks of 32 tokens (`--stride 32`)",
        "",
        "Documents of 1,000 tokens. Tokens are scored before the question is known. At a budget of",
        "32 the blocks have 16 tokens. Not measured on real text.",
        "",
        *table(WHERE["stride"]),
        *note("In blocks"),
        "## Step policies while writing, after SnapKV at the prompt",
        "",
        *note("Writing"),
        *writing(),
        "## The question was not seen",
        "",
        *note("Not seen"),
        *unseen_table(rows, budgets, names),
        "## What the papers claim, and what was seen here",
        "",
        *note("Claims"),
        *claims(),
        "## The commands",
        "",
        "```sh",
        *commands(),
        "```",
        "",
    ]
    return "\n".join(lines)


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
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    for name in args.only.split(","):
        command = ["minikv", "eval", *shlex.split(RUNS[name]), *model, "--quiet"]
        print(shlex.join(command), file=sys.stderr, flush=True)
        path = FOLDER / f"{name}.json"
        told = [*command, "--json", str(path)]
        subprocess.run(told, check=True, env=environment, stdout=subprocess.DEVNULL)
        written = kept(json.loads(path.read_text()))
        path.write_text(json.dumps(written, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
