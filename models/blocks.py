"""Decodes the blocks of bytes in a GGUF file's quantised matrices.

Matrices of four bits in groups of 32 keep their codes; others become eight bits with a scale per
row. On a CPU, `kernels/product/packing.c` computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from minikv.kernels.product.matrix import BLOCKS, FOUR_BITS, PLAIN
from minikv.models.checkpoint import read_exactly
from minikv.models.files import open_regular
from minikv.models.stored import Steps, Stored, apart


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of tensor: its name, its number in GGUF, the weights and bytes of a block, and the
    form (`Stored`)."""

    name: str
    number: int
    weights: int
    bytes: int
    form: str


_NAMES = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K"}
_NAMES |= {14: "Q6_K", 20: "IQ4_NL"}
KINDS: Mapping[int, Kind] = {
    **{0: Kind("F32", 0, 1, 4, "plain"), 1: Kind("F16", 1, 1, 2, "plain")},
    PLAIN: Kind("BF16", PLAIN, 1, 2, "plain"),
    **{n: Kind(_NAMES[n], n, *BLOCKS[n], "int4" if n in FOUR_BITS else "int8") for n in _NAMES},
}
"""The supported types. The int4 types have four bits with a scale and an offset for 32 columns; the
others become eight bits with a scale per row."""


@dataclass(frozen=True, slots=True)
class Blocks(Stored):
    """A quantised matrix."""

    kind: Kind = field(kw_only=True)

    @classmethod
    def at(cls, name: str, path: Path, start: int, shape: tuple[int, ...], kind: Kind) -> Blocks:
        """The matrix of this type at byte `start` of the file."""
        size = prod(shape) // kind.weights * kind.bytes
        group = 16 if kind.name == "Q6_K" else 32
        return cls(name, path, start, shape, size, kind.form, group, kind=kind)

    def blocks(self, start: int, end: int) -> Tensor:
        """These rows' undecoded bytes, uint8 [n, bytes]. Raises ModelError."""
        first, last, order = self._span(start, end)
        return self._read(first, last)[order]

    def _read(self, start: int, end: int) -> Tensor:
        row = self.size // self.shape[0]
        with open_regular(self.path) as file:
            file.seek(self.start + start * row)
            data = read_exactly(file, (end - start) * row, self.path)
        return torch.frombuffer(data, dtype=torch.uint8).view(end - start, -1)

    def _rows(self, start: int, end: int) -> Tensor:
        codes, scale, least = self._decoded(start, end)
        codes = apart(codes) if self.form == "int4" else codes
        wide = codes.view(*scale.shape, -1).float().mul_(scale[..., None])
        return (wide if least is None else wide.add_(least[..., None])).flatten(1)

    def _steps(self, start: int, end: int) -> Steps:
        codes, scale, least = self._decoded(start, end)
        assert least is not None
        return codes, scale, least.add_(scale, alpha=8)

    def _decoded(self, start: int, end: int) -> Steps:
        """Codes as in `Steps`, and scale and least value [n, groups], float32: code * scale +
        least."""
        codes, scale, least = _DECODERS[self.kind.name](
            self._read(start, end).view(end - start, -1, self.kind.bytes)
        )
        least = None if least is None else least.flatten(1)
        return codes.reshape(end - start, -1), scale.flatten(1), least


def _split(data: Tensor, sizes: tuple[int, int]) -> Tensor:
    """[..., n] -> [..., *sizes]."""
    return data.reshape(*data.shape[:-1], *sizes)


def _halves(blocks: Tensor, start: int, count: int) -> tuple[Tensor, ...]:
    """Numbers of float16 in each block, as float32 [n, blocks, 1] each."""
    part = blocks[..., start : start + 2 * count].contiguous()
    return torch.split(part.view(torch.float16).float(), 1, -1)


def _nibbles(data: Tensor) -> Tensor:
    """The lower and then the upper four bits of all bytes [..., b]: [..., 2, b]."""
    return torch.stack((data & 15, data >> 4), -2)


def _bits(data: Tensor, count: int, width: int = 1) -> Tensor:
    """`count` fields of `width` bits of all bytes [..., b], the lowest first: [..., count, b]."""
    fields = [data >> (width * n) & ((1 << width) - 1) for n in range(count)]
    return torch.stack(fields, -2)


def _groups_of_32(blocks: Tensor, bits: int, offset: bool = False) -> Steps:
    """Blocks of one group of four or five bits. offset: whether each block has an offset."""
    scale, *least = _halves(blocks, 0, 1 + offset)
    codes = blocks[..., 4 if offset else 2 :]
    if bits == 5:  # 32 upper bits, then bytes of nibbles
        upper = _bits(codes[..., :4], 8).transpose(-1, -2).flatten(-2)
        codes = _nibbles(codes[..., 4:]).flatten(-2) | upper << 4
    return codes, scale, least[0] if offset else scale * -(1 << (bits - 1))


def _q8(blocks: Tensor) -> Steps:
    return blocks[..., 2:].view(torch.int8), *_halves(blocks, 0, 1), None  # type: ignore[return-value]


def _scales_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and least value of the eight groups of a block: two float16 multiply numbers of six
    bits."""
    scale, offset = _halves(blocks, 0, 2)
    low, mid, high = _split(blocks[..., 4:16], (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    offsets = torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), -1)
    return scale * scales, -offset * offsets


def _q4_k(blocks: Tensor) -> Steps:
    # The lower four bits of 32 bytes are a group, and the upper ones the next.
    first, second = torch.split(_split(blocks[..., 16:], (4, 32)), 16, -1)
    both = (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)
    return torch.stack(both, -2), *_scales_k(blocks)


def _q5_k(blocks: Tensor) -> Steps:
    codes = _nibbles(_split(blocks[..., 48:], (4, 32))).flatten(-3, -2)
    return codes | _bits(blocks[..., 16:48], 8) << 4, *_scales_k(blocks)


def _q6_k(blocks: Tensor) -> Steps:
    low = _split(_nibbles(_split(blocks[..., :128], (2, 64))).flatten(-2), (4, 32))
    high = _bits(_split(blocks[..., 128:192], (2, 32)), 4, 2)
    (scale,) = _halves(blocks, 208, 1)
    scale = scale * blocks[..., 192:208].view(torch.int8)
    return low | high << 4, scale, -32 * scale


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4(blocks: Tensor) -> Steps:
    values = torch.tensor(_IQ4, dtype=torch.int8)[_nibbles(blocks[..., 2:]).int()]
    return values, *_halves(blocks, 0, 1), None  # type: ignore[return-value]


_DECODERS: Mapping[str, Callable[[Tensor], Steps]] = {
    **{f"Q{n}_0": partial(_groups_of_32, bits=n) for n in (4, 5)},
    **{f"Q{n}_1": partial(_groups_of_32, bits=n, offset=True) for n in (4, 5)},
    **{"Q8_0": _q8, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4},
}
