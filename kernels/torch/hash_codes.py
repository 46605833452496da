"""Hash codes of keys and queries, and their distances (SimHash, as in HashEvict, arXiv 2412.16187,
section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from minikv.kernels.torch.history import BITS, ones


def codes(x: Tensor, matrix: Tensor) -> Tensor:
    """int64 [...]: the signs of x [..., D] @ matrix [D, bits] as one number; zero is positive."""
    signs = (x.to(torch.float32) @ matrix >= 0).to(torch.int64)
    return (signs << torch.arange(matrix.shape[1], device=x.device)).sum(-1)


def hash_codes(key: Tensor, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The `codes` of keys [H, N, D] as integers [H, N] of `dtype`."""
    return codes(key, matrix).to(dtype)


def code_distances(stored: Tensor, probes: Tensor, bits: int) -> Tensor:
    """float32 [H, N]: the Hamming distances of the codes stored [H, N], of any integers, to the
    probes int64 [H, P], added up. They are exact below 2^24. Codes of fewer than 64 bits are not
    negative."""
    stored = stored.to(torch.int64)
    if probes.shape[1] <= bits:
        differ = probes[:, :, None] ^ stored[:, None]  # [H, P, N]
        distance = ones(differ & 0xFFFFFFFF)
        if bits > BITS:
            distance += ones((differ >> BITS) & 0xFFFFFFFF)
        return distance.sum(1).to(torch.float32)
    each = torch.arange(bits, device=stored.device)
    # A bit that is set adds the number of probes that have a 0 there, the others that of those with
    # a 1.
    having = ((probes[..., None] >> each) & 1).sum(1)  # [H, bits]
    added = (probes.shape[1] - 2 * having).to(torch.float32)
    is_set = ((stored[..., None] >> each) & 1).to(torch.float32)  # [H, N, bits]
    return (is_set @ added[..., None])[..., 0] + having.sum(1, keepdim=True)
