"""Products of plain and packed matrices in C, and packing. `product.c`: one row and plain weights.
`integer.c`: packed weights, and activations rounded to eight bits. `product_tiles.c`: many rows and
packed weights, with bfloat16 tiles (AMX). `packing.c`: the packing that models/linear.py defines.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minikv.kernels.attention.cpu import TILES
from minikv.kernels.native.binding import Struct, function, loaded, plain
from minikv.kernels.product import plain as plain_torch
from minikv.kernels.product.matrix import BLOCKS, FOUR_BITS, PLAIN, Matrix

_PLAIN, _EIGHT, _FOUR = range(3)
"""The formats of weights, with their numbers in `row.h`."""
_TILE = 64  # the layout of four bits is padded to a multiple of this many rows
_GROUPS = (32, 64, 128)  # its possible numbers of columns with a scale

_row_product = function("row_product", "nnppp")
_integer_product = function("integer_product", "nnppp", "a product")
_rows_product = function("rows_product", "nnppp", "a product")
_pack_int8 = function("pack_int8", "nnnnppp", "packing")
_pack_int4 = function("pack_int4", "nnnnnnnppp")


def threads() -> int:
    """How many threads compute a product together."""
    found: int = loaded().minikv_threads()
    return found


def struct(*matrices: Matrix | None) -> Struct | None:
    """Matrices in C's form (`Matrix` of row.h), one after the other; None if C does not support one
    of them. A None among them is a matrix without rows."""
    fields: list[object] = []
    for matrix in matrices:
        if matrix is None:
            fields += [0] * 9
            continue
        weights, scales, bias = matrix.weights, matrix.scales, matrix.bias
        beside = [part for part in (scales, bias) if part is not None]
        if not plain(weights.dtype, weights) or not plain(torch.bfloat16, *beside):
            return None
        form, group, stride = _PLAIN, 0, 0
        if scales is None:
            if weights.dtype is not torch.bfloat16:
                return None
        elif weights.dtype is torch.int8:
            form = _EIGHT
        else:
            form, group, stride = _FOUR, matrix.n // scales.shape[0], scales.shape[1]
        sizes = form, matrix.n, matrix.outs, group, matrix.half, stride
        fields += [*sizes, weights, scales, bias]
    return Struct(*fields)


def row_product(x: Tensor, weight: Tensor) -> Tensor:
    """See `plain.row_product`. Summed in float32, in a different order than torch's."""
    if not plain(torch.bfloat16, x, weight) or x.shape != (1, weight.shape[1]):
        return plain_torch.row_product(x, weight)  # or torch raises an error
    out = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device)
    _row_product(weight.shape[1], weight.shape[0], x, weight, out)
    return out


def int8_product(x: Tensor, codes: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """x bfloat16 [t, n] times the transpose of scale [m] * codes int8 [m, n]: bfloat16 [t, m].

    The activations of a row are rounded to eight bits, 32 columns at a time: the largest magnitude
    of such a block becomes 127. The products of a block are summed as integers, so without error.
    This sum is multiplied by the scale of the activations in float32 and added to those of the
    other blocks. A row does not depend on other rows, so a prompt may be read in parts of any size.
    A block with infinity or NaN makes its row NaN.

    The result is written to the first rows of `out` [>= t, m], if given. Raises MemoryError.
    """
    rows, columns = codes.shape
    assert plain(torch.int8, codes)
    assert plain(torch.bfloat16, scale)
    assert scale.shape == (rows,)
    made = Struct(_EIGHT, columns, rows, 0, 0, 0, codes, scale, None)
    return _multiplied(_integer_product, x, rows, columns, made, out)


def int4_product(
    x: Tensor, packed: Tensor, scales: Tensor, half: int, outs: int, out: Tensor | None = None
) -> Tensor:
    """Like `int8_product`, for weights [outs, n] of four bits: (code - 8) * step + middle.

    packed uint8 [N, n / 2]; N: outs, rounded up to whole tiles of 2 * half rows and to a multiple
    of 64. In a tile, byte i of a column has row i in its lower four bits and row half + i in the
    upper ones. scales bfloat16 [n / group, N, 2]: the step and the middle of each group of 32, 64
    or 128 columns.
    """
    groups, padded, _ = scales.shape
    columns = 2 * packed.shape[1]
    assert plain(torch.uint8, packed)
    assert plain(torch.bfloat16, scales)
    assert scales.shape == (groups, len(packed), 2)
    assert padded == -(-outs // _TILE) * _TILE
    assert columns in [size * groups for size in _GROUPS]
    assert half in (16, 32)
    sizes = columns, outs, columns // groups, half, padded
    made = Struct(_FOUR, *sizes, packed, scales, None)
    return _multiplied(_integer_product, x, outs, columns, made, out)


def rows_product(given: Matrix) -> Callable[[Tensor, Tensor | None], Tensor] | None:
    """A function of x bfloat16 [t, n] and out bfloat16 [>= t, outs] or None. It returns x times the
    transpose of the matrix, bfloat16 [t, outs]: the first rows of `out`, or new memory. It does not
    add the bias. It raises MemoryError.

    Weights are unpacked to the numbers of `Linear.dense` of models/linear.py, except that the scale
    of eight-bit weights multiplies the sums. Activations are not quantized; sums are float32. None
    if the matrix is not packed, C does not support it, or there are no tiles.
    """
    made = struct(given)
    if made is None or given.scales is None or not TILES.available():
        return None

    def multiply(x: Tensor, out: Tensor | None = None) -> Tensor:
        return _multiplied(_rows_product, x, given.outs, given.n, made, out)

    return multiply


def _multiplied(
    product: Callable[..., None],
    x: Tensor,
    outs: int,
    columns: int,
    matrix: Struct,
    out: Tensor | None,
) -> Tensor:
    """x times the transpose of a packed matrix [outs, columns], by a function of C."""
    rows = x.shape[0]
    assert x.dtype is torch.bfloat16
    assert x.is_cpu
    assert x.shape[1] == columns
    x = x if x.stride(1) == 1 else x.contiguous()
    if out is None:
        room = x.new_empty(rows, outs)
    else:
        room = out[:rows]
        assert plain(torch.bfloat16, room)
        assert room.shape == (rows, outs)
    if rows:
        product(rows, x.stride(0), matrix, x, room)
    return room


def pack_int8(weight: Tensor, codes: Tensor, scale: Tensor, kind: int = PLAIN) -> None:
    """weight -> codes int8 [n, in] and scale bfloat16 [n], which are written to. weight: bfloat16
    [n, in]; or the blocks of a file, uint8 [n, bytes], of the type `kind` of `BLOCKS`.

    The scale of a row is its largest magnitude / 127.
    """
    rows, columns = codes.shape
    assert plain(torch.bfloat16, scale)
    assert plain(torch.int8, codes)
    assert scale.shape == (rows,)
    _pack_int8(kind, rows, columns, _wide(weight, rows, columns, kind), weight, codes, scale)


def _wide(weight: Tensor, rows: int, columns: int, kind: int) -> int:
    """The bytes of a row of `weight`."""
    size, bytes_ = BLOCKS[kind]
    wide = columns // size * bytes_
    assert plain(torch.bfloat16 if kind == PLAIN else torch.uint8, weight)
    assert columns % size == 0
    assert (len(weight), weight.nbytes) == (rows, rows * wide)
    return wide


def pack_int4(weight: Tensor, packed: Tensor, scales: Tensor, half: int, kind: int = PLAIN) -> None:
    """weight, as in `pack_int8` -> packed uint8 [N, in / 2] and scales bfloat16 [in / group, N, 2],
    as in `int4_product`, or rows of these from the first of a tile. Both are written in place.

    A group's smallest and largest value are the first and the last of 16 steps. The codes of
    blocks, with four bits in groups of 32, are kept. Scales of rows beyond n do not change.
    """
    rows, columns = len(weight), 2 * packed.shape[1]
    groups, padded, _ = scales.shape
    group = columns // groups
    wide = _wide(weight, rows, columns, kind)
    assert kind in (PLAIN, *FOUR_BITS)
    assert kind == PLAIN or group == _GROUPS[0]
    assert scales.dtype is torch.bfloat16
    assert scales.device == weight.device
    assert scales.stride()[1:] == (2, 1)
    assert plain(torch.uint8, packed)
    assert padded == -(-rows // _TILE) * _TILE
    assert packed.shape == (padded, columns // 2)
    assert group * groups == columns
    assert group <= _GROUPS[-1]
    assert half in (16, 32)
    sizes = rows, columns, wide, group, half, scales.stride(0) // 2
    _pack_int4(kind, *sizes, weight, packed, scales)
