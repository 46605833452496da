"""The attention that a prompt's queries give each row. Sums never need T x N probabilities at
once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minikv.kernels.attention.plain import visible

_LOGITS = 1 << 19
"""About the most logits of one block: 2 MiB, which fit a processor's cache."""
_LOGITS_ON_GPU, _LEAST = 1 << 24, 256  # of one block of `rows_lse`, and its rows

Part = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""Keys [H, n, D] and their positions [H or 1, n], -1 for padding. Or an arena's keys [R, D], the
positions, and the indices of the rows in the arena, int64 [H, n]."""


class Queries(NamedTuple):
    """T queries of a prompt, [H, G, T, D] at positions [T], not decreasing. lse float32 [H, G, T]:
    the log-sum-exp over all rows that a query sees; None if not known. Which rows these are, under
    a sliding window or none: see `attention.plain.visible_attention`."""

    q: Tensor
    at: Tensor
    window: int | None
    lse: Tensor | None = None


def with_index(part: Part) -> tuple[Tensor, Tensor, Tensor | None]:
    """A part as (keys, positions, index). index is None if the keys are not an arena's."""
    return (*part, None) if len(part) == 2 else part


def each_attention(queries: Queries, parts: Sequence[Part], heads: slice) -> Tensor:
    """The attention that each query gives each row, for a slice of the KV heads: float32
    [h, G, T, N]. `parts` have N rows together; rows that a query does not see get 0."""
    q, q_pos, window, lse = queries
    assert lse is not None
    count = sum(part[1].shape[1] for part in parts)
    some = range(q.shape[0])[heads]
    found = torch.empty((len(some), *q.shape[1:3], count), device=q.device)
    begin = 0
    for part in parts:
        for i, h in enumerate(some):
            for lo, p in _probabilities(q[h], lse[h], q_pos, *_of_head(part, h), window):
                found[i, ..., begin + lo : begin + lo + p.shape[-1]] = p
        begin += part[1].shape[1]
    return found


def block_logits(q: Tensor, k: Tensor) -> Tensor:
    """The logits of queries [H, G, T, D] and keys [H, N, D], float32 [H, T, G, N]."""
    logits = q.float() @ k[:, None].float().transpose(2, 3)
    return (logits * (1.0 / math.sqrt(q.shape[-1]))).transpose(1, 2)


def _probabilities(
    q: Tensor, lse: Tensor, q_pos: Tensor, k: Tensor, k_pos: Tensor, window: int | None
) -> Iterator[tuple[int, Tensor]]:
    """For each block of a KV head's rows: (first row, probabilities [G, T, n]).

    q [G, T, D]; lse [G, T]; q_pos [T], not decreasing; k [N, D]; k_pos [N].
    """
    query = q.float() * (1.0 / math.sqrt(q.shape[-1]))
    # On a GPU, masking takes less time than reading back whether all rows are seen.
    earliest = int(q_pos[0]) if window is None and q.device.type == "cpu" else -1
    step = max(1, _LOGITS // (q.shape[0] * q.shape[1]))
    for lo in range(0, len(k), step):
        at = k_pos[lo : lo + step]
        p = torch.matmul(query, k[lo : lo + step].float().T).sub_(lse[..., None]).exp_()
        if not (earliest >= 0 and int(at.min()) >= 0 and int(at.max()) <= earliest):
            p.masked_fill_(~visible(q_pos, at[None], window), 0.0)
        yield lo, p


def add_attention_mass(
    mass: Tensor, squares: Tensor, queries: Queries, part: Part, *, fresh: bool = False
) -> None:
    """Add the attention that the queries give each row of a part to mass and squares, in place.

    mass float32 [H, G, N]: the sums of probabilities over queries; squares float32 [H, N]: the
    squares of their means over G, summed over queries. fresh: treat both as 0, whatever they hold.
    """
    q, q_pos, window, lse = queries
    assert lse is not None
    if fresh:
        mass.zero_()
        squares.zero_()
    for h in range(len(q)):
        for lo, p in _probabilities(q[h], lse[h], q_pos, *_of_head(part, h), window):
            hi = lo + p.shape[-1]
            mass[h, :, lo:hi] += p.sum(1)
            squares[h, lo:hi] += p.mean(0).square_().sum(0)


def peak_attention(
    queries: Queries, parts: Sequence[Part], scored: int, scale: Tensor | None = None
) -> Tensor:
    """The largest attention that any query gives each row of one part, float32 [H, G, n]; 0 for
    rows that no query sees.

    scored: the index of the part. The softmax is over the rows of all `parts` that a query sees,
    which must be at least one. With the log-sum-exp the other parts are not read. scale [T]: the
    attention of each query is multiplied by it.
    """
    q, q_pos, window, lse = queries
    if lse is not None:
        parts, scored = [parts[scored]], 0
    heads, group, rows, size = q.shape
    counts = [part[1].shape[1] for part in parts]
    begin, width = sum(counts[:scored]), sum(counts)
    end = begin + counts[scored]
    peak = torch.zeros((heads, group, end - begin), device=q.device)
    step = max(1, _LOGITS // (group * width))
    factor = None if scale is None else scale.float().log()
    for h in range(heads):
        mine = [_of_head(part, h) for part in parts]
        keys = torch.cat([key.float() for key, _ in mine])
        pos = torch.cat([at for _, at in mine])
        # On a GPU, masking takes less time than reading back whether all rows are seen.
        seen = 0
        if window is None and q.device.type == "cpu":
            seen = _seen_by_all(mine, int(q_pos[0]))
        for lo in range(0, rows, step):
            at = q_pos[lo : lo + step]
            query = q[h, :, lo : lo + step].float() * (1.0 / math.sqrt(size))
            logits = torch.matmul(query, keys.T)
            logits[..., seen:].masked_fill_(~visible(at, pos[None, seen:], window)[0], -math.inf)
            if lse is None:
                whole = torch.logsumexp(logits, -1)
            else:
                whole = lse[h, :, lo : lo + step]
            if factor is not None:
                whole = whole - factor[lo : lo + step]
            found = logits[..., begin:end].sub_(whole[..., None]).amax(1).exp_()
            torch.maximum(peak[h], found, out=peak[h])
    return peak


def quadratic_forms(x: Tensor, matrices: Tensor, most: int) -> Tensor:
    """x A x of each row, float32 [H, G, n]. x [H, n, D]; symmetric matrices A float32 [H, G, D, D].
    About `most` numbers are computed at once."""
    (heads, rows, size), group = x.shape, matrices.shape[1]
    found = torch.empty((heads, group, rows), device=x.device)
    step = max(1, most // max(1, group * rows * size))
    for lo in range(0, heads, step):
        some = x[lo : lo + step].float()
        for g, each in enumerate(matrices[lo : lo + step].unbind(1)):
            torch.sum((some @ each).mul_(some), -1, out=found[lo : lo + step, g])
    return found


def _seen_by_all(parts: Sequence[tuple[Tensor, Tensor]], position: int) -> int:
    """How many rows the first parts have together, up to the first part that a query at this
    position, or a later one, does not see whole."""
    count = 0
    for _, at in parts:
        if len(at) and not (int(at.min()) >= 0 and int(at.max()) <= position):
            break
        count += len(at)
    return count


def _of_head(part: Part, head: int) -> tuple[Tensor, Tensor]:
    """The keys [n, D] of one head of a part, and their positions [n]."""
    at = part[1][head if len(part[1]) > 1 else 0]
    return part[0][head if len(part) == 2 else part[2][head]], at


def rows_lse(queries: Queries, parts: Sequence[Part]) -> Tensor:
    """The log-sum-exp of each query's logits over the rows of all parts that it sees: float32
    [H, G, T]; -inf for a query that sees no row."""
    q, q_pos, window, _ = queries
    heads, group, rows, size = q.shape
    most = _LOGITS if q.device.type == "cpu" else _LOGITS_ON_GPU
    count = max(1, most // max(1, _LEAST * group * rows))  # heads at once
    found = []
    for first in range(0, heads, count):
        query = q[first : first + count].flatten(1, 2).float() * (1.0 / math.sqrt(size))
        whole = query.new_full((len(query), group, rows), -math.inf)
        step = max(1, most // max(1, len(query) * group * rows))
        for k, k_pos, index in map(with_index, parts):
            at = k_pos if len(k_pos) == 1 else k_pos[first : first + count]
            mine = (k if index is None else index)[first : first + count]
            for lo in range(0, k_pos.shape[1], step):
                key = mine[:, lo : lo + step] if index is None else k[mine[:, lo : lo + step]]
                logits = torch.matmul(query, key.float().transpose(1, 2))
                logits = logits.view(*whole.shape, -1)
                seen = visible(q_pos, at[:, lo : lo + step], window)[:, None]
                logits.masked_fill_(~seen, -math.inf)
                whole = torch.logaddexp(whole, logits.logsumexp(-1))
        found.append(whole)
    return torch.cat(found)
