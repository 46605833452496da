"""How much attention a prompt's queries give each cached row, without T x N probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from minikv.kernels.torch.attention import visible

_LOGITS = 1 << 19
"""Logits of one block of rows: 2 MiB, which stay in a cache of the processor."""

Part = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""Keys [H, n, D] and their positions [H or 1, n], -1 for padding. Or keys of an arena [R, D], the
positions, and which of the arena's rows they are, int64 [H, n]."""


def observe(
    q: Tensor, q_pos: Tensor, parts: Sequence[Part], window: int | None
) -> tuple[Tensor, Tensor]:
    """The attention that the last rows of a prompt (the observation window) give every row.

    q [W, H, G, D]; q_pos [W], not decreasing; `parts` have N rows together. Which rows a query
    sees: as in `visible_attention`; every query sees one at least. Returns, in float32, the
    probabilities summed over W [H, G, N], and the squares of their means over G, summed over W
    [H, N].
    """
    _, heads, group, _ = q.shape
    count = sum(part[1].shape[1] for part in parts)
    mass = q.new_empty((heads, group, count), dtype=torch.float32)
    squares = q.new_empty((heads, count), dtype=torch.float32)
    for h, begin, _, p in _probabilities(q, q_pos, parts, window):
        end = begin + p.shape[-1]
        mass[h, :, begin:end] = p.sum(1)
        squares[h, begin:end] = p.mean(0).square_().sum(0)
    return mass, squares


def each_attention(
    q: Tensor,
    q_pos: Tensor,
    parts: Sequence[Part],
    window: int | None,
    lse: Tensor | None,
    heads: slice,
) -> Tensor:
    """What each of the last queries gives each row of some KV heads: float32 [h, G, W, N].

    Arguments as in `observe`; lse float32 [H, G, W]: `rows_lse` of all heads, where it is known. 0
    for rows that a query does not see.
    """
    mine = [_some_heads(part, heads) for part in parts]
    count = sum(part[1].shape[1] for part in mine)
    q = q[:, heads]
    found = torch.empty((q.shape[1], q.shape[2], q.shape[0], count), device=q.device)
    for h, begin, _, p in _probabilities(q, q_pos, mine, window):
        found[h, ..., begin : begin + p.shape[-1]] = p
    return found


def below_uniform(
    q: Tensor,
    q_pos: Tensor,
    parts: Sequence[Part],
    window: int | None,
    each: Callable[..., Tensor] = each_attention,
    most: int = _LOGITS,
) -> Tensor:
    """Which of the last queries gave a row less than an even share: int64 [H, N].

    Arguments as in `observe`, W at most 32. Bit i is set if the i-th query from the end sees the
    row and its probability, in the mean over G, is below 1 / (number of rows that it sees). each:
    an `each_attention`, which is asked for about `most` numbers at once.
    """
    rows, heads, group, _ = q.shape
    pos = torch.cat([at.expand(heads, at.shape[1]) for _, at, *_ in parts], 1)
    value = 1 << torch.arange(rows - 1, -1, -1, device=q.device)
    bits = q.new_empty(pos.shape, dtype=torch.int64)
    count = max(1, most // max(1, group * rows * pos.shape[1]))
    for lo in range(0, heads, count):
        some = slice(lo, min(lo + count, heads))
        seen = visible(q_pos, pos[some], window)
        share = 1.0 / seen.sum(2, keepdim=True)
        low = (each(q, q_pos, parts, window, None, some).mean(1) < share) & seen
        bits[some] = (low * value[:, None]).sum(1)
    return bits


def _some_heads(part: Part, each: slice) -> Part:
    """A part of which some heads are left."""
    at = part[1][each] if len(part[1]) > 1 else part[1]
    return (part[0][each], at) if len(part) == 2 else (part[0], at, part[2][each])


def _probabilities(
    q: Tensor, q_pos: Tensor, parts: Sequence[Part], window: int | None
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Blocks of rows one after the other: head, first row, positions [n], probabilities [G, W, n].

    Arguments as in `observe`.
    """
    rows, heads, group, size = q.shape
    # On a GPU it takes longer to ask whether all rows are seen than to mask.
    earliest = int(q_pos[0]) if window is None and q.device.type == "cpu" else -1
    for h in range(heads):
        query = q[:, h].float().transpose(0, 1) * (1.0 / math.sqrt(size))  # [G, W, D]

        def logits(k: Tensor, at: Tensor, query: Tensor = query) -> Tensor:
            found = torch.matmul(query, k.float().T)  # [G, W, n]
            if earliest >= 0 and int(at.min()) >= 0 and int(at.max()) <= earliest:
                return found  # every query sees every row
            return found.masked_fill_(~visible(q_pos, at[None], window), -math.inf)

        step = max(1, _LOGITS // (group * rows))
        blocks = [
            (k[lo : lo + step], at[lo : lo + step])
            for k, at in (_of_head(part, h) for part in parts)
            for lo in range(0, len(k), step)
        ]
        # Logits of few blocks are kept. Those of many are computed twice: for the log-sum-exp and
        # for the probabilities.
        kept = [logits(*block) for block in blocks] if len(blocks) <= 2 else None
        sums = [torch.logsumexp(x, -1) for x in kept or map(logits, *zip(*blocks, strict=True))]
        lse = torch.logsumexp(torch.stack(sums), 0)[..., None]  # [G, W, 1]
        begin = 0
        for i, block in enumerate(blocks):
            p = (kept[i] if kept else logits(*block)).sub_(lse).exp_()
            yield h, begin, block[1], p
            begin += p.shape[-1]


def add_attention_mass(
    mass: Tensor,
    squares: Tensor,
    q: Tensor,
    lse: Tensor,
    q_pos: Tensor,
    k: Tensor,
    k_pos: Tensor,
    window: int | None,
    index: Tensor | None = None,
) -> None:
    """Add the attention that T queries give each row to mass and squares, in place.

    mass [H, G, N] and squares [H, N] float32, as `observe` returns them; q [H, G, T, D]; lse
    [H, G, T]: the log-sum-exp over all rows that a query sees, those of other parts too; q_pos [T],
    not decreasing; k, k_pos and index are one `Part`.
    """
    heads, group, rows, size = q.shape
    part: Part = (k, k_pos) if index is None else (k, k_pos, index)
    step = max(1, _LOGITS // (group * rows))
    for h in range(heads):
        query = q[h].float() * (1.0 / math.sqrt(size))
        keys, positions = _of_head(part, h)
        for lo in range(0, len(keys), step):
            hi = min(lo + step, len(keys))
            logits = torch.matmul(query, keys[lo:hi].float().T)
            at = positions[lo:hi]
            p = logits.sub_(lse[h, ..., None]).exp_()
            p.masked_fill_(~visible(q_pos, at[None], window), 0.0)
            mass[h, :, lo:hi] += p.sum(1)
            squares[h, lo:hi] += p.mean(0).square_().sum(0)


def peak_attention(
    q: Tensor,
    q_pos: Tensor,
    parts: Sequence[Part],
    scored: int,
    window: int | None,
    scale: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """The most that any of T queries gives each row of one part, float32 [H, G, n].

    q [H, G, T, D] at q_pos [T], not decreasing; the softmax is over the rows of all `parts` that a
    query sees, one at least, and `scored` is the part that is asked for. scale [T]: what a query
    gives is multiplied by it. lse float32 [H, G, T]: the log-sum-exp over all parts, where it is
    known; the others are not looked at then. Rows that no query sees get 0.
    """
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
        # On a GPU it takes longer to ask whether all rows are seen than to mask.
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


def _seen_by_all(parts: Sequence[tuple[Tensor, Tensor]], position: int) -> int:
    """How many first rows of the parts a query at this position and every later one sees."""
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


def rows_lse(q: Tensor, q_pos: Tensor, parts: Sequence[Part], window: int | None) -> Tensor:
    """The log-sum-exp of each query's logits over the rows of all parts that it sees.

    q [H, G, T, D] at q_pos [T]. Returns float32 [H, G, T]; -inf for a query that sees no row.
    """
    each = []
    for k, k_pos in map(_keys_of, parts):
        logits = torch.matmul(q.float(), k[:, None].float().transpose(2, 3))
        logits = logits * (1.0 / math.sqrt(q.shape[-1]))
        seen = visible(q_pos, k_pos, window)[:, None]
        each.append(logits.masked_fill(~seen, -math.inf).logsumexp(-1))
    return torch.logsumexp(torch.stack(each), 0)


def _keys_of(part: Part) -> tuple[Tensor, Tensor]:
    """The keys of a part as [H, n, D], and their positions."""
    return part if len(part) == 2 else (part[0][part[2]], part[1])
