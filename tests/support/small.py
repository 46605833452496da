"""A small random network and its caches, and conversations that are checked at every token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pairwise import some_by_day
from spy import Spy
from torch import Tensor

from minikv import policies
from minikv.cache.attend import DenseAttend
from minikv.cache.budget import Budget
from minikv.cache.kv_cache import KVCache
from minikv.cache.rules import Rules
from minikv.cache.stats import Shape
from minikv.chat.eviction_config import EvictionConfig
from minikv.engine.capture import Eager
from minikv.engine.engine import Engine
from minikv.errors import UsageError
from minikv.kernels import lowest
from minikv.kernels.dispatch import choose
from minikv.loader import output_of
from minikv.models.config import ModelConfig
from minikv.models.llama import Llama
from minikv.models.rope import RopeConfig
from minikv.models.tensors import randomise
from minikv.policies import registry
from minikv.policies.base import PromptView, StepPolicy, StepView
from minikv.policies.hashevict import codes
from minikv.policies.parts import GlobalBudget, LayerAllocator, PromptPolicy, smallest_budget
from minikv.policies.selection import ones

VOCAB = 97
SOON: dict[str, dict[str, object]] = {
    "rkv": {"window": 3, "buffer": 4},
    "vase": {"window": 3, "buffer": 4},
    "triattention": {"recent": 3, "buffer": 4},
}
"""Options under which a step policy evicts within a few tokens, where its defaults wait longer."""
# Every prompt policy alone and with its own step policy; every step policy alone and with adakv.
_COMPOSED = [("h2o+ada+pyramid", "h2o"), ("kvcrush(h2o)", "roco"), ("l2+nacl+pyramid", "tova")]
_COMPOSED += [("snapkv+critical+turns", "scissorhands")]
_OWN = [(p, policies.default_step(p)) for p in policies.prompt_names()]
_OTHER = {*policies.step_names()} - {s for _, s in _OWN}
_ALONE = [pair for own in _OWN for pair in ((own[0], "none"), own)]
_STEPS = [(p, s) for p in ("full", "adakv") for s in policies.step_names()]
PAIRS = list(dict.fromkeys([*_ALONE, *_STEPS, *_COMPOSED]))
_BY_DAY = {*_OWN, *(("adakv", s) for s in _OTHER), *_COMPOSED}


def by_day(cases: Sequence[Any]) -> list[Any]:
    """Cases that begin with one of `PAIRS`. By day there is one case for each prompt policy and for
    each step policy, and for the compositions, with other values beside each; at night all."""
    beside: dict[Any, list[Any]] = {}
    for case in cases:
        beside.setdefault(case[:2], []).append(case)
    daily = [made[i % len(made)] for i, made in enumerate(beside.values())]
    return some_by_day(cases, lambda case: case[:2] in _BY_DAY and case in daily)


SIZES: dict[str, Any] = {"layers": 3, "heads": 6, "kv_heads": 3, "head_dim": 8, "hidden": 48}
SIZES |= {"mlp": 64, "vocab": VOCAB, "max_context": 4096}
SPOKEN: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "hidden": 32, "mlp": 48}
"""Of the networks that speak bytes (`vocab`: fakes.PADDED)."""
ROPE = RopeConfig(theta=1e4)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": "head"},
    "granite": {"embedding_scale": 3.0, "residual_scale": 0.4, "logits_scale": 5.0}
    | {"query_scale": 1.7},
    "smollm3": {"layer_ropes": (ROPE, RopeConfig(kind="none"), ROPE)},
    "ministral3": {
        "rope": RopeConfig(1e3, "yarn", 4.0, original=24, attention_factor=1.3, query_beta=0.8)
    },
    "olmo3": {
        **{"qk_norm": "all", "norm_after": True, "windows": (20, None, 20)},
        "layer_ropes": (ROPE, RopeConfig(1e4, "linear", 4.0), ROPE),
    },
}
"""What a small Llama differs in from one of each family that attends, or adds to x, in its own
way."""


def config(windows: tuple[int | None, ...] | None = None, **given: Any) -> ModelConfig:
    """Of a small Llama; given: other fields than `SIZES`."""
    sizes = SIZES | given | ({} if windows is None else {"layers": len(windows)})
    common = {"family": "llama", "norm_eps": 1e-5, "rope": ROPE}
    return ModelConfig(**common | {"windows": windows or (None,) * sizes["layers"]} | sizes)


def network(rows: int = 32, seed: int = 0, **given: Any) -> Llama:
    """Random weights large enough that attention is far from uniform. given: as of `config`."""
    made = randomise(Llama(config(**given), rows=rows), seed, std=0.3)
    generator = torch.Generator().manual_seed(seed)
    for layer in made.layers if made.config.qk_norm else ():
        for norm in (layer.q_norm, layer.k_norm):
            norm.add_(torch.randn(norm.shape, generator=generator), alpha=0.3)  # type: ignore[union-attr, arg-type]
    return made


def shape(net: Llama) -> Shape:
    c = net.config
    return Shape(c.layers, c.kv_heads, c.heads, c.head_dim, c.windows, c.max_context)


def scheduler(
    net: Llama,
    prompt: str = "full",
    step: str = "none",
    budget: int | str | None = 64,
    *,
    kv: torch.dtype | None = None,
    stride: int = 0,
    prompt_options: dict[str, object] | None = None,
    step_options: dict[str, object] | None = None,
) -> KVCache:
    """A cache whose arena is born full of NaN."""
    rules = Rules(
        policies.prompt_policy(prompt, prompt_options),
        policies.step_policy(step, SOON.get(step) if step_options is None else step_options),
        Budget.parse(budget) if budget is not None else None,
        stride,
    )
    return over(net, rules, kv=kv)


class Rotated(KVCache):
    """A cache that gets rotated queries and keys in steps too, so that a test can read them."""

    attend_unrotated = None  # type: ignore[assignment]


def over(
    net: Llama,
    rules: Rules | None = None,
    *,
    kv: torch.dtype | None = None,
    kind: type[KVCache] = KVCache,
) -> KVCache:
    """A cache for `net` under policies that have been made."""
    own = {"device": net.device, "dtype": net.dtype, "rotary": net.rotation}
    return kind(shape(net), rules, kv=kv, output=output_of(net), **own)  # type: ignore[arg-type]


def engine(
    net: Llama,
    prompt: str = "full",
    step: str = "none",
    budget: int | str | None = 64,
    capture: Eager | str | None = "auto",
    **more: Any,
) -> Engine:
    """capture: see `Engine`. more: as of `scheduler`."""
    return Engine(net, scheduler(net, prompt, step, budget, **more), capture)


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


class Dense:
    """An engine over `DenseAttend`: the oracle."""

    def __init__(self, net: Llama) -> None:
        ops, _ = choose(net.device, "auto", net.config.head_dim, net.dtype)
        self.net, self.kv = net, DenseAttend(net.config.windows, ops)

    def prompt(self, tokens: list[int]) -> torch.Tensor:
        self.kv.begin(len(tokens))
        return self.net.forward(torch.tensor(tokens), self.kv)

    def step(self, token: int) -> torch.Tensor:
        return self.net.forward(torch.tensor([token]), self.kv)


def victims(policy: StepPolicy, view: StepView) -> Tensor:
    """int64 [F]: the column of the row that each head gives up first."""
    scores, found = policy.worth(view), torch.zeros(len(view.pos), dtype=torch.int64)
    lowest(scores, view.pos, torch.zeros_like(found), torch.ones_like(found) > 0, found)
    return found


# -- every composition ------------------------------------------------------------------------


def parts(name: str) -> tuple[str, ...]:
    """The names of a prompt policy's parts."""
    return tuple(part.name for part in policies.find(name).parts)


def compositions() -> list[tuple[str, ...]]:
    """All that the registry accepts: a base and at most one part per axis, one spelling each."""
    axes: dict[str, list[str]] = {}
    for part in map(registry.part, registry.OTHER_PARTS):
        axes.setdefault(part.axis, []).append(part.name)
    found: dict[object, tuple[str, ...]] = {}
    bases = [*(name for name in registry.PROMPT if name != "full"), *registry.SCORERS]
    for base in dict.fromkeys(bases):
        for picks in itertools.product(*([None, *names] for names in axes.values())):
            words = (base, *(part for part in picks if part is not None))
            try:
                made = parts("+".join(words))
            except UsageError:
                continue
            if made not in found or len(words) < len(found[made]):
                found[made] = words
    return list(found.values())


COMPOSITIONS = compositions()


def spell(words: tuple[str, ...], outside: int) -> str:
    """`a+b+c`, with the last `outside` of them written as `c(b(a))`."""
    inner = max(1, len(words) - outside)
    name = "+".join(words[:inner])
    for word in words[inner:]:
        name = f"{word}({name})"
    return name


def least(eviction: EvictionConfig, pinned: int = 0) -> int:
    """Rows per head that are always enough for a choice beside pinned rows."""
    rules = eviction.rules()
    evicts_first = rules.step is not None and rules.step.evict_first
    block = rules.stride - 1 if rules.stride and evicts_first else 0
    return smallest_budget(rules.prompt, rules.step) + pinned + block


@dataclass(frozen=True)
class _Layers(LayerAllocator):
    """Another one, whose answer a walk writes down."""

    of: LayerAllocator
    walk: Walk

    def rows(self, *asked: int) -> list[int]:
        self.walk.rows = self.of.rows(*asked)
        return self.walk.rows


class Walk:
    """A conversation, checked after every prompt and every token of an answer.

    Every forward is finite although all memory is born NaN; positions are unique, ascending and
    none the head did not hold before; no head is above its cap and every layer at what its budget
    says; sinks, windows and pins stay; every column of a row belongs to that row's token. Layers
    may have sliding windows.
    """

    def __init__(
        self,
        eviction: EvictionConfig,
        *,
        windows: tuple[int | None, ...] = (None, None),
        pinned: int = 0,
    ) -> None:
        self.net = network(layers=len(windows), windows=windows, rows=256)
        self.windows, self.pinned, self.eviction = windows, pinned, eviction
        self.causal = True  # so far no query was counted for rows after it
        self.kv = over(self.net, self._made(eviction), kind=Rotated)
        self.kv.pin(pinned)
        self.engine = Engine(self.net, self.kv)
        self.fed: list[list[Tensor]] = [[] for _ in windows]  # k and v [t, 2, H, D] by layer
        attend = self.kv.attend

        def listen(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not self.kv.scoring:
                self.fed[layer].append(torch.stack((k, v), 1))
            return attend(layer, q, k, v)

        self.kv.attend = listen  # type: ignore[method-assign]

    def _made(self, eviction: EvictionConfig) -> Rules:
        """The choice's policies; what its scorer and layers say is written down."""
        self.rows: list[int] = []  # per head, by layer
        self.scopes: dict[int, tuple[Tensor, Tensor]] = {}
        rules = eviction.rules()
        prompt = rules.prompt
        if prompt is not None:
            scorer = prompt.scorer

            def note(view: PromptView, scores: Tensor) -> None:
                self.scopes[view.layer] = view.pos, view.divide(*scorer.protected(view))[0]

            prompt = replace(prompt, scorer=Spy(scorer, note))
            if isinstance(prompt.layers, LayerAllocator):
                prompt = replace(prompt, layers=_Layers(prompt.layers, self))
            self.causal = self.causal and prompt.evidence.causal
        return replace(rules, prompt=prompt)

    def configure(self, eviction: EvictionConfig) -> None:
        """Another choice, from the next prompt on."""
        self.kv.configure(self._made(eviction))
        self.eviction = eviction

    def prompt(self, tokens: list[int]) -> None:
        had, start = self._held(), self.kv.position
        self.scopes.clear()
        logits = self.engine.prompt(tokens)
        assert bool(torch.isfinite(logits).all())
        new = set(range(start, self.kv.position))
        for layer, window in enumerate(self.windows):
            alive = -1 if window is None else self.kv.position - window
            had[layer] = [{p for p in old | new if p > alive} for old in had[layer]]
        self._check()
        if self.kv.rules.stride:
            self._after_blocks(had)
        else:
            self._after_prompt(had)

    def step(self, token: int) -> None:
        had, kv = self._held(), self.kv
        caps, policy = kv.arena.cap.clone(), kv.rules.step
        logits = self.engine.step(token)
        assert bool(torch.isfinite(logits).all())
        self._check()
        assert torch.equal(kv.arena.cap, caps)
        newest = kv.position - 1
        judged = newest  # the youngest row that may leave
        judged -= policy is not None and policy.evict_first
        for layer, head, now in self._each():
            window, before = self.windows[layer], had[layer][head]
            slid = -1 if window is None else kv.position - window
            gone = {p for p in before - now if p > slid}
            assert newest in now
            assert now <= before | {newest}
            if policy is None:
                assert not gone
                continue
            cap, block = int(caps[layer, head]), policy.block
            full = len(before) + 1 == cap + block
            assert len(gone) in (0, block)
            assert len(now) < cap + block
            assert len(now) == len(before) + 1 - block * full or window is not None
            first, last = max(policy.sinks, self.pinned), judged - policy.recent
            free = {p for p in before if first <= p <= last}
            assert gone <= free or free < gone  # all of them, and what is protected
            assert not any(p < self.pinned for p in gone)

    def _after_prompt(self, had: list[list[set[int]]]) -> None:
        kv, prompt, step = self.kv, self.kv.rules.prompt, self.kv.rules.step
        live = [sum(map(len, heads)) for heads in had]
        if prompt is None:
            for layer, head, now in self._each():
                assert now == had[layer][head]
                if step is not None:
                    assert int(kv.arena.cap[layer, head]) == max(len(now), self.budget)
            return
        heads, layers = kv.shape.kv_heads, kv.shape.layers
        if isinstance(prompt.layers, GlobalBudget):
            total = heads * layers * self.budget
            assert int(kv.arena.held.sum()) == min(total, sum(live))
            if step is not None:
                assert int(kv.arena.cap.sum()) == total
            self._after_choice(had, prompt)
            return
        if "layers" not in {part.axis for part in policies.find(self.eviction.policy).parts}:
            assert self.rows == [self.budget] * layers
        assert sum(self.rows) == layers * self.budget
        for layer, window in enumerate(self.windows):
            total = heads * (self.rows[layer] if window is None else min(self.rows[layer], window))
            assert int(kv.arena.held[layer].sum()) == min(total, live[layer])
            if step is not None:
                assert int(kv.arena.cap[layer].sum()) == total
        self._after_choice(had, prompt)

    def _after_choice(self, had: list[list[set[int]]], prompt: PromptPolicy) -> None:
        """What is protected stayed, and nothing came from nowhere."""
        kv = self.kv
        for layer, head, now in self._each():
            end = kv.position - prompt.evidence.window
            stays = {p for p in had[layer][head] if p >= end or p < prompt.evidence.sinks}
            assert stays <= now
            assert now
            assert {p for p in had[layer][head] if p < self.pinned} <= now
            assert now <= had[layer][head]
            if layer in self.scopes:
                pos, inside = self.scopes[layer]
                assert set(pos[head][inside[head]].tolist()) <= now

    def _after_blocks(self, had: list[list[set[int]]]) -> None:
        policy = self.kv.rules.step
        assert policy is not None
        for layer, head, now in self._each():
            window, held = self.windows[layer], had[layer][head]
            end = self.kv.position - max(1, policy.recent)
            assert {p for p in held if p >= end or p < max(policy.sinks, self.pinned)} <= now
            assert len(now) <= self.budget == int(self.kv.arena.cap[layer, head])
            if window is None:
                assert now <= held
                assert policy.evict_first or len(now) == min(len(held), self.budget)

    def _check(self) -> None:
        arena, end = self.kv.arena, self.kv.position
        for layer, window in enumerate(self.windows):
            index, live = arena.index(layer)
            fed = torch.cat(self.fed[layer])
            for head in range(arena.heads):
                pos, rows = self.kv.kept(layer, head), index[head, live[head]]
                assert len(pos) == len(rows) == int(arena.held[layer, head])
                assert bool((pos.diff() > 0).all())
                assert int(pos[0]) >= 0
                if window is not None and not self.kv.rules.stride:
                    assert int(pos[0]) > end - window
                columns = {name: column[rows] for name, column in arena.columns.items()}
                at = columns["pos"].to(torch.int64)
                assert torch.equal(at.sort().values, pos)
                assert torch.equal(columns["k"], fed[at, 0, head])
                assert torch.equal(columns["v"], fed[at, 1, head])
                age = end - at if self.causal else torch.full_like(at, end)
                self._check_state(layer, columns, age)
        if self.kv.rules.step is not None:
            assert bool((arena.held < arena.cap + self.kv.rules.step.block).all())

    def _check_state(self, layer: int, columns: dict[str, Tensor], age: Tensor) -> None:
        """The step policy's own columns. age: queries that could see the row, at the most."""
        for name, column in columns.items():
            assert bool(torch.isfinite(column).all()), name
        policy = self.kv.rules.step
        if policy is not None and policy.name in _STATES:
            assert _STATES[policy.name](policy, layer, columns, age)

    def _held(self) -> list[list[set[int]]]:
        heads, layers = range(self.kv.shape.kv_heads), range(self.kv.shape.layers)
        if not self.kv.position:
            return [[set() for _ in heads] for _ in layers]
        return [[self._now(layer, head) for head in heads] for layer in layers]

    def _each(self) -> list[tuple[int, int, set[int]]]:
        every = itertools.product(range(self.kv.shape.layers), range(self.kv.shape.kv_heads))
        return [(layer, head, self._now(layer, head)) for layer, head in every]

    def _now(self, layer: int, head: int) -> set[int]:
        return set(self.kv.kept(layer, head).tolist())

    @property
    def budget(self) -> int:
        return int(self.eviction.budget.value)


def _attention_sums(policy: StepPolicy, layer: int, c: dict[str, Tensor], age: Tensor) -> bool:
    """A query gives a row between 0 and 1."""
    return bool(((c["sum"] >= 0) & (c["sum"] <= age + 1e-3)).all())


def _moments(policy: StepPolicy, layer: int, c: dict[str, Tensor], age: Tensor) -> bool:
    """Shares lie between 0 and 1, and no row was counted for more queries than could see it."""
    lead, total = policy.lead, c[policy.total]  # type: ignore[attr-defined]
    fine = (c["squares"] >= 0) & (c["squares"] <= lead * (total + 1e-3))
    fine &= (total <= lead * (c["count"] + 1e-3)) & (c["count"] >= 1) & (c["count"] <= age)
    return bool(fine.all())


def _norms(policy: StepPolicy, layer: int, c: dict[str, Tensor], age: Tensor) -> bool:
    return torch.allclose(c["norm"], torch.linalg.vector_norm(c["k"], dim=-1))


def _codes(policy: StepPolicy, layer: int, c: dict[str, Tensor], age: Tensor) -> bool:
    matrix = policy.matrix(layer, c["k"])  # type: ignore[attr-defined]
    return torch.equal(c["code"].to(torch.int64), codes(c["k"], matrix))


def _bits(policy: StepPolicy, layer: int, c: dict[str, Tensor], age: Tensor) -> bool:
    """Not more queries that gave little than queries."""
    words = torch.stack([ones(w) for name, w in c.items() if name.startswith("bits")])
    fine = (words.sum(0) == c["lows"]) & (c["lows"] <= c["queries"]) & (c["queries"] <= age)
    return bool(fine.all())


_STATES: dict[str, Callable[[StepPolicy, int, dict[str, Tensor], Tensor], bool]] = {
    "h2o": _attention_sums,
    "roco": _moments,
    "l2": _norms,
    "hashevict": _codes,
    "scissorhands": _bits,
}
"""What a policy's columns must be, beside finite."""
