"""minikv beside kvpress, where that is installed, on the same model, tokens and documents: the same
positions stay.

kvpress needs an older transformers than our tests have: `pip install -e '.[kvpress]'` in an
environment of its own. `PAIRS` has the options that make a method of minikv the one that kvpress
has. A position that only one of them keeps counts as tied if, by kvpress' own scores, it is as good
as the last one that stayed: within TIE of the range of its head's (of adakv: its layer's) scores.
The two networks round their sums in another order. Where one rule differs (`Pair.why`), kvpress'
scores are chosen from under minikv's rule, too (`Pair.righted`): a position is explained if it
stays then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import minikv
from minikv.chat import reading
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.eval import passes, tasks
from minikv.models import BUNDLED

kvpress = pytest.importorskip("kvpress")

SEED = 930_000_000  # of documents that training never used
TIE = 1e-4
WINDOW = 16

Kept = list[list[set[int]]]
"""[layer][head] -> positions."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One method in both. make(ratio): kvpress'; together: all heads of a layer
    share their rows, so that scores are compared over the layer. more: what has to be added to the
    budget, in rows, so that kvpress' rounding keeps just the budget. eager: kvpress reads the
    attention itself, which only transformers' eager attention yields. chunk: the documents of
    the test are cut to a multiple of so many tokens. why: which rule is another one. righted: what
    kvpress would keep, by its own scores, under minikv's rule."""

    policy: str
    make: Callable[[float], Any]
    options: Mapping[str, object] = field(default_factory=dict)
    together: bool = False
    more: float = 0.5
    eager: bool = False
    chunk: int = 1
    why: str = ""
    righted: Callable[[Pressed], Kept] | None = None

    def press(self, tokens: int, budget: int) -> Any:
        """kvpress' method that keeps `budget` of so many tokens."""
        return self.make(1 - (budget + self.more) / tokens)


_SNAPKV = {"window": WINDOW, "kernel": 5, "pooling": "avg"}
_NONE = {"sinks": 0, "recent": 0}
_ALPHA, _EPSILON, _SINKS = 0.2, 1e-4, 4  # kvpress' defaults


def _snapkv(ratio: float) -> Any:
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
_KVZIP: Mapping[str, Any] = {
    "options": {"sinks": _STARTS, "chunk": 2048},
    "together": True,
    "more": -0.01,  # KVzip rounds down how many rows leave, over all layers and heads
    "why": "minikv keeps the newest row of every head. In kvpress it may leave as any other row, "
    "and one more of the others stays.",
    "righted": _with_newest,
}
_FLOOR = {"alloc": "floor", "alpha": _ALPHA}
_CRITICAL = {"by_score": 0.5, "epsilon": _EPSILON}


def _kvzip(ratio: float, plus: bool = False) -> Any:
    return kvpress.KVzipPress(ratio, n_sink=_STARTS, chunk_size=2048, kvzip_plus_normalization=plus)


def _expected(ratio: float, **more: float) -> Any:
    return kvpress.ExpectedAttentionPress(ratio, n_sink=_SINKS, **more)


def _ada(press: Any, kind: str = "AdaKVPress") -> Any:
    return getattr(kvpress, kind)(press, alpha_safeguard=_ALPHA)


PAIRS = {
    "SnapKVPress": Pair("snapkv", _snapkv, _SNAPKV),
    "AdaKVPress(SnapKVPress)": Pair(
        "adakv", lambda ratio: _ada(_snapkv(ratio)), {**_SNAPKV, **_FLOOR}, together=True
    ),
    "PyramidKVPress": Pair(
        "pyramidkv",
        lambda ratio: kvpress.PyramidKVPress(ratio, window_size=WINDOW, kernel_size=5, beta=20),
        {**_SNAPKV, "line": "kvpress", "beta": 20},
        more=0.0,  # it rounds to the nearest
    ),
    "KeyDiffPress": Pair("keydiff", kvpress.KeyDiffPress, _NONE),
    "KnormPress": Pair("l2", kvpress.KnormPress, _NONE),
    "ExpectedAttentionPress": Pair("expected", _expected, {"sinks": _SINKS, "recent": 0}),
    "AdaKVPress(ExpectedAttentionPress)": Pair(
        "ada-expected",
        lambda ratio: _ada(_expected(ratio, epsilon=0.01)),
        {"sinks": _SINKS, "recent": 0, "epsilon": 0.01, **_FLOOR},
        together=True,
        why="In kvpress the sinks are a part of the rows that a head is sure of (`alpha` of its "
        "even share). In minikv the sinks are beside these rows.",
        righted=_floor_beside_sinks,
    ),
    "TOVAPress": Pair("tova", kvpress.TOVAPress),
    "StreamingLLMPress": Pair(
        "streaming",
        lambda ratio: kvpress.StreamingLLMPress(ratio, n_sink=_SINKS),
        {"sinks": _SINKS},
    ),
    "ChunkKVPress(SnapKVPress)": Pair(
        "chunkkv",
        lambda ratio: kvpress.ChunkKVPress(_snapkv(ratio), chunk_length=WINDOW),
        {**_SNAPKV, "chunk": WINDOW},
        together=True,
        chunk=WINDOW,
        why="Documents are cut, so that the window is the last chunk. "
        "Elsewhere kvpress keeps fewer rows than the budget, since it keeps whole chunks only, and "
        "the window's tokens count in their chunks.",
    ),
    "CriticalKVPress(SnapKVPress)": Pair(
        "snapkv+critical",
        lambda ratio: kvpress.CriticalKVPress(_snapkv(ratio)),
        {**_SNAPKV, **_CRITICAL},
    ),
    "CriticalAdaKVPress(SnapKVPress)": Pair(
        "adakv+critical",
        lambda ratio: _ada(_snapkv(ratio), "CriticalAdaKVPress"),
        {**_SNAPKV, **_FLOOR, **_CRITICAL},
        together=True,
        why="In kvpress the rows that a head is sure of (`alpha` of its even share) are chosen by "
        "score alone, even where they are more than half of its rows (`by_score`).",
        righted=_half_by_score,
    ),
    "ObservedAttentionPress": Pair(
        "h2o",
        kvpress.ObservedAttentionPress,
        {"average": True, "recent_share": 0.0, "sinks": 0},
        eager=True,
    ),
    "BlockPress(KeyDiffPress)": Pair(
        "keydiff",
        lambda ratio: kvpress.BlockPress(kvpress.KeyDiffPress(ratio), block_size=128),
        {**_NONE, "block": 128},
    ),
    "KVzipPress": Pair("kvzip", _kvzip, **_KVZIP),
    "KVzipPress, plus": Pair("kvzip+", lambda ratio: _kvzip(ratio, plus=True), **_KVZIP),
}


def load(*, eager: bool = False) -> Any:
    """The model as kvpress takes it, in float32. eager: with the attention of every layer."""
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        BUNDLED, dtype=torch.float32, attn_implementation="eager" if eager else "sdpa"
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


def _requesting(chat: ChatSession) -> AbstractContextManager[object]:
    """Inside, kvpress' KVzip gets minikv's ids; transformers cannot read the model's tokenizer."""
    from kvpress.presses import kvzip_press

    given = SimpleNamespace(from_pretrained=lambda _: _Requests(chat))
    return patch.object(kvzip_press, "AutoTokenizer", given)


def _found(keys: Tensor, left: Tensor) -> set[int]:
    """Positions in keys [T, D] of the rows that are left [B, D]."""
    places = _places(keys)
    return {places[row.numpy().tobytes()] for row in left}


def _places(keys: Tensor) -> dict[bytes, int]:
    return {row.numpy().tobytes(): i for i, row in enumerate(keys)}


def ours(chat: ChatSession, pair: Pair, budget: int, ids: Sequence[int]) -> Kept:
    """The same by minikv."""
    chat.reset()
    # The answer takes no room from the budget, as in kvpress.
    chat.configure(EvictionConfig.read(pair.policy, "none", budget, dict(pair.options)))
    chat.engine.kv.words = reading.wording(chat.tokenizer, chat.template)  # as `ask` does
    chat.engine.prompt(list(ids))
    shape = chat.engine.kv.shape
    return [
        [set(chat.kept(layer, head).tolist()) for head in range(shape.kv_heads)]
        for layer in range(shape.layers)
    ]


@dataclass(slots=True)
class Agreement:
    """kept: positions that kvpress kept, over all heads. tied: that only one of them kept, and that
    are as good as what it kept instead, by kvpress' scores; first: of these, in the first layer.
    named: that only one of them kept, because of `Pair.why`. other: the rest."""

    kept: int = 0
    tied: int = 0
    first: int = 0
    named: int = 0
    other: int = 0


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
            total.kept += len(y)
            total.tied += sum(apart)
            total.first += 0 if layer else sum(apart)
            total.named += len((x ^ y) - (x ^ z))
            total.other += len(apart) - sum(apart)
    return total


@pytest.fixture(scope="module")
def chat() -> Any:
    return minikv.load(policy="full", budget=512)


@pytest.fixture(scope="module")
def models() -> Any:
    """kvpress' model, by whether its attention can be read."""
    return {eager: load(eager=eager) for eager in (False, True)}


@pytest.fixture(scope="module")
def parts(chat: Any) -> Any:
    """The ids of a document and of a question about it."""
    item = next(tasks.facts(chat.tokenizer, 700, 1, SEED, questions=1))
    chat.reuse = "blind"
    return passes.prompts(chat, item)


def found(models: Any, chat: Any, name: str, budget: int, ids: Any) -> Any:
    """(what minikv kept, what kvpress kept, how they agree)."""
    pair = PAIRS[name]
    theirs = pressed(models[pair.eager], pair.press(len(ids), budget), ids, chat)
    mine = ours(chat, pair, budget, ids)
    return mine, theirs, compared(pair, mine, theirs)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("budget", [32, 96])
def test_the_same_positions_stay(
    models: Any, chat: Any, parts: Any, name: str, budget: int
) -> None:
    """But for ties, and for rules that are known to be others. Ties: a word has the same key norm
    at every position of the first layer."""
    pair, ids = PAIRS[name], parts[0]
    ids = ids[: len(ids) // pair.chunk * pair.chunk]
    mine, theirs, same = found(models, chat, name, budget, ids)
    assert same.kept == sum(len(head) for layer in mine for head in layer)
    assert same.other == 0
    assert same.tied == same.first
    assert same.tied == 0 or name == "KnormPress"
    assert same.named == 0 or pair.righted
    # It sees a difference: the rows of another budget are not these.
    other = compared(pair, ours(chat, pair, budget + 8, ids), theirs)
    assert other.tied + other.other > 0


@pytest.mark.parametrize(
    "name", ["AdaKVPress(ExpectedAttentionPress)", "CriticalAdaKVPress(SnapKVPress)", "KVzipPress"]
)
def test_a_rule_that_is_another_one_explains_all_that_differs(
    models: Any, chat: Any, parts: Any, name: str
) -> None:
    mine, theirs, same = found(models, chat, name, 256, parts[0])
    assert same.named > 0
    assert mine == PAIRS[name].righted(theirs)


def test_kvpress_keeps_whole_chunks_only(models: Any, chat: Any, parts: Any) -> None:
    """Of a document that does not end with a chunk it keeps fewer rows than the budget."""
    size = WINDOW
    ids = parts[0][: len(parts[0]) // size * size - 5]
    mine, theirs, _ = found(models, chat, "ChunkKVPress(SnapKVPress)", 96, ids)
    heads = zip(chain.from_iterable(mine), chain.from_iterable(theirs.kept), strict=True)
    for ours, rows in heads:
        chunks = {row // size for row in rows}
        whole = {row for row in range(len(ids)) if row // size in chunks}
        assert rows == whole
        assert len(rows) < len(ours) == 96
