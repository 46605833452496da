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
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE / "results"
OUT = HERE.parent / "results.md"

PROMPT = (
    "streaming,random,l2,keydiff,expected,tova,h2o,snapkv,pyramidkv,adakv,ada-pyramid,nacl,"
    "kvcrush,kvcrush(h2o),adakv+critical+turns"
)
STEP = "streaming,random,l2,hashevict,tova,scissorhands,h2o,roco"
SMALL = "-o window=16 -o proxies=16"  # at 32 rows the usual windows of 32 leave nothing
BUDGETS = "64,128,256,512"
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
    "decode-32": f"--tasks ppl --policy snapkv --decode none,{STEP} --budget 32 -o window=16 -n 10",
    "needle": f"--tasks needle --policy '{PROMPT}' --budget {BUDGETS} --length 1000 -n 40",
    "needle-32": f"--tasks needle --policy '{PROMPT}' --budget 32 {SMALL} --length 1000 -n 40",
    "ppl": f"--tasks ppl --policy '{PROMPT}' --budget {BUDGETS} -n 10",
    "ppl-32": f"--tasks ppl --policy '{PROMPT}' --budget 32 {SMALL} -n 10",
}  # fmt: skip


STRIDES, READ = "stride-32,stride,stride-more", ("32", "64", "128", "256", "512")


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
    Claim("Ada-SnapKV over SnapKV at small budgets", "Ada-KV", "facts", "facts", "adakv", "snapkv",
          ("64", "128")),
    Claim("the same, by attention lost", "Ada-KV", "facts", "loss", "adakv", "snapkv",
          ("64", "128")),
    Claim("the same, over six questions", "Ada-KV", "followup", "followup", "adakv", "snapkv",
          ("64", "128", "256", "512")),
    Claim("RoCo over H2O", "EasyKV", STRIDES, "facts", "roco", "h2o", READ),
    Claim("H2O over ScissorHands", "EasyKV", STRIDES, "facts", "h2o", "scissorhands", READ),
    Claim("ScissorHands over TOVA", "EasyKV", STRIDES, "facts", "scissorhands", "tova", READ),
    Claim("TOVA over streaming", "EasyKV", STRIDES, "facts", "tova", "streaming", READ),
    Claim("HashEvict over L2", "HashEvict", STRIDES, "facts", "hashevict", "l2", READ),
    Claim("RoCo over H2O, while writing", "EasyKV", "decode", "ppl", "roco", "h2o", ("64", "128"),
          True),
    Claim("HashEvict over L2, while writing", "HashEvict", "decode", "ppl", "hashevict", "l2",
          ("64", "128"), True),
    Claim("NaCl over H2O at 20 %", "NaCl", "share", "facts", "nacl", "h2o", ("20%",)),
    Claim("KVCrush over its base", "KVCrush", "facts", "facts", "kvcrush", "snapkv",
          ("64", "128")),
    Claim("KVCrush over its base", "KVCrush", "facts", "facts", "kvcrush(h2o)", "h2o",
          ("64", "128", "256")),
    Claim("4 times smaller within 1 %", "KVCrush", "share", "facts", "kvcrush", "full", ("25%",)),
    Claim("4 times smaller within 1 %", "Ada-KV", "share", "facts", "adakv", "full", ("25%",)),
    Claim("4 times smaller within 1 %", "SnapKV", "share", "facts", "snapkv", "full", ("25%",)),
    Claim("4 times smaller within 1 %", "NaCl", "share", "facts", "nacl", "full", ("25%",)),
)  # fmt: skip
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
        command = ["minikv", "eval", *shlex.split(RUNS[name]), *model, "--quiet"]
        print(shlex.join(command), file=sys.stderr, flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        path = FOLDER / f"{name}.json"
        subprocess.run(
            [*command, "--json", str(path)], check=True, env=environment, stdout=subprocess.DEVNULL
        )
        path.write_text(json.dumps(json.loads(path.read_text()), separators=(",", ":")) + "\n")


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
    return f"{cell['score']:.2f}" if task == "ppl" else f"{100 * cell['score']:.1f}"


def table(task: str, runs: list[str], decode: bool = False) -> list[str]:
    """A row per policy, a column per budget; the full cache first."""
    cells = [cell for name in runs for cell in load(name) if cell["task"] == task]
    if not cells:
        return ["Not measured yet.", ""]
    budgets = sorted({c["budget"] for c in cells if c["budget"] != "-"}, key=lambda b: int(b))
    key = "decode" if decode else "policy"
    names = list(dict.fromkeys(c[key] for c in cells if c["policy"] != "full"))
    full = find(cells, task, "full", "-")
    n = {c["n"] for c in cells}
    what = {"ppl": "perplexity, lower is better", "loss": "% of attention lost, lower is better",
            "agree": "% of answers equal to the full cache's"}.get(task, "% exact answers")
    lines = [f"{what}; n = {' to '.join(map(str, sorted({min(n), max(n)})))} a cell", ""]
    lines += ["| policy | " + " | ".join(budgets) + " |", "|---" * (len(budgets) + 1) + "|"]
    lines.append(f"| full cache | {' | '.join([figure(task, full)] * len(budgets))} |")
    for name in names:
        row = [figure(task, find(cells, task, name, b, decode)) for b in budgets]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return [*lines, ""]


def by_question(runs: list[str], budgets: tuple[str, ...]) -> list[str]:
    cells = [cell for name in runs for cell in load(name) if cell["task"] == "followup"]
    if not cells:
        return ["Not measured yet.", ""]
    most = max(len(c["by_question"]) for c in cells)
    lines = ["| policy | budget | " + " | ".join(f"Q{i + 1}" for i in range(most)) + " |",
             "|---" * (most + 2) + "|"]  # fmt: skip
    for cell in cells:
        if cell["budget"] in ("-", *budgets):
            row = " | ".join(f"{100 * s:.0f}" for s in cell["by_question"])
            lines.append(f"| {cell['policy']} | {cell['budget']} | {row} |")
    return [*lines, ""]


def difference(a: dict, b: dict) -> tuple[float, float]:
    """Mean and half of the 95 % interval of a - b over the same documents."""
    pairs = [x - y for x, y in zip(a["by_item"], b["by_item"], strict=True)]
    mean = sum(pairs) / len(pairs)
    spread = sum((x - mean) ** 2 for x in pairs) / max(1, len(pairs) - 1)
    return mean, 1.96 * math.sqrt(spread / len(pairs))


def verdict(claim: Claim, mean: float, half: float) -> str:
    if "within" in claim.text:  # not worse by more than a point
        if mean - half >= -0.01:
            return "agrees"
        return "disagrees" if mean + half < -0.01 else "undecided"
    gain = -mean if claim.task in LOWER else mean
    if gain - half > 0:
        return "agrees"
    return "disagrees" if gain + half < 0 else "no difference seen"


def claims() -> list[str]:
    lines = ["| claim | from | where | budget | difference, 95 % interval | here |",
             "|---" * 6 + "|"]  # fmt: skip
    for claim in CLAIMS:
        cells = [cell for name in claim.run.split(",") for cell in load(name)]
        for budget in claim.budgets:
            a = find(cells, claim.task, claim.better, budget, claim.decode)
            b = find(cells, claim.task, claim.worse, budget, claim.decode)
            if a is None or b is None:
                continue
            mean, half = difference(a, b)
            scale, unit = (1, " nats") if claim.task == "ppl" else (100, " points")
            shown = f"{scale * mean:+.{3 if scale == 1 else 1}f}"
            about = f"{shown} ± {scale * half:.{3 if scale == 1 else 1}f}{unit}"
            names = f"{claim.better} - {claim.worse}, {claim.task}"
            lines.append(
                f"| {claim.text} | {claim.source} | {names} | {budget} | {about} "
                f"| {verdict(claim, mean, half)} |"
            )
    return [*lines, ""]


def page() -> str:
    commands = [f"minikv eval {text} --json docs/measurements/results/{name}.json"
                for name, text in RUNS.items() if (FOLDER / f"{name}.json").exists()]  # fmt: skip
    lines = [
        "# Every policy at every budget", "",
        (HERE / "results-notes.md").read_text().strip(), "",
        "## What the papers claim, and what was seen here", "",
        "Differences are over the same documents, in pairs. `no difference seen` means that the",
        "interval includes zero, not that there is none.", "", *claims(),
        "## facts: one question, which comes with its document of 2,000 tokens", "",
        *table("facts", ["facts-32", "facts"]),
        "## followup: six questions about one document, in one chat", "",
        *table("followup", ["followup-32", "followup"]),
        "Exact answers in %, by the question's number:", "",
        *by_question(["followup-32", "followup"], ("64", "256", "512")),
        "## agree: the full cache's answer, word for word", "",
        *table("agree", ["facts-32", "facts"]),
        "## loss: attention that fell on evicted rows while the right answer was written", "",
        *table("loss", ["facts-32", "facts"]),
        "## needle: one fact in a text of 1,000 tokens, at five depths", "",
        *table("needle", ["needle-32", "needle"]),
        "## ppl: the last quarter of a document, token by token", "",
        *table("ppl", ["ppl-32", "ppl"]),
        "## Step policies that read the prompt, in blocks of 32 rows (`--stride 32`)", "",
        "The facts task on documents of 1,000 tokens. Rows are judged before the question is",
        "known. At 32 rows the blocks are of 16.", "", *table("facts", STRIDES.split(",")),
        "## Step policies while writing, after SnapKV at the prompt", "",
        "The last quarter of a document is written under the budget.", "",
        *table("ppl", ["decode-32", "decode"], decode=True),
        "## The commands", "", "```sh", *commands,
        "python docs/measurements/results.py write   # this page", "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
