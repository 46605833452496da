"""What answers are right when the question was not seen, and when it was: every method, at every
budget, in slices that go on from each other.

    python docs/measurements/unseen.py run --minutes 9          # again until it says "complete"
    python docs/measurements/unseen.py run --methods kvzip,kvzip+ --budgets 24,48 --lengths 8000
    python docs/measurements/unseen.py write                    # unseen.json and the pictures
    python docs/measurements/results.py write                   # the page with them

The question is not seen: a document is evicted by itself, once, and each of its questions is asked
as the first one behind what is left (`minikv eval --questions 5 --reuse blind`). It is seen: the
document is read with each question anew (`--reuse once`). Both are scored over the same questions.

A slice measures what the state does not have yet, document by document, so methods, budgets and
lengths can be added at any time, and several slices may run at once, each on its own share of the
documents (`--part 0 --parts 2`, with OMP_NUM_THREADS=1). Nothing is timed.

A method is a policy with, if it has any, its decode policy and options in brackets, as in
`snapkv[decode=none window=16]`. Of a budget that is too small for a method nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.eval import intervals, plot, run, tasks
from minikv.cli.eval.files import Item
from minikv.cli.eval.plot import Line, Panel, Point
from minikv.errors import ContextError, UsageError

HERE = Path(__file__).parent
FILE = HERE / "unseen.json"
NOTES = HERE / "default-notes.md"
PICTURES = HERE.parent / "pictures"
SEED = 920_000_000  # of documents that training never used
BLOCK = 5  # documents by which all lengths grow in turn
METHODS = (
    "streaming,random,l2,keydiff,expected,expected[epsilon=0.01],tova,h2o,snapkv,pyramidkv,adakv,"
    "ada-pyramid,nacl,kvcrush,adakv+critical+turns"
)
BUDGETS = "24,32,48,64,128,256"
LENGTHS = "2000,8000"
REUSES = {"blind": "not seen", "once": "seen"}
DEFAULT = "adakv"
RIVALS = ("snapkv+global", "defensive+global", "kvzip", "keydiff", "keydiff+global", "queryspan")
"""Methods that are compared with the default, in pairs."""
DRAWN = 8
"""Methods of a panel: the best ones, and the default. The tables have all."""
ROOM = 120
"""Tokens of a chat's own and of a question with its answer, which the longest document leaves."""


@dataclass(frozen=True, slots=True)
class Method:
    """A policy as the state names it."""

    name: str
    policy: str
    decode: str = "auto"
    options: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def read(text: str) -> Method:
        """`policy` or `policy[decode=NAME option=value ...]`."""
        found = re.fullmatch(r"([^\[\]]+)(?:\[([^\[\]]*)\])?", text)
        if found is None:
            raise SystemExit(f"cannot read the method {text!r}: policy[option=value ...]")
        options = dict(pair.split("=", 1) for pair in (found[2] or "").split())
        return Method(text, found[1], options.pop("decode", "auto"), options)

    def at(self, budget: str) -> EvictionConfig | None:
        """Its settings; None where it needs more tokens per head."""
        eviction = EvictionConfig.read(self.policy, self.decode, budget, dict(self.options))
        enough = eviction.budget.unit != "rows" or eviction.budget.value >= eviction.least_rows()
        return eviction if enough else None


FULL = Method("full", "full", "none")


# -- state ----------------------------------------------------------------------------------

Row = dict[str, object]
Key = tuple[str, str, str]
"""(method, budget, reuse)."""


def rows(state: Path) -> list[Row]:
    """All lines of the state's files."""
    return [
        json.loads(line) for path in sorted(state.glob("*.jsonl")) for line in path.open() if line
    ]


def known(state: Path, questions: int) -> dict[tuple[int, int], set[Key]]:
    """What has been measured of each (length, document)."""
    found: dict[tuple[int, int], set[Key]] = {}
    for row in rows(state):
        if row["questions"] == questions:
            place = int(str(row["length"])), int(str(row["document"]))
            key = str(row["method"]), str(row["budget"]), str(row["reuse"])
            found.setdefault(place, set()).add(key)
    return found


# -- measuring --------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> None:
    """Add documents to the state until the time is over."""
    began = time.monotonic()
    chat = minikv.load(args.model, policy="full", budget="512")
    args.state.mkdir(parents=True, exist_ok=True)
    have = known(args.state, args.questions)
    methods = [Method.read(text) for text in args.methods.split(",")]
    budgets, wanted_reuses = args.budgets.split(","), args.reuse.split(",")
    lengths = [min(int(n), chat.max_context - ROOM) for n in args.lengths.split(",")]
    made = left = 0
    for length, document in order(lengths, args.documents):
        if document % args.parts != args.part:
            continue
        done = have.get((length, document), set())
        for reuse in wanted_reuses:
            wanted = missing(chat, methods, budgets, reuse, done)
            if not wanted:
                continue
            if time.monotonic() - began > 60 * args.minutes:
                left += 1
                continue
            one(chat, args, length, document, reuse, wanted)
            made += 1
    note = f"{left:,} documents are left" if left else "complete"
    print(f"{made:,} documents in {(time.monotonic() - began) / 60:.1f} minutes; {note}")


def order(lengths: Sequence[int], documents: int) -> Iterator[tuple[int, int]]:
    """(length, document), so that every length has about as many whenever this is stopped."""
    for block in range(0, documents, BLOCK):
        for length in lengths:
            for document in range(block, min(block + BLOCK, documents)):
                yield length, document


Wanted = tuple[str, str, EvictionConfig]
"""(name of a method, budget, settings)."""


def missing(
    chat: ChatSession,
    methods: Sequence[Method],
    budgets: Sequence[str],
    reuse: str,
    done: set[Key],
) -> list[Wanted]:
    """What a document still has to be measured under. A full cache is never evicted, so it is
    measured once, with the question."""
    found: list[Wanted] = []
    if reuse == "once" and (FULL.name, "-", reuse) not in done:
        found.append((FULL.name, "-", EvictionConfig.read("full", "none")))
    for method in methods:
        for budget in budgets:
            eviction = method.at(budget)
            if eviction is None or (method.name, budget, reuse) in done:
                continue
            try:
                chat.check(eviction)
            except UsageError as error:
                print(f"{method.name} at {budget}: {error}")
            else:
                found.append((method.name, budget, eviction))
    return found


def one(
    chat: ChatSession,
    args: argparse.Namespace,
    length: int,
    document: int,
    reuse: str,
    wanted: Sequence[Wanted],
) -> None:
    """Measure a document and add it to the state: a line for each method and budget."""
    how = tasks.manner(args.model)
    (item,) = tasks.facts(chat.tokenizer, length, 1, SEED + document, how, args.questions)
    lines = [
        {
            "length": length,
            "document": document,
            "questions": args.questions,
            "method": name,
            "budget": budget,
            "reuse": reuse,
            "scores": scores,
            "held": held,
        }
        for (name, budget, _), (scores, held) in zip(
            wanted, scored(chat, item, reuse, wanted), strict=True
        )
    ]
    with (args.state / f"unseen-{args.part}of{args.parts}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def scored(
    chat: ChatSession, item: Item, reuse: str, wanted: Sequence[Wanted]
) -> list[tuple[list[float], float]]:
    """(scores by question, share held) of each; no scores where a method has no room for what it
    reads beside the document."""
    single = run.Run(chat, ["facts"], [item], [eviction for *_, eviction in wanted], [reuse])
    try:
        single.measure(lambda done, total: None)
    except (ContextError, UsageError) as error:
        if len(wanted) > 1:  # the others have room
            return [found for each in wanted for found in scored(chat, item, reuse, [each])]
        print(f"{wanted[0][0]} at {wanted[0][1]}: {error}")
        return [([], 0.0)]
    return [(cell.scores[0], round(cell.held, 4)) for cell in single.cells()]


# -- results ----------------------------------------------------------------------------------


def table(state: Path) -> list[Row]:
    """A row for each length, reuse, method and budget, with its interval over documents."""
    found: dict[tuple[int, str, str, str], dict[int, list[float]]] = {}
    for row in rows(state):
        scores = row["scores"]
        assert isinstance(scores, list)
        if not scores:
            continue
        key = int(str(row["length"])), str(row["reuse"]), str(row["method"]), str(row["budget"])
        found.setdefault(key, {})[int(str(row["document"]))] = scores
    made: list[Row] = []
    for (length, reuse, method, budget), documents in found.items():
        scores = [documents[number] for number in sorted(documents)]
        flat = [score for row in scores for score in row]
        low, high = intervals.of_shares(scores)
        made.append(
            {
                "length": length,
                "reuse": reuse,
                "method": method,
                "budget": budget,
                "documents": len(scores),
                "n": len(flat),
                "score": sum(flat) / len(flat),
                "low": low,
                "high": high,
                "by_document": {
                    number: round(sum(row) / len(row), 4) for number, row in documents.items()
                },
            }
        )
    return made


def write(args: argparse.Namespace) -> None:
    """unseen.json from the state, and a picture for each length from that. Rows of the file stay
    where the state has none, or has fewer documents."""
    if made := table(args.state):
        FILE.write_text(json.dumps(joined(load(), made), separators=(",", ":")) + "\n")
    PICTURES.mkdir(exist_ok=True)
    for length in lengths_of(load()):
        picture(length).write_text(plot.drawn(panels(load(), length)))


def joined(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Of the rows about the same thing the one of more documents, the later of two as good."""
    found: dict[tuple[object, ...], Row] = {}
    for row in (*old, *new):
        key = tuple(row[name] for name in ("length", "reuse", "method", "budget"))
        if key not in found or int(str(row["documents"])) >= int(str(found[key]["documents"])):
            found[key] = row
    return list(found.values())


def load() -> list[Row]:
    """The rows of unseen.json; none before it was written."""
    return json.loads(FILE.read_text()) if FILE.exists() else []


def lengths_of(cells: Sequence[Row]) -> list[int]:
    return sorted({int(str(cell["length"])) for cell in cells})


def picture(length: int) -> Path:
    return PICTURES / f"quality-{length}.svg"


def panels(cells: Sequence[Row], length: int) -> list[Panel]:
    """Not seen, then seen."""
    found = []
    for reuse, said in REUSES.items():
        mine = chosen(cells, length, reuse)
        full = [number(c["score"]) for c in mine if c["budget"] == "-"]
        names = dict.fromkeys(str(c["method"]) for c in mine if c["budget"] != "-")
        lines = [
            Line(
                name,
                tuple(
                    Point(str(c["budget"]), number(c["score"]), bound(c["low"]), bound(c["high"]))
                    for c in mine
                    if c["method"] == name
                ),
            )
            for name in names
        ]
        if names:
            title = f"{length:,} tokens, the question was {said}"
            found.append(Panel(title, tuple(best(lines)), full[0] if full else None))
    return found


def best(lines: Sequence[Line]) -> list[Line]:
    """The DRAWN lines of the highest mean over the budgets that all of them have, and the default;
    the best first."""
    shared = set.intersection(*({point.budget for point in line.points} for line in lines))

    def mean(line: Line) -> float:
        return sum(point.score for point in line.points if point.budget in shared)

    ordered = sorted(lines, key=mean, reverse=True)
    return ordered[:DRAWN] + [line for line in ordered[DRAWN:] if line.name == DEFAULT]


def chosen(cells: Sequence[Row], length: int, reuse: str) -> list[Row]:
    """Those of a length and reuse, with the full cache, for which nothing differs."""
    return [
        c for c in cells if c["length"] == length and (c["reuse"] == reuse or c["budget"] == "-")
    ]


def number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def bound(value: object) -> float | None:
    return None if value is None else number(value)


def section() -> list[str]:
    """The part of docs/results.md about these."""
    cells = load()
    lines = ["## The question was not seen", ""]
    if not cells:
        return [*lines, "Not measured yet.", ""]
    lines += [
        'This is the `facts` task, with several questions about each document. "Not seen" means',
        "that the document is evicted by itself, once for all its questions. Each question is",
        'then asked as if it were the first. "Seen" means that the document is read again with',
        "each question. A budget is tokens per head. A cell shows % exact answers with the 95 %",
        "interval over documents. In an empty cell, the budget is too small for the method. A",
        f"picture has the {DRAWN} best methods of each side, by the mean over the budgets that all",
        "methods have, and the default. The tables have all.",
        "",
    ]
    for length in lengths_of(cells):
        shown = picture(length).relative_to(HERE.parent)
        lines += [f"![Quality over budget, documents of {length:,} tokens]({shown})", ""]
        for reuse, said in REUSES.items():
            mine = chosen(cells, length, reuse)
            if any(c["budget"] != "-" for c in mine):
                lines += [f"### {length:,} tokens, the question was {said}", "", *grid(mine), ""]
    return [*lines, *beside_the_default(cells)]


def beside_the_default(cells: Sequence[Row]) -> list[str]:
    """How far other methods are ahead of the default, over the same documents."""
    by = {(c["length"], c["reuse"], c["method"], c["budget"]): c["by_document"] for c in cells}
    budgets = sorted({str(key[3]) for key in by if key[2] == DEFAULT}, key=int)
    lines = [
        f"### Beside the default, `{DEFAULT}`",
        "",
        "Points ahead of it, over the same documents in pairs, with the 95 % interval.",
        "",
        "| documents | method | " + " | ".join(budgets) + " |",
        "|---" * (len(budgets) + 2) + "|",
    ]
    for length in lengths_of(cells):
        for reuse, said in REUSES.items():
            for method in RIVALS:
                row = []
                for budget in budgets:
                    mine = by.get((length, reuse, method, budget))
                    other = by.get((length, reuse, DEFAULT, budget))
                    row.append("" if mine is None or other is None else apart(mine, other))
                if any(row):
                    lines.append(f"| {length:,}, {said} | {method} | {' | '.join(row)} |")
    return [*lines, "", NOTES.read_text().strip(), ""]


def apart(mine: object, other: object) -> str:
    """The mean difference in points, over the documents that both have; "" where an interval needs
    more of them."""
    assert isinstance(mine, dict)
    assert isinstance(other, dict)
    a = {int(key): value for key, value in mine.items()}
    b = {int(key): value for key, value in other.items()}
    pairs = [a[key] - b[key] for key in sorted(a.keys() & b.keys())]
    low, high = intervals.of_means([[pair] for pair in pairs])
    if low is None or high is None:
        return ""
    mean = sum(pairs) / len(pairs)
    ends = (f"{round(100 * x, 1) + 0.0:+.1f}" for x in (mean, low, high))
    return "{} ({} to {})".format(*ends)


def commands() -> list[str]:
    """How the section was made; nothing before it was."""
    if not FILE.exists():
        return []
    cells = json.loads(FILE.read_text())
    budgeted = [cell for cell in cells if cell["budget"] != "-"]

    def all_of(name: str) -> str:
        return ",".join(dict.fromkeys(str(cell[name]) for cell in budgeted))

    return [
        "python docs/measurements/unseen.py run \\",
        f"    --methods '{all_of('method')}' \\",
        f"    --budgets {all_of('budget')} --lengths {all_of('length')}   # until it says complete",
        "python docs/measurements/unseen.py write",
    ]


def grid(cells: Sequence[Row]) -> list[str]:
    """A row for each method, a column for each budget; the full cache first."""
    budgets = sorted({str(c["budget"]) for c in cells} - {"-"}, key=lambda b: int(b.rstrip("%")))
    names = dict.fromkeys(str(c["method"]) for c in cells if c["budget"] != "-")
    by = {(str(c["method"]), str(c["budget"])): c for c in cells}
    least = min(int(str(c["n"])) for c in cells)
    fewest = min(int(str(c["documents"])) for c in cells)
    lines = [f"A cell: {least:,} answers of {fewest:,} documents, or more.", ""]
    lines += ["| method | " + " | ".join(budgets) + " |", "|---" * (len(budgets) + 1) + "|"]
    full = by.get((FULL.name, "-"))
    if full is not None:
        lines.append(f"| full cache | {' | '.join([told(full)] * len(budgets))} |")
    for name in names:
        row = [told(by[name, b]) if (name, b) in by else "" for b in budgets]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return lines


def told(cell: Row) -> str:
    low, high = bound(cell["low"]), bound(cell["high"])
    score = f"{100 * number(cell['score']):.1f}"
    return score if low is None or high is None else f"{score} ({100 * low:.0f}-{100 * high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, default=Path("build/unseen"))
    commands = parser.add_subparsers(dest="what", required=True)
    part = commands.add_parser("run", help="measure for some minutes")
    part.add_argument("--methods", default=METHODS)
    part.add_argument("--budgets", default=BUDGETS)
    part.add_argument("--lengths", default=LENGTHS)
    part.add_argument("--documents", type=int, default=50, help="of each length")
    part.add_argument("--questions", type=int, default=5, help="about each document")
    part.add_argument("--reuse", default=",".join(REUSES))
    part.add_argument("--minutes", type=float, default=9.0, help="begins no document after these")
    part.add_argument("--part", type=int, default=0)
    part.add_argument("--parts", type=int, default=1)
    part.add_argument("--model", help="another one than the bundled")
    commands.add_parser("write", help="unseen.json and the pictures, from the state")
    args = parser.parse_args()
    {"run": measure, "write": write}[args.what](args)


if __name__ == "__main__":
    main()
