"""docs/results.md: every policy, budget and task on the bundled model, beside what papers claim.

    python docs/measurements/results.py run        # hours of one core; --only NAME for a part
    python docs/measurements/results.py write      # docs/results.md from docs/measurements/results/

`run` calls `minikv eval`; the commands are in RUNS and are printed in docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minikv.cli.eval import intervals, pictures

HERE = Path(__file__).parent
FOLDER = HERE / "results"
OUT = HERE.parent / "results.md"
PICTURES = HERE.parent / "pictures"

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
    "facts": f"--tasks facts,agree --policy '{PROMPT}' --budget {BUDGETS} -n 200",
    "followup": f"--tasks followup --policy '{PROMPT}' --budget {BUDGETS} -n 204",
    "facts-32": f"--tasks facts,agree --policy '{PROMPT}' --budget 32 {SMALL} -n 200",
    "followup-32": f"--tasks followup --policy '{PROMPT}' --budget 32 {SMALL} -n 204",
    "share": "--tasks facts --policy h2o,nacl,snapkv,adakv,kvcrush --budget 20%,25% -n 200",
    "stride": f"--tasks facts --stride 32 --policy {STEP} --budget 128 --length 1000 -n 200",
    "stride-more": f"--tasks facts --stride 32 --policy {STEP} --budget 64,256,512 --length 1000"
    " -n 200",
    "stride-32": f"--tasks facts --stride 16 --policy {STEP} --budget 32 --length 1000 -n 200",
    "decode": f"--tasks ppl --policy snapkv --decode none,{STEP} --budget {BUDGETS} -n 10",
    "followup-reuse": "--tasks followup --policy adakv --budget 128 --length 2000"
    " --reuse recall,once,blind -n 600",
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
    plain = "--stride" in RUNS[name] or name in ("decode-default", "sixteen", "followup-reuse")
    return RUNS[name] if plain else f"{RUNS[name]} {PAPER}"


WHERE = {
    "facts": ("facts-32,facts", "facts"),
    "loss": ("facts-32,facts", "loss"),
    "followup": ("followup-32,followup", "followup"),
    "stride": ("stride-32,stride,stride-more", "facts"),
    "decode": ("decode-32,decode", "ppl"),
    "share": ("share", "facts"),
}
"""The runs and the task of what a claim is about."""


@dataclass(frozen=True, slots=True)
class Claim:
    """`better` scores above `worse` in `where` at these budgets, says `source`. Of "decode" the
    names are decode policies."""

    text: str
    source: str
    where: str
    better: str
    worse: str
    budgets: str

    @property
    def task(self) -> str:
        return WHERE[self.where][1]


_SMALL, _EVERY = "32,64,128", "32,64,128,256,512"
CLAIMS = [
    Claim(*row)
    for row in (
        ("Ada-SnapKV over SnapKV at small budgets", "Ada-KV", "facts", "adakv", "snapkv", _SMALL),
        ("the same, by attention lost", "Ada-KV", "loss", "adakv", "snapkv", _SMALL),
        ("the same, over six questions", "Ada-KV", "followup", "adakv", "snapkv", _EVERY),
        ("RoCo over H2O", "EasyKV", "stride", "roco", "h2o", _EVERY),
        ("H2O over ScissorHands", "EasyKV", "stride", "h2o", "scissorhands", _EVERY),
        ("ScissorHands over TOVA", "EasyKV", "stride", "scissorhands", "tova", _EVERY),
        ("TOVA over streaming", "EasyKV", "stride", "tova", "streaming", _EVERY),
        ("HashEvict over L2", "HashEvict", "stride", "hashevict", "l2", _EVERY),
        ("RoCo over H2O, while writing", "EasyKV", "decode", "roco", "h2o", _EVERY),
        ("HashEvict over L2, while writing", "HashEvict", "decode", "hashevict", "l2", _EVERY),
        ("NaCl over H2O at 20 %", "NaCl", "share", "nacl", "h2o", "20%"),
        ("KVCrush over its base", "KVCrush", "facts", "kvcrush", "snapkv", _EVERY),
        ("KVCrush over its base", "KVCrush", "facts", "kvcrush(h2o)", "h2o", _EVERY),
        ("4 times smaller within 1 %", "KVCrush", "share", "kvcrush", "full", "25%"),
        ("4 times smaller within 1 %", "Ada-KV", "share", "adakv", "full", "25%"),
        ("4 times smaller within 1 %", "SnapKV", "share", "snapkv", "full", "25%"),
        ("4 times smaller within 1 %", "NaCl", "share", "nacl", "full", "25%"),
    )
]
LOWER = ("loss", "ppl")  # tasks where less is better


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
        cells = [c for name in WHERE[claim.where][0].split(",") for c in load(name)]
        for budget in claim.budgets.split(","):
            decode = claim.where == "decode"
            a = find(cells, claim.task, claim.better, budget, decode)
            b = find(cells, claim.task, claim.worse, budget, decode)
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


# -- the question was not seen --------------------------------------------------------------------

UNSEEN = HERE / "unseen.json"
REUSES = {"blind": "not seen", "once": "seen"}
DEFAULT = "adakv"
RIVALS = ("snapkv+global", "defensive+global", "kvzip", "keydiff", "keydiff+global", "queryspan")
"""Methods that are compared with the default of that time, in pairs."""
DRAWN = 8
"""Methods of a panel: the best ones, and the default. The tables have all."""

Row = dict[str, Any]
"""One method at a length, a budget and a value of --reuse."""


def unseen(length: int, reuse: str) -> list[Row]:
    """Those of a length and reuse, with the full cache, for which nothing differs."""
    rows: list[Row] = json.loads(UNSEEN.read_text())
    return [
        r for r in rows if r["length"] == length and (r["reuse"] == reuse or r["budget"] == "-")
    ]


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


def beside_the_default() -> list[str]:
    """How far other methods are ahead of the default, over the same documents."""
    budgets = ("48", "64", "128", "256")
    lines = ["| documents | method | " + " | ".join(budgets) + " |", "|---" * 6 + "|"]
    for length in lengths():
        for reuse, said in REUSES.items():
            by = {(r["method"], r["budget"]): r["by_document"] for r in unseen(length, reuse)}
            for method in RIVALS:
                row = [apart(by[method, b], by[DEFAULT, b]) for b in budgets]
                lines.append(f"| {length:,}, {said} | {method} | {' | '.join(row)} |")
    return [*lines, ""]


def apart(mine: Mapping[str, float], other: Mapping[str, float]) -> str:
    """The mean difference in points, over the documents that both have."""
    pairs = [mine[n] - other[n] for n in sorted(mine.keys() & other.keys(), key=int)]
    low, high = intervals.of_means([[pair] for pair in pairs])
    assert low is not None
    assert high is not None
    ends = (f"{round(100 * x, 1) + 0.0:+.1f}" for x in (sum(pairs) / len(pairs), low, high))
    return "{} ({} to {})".format(*ends)


def unseen_section() -> list[str]:
    lines = []
    for length in lengths():
        shown = f"pictures/quality-{length}.svg"
        lines += [f"![Quality over budget, documents of {length:,} tokens]({shown})", ""]
        for reuse, said in REUSES.items():
            rows = unseen(length, reuse)
            budgets = sorted({row["budget"] for row in rows} - {"-"}, key=int)
            names = list(dict.fromkeys(row["method"] for row in rows if row["budget"] != "-"))
            lines += [f"### {length:,} tokens, the question was {said}", ""]
            lines += unseen_table(rows, budgets, names)
    return lines


def draw() -> None:
    """A picture for each length: the question not seen, then seen."""
    for length in lengths():
        panels = []
        for reuse, said in REUSES.items():
            lines: dict[str, list[pictures.Point]] = {}
            for row in unseen(length, reuse):
                if row["budget"] != "-":
                    point = (row["budget"], row["score"], row["low"], row["high"])
                    lines.setdefault(row["method"], []).append(point)
            shared = set.intersection(*({p[0] for p in points} for points in lines.values()))
            score = {n: sum(p[1] for p in ps if p[0] in shared) for n, ps in lines.items()}
            ordered = sorted(lines, key=lambda name: -score[name])
            drawn = [n for i, n in enumerate(ordered) if i < DRAWN or n == DEFAULT]
            title = f"{length:,} tokens, the question was {said}"
            level = next(r["score"] for r in unseen(length, reuse) if r["budget"] == "-")
            panels.append(pictures.Panel(title, {name: lines[name] for name in drawn}, level))
        pictures.plot(panels, PICTURES / f"quality-{length}.svg")


# -- the page -------------------------------------------------------------------------------------


def first_tables() -> list[str]:
    """What a reader wants to know: one question, later questions, questions that were not seen."""
    facts = {"adakv", "snapkv", "keydiff", "h2o", "random"}
    once = [f"| {c['policy']} | {told(c)} |" for c in load("facts") if _at(c, facts, "128")]
    full = next(c for c in load("facts") if c["budget"] == "-")
    lines = [
        "One question comes with its document of 2,000 tokens: % exact answers of 200 at a budget",
        "of 128, with 95 % intervals:",
        "",
        "| policy | exact answers |",
        "|---|---|",
        f"| full cache | {told(full)} |",
        *once,
        "",
        "Six questions in one chat about such a document, `adakv` at 128: % exact answers to",
        "questions 2 to 6. `recall` is the default of a chat:",
        "",
        "| later questions are answered from | exact answers | the full cache's answer |",
        "|---|---|---|",
    ]
    where = {"once": "the tokens kept for the first question", "recall": "all that was read"}
    where["blind"] = "the tokens kept before any question was seen"
    for cell in load("followup-reuse"):
        later, same = (100 * sum(cell[n][1:]) / 5 for n in ("by_question", "same_by_question"))
        name = "full cache" if cell["budget"] == "-" else f"{cell['reuse']}: {where[cell['reuse']]}"
        lines.append(f"| {name} | {later:.1f} | {same:.1f} |")
    lines += [
        "",
        "The document was evicted before a question was seen (one cache, many questions): % exact",
        "answers at a budget of 128:",
        "",
        "| policy | 2,000 tokens | 8,000 tokens |",
        "|---|---|---|",
    ]
    for name in ("full", "kvzip", "keydiff", "snapkv", "adakv"):
        rows = [_one(unseen(n, "blind"), name, "-" if name == "full" else "128") for n in lengths()]
        called = "full cache" if name == "full" else name
        lines.append(f"| {called} | {' | '.join(map(told, rows))} |")
    return [*lines, ""]


def _at(cell: Row, names: set[str], budget: str) -> bool:
    return cell["task"] == "facts" and cell["policy"] in names and cell["budget"] == budget


def _one(rows: Sequence[Row], method: str, budget: str) -> Row:
    return next(row for row in rows if (row["method"], row["budget"]) == (method, budget))


def commands() -> list[str]:
    found = [
        f"minikv eval {arguments(name)} --json docs/measurements/results/{name}.json"
        for name in RUNS
        if (FOLDER / f"{name}.json").exists()
    ]
    rows = [row for row in json.loads(UNSEEN.read_text()) if row["budget"] != "-"]
    every = ",".join(dict.fromkeys(row["method"] for row in rows if "[" not in row["method"]))
    small = {row["method"] for row in rows if row["budget"] == "24" and "[" not in row["method"]}
    plain = "minikv eval --tasks facts --questions 5 --seed 2 --reuse blind,once -n 250"
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

    real = dict(part.split(": ", 1) for part in note("On real text")[0].split("\n\n"))

    def carries(name: str) -> list[str]:
        return [" ".join(real[name].split()), ""]

    lines = [
        "# Every policy at every budget",
        "",
        *note("# Introduction"),
        *first_tables(),
        "## How it was measured",
        "",
        *note("How it was measured"),
        "## What the tables show",
        "",
        *note("What the tables show"),
        "## What the papers claim, and what was seen here",
        "",
        *note("Claims"),
        *claims(),
        "## facts: one question, which comes with its document of 2,000 tokens",
        "",
        *table("facts", ["facts-32", "facts"]),
        *carries("facts"),
        "The same with budgets that are a share of the document:",
        "",
        *table("facts", ["share"]),
        "A budget of 16, over documents of 1,500 tokens. A window of 8 tokens and 4 newest ones",
        "leave room in it; with the defaults no windowed method has any:",
        "",
        *table("facts", ["sixteen"]),
        *carries("sixteen"),
        "## followup: six questions about one document, in one chat",
        "",
        *table("followup", ["followup-32", "followup"]),
        *carries("followup"),
        "## loss: attention that fell on evicted tokens while the right answer was written",
        "",
        *table("loss", ["facts-32", "facts"]),
        *carries("loss"),
        "## needle: one fact in a text of 1,000 tokens, at five depths",
        "",
        *table("needle", ["needle-32", "needle"]),
        *carries("needle"),
        "## ppl: the last quarter of a document, token by token",
        "",
        *table("ppl", ["ppl-32", "ppl"]),
        *carries("ppl"),
        "## Step policies that read the prompt, in blocks of 32 tokens (`--stride 32`)",
        "",
        "The facts task on documents of 1,000 tokens. Tokens are scored before the question is",
        "known. At a budget of 32 the blocks have 16 tokens.",
        "",
        *table("facts", WHERE["stride"][0].split(",")),
        *carries("stride"),
        "## Step policies while writing, after SnapKV at the prompt",
        "",
        "The last quarter of a document is written under the budget.",
        "",
        *table("ppl", ["decode-32", "decode"], decode=True),
        "The same, with the defaults of today, and how much of the document and the text each",
        "holds at the end:",
        "",
        *writing(),
        *carries("decode"),
        "## The question was not seen",
        "",
        *note("Not seen"),
        *carries("unseen"),
        *unseen_section(),
        f"### Beside `{DEFAULT}`, the default of that time",
        "",
        "Points ahead of it, over the same documents in pairs, with the 95 % interval.",
        "",
        *beside_the_default(),
        *note("Default"),
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
        draw()
        OUT.write_text(page())
        return
    FOLDER.mkdir(exist_ok=True)
    model = ["-m", args.model] if args.model else []
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    for name in args.only.split(","):
        command = ["minikv", "eval", *shlex.split(arguments(name)), *model, "--quiet"]
        print(shlex.join(command), file=sys.stderr, flush=True)
        path = FOLDER / f"{name}.json"
        told = [*command, "--json", str(path)]
        subprocess.run(told, check=True, env=environment, stdout=subprocess.DEVNULL)
        written = kept(json.loads(path.read_text()))
        path.write_text(json.dumps(written, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
