"""One budget for all layers and heads: a pool with the best rows of all layers read so far.

How many rows a layer keeps is known only when the last layer was scored. Until then the rows are in
one pool, whose size is the whole budget. Each layer's better rows overwrite the pool's worst ones.
At the end the rows are put in order, head by head. No value is read back before that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minikv.cache.arena import Arena
from minikv.kernels import NOT_FREE, fill

AT_ONCE = 1 << 22
"""About how many numbers of keys or values are copied at once, so that a copy takes little memory
compared to the pool."""


class GlobalPool:
    """The first `size` rows of `target` hold the pool, in any order. Padding is written to the last
    row of `target`, which therefore has one row more than its heads will own together."""

    def __init__(self, target: Arena, size: int) -> None:
        self.target, self.size = target, size
        rows, device = target.rows, target.device
        self._owned = rows - 1
        with torch.inference_mode(False):
            self._key = torch.full((rows,), NOT_FREE, dtype=torch.int64, device=device)
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
        """Add the rows of a layer that are better than the worst of the pool.

        key int64 [H, N]: larger for a better row, `NOT_FREE` where there is no row. share float32
        [H, N]: each row's share of the attention mass that was observed in the layer. The others
        are as for `compaction.gather_survivors`.
        """
        heads, count = key.shape
        flat, size = key.flatten(), self.size
        both = torch.cat((self._key[:size], flat))
        readable, at = key.device.type == "cpu", len(both) - size
        edge = both.kthvalue(at + 1).values if readable else both.sort().values[at]  # of the best
        if not readable or int((stays := both >= edge).sum()) > size:
            better, tied = both > edge, both == edge  # of equal ones the first
            stays = better | (tied & (tied.cumsum(0) <= size - better.sum()))
        leaves, enters = ~stays[:size], stays[size:]
        # As many rows enter as leave. On a GPU, where nobody waits for how many, the list is padded
        # with writes to the last row.
        if readable:
            into, row = leaves.nonzero()[:, 0], enters.nonzero()[:, 0]
        else:
            wide = min(size, len(flat))
            into, row = _listed(leaves, wide, self._owned), _listed(enters, wide, 0)
        extra, before = {"pos": pos} | dict(extra), count - staged["k"].shape[1]
        most = max(1, AT_ONCE // staged["k"].shape[2])
        for slots, rows in zip(torch.split(into, most), torch.split(row, most), strict=True):
            head, place = rows // count, rows % count
            for name, values in staged.items():
                found = values[head, (place - before).clamp(min=0)]
                if earlier is not None:
                    arena, index = earlier
                    old = arena.columns[name][index[head, place.clamp(max=before - 1)]]
                    is_old = (place < before).view(-1, *[1] * (found.dim() - 1))
                    torch.where(is_old, old, found, out=found)
                    del old
                self.target.columns[name].index_copy_(0, slots, found)
                del found  # before the next one is copied
            for name, values in extra.items():
                column = self.target.columns[name]
                column.index_copy_(0, slots, values[head, place].to(column.dtype))
            self._owner.index_copy_(0, slots, layer * heads + head)
            if share is not None:
                self._share.index_copy_(0, slots, share[head, place])
            self._key.index_copy_(0, slots, flat[rows])

    def place(self, spare: int, *, grows: bool) -> Tensor:
        """Put every row into the segment of its head, ascending by position, and write the tables.

        spare: rows that a head owns above its cap. grows: the heads also own all remaining rows.
        Returns the share of each layer's attention mass that stayed, float32 [L]. The caller must
        still set `Arena.region`.
        """
        target, size = self.target, self.size
        layers, heads = target.start.shape
        held = self._key[:size] > NOT_FREE
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
        for column in target.columns.values():
            wide, most = column.view(len(column), -1), max(1, AT_ONCE // len(column))
            for part in torch.split(wide, most, 1):
                part.copy_(part.index_select(0, source))
        share = torch.zeros(layers + 1, device=held.device)
        share.scatter_add_(0, owner // heads, self._share[:size])
        target.start.copy_(start.view(layers, heads))
        target.length.copy_(kept.view(layers, heads))
        target.capacity.copy_(sizes.view(layers, heads))
        target.cap.copy_(caps.view(layers, heads))
        return share[:-1]


def _listed(mask: Tensor, count: int, padding: int) -> Tensor:
    """int64 [count]: the indices where mask bool [n] is True, ascending, then `padding`."""
    place = torch.where(mask, mask.cumsum(0) - 1, count)
    found = torch.full((count + 1,), padding, dtype=torch.int64, device=mask.device)
    return found.scatter_(0, place, torch.arange(len(mask), device=mask.device))[:count]
