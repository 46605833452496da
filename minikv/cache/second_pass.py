"""Reads a prompt whose rows are scored by a second pass over further texts before any row leaves.

First the keys and values of all layers are kept beside the cache: in the host's memory (`FullRows`)
or in a tier in a file. Then further texts are fed after the prompt, each on its own, over one
layer's rows at a time. None of their rows is stored, but the attention of their queries scores the
rows of the prompt. At the end the rows that stay are chosen, layer by layer.

These exist at the same time: the rows of all layers (on the host, or of two layers of a file), one
layer's rows with those of a further text (on the device), the scores, and the cache before and
after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena, Layout
from minikv.cache.earlier import EarlierRows
from minikv.cache.global_pool import GlobalPool
from minikv.cache.plan import Plan
from minikv.cache.prefill import Prefill, Staging
from minikv.cache.snapshot import Outcome
from minikv.cache.stats import Shape
from minikv.cache.tier_rows import row_nbytes
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import PromptPolicy, PromptView, Repeat, RepeatView, StepPolicy

T = TypeVar("T", bound=Prefill)


class KeptRows(Staging, Protocol):
    """Keeps the rows of a prompt until they are scored: `FullRows`, or a `Tier` in a file.

    `store` keeps a layer before `reread` is called; afterwards it keeps nothing.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the rows of all layers, wherever they are."""
        ...

    def reread(self, rows: int, beside: int) -> None:
        """See `Tier`."""
        ...


class FullRows:
    """`KeptRows` with all layers on the host and a staging buffer of one layer on the device.

    Of a layer with a sliding window it keeps only the rows that the next token can still see.
    """

    def __init__(
        self, shape: Shape, tokens: int, longest: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """tokens: of the prompt. longest: tokens of the longest further text."""
        gpu = device.type == "cuda"
        host = torch.device("cpu") if gpu else device
        wide = (2, shape.kv_heads, tokens + longest, shape.head_dim)
        self._rows = [
            torch.empty(
                (2, shape.kv_heads, _kept(tokens, window), shape.head_dim),
                dtype=dtype,
                device=host,
                pin_memory=gpu,
            )
            for window in shape.windows
        ]
        self._staging = torch.zeros(wide, dtype=dtype, device=device)
        self._tokens, self._counted = tokens, not gpu
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows of all layers, wherever they are."""
        return sum(rows.nbytes for rows in self._rows)

    @property
    def staging_nbytes(self) -> int:
        """Bytes on the device; if that is the host, `nbytes` is included."""
        return self._staging.nbytes + (self.nbytes if self._counted else 0)

    def reread(self, rows: int, beside: int) -> None:
        """See `KeptRows`."""
        assert (rows, rows + beside) == (self._tokens, self._staging.shape[2])
        self.length = rows

    def stage(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """See `Staging`. Rows that were not kept hold arbitrary finite values."""
        if self.length:
            kept = self._rows[layer]
            begin = self._tokens - kept.shape[2]
            self._staging[:, :, begin : self._tokens].copy_(kept, non_blocking=True)
        return self._staging[0, :, :rows], self._staging[1, :, :rows]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `Staging`. Waits for the device: the next layer uses the same buffer."""
        if not self.length:
            kept = self._rows[layer]
            begin = self._tokens - kept.shape[2]
            kept[0].copy_(key[:, begin:])
            kept[1].copy_(value[:, begin:])


def _kept(tokens: int, window: int | None) -> int:
    """How many of the rows the next token sees."""
    return tokens if window is None else max(1, min(tokens, window - 1))


@dataclass(frozen=True, slots=True)
class PassCost:
    """What the second pass over a prompt costs beside reading the prompt.

    tokens: of all further texts. reads: how often each layer's rows are staged. ram: bytes of host
    memory if the rows are kept there. file: bytes of the file if they are kept in one. file_ram:
    bytes of host memory in that case. ram and file_ram include the staging buffer unless it is on a
    GPU.
    """

    tokens: int = 0
    reads: int = 0
    ram: int = 0
    file: int = 0
    file_ram: int = 0

    @classmethod
    def of(
        cls,
        shape: Shape,
        tokens: int,
        repeats: Sequence[Repeat],
        dtype: torch.dtype,
        *,
        gpu: bool,
    ) -> PassCost:
        """The cost for a prompt of `tokens` tokens and the texts `repeats`."""
        texts = [len(repeat.ids) for repeat in repeats]
        row = 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
        wide = row * (tokens + max(texts))  # a layer with a text
        rows = row * sum(_kept(tokens, window) for window in shape.windows)
        return cls(
            sum(texts),
            len(texts) + 1,
            rows if gpu else rows + wide,
            row_nbytes(shape, dtype) * tokens,
            min(2, shape.layers) * (row * tokens if gpu else wide),
        )


class _Reading(Prefill):
    """Reads the prompt itself: keeps every row, and the step policy's columns in `noted`."""

    compared = False
    noted: list[dict[str, Tensor]]

    def finish(self, layer: int) -> None:
        assert self.tier is not None
        self.tier.store(layer, self._key, self._value)
        view = self._judged(layer)
        self.noted.append(self.step.init(view) if self.step is not None else {})


class _Pass(Prefill):
    """Feeds a further text after the prompt, and updates `peaks`, the scores of the prompt's
    rows."""

    compared = False
    prompt_policy: PromptPolicy
    repeat: Repeat
    peaks: Sequence[Tensor]
    first: int
    lengths: Tensor | None = None

    def watch(self, states: Tensor) -> None:
        """See `Attend`. Takes the norms of the layer's input, for the chunk that is staged next."""
        self.lengths = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)

    def finish(self, layer: int) -> None:
        """The layer is complete: keep nothing of the text."""

    def _mix(self, layer: int, q: Tensor, lo: int, hi: int) -> Tensor:
        plan, repeat, shape = self.plan, self.repeat, self.shape
        query = q.view(len(q), shape.kv_heads, -1, shape.head_dim).permute(1, 2, 0, 3)
        lse: Tensor | None = None
        if self._old is None and shape.windows[layer] is None:
            out, lse = self._mix_apart(query, hi)
        else:
            out = super()._mix(layer, q, lo, hi)
        at = torch.arange(plan.position, plan.position + hi, device=q.device)
        begin, end = repeat.begin, repeat.end
        # The conversation's first rows, except those that are among the scored ones.
        first: list[kernels.Part] = []
        if self._old is not None and self.first:
            pos = self._old.pos
            first.append((self._old.keys(), pos.masked_fill(pos >= self.first, -1)))
        count = min(max(0, self.first - plan.position), begin)
        if count:
            first.append((self._key[:, :count], at[None, :count]))
        known = plan.output
        view = RepeatView(
            layer,
            query,
            at[lo:hi],
            first,
            (self._key[:, begin:end], at[None, begin:end]),
            (self._key[:, plan.given : hi], at[None, plan.given : hi]),
            shape.windows[layer],
            lambda: self._value[:, begin:end],
            None if known is None else lambda: known(layer),
            self.lengths,
            lse,
            self._ops,
        )
        scores = self.peaks[layer][:, begin:end]
        torch.maximum(scores, self.prompt_policy.scorer.peak(view), out=scores)
        return out

    def _mix_apart(self, query: Tensor, hi: int) -> tuple[Tensor, Tensor]:
        """Exact attention of the text's queries [H, G, T, D], [T, H * G, D], over the rows up to
        `hi`. Also the log-sum-exp [H, G, T] over only the rows that the scores compare: the first
        ones, the scored ones and the text's own. For this, they are attended to apart from the
        prompt's other rows."""
        plan, begin, end = self.plan, self.repeat.begin, self.repeat.end
        first = min(max(0, self.first - plan.position), begin)

        def rows(spans: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
            return [
                self._ops.rows_attention(query, self._key[:, a:b], self._value[:, a:b])
                for a, b in spans
                if a < b
            ]

        own = self._key[:, plan.given : hi], self._value[:, plan.given : hi]
        compared = [*rows([(0, first), (begin, end)]), self._ops.last_rows_attention(query, *own)]
        rest = rows([(first, begin), (end, plan.given)])
        out = self._ops.merge([*compared, *rest])[0].permute(2, 0, 1, 3)
        return out.reshape(query.shape[2], self.shape.heads, -1), kernels.total(compared)


class _Choice(Prefill):
    """Chooses which rows of the prompt stay, when all of them are kept and scored."""

    noted: dict[str, Tensor]

    def choose(self, layer: int, peak: Tensor, noted: dict[str, Tensor]) -> None:
        """Choose and write a layer's rows. peak [H, T]: the scores of the prompt's rows. noted: the
        step policy's columns."""
        assert self.tier is not None
        self._key, self._value = self.tier.stage(layer, self.plan.tokens)
        self._old = EarlierRows.of(self._ops, self.arena, self._held, layer)
        earlier = 0 if self._old is None else self._old.pos.shape[1]
        self._peak = torch.cat((peak.new_zeros((len(peak), earlier)), peak), 1)
        self.noted = noted
        self.finish(layer)

    def _state(self, view: PromptView) -> dict[str, Tensor]:
        assert self.prompt is not None
        return {**view.carried, **self.noted, **self.prompt.scorer.state(view)}


class SecondPassPrefill:
    """Has the methods of `Prefill`. After the prompt itself, each further text needs `begin_pass`,
    the calls of a forward, and `end_pass`; at last `complete`."""

    def __init__(
        self,
        shape: Shape,
        arena: Arena,
        held: Layout,
        target: Arena,
        prompt: PromptPolicy,
        step: StepPolicy | None,
        plan: Plan,
        repeats: Sequence[Repeat],
        first: int,
        dtype: torch.dtype,
        ops: Kernels,
        rows: KeptRows | None = None,
    ) -> None:
        """As `Prefill`. repeats: the further texts; only their lengths are used here. first:
        positions below it are the conversation's first rows. rows: keeps the prompt's rows until
        they are scored; it must be open for this prompt, and empty. By default `FullRows`."""
        self.shape, self.arena, self.target = shape, arena, target
        self.prompt, self.step, self.plan = prompt, step, plan
        self.repeats, self._first = repeats, first
        self._dtype, self._ops, self._held = dtype, ops, held
        self._nothing = arena.fresh([0] * shape.layers, {})
        self._longest = max(len(repeat.ids) for repeat in repeats)
        self.rows: KeptRows = rows or FullRows(
            shape, plan.tokens, self._longest, dtype, arena.device
        )
        self._peaks = [
            torch.zeros((shape.kv_heads, plan.tokens), device=arena.device)
            for _ in range(shape.layers)
        ]
        self.replayed = False
        """Whether `replay` took over the forwards of another prompt."""
        self._passed = 0  # tokens of the further texts that are done
        self._in_pass = False
        self._noted: list[dict[str, Tensor]] = []
        whole = replace(plan, totals=None, shares=False, pool=None)
        reading = self._made(_Reading, None, step, whole)
        reading.noted = self._noted
        self._reading: Prefill = reading
        self.peak = reading.peak + self._beside

    def _made(
        self, kind: type[T], prompt: PromptPolicy | None, step: StepPolicy | None, plan: Plan
    ) -> T:
        """A `Prefill` for one part of the work, over the same rows."""
        return kind(
            self.shape,
            self.arena,
            self._held,
            self.target if prompt is not None else self._nothing,
            prompt,
            step,
            plan,
            self._dtype,
            self._ops,
            self.rows,
        )

    @property
    def _beside(self) -> int:
        """Bytes that the present `Prefill` does not count: the target, the step policy's columns
        and the scores."""
        noted = sum(column.nbytes for columns in self._noted for column in columns.values())
        return self.target.nbytes + noted + sum(peak.nbytes for peak in self._peaks)

    @property
    def planned(self) -> int:
        """The peak of bytes that a first prompt will allocate, known before it is read."""
        shape, tokens, target = self.shape, self.plan.tokens, self.target
        layer = shape.kv_heads * tokens  # rows
        noted = scratch = 0
        if self.step is not None:
            state = sum(dtype.itemsize for dtype in self.step.columns.values())
            noted = shape.layers * layer * state
            if self.step.observe:  # mass and squares, float32, and the columns from before
                scratch = layer * (4 * (shape.heads // shape.kv_heads + 1) + state)
        pool = 0
        if self.plan.pool is not None:
            pool = GlobalPool.planned(target, self.plan.pool)
        column = max(column.nbytes for column in target.columns.values())
        copied = max(2 * layer * shape.head_dim * self._dtype.itemsize, column)
        return self.peak + noted + scratch + pool + copied

    @property
    def planned_in_file(self) -> int:
        """What `planned` would be if the rows were kept in a file. Only where the device is the
        host."""
        cost = self.cost(gpu=False)
        return self.planned - cost.ram + cost.file_ram

    def cost(self, *, gpu: bool) -> PassCost:
        """What the second pass costs."""
        return PassCost.of(self.shape, self.plan.tokens, self.repeats, self._dtype, gpu=gpu)

    @property
    def end(self) -> int:
        """The position after the prompt, at which every further text begins."""
        return self.plan.position + self.plan.tokens

    @property
    def work(self) -> int:
        """How many tokens go through the network: the prompt's and those of all further texts."""
        return self.plan.tokens + sum(len(repeat.ids) for repeat in self.repeats)

    @property
    def scoring(self) -> bool:
        """Whether a further text is under way or done."""
        return self.rows.length > 0

    @property
    def watches(self) -> bool:
        """Whether the network should call `watch`."""
        return self._in_pass and self.prompt.evidence.lengths

    def watch(self, states: Tensor) -> None:
        """See `Attend`."""
        assert isinstance(self._reading, _Pass)
        self._reading.watch(states)

    @property
    def needs(self) -> object:
        """First prompts of the same tokens and equal needs get equal scores. None: the work cannot
        be shared, because there is a step policy or the rows are in a file."""
        if self.step is not None or not isinstance(self.rows, FullRows):
            return None
        return self.prompt.scorer, *self.repeats

    @property
    def scored(self) -> bool:
        """Whether all further texts are done."""
        return self._passed == self.work - self.plan.tokens

    def replay(self, other: SecondPassPrefill) -> None:
        """Instead of all forwards, use the rows and scores of another prompt with equal `needs`."""
        assert other.scored
        self.rows, self._peaks = other.rows, other._peaks
        self._noted[:] = other._noted
        self.replayed = True

    @property
    def layer_complete(self) -> bool:
        """Whether every row of the layer has been staged and attended to."""
        return self._reading.layer_complete

    def done(self, layer: int) -> int:
        """Progress over all layers and texts, as a number of the tokens of `work`."""
        prompt = self.plan.tokens if self.scoring else 0
        return prompt + self._passed + self._reading.done(layer)

    def stage(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take in a chunk of rows and attend: shapes as in `Attend.attend`."""
        return self._reading.stage(layer, q, k, v)

    def finish(self, layer: int) -> None:
        """The layer is complete: keep the prompt's rows, but nothing of a further text."""
        self._reading.finish(layer)

    def begin_pass(self, repeat: Repeat) -> None:
        """Announce that the next forward is a further text, which begins at position `end`. Raises
        TierError if the prompt's rows could not be kept."""
        self._note_peak()
        if not self.scoring:
            del self._reading  # frees its buffers of a layer
            self.rows.reread(self.plan.tokens, self._longest)
        plan = replace(
            self.plan,
            tokens=self.plan.tokens + len(repeat.ids),
            given=self.plan.tokens,
            totals=None,
            shares=False,
            pool=None,
        )
        reading = self._made(_Pass, None, None, plan)
        reading.prompt_policy, reading.repeat = self.prompt, repeat
        reading.peaks, reading.first = self._peaks, self._first
        self._reading, self._in_pass = reading, True

    def end_pass(self) -> None:
        """The forward of the further text is over."""
        self._note_peak()
        self._passed += self._reading.plan.read
        self._in_pass = False

    def complete(self) -> Outcome:
        """Choose the rows that stay and write them to the target, layer by layer. Waits for the
        device."""
        assert self.scoring, "no pass scored the rows"
        plan = replace(self.plan, given=self.plan.tokens)
        beside = self._beside - self.target.nbytes
        last = self._made(_Choice, self.prompt, self.step, plan)
        self._reading = last
        for layer, peak in enumerate(self._peaks):
            last.choose(layer, peak, self._noted[layer])
        outcome = last.complete()
        self.peak = max(self.peak, last.peak + beside)
        return outcome

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self._reading.peak + self._beside)
