"""minikv beside kvpress, on the same model, the same tokens and the same documents.

    python3 -m venv kvpress && kvpress/bin/pip install -e '.[kvpress]'
    kvpress/bin/python docs/measurements/beside_kvpress.py kept
    kvpress/bin/python docs/measurements/beside_kvpress.py scores --minutes 9   # until "complete"
    kvpress/bin/python docs/measurements/beside_kvpress.py write

kvpress needs an older transformers than our tests have, so it gets an environment of its own.

kept: which positions stay after a document, in every head of every layer, under the options that
make a method of minikv the one that kvpress has. A position counts as explained if, by kvpress'
own scores, it is as good as the last one that stayed: within TIE of the range of its head's (of
adakv: its layer's) scores. The two networks round their sums in another order.

scores: right answers to questions about documents that were evicted before the question was seen
(`blind`), and with it. Both feed the same ids and write greedily. What is not the same:
- kvpress stores the question and the answer beside the budget; minikv's budget holds the question,
  too. `--decode none` leaves the answer beside it here as well.
- kvpress evicts nothing while it reads the question; minikv chooses again, from what is left and
  the question. So the question's own rows take a part of the budget here.
- With the question seen, kvpress' pipeline would have to feed the last token of the prompt after it
  has evicted. Here the answer goes on from the prompt itself, as minikv's does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.evaluation import intervals, run, tasks, wording
from minikv.cli.evaluation.files import Item
from minikv.models import BUNDLED

HERE = Path(__file__).parent
FILE = HERE / "beside_kvpress.json"
STATE = Path("build/beside_kvpress.jsonl")
SEED = 930_000_000  # of documents that training never used
TIE = 1e-4
WINDOW = 16

Kept = list[list[set[int]]]
"""[layer][head] -> positions."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One method in both. make(kvpress, ratio): kvpress'; together: all heads of a layer
    share their rows, so that scores are compared over the layer. down: kvpress rounds the budget
    down, not to the nearest."""

    policy: str
    make: Callable[[Any, float], Any]
    options: Mapping[str, object] = field(default_factory=dict)
    together: bool = False
    down: bool = True

    def press(self, kvpress: Any, tokens: int, budget: int) -> Any:
        """kvpress' method that keeps `budget` of so many tokens."""
        return self.make(kvpress, ratio(tokens, budget, down=self.down))


_SNAPKV = {"window": WINDOW, "kernel": 5, "pooling": "avg"}
_NONE = {"sinks": 0, "recent": 0}


def _snapkv(kvpress: Any, ratio: float) -> Any:
    return kvpress.SnapKVPress(ratio, window_size=WINDOW, kernel_size=5)


PAIRS = {
    "SnapKVPress": Pair("snapkv", _snapkv, _SNAPKV),
    "AdaKVPress(SnapKVPress)": Pair(
        "adakv",
        lambda kvpress, ratio: kvpress.AdaKVPress(_snapkv(kvpress, ratio), alpha_safeguard=0.2),
        {**_SNAPKV, "alloc": "floor", "alpha": 0.2},
        together=True,
    ),
    "PyramidKVPress": Pair(
        "pyramidkv",
        lambda kvpress, ratio: kvpress.PyramidKVPress(
            ratio, window_size=WINDOW, kernel_size=5, beta=20
        ),
        {**_SNAPKV, "line": "kvpress", "beta": 20},
        down=False,
    ),
    "KeyDiffPress": Pair("keydiff", lambda kvpress, ratio: kvpress.KeyDiffPress(ratio), _NONE),
    "KnormPress": Pair("l2", lambda kvpress, ratio: kvpress.KnormPress(ratio), _NONE),
    "ExpectedAttentionPress": Pair(
        "expected",
        lambda kvpress, ratio: kvpress.ExpectedAttentionPress(ratio, n_sink=4),
        {"sinks": 4, "recent": 0},
    ),
    "TOVAPress": Pair("tova", lambda kvpress, ratio: kvpress.TOVAPress(ratio)),
    "StreamingLLMPress": Pair(
        "streaming", lambda kvpress, ratio: kvpress.StreamingLLMPress(ratio, n_sink=4), {"sinks": 4}
    ),
}


def ratio(tokens: int, budget: int, *, down: bool = True) -> float:
    """The compression ratio at which kvpress keeps `budget` of so many tokens, where it rounds down
    or to the nearest."""
    return 1 - (budget + 0.5 * down) / tokens


def load(folder: Path = BUNDLED) -> Any:
    """The model as kvpress takes it, in float32."""
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


@dataclass(frozen=True, slots=True)
class Pressed:
    """What kvpress kept, and the scores [H, T] of each layer by which it chose."""

    kept: Kept
    scores: list[Tensor]


@torch.no_grad()
def pressed(model: Any, press: Any, ids: Sequence[int]) -> Pressed:
    """Read `ids` under a press, and see which positions stay."""
    from transformers import DynamicCache

    inner, found = getattr(press, "press", press), []
    score = inner.score

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = score(*args, **kwargs)
        found.append(made[0].clone())
        return made

    inner.score = recorded
    whole, cache = DynamicCache(), DynamicCache()
    prompt = torch.tensor([list(ids)])
    model.model(input_ids=prompt, past_key_values=whole)
    with press(model):
        model.model(input_ids=prompt, past_key_values=cache)
    del inner.score
    kept: Kept = []
    for number, layer in enumerate(model.model.layers):
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        keys, left = whole.layers[number].keys[0], cache.layers[number].keys[0]
        if masked is not None:  # kvpress keeps these rows and hides them from attention
            _, heads, places = masked
            gone = [set(places[heads == h].tolist()) for h in range(len(keys))]
            kept.append([set(range(len(ids))) - one for one in gone])
            layer.self_attn.masked_key_indices = None
        else:
            kept.append([_found(keys[h], left[h]) for h in range(len(keys))])
    return Pressed(kept, found)


def _found(keys: Tensor, left: Tensor) -> set[int]:
    """Positions in keys [T, D] of the rows that are left [B, D]."""
    places = {row.numpy().tobytes(): i for i, row in enumerate(keys)}
    return {places[row.numpy().tobytes()] for row in left}


def ours(chat: ChatSession, pair: Pair, budget: int, ids: Sequence[int]) -> Kept:
    """The same by minikv."""
    chat.reset()
    chat.configure(configured(pair, budget))
    chat.engine.prompt(list(ids))
    shape = chat.engine.kv.shape
    return [
        [set(chat.kept(layer, head).tolist()) for head in range(shape.kv_heads)]
        for layer in range(shape.layers)
    ]


def configured(pair: Pair, budget: int) -> EvictionConfig:
    """minikv's settings; the answer takes no room from the budget, as in kvpress."""
    return EvictionConfig.read(pair.policy, "none", budget, dict(pair.options))


@dataclass(frozen=True, slots=True)
class Agreement:
    """kept: positions that kvpress kept, over all heads. same: that both kept. tied: that only one
    of them kept, and that are as good as what it kept instead, by kvpress' scores; first: of these,
    in the first layer. other: the rest."""

    kept: int = 0
    same: int = 0
    tied: int = 0
    first: int = 0
    other: int = 0

    def plus(self, more: Agreement) -> Agreement:
        return Agreement(*(a + b for a, b in zip(astuple(self), astuple(more), strict=True)))


def compared(pair: Pair, mine: Kept, theirs: Pressed) -> Agreement:
    """Over all heads of all layers."""
    total = Agreement()
    for layer, (a, b) in enumerate(zip(mine, theirs.kept, strict=True)):
        scores = theirs.scores[layer]
        for head, (x, y) in enumerate(zip(a, b, strict=True)):
            # What is sure to stay in kvpress has a score above all others.
            if pair.together:
                among = scores
                edges = [float(scores[h][list(heads)].min()) for h, heads in enumerate(b)]
                edge = min(edges)
            else:
                among = scores[head]
                edge = float(among[list(y)].min())
            free = among[among < among.max()]
            wide = float(free.max() - free.min()) if len(free) else 0.0
            near = TIE * max(wide, 1e-12)
            apart = [abs(float(scores[head, place]) - edge) <= near for place in x ^ y]
            tied = sum(apart)
            first = 0 if layer else tied
            total = total.plus(Agreement(len(y), len(x & y), tied, first, len(apart) - tied))
    return total


def documents(chat: ChatSession, tokens: int, count: int, questions: int) -> Iterator[Item]:
    yield from tasks.facts(chat.tokenizer, tokens, count, SEED, questions=questions)


def kept(args: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each method and budget."""
    import kvpress

    model, chat = load(), minikv.load(policy="full", budget=512)
    rows = []
    for name, pair in PAIRS.items():
        for budget in map(int, args.budgets.split(",")):
            total = Agreement()
            for item in documents(chat, args.length, args.documents, 1):
                chat.reset()
                chat.reuse = "blind"
                ids = wording.parts(chat, item, 0)[0]
                theirs = pressed(model, pair.press(kvpress, len(ids), budget), ids)
                total = total.plus(compared(pair, ours(chat, pair, budget, ids), theirs))
            rows.append(
                {
                    "press": name,
                    "policy": pair.policy,
                    "options": dict(pair.options),
                    "budget": budget,
                    "tokens": args.length,
                    "documents": args.documents,
                    **asdict(total),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


class _Text:
    """What kvpress' pipeline needs of a tokenizer."""

    def __init__(self, chat: ChatSession) -> None:
        self._tokenizer = chat.tokenizer

    def decode(self, ids: Tensor, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids.tolist())


@torch.no_grad()
def answered(
    model: Any, chat: ChatSession, press: Any, context: Sequence[int], asked: Sequence[list[int]]
) -> list[str]:
    """kvpress' answers: its pipeline, given ids instead of texts."""
    from kvpress.pipeline import KVPressTextGenerationPipeline

    pipeline = object.__new__(KVPressTextGenerationPipeline)
    pipeline.model, pipeline.tokenizer = model, _Text(chat)
    model.generation_config.eos_token_id = sorted(chat.tokenizer.stop_ids)
    inputs = {
        "context_ids": torch.tensor([list(context)]),
        "questions_ids": [torch.tensor([ids]) for ids in asked],
    }
    made: list[str] = pipeline._forward(
        inputs, max_new_tokens=tasks.TRAINED.max_tokens, press=press
    )
    return made


@torch.no_grad()
def written(model: Any, chat: ChatSession, press: Any, ids: Sequence[int]) -> str:
    """The answer to a prompt under a press, whose first token comes from the prompt itself."""
    from transformers import DynamicCache

    cache, made = DynamicCache(), []
    with press(model):
        logits = model(torch.tensor([list(ids)]), past_key_values=cache, logits_to_keep=1).logits
    while len(made) < tasks.TRAINED.max_tokens:
        token = int(logits[0, -1, : chat.tokenizer.vocab].argmax())
        if token in chat.tokenizer.stop_ids:
            break
        place = torch.tensor([[len(ids) + len(made)]])
        made.append(token)
        step = torch.tensor([[token]])
        logits = model(step, past_key_values=cache, position_ids=place).logits
    return chat.tokenizer.decode(made)


def scores(args: argparse.Namespace) -> None:
    """Add documents to the state until the time is over."""
    import kvpress

    began, model, chat = time.monotonic(), load(), minikv.load(policy="full", budget=512)
    STATE.parent.mkdir(parents=True, exist_ok=True)
    have = {
        (r["document"], r["press"], r["budget"], r["reuse"], r["tokens"], r["questions"])
        for r in state()
    }
    budgets, left = list(map(int, args.budgets.split(","))), 0
    items = list(documents(chat, args.length, args.documents, args.questions))
    for number, item in enumerate(items):
        wanted = [
            (name, budget, reuse)
            for name in PAIRS
            for budget in budgets
            for reuse in ("blind", *(["once"] if number < args.seen else []))
            if (number, name, budget, reuse, args.length, args.questions) not in have
        ]
        if wanted and time.monotonic() - began > 60 * args.minutes:
            left += 1
            continue
        chat.reset()
        chat.reuse = "blind"
        cut = [wording.parts(chat, item, i) for i in range(len(item.questions))]
        for name, budget, reuse in wanted:
            pair = PAIRS[name]
            if reuse == "blind":
                context = cut[0][0]
                press = pair.press(kvpress, len(context), budget)
                theirs = answered(model, chat, press, context, [ids for _, ids in cut])
            else:
                theirs = []
                for parts in cut:
                    ids = [id for part in parts for id in part]
                    press = pair.press(kvpress, len(ids), budget)
                    theirs.append(written(model, chat, press, ids))
            one = run.Run(chat, ["facts"], [item], [configured(pair, budget)], [reuse])
            one.measure(lambda done, total: None)
            mine = one.answers()[0][0]
            row = {
                "document": number,
                "press": name,
                "policy": pair.policy,
                "budget": budget,
                "reuse": reuse,
                "tokens": args.length,
                "questions": args.questions,
                "kvpress": _scores(item, theirs),
                "minikv": _scores(item, mine),
                "same": [float(a.strip() == b.strip()) for a, b in zip(mine, theirs, strict=True)],
            }
            with STATE.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(f"{left:,} documents are left" if left else "complete")


def _scores(item: Item, answers: Sequence[str]) -> list[float]:
    return [item.metric(a, right, ()) for a, right in zip(answers, item.right, strict=True)]


def state() -> list[dict[str, Any]]:
    return [json.loads(line) for line in STATE.open()] if STATE.exists() else []


def table() -> list[dict[str, object]]:
    """A row for each method, budget and reuse, with intervals over documents."""
    found: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for row in state():
        key = tuple(row[name] for name in ("press", "policy", "budget", "reuse", "tokens"))
        found.setdefault(key, []).append(row)
    return [
        {
            **dict(zip(("press", "policy", "budget", "reuse", "tokens"), key, strict=True)),
            "documents": len(rows),
            "n": sum(len(row["minikv"]) for row in rows),
            **{name: _figure([row[name] for row in rows]) for name in ("minikv", "kvpress")},
            "same": _mean([row["same"] for row in rows]),
            "difference": intervals.of_means(
                [[_mean([row["minikv"]]) - _mean([row["kvpress"]])] for row in rows]
            ),
        }
        for key, rows in sorted(found.items(), key=lambda entry: str(entry[0]))
    ]


def _mean(rows: Sequence[Sequence[float]]) -> float:
    flat = [x for row in rows for x in row]
    return sum(flat) / len(flat)


def _figure(rows: Sequence[Sequence[float]]) -> dict[str, object]:
    low, high = intervals.of_shares(rows)
    return {"mean": _mean(rows), "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kept", "scores", "write"))
    parser.add_argument("--budgets", default="32,64,128")
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--questions", type=int, default=5, help="about each document")
    parser.add_argument(
        "--seen", type=int, default=8, help="documents of them also with the question seen"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="begins no document after these")
    args = parser.parse_args()
    if args.what == "scores":
        scores(args)
        return
    import kvpress
    import transformers

    written = json.loads(FILE.read_text()) if FILE.exists() else {}
    written["versions"] = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "kvpress": getattr(kvpress, "__version__", None) or _version("kvpress"),
    }
    if args.what == "kept":
        written["kept"] = kept(args)
    else:
        written["scores"] = table()
    FILE.write_text(json.dumps(written, indent=1) + "\n")
    print("\n".join(page(written)))


def page(written: Mapping[str, Any]) -> list[str]:
    """The tables, as Markdown."""
    lines = ["| kvpress | minikv | budget | kept | by both | ties | in the first layer | other |"]
    lines.append("|---" * 8 + "|")
    for row in written.get("kept", []):
        options = " ".join(f"-o {key}={value}" for key, value in row["options"].items())
        figures = [row["budget"], *(row[name] for name in ("kept", "same", "tied", "first"))]
        cells = [row["press"], f"`{row['policy']} {options}`".replace(" `", "`"), *figures]
        lines.append("| " + " | ".join(map(str, [*cells, row["other"]])) + " |")
    lines += ["", "| kvpress | minikv | question | budget | n | kvpress | minikv | same answer |"]
    lines.append("|---" * 8 + "|")
    for row in written.get("scores", []):
        said = "seen" if row["reuse"] == "once" else "not seen"
        cells = [row["press"], row["policy"], said, row["budget"], row["n"]]
        cells += [_told(row["kvpress"]), _told(row["minikv"]), f"{100 * row['same']:.0f} %"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _told(figure: Mapping[str, Any]) -> str:
    mean, low, high = (figure[name] for name in ("mean", "low", "high"))
    between = "" if low is None else f" ({100 * low:.0f} to {100 * high:.0f})"
    return f"{100 * mean:.0f} %{between}"


def _version(name: str) -> str:
    from importlib import metadata

    return metadata.version(name)


if __name__ == "__main__":
    main()
