"""Reads a prompt whose rows are scored by further texts before any row leaves.

First the prompt is read, and a tier stores its exact rows in host memory or in a file. Then each
text is fed after the prompt, independently of the others (`TextPass`). Their rows are discarded,
but the attention of their queries scores the rows of the prompt. At the end the rows that stay are
chosen, layer by layer.

The memory at that time: the tier, one layer's rows of a text, the scores, and the cache before and
after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena
from minikv.cache.earlier import EarlierRows
from minikv.cache.plan import Plan, Setup, seen
from minikv.cache.prefill import Prefill
from minikv.cache.snapshot import Outcome
from minikv.cache.tier import Tier
from minikv.cache.tier_rows import RamRows, columns_of
from minikv.policies.repeats import Repeat, RepeatView


class SecondPass(Prefill):
    """Reads the prompt itself; all of its rows go to a tier. Then `texts` are fed; finally
    `complete` chooses.

    scores: float32 [H, T] by layer, of the prompt's rows. scoring: whether the prompt was read and
    its rows are now being scored.
    """

    tier: Tier

    def __init__(
        self, setup: Setup, plan: Plan, arena: Arena, target: Arena, tier: Tier | None = None
    ) -> None:
        """As in `Prefill`. Only the lengths of the further texts `plan.repeats` are used here.
        tier: open for this prompt and empty; by default one in host memory."""
        assert setup.rules.prompt is not None
        shape, dtype, device = setup.shape, setup.dtype, arena.device
        if tier is None:
            columns = columns_of(shape, dtype, coded=False)
            rows = RamRows(shape.layers, shape.kv_heads, columns, plan.tokens, device)
            tier = Tier(shape, dtype, device, rows=rows, ahead=False)
            tier.open(plan.tokens)
        # No row leaves while the prompt is read.
        whole = replace(plan, totals=None, shares=False, pool=None)
        exact = replace(setup, rules=replace(setup.rules, prompt=None))
        super().__init__(exact, whole, arena, target, tier)
        self._choice, self._carry = (setup, plan), setup.rules.prompt.carry
        self.scorer = setup.rules.prompt.scorer
        self.first = setup.rules.first_rows(plan.pinned)
        self.scores = [
            torch.zeros((shape.kv_heads, plan.tokens), device=device) for _ in range(shape.layers)
        ]
        self.scoring = False
        self.fed = 0  # tokens of the further texts that are done
        self._columns: list[dict[str, Tensor]] = []  # the step policy's, by layer

    def finish(self, layer: int) -> None:
        """The layer is complete: the tier stores its rows, and none is chosen yet."""
        self.tier.store(layer, self._key, self._value)
        self._columns.append(self._noted(self._judged(layer)))

    # -- the further texts ------------------------------------------------------------------------

    def texts(
        self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[Repeat, TextPass]]:
        """After a prompt with these ids was read: yield each further text with its `Attend`. Yields
        none if the rows already have their scores. Raises TierError if the prompt's rows could not
        be stored. progress: as in `KVCache`."""
        if self.scored:
            return
        first, left = (
            max(0, self.first - self.plan.position),
            self.shape.max_context - self.plan.end,
        )
        for repeat in self.scorer.second_pass(ids, first, self.setup.words, left):
            self._reread()
            yield repeat, TextPass(self, repeat, progress)

    def _reread(self) -> None:
        """The prompt was read: from now on the tier provides all of its rows."""
        if not self.scoring:
            # Of the last layer that was read: a third one in addition to the tier's two.
            self._key = self._value = self._tail = self._key.new_empty((0, *self._key.shape[1:]))
            self._old = self._mass = self._squares = None
            self.tier.reread(self.plan.tokens)
            self.scoring = True

    @property
    def work(self) -> int:
        """How many tokens go through the network: the prompt's and those of all further texts."""
        return self.plan.tokens + sum(len(repeat.ids) for repeat in self.plan.repeats)

    @property
    def scored(self) -> bool:
        """Whether all further texts were fed."""
        return self.plan.tokens + self.fed == self.work

    def score_as(self, other: SecondPass) -> None:
        """Take the scores of another prompt with the same tokens, scorer and `repeats`, instead of
        feeding the texts."""
        assert other.scored
        self.scores, self.fed = other.scores, other.fed

    def complete(self) -> Outcome:
        """Choose the rows that stay and write them to the target, layer by layer. Waits for the
        device."""
        assert self.scored, "some texts have not scored the rows yet"
        self._reread()
        setup, plan = self._choice
        plan = replace(plan, given=plan.tokens)
        choice = Prefill(setup, plan, self.arena, self.target, self.tier)
        for layer, scores in enumerate(self.scores):
            choice.choose(layer, scores, self._columns[layer])
        self.exact = []  # nothing was recalled
        return replace(choice.complete(), learnt=self.learnt)


class TextPass:
    """`Attend` for one text after the prompt. It scores rows of the prompt; each row keeps its
    largest score."""

    def __init__(
        self,
        twice: SecondPass,
        repeat: Repeat,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        shape, size = twice.shape, len(repeat.ids)
        wide = (2, shape.kv_heads, size, shape.head_dim)
        self.position = twice.plan.end
        self._twice, self._repeat, self._progress = twice, repeat, progress
        self._own = torch.empty(wide, dtype=twice.setup.dtype, device=twice.arena.device)
        self._key = self._value = self._own[0]  # of the prompt, in the layer under way
        self._old: EarlierRows | None = None
        self._size = self._done = size
        # How many of the prompt's rows are sinks or pinned, and so not scored.
        self._first = min(max(0, twice.first - twice.plan.position), repeat.begin)
        self._lengths: Tensor | None = None

    @property
    def on_layer_input(self) -> Callable[[Tensor], None] | None:
        """See `Attend`."""
        return self._on_layer_input if self._twice.scorer.evidence.lengths else None

    def _on_layer_input(self, states: Tensor) -> None:
        """Store the norms of the layer's input, for the next chunk."""
        self._lengths = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        twice = self._twice
        if self._done == self._size:
            self._done, self._old = 0, None  # the last layer's, before this one's are read
            self._key, self._value = twice.tier.stage(layer, twice.plan.tokens)
            self._old = EarlierRows.of(twice.setup.ops, twice.arena, twice.plan.before.held, layer)
        lo, hi = self._done, self._done + len(q)
        self._own[0, :, lo:hi], self._own[1, :, lo:hi] = k.transpose(0, 1), v.transpose(0, 1)
        self._done = hi
        query = q.view(len(q), twice.shape.kv_heads, -1, twice.shape.head_dim).permute(1, 2, 0, 3)
        at = torch.arange(self.position + lo, self.position + hi, device=q.device)
        window = twice.shape.windows[layer]
        mixed, lse = self._mixed(query, at, hi, window)
        self._score(layer, query, at, hi, window, lse)
        if self._progress is not None:
            done = (layer * self._size + hi) // twice.shape.layers
            self._progress(twice.plan.tokens + twice.fed + done, twice.work)
        return mixed.permute(2, 0, 1, 3).reshape(q.shape)

    def advance(self, tokens: int) -> None:
        """See `Attend`."""
        assert self._done == tokens == self._size
        self._twice.fed += tokens

    def _mixed(
        self, query: Tensor, at: Tensor, hi: int, window: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Exact attention of the queries [H, G, t, D], over all rows up to `hi` of the text. Also
        the log-sum-exp [H, G, t] over only the rows that the scores compare: the first ones, the
        scored ones and the text's own; None if the layer has a window."""
        ops, old, tokens = self._twice.setup.ops, self._old, self._key.shape[1]
        begin, end, first = self._repeat.begin, self._repeat.end, self._first
        own = self._own[0, :, :hi], self._own[1, :, :hi]
        seen_first = None
        if window is None and old is not None and self._twice.first:
            early = [old.first(self._twice.first)]
            seen_first = kernels.rows_lse(kernels.Queries(query, at, None), early)
        parts = [] if old is None else [old.attention(ops, query, at, window)]
        if window is not None:
            visible = tokens - seen(tokens, window)
            key = torch.cat((self._key[:, visible:], own[0]), 1)
            value = torch.cat((self._value[:, visible:], own[1]), 1)
            near = kernels.window_attention(query, key, value, window, ops.rows_attention)
            return ops.merge([*parts, near])[0], None

        def rows(*spans: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
            return [
                ops.rows_attention(query, self._key[:, a:b], self._value[:, a:b])
                for a, b in spans
                if a < b
            ]

        compared = rows((0, end)) if first == begin else rows((0, first), (begin, end))
        compared.append(ops.last_rows_attention(query, *own))
        mixed, _ = ops.merge([*parts, *compared, *rows((first, begin), (end, tokens))])
        lse = kernels.total(compared)
        return mixed, lse if seen_first is None else torch.logaddexp(lse, seen_first)

    def _score(
        self, layer: int, query: Tensor, at: Tensor, hi: int, window: int | None, lse: Tensor | None
    ) -> None:
        """Score the rows of the prompt that belong to this text by its queries."""
        twice, prompt = self._twice, self._twice.plan
        begin, end, count = self._repeat.begin, self._repeat.end, self._first
        pos = torch.arange(prompt.position, self.position + hi, device=query.device)[None]
        first: list[kernels.Part] = []
        if self._old is not None and twice.first:
            first.append(self._old.first(twice.first))
        if count:
            first.append((self._key[:, :count], pos[:, :count]))
        value, known = self._value, twice.setup.output
        view = RepeatView(
            layer,
            query,
            at,
            first,
            (self._key[:, begin:end], pos[:, begin:end]),
            (self._own[0, :, :hi], pos[:, prompt.tokens :]),
            window,
            lambda: value[:, begin:end],
            None if known is None else lambda: known(layer),
            self._lengths,
            lse,
            twice.setup.ops,
        )
        scores = twice.scores[layer][:, begin:end]
        torch.maximum(scores, twice.scorer.peak(view), out=scores)
