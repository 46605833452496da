"""The part of a layer after attention in a decode step, in Triton. There are four launches; each is
the product of one row and a matrix, with the operations before and after it.

    out        x += W mixed
    gate, up   silu(gate) * up of W norm(x)
    down       x += W (silu(gate) * up)
    following  W norm(x): queries, keys and values of the next layer

A step reads every weight once, so its time is that of reading. A program reads a few whole rows of
the weights, 16 bytes per thread, and loads the next ones while it multiplies the present ones. If x
fits, it is normed once and stays in registers while the program goes through several tiles of rows.
Otherwise, and for plain weights, a thread loads the part of x that its next weights need, from a
cache. One program computes each sum, in a fixed order, so results are reproducible. The format of
the weights matters only for unpacking (`_added`) and for the order of x (`_spread`).

Numbers are rounded where the separate calls round them: the norm before and after its weight, the
product, silu and the sum with x. Packed weights are multiplied in float32 without rounding, unlike
in models/linear.py, which first rounds weights of four bits to bfloat16. A bias is added in
float32, before the product is rounded.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.gpu import power
from minikv.kernels.layer.gpu import add_norm, rounded
from minikv.kernels.product.matrix import Matrix

PLAIN, EIGHT, FOUR = range(3)
"""The formats of weights."""
KEEP, ADD, GATE = range(3)
"""The use of a product: it is the result, or it is added to `out`, or it is the gate of a second
product."""
_PLAIN, _EIGHT, _FOUR = tl.constexpr(PLAIN), tl.constexpr(EIGHT), tl.constexpr(FOUR)
_ADD, _GATE = tl.constexpr(ADD), tl.constexpr(GATE)
_MOST = 16384  # the most columns of a row that is normed
_AT_ONCE = 4096  # how many of these columns are read at once


@triton.jit
def _asked(weights, row, there, start, N: tl.constexpr, EACH: tl.constexpr, IN: tl.constexpr):
    """The stored numbers of columns start to start + IN - 1 of rows [OUT], if `there`; a number
    holds EACH columns."""
    j = start // EACH + tl.arange(0, IN // EACH)
    at = row.to(tl.int64)[:, None] * (N // EACH) + j[None, :]
    return tl.load(weights + at, mask=(j < tl.where(there, N // EACH, 0))[None, :], other=0)


@triton.jit
def _asked_scales(
    scales,
    row,
    there,
    start,
    outputs,
    N: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    T: tl.constexpr,
):
    """[OUT, T]: scale and offset of each thread's group in one number. The scale is its lower half.
    They take as long to load as the weights, so they are requested as early. 0 if FORM has no
    groups."""
    if FORM == _FOUR:
        g = start // GROUP + tl.arange(0, T) // (GROUP // 32)
        at = g.to(tl.int64)[None, :] * outputs + row[:, None]
        found = tl.load(scales + at, mask=(g < tl.where(there, N // GROUP, 0))[None, :], other=0)
    else:
        found = tl.full((), 0, tl.int32)
    return found


@triton.jit
def _columns(x, j, N: tl.constexpr):
    """Columns j of the row x, float32."""
    return tl.load(x + j, mask=j < N, other=0.0).to(tl.float32)


@triton.jit
def _read(x, start, N: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, IN: tl.constexpr):
    """The columns of the row x that belong to 16 bytes of weights: [T, 8] each, one for weights of
    16 bits, two for eight, four for four."""
    WIDTH: tl.constexpr = 8 if FORM == _PLAIN else 16 if FORM == _EIGHT else 32
    t = tl.arange(0, IN // WIDTH)
    begins = t * WIDTH
    if FORM == _FOUR:  # 16 bytes have as many columns of a group's lower half, and of the upper one
        begins = t // (GROUP // 32) * GROUP + t % (GROUP // 32) * 16
    j = start + begins[:, None] + tl.arange(0, 8)[None, :]
    up: tl.constexpr = GROUP // 2
    parts = (_columns(x, j, N),)
    if FORM != _PLAIN:
        parts += (_columns(x, j + 8, N),)  # type: ignore[assignment]
    if FORM == _FOUR:
        parts += _columns(x, j + up, N), _columns(x, j + up + 8, N)  # type: ignore[assignment]
    return parts


@triton.jit
def _normed(here, by, length, like):
    """The parts of `_read`, multiplied by `length` and the norm."""
    parts = ()
    for i in tl.static_range(len(here)):
        part = rounded(rounded(here[i] * length, like) * by[i], like)
        parts += (part,)  # type: ignore[assignment]
    return parts


@triton.jit
def _squares(here, FORM: tl.constexpr):
    """The sum of the squares of the parts of `_read`."""
    made = here[0] * here[0]
    if FORM != _PLAIN:
        made += here[1] * here[1]
    if FORM == _FOUR:
        made += here[2] * here[2] + here[3] * here[3]
    return tl.sum(tl.sum(made, 1), 0)


@triton.jit
def _fourths(x0, x1):
    """Of 16 columns, [T, 8] and [T, 8], every fourth: from the first, from the second, ..., [T, 4]
    each."""
    T: tl.constexpr = x0.shape[0]
    each = tl.reshape(tl.permute(tl.join(x0, x1), (0, 2, 1)), [T, 4, 2, 2])
    even, odd = tl.split(each)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _spread(here, FORM: tl.constexpr):
    """The parts of `_read` in the order in which `_added` unpacks a word of weights."""
    if FORM == _PLAIN:
        parts = here
    else:
        a, b, c, d = _fourths(here[0], here[1])
        if FORM == _EIGHT:
            parts = a, b * 0.00390625, c, d * 0.00390625  # 1 / 256
        else:
            e, f, g, h = _fourths(here[2], here[3])
            whole = tl.sum(a + b + c + d + e + f + g + h, 1)
            # The excess in `_added`: 128 per column, and in every second one 0x4300 / 65536, less
            # 128 / 65536 because of the subtraction from x below; and 8, because step 8 means zero.
            extra = 136.0 * whole + 0.259765625 * tl.sum(c + d + g + h, 1)
            a -= c * 0.0000152587890625  # 1 / 65536
            b -= d * 0.0000152587890625
            e -= g * 0.0000152587890625
            f -= h * 0.0000152587890625
            parts = a, c, e, g, b, d, f, h, whole, extra
    return parts


@triton.jit
def _pair(total, words, zero, lower, upper):
    """`total` plus the products of two steps of each word, in bits 0 to 3 and 16 to 19, and two
    columns. See `_added`."""
    both = (words & 0x000F000F) | (zero + 0x43004300)
    total += (both << 16).to(tl.float32, bitcast=True) * lower[None, :, :]
    total += both.to(tl.float32, bitcast=True) * upper[None, :, :]
    return total


@triton.jit
def _added(total, kept, pair, x, zero, FORM: tl.constexpr, T: tl.constexpr):
    """`total` [OUT, T] plus the products of the weights that `_asked` loaded and the columns of x
    that belong to them, as `_spread` returns them.

    A multiprocessor converts integers to float32 more slowly than it does other operations, so the
    bits of packed weights become part of float32 numbers. Eight bits b, the highest inverted, below
    the exponent of 2^23 are 2^23 + 128 + b, from which the constant is subtracted without error.
    They are used in place, as multiples of 1 or 256, and x has the inverse factor.

    Steps s and t of four bits, each in half a word below the exponent of 128, are two numbers of
    bfloat16, 128 + s and 128 + t. Shifted to the upper half, the lower one is a float32. So is the
    upper one unshifted, followed by the lower one: 128 + t + (0x4300 + s) / 65536. To cancel the
    excess products with s, x is smaller in the columns of s. `extra`, the last part of x, is the
    sum of all constants times x.

    zero: 0, unknown to the compiler. So the exponents are in registers, and one instruction masks
    the bits and inserts the exponent; two constants would take two instructions.
    """
    if FORM == _PLAIN:
        each = tl.reshape(kept, [kept.shape[0], T, 8])
        total += tl.sum(each.to(tl.float32) * x[0][None, :, :], 2)
    else:
        words = tl.reshape(kept, [kept.shape[0], T, 4])
        sums = tl.zeros([kept.shape[0], T, 4], tl.float32)
        if FORM == _EIGHT:
            for i in tl.static_range(2):
                half = words >> (16 * i)
                lower = (half & 0xFF) ^ (zero + 0x4B000080)
                upper = (half & 0xFF00) ^ (zero + 0x4B008000)
                lower = lower.to(tl.float32, bitcast=True) - 8388736.0
                upper = upper.to(tl.float32, bitcast=True) - 8421376.0
                sums += lower * x[2 * i][None, :, :]
                sums += upper * x[2 * i + 1][None, :, :]
            total += tl.sum(sums, 2)
        else:
            for i in tl.static_range(4):
                sums = _pair(sums, words >> (4 * i), zero, x[2 * i], x[2 * i + 1])
            by = (pair << 16).to(tl.float32, bitcast=True)
            middle = (pair & -65536).to(tl.float32, bitcast=True)
            total += (tl.sum(sums, 2) - x[9][None, :]) * by + x[8][None, :] * middle
    return total


@triton.jit
def _rows_of(tile, results, OUT: tl.constexpr, THEN: tl.constexpr):
    """The rows of the weights [OUT] of a tile: after each gate its second product. Beyond the end,
    the last row is read again and not written."""
    i = tl.arange(0, OUT)
    if THEN == _GATE:
        row = tl.minimum(tile * (OUT // 2) + i // 2, results - 1) + i % 2 * results
    else:
        row = tl.minimum(tile * OUT + i, results - 1)
    return row


@triton.jit
def _beside(scales, bias, out, row, FORM: tl.constexpr, THEN: tl.constexpr):
    """The other operands for rows [OUT]: scale, bias, and x to which the products are added. They
    are loaded before the products are computed, so that nothing waits for them."""
    by = tl.load(scales + row).to(tl.float32) if FORM == _EIGHT else 1.0
    more = tl.load(bias + row).to(tl.float32) if bias is not None else 0.0
    before = tl.load(out + row).to(tl.float32) if THEN == _ADD else 0.0
    return by, more, before


@triton.jit
def _written(total, beside, bias, out, tile, results, FORM: tl.constexpr, THEN: tl.constexpr):
    """Sum each row of `total` [OUT, T], apply the rest and write the results."""
    OUT: tl.constexpr = total.shape[0]
    made = tl.sum(total, 1)
    if FORM == _EIGHT:
        made *= beside[0]
    if bias is not None:
        made += beside[1]
    made = rounded(made, out)
    EACH: tl.constexpr = OUT // 2 if THEN == _GATE else OUT
    n = tile * EACH + tl.arange(0, EACH)
    if THEN == _GATE:
        gate, up = tl.split(tl.reshape(made, [EACH, 2]))
        made = rounded(gate / (1.0 + tl.exp(-gate)), out) * up
    if THEN == _ADD:
        made += beside[2]
    tl.store(out + n, made.to(out.dtype.element_ty), mask=n < results)


@triton.jit(do_not_specialize=["outputs"])
def _row_product(
    x,
    norm,
    weights,
    scales,
    bias,
    out,
    scale,
    outputs,
    N: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    THEN: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Grid: any number of programs if IN >= N, else one for each tile of rows. x [N]; out: as many
    numbers as the weights have rows, or half as many if gated; scale: the epsilon of the norm."""
    EACH: tl.constexpr = 1 if FORM == _PLAIN else 4 if FORM == _EIGHT else 8  # columns in a number
    T: tl.constexpr = IN // (8 * EACH if FORM == _PLAIN else 4 * EACH)  # 16 bytes of a row each
    results = outputs // 2 if THEN == _GATE else outputs
    zero = tl.minimum(outputs, 0)  # unknown to the compiler, see `_added`
    tile = tl.program_id(0)
    row = _rows_of(tile, results, OUT, THEN)
    ahead = _asked(weights, row, tile >= 0, 0, N, EACH, IN)
    pair_ahead = _asked_scales(scales, row, tile >= 0, 0, outputs, N, FORM, GROUP, T)
    if N <= IN:
        here = _read(x, 0, N, FORM, GROUP, IN)
        if norm is not None:
            by = _read(norm, 0, N, FORM, GROUP, IN)
            length = tl.rsqrt(_squares(here, FORM) / N + scale)
            here = _normed(here, by, length, x)
        spread = _spread(here, FORM)
        tiles = tl.cdiv(results, OUT // 2 if THEN == _GATE else OUT)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
            kept = ahead
            pair = pair_ahead
            beside = _beside(scales, bias, out, _rows_of(tile, results, OUT, THEN), FORM, THEN)
            following = tile + tl.num_programs(0)
            row = _rows_of(following, results, OUT, THEN)
            more = following < tiles
            ahead = _asked(weights, row, more, 0, N, EACH, IN)
            pair_ahead = _asked_scales(scales, row, more, 0, outputs, N, FORM, GROUP, T)
            total = tl.zeros([OUT, T], tl.float32)
            total = _added(total, kept, pair, spread, zero, FORM, T)
            _written(total, beside, bias, out, tile, results, FORM, THEN)
    else:
        beside = _beside(scales, bias, out, row, FORM, THEN)
        length = tl.full((), 0.0, tl.float32)
        if norm is not None:
            squares = tl.zeros([NORMED], tl.float32)
            for s in tl.static_range(0, N, NORMED):
                part = _columns(x, s + tl.arange(0, NORMED), N)
                squares += part * part
            length = tl.rsqrt(tl.sum(squares, 0) / N + scale)
        total = tl.zeros([OUT, T], tl.float32)
        for start in tl.range(0, N, IN):
            kept = ahead
            pair = pair_ahead
            after = start + IN
            ahead = _asked(weights, row, after < N, after, N, EACH, IN)
            pair_ahead = _asked_scales(scales, row, after < N, after, outputs, N, FORM, GROUP, T)
            here = _read(x, start, N, FORM, GROUP, IN)
            if norm is not None:
                here = _normed(here, _read(norm, start, N, FORM, GROUP, IN), length, x)
            total = _added(total, kept, pair, _spread(here, FORM), zero, FORM, T)
        _written(total, beside, bias, out, tile, results, FORM, THEN)


@dataclass(frozen=True, slots=True)
class Config:
    """rows: how many rows of the weights a program of `warps` warps multiplies at once; columns:
    how many of their columns. If that is a whole row, x stays in registers, and at most `programs`
    programs go through all rows; 0: one for each tile of rows."""

    rows: int
    columns: int
    warps: int
    programs: int = 0


CONFIGS = {PLAIN: Config(8, 1024, 4), EIGHT: Config(8, 1024, 2), FOUR: Config(4, 2048, 2)}
"""By format. Each thread has 16 bytes of each row at once."""
HELD = {EIGHT: Config(4, 4096, 8, 396), FOUR: Config(8, 4096, 8, 264)}
"""For rows of at most this many columns. These were the fastest on an H100, whose 132
multiprocessors then have two or three programs each (docs/measurements/gpu/)."""


def config_of(form: int, n: int) -> Config:
    """For weights of n columns."""
    held = HELD.get(form)
    return CONFIGS[form] if held is None or n > held.columns else held


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix and how it is multiplied. weights: those of the matrix, packed ones as int32; group:
    how many columns of four bits share a scale."""

    matrix: Matrix
    form: int
    group: int
    weights: Tensor
    scales: Tensor | None
    config: Config

    def __call__(
        self, x: Tensor, out: Tensor, then: int, norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        """Multiply x [1, n] and write the result to out [1, outs], or [1, outs / 2] if gated."""
        matrix, config = self.matrix, self.config
        results = matrix.outs // 2 if then == GATE else matrix.outs
        assert x.shape == (1, matrix.n)
        assert out.shape == (1, results)
        assert x.is_contiguous()
        assert out.is_contiguous()
        given = x, norm, self.weights, self.scales, matrix.bias, out, eps, matrix.outs
        sizes = tiles_of(config, matrix.n, self.form, self.group, norm is not None)
        grid = (programs_of(config, matrix.outs, matrix.n),)
        _row_product[grid](*given, THEN=then, **sizes, num_warps=config.warps, num_stages=1)
        return out


def programs_of(config: Config, outs: int, n: int) -> int:
    """How many programs multiply `outs` rows of n columns: chosen so that each has the same number
    of tiles."""
    tiles = -(-outs // config.rows)
    if not config.programs or config.columns < n:
        return tiles
    return -(-tiles // -(-tiles // config.programs))


def tiles_of(config: Config, n: int, form: int, group: int, normed: bool) -> dict[str, int]:
    """The constants of the kernel."""
    weights = {"N": n, "FORM": form, "GROUP": group, "OUT": config.rows}
    most = min(_AT_ONCE, power(n)) if normed else 0
    return {**weights, "IN": min(config.columns, power(n)), "NORMED": most}


@dataclass(frozen=True, slots=True)
class NormedProduct:
    """Called with x [1, n], it returns `product` times RMSNorm(x), [1, outs]; `norm` [n] has the
    weights of the norm."""

    product: Product
    norm: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See the class."""
        out = x.new_empty((1, self.product.matrix.outs))
        return self.product(x, out, KEEP, self.norm, self.eps)


@dataclass(frozen=True, slots=True)
class LayerTail:
    """The part of a layer after attention. A call takes x [1, hidden], the input of the layer, and
    mixed [1, heads * D], the output of attention, both in the dtype of the norms. It changes x in
    place to the input of the next layer, and returns that layer's queries, keys and values before
    rotation [1, outs of `following`], or the normed row [1, hidden] if there is no next layer."""

    out: Product
    gate_up: Product
    down: Product
    mlp_norm: Tensor
    following: NormedProduct | None
    next_norm: Tensor
    eps: float

    def __call__(self, x: Tensor, mixed: Tensor) -> Tensor:
        """See the class."""
        self.out(mixed, x, ADD)
        gated = x.new_empty((1, self.down.matrix.n))
        self.gate_up(x, gated, GATE, self.mlp_norm, self.eps)
        self.down(gated, x, ADD)
        if self.following is None:
            return add_norm(x, None, self.next_norm, self.eps)
        return self.following(x)


def layer_tail(
    out: Matrix,
    gate_up: Matrix,
    down: Matrix,
    following: Matrix | None,
    mlp_norm: Tensor,
    next_norm: Tensor,
    eps: float,
) -> LayerTail | None:
    """`LayerTail` of these matrices; None if these kernels do not support such matrices or norms.

    mlp_norm, next_norm: weights [hidden] of the norms before gate and up, and before `following`.
    """
    kind = mlp_norm.dtype
    first, second, third = (product_of(matrix, kind) for matrix in (out, gate_up, down))
    if first is None or second is None or third is None or not _norms(mlp_norm, out.outs):
        return None
    last = None if following is None else normed_product(following, next_norm, eps)
    if following is not None and (last is None or next_norm.dtype != kind):
        return None
    return LayerTail(first, second, third, mlp_norm, last, next_norm, eps)


def normed_product(matrix: Matrix, norm: Tensor, eps: float) -> NormedProduct | None:
    """`NormedProduct` of this matrix and norm; None if this kernel does not support them."""
    made = product_of(matrix, norm.dtype)
    if made is None or not _norms(norm, matrix.n):
        return None
    return NormedProduct(made, norm, eps)


def packed_row(matrix: Matrix, kind: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """A function of x [1, n] of dtype `kind`: x times this matrix plus its bias, [1, outs]; None if
    this kernel does not support the matrix."""
    made = product_of(matrix, kind)
    if made is None:
        return None
    return lambda x: made(x.contiguous(), x.new_empty((1, matrix.outs)), KEEP)


def product_of(matrix: Matrix, kind: torch.dtype, config: Config | None = None) -> Product | None:
    """The product of a row of dtype `kind` and the matrix; None if the kernel does not support
    it."""
    weights, scales = matrix.weights, matrix.scales
    beside = [part for part in (scales, matrix.bias) if part is not None]
    if kind not in (torch.bfloat16, torch.float16) or matrix.n % 16 or matrix.half:
        return None
    if not all(part.is_contiguous() for part in (weights, *beside)):
        return None
    form, group = PLAIN, 0
    if scales is None:
        if weights.dtype != kind:
            return None
    elif weights.dtype == torch.int8:
        form = EIGHT
    else:
        form, group = FOUR, matrix.n // len(scales)
        if scales.dtype != torch.bfloat16 or group < 32 or group & (group - 1):
            return None
        scales = scales.view(torch.int32)
    if form != PLAIN:
        weights = weights.view(torch.int32)
    return Product(matrix, form, group, weights, scales, config or config_of(form, matrix.n))


def _norms(norm: Tensor, size: int) -> bool:
    """Whether the kernel can apply this norm to a row of `size` columns."""
    return size <= _MOST and norm.shape == (size,) and norm.is_contiguous()
