"""Packed matrices on a GPU: `Int8OnGpu` and `Int4OnGpu` keep the numbers of `linear.Int8` and
`linear.Int4`, in one layout for every GPU.

For one row, kernels unpack weights in registers. For more, the whole matrix is unpacked for each
product, so a chunk of a prompt should be long.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.kernels.product.matrix import Matrix
from minikv.models import linear
from minikv.models.linear import (
    TORCH,
    Linear,
    Packing,
    Plain,
    blocks,
    fits_int8,
    group_of,
    kept,
    pack_int8,
    packed_blocks,
    suits,
)
from minikv.pages import Empty


class Int8OnGpu:
    """A matrix with eight bits per weight and one bfloat16 scale per row. If it is made from
    weights without memory, it is empty, and `pack` fills in the rows. row: multiplies one row, bias
    included; `Llama.use` sets it, None: `dense` does."""

    __slots__ = ("bias", "quantised", "row", "scale")

    def __init__(self, plain: Plain, room: Empty) -> None:
        rows, columns = plain.shape
        assert fits_int8(columns)
        self.bias = plain.bias
        self.row: Callable[[Tensor], Tensor] | None = None
        self.quantised = room((rows, columns), torch.int8)
        self.scale = room((rows,), torch.bfloat16)
        if not plain.weight.is_meta:
            self.pack(0, plain.weight)

    def pack(self, start: int, weight: Tensor) -> None:
        """Pack weight [n, in], on any device, as the rows from `start` to `start` + n."""
        for begin, end in packed_blocks(weight.shape):
            rows = slice(start + begin, start + end)
            part = weight[begin:end].to(self.quantised.device)
            pack_int8(part, self.quantised[rows], self.scale[rows])

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `linear.Linear`."""
        if self.row is not None and len(x) == 1:
            return self.row(x)
        return _product(x, self.dense(), self.bias, out)

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.quantised.shape

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` [t] of the weights, bfloat16 [t, in], for an embedding."""
        return torch.mul(self.quantised[ids], self.scale[ids, None])

    def dense(self) -> Tensor:
        """See `linear.Linear`. Unpacks the weights into a new tensor."""
        return torch.mul(self.quantised, self.scale[:, None])

    @property
    def nbytes(self) -> int:
        """See `linear.Linear`."""
        return self.quantised.nbytes + self.scale.nbytes + _bytes(self.bias)


class Int4OnGpu:
    """A matrix with four bits per weight, and a bfloat16 scale and offset for each group of a row.
    If it is made from weights without memory, it is empty, and `pack` fills in the rows. unpack:
    unpacks all rows, as `unpack_int4_rows`, which takes them by blocks if this is None. row: as of
    `Int8OnGpu`. `Llama.use` sets both."""

    __slots__ = ("bias", "packed", "row", "scales", "shape", "unpack")

    def __init__(self, plain: Plain, room: Empty) -> None:
        self.shape = plain.shape
        rows, columns = plain.shape
        group = group_of(columns)
        assert group is not None
        self.bias = plain.bias
        self.row: Callable[[Tensor], Tensor] | None = None
        self.unpack: Callable[[Tensor, Tensor, Tensor], None] | None = None
        self.packed = room((rows, columns // 2), torch.uint8)
        self.scales = room((columns // group, rows, 2), torch.bfloat16)
        if not plain.weight.is_meta:
            self.pack(0, plain.weight)

    def pack(self, start: int, weight: Tensor) -> None:
        """Pack weight [n, in], on any device, as the rows from `start` to `start` + n."""
        for begin, end in packed_blocks(weight.shape):
            rows = slice(start + begin, start + end)
            part = weight[begin:end].to(self.packed.device)
            pack_int4_rows(part, self.packed[rows], self.scales[:, rows])

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `linear.Linear`."""
        if self.row is not None and len(x) == 1:
            return self.row(x)
        return _product(x, self.dense(), self.bias, out)

    def dense(self) -> Tensor:
        """See `linear.Linear`. Unpacks the weights into a new tensor."""
        made = torch.empty(self.shape, dtype=torch.bfloat16, device=self.packed.device)
        if self.unpack is not None:
            self.unpack(self.packed, self.scales, made)
            return made
        for start, end in blocks(self.shape):  # in blocks, because torch makes float32 copies
            unpack_int4_rows(self.packed[start:end], self.scales[:, start:end], made[start:end])
        return made

    @property
    def nbytes(self) -> int:
        """See `linear.Linear`."""
        return self.packed.nbytes + self.scales.nbytes + _bytes(self.bias)


def kept_on(
    device: torch.device, plain: Plain, form: str, room: Empty, packing: Packing = TORCH
) -> Linear:
    """As `linear.kept`, on a CPU or a GPU. packing: used on a CPU only."""
    if device.type == "cpu":
        return kept(plain, form, room, packing)
    if not suits(form, plain.shape[1]):
        return plain
    return (Int8OnGpu if form == "int8" else Int4OnGpu)(plain, room)


def as_read(made: Linear) -> Matrix | None:
    """As `linear.as_read`, also for matrices on a GPU."""
    if isinstance(made, Int8OnGpu):
        rows, columns = made.shape
        return Matrix(rows, columns, made.quantised, made.scale, made.bias)
    if isinstance(made, Int4OnGpu):
        rows, columns = made.shape
        return Matrix(rows, columns, made.packed, made.scales, made.bias)
    return linear.as_read(made)


def pack_int4_rows(weight: Tensor, packed: Tensor, scales: Tensor) -> None:
    """Pack weight [m, n] into packed uint8 [m, n / 2] and scales bfloat16 [n / group, m, 2] (scale,
    offset).

    Byte i of a row's group has column i in its lower four bits, and column group / 2 + i in the
    upper ones. Step s means scale * (s - 8) + offset, rounded once to bfloat16. A group's smallest
    and largest value are the first and the last of 16 steps.
    """
    part = weight.float().view(len(weight), len(scales), -1)
    least, most = part.amin(2), part.amax(2)
    scale = ((most - least) / 15).clamp_(min=torch.finfo(torch.float32).tiny).to(torch.bfloat16)
    middle = (least + 8 * scale.float()).to(torch.bfloat16)
    scales[..., 0], scales[..., 1] = scale.t(), middle.t()
    part = (part - middle.float()[..., None]).div_(scale.float()[..., None])
    low, high = part.round_().add_(8).clamp_(0, 15).to(torch.uint8).chunk(2, 2)
    packed.copy_((low | (high << 4)).flatten(1))


def unpack_int4_rows(packed: Tensor, scales: Tensor, out: Tensor) -> None:
    """The inverse of `pack_int4_rows`, into out bfloat16 [m, n]."""
    both = packed.view(len(packed), len(scales), -1)
    steps = torch.cat((both & 15, both >> 4), 2).float().sub_(8)  # [m, groups, group]
    by, middle = scales.float().transpose(0, 1)[..., None].unbind(2)
    out.copy_(steps.mul_(by).add_(middle).flatten(1).to(torch.bfloat16))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if out is None:
        return F.linear(x, weight, bias)
    made = torch.mm(x, weight.t(), out=out[: len(x)])
    return made if bias is None else made.add_(bias)


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
