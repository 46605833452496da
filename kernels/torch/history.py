"""The history of each row: one bit for each of the last queries, set where the query gave the row
less than an even share of its attention.

A history is a shift register of `history` bits. Its words are int64 [H, N] with 32 bits each, the
newest query in the lowest bit of the first word. queries float32 [H, N]: how many bits are in use.
Columns may have any values where there is no row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minikv.kernels.torch.attention import visible
from minikv.kernels.torch.attention_mass import _LOGITS, Part, each_attention

BITS = 32
"""Bits of a word."""
EVEN = 2.0**-13
"""A probability counts as an even share if it is lower by at most this part of the share, because
attention's log-sum-exps have errors of up to 6e-5 in bfloat16."""


def rows_seen(q_pos: Tensor, k_pos: Tensor, window: int | None) -> Tensor:
    """How many rows each query sees, float32 [H or 1, T], from q_pos [T] and k_pos [H or 1, N]:
    see `torch.attention.visible_attention`."""
    return visible(q_pos, k_pos, window).sum(2).to(torch.float32)


def low_bits(p: Tensor, q_pos: Tensor, k_pos: Tensor, window: int | None) -> Tensor:
    """Which queries gave a row less than an even share: int64 [h, N].

    p float32 [h, G, W, N]: the attention that each query gives each row, W at most 32. q_pos [W];
    k_pos [h, N], -1 for padding. Bit i is set if the i-th query from the end (the last is number 0)
    sees the row, and its attention, the mean over G, is below 1 / (number of rows that it sees) by
    more than the rounding error `EVEN`.
    """
    seen = visible(q_pos, k_pos, window)
    value = 1 << torch.arange(len(q_pos) - 1, -1, -1, device=p.device)
    low = (p.mean(1) < (1.0 - EVEN) / seen.sum(2, keepdim=True)) & seen
    return (low * value[:, None]).sum(1)


def below_uniform(
    q: Tensor,
    q_pos: Tensor,
    parts: Sequence[Part],
    window: int | None,
    lse: Tensor,
    each: Callable[..., Tensor] = each_attention,
    bits: Callable[..., Tensor] = low_bits,
    most: int = _LOGITS,
) -> Tensor:
    """Which of the last queries gave a row less than an even share: int64 [H, N], see `low_bits`.

    Arguments as in `each_attention`, W at most 32. each, bits: the `each_attention` and the
    `low_bits` to call; a call computes about `most` numbers.
    """
    heads, group, rows, _ = q.shape
    at = [part[1].expand(heads, part[1].shape[1]) for part in parts]
    pos = torch.cat(at, 1) if len(at) > 1 else at[0]
    count = max(1, most // max(1, group * rows * pos.shape[1]))
    found = []
    for lo in range(0, heads, count):
        some = slice(lo, min(lo + count, heads))
        found.append(bits(each(q, q_pos, parts, window, lse, some), q_pos, pos[some], window))
    return torch.cat(found) if len(found) > 1 else found[0]


def prompt_history(
    words: Sequence[Tensor],
    queries: Tensor,
    bits: Tensor,
    pos: Tensor,
    end: int,
    observed: int,
    history: int,
) -> tuple[list[Tensor], Tensor]:
    """New words and queries after a prompt, whose last `observed` queries (at most 32) come in.

    bits int64 [H, N]: the result of `below_uniform`. pos int64 [H, N]; end: the prompt's end. A row
    gets the bits of the queries from its own on.
    """
    able = (end - pos.clamp(min=end - observed)).clamp(0, observed)
    # Shift by as many bits as there were queries that could see the row, all at once.
    found = torch.stack([*words])
    carry = torch.empty_like(found)
    torch.bitwise_and(bits, (1 << able) - 1, out=carry[0])
    torch.bitwise_right_shift(found[:-1], BITS - able, out=carry[1:])
    full = (1 << BITS) - 1
    found.bitwise_left_shift_(able).bitwise_or_(carry).bitwise_and_(full)
    spare = len(words) * BITS - history
    if spare:  # clear bits of queries older than `history`
        found[-1].bitwise_and_(full >> spare)
    return [*found], (queries + able).clamp(max=float(history))


def block_history(
    words: Sequence[Tensor], queries: Tensor, p: Tensor, seen: Tensor, history: int
) -> None:
    """Take in a block's queries, in place.

    p float32 [H, t, N]: the attention that each query gave each row; the last t of the N rows are
    those of the queries. seen float32 [H, t]: how many rows each query saw. A query's bit is set in
    the rows up to its own that got less than 1 / seen. The block's own rows begin with zeros: their
    bits of queries before them stay 0.
    """
    count, rows = p.shape[1:]
    low = (p < 1.0 / seen[..., None]).tril_(rows - count)
    for i, word in enumerate(_shifted(words, _packed(low), count)):
        used = min(BITS, history - i * BITS)
        words[i].copy_(word.bitwise_and_((1 << used) - 1))
    later = torch.arange(rows, 0, -1, device=p.device).clamp_(max=count)
    queries.add_(later).clamp_(max=float(history))


def low_share(words: Sequence[Tensor], queries: Tensor) -> Tensor:
    """Minus the share of set bits among those in use, float32 [H, N]."""
    below = torch.stack([ones(word) for word in words]).sum(0)
    return -(below / queries.clamp(min=1.0))


def ones(word: Tensor) -> Tensor:
    """int64: how many of the 32 bits of each int64 are set."""
    x = word - ((word >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24) & 0xFF


def _packed(bits: Tensor) -> list[Tensor]:
    """Bits [H, t, N], oldest first, as words [H, N], the newest bit in the lowest one of the first
    word."""
    found = []
    for part in torch.split(bits.flip(1), BITS, 1):
        places = torch.arange(part.shape[1], device=bits.device)[:, None]
        found.append((part.to(torch.int64) << places).sum(1))
    return found


def _shifted(words: Sequence[Tensor], new: Sequence[Tensor], count: int) -> list[Tensor]:
    """The first words of a shift register after `count` bits came in, which are the words `new`.
    Bits above `BITS` are not cleared."""
    full, part = divmod(count, BITS)
    found = []
    for i in range(len(words)):
        word = torch.zeros_like(words[i])
        if i >= full:
            word |= words[i - full] << part
        if part and i > full:
            word |= words[i - full - 1] >> (BITS - part)
        if i < len(new):
            word |= new[i]
        found.append(word)
    return found
