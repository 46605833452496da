"""The arithmetic of KVCrush (`minikv/policies/kvcrush.py`): in which order rows are candidates, and
which of them are the representatives."""

from __future__ import annotations

import torch
from torch import Tensor

_LAST = torch.iinfo(torch.int64).max


def crush_keys(
    marks: Tensor, goal: Tensor, pos: Tensor, free: Tensor, chosen: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """The order of the candidates, which are free and not chosen: (key int64 [H, N], how many a
    head has, int64 [H]).

    The key has the Hamming distance of a row's bits to the anchor above bit 40, and its position,
    which is below `position`, below. Rows that are no candidates have the largest key.

    marks bool [H, B, N]: the rows that have each bit; pos int64, free and chosen bool [H, N]. Bits
    belong to positions: rows of other heads at the same position add theirs. goal bool [H, B]: the
    bits of the anchor.
    """
    place = (pos + 1).masked_fill(~free, 0)
    # Start from the distance of a row without bits; each bit that is set adds 1 or -1.
    step = torch.where(marks, 1 - 2 * goal[..., None].to(torch.int64), 0).sum(1)
    steps = torch.zeros(position + 1, dtype=torch.int64, device=pos.device)
    steps.scatter_add_(0, place.flatten(), step.flatten())
    rest = free & ~chosen
    key = ((goal.sum() + steps[place]) << 40) | pos.clamp(min=0)
    return key.masked_fill(~rest, _LAST), rest.sum(1)


def represent(
    chosen: Tensor, order: Tensor, left: Tensor, count: Tensor, how: str, most: int
) -> None:
    """Add count[h] representatives of each head's candidates to chosen bool [H, N], in place; all
    candidates if they are no more.

    order int64 [H, N]: the rows, candidates first. left int64 [H]: how many candidates there are.
    how: see `ranks`. No count exceeds `most`.
    """
    rows, every = order.shape[1], left <= count
    places = torch.arange(most, device=order.device)
    rank = torch.where(every[:, None], places, ranks(left, count, how, most))
    valid = places < torch.minimum(left, count)[:, None]
    row = order.gather(1, rank.clamp(0, rows - 1)).masked_fill(~valid, rows)
    taken = torch.zeros((len(order), rows + 1), dtype=torch.bool, device=order.device)
    chosen |= taken.scatter_(1, row, True)[:, :-1]


def ranks(rows: Tensor, count: Tensor, how: str, most: int) -> Tensor:
    """Which of `rows` sorted candidates are the representatives: int64 [H, most], of which the
    first count[h] are valid. how: "ends" takes the first, the last and even steps between them;
    "step" takes every (rows // count)-th from the first (the release in OpenVINO). rows and count
    int64 [H].
    """
    places = torch.arange(most, device=rows.device)
    if how == "step":
        return places * (rows // count.clamp(min=1))[:, None]
    far = (places * (rows - 1)[:, None]).to(torch.float64)
    return (far / (count - 1).clamp(min=1)[:, None]).round().to(torch.int64)
