"""The matrices of a network, plain or packed.

The fastest way on a CPU was measured (docs/measurements/README.md, "Weights"):

- one row in bfloat16: our own kernel. Without it, torch's own product: oneDNN, which torch prefers,
  needs twice the time, or about the same with prepacked weights. So nothing is prepacked: there is
  one copy, and a tied head is fast too. With tiles (AMX), oneDNN's product of a matrix and a vector
  needs about two thirds of the time of torch's.
- many rows in bfloat16: oneDNN if the processor multiplies bfloat16. If it does not, or more slowly
  than float32, the product is computed in float32, a block of the weights at a time.
- int8 and int4: our own kernels round activations to eight bits and multiply integers. Without
  them, torch's packed kernels multiply a few rows; for many rows, the weights are unpacked a block
  at a time. With tiles (AMX), our own kernel unpacks the weights for many rows, and activations are
  not rounded.

`F.linear` multiplies float32, and plain weights on a GPU. On a GPU, our own kernels multiply one
row by packed weights. For more rows, the whole matrix is unpacked for each product, so a chunk of a
prompt should be long.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator
from functools import cache
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.kernels.dispatch import Kernels
from minikv.kernels.product.matrix import FOUR_BITS, PLAIN, Matrix
from minikv.models.stored import PAIRED, apart
from minikv.pages import Empty, empty

FORMS = ("auto", "plain", "int8", "int4", "int8+head", "int4+head")
"""The forms of weights. "auto": as in the checkpoint. "plain": not packed. "int8" and "int4":
the matrices of the layers are packed. "+head": lm_head is packed as well, always to eight bits
(docs/measurements/README.md, "Weights")."""

GROUPS = (128, 64, 32)
"""Possible numbers of columns that share a scale in int4: the first that divides the length of a
row is used."""

FEW = {"int8": 8, "int4": 16}
"""The most rows of the input for which torch's packed kernels are faster than unpacking the
weights."""

BLOCK = 1 << 22
"""How many weights are unpacked at a time: 8 MiB of bfloat16, which fit into the processor's
caches."""

PACKED = 1 << 15
"""How many weights a thread packs at a time. With fewer, torch would not use the thread. Larger
blocks leave holes in the heap, which count as used memory."""

_SWITCH = threading.Lock()
_TILE = 64  # rows of a tile of the packed int4 layout
_STEP = 16  # columns that torch's int8 kernel reads at a time, even beyond the end of a row


Product = Callable[[Tensor, Tensor | None], Tensor]
"""A product with one matrix, without its bias: (x bfloat16 [t, in], room bfloat16 [>= t, out] or
None) -> bfloat16 [t, out], written to `room` if there is one."""

Packing = Callable[[], Kernels]
"""Returns the kernels that pack on a CPU; called when the first matrix is packed. If they have no
`pack_int8` or `pack_int4`, the functions here compute the same numbers."""
TORCH: Packing = Kernels


class Scratch(threading.local):
    """Memory for unpacked weights, separate for each thread. Allocating it each time would take
    longer than unpacking."""

    def __init__(self) -> None:
        self._held: dict[torch.dtype, Tensor] = {}

    def room(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor [rows, columns], valid until the next call for this dtype."""
        held = self._held.get(dtype)
        if held is None or held.numel() < rows * columns:
            with torch.inference_mode(False):  # used inside and outside of a forward
                held = self._held[dtype] = torch.empty(rows * columns, dtype=dtype)
        return held[: rows * columns].view(rows, columns)


def row_product(x: Tensor, weight: Tensor) -> Tensor:
    """One row x [1, in] of bfloat16 times weight [out, in], by torch: with oneDNN if there are
    tiles, otherwise without it."""
    if has_tiles():
        return torch.mv(weight, x[0])[None]
    # torch has one switch for the whole process. The lock keeps threads from overwriting each
    # other's setting.
    with _SWITCH:
        enabled = torch._C._get_mkldnn_enabled()
        try:
            torch._C._set_mkldnn_enabled(False)
            return F.linear(x, weight)
        finally:
            torch._C._set_mkldnn_enabled(enabled)


_SCRATCH = Scratch()


def pack_int8(weight: Tensor, codes: Tensor, scale: Tensor, kind: int = PLAIN) -> None:
    """Pack weight bfloat16 [n, in], on any device, into codes int8 [n, in] and scale bfloat16 [n].
    A row's scale is its largest magnitude divided by 127.

    The kernel in C also takes blocks of a file, uint8 [n, bytes], if `kind` is in
    `matrix.BLOCKS`."""
    assert kind == PLAIN
    for start, end in _packed_blocks(weight.shape):
        part = weight[start:end].to(codes.device).float()
        steps = (part.abs().amax(1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
        scale[start:end] = steps.to(torch.bfloat16)
        part.div_(scale[start:end].float()[:, None])
        codes[start:end] = part.round_().clamp_(-127, 127)


def pack_int4(
    weight: Tensor, packed: Tensor, scales: Tensor, half: int | None, kind: int = PLAIN
) -> None:
    """Pack weight bfloat16 [n, in] into packed uint8 [N, in / 2] and scales bfloat16 [in / group,
    N, 2], in the layout of this processor. N is n, rounded up to whole tiles.

    The kernel in C needs `half`, see `half_tile`. It also takes blocks of `matrix.FOUR_BITS`."""
    assert kind == PLAIN
    for start, end in _packed_blocks(weight.shape):
        steps = _sixteen_steps(weight[start:end], scales[:, start:end]).flatten(1).to(torch.int32)
        tiles = -(-end // _TILE) * _TILE
        steps = F.pad(steps, (0, 0, 0, tiles - end))
        packed[start:tiles] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps, 1)


def pack_int4_rows(weight: Tensor, packed: Tensor, scales: Tensor) -> None:
    """Pack weight [m, n], on any device, in a GPU's layout: into packed uint8 [m, n / 2] and scales
    bfloat16 [n / group, m, 2]. Byte i of a row's group has column i in its lower four bits, and
    column group / 2 + i in the upper ones."""
    for start, end in _packed_blocks(weight.shape):
        steps = _sixteen_steps(weight[start:end].to(packed.device), scales[:, start:end])
        packed[start:end] = _in_rows(steps.to(torch.uint8).flatten(1), len(scales))


def _in_rows(codes: Tensor, groups: int) -> Tensor:
    """Steps uint8 [m, n] -> [m, n / 2], as `pack_int4_rows` says."""
    low, high = codes.view(len(codes), groups, 2, -1).unbind(2)
    return (low | (high << 4)).flatten(1)


def _tiled(pairs: Tensor, half: int | None) -> Tensor:
    """Steps of whole tiles, in pairs (`stored.paired`), uint8 [m, n / 2], in the layout of this
    processor."""
    if half is None:
        made: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(apart(pairs).int(), 1)
        return made
    low, high = pairs.view(-1, 2, half, pairs.shape[1] // 16, 16).unbind(1)
    both = torch.stack(((low & 15) | (high << 4), (low >> 4) | (high & 0xF0)), 3)
    return both.flatten(2).transpose(1, 2).reshape(len(pairs), -1)


def _sixteen_steps(weight: Tensor, scales: Tensor) -> Tensor:
    """The steps 0 to 15 of weight [m, n], float32 [m, groups, group]; fills their scales [groups,
    m, 2] (scale, middle). Step s means scale * (s - 8) + middle, rounded once to bfloat16. A
    group's smallest and largest value are the first and the last step."""
    part = weight.float().view(len(weight), len(scales), -1)
    least, most = part.amin(2), part.amax(2)
    scale = ((most - least) / 15).clamp_(min=torch.finfo(torch.float32).tiny).to(torch.bfloat16)
    middle = (least + 8 * scale.float()).to(torch.bfloat16)
    scales[..., 0], scales[..., 1] = scale.t(), middle.t()
    part = (part - middle.float()[..., None]).div_(scale.float()[..., None])
    return part.round_().add_(8).clamp_(0, 15)


def unpack_int4_rows(packed: Tensor, scales: Tensor, out: Tensor) -> None:
    """The inverse of `pack_int4_rows`, into out bfloat16 [m, n]."""
    for start, end in blocks(out.shape):  # in blocks, because torch makes copies in float32
        both = packed[start:end].view(end - start, len(scales), -1)
        steps = torch.cat((both & 15, both >> 4), 2).float().sub_(8)  # [m, groups, group]
        by, middle = scales[:, start:end].float().transpose(0, 1)[..., None].unbind(2)
        out[start:end] = steps.mul_(by).add_(middle).flatten(1).to(torch.bfloat16)


class Plain:
    """A matrix with unpacked weights.

    product: computes one row of bfloat16 on a CPU. float_rows: from this many rows on, float32 is
    faster than bfloat16 although the processor multiplies bfloat16; None: never.
    """

    __slots__ = ("bias", "float_rows", "product", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.product: Callable[[Tensor, Tensor], Tensor] = row_product
        self.float_rows: int | None = None

    def use(self, ops: Kernels, dtype: torch.dtype) -> None:
        """Multiply with the kernels `ops` from now on. dtype: of the input."""
        self.product = ops.row_product if ops.products else row_product
        self.float_rows = ops.float_rows

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [t, in] -> x @ weight.T + bias, [t, out], in x's dtype. out [>= t, out]: memory for the
        result, of which a view is then returned."""
        weight, rows = self.weight, x.shape[0]
        if weight.dtype is torch.bfloat16 and weight.is_cpu:
            if rows == 1:
                return _biased(self.product(x, weight), self.bias)
            native = bf16_products()
            if not native or (self.float_rows is not None and rows >= self.float_rows):
                return _biased(_by_blocks(x, self, out, native=False), self.bias)
        return _product(x, weight, self.bias, out)

    def dense(self) -> Tensor:
        """The weights [out, in] by which it multiplies; for a packed matrix, a new tensor."""
        return self.weight

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.weight.shape

    def columns(self, start: int, end: int, scratch: Scratch | None = None) -> Tensor:
        """The weights' rows from `start`, the first row of a tile, to `end`, transposed: [in, end -
        start]. scratch: memory for rows that must be unpacked."""
        return self.weight[start:end].t()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, bias included."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class PackedMatrix:
    """A matrix with eight or four bits per weight: the common part of `Int8` and `Int4`. weights
    and scales are those of `kernels.product.matrix.Matrix`.

    Made from weights without memory (on torch's meta device), it is empty, and `pack` fills in the
    rows. packing: packs for a CPU; None: the matrix is for a GPU, and torch packs it.

    `use` sets these. product: multiplies a few rows on a CPU, and many rows if `many`; it may round
    activations to eight bits (kernels/product/cpu.py); None: torch, which leaves them in
    bfloat16. rows_product: multiplies many rows if `product` does not; None: unpack a block at a
    time. row: multiplies one row on a GPU, bias included. unpack: unpacks all rows of `Int4` on a
    GPU; None: torch.
    """

    form: str
    weights: Tensor
    scales: Tensor
    tile = 1  # rows that are packed together

    def __init__(
        self,
        plain: Plain,
        room: Empty = empty,
        packing: Packing | None = TORCH,
        group: int = 0,
    ) -> None:
        self.shape, self.bias, self.packing = plain.shape, plain.bias, packing
        self.product: Product | None = None
        self.many = True
        self.rows_product: Product | None = None
        self.row: Callable[[Tensor], Tensor] | None = None
        self.unpack: Callable[..., None] | None = None
        self._allocate(room, group)
        if not plain.weight.is_meta:
            self.pack(0, plain.weight)

    def use(self, ops: Kernels, dtype: torch.dtype) -> None:
        """See `Plain`."""
        stored = as_stored(self)
        self.product = self.row = self.rows_product = None
        self.unpack = ops.unpack_int4_rows
        if self.packing is None:
            if ops.packed_row is not None and stored is not None:
                self.row = ops.packed_row(stored, dtype)
        elif ops.products and stored is not None:
            kernel = getattr(ops, f"{self.form}_product")
            tile = (stored.half, stored.outs) if stored.half else ()
            given = stored.weights, stored.scales, *tile
            self.product = None if kernel is None else lambda x, room: kernel(x, *given, room)
            if ops.rows_product is not None:
                self.rows_product = ops.rows_product(stored)
        self.many = ops.products and ops.integer_prompts

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Plain`."""
        if self.packing is None:
            if self.row is not None and len(x) == 1:
                return self.row(x)
            return _product(x, self.dense(), self.bias, out)
        few = len(x) <= FEW[self.form]
        if self.product is not None and (few or self.many):
            made = self.product(x, out)
        elif few:
            made = self._few(x)
        elif self.rows_product is not None:
            made = self.rows_product(x, out)
        else:
            made = _by_blocks(x, self, out, bf16_products())
        return _biased(made, self.bias)

    def dense(self) -> Tensor:
        """See `Plain`."""
        return self.columns(0, self.shape[0]).t()

    @property
    def nbytes(self) -> int:
        """See `Plain`."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.weights.nbytes + self.scales.nbytes + bias

    def pack(self, start: int, weight: Tensor, kind: int = PLAIN) -> None:
        """Pack weight [n, in], or blocks of a file, as the rows from `start` to `start` + n. start:
        a multiple of `tile`."""
        raise NotImplementedError

    def takes_blocks(self, kind: int) -> bool:
        """Whether `pack` takes blocks of this type."""
        if self.packing is None:
            return False
        ops = self.packing()
        return ops.pack_int8 is not None and ops.pack_int4 is not None

    def fill(self, start: int, codes: Tensor, scale: Tensor, middle: Tensor | None) -> None:
        """Set the rows from `start` on to a file's codes (`stored.Steps`), without quantising
        again. start: a multiple of `tile`. The file's groups may be larger than those here."""
        raise NotImplementedError

    def columns(self, start: int, end: int, scratch: Scratch | None = None) -> Tensor:
        """See `Plain`."""
        raise NotImplementedError

    def _allocate(self, room: Empty, group: int) -> None:
        """Memory for the packed weights. group: see `group_of`."""
        raise NotImplementedError

    def _few(self, x: Tensor) -> Tensor:
        """The product with a few rows, by torch's packed kernel."""
        raise NotImplementedError


class Int8(PackedMatrix):
    """A matrix with eight bits per weight and one bfloat16 scale per row. `in` must be a multiple
    of 16, because torch's kernel reads whole vectors."""

    form = "int8"

    def _allocate(self, room: Empty, group: int) -> None:
        assert can_pack("int8", self.shape[1])
        self.weights = room(self.shape, torch.int8)
        self.scales = room(self.shape[:1], torch.bfloat16)

    def pack(self, start: int, weight: Tensor, kind: int = PLAIN) -> None:
        rows = slice(start, start + len(weight))
        pack = (self.packing and self.packing().pack_int8) or pack_int8
        pack(_dense(weight, kind), self.weights[rows], self.scales[rows], kind)

    def fill(self, start: int, codes: Tensor, scale: Tensor, middle: Tensor | None) -> None:
        self.weights[start : start + len(codes)] = codes
        self.scales[start : start + len(codes)] = scale[:, 0]

    def columns(self, start: int, end: int, scratch: Scratch | None = None) -> Tensor:
        room = None
        if scratch is not None:
            room = scratch.room(end - start, self.shape[1], torch.bfloat16)
        return torch.mul(self.weights[start:end], self.scales[start:end, None], out=room).t()

    def rows(self, ids: Tensor) -> Tensor:
        """The rows `ids` [t] of the weights, bfloat16 [t, in], for an embedding."""
        return torch.mul(self.weights[ids], self.scales[ids, None])

    def _few(self, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x.contiguous(), self.weights, self.scales)


class Int4(PackedMatrix):
    """A matrix with four bits per weight, and a bfloat16 scale and middle for each group of
    `GROUPS` columns of a row (`_sixteen_steps`).

    On a CPU it is packed in tiles (`half_tile`), on a GPU in rows (`pack_int4_rows`).
    """

    form, tile = "int4", _TILE

    def _allocate(self, room: Empty, group: int) -> None:
        rows, columns = self.shape
        found = group_of(columns, group)
        assert found is not None
        self.group = group = found
        if self.packing is not None:
            rows = -(-rows // _TILE) * _TILE  # a shorter last tile would have another layout
        self.weights = room((rows, columns // 2), torch.uint8)
        self.scales = room((columns // group, rows, 2), torch.bfloat16)

    def takes_blocks(self, kind: int) -> bool:
        fits = kind in FOUR_BITS and self.group == PAIRED and half_tile() is not None
        return fits and super().takes_blocks(kind)

    def pack(self, start: int, weight: Tensor, kind: int = PLAIN) -> None:
        end = start + len(weight)
        if self.packing is None:
            pack_int4_rows(weight, self.weights[start:end], self.scales[:, start:end])
            return
        tiles, half = -(-end // _TILE) * _TILE, half_tile()
        self.scales[:, end:tiles] = 0
        pack = (half is not None and self.packing().pack_int4) or pack_int4
        rows = slice(start, tiles)
        pack(_dense(weight, kind), self.weights[rows], self.scales[:, rows], half, kind)

    def fill(self, start: int, codes: Tensor, scale: Tensor, middle: Tensor | None) -> None:
        assert middle is not None
        end, groups = start + len(codes), len(self.scales)
        both = torch.stack((scale, middle), 2).to(torch.bfloat16).transpose(0, 1)
        times = groups // len(both)
        self.scales[:, start:end] = both if times == 1 else both.repeat_interleave(times, 0)
        if self.packing is None:
            codes = codes.to(self.weights.device)
            same = self.group == PAIRED
            self.weights[start:end] = codes if same else _in_rows(apart(codes), groups)
            return
        tiles = -(-end // _TILE) * _TILE
        self.scales[:, end:tiles] = 0
        codes = codes if end == tiles else F.pad(codes, (0, 0, 0, tiles - end))
        self.weights[start:tiles] = _tiled(codes, half_tile())

    def _few(self, x: Tensor) -> Tensor:
        made: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self.weights, self.group, self.scales
        )
        return made[:, : self.shape[0]]

    def columns(self, start: int, end: int, scratch: Scratch | None = None) -> Tensor:
        half = half_tile()
        inside, size = self.shape[1], -(-(end - start) // _TILE) * _TILE
        if half is None:
            eye = torch.eye(inside, dtype=torch.bfloat16)
            return self._few(eye)[:, start:end]  # exact, because no values are added
        steps = _untiled(self.weights[start : start + size], half).transpose(0, 1)
        steps = steps.reshape(inside // self.group, self.group, size)
        pairs = self.scales[:, None, start : start + size].unbind(-1)
        scale, middle = (part.contiguous() for part in pairs)  # 30 times as fast as interleaved
        made = torch.addcmul(middle, steps.to(torch.bfloat16).sub_(8), scale)  # rounds only once
        return made.view(inside, size)[:, : end - start]

    def dense(self) -> Tensor:
        if self.packing is not None:
            return super().dense()
        made = torch.empty(self.shape, dtype=torch.bfloat16, device=self.weights.device)
        (self.unpack or unpack_int4_rows)(self.weights, self.scales, made)
        return made


Linear = Plain | PackedMatrix
"""A matrix in any of its forms."""


def kept(
    plain: Plain,
    form: str,
    room: Empty = empty,
    packing: Packing | None = TORCH,
    group: int = 0,
) -> Linear:
    """Pack `plain` to int8 or int4, in memory from `room`. Returns `plain` itself for any other
    `form`, or if its rows cannot be packed. packing: see `PackedMatrix`; group: `group_of`."""
    if not can_pack(form, plain.shape[1], group):
        return plain
    return (Int8 if form == "int8" else Int4)(plain, room, packing, group)


def as_stored(made: Linear) -> Matrix | None:
    """The matrix as it is stored, in the form for kernels; None if its layout is not known."""
    rows, columns = made.shape
    if isinstance(made, Plain):
        return Matrix(rows, columns, made.weight, bias=made.bias)
    half = half_tile() if isinstance(made, Int4) and made.packing is not None else 0
    if half is None:
        return None
    return Matrix(rows, columns, made.weights, made.scales, made.bias, half)


def split(form: str) -> tuple[str, str]:
    """Split one of `FORMS` into the form of the layers' matrices and that of lm_head."""
    layers, _, head = form.partition("+")
    return layers, "int8" if head else "plain" if form == "plain" else "auto"


def kept_bytes(rows: int, columns: int, form: str, itemsize: int, group: int = 0) -> int:
    """Bytes of a matrix [rows, columns] in `form`, without its bias. itemsize: bytes per weight if
    it is not packed. group: see `group_of`."""
    if not can_pack(form, columns, group):
        return rows * columns * itemsize
    if form == "int8":
        return rows * columns + 2 * rows
    groups = columns // (group_of(columns, group) or columns)
    return -(-rows // _TILE) * _TILE * (columns // 2 + 4 * groups)


def can_pack(form: str, columns: int, group: int = 0) -> bool:
    """Whether `form` can pack rows of `columns` columns. group: see `group_of`."""
    if form == "int4":
        return group_of(columns, group) is not None
    return form == "int8" and columns % _STEP == 0


def group_of(columns: int, stored: int = 0) -> int | None:
    """How many columns share a scale in int4; None if no group divides a row of `columns` columns.
    stored: the size of a group in the file; 0: as here."""
    whole = gcd(columns, stored)
    return next((group for group in GROUPS if whole % group == 0), None)


def packing_bytes(columns: int) -> int:
    """Bytes of temporary memory for packing rows of `columns` columns: a block in float32, and
    tensors computed from it."""
    return 48 * max(PACKED * torch.get_num_threads(), _TILE * columns)


def _packed_blocks(shape: torch.Size) -> Iterator[tuple[int, int]]:
    """Ranges (start, end) of rows, each of which is packed at once."""
    return blocks(shape, PACKED * torch.get_num_threads())


def blocks(shape: torch.Size, most: int = 0) -> Iterator[tuple[int, int]]:
    """Ranges (start, end) of rows with about `most` weights each, by default `BLOCK`. All but the
    last are whole tiles."""
    step = max(_TILE, (most or BLOCK) // shape[1] // _TILE * _TILE)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


@cache
def bf16_products() -> bool:
    """Whether this processor multiplies bfloat16. If not, torch needs four times as long for it as
    for float32."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@cache
def has_tiles() -> bool:
    """Whether torch multiplies tiles of bfloat16 (AMX) on this processor, and Linux allows it."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


@cache
def lacks(form: str) -> str:
    """Why torch does not support `form` in this build or on this processor; "" if it does. Tries
    torch's kernels (not those in C) on a small matrix."""
    if form not in ("int8", "int4"):
        return ""
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(2 * _TILE, GROUPS[0], generator=made)
    x = torch.randn(FEW["int4"] + 1, GROUPS[0], generator=made)
    try:
        matrix = kept(Plain(weight.to(torch.bfloat16)), form)
        few, many = matrix(x[:1].to(torch.bfloat16)), matrix(x.to(torch.bfloat16))
    except (AttributeError, RuntimeError, NotImplementedError):
        return f"this build of torch has no {form} kernel for this processor"
    want = x @ weight.T
    off = [
        float((got.float() - part).norm() / part.norm())
        for got, part in ((few, want[:1]), (many, want))
    ]
    right = max(off) < 0.3  # rounding to four bits gives about 0.1; a wrong layout gives about 1
    return "" if right else f"torch's {form} kernel computes wrongly on this processor"


@cache
def half_tile() -> int | None:
    """torch's packed int4 layout, which depends on the processor. In a tile of 2n rows, byte i of a
    column holds row i in its lower four bits and row n + i in its upper ones. Returns n; None if
    the layout is another one."""
    made = torch.Generator().manual_seed(0)
    steps = torch.randint(16, (_TILE, 32), generator=made, dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps, 1)
    for half in (32, 16):
        rows = _untiled(packed, half).transpose(1, 2).reshape(_TILE, 32)
        if torch.equal(rows.to(torch.int32), steps):
            return half
    return None


def _untiled(packed: Tensor, half: int) -> Tensor:
    """The steps of whole tiles [n, in / 2]: uint8 [tiles, in, 2 * half]."""
    both = packed.view(len(packed) // (2 * half), -1, half)
    return torch.cat((both & 15, both >> 4), 2)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if out is None:
        return F.linear(x, weight, bias)
    return _biased(torch.mm(x, weight.t(), out=out[: len(x)]), bias)


def _by_blocks(x: Tensor, matrix: Linear, out: Tensor | None, native: bool) -> Tensor:
    """x [t, in] -> [t, out], block by block of the weights. native: multiply in bfloat16, otherwise
    in float32."""
    rows = matrix.shape[0]
    made = x.new_empty(x.shape[0], rows) if out is None else out[: x.shape[0]]
    if not native:
        x = x.float()
    for start, end in blocks(matrix.shape):
        part = matrix.columns(start, end, _SCRATCH)
        if native:
            torch.mm(x, part, out=made[:, start:end])
        else:
            wide = _SCRATCH.room(end - start, matrix.shape[1], torch.float32)
            made[:, start:end] = x @ wide.copy_(part.t()).t()
    return made


def _dense(weight: Tensor, kind: int) -> Tensor:
    """The weight in the form for the packing kernels: bfloat16 and contiguous, or blocks of a
    file."""
    return weight.to(torch.bfloat16).contiguous() if kind == PLAIN else weight


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y.add_(bias)
