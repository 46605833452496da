"""From logits to the next token, in Triton. Specification: `torch/sampling.py`.

Two launches: programs that each read a block of logits, and one that joins what they found.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import power, typed
from minikv.kernels.triton.variants import WIDE, Variant

_BLOCK, _WARPS = 1024, 4
_FAR = tl.constexpr((1 << 31) - 1)


@triton.jit
def _first_best(value, index):
    """The largest value of a block, and of equal ones the smallest index."""
    most = tl.max(value, 0)
    return most, tl.min(tl.where(value == most, index, _FAR), 0)


@triton.jit(do_not_specialize=["vocab"])
def _best_of_block(logits, value, index, finite, vocab, BN: tl.constexpr):
    """Grid (blocks,): the best logit of each block, its index, and whether all are finite."""
    block = tl.program_id(0)
    j = block * BN + tl.arange(0, BN)
    ok = j < vocab
    x = tl.load(logits + j, mask=ok, other=-float("inf"))
    good = (tl.abs(x) < float("inf")) | (j >= vocab)  # NaN is not below anything
    most, first = _first_best(tl.where(x == x, x, -float("inf")), j)
    tl.store(value + block, most)
    tl.store(index + block, first)
    tl.store(finite + block, tl.min(good.to(tl.int32), 0))


@triton.jit(do_not_specialize=["blocks", "vocab"])
def _best_of_all(value, index, block_finite, token, found, finite, blocks, vocab, BN: tl.constexpr):
    """Grid (1,): of all blocks."""
    i = tl.arange(0, BN)
    ok = i < blocks
    most = tl.load(value + i, mask=ok, other=-float("inf"))
    first = _first_best(most, tl.load(index + i, mask=ok, other=_FAR))[1]
    best = tl.minimum(first, vocab - 1).to(tl.int64)
    good = tl.min(tl.load(block_finite + i, mask=ok, other=1), 0)
    tl.store(token, best)
    tl.store(found, best)
    tl.store(found + 1, good.to(tl.int64))
    tl.store(finite, good != 0)


def greedy(
    logits: Tensor, token: Tensor, found: Tensor, finite: Tensor, *, block: int = _BLOCK
) -> None:
    """See `torch.sampling.greedy`. `block`: logits that a program reads at once."""
    assert all(t.is_contiguous() for t in (logits, found))
    vocab = len(logits)
    blocks = -(-vocab // block)
    value = torch.empty(blocks, dtype=torch.float32, device=logits.device)
    index, good = (torch.empty(blocks, dtype=torch.int32, device=logits.device) for _ in range(2))
    _best_of_block[(blocks,)](logits, value, index, good, vocab, BN=block, num_warps=_WARPS)
    _best_of_all[(1,)](
        value, index, good, token, found, finite, blocks, vocab, BN=power(blocks), num_warps=_WARPS
    )


def variants() -> list[Variant]:
    """Builds for the compile gate, for a vocabulary of 128k tokens."""
    kinds = {"logits": "*fp32", "value": "*fp32", "index": "*i32", "block_finite": "*i32"}
    fixed: dict[str, object] = {"BN": _BLOCK}
    part = typed(_best_of_block, kinds | {"finite": "*i32"}, fixed)
    joined: dict[str, object] = {"BN": 128}
    last = kinds | {"token": "*i64", "found": "*i64", "finite": "*i1"}
    return [
        Variant("best-of-block", _best_of_block, part, fixed, _WARPS, reads={"logits": WIDE}),
        Variant("best-of-all", _best_of_all, typed(_best_of_all, last, joined), joined, _WARPS),
    ]
