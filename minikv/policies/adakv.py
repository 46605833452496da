"""Ada-KV (arXiv 2407.11550, algorithm 1) over SnapKV's scores: head budgets by need.

The layer's budget goes to the heads in proportion to how many of the layer's best rows each holds,
blended with an even share (`alpha`, the safeguard of section 3.3). By default the blend is rounded
so that the layer's total is exact to the row; `rounding=official` is the authors' arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from minikv.policies.snapkv import from_options
from minikv.policy import Heads, PromptPolicy, even_layers, last_rows, share, top


def wanted(scores: Tensor, pos: Tensor, free: Tensor, total: int) -> list[int]:
    """How many of the layer's `total` best free rows each head holds.

    scores, pos and free [H, N]. Equal scores: the younger row, then the first head.
    """
    heads, rows = scores.shape
    flat = scores.masked_fill(~free, -torch.inf).reshape(-1)
    if total >= int(free.sum()):
        return [int(n) for n in free.sum(1)]
    edge = torch.topk(flat, total).values[-1]
    sure = (flat > edge).view(heads, rows).sum(1)
    tied = (flat == edge).nonzero().squeeze(1)
    young = torch.argsort(pos.reshape(-1)[tied], descending=True, stable=True)
    chosen = tied[young[: total - int(sure.sum())]]
    counts = sure + torch.bincount(chosen // rows, minlength=heads)
    return [int(n) for n in counts]


def normalized(scores: Tensor, free: Tensor, each: int) -> Tensor:
    """Weigh each head's scores [H, N] by the share of its mass that its best `each` rows hold."""
    live = scores.masked_fill(~free, 0.0)
    best = live.topk(min(each, live.shape[1])).values.sum(1)
    return scores * (best / live.sum(1).clamp(min=1e-30))[:, None]


def adaptive_heads(alpha: float, rounding: str = "exact", normalize: bool = False) -> Heads:
    """Heads: (1 - alpha) x need + alpha x even share, b rows a head on average."""

    def heads(scores: Tensor, pos: Tensor, free: Tensor, total: int) -> list[int]:
        most = [int(n) for n in free.sum(1)]
        if normalize:
            scores = normalized(scores, free, total // len(most))
        need = wanted(scores, pos, free, total)
        if rounding == "official":
            each = total // len(most)
            floor = int(each * alpha)
            blend = torch.tensor(need, dtype=torch.float32) * (1 - alpha) + floor
            return [min(int(n), m) for n, m in zip(blend.round(), most, strict=True)]
        a, even = Fraction(str(alpha)), Fraction(total, len(most))
        return share([(1 - a) * n + a * even for n in need], most, total)

    return heads


def prompt_policy(options: Mapping[str, object]) -> PromptPolicy:
    """Ada-SnapKV as a row of the table."""
    scorer, window = from_options(options)
    alpha = options["alpha"]
    assert isinstance(alpha, float)
    rounding = str(options["rounding"])
    return PromptPolicy(
        "adakv", scorer, last_rows(window),
        adaptive_heads(alpha, rounding, bool(options["normalize"])),
        even_layers, top, observe=window, asks=True, window=window,
        drift=1 if rounding == "official" else 0,  # a head is rounded up by half a row at most
    )  # fmt: skip
