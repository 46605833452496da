"""minikv beside kvpress, on the same model, the same tokens and the same documents.

    python3 -m venv kvpress && kvpress/bin/pip install -e '.[kvpress]'
    kvpress/bin/python docs/measurements/beside_kvpress.py kept
    kvpress/bin/python docs/measurements/beside_kvpress.py scores --minutes 9   # until "complete"
    kvpress/bin/python docs/measurements/beside_kvpress.py write

kvpress needs an older transformers than our tests have, so it gets an environment of its own.

kept: which positions stay after a document, in every head of every layer, under the options that
make a method of minikv the one that kvpress has. A position counts as explained if, by kvpress'
own scores, it is as good as the last one that stayed: within TIE of the range of its head's (of
adakv: its layer's) scores. The two networks round their sums in another order. Where one rule
differs (`Pair.why`), kvpress' scores are chosen from under minikv's rule, too (`Pair.righted`): a
position is explained if it stays then. `LEFT_OUT` has the presses that are not compared.

scores: right answers to questions about documents that were evicted before the question was seen
(`blind`), and with it. Both feed the same ids and write greedily. What is not the same:
- kvpress stores the question and the answer beside the budget; minikv's budget holds the question,
  too. `--decode none` leaves the answer beside it here as well.
- kvpress evicts nothing while it reads the question; minikv chooses again, from what is left and
  the question. So the question's own rows take a part of the budget here. `beside` are minikv's
  answers without this difference: nothing is evicted while the question is read.
- kvpress' pipeline writes on if the first token already ends the answer. minikv's answer is empty.
- With the question seen, kvpress' pipeline would have to feed the last token of the prompt after it
  has evicted. Here the answer goes on from the prompt itself, as minikv's does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import minikv
from minikv.chat import reading
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.eval import intervals, run, tasks, wording
from minikv.cli.eval.files import Item
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
    share their rows, so that scores are compared over the layer. more: what has to be added to the
    budget, in rows, so that kvpress' rounding keeps just the budget. eager: kvpress reads the
    attention itself, which only transformers' eager attention yields. chunk: the documents of
    `kept` are cut to a multiple of so many tokens. why: which rule is another one. righted: what
    kvpress would keep, by its own scores, under minikv's rule."""

    policy: str
    make: Callable[[Any, float], Any]
    options: Mapping[str, object] = field(default_factory=dict)
    together: bool = False
    more: float = 0.5
    eager: bool = False
    chunk: int = 1
    why: str = ""
    righted: Callable[[Pressed], Kept] | None = None

    def press(self, kvpress: Any, tokens: int, budget: int) -> Any:
        """kvpress' method that keeps `budget` of so many tokens."""
        return self.make(kvpress, 1 - (budget + self.more) / tokens)


_SNAPKV = {"window": WINDOW, "kernel": 5, "pooling": "avg"}
_NONE = {"sinks": 0, "recent": 0}
_ALPHA, _EPSILON, _SINKS = 0.2, 1e-4, 4  # kvpress' defaults


def _snapkv(kvpress: Any, ratio: float) -> Any:
    return kvpress.SnapKVPress(ratio, window_size=WINDOW, kernel_size=5)


def _with_newest(theirs: Pressed) -> Kept:
    """KVzip's choice if the newest row of every head has to stay."""
    scores = torch.stack(theirs.scores)
    scores[..., -1] = torch.inf
    found = _sets(scores.flatten(0, 1), sum(len(head) for layer in theirs.kept for head in layer))
    heads = scores.shape[1]
    return [found[lo : lo + heads] for lo in range(0, len(found), heads)]


def _half_by_score(theirs: Pressed) -> Kept:
    """CriticalAda's choice if half of every head's rows are chosen by score, and no more."""
    kept: Kept = []
    for layer, scores, norms in zip(theirs.kept, theirs.scores, theirs.norms, strict=True):
        weighed = (scores + _EPSILON) * norms
        for head, rows in enumerate(layer):
            weighed[head, scores[head].topk(len(rows) // 2).indices] = torch.inf
        kept.append([set(weighed[h].topk(len(x)).indices.tolist()) for h, x in enumerate(layer)])
    return kept


def _floor_beside_sinks(theirs: Pressed) -> Kept:
    """AdaKV's choice if the rows that a head is sure of are so many of its rows without sinks, and
    the sinks."""
    kept: Kept = []
    for layer, scores in zip(theirs.kept, theirs.scores, strict=True):
        total, best = sum(map(len, layer)), scores.clone()
        own = _SINKS + int((total // len(layer) - _SINKS) * _ALPHA)
        best.scatter_(1, scores.topk(own, dim=1).indices, torch.inf)  # sinks score above the rest
        kept.append(_sets(best, total))
    return kept


def _sets(scores: Tensor, count: int) -> list[set[int]]:
    """The positions of the best `count` of all scores [H, T], by head."""
    best = scores.flatten().topk(count).indices
    return [
        set((best[best // scores.shape[1] == h] % scores.shape[1]).tolist())
        for h in range(len(scores))
    ]


_STARTS = 2  # tokens before the document's text: the chat template's, which KVzip does not score
_KVZIP = {"sinks": _STARTS, "chunk": 2048}
_NEWEST = (
    "minikv keeps the newest row of every head. In kvpress it may leave as any other row, and one "
    "more of the others stays."
)
_LESS = -0.01  # KVzip rounds down how many rows leave, over all layers and heads


def _kvzip(kvpress: Any, ratio: float, plus: bool = False) -> Any:
    return kvpress.KVzipPress(ratio, n_sink=_STARTS, chunk_size=2048, kvzip_plus_normalization=plus)


PAIRS = {
    "SnapKVPress": Pair("snapkv", _snapkv, _SNAPKV),
    "AdaKVPress(SnapKVPress)": Pair(
        "adakv",
        lambda kvpress, ratio: kvpress.AdaKVPress(_snapkv(kvpress, ratio), alpha_safeguard=_ALPHA),
        {**_SNAPKV, "alloc": "floor", "alpha": _ALPHA},
        together=True,
    ),
    "PyramidKVPress": Pair(
        "pyramidkv",
        lambda kvpress, ratio: kvpress.PyramidKVPress(
            ratio, window_size=WINDOW, kernel_size=5, beta=20
        ),
        {**_SNAPKV, "line": "kvpress", "beta": 20},
        more=0.0,  # it rounds to the nearest
    ),
    "KeyDiffPress": Pair("keydiff", lambda kvpress, ratio: kvpress.KeyDiffPress(ratio), _NONE),
    "KnormPress": Pair("l2", lambda kvpress, ratio: kvpress.KnormPress(ratio), _NONE),
    "ExpectedAttentionPress": Pair(
        "expected",
        lambda kvpress, ratio: kvpress.ExpectedAttentionPress(ratio, n_sink=_SINKS),
        {"sinks": _SINKS, "recent": 0},
    ),
    "AdaKVPress(ExpectedAttentionPress)": Pair(
        "ada-expected",
        lambda kvpress, ratio: kvpress.AdaKVPress(
            kvpress.ExpectedAttentionPress(ratio, n_sink=_SINKS, epsilon=0.01),
            alpha_safeguard=_ALPHA,
        ),
        {"sinks": _SINKS, "recent": 0, "epsilon": 0.01, "alloc": "floor", "alpha": _ALPHA},
        together=True,
        why="In kvpress the sinks are a part of the rows that a head is sure of (`alpha` of its "
        "even share). In minikv the sinks are beside these rows.",
        righted=_floor_beside_sinks,
    ),
    "TOVAPress": Pair("tova", lambda kvpress, ratio: kvpress.TOVAPress(ratio)),
    "StreamingLLMPress": Pair(
        "streaming",
        lambda kvpress, ratio: kvpress.StreamingLLMPress(ratio, n_sink=_SINKS),
        {"sinks": _SINKS},
    ),
    "ChunkKVPress(SnapKVPress)": Pair(
        "chunkkv",
        lambda kvpress, ratio: kvpress.ChunkKVPress(_snapkv(kvpress, ratio), chunk_length=WINDOW),
        {**_SNAPKV, "chunk": WINDOW},
        together=True,
        chunk=WINDOW,
        why="The documents of the first table are cut, so that the window is the last chunk. "
        "Elsewhere kvpress keeps fewer rows than the budget, since it keeps whole chunks only, and "
        "the window's tokens count in their chunks.",
    ),
    "CriticalKVPress(SnapKVPress)": Pair(
        "snapkv+critical",
        lambda kvpress, ratio: kvpress.CriticalKVPress(_snapkv(kvpress, ratio)),
        {**_SNAPKV, "by_score": 0.5, "epsilon": _EPSILON},
    ),
    "CriticalAdaKVPress(SnapKVPress)": Pair(
        "adakv+critical",
        lambda kvpress, ratio: kvpress.CriticalAdaKVPress(
            _snapkv(kvpress, ratio), alpha_safeguard=_ALPHA
        ),
        {**_SNAPKV, "alloc": "floor", "alpha": _ALPHA, "by_score": 0.5, "epsilon": _EPSILON},
        together=True,
        why="In kvpress the rows that a head is sure of (`alpha` of its even share) are chosen by "
        "score alone, even where they are more than half of its rows (`by_score`).",
        righted=_half_by_score,
    ),
    "ObservedAttentionPress": Pair(
        "h2o",
        lambda kvpress, ratio: kvpress.ObservedAttentionPress(ratio),
        {"average": True, "recent_share": 0.0, "sinks": 0},
        eager=True,
    ),
    "BlockPress(KeyDiffPress)": Pair(
        "keydiff",
        lambda kvpress, ratio: kvpress.BlockPress(kvpress.KeyDiffPress(ratio), block_size=128),
        {**_NONE, "block": 128},
    ),
    "KVzipPress": Pair(
        "kvzip",
        _kvzip,
        _KVZIP,
        together=True,
        more=_LESS,
        why=_NEWEST,
        righted=_with_newest,
    ),
    "KVzipPress, plus": Pair(
        "kvzip+",
        lambda kvpress, ratio: _kvzip(kvpress, ratio, plus=True),
        _KVZIP,
        together=True,
        more=_LESS,
        why=_NEWEST,
        righted=_with_newest,
    ),
}

LEFT_OUT = {
    "RandomPress": "Each program draws its own numbers.",
    **dict.fromkeys(
        ("DecodingPress", "PrefillDecodingPress", "CompressionRatioDecodingPress"),
        "They evict while an answer is written. Both programs write without that here.",
    ),
    **dict.fromkeys(
        ("BasePress", "ScorerPress", "ComposedPress", "PerLayerCompressionPress"),
        "They are parts of methods, or join several.",
    ),
    **dict.fromkeys(
        (
            *("CAMPress", "CURPress", "CapPress", "ChunkPress", "CompactorPress", "DMSPress"),
            *("DuoAttentionPress", "EntropyGatedChunkKVPress", "ExpectedAttentionStatsPress"),
            *("FastKVzipPress", "FinchPress", "KVComposePress", "KVgradPress", "KVzapPress"),
            *("KeyRerotationPress", "LUKVPress", "LagKVPress", "LeverageScorePress"),
            *("MergingPress", "NonCausalAttnPress", "QFilterPress", "RestoreKVPress"),
            *("SimLayerKVPress", "ThinKPress"),
        ),
        "minikv has no such method.",
    ),
}
"""Presses of kvpress 0.5.5 that are in no pair, and why."""


def load(folder: Path = BUNDLED, *, eager: bool = False) -> Any:
    """The model as kvpress takes it, in float32. eager: with the attention of every layer."""
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager" if eager else "sdpa"
    )
    return model.eval()


@dataclass(frozen=True, slots=True)
class Pressed:
    """What kvpress kept, the scores [H, T] of each layer by which it chose, and the norms of the
    layer's values after the output projection, by which CriticalKV weighs them."""

    kept: Kept
    scores: list[Tensor]
    norms: list[Tensor]


@torch.no_grad()
def pressed(model: Any, press: Any, ids: Sequence[int], chat: ChatSession) -> Pressed:
    """Read `ids` under a press, and see which positions stay."""
    from kvpress import CriticalKVPress
    from transformers import DynamicCache

    whole, cache = DynamicCache(), DynamicCache()
    prompt = torch.tensor([list(ids)])
    model.model(input_ids=prompt, past_key_values=whole)
    with _recording(press, whole) as found, _requesting(chat), press(model):
        model.model(input_ids=prompt, past_key_values=cache)
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
    norms = [
        CriticalKVPress.vwl1norm(whole.layers[number].values, layer.self_attn)[0]
        for number, layer in enumerate(model.model.layers)
    ]
    return Pressed(kept, found, norms)


@contextmanager
def _recording(press: Any, whole: Any) -> Iterator[list[Tensor]]:
    """Inside, the press' scores [H, T] go to the list, a tensor for each layer. Of blocks, a row
    has the score from the last block in which it was compared. whole: the cache without a press."""
    found: list[Tensor] = []
    if hasattr(press, "compress_post"):  # KVzip compares the scores of all layers in the end
        compress_post = press.compress_post

        def ended(model: Any) -> None:
            compress_post(model)
            found.extend(layer[0].clone() for layer in press.score_val)

        press.compress_post = ended
        yield found
        del press.compress_post
        return
    inner = press if hasattr(press, "score") else press.press
    score = inner.score

    def recorded(module: Any, states: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        made: Tensor = score(module, states, keys, *rest)
        of, layer = whole.layers[module.layer_idx].keys[0], module.layer_idx
        if len(found) == layer:
            found.append(torch.zeros(of.shape[:2]))
        for head, rows in enumerate(keys[0]):
            places = _places(of[head])
            at = [places[row.numpy().tobytes()] for row in rows]
            found[layer][head, at] = made[0, head]
        return made

    inner.score = recorded
    yield found
    del inner.score


class _Requests:
    """What KVzip needs of a tokenizer: the request to repeat, and what the template puts around a
    text, as the ids that minikv has for them."""

    chat_template = "minikv's"

    def __init__(self, chat: ChatSession) -> None:
        self._chat, self._words = chat, reading.wording(chat.tokenizer, chat.template)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **_: Any) -> str:
        return "[start]" + messages[0]["content"] + "[answer]"

    def encode(self, text: str, **_: Any) -> Tensor:
        ids = {"[start]": self._chat.start(), "[answer]": self._words.answer}.get(text)
        return torch.tensor([list(self._chat.tokenizer.encode(text) if ids is None else ids)])


@contextmanager
def _requesting(chat: ChatSession) -> Iterator[None]:
    """Inside, kvpress' KVzip gets minikv's ids; transformers cannot read the model's tokenizer."""
    from kvpress.presses import kvzip_press

    class Given:
        @staticmethod
        def from_pretrained(_: str) -> _Requests:
            return _Requests(chat)

    before, kvzip_press.AutoTokenizer = kvzip_press.AutoTokenizer, Given
    try:
        yield
    finally:
        kvzip_press.AutoTokenizer = before


def _found(keys: Tensor, left: Tensor) -> set[int]:
    """Positions in keys [T, D] of the rows that are left [B, D]."""
    places = _places(keys)
    return {places[row.numpy().tobytes()] for row in left}


def _places(keys: Tensor) -> dict[bytes, int]:
    return {row.numpy().tobytes(): i for i, row in enumerate(keys)}


def ours(chat: ChatSession, pair: Pair, budget: int, ids: Sequence[int]) -> Kept:
    """The same by minikv."""
    chat.reset()
    chat.configure(configured(pair, budget))
    chat.engine.kv.words = reading.wording(chat.tokenizer, chat.template)  # as `ask` does
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
    in the first layer. named: that only one of them kept, because of `Pair.why`. other: the rest.
    """

    kept: int = 0
    same: int = 0
    tied: int = 0
    first: int = 0
    named: int = 0
    other: int = 0

    def plus(self, more: Agreement) -> Agreement:
        return Agreement(*(a + b for a, b in zip(astuple(self), astuple(more), strict=True)))


def compared(pair: Pair, mine: Kept, theirs: Pressed) -> Agreement:
    """Over all heads of all layers."""
    total = Agreement()
    right = pair.righted(theirs) if pair.righted else theirs.kept
    for layer, (a, b, c) in enumerate(zip(mine, theirs.kept, right, strict=True)):
        scores = theirs.scores[layer]
        for head, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
            # What is sure to stay in kvpress has a score above all others.
            if pair.together:
                among = scores
                edges = [float(scores[h][list(heads)].min()) for h, heads in enumerate(c)]
                edge = min(edges)
            else:
                among = scores[head]
                edge = float(among[list(z)].min())
            free = among[among < among.max()]
            wide = float(free.max() - free.min()) if len(free) else 0.0
            near = TIE * max(wide, 1e-12)
            apart = [abs(float(scores[head, place]) - edge) <= near for place in x ^ z]
            tied = sum(apart)
            first = 0 if layer else tied
            named = len((x ^ y) - (x ^ z))
            one = Agreement(len(y), len(x & y), tied, first, named, len(apart) - tied)
            total = total.plus(one)
    return total


def documents(chat: ChatSession, tokens: int, count: int, questions: int) -> Iterator[Item]:
    yield from tasks.facts(chat.tokenizer, tokens, count, SEED, questions=questions)


def kept(args: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each method and budget."""
    import kvpress

    chat = minikv.load(policy="full", budget=512)
    models = {eager: load(eager=eager) for eager in (False, True)}
    rows = []
    for name, pair in PAIRS.items():
        for budget in map(int, args.budgets.split(",")):
            total = Agreement()
            for item in documents(chat, args.length, args.documents, 1):
                chat.reset()
                chat.reuse = "blind"
                ids = wording.parts(chat, item, 0)[0]
                ids = ids[: len(ids) // pair.chunk * pair.chunk]
                press = pair.press(kvpress, len(ids), budget)
                theirs = pressed(models[pair.eager], press, ids, chat)
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
    with _requesting(chat):
        made: list[str] = pipeline._forward(
            inputs, max_new_tokens=tasks.TRAINED.max_tokens, press=press
        )
    return made


@torch.no_grad()
def written(model: Any, chat: ChatSession, press: Any, ids: Sequence[int]) -> str:
    """The answer to a prompt under a press, whose first token comes from the prompt itself."""
    from transformers import DynamicCache

    cache, made = DynamicCache(), []
    with _requesting(chat), press(model):
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


def beside(
    chat: ChatSession,
    pair: Pair,
    budget: int,
    context: Sequence[int],
    asked: Sequence[list[int]],
    *,
    evicts: bool = False,
) -> list[str]:
    """minikv's answers where a question stands beside the budget, as in kvpress: from what stays
    after the context, nothing is evicted while the question is read. evicts: choose again after the
    question, as minikv does otherwise."""
    ours(chat, pair, budget, context)
    kv, full = chat.engine.kv, EvictionConfig.read("full", "none").rules()
    rules, held, answers = kv.rules, kv.snapshot(), []
    for ids in asked:
        kv.restore(held, rules, None if evicts else full)
        logits = chat.engine.prompt(ids, asks=True)
        made: list[int] = []
        while len(made) < tasks.TRAINED.max_tokens:
            token = int(logits[: chat.tokenizer.vocab].argmax())
            if token in chat.tokenizer.stop_ids:
                break
            made.append(token)
            logits = chat.engine.step(token)
        answers.append(chat.tokenizer.decode(made))
    return answers


def scores(args: argparse.Namespace) -> None:
    """Add documents to the state until the time is over."""
    import kvpress

    began, chat = time.monotonic(), minikv.load(policy="full", budget=512)
    models = {eager: load(eager=eager) for eager in (False, True)}
    STATE.parent.mkdir(parents=True, exist_ok=True)
    have = {
        (r["document"], r["press"], r["budget"], r["reuse"], r["tokens"], r["questions"])
        for r in state()
    }
    budgets, left = list(map(int, args.budgets.split(","))), 0
    items = list(documents(chat, args.length, args.documents, args.questions))
    for number, item in enumerate(items):
        for reuse in ("blind", *(["once"] if number < args.seen else [])):
            wanted = [
                (name, budget)
                for name in PAIRS
                for budget in budgets
                if (number, name, budget, reuse, args.length, args.questions) not in have
            ]
            if wanted and time.monotonic() - began > 60 * args.minutes:
                left += 1
                continue
            place = {"document": number, "tokens": args.length, "questions": args.questions}
            for row in _rows(kvpress, models, chat, item, wanted, reuse):
                with STATE.open("a") as file:
                    file.write(json.dumps({**place, **row}) + "\n")
    print(f"{left:,} parts are left" if left else "complete")


def _rows(
    kvpress: Any,
    models: Mapping[bool, Any],
    chat: ChatSession,
    item: Item,
    wanted: Sequence[tuple[str, int]],
    reuse: str,
) -> Iterator[dict[str, object]]:
    """A row for each name and budget that is wanted, for one document."""
    if not wanted:
        return
    chat.reset()
    chat.reuse = "blind"
    cut = [wording.parts(chat, item, i) for i in range(len(item.questions))]
    settings = [configured(PAIRS[name], budget) for name, budget in wanted]
    one = run.Run(chat, ["facts"], [item], settings, [reuse])
    one.measure(lambda done, total: None)
    for (name, budget), (mine,) in zip(wanted, one.answers(), strict=True):
        pair, apart = PAIRS[name], None
        model = models[pair.eager]
        if reuse == "blind":
            context, asked = cut[0][0], [ids for _, ids in cut]
            press = pair.press(kvpress, len(context), budget)
            theirs = answered(model, chat, press, context, asked)
            apart = beside(chat, pair, budget, context, asked)
        else:
            theirs = []
            for parts in cut:
                ids = [id for part in parts for id in part]
                theirs.append(written(model, chat, pair.press(kvpress, len(ids), budget), ids))
        row = {
            "press": name,
            "policy": pair.policy,
            "budget": budget,
            "reuse": reuse,
            "kvpress": _scores(item, theirs),
            "minikv": _scores(item, mine),
            "same": _same(mine, theirs),
        }
        if apart is not None:
            row |= {"beside": _scores(item, apart), "same_beside": _same(apart, theirs)}
        yield row


def _scores(item: Item, answers: Sequence[str]) -> list[float]:
    return [item.metric(a, right, ()) for a, right in zip(answers, item.right, strict=True)]


def _same(mine: Sequence[str], theirs: Sequence[str]) -> list[float]:
    return [float(a.strip() == b.strip()) for a, b in zip(mine, theirs, strict=True)]


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
            **_beside(rows),
            "difference": intervals.of_means(
                [[_mean([row["minikv"]]) - _mean([row["kvpress"]])] for row in rows]
            ),
        }
        for key, rows in sorted(found.items(), key=lambda entry: str(entry[0]))
    ]


def _beside(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Where the question was not seen: the answers with the question beside the budget."""
    if "beside" not in rows[0]:
        return {}
    return {
        "beside": _figure([row["beside"] for row in rows]),
        "same_beside": _mean([row["same_beside"] for row in rows]),
    }


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
    """The tables, as Markdown, and why something is not the same. Kept positions are sums over the
    budgets."""
    lines = ["| kvpress | minikv | kept by kvpress | by both | tied | another rule | else |"]
    lines.append("|---" * 7 + "|")
    for name, rows in _grouped(written.get("kept", []), "press").items():
        options = " ".join(f"-o {key}={_plain(x)}" for key, x in rows[0]["options"].items())
        said = f"`{rows[0]['policy']} {options}`".replace(" `", "`")
        sums = [sum(row[x] for row in rows) for x in ("kept", "same", "tied", "named", "other")]
        lines.append("| " + " | ".join([name, said, *(f"{x:,}" for x in sums)]) + " |")
    lines += ["", *_reasons({name: pair.why for name, pair in PAIRS.items() if pair.why})]
    lines += ["", *_reasons(LEFT_OUT)]
    heads = ["not seen: kvpress", "minikv", "same answer", "minikv, question beside", "same answer"]
    heads = ["method", "budget", *heads, "seen: kvpress", "minikv", "same answer"]
    lines += ["", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    found = {(x["press"], x["budget"], x["reuse"]): x for x in written.get("scores", [])}
    budgets = sorted({budget for _, budget, _ in found})
    for name, budget in ((name, budget) for name in PAIRS for budget in budgets):
        blind, once = (found.get((name, budget, reuse)) for reuse in ("blind", "once"))
        cells = [name, str(budget)]
        cells += _cells(blind, ("kvpress", "minikv", "same", "beside", "same_beside"))
        cells += _cells(once, ("kvpress", "minikv", "same"), few=True)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cells(row: Mapping[str, Any] | None, names: Sequence[str], *, few: bool = False) -> list[str]:
    """few: without intervals, for which there are too few documents."""
    if row is None:
        return ["-"] * len(names)
    return [
        f"{100 * row[x]:.0f} %" if x.startswith("same") else _told(row[x], few=few) for x in names
    ]


def _reasons(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason, with all that have it."""
    found: dict[str, list[str]] = {}
    for name, why in reasons.items():
        found.setdefault(why, []).append(name)
    return [f"- {', '.join(names)}: {why}" for why, names in found.items()]


def _grouped(rows: Sequence[dict[str, Any]], name: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _told(figure: Mapping[str, Any], *, few: bool) -> str:
    mean, low, high = (figure[name] for name in ("mean", "low", "high"))
    between = "" if few or low is None else f" ({100 * low:.0f} to {100 * high:.0f})"
    return f"{100 * mean:.0f} %{between}"


def _version(name: str) -> str:
    from importlib import metadata

    return metadata.version(name)


if __name__ == "__main__":
    main()
