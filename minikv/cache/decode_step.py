"""The steps of an answer with every decision on the device: nothing asks it for a value.

Shapes never depend on values, so that a step can be captured in a CUDA graph, and one graph serves
heads that grow and heads that are full: the newcomer goes to the head's hole if there is one, else
behind its last row. Slots and victims are those of `KVCache`.

A step becomes final at the start of the next one, or by `commit`: until then it has written only to
rows that nobody holds, so that `drop` undoes it, and a step may be begun before the host knows
whether its token belongs to the answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena
from minikv.cache.stats import Shape
from minikv.cache.step_kernels import Fused, Step, averages, fused, hashes
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import StepPolicy, StepView, oldest_of_lowest

_WIDE = 256  # widths are multiples of it, so that a graph outlives small changes of the caps
_ENDLESS = 1 << 40  # a window that never slides


class DecodeStep:
    """`Attend` for one token at a time, over an arena that was loaded.

    Call `start`, feed the network one token, call `finish`. start, length, cap, hole int64 [L, H]
    as in `Arena`; count [L, H]: rows in use with the newcomer of the step under way; position int64
    []: tokens fed and final. go bool []: the last step may become final. taken bool [L, H]: heads
    whose newcomer stands where a row stood that was not a hole, and which `spare` has.
    """

    def __init__(self, shape: Shape, device: torch.device, ops: Kernels | None = None) -> None:
        self.shape, self.device, self._ops = shape, device, ops or Kernels()
        sides = (shape.layers, shape.kv_heads)

        def whole(value: int = 0) -> Tensor:
            return torch.full(sides, value, dtype=torch.int64, device=device)

        with torch.inference_mode(False):  # written in a forward, and outside of one
            self.start_row, self.length, self.cap, self.hole = whole(), whole(), whole(), whole(-1)
            self.count, self.slot, self.quota = whole(), whole(), whole()
            self.taken = torch.zeros(sides, dtype=torch.bool, device=device)
            self.go = torch.zeros((), dtype=torch.bool, device=device)
            self.position = torch.zeros((), dtype=torch.int64, device=device)
            windows = [_ENDLESS if w is None else w for w in shape.windows]
            self.window = torch.tensor(windows, dtype=torch.int64, device=device)
            self.oldest = torch.zeros_like(self.window)  # positions below it are out of sight
            self._layer = torch.arange(shape.layers, device=device).repeat_interleave(sides[1])
            self._head = torch.arange(shape.kv_heads, device=device).repeat(sides[0])
            self._none = torch.empty(0, device=device)
        self._slides = any(w is not None for w in shape.windows)
        self.columns: dict[str, Tensor] = {}
        self._extra: list[str] = []
        self.policy: StepPolicy | None = None
        self._fused: Fused | None = None
        self.width = 0
        self.pinned = 0
        self._learned = False  # from the last step, which is not final yet
        self.logits = self.lse = self._none
        # Layer by layer, as views are not free: starts, counts, slots, oldest, logits, lse.
        self._views: list[tuple[Tensor, ...]] = []
        self._later: Tensor | None = None
        self._spare: dict[str, Tensor] = {}
        self.key: tuple[object, ...] = ()

    # -- between host and device --------------------------------------------------------------

    @staticmethod
    def takes(arena: Arena, step: StepPolicy | None, later: Tensor | None) -> bool:
        """Whether steps over this arena under this policy can be made here.

        Not: HashEvict beside rows that leave last or in int8, and layer-wise TOVA beside the
        former, as their kernels know neither; heads that hold more than they may, as a changed
        policy leaves them until the next prompt.
        """
        if hashes(step) is not None and (later is not None or arena.coded):
            return False
        if averages(step) and later is not None:
            return False
        if step is None:
            return True
        room = 0 if step.before else 1
        full = (arena.length > arena.cap) & (arena.free_slot < 0)
        return not bool((full | (arena.capacity < arena.cap + room)).any())

    def load(
        self,
        arena: Arena,
        step: StepPolicy | None,
        position: int,
        pinned: int,
        later: Tensor | None,
    ) -> None:
        """Take over from the host. later bool [R]: rows that leave after all others.

        `key` changes whenever something that a captured step has fixed has changed.
        """
        for mine, theirs in (
            (self.start_row, arena.start),
            (self.length, arena.length),
            (self.cap, arena.cap),
            (self.hole, arena.free_slot),
        ):
            mine.copy_(theirs)
        self.position.fill_(position)
        self.go.zero_()
        self.taken.zero_()
        self._learned = False
        self.count.copy_(self.length)
        self.columns, self._extra = dict(arena.columns), arena.extra
        self.policy, self.pinned = step, pinned
        reads = step is not None and not step.before
        self._fused = fused(step) if step is not None and reads and later is None else None
        if self._fused is not None:
            self.quota.copy_(self._fused.quota(arena.cap))
        most = arena.capacity if step is None else arena.cap + int(reads)
        self._widen(int(most.max()), reads)
        with torch.inference_mode(False):
            self._keep(later, step is not None and step.before)
            whole = (self.start_row, self.count, self.slot, self.oldest)
            read = (self.logits, self.lse) if reads else ()
            self._views = list(zip(*(t.unbind() for t in (*whole, *read)), strict=True))
        buffers = (self.logits, *self._spare.values(), self._later)
        self.key = (
            step,
            pinned,
            self.width,
            arena.rows,
            *(t.data_ptr() for t in (*self.columns.values(), *buffers) if t is not None),
        )

    def _widen(self, rows: int, reads: bool) -> None:
        """Have scratch for heads of so many rows, if attention is read."""
        wide = -(-rows // _WIDE) * _WIDE
        if not wide <= self.width <= 4 * wide:
            self.width, self.logits = wide, self._none
        layers, heads = self.length.shape
        sides = (layers, heads, self.shape.heads // heads)
        if not reads:
            self.logits = self.lse = self._none
        elif not len(self.logits):
            with torch.inference_mode(False):
                exact = torch.float32  # whatever torch's default is
                self.logits = torch.empty((*sides, self.width), dtype=exact, device=self.device)
                self.lse = torch.empty(sides, dtype=exact, device=self.device)

    def _keep(self, later: Tensor | None, before: bool) -> None:
        """Have room for the marks of `later`, and for rows that newcomers overwrite."""
        if later is None or self._later is None or len(self._later) != len(later):
            self._later = None if later is None else later.clone()
        else:
            self._later.copy_(later)
        heads = self.length.numel()
        wanted = self.columns if before else {}
        kinds = {name: (c.dtype, (heads, *c.shape[1:])) for name, c in wanted.items()}
        if kinds != {name: (c.dtype, tuple(c.shape)) for name, c in self._spare.items()}:
            self._spare = {
                name: torch.zeros(shape, dtype=dtype, device=self.device)
                for name, (dtype, shape) in kinds.items()
            }

    def unload(self, arena: Arena) -> None:
        """Give back to the host what became final. Waits for the device."""
        arena.length.copy_(self.length)
        arena.free_slot.copy_(self.hole)
        self.columns = {}

    def release(self) -> None:
        """Give back the memory that steps work with."""
        self.logits = self.lse = self._none
        self.width, self._later, self._spare, self._views = 0, None, {}, []

    @property
    def nbytes(self) -> int:
        """Bytes held beside the arena."""
        found = (self.logits, self.lse, *self._spare.values(), self._later)
        return sum(t.nbytes for t in found if t is not None)

    # -- a step -----------------------------------------------------------------------------

    def start(self) -> None:
        """Make the last step final if it may be, and decide where the newcomers go."""
        self.commit()
        if self._slides:
            torch.sub(self.position + 1, self.window, out=self.oldest)

    def finish(self, good: Tensor) -> None:
        """The newcomer is in every layer. good bool []: the step may become final."""
        self.go.copy_(good)

    def commit(self) -> None:
        """Make the last step final, unless `go` is false: learn from it, evict, count it. Then
        decide where the newcomers of the next one go."""
        go = self.go
        if self.policy is None or self.policy.before:
            self.hole.masked_fill_(go, -1)
        elif self._learned:  # it was interrupted right after that
            pass
        elif self._fused is not None:
            self._fused.finish(self._ended(self.policy), self.hole)
        else:
            self._judge(self.policy)
        self._learned = True
        if self._slides:
            self._slide()
        self._ops.advance(
            go,
            self.start_row,
            self.length,
            self.cap,
            self.hole,
            self.position,
            self.count,
            self.slot,
            self.taken,
            before=self.policy is not None and self.policy.before,
        )
        self._learned = False

    def drop(self) -> None:
        """Undo the last step; nothing happens if it is final."""
        self._learned = False
        self.go.zero_()
        if not self._spare:
            return
        # Where the step did not come to a layer, no row of it gave way.
        gone = self.taken & (self.hole >= 0)
        taken = gone.flatten()
        place = torch.where(taken, self.hole.flatten(), self.start_row.flatten())
        for name, saved in self._spare.items():
            column = self.columns[name]
            chosen = taken.view(-1, *[1] * (column.dim() - 1))
            column.index_copy_(0, place, torch.where(chosen, saved, column[place]))
        self.hole.masked_fill_(gone, -1)
        self.taken.zero_()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`; one token."""
        assert len(q) == 1
        heads, columns = self.shape.kv_heads, self.columns
        start, count, slot, oldest, *read = self._views[layer]
        query = q[0].view(heads, -1, self.shape.head_dim)
        policy = self.policy
        hashing = hashes(policy)
        if hashing is not None:
            self._ops.hash_append(
                k[0][:, None] if hashing.with_key else query,
                k[0],
                v[0],
                hashing.matrix(layer, k),
                start,
                self.length[layer],
                self.cap[layer],
                self.hole[layer],
                self.position,
                columns["k"],
                columns["v"],
                columns["pos"],
                columns["code"],
                self._spares(layer),
                width=self.width,
                sinks=hashing.sinks,
                recent=hashing.recent,
                pinned=self.pinned,
            )
        else:
            if policy is not None and policy.before:
                slot = self._make_room(policy, layer, query, k[0])
            extra = [columns[name] for name in self._extra]
            blank = extra if self._later is None else [*extra, self._later]
            self._ops.append(
                k[0],
                v[0],
                slot,
                self.position,
                columns["k"],
                columns["v"],
                columns["pos"],
                blank,
                columns.get("k_scale"),
                columns.get("v_scale"),
            )
            for name, values in (policy.admit(layer, k[0]) if policy else {}).items():
                columns[name].index_copy_(0, slot, values)
        window = self.shape.windows[layer]
        mixed, _ = self._ops.ragged_attention(
            query,
            columns["k"],
            columns["v"],
            start,
            count,
            width=self.width,
            pos=None if window is None else columns["pos"],
            oldest=None if window is None else oldest,
            logits=read[0] if read else None,
            lse=read[1] if read else None,
            k_scale=columns.get("k_scale"),
            v_scale=columns.get("v_scale"),
        )
        return mixed.reshape(1, self.shape.heads, -1)

    def advance(self, tokens: int) -> None:
        """See `Attend`; it counts only when the step becomes final."""
        assert tokens == 1

    # -- decisions without a kernel -----------------------------------------------------------

    def _make_room(self, policy: StepPolicy, layer: int, query: Tensor, key: Tensor) -> Tensor:
        """Evict a row of each full head before attention; where newcomers go, [H]."""
        start, length, hole = self.start_row[layer], self.length[layer], self.hole[layer]
        index, live = self._index(start, length)
        view = self._view(policy, self.position, index, live, self.cap[layer], layer)
        view = StepView(
            view.position,
            view.pos,
            view.cap,
            view.layer,
            view.head,
            view.columns,
            None,
            query,
            key[:, None],
        )
        chosen = _victims(policy, view, index)
        asked = (hole < 0) & (length >= self.cap[layer])
        place = torch.where(asked, chosen, start)
        for name, saved in self._spare.items():
            column = self.columns[name]
            mine = saved.view(self.shape.layers, -1, *saved.shape[1:])[layer]
            mine.copy_(torch.where(asked.view(-1, *[1] * (mine.dim() - 1)), column[place], mine))
        hole.copy_(torch.where(asked, chosen, hole))
        return torch.where(hole >= 0, hole, start + length)

    def _judge(self, policy: StepPolicy) -> None:
        """As `Fused.finish`, by what the policy itself says."""
        index, live = self._index(self.start_row.flatten(), self.count.flatten())
        p = (self.logits.flatten(0, 1) - self.lse.flatten(0, 1)[..., None]).exp().mean(1)
        p = p.masked_fill(~live, 0.0)
        rows = len(self.columns["pos"])
        # What pads goes to a row of its own behind the last one.
        place = torch.where(live, index, rows).flatten()

        def spread(values: Tensor) -> Tensor:
            return p.new_zeros(rows + 1).scatter_(0, place, values.flatten())[:rows]

        def visible() -> Tensor:
            seen = torch.minimum(self.count, self.window[:, None]).flatten()
            return spread(seen[:, None].expand_as(p).to(torch.float32))

        mine = {name: self.columns[name] for name in self._extra}
        before = {name: column.clone() for name, column in mine.items()}
        policy.step(mine, spread(p), visible)
        for name, column in mine.items():
            column.copy_(torch.where(self.go, column, before[name]))
        over = self.count > self.cap
        live &= over.flatten()[:, None]  # the others give up nothing and are not looked at
        view = self._view(policy, self.position + 1, index, live, self.cap.flatten(), None, p)
        chosen = _victims(policy, view, index).view_as(self.hole)
        chosen = torch.where(over, chosen, -1)
        self.hole.copy_(torch.where(self.go, chosen, self.hole))

    def _slide(self) -> None:
        """A row that its layer's window will not show again leaves before all others."""
        index, live = self._index(self.start_row, self.count)
        pos = self.columns["pos"][index].to(torch.int64).masked_fill(~live, _ENDLESS)
        oldest, at = pos.min(-1)
        gone = self.go & (oldest <= self.position + 1 - self.window[:, None])
        self.hole.copy_(torch.where(gone, self.start_row + at, self.hole))

    def _view(
        self,
        policy: StepPolicy,
        position: Tensor,
        index: Tensor,
        live: Tensor,
        cap: Tensor,
        layer: int | None,
        attention: Tensor | None = None,
    ) -> StepView:
        """What the policy sees of the rows `index` [F, N]: of a layer's heads, or of all."""
        pos = self.columns["pos"][index].to(torch.int64)
        pos = pos.masked_fill(~live | (pos < self.pinned), -1)
        if self._later is not None:
            shown = pos.masked_fill(self._later[index], -1)
            enough = (shown >= 0).sum(1, keepdim=True) > policy.sinks + policy.recent
            pos = torch.where(enough, shown, pos)
        heads = self.shape.kv_heads
        part = slice(None) if layer is None else slice(layer * heads, (layer + 1) * heads)
        columns = {name: self.columns[name][index] for name in self._extra}
        return StepView(position, pos, cap, self._layer[part], self._head[part], columns, attention)

    def _index(self, start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of heads [...] as indices into the columns [..., width], and which are real."""
        reach = torch.arange(self.width, device=self.device)
        last = (length[..., None] - 1).clamp(min=0)
        index = start[..., None] + torch.minimum(reach, last)
        return index.clamp(max=len(self.columns["pos"]) - 1), reach < length[..., None]

    def _ended(self, policy: StepPolicy) -> Step:
        """The step as its end sees it."""
        rows = kernels.Rows(
            self.start_row,
            self.count,
            self.cap,
            self.columns["pos"],
            self.position,
            policy.sinks,
            policy.recent,
            self.pinned,
        )
        mine = {name: self.columns[name] for name in self._extra}
        return Step(self._ops, self.logits, self.lse, rows, self.go, mine, self.quota, self.window)

    def _spares(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Where the rows of a layer that give way are kept."""
        heads = self.shape.kv_heads
        part = slice(layer * heads, (layer + 1) * heads)
        k, v, pos, code = (self._spare[name][part] for name in ("k", "v", "pos", "code"))
        return k, v, pos, code


def _victims(policy: StepPolicy, view: StepView, index: Tensor) -> Tensor:
    """Rows that `StepPolicy.judge` gives up, as indices into the columns [F]. A policy's own
    `victims` may ask for values, which is faster on a CPU."""
    scores, free = policy.judge(view, 1)
    return index.gather(1, oldest_of_lowest(scores, view.pos, free)[:, None])[:, 0]
