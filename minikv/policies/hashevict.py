"""HashEvict (arXiv 2412.16187, section 3): before attention, the row least like the query leaves.

Similarity is measured with SimHash: a code is the signs of a random projection to `bits` numbers,
which all heads of a layer share. The row whose code has the largest Hamming distance to the query's
code leaves, and the new row takes its place. The distances to the G queries of a group are added.
The release compares with the new row's key instead (`hash_with=key`). Equal distances are frequent;
then the oldest row leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minikv import kernels
from minikv.kernels.dispatch import Kernels
from minikv.kernels.torch.hash_codes import code_distances, codes
from minikv.policies import options
from minikv.policies.base import (
    BlockEnd,
    PromptView,
    StepAppend,
    StepPolicy,
    StepRoom,
    StepView,
    unprotected,
)
from minikv.policies.facts import Method
from minikv.policies.options import option

_OWN = ("k", "v", "pos", "code")


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
    matrices: dict[int, Tensor] = field(default_factory=dict, compare=False)  # by layer

    @property
    def columns(self) -> dict[str, torch.dtype]:
        wide = torch.int32 if self.bits < 32 else torch.int64
        return {"code": torch.int16 if self.bits < 16 else wide}

    def matrix(self, layer: int, like: Tensor) -> Tensor:
        """The layer's projection [D, bits], on the device of `like` [..., D]."""
        made = self.matrices.get(layer)
        if made is None or made.device != like.device:
            made = projection(self.seed, layer, like.shape[-1], self.bits)
            made = made.to(like.device, non_blocking=True)  # too small for the host to wait
            self.matrices[layer] = made
        return made

    def prompt(self, view: PromptView, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        key = view.key()
        matrix, kind = self.matrix(view.layer, key), self.columns["code"]
        return {"code": view.ops.hash_codes(key, matrix, kind)}

    def init_state(self, ops: Kernels, layer: int, key: Tensor) -> dict[str, Tensor]:
        rows = key if key.dim() == 3 else key[:, None]
        code = ops.hash_codes(rows, self.matrix(layer, key), self.columns["code"])
        return {"code": code.view(key.shape[:-1])}

    def score(self, view: StepView, count: int | Tensor) -> tuple[Tensor, Tensor]:
        probe = view.key if self.hash_with == "key" else view.query
        assert probe is not None
        assert view.layer_index is not None
        matrix = self.matrix(view.layer_index, probe)
        probe_codes = torch.stack([codes(x, matrix) for x in probe])  # [F, G]
        distance = code_distances(view.columns["code"], probe_codes, self.bits)
        return -distance, unprotected(view, self)

    def block_kernel(self, ops: Kernels, block: BlockEnd) -> tuple[Tensor, Tensor] | None:
        probe = block.key if self.hash_with == "key" else block.query
        if ops.unprotected_block is None or probe is None:
            return None
        probes = ops.hash_codes(probe, self.matrix(block.layer, probe), torch.int64)
        distance = ops.code_distances(block.columns["code"], probes, self.bits)
        return ops.unprotected_block(-distance, *block.heads(self))

    def hashing(self, room: StepRoom, layers: int, head_dim: int) -> kernels.Hashing | None:
        columns, undo = room.columns, room.undo_rows
        if {*columns} != {*_OWN}:
            return None
        like = columns["k"].new_empty(head_dim)
        return kernels.Hashing(
            [self.matrix(layer, like) for layer in range(layers)],
            self.hash_with == "key",
            columns["code"],
            room.rows.length,
            room.rows.cap,
            room.free_slot,
            (undo["k"], undo["v"], undo["pos"], undo["code"]),
            self.sinks,
            self.recent,
            room.rows.pinned,
        )

    def append_kernel(self, ops: Kernels, append: StepAppend) -> bool:
        key, columns, undo = append.key, append.columns, append.undo_rows
        others = [name for name in columns if name not in _OWN]
        plain = not others and append.shown is columns["pos"] and append.turn is None
        if ops.hash_append is None or not (plain or ops.appends_any):
            return False
        more: dict[str, Any] = {}
        if not plain:
            more = {name: columns[name] for name in ("k_scale", "v_scale") if name in columns}
            more["others"] = [columns[name] for name in others]
            more["undo_others"] = [undo[name] for name in others]
            more |= {"shown": append.shown, "turn": append.turn, "arrived": append.arrived}
        by_key = self.hash_with == "key"
        if append.turn is not None:
            more["keyed"] = by_key
        ops.hash_append(
            key[:, None] if by_key and append.turn is None else append.query,
            key,
            append.value,
            self.matrix(append.layer, key),
            append.start,
            append.length,
            append.cap,
            append.free_slot,
            append.position,
            columns["k"],
            columns["v"],
            columns["pos"],
            columns["code"],
            (undo["k"], undo["v"], undo["pos"], undo["code"]),
            width=append.width,
            sinks=self.sinks,
            recent=self.recent,
            pinned=append.pinned,
            **more,
        )
        return True


METHOD = Method(
    "hashevict",
    "evicts the token whose hash differs most from the current query's, before attention",
    rule=HashEvict,
    paper="2412.16187",
    scores="hashed similarity",
    shape="each head's own cap",
    state="1 code per token",
    second="safe",
    differs=(
        "the new query's code is compared, as in the paper; the release compares the new key's "
        "(hash_with=key)",
        "the codes of a KV head's query heads count together; the paper does not say what a group "
        "does",
        "of equal distances the oldest token leaves; the release takes the first slot",
        "a prompt is read whole unless --stride is given; the paper feeds it token by token "
        "(--stride 1), the release's runs cut it to the first and last tokens",
    ),
)
