"""Attention of long prompts by cuDNN, on GPUs of compute capability 9.0. There it is about 1.9
times as fast as FlashAttention 2 (docs/measurements/gpu/); other GPUs were not measured.

cuDNN makes a plan for each shape and each layout, which takes 40 ms. So queries and keys are
processed in blocks of two lengths, and keys are copied, which gives six plans whatever the length
of a prompt. Attention over disjoint sets of rows is joined by the log-sum-exp. cuDNN's causal mask
begins in the upper left corner, so it is used for the queries' own block of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minikv.kernels.attention.plain import cuda_attention

BLOCKS = 8192, 2048
_CAPABILITY = (9, 0)
_HEAD_DIM = 128  # the largest that torch's cuDNN attention takes

Part = tuple[Tensor, Tensor]
Join = Callable[[Part, Part, torch.dtype], Part]
"""Joins attention over two disjoint sets of rows; the output has this dtype."""


def last_rows_attention(q: Tensor, k: Tensor, v: Tensor, join: Join) -> Part | None:
    """Like `attention.last_rows_attention`, on CUDA. None if cuDNN is not the faster way.

    Parts are joined one by one, so that no more than two exist at a time."""
    rows, earlier = q.shape[2], k.shape[1] - q.shape[2]
    if rows < BLOCKS[-1] or not takes(q):
        return None
    found = []
    for begin, count in blocks(rows):
        mine, before = q[:, :, begin : begin + count], earlier + begin
        if count not in BLOCKS:
            seen = slice(0, before + count)
            part = cuda_attention(mine, k[:, seen], v[:, seen], causal=True)
            assert part is not None
            found.append(part)
            continue
        own = slice(before, before + count)
        whole: Part | None = planned(mine, k[:, own], v[:, own], causal=True)
        for at, size in blocks(before):
            seen = slice(at, at + size)
            attend = planned if size in BLOCKS else cuda_attention
            part = attend(mine, k[:, seen], v[:, seen], causal=False)
            assert part is not None
            assert whole is not None
            whole = join(whole, part, q.dtype if at + size == before else torch.float32)
        assert whole is not None
        found.append(whole)
    if len(found) == 1:
        return found[0]
    mixed = torch.cat([out.permute(2, 0, 1, 3) for out, _ in found]).permute(1, 2, 0, 3)
    return mixed, torch.cat([lse for _, lse in found], 2)


def prompt_rows(device: torch.device, head_dim: int) -> int | None:
    """How many rows of a prompt (two bytes per number) should pass through a layer together: the
    longest block if cuDNN is the faster way on this GPU, otherwise None."""
    fits = head_dim <= _HEAD_DIM and head_dim % 8 == 0
    if not fits or device.type != "cuda" or not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return None
    return BLOCKS[0] if torch.backends.cudnn.is_available() else None  # type: ignore[no-untyped-call]


def takes(q: Tensor) -> bool:
    """Whether cuDNN is the faster way for long prompts with these queries [H, G, T, D]."""
    small = q.dtype in (torch.bfloat16, torch.float16)
    return small and prompt_rows(q.device, q.shape[-1]) is not None


def blocks(rows: int) -> Iterator[tuple[int, int]]:
    """Divide rows into blocks, the longest first: (begin, count) of each. The last one may have
    fewer rows than any of BLOCKS."""
    begin = 0
    for size in BLOCKS:
        while rows - begin >= size:
            yield begin, size
            begin += size
    if begin < rows:
        yield begin, rows - begin


def make_plans(q: Tensor) -> None:
    """Make the plans for queries like these, [H, G, any number, D], during warm-up."""
    if takes(q):
        heads, group, _, size = q.shape
        for rows in BLOCKS:
            queries = q.new_zeros((rows, heads + heads * group, size))[:, : heads * group]
            queries = queries.view(rows, heads, group, size).permute(1, 2, 0, 3)
            for keys in BLOCKS:
                key = q.new_zeros((heads, keys, size))
                planned(queries, key, key, causal=False)
            key = q.new_zeros((heads, rows, size))
            planned(queries, key, key, causal=True)


def planned(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Part:
    """Attention of a block of queries [H, G, T, D] over a block of keys [H, N, D]."""
    heads, group, rows, size = q.shape
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.reshape(1, heads * group, rows, size),
        k.contiguous()[None],
        v.contiguous()[None],
        *(None, True, 0.0, causal),
    )
    return out[0].view(heads, group, rows, size), out[1].reshape(heads, group, rows)
