"""The rows of a decode step, as its policy and the kernels get them.

A policy does not see rows that never leave. Nor does it see rows that leave last, while there are
enough others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import StepPolicy, StepView


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """All L * H heads of an arena, between `DecodeStep.open` and `close`.

    position int64 []: tokens counted; width: rows of a head with padding; positions below `pinned`
    never leave; leaves_last bool [R]: rows that leave after all others, and shown int32 [R]: the
    positions as the policy sees them, or both None; layer, head int64 [L * H]: the indices of each
    head; readable: values may be read without waiting for a device, and no graph is recorded.
    """

    arena: Arena
    ops: Kernels
    position: Tensor
    width: int
    pinned: int
    leaves_last: Tensor | None
    shown: Tensor | None
    layer: Tensor
    head: Tensor
    readable: bool

    @property
    def written(self) -> dict[str, Tensor]:
        """Every column that a new row is written to."""
        columns = self.arena.columns
        return columns if self.leaves_last is None else columns | {"leaves_last": self.leaves_last}

    @property
    def positions(self) -> Tensor:
        """int32 [R]: the position of each row, as the policy sees it."""
        return self.arena.columns["pos"] if self.shown is None else self.shown

    def show(self, policy: StepPolicy, length: Tensor) -> None:
        """Update `shown`, before a policy scores rows: hide those that leave last, while there are
        enough others. length int64 [L, H]: the rows in use."""
        if self.leaves_last is None or self.shown is None:
            return
        self.ops.shown_positions(
            self.arena.start,
            length,
            self.arena.columns["pos"],
            self.leaves_last,
            self.shown,
            width=self.width,
            pinned=self.pinned,
            least=policy.sinks + policy.recent + policy.block,
        )

    def for_kernel(self, policy: StepPolicy, length: Tensor) -> kernels.Rows:
        """The argument of a kernel for all heads. length int64 [L, H]: the rows in use."""
        return kernels.Rows(
            self.arena.start,
            length,
            self.arena.cap,
            self.positions,
            self.position,
            policy.sinks,
            policy.recent,
            self.pinned,
        )

    def view(
        self,
        policy: StepPolicy,
        position: Tensor,
        index: Tensor,
        live: Tensor,
        cap: Tensor,
        heads: slice,
        *,
        layer: int | None = None,
        attention: Tensor | None = None,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> StepView:
        """The rows `index` [F, N] of the F `heads` of all L * H, as the policy sees them. Call
        `show` first. live bool [F, N]: not padding. Other arguments: see `StepView`."""
        arena, flat = self.arena, index.flatten()

        def at_rows(column: Tensor) -> Tensor:
            return column.index_select(0, flat).view(index.shape)

        pos = at_rows(self.positions).to(torch.int64)
        return StepView(
            position,
            pos.masked_fill(~live | (pos < self.pinned), -1),
            cap,
            self.layer[heads],
            self.head[heads],
            {name: at_rows(arena.columns[name]) for name in policy.columns},
            attention,
            query,
            None if key is None else key[:, None],
            lambda heads: arena.read(self.ops, "k", index[heads]),
            layer,
            self.readable,
        )

    def index(self, start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of heads [...]: (index into the columns, live bool), [..., width] each.

        Padding is not live and repeats a head's last row.
        """
        reach = torch.arange(self.width, device=start.device)
        last = (length[..., None] - 1).clamp(min=0)
        index = start[..., None] + torch.minimum(reach, last)
        return index.clamp(max=max(0, self.count - 1)), reach < length[..., None]

    @property
    def count(self) -> int:
        """Rows that the columns have room for."""
        return len(self.arena.columns["pos"])
