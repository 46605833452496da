"""The end of a layer without a word from the device: survivors move to places that only it knows.

Where the old rows lie is sent over once, when a prompt begins; how many rows every head kept, and
where they begin, comes back once, when it ends. In between the host's layout of a layer that was
rewritten is out of date.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena
from minikv.kernels.dispatch import Kernels
from minikv.policies import selection
from minikv.policies.base import PromptPolicy, PromptView


def far(device: torch.device) -> bool:
    """Asking the device for a number would hold the host up."""
    return device.type == "cuda"


class Compaction:
    """Segments of an arena as the device knows them, while a prompt is read."""

    def __init__(self, arena: Arena, ops: Kernels) -> None:
        self.arena, self._ops = arena, ops
        layout = torch.stack((arena.start, arena.length, arena.free_slot))
        if far(arena.device):
            layout = layout.pin_memory()
        self.start, self.length, self.free_slot = layout.to(arena.device, non_blocking=True)
        self._layout = layout  # pinned memory must outlive the copy
        self._most = arena.length.amax(1).tolist()
        self._landed: dict[int, Tensor] = {}
        self._lost: dict[int, Tensor] = {}

    def most(self, layer: int) -> int:
        """The most rows that a head of the layer had before the prompt, holes included."""
        return int(self._most[layer])

    def index(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's rows before the prompt: (index into the columns [H, N], live [H, N] bool).

        As `Arena.index`, but a free_slot stays where it is, and where a head has no row at all the
        index may be of a row that nobody has written.
        """
        start, length = self.start[layer][:, None], self.length[layer][:, None]
        reach = torch.arange(self.most(layer), device=start.device)
        index = start + torch.minimum(reach, (length - 1).clamp(min=0))
        live = (reach < length) & (start + reach != self.free_slot[layer][:, None])
        return index.clamp(max=max(0, self.arena.rows - 1)), live

    def land(
        self,
        layer: int,
        keep: Tensor,
        pos: Tensor,
        caps: Tensor,
        sizes: Tensor,
        fresh: Mapping[str, Tensor],
        old: tuple[Mapping[str, Tensor], Tensor] | None,
        extra: Mapping[str, Tensor],
    ) -> None:
        """Move the kept rows, ascending by position, into segments of `sizes` rows side by side.

        keep and pos [H, N]; caps and sizes int64 [H]; fresh: what the prompt adds, every column of
        the arena but pos and the policy's, [H, T, ...]; old: a copy of the columns of the rows that
        come before those in N, and which of its rows they are [H, N - T]; extra: the policy's
        columns [H, N].
        """
        arena, begin = self.arena, self.arena.region[layer]
        most = min(keep.shape[1], arena.region[layer + 1] - begin)
        index, count = kernels.survivors(keep, pos)
        start = begin + sizes.cumsum(0) - sizes
        source = None if old is None else (old[0]["k"], old[0]["v"], old[1])
        into = arena.columns["k"], arena.columns["v"]
        staged = fresh["k"], fresh["v"]
        self._ops.gather_rows(index, count, start, staged, source, into, most)
        columns = {"pos": pos, **extra}
        for name in arena.scales:
            columns[name] = fresh[name]
            if old is not None:
                columns[name] = torch.cat((old[0][name][old[1]], fresh[name]), 1)
        for name, values in columns.items():
            self._ops.gather_column(index, count, start, values, arena.columns[name], most)
        self._landed[layer] = torch.stack((start, count, sizes, caps))

    def note_lost(self, layer: int, share: Tensor) -> None:
        """float32 []: the share of the observed attention that stays in the layer."""
        self._lost[layer] = share

    def settle(self) -> dict[int, float]:
        """Tell the host where everything lies; the share that each layer lost, where it is known.

        The one time that a prompt waits for the device.
        """
        arena, layers = self.arena, list(self._landed)
        told = [t.to(torch.float64).flatten() for t in self._landed.values()]
        told += [t.to(torch.float64).flatten() for t in self._lost.values()]
        if not told:
            return {}
        numbers = torch.cat(told).cpu()  # exact: counts are far below 2^53
        split = 4 * arena.heads * len(layers)
        found = numbers[:split].to(torch.int64).view(-1, 4, arena.heads)
        for layer, (start, count, size, cap) in zip(layers, found, strict=True):
            assert bool((count <= size).all()), "more rows were kept than there is place for"
            assert int(size.sum()) <= arena.region[layer + 1] - arena.region[layer]
            arena.start[layer], arena.length[layer] = start, count
            arena.capacity[layer], arena.cap[layer] = size, cap
            arena.free_slot[layer] = -1
        lost = zip(self._lost, numbers[split:].tolist(), strict=True)
        self._landed, self._lost = {}, {}
        return {layer: 1.0 - share for layer, share in lost}


def choose(
    prompt: PromptPolicy, view: PromptView, pinned: Tensor, total: int, lasting: int, least: int
) -> Tensor:
    """bool [H, N]: the rows that stay, as `Prefill` chooses them, `total` over the layer's heads.

    pinned [H, N]: rows that stay whatever their score; those below position `lasting` never leave,
    and a head gets `least` rows beside them. A policy without a device form is asked as on the
    host, which waits for the device.
    """
    free = view.live & ~pinned
    scores = prompt.evidence.scorer(view)
    left = (total - pinned.sum()).clamp(min=0)
    if prompt.prefer is not None:
        preferred = prompt.prefer(view.pos, view.turns) & free
        count = preferred.sum()
        fits = count <= left
        pinned = pinned | (preferred & fits)
        free = torch.where(fits, free & ~preferred, preferred)
        left = left - count * fits
    if prompt.device_heads is not None:
        counts = prompt.device_heads(scores, view.pos, free, left, total)
    else:
        host = prompt.heads(scores, view.pos, free, int(left))
        counts = torch.tensor(host, device=free.device)
    own = pinned & (view.pos >= lasting)
    counts = selection.spread(counts, own.sum(1), free.sum(1), least)
    if prompt.device_select is not None:
        return pinned | prompt.device_select(view, scores, free, counts, total + len(free))
    return pinned | prompt.select(view, scores, free, counts.tolist())
