"""One budget for all layers and heads: a pool with the best rows of all layers read so far.

How many rows a layer keeps is known only when the last layer was scored. Until then the rows lie in
one pool, whose size is the whole budget. Each layer's better rows overwrite the pool's worst ones.
At the end the rows are put in order, head by head. No value is read back before that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minikv.cache.arena import Arena
from minikv.kernels import NOT_FREE, fill


class GlobalPool:
    """The first `size` rows of `target` hold the pool, in any order. Padding is written to the last
    row of `target`, which therefore has one row more than its heads will own together."""

    def __init__(self, target: Arena, size: int) -> None:
        self.target, self.size = target, size
        rows, device = target.rows, target.device
        self._owned = rows - 1
        with torch.inference_mode(False):
            self._key = torch.full((size,), NOT_FREE, dtype=torch.int64, device=device)
            self._owner = torch.zeros(rows, dtype=torch.int64, device=device)  # layer x H + head
            self._share = torch.zeros(rows, dtype=torch.float32, device=device)

    def add(
        self,
        layer: int,
        key: Tensor,
        pos: Tensor,
        staged: Mapping[str, Tensor],
        extra: Mapping[str, Tensor],
        share: Tensor | None,
        earlier: tuple[Arena, Tensor] | None = None,
    ) -> None:
        """Take in the rows of a layer that are better than the worst of the pool.

        key int64 [H, N]: larger for a better row, `NOT_FREE` where there is no row. share float32
        [H, N]: each row's share of the attention mass that was observed in the layer. The others
        are as for `compaction.gather_survivors`.
        """
        heads, count = key.shape
        flat, size = key.flatten(), self.size
        best = torch.cat((self._key, flat)).argsort(descending=True, stable=True)[:size]
        stays = torch.zeros(size + len(flat), dtype=torch.bool, device=key.device)
        stays.scatter_(0, best, True)
        enters = stays[size:]
        wide = min(size, len(flat))
        # As many rows enter as leave. After those, both lists are padded with other rows.
        slot = (~stays[:size]).to(torch.int8).argsort(descending=True, stable=True)[:wide]
        row = enters.to(torch.int8).argsort(descending=True, stable=True)[:wide]
        real = torch.arange(wide, device=key.device) < enters.sum()
        into = torch.where(real, slot, self._owned)
        head, place = row // count, row % count
        tokens = staged["k"].shape[1]
        new = (place - (count - tokens)).clamp(min=0)
        for name, values in staged.items():
            found = values[head, new]
            if earlier is not None:
                arena, index = earlier
                old = place < count - tokens
                old_values = arena.columns[name][index[head, place.clamp(max=count - tokens - 1)]]
                found = torch.where(old.view(-1, *[1] * (found.dim() - 1)), old_values, found)
            self.target.columns[name].index_copy_(0, into, found)
        for name, values in ({"pos": pos} | dict(extra)).items():
            column = self.target.columns[name]
            column.index_copy_(0, into, values[head, place].to(column.dtype))
        self._owner.index_copy_(0, into, layer * heads + head)
        if share is not None:
            self._share.index_copy_(0, into, share[head, place])
        self._key = torch.where(
            stays[:size],
            self._key,
            torch.zeros_like(self._owner).index_copy_(0, into, flat[row])[:size],
        )

    def place(self, spare: int, *, grows: bool) -> Tensor:
        """Put every row into the segment of its head, ascending by position, and write the tables.

        spare: rows that a head owns above its cap. grows: the heads also own all rows that are
        left. Returns the share of each layer's attention mass that stayed, float32 [L]. The caller
        must still set `Arena.region`.
        """
        target, size = self.target, self.size
        layers, heads = target.start.shape
        held = self._key > NOT_FREE
        owner = torch.where(held, self._owner[:size], layers * heads)
        kept = torch.zeros(layers * heads + 1, dtype=torch.int64, device=held.device)
        kept.scatter_add_(0, owner, torch.ones_like(owner))
        kept = kept[:-1]
        caps = fill(kept, size)  # if nothing was evicted, heads may still grow to the budget
        sizes = caps + spare
        if grows:
            sizes = fill(sizes, self._owned)
        start = sizes.cumsum(0) - sizes
        order = ((owner << 32) | target.columns["pos"][:size].clamp(min=0)).argsort(stable=True)
        sorted_owner, first = owner[order], kept.cumsum(0) - kept
        inside = sorted_owner < layers * heads
        sorted_owner = sorted_owner.clamp(max=layers * heads - 1)
        destination = (
            start[sorted_owner] + torch.arange(size, device=held.device) - first[sorted_owner]
        )
        source = torch.full_like(self._owner, self._owned)
        source.index_copy_(0, torch.where(inside, destination, self._owned), order)
        source[-1] = self._owned
        for name, column in target.columns.items():
            target.columns[name] = column[source]
        share = torch.zeros(layers + 1, device=held.device)
        share.scatter_add_(0, owner // heads, self._share[:size])
        target.start.copy_(start.view(layers, heads))
        target.length.copy_(kept.view(layers, heads))
        target.capacity.copy_(sizes.view(layers, heads))
        target.cap.copy_(caps.view(layers, heads))
        return share[:-1]
