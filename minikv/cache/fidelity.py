"""Measures what eviction loses, when a prompt was read from a tier.

Two figures, both for the prompt's last token. For each layer: how far the output of attention over
the rows that stayed is from the exact output. For the first token of the answer: KL(full || hot),
in nats, between the exact distribution and that of one more forward over the rows that stayed.

In every layer but the first, that forward computes another row for the token than the prompt did,
because the layer's input comes from fewer rows. The new row temporarily replaces the token's row in
each head that holds it; the old row is then put back, bit for bit. In other heads, the new row is
included in the attention and not stored. So the cache is the same afterwards.

In a layer whose window has slid, the row that the next token no longer sees is missing: it was
dropped before the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.arena import Arena
from minikv.cache.stats import Fidelity, Shape
from minikv.kernels.dispatch import Kernels


class LastToken:
    """`Attend` for one more forward of the last token that was read, over the rows that stayed.

    Waits for the device only in the constructor.
    """

    def __init__(self, shape: Shape, arena: Arena, position: int, ops: Kernels) -> None:
        """position: of the token. Every head must hold a row."""
        self.shape, self.arena, self.position, self._ops = shape, arena, position, ops
        self.width = int(arena.length.max())
        own, held = [], []
        for layer in range(shape.layers):
            index, live = arena.index(layer, self.width)
            mine = live & (arena.columns["pos"][index] == position)
            at = mine.to(torch.int8).argmax(1, keepdim=True)
            own.append(index.gather(1, at)[:, 0])
            held.append(mine.any(1))
        self._slot, self._held = torch.stack(own), torch.stack(held)  # [L, H]
        self._all_held = bool(self._held.all())
        windows = [position + 1 - (window or position + 1) for window in shape.windows]
        self._oldest = torch.tensor(windows, device=arena.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`; one token."""
        assert len(q) == 1
        columns, slot, held = self.arena.columns, self._slot[layer], self._held[layer]
        new = self.arena.stored(self._ops, k[0], v[0])
        old = {name: columns[name][slot] for name in new}
        try:
            for name, row in new.items():
                mask = held.view(-1, *[1] * (row.dim() - 1))
                columns[name].index_copy_(0, slot, torch.where(mask, row, old[name]))
            out, lse = self.over_rows(layer, q[0])
        finally:
            for name, row in old.items():
                columns[name].index_copy_(0, slot, row)
        if not self._all_held:
            out = torch.where(held[:, None, None], out, _with_own(q[0], k[0], v[0], out, lse))
        return out.reshape(1, self.shape.heads, -1)

    def over_rows(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of the query [H * G, D] over the rows of the layer: output [H, G, D], and the
        log-sum-exp of the logits [H, G]."""
        arena, columns = self.arena, self.arena.columns
        slides = self.shape.windows[layer] is not None
        rows = kernels.Segments(
            columns["k"],
            columns["v"],
            arena.start[layer],
            arena.length[layer],
            self.width,
            columns["pos"] if slides else None,
            self._oldest[layer] if slides else None,
            columns.get("k_scale"),
            columns.get("v_scale"),
        )
        query = q.view(self.shape.kv_heads, -1, self.shape.head_dim)
        return self._ops.ragged_attention(query, rows)

    def advance(self, tokens: int) -> None:
        """See `Attend`. Does nothing: the token was counted when it was first read."""

    def output_errors(self, exact: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """float32 [L]: ||hot - full|| / ||full|| of each layer's attention output. exact: for every
        layer, the token's query and the exact output, [H * G, D] each."""
        errors = []
        for layer, (q, full) in enumerate(exact):
            hot, _ = self.over_rows(layer, q)
            full = full.float().flatten()
            far = (hot.float().flatten() - full).norm()
            errors.append(far / full.norm().clamp(min=torch.finfo(torch.float32).tiny))
        return torch.stack(errors)


def compared(full: Tensor, hot: Tensor, errors: Tensor) -> Fidelity:
    """Both figures, from the logits [V] of the full cache and of the rows that stayed, and the
    layers' errors float32 [L]. None if a number is not finite."""
    kl, *each = torch.cat((divergence(full, hot)[None], errors.double())).tolist()
    if not all(map(math.isfinite, (kl, *each))):
        return Fidelity()
    worst = max(range(len(each)), key=each.__getitem__)
    return Fidelity(max(0.0, kl), sum(each) / len(each), each[worst], worst)


def divergence(full: Tensor, hot: Tensor) -> Tensor:
    """KL(full || hot) in nats, float64 [], of two distributions given as logits [V]."""
    exact, near = (torch.log_softmax(logits.double(), 0) for logits in (full, hot))
    return (exact.exp() * (exact - near)).sum()


def _with_own(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Merge attention over rows, out [H, G, D] and lse [H, G], with the token's own row k, v [H,
    D]; q [H * G, D]."""
    heads, size = k.shape
    query = q.view(heads, -1, size)
    logit = (query.float() @ k.float()[..., None])[..., 0] / math.sqrt(size)
    value = v[:, None].expand(out.shape)
    return kernels.merge([(out, lse), (value, logit)])[0]
