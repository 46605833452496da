"""Recall: what later questions are answered with, and what it costs, in slices that go on from
each other.

    python docs/measurements/recall.py quality --minutes 7.5      # again until it says "complete"
    python docs/measurements/recall.py cost --length 2048         # each call adds rounds
    python docs/measurements/recall.py cost --length 8192
    python docs/measurements/recall.py cost --length 32768
    python docs/measurements/recall.py ledger
    python docs/measurements/recall.py turns
    python docs/measurements/recall.py write --json docs/measurements/recall.json

What a slice measures is added to files in --state, which `write` makes the JSON and the tables of.
`quality` times nothing, so several may run at once, each on its own share of the documents
(`--part 0 --parts 2`, with OMP_NUM_THREADS=1). `cost` needs a machine that does nothing else.

quality: the chats of `minikv eval` over the bundled model: full cache, then at each budget recall,
once and blind, over the first documents also refresh and recall from an int8 tier. Its last length
is the longest document that leaves room for every task's questions.

cost: shape S of `minikv bench`, random weights in bfloat16, Ada-KV. A follow-up feeds 20 new
tokens; `observed` are those that go through the network, because the policy scores with the last
32; the second kind also replays an answer. "refresh" is the reading of the conversation without a
tier. Bytes are the tier's rows and the weights, once; the rate beside them is that of a plain sum
over the weights in the same run.

ledger: bytes of the tier, as allocated and as counted. turns: memory over 500 turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

import minikv
from minikv.cache.stats import Shape
from minikv.cache.tier import Tier
from minikv.cache.tier_rows import row_nbytes
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import machine, models, shapes
from minikv.cli.bench.cached import Cached
from minikv.cli.bench.device import prepare
from minikv.cli.evaluation import intervals, run
from minikv.cli.evaluation.chats import CHATS
from minikv.cli.evaluation.measure import agreement
from minikv.cli.evaluation.tasks import TRAINED

LENGTHS = (2000, 4000, 7500)
BUDGETS = ("48", "128", "256")
SEED = 910_000_000  # of documents that training never used
BLOCK = 10  # documents by which all tasks and lengths grow in turn
NEW = 20  # tokens of a follow-up
REPLAYED = 64  # tokens of an answer before it
SEGMENT = 8  # steps between which two caches take turns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, default=Path("build/recall"))
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("quality")
    one.add_argument("--minutes", type=float, default=7.5, help="begins no document after these")
    one.add_argument("--tasks", default=",".join(CHATS))
    one.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    one.add_argument("--documents", type=int, default=100, help="of each task and length")
    one.add_argument("--refresh", type=int, default=20, help="of them also refresh and int8")
    one.add_argument("--policy", default="adakv")
    one.add_argument("--budgets", default=",".join(BUDGETS))
    one.add_argument("--part", type=int, default=0)
    one.add_argument("--parts", type=int, default=1)
    one = commands.add_parser("cost")
    one.add_argument("--length", type=int, required=True)
    one.add_argument("--rounds", type=int, default=1, help="readings of each kind")
    one.add_argument("--followups", type=int, default=15)
    one.add_argument("--turns", type=int, default=60, help="of eight steps with and without a tier")
    one.add_argument("--policy", default="adakv")
    one.add_argument("--budget", default="512")
    one.add_argument("--shape", default="s", help=", ".join(shapes.SHAPES))
    one = commands.add_parser("ledger")
    one.add_argument("--lengths", default="2048,8192,32768")
    one = commands.add_parser("turns")
    one.add_argument("--turns", type=int, default=500)
    one = commands.add_parser("write")
    one.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    args.state.mkdir(parents=True, exist_ok=True)
    work = {"quality": quality, "cost": cost, "ledger": ledger, "turns": turns, "write": write}
    work[args.what](args)


# -- state ----------------------------------------------------------------------------------

Row = dict[str, object]


def add(state: Path, name: str, row: Row) -> None:
    """A line at the end of a file of the state."""
    with (state / name).open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows(state: Path, pattern: str) -> list[Row]:
    """All lines of the state's files of these names."""
    return [
        json.loads(line) for path in sorted(state.glob(pattern)) for line in path.open() if line
    ]


# -- quality --------------------------------------------------------------------------------


def quality(args: argparse.Namespace) -> None:
    began, names = time.monotonic(), args.tasks.split(",")
    exact = minikv.load(policy="full", budget="512")
    coded = minikv.load(policy="full", budget="512", tier_dtype="int8")
    wanted = run.choices([args.policy], args.budgets.split(","), ["auto"], 0)
    have = {
        (r["task"], r["length"], r["document"], r["policy"]) for r in rows(args.state, "quality-*")
    }
    made = skipped = 0
    for length, name, document in order(args.lengths, names, args.documents):
        if document % args.parts != args.part or (name, length, document, args.policy) in have:
            continue
        if time.monotonic() - began > 60 * args.minutes:
            skipped += 1
            continue
        item = next(CHATS[name].make(exact.tokenizer, length, 1, SEED + document, TRAINED))
        reuses = ["recall", "once", "blind"]
        few = document < args.refresh
        first = run.Run(exact, [name], [item], wanted, [*reuses, *(["refresh"] if few else [])])
        answers = measured(first)
        if few:
            again = run.Run(coded, [name], [item], wanted[1:], ["recall"])
            answers |= {f"{key} int8": value for key, value in measured(again).items()}
        full = answers["full"]
        scores = {
            key: [item.metric(a, right, ()) for a, right in zip(given, item.right, strict=True)]
            for key, given in answers.items()
        }
        same = {
            key: [float(agreement(a, b).exact) for a, b in zip(given, full, strict=True)]
            for key, given in answers.items()
        }
        add(
            args.state,
            f"quality-{args.part}of{args.parts}.jsonl",
            {
                "task": name,
                "length": length,
                "document": document,
                "policy": args.policy,
                "scores": scores,
                "same": same,
            },
        )
        made += 1
    left = f"{skipped:,} documents are left" if skipped else "complete"
    print(f"{made:,} documents in {(time.monotonic() - began) / 60:.1f} minutes; {left}")


def order(lengths: str, names: Sequence[str], documents: int) -> Iterator[tuple[int, str, int]]:
    """(length, task, document), so that every table has about as many documents whenever this is
    stopped."""
    for block in range(0, documents, BLOCK):
        for length in map(int, lengths.split(",")):
            for name in names:
                for document in range(block, min(block + BLOCK, documents)):
                    yield length, name, document


def measured(one: run.Run) -> dict[str, list[str]]:
    """The answers to the one document by "full" or "BUDGET REUSE"."""
    one.check("recall.py")
    one.measure(lambda done, total: None)
    return {
        "full" if cell.budget == "-" else f"{cell.budget} {cell.reuse}": given[0]
        for cell, given in zip(one.cells(), one.answers(), strict=True)
    }


def quality_table(state: Path) -> list[Row]:
    """A row per task, length and cell."""
    found: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows(state, "quality-*"):
        found.setdefault(
            (str(row["task"]), int(str(row["length"])), str(row["policy"])), []
        ).append(row)
    tasks = list(CHATS)
    table: list[Row] = []
    for (task, length, policy), documents in sorted(
        found.items(), key=lambda item: (tasks.index(item[0][0]), *item[0][1:])
    ):
        keys = dict.fromkeys(key for row in documents for key in mapping(row["scores"]))
        for key in keys:
            scores = [mapping(r["scores"])[key] for r in documents if key in mapping(r["scores"])]
            same = [mapping(r["same"])[key] for r in documents if key in mapping(r["same"])]
            full = [mapping(r["scores"])["full"] for r in documents if key in mapping(r["scores"])]
            budget, _, reuse = key.partition(" ")
            first, last = ([row[at] for row in scores] for at in (0, -1))
            later = [row[1:] for row in scores]
            table.append(
                {
                    "task": task,
                    "length": length,
                    "policy": policy if key != "full" else "full",
                    "budget": budget if key != "full" else "-",
                    "reuse": reuse or "-",
                    "chats": len(scores),
                    "first": figure([[x] for x in first]),
                    "last": figure([[x] for x in last]),
                    "later": figure(later),
                    "full_last": mean([row[-1] for row in full]),
                    "same_last": figure([[row[-1]] for row in same]),
                    "same_later": figure([row[1:] for row in same]),
                    "all_right": figure([[float(min(row) == 1.0)] for row in scores]),
                    "first_half_right": figure(
                        [[float(min(row[: (len(row) + 1) // 2]) == 1.0)] for row in scores]
                    ),
                    "by_question": [mean(list(c)) for c in zip(*scores, strict=True)],
                    "same_by_question": [mean(list(c)) for c in zip(*same, strict=True)],
                }
            )
    return table


def mapping(value: object) -> Mapping[str, list[float]]:
    assert isinstance(value, dict)
    return value


def figure(table: Sequence[Sequence[float]]) -> Row:
    """A mean with its 95 % interval over chats, and the number of answers."""
    low, high = intervals.of_shares(table)
    flat = [x for row in table for x in row]
    return {"mean": mean(flat), "low": low, "high": high, "n": len(flat)}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# -- cost -----------------------------------------------------------------------------------


def cost(args: argparse.Namespace) -> None:
    device = prepare("cpu", 0)
    net = models.network(models.Spec(shapes.find(args.shape)))
    eviction = EvictionConfig.read(args.policy, "auto", args.budget)
    ids = models.prompt(args.length, net.config.vocab)
    more = models.prompt(REPLAYED + NEW, net.config.vocab, seed=2)
    own, base = Cached(net, eviction), Cached(net, eviction)
    clock = machine.Clock(device)
    kv = own.engine.kv
    kv.tier = tier = Tier(kv.shape, kv.dtype, kv.device)
    room = SEGMENT * (args.turns + 2)
    with_tier, without = [], []

    def recalled() -> float:
        tier.clear()
        own.engine.reset()
        return clock(lambda: own.engine.recall(ids, None, room))

    for number in range(args.rounds):  # each is first as often as the other
        for kind in (0, 1) if number % 2 else (1, 0):
            if kind:
                with_tier.append(recalled())
            else:
                without.append(base.read(ids, room))
    read = len(ids) * row_nbytes(kv.shape, kv.dtype)

    def followed(new: list[int]) -> list[float]:
        def once() -> None:
            tier.truncate(len(ids))
            own.engine.recall(ids + new, None, room)

        return clock.each(once, args.followups, warm=2)

    short, replay = followed(more[:NEW]), followed(more)
    rules = eviction.rules()
    prompt, step = rules.prompt, rules.step
    observed = max(prompt.evidence.observe if prompt else 0, step.observe if step else 0, NEW)
    tier.truncate(len(ids))
    own.engine.recall(ids, None, room)  # as `base` stands, from here on
    own.write(SEGMENT)
    base.write(SEGMENT)
    written: list[tuple[float, float]] = []
    for turn in range(args.turns):
        if turn % 2:
            beside = base.write(SEGMENT)
            written.append((own.write(SEGMENT), beside))
        else:
            taken = own.write(SEGMENT)
            written.append((taken, base.write(SEGMENT)))
    rate = models.reading_rate(net)
    base.close()
    own.close()
    tier.clear()
    full = Cached(net, EvictionConfig.read("full", "none"))
    full.read(ids, 64)
    full.write(4)
    steps = [full.write(SEGMENT) for _ in range(5)]
    add(
        args.state,
        "cost.jsonl",
        {
            "shape": args.shape,
            "length": args.length,
            "policy": args.policy,
            "budget": args.budget,
            "observed": observed,
            "replayed": REPLAYED,
            "reading_with_tier": with_tier,
            "reading": without,
            "followup": short,
            "followup_replayed": replay,
            "written": written,
            "full_step": steps,
            "tier_bytes": read,
            "weight_bytes": models.step_bytes(net),
            "read_bytes_s": rate,
            "machine": machine.facts(device),
            "torch": torch.__version__,
        },
    )
    print(json.dumps(cost_table(args.state)[-1], indent=1))


def cost_table(state: Path) -> list[Row]:
    """A row per shape, length and budget, over all the slices."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows(state, "cost.jsonl"):
        key = tuple(row[name] for name in ("shape", "length", "policy", "budget"))
        found.setdefault(key, []).append(row)
    table: list[Row] = []
    for (shape, length, policy, budget), slices in found.items():

        def pooled(name: str, slices: list[Row] = slices) -> list[float]:
            return [x for row in slices for x in row[name]]  # type: ignore[attr-defined]

        short, replay = (
            statistics.median(pooled(name)) for name in ("followup", "followup_replayed")
        )
        reading, with_tier = (
            statistics.median(pooled(name)) for name in ("reading", "reading_with_tier")
        )
        rate = statistics.median(float(str(row["read_bytes_s"])) for row in slices)
        tier, weights = (int(str(slices[0][name])) for name in ("tier_bytes", "weight_bytes"))
        beside = [a / b - 1 for row in slices for a, b in row["written"]]  # type: ignore[attr-defined]
        low, added, high = statistics.quantiles(beside, n=4)
        table.append(
            {
                "shape": shape,
                "length": length,
                "policy": policy,
                "budget": budget,
                "observed": slices[0]["observed"],
                "followup_s": short,
                "followup_replayed_s": replay,
                "refresh_s": reading,
                "followup_of_refresh": short / reading,
                "replayed_of_refresh": replay / reading,
                "full_step_s": statistics.median(pooled("full_step")),
                "tier_bytes": tier,
                "weight_bytes": weights,
                "read_bytes_s": rate,
                "tier_share_of_rate": tier / short / rate,
                "share_of_rate": (tier + weights) / short / rate,
                "reading_with_tier_s": with_tier,
                "reading_added": with_tier / reading - 1,
                "writing_added": added,
                "writing_quartiles": [low, high],
                "readings": len(pooled("reading")),
                "followups": len(pooled("followup")),
                "machine": slices[0]["machine"],
                "torch": slices[0]["torch"],
            }
        )
    return table


# -- memory ---------------------------------------------------------------------------------


def ledger(args: argparse.Namespace) -> None:
    """Tiers of S's sizes and of Llama 3 8B's head, without a network: bytes, counted and taken."""
    (args.state / "ledger.jsonl").unlink(missing_ok=True)
    for name in ("s", "llama-3-8b"):
        sizes = shapes.find(name)
        for length in map(int, args.lengths.split(",")):
            shape = models_shape(sizes, length)
            found = {}
            for kind, coded in (("same", False), ("int8", True)):
                tier = Tier(shape, torch.bfloat16, torch.device("cpu"), coded=coded)
                counted = length * row_nbytes(shape, torch.bfloat16, coded)
                if name == "s":  # the other is counted only: it would take gigabytes
                    tier.open(length)
                    found[kind] = (counted, tier.nbytes)
                    tier.clear()
                else:
                    found[kind] = (counted, None)
            same, int8 = found["same"], found["int8"]
            add(
                args.state,
                "ledger.jsonl",
                {
                    "shape": name,
                    "head_dim": sizes.head_dim,
                    "length": length,
                    "same_bytes": same[0],
                    "same_taken": same[1],
                    "int8_bytes": int8[0],
                    "int8_taken": int8[1],
                    "int8_share": int8[0] / same[0],
                },
            )
            print(rows(args.state, "ledger.jsonl")[-1])


def models_shape(sizes: shapes.Sizes, longest: int) -> Shape:
    return Shape(
        sizes.layers,
        sizes.kv_heads,
        sizes.heads,
        sizes.head_dim,
        (None,) * sizes.layers,
        longest,
    )


def turns(args: argparse.Namespace) -> None:
    """A random network of two layers: a document of 2,048 tokens, then turns of 20 + 8 tokens."""
    (args.state / "turns.jsonl").unlink(missing_ok=True)
    prepare("cpu", 0)
    net = models.network(models.Spec(shapes.find("tiny"), dtype="float32"))
    one = Cached(net, EvictionConfig.read("adakv", "auto", "128"))
    kv = one.engine.kv
    kv.tier = tier = Tier(kv.shape, kv.dtype, kv.device)
    said = models.prompt(2048, net.config.vocab)
    for turn in range(args.turns):
        one.engine.recall(said, None, 8)
        stats = kv.stats()
        if turn in (0, 1) or (turn + 1) % 50 == 0:
            row: Row = {
                "turn": turn + 1,
                "tokens": len(said),
                "arena": stats.allocated_bytes,
                "held": stats.held_bytes,
                "peak": stats.peak_bytes,
                "tier_rows": len(said) * row_nbytes(kv.shape, kv.dtype),
                "tier_taken": tier.nbytes,
            }
            add(args.state, "turns.jsonl", row)
            print(row, flush=True)
        one.write(8)
        said = said + models.prompt(28, net.config.vocab, seed=turn + 3)


# -- the page -------------------------------------------------------------------------------


def write(args: argparse.Namespace) -> None:
    made = {
        "quality": quality_table(args.state),
        "cost": cost_table(args.state),
        "ledger": rows(args.state, "ledger.jsonl"),
        "turns": rows(args.state, "turns.jsonl"),
    }
    args.json.write_text(json.dumps(made, indent=1) + "\n")
    print("\n".join(page(made)))


def page(made: Mapping[str, list[Row]]) -> list[str]:
    """The tables as they stand in the documents."""
    lines = [
        "| task | tokens | cache | chats | first question | last | later ones | as the full cache |"
        " every answer right |",
        "|---" * 9 + "|",
    ]
    for r in made["quality"]:
        name = "full" if r["budget"] == "-" else f"{r['policy']} {r['budget']}, {r['reuse']}"
        cells = [share(r[key]) for key in ("first", "last", "later", "same_later", "all_right")]
        lines.append(
            f"| {r['task']} | {int(str(r['length'])):,} | {name} | {r['chats']} | "
            + " | ".join(cells)
            + " |"
        )
    lines += [
        "",
        "| tokens | follow-up | with an answer replayed | refresh | of it | step, full cache |"
        " tier | of the read rate, tier alone | with the weights | reading, added |"
        " writing, added (quartiles) |",
        "|---" * 11 + "|",
    ]
    for r in made["cost"]:
        n = {key: float(str(x)) for key, x in r.items() if isinstance(x, int | float)}
        low, high = r["writing_quartiles"]  # type: ignore[misc]
        lines.append(
            f"| {int(n['length']):,} | {1e3 * n['followup_s']:.0f} ms "
            f"| {1e3 * n['followup_replayed_s']:.0f} ms | {n['refresh_s']:.2f} s "
            f"| 1/{1 / n['followup_of_refresh']:.0f} | {1e3 * n['full_step_s']:.1f} ms "
            f"| {n['tier_bytes'] / 2**20:.0f} MiB | {n['tier_share_of_rate']:.0%} "
            f"| {n['share_of_rate']:.0%} | {n['reading_added']:+.1%} "
            f"| {n['writing_added']:+.1%} ({low:+.1%}, {high:+.1%}) |"
        )
    lines += ["", "| shape | tokens | tier | int8 tier | share |", "|---" * 5 + "|"]
    for r in made["ledger"]:
        n = {key: float(str(x)) for key, x in r.items() if isinstance(x, int | float)}
        lines.append(
            f"| {r['shape']} | {int(n['length']):,} | {int(n['same_bytes']):,} bytes "
            f"| {int(n['int8_bytes']):,} bytes | {n['int8_share']:.1%} |"
        )
    head = "| turn | tokens | arena | peak of a prompt | tier, rows | tier, taken |"
    lines += ["", head, "|---" * 6 + "|"]
    for r in made["turns"]:
        keys = ("turn", "tokens", "arena", "peak", "tier_rows", "tier_taken")
        lines.append("| " + " | ".join(f"{int(str(r[key])):,}" for key in keys) + " |")
    return lines


def share(value: object) -> str:
    """A mean and its interval in percent."""
    assert isinstance(value, dict)
    if value["low"] is None:
        return f"{value['mean']:.1%}"
    return f"{value['mean']:.1%} ({100 * value['low']:.0f} to {100 * value['high']:.0f})"


if __name__ == "__main__":
    main()
