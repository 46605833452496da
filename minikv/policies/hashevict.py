"""HashEvict (arXiv 2412.16187, section 3): before attention, the row least like the query leaves.

Similarity is measured with SimHash: a code is the signs of a random projection to `bits` numbers,
which all heads of a layer share. The row whose code has the largest Hamming distance to the query's
code leaves, and the new row overwrites it. The distances to the G queries of a group are added.
The release compares with the new row's key instead (`hash_with=key`). Equal distances are frequent;
then the oldest row leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minikv.policies import options
from minikv.policies.base import StepPolicy, StepView
from minikv.policies.options import Method, option
from minikv.policies.selection import ones


def projection(seed: int, layer: int, size: int, bits: int) -> Tensor:
    """float32 [D, bits], standard normal, keyed by seed and layer."""
    generator = torch.Generator().manual_seed((seed << 20) + layer)
    return torch.randn(size, bits, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class HashEvict(StepPolicy):
    """Stores a code per row, and reads no attention."""

    sinks: int = options.sinks()
    recent: int = options.recent()
    bits: int = option(16, "length of a code", (4, 64))
    hash_with: str = option("query", "query: the paper; key: the release", ("query", "key"))
    seed: int = options.seed()
    name: str = "hashevict"
    evict_first: bool = True
    needs_query: bool = True
    matrices: dict[int, Tensor] = field(default_factory=dict, compare=False)  # by layer

    @property
    def columns(self) -> dict[str, torch.dtype]:
        wide = torch.int32 if self.bits < 32 else torch.int64
        return {"code": torch.int16 if self.bits < 16 else wide}

    @property
    def scratch(self) -> int:  # type: ignore[override]
        return 16 * self.bits

    def matrix(self, layer: int, like: Tensor) -> Tensor:
        """The layer's projection [D, bits], on the device of `like` [..., D]."""
        made = self.matrices.get(layer)
        if made is None or made.device != like.device:
            made = projection(self.seed, layer, like.shape[-1], self.bits)
            made = made.to(like.device, non_blocking=True)  # too small for the host to wait
            self.matrices[layer] = made
        return made

    def of_key(self, layer: int, key: Tensor) -> dict[str, Tensor]:
        matrices = torch.stack([self.matrix(layer + i, key) for i in range(len(key))])
        return {"code": codes(key, matrices[:, None]).to(self.columns["code"])}

    def score(self, view: StepView) -> Tensor:
        probe = view.key if self.hash_with == "key" else view.query
        assert probe is not None
        probes = codes(probe, self.matrix(view.layer, probe))  # [F, G]
        return -distances(view.column("code"), probes, self.bits)

    differs = (
        "the new query's code is compared, as in the paper; the release compares the new key's "
        "(hash_with=key)",
        "the codes of a KV head's query heads count together; the paper does not say what a group "
        "does",
        "of equal distances the oldest token leaves; the release takes the first slot",
        "a prompt is read whole unless --stride is given; the paper feeds it token by token "
        "(--stride 1), the release's runs cut it to the first and last tokens",
    )


def codes(x: Tensor, matrix: Tensor) -> Tensor:
    """int64 [...]: the signs of x [..., D] @ matrix [D, bits] as one number; zero is positive. The
    matrix may have leading dimensions."""
    signs = (x.to(torch.float32) @ matrix >= 0).to(torch.int64)
    return (signs << torch.arange(matrix.shape[-1], device=x.device)).sum(-1)


def distances(stored: Tensor, probes: Tensor, bits: int) -> Tensor:
    """float32 [H, N]: the sum of the Hamming distances of each of the codes stored [H, N], of any
    integer dtype, to the probes int64 [H, P]. Exact below 2^24. Codes of fewer than 64 bits are not
    negative."""
    stored = stored.to(torch.int64)
    if probes.shape[1] <= bits:
        differ = probes[:, :, None] ^ stored[:, None]  # [H, P, N]
        return ones(differ).sum(1).to(torch.float32)
    each = torch.arange(bits, device=stored.device)
    # A bit that is set adds the number of probes with a 0 there, a clear bit the number of those
    # with a 1.
    having = ((probes[..., None] >> each) & 1).sum(1)  # [H, bits]
    added = (probes.shape[1] - 2 * having).to(torch.float32)
    is_set = ((stored[..., None] >> each) & 1).to(torch.float32)  # [H, N, bits]
    return (is_set @ added[..., None])[..., 0] + having.sum(1, keepdim=True)


METHOD = Method(
    "hashevict",
    "evicts the token whose hash differs most from the current query's, before attention",
    rule=HashEvict,
    good="comparisons",
    paper="2412.16187",
    told="hashed similarity",
    state="1 code per token",
)
