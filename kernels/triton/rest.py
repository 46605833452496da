"""What follows attention in a layer of a decode step, in Triton. There are four launches; each is
the product of one row and a matrix, with the operations before and after it.

    out        x += W mixed
    gate, up   silu(gate) * up of W norm(x)
    down       x += W (silu(gate) * up)
    following  W norm(x): queries, keys and values of the next layer

A step reads every weight once, so reading takes the time. A program has a few rows of the weights
and reads them completely, 16 bytes a thread; it loads the next columns while it multiplies the
present ones. The row x is small and comes from a cache; a thread loads the part of it that its
weights need. One program makes each sum, in a fixed order, so results are reproducible. The format
of the weights matters only where they are unpacked (`_added`).

Numbers are rounded where the separate calls round them: the norm before and after its weight, the
product, silu and the sum with x. Packed weights are multiplied in float32 without rounding;
packed_product.py and models/linear_gpu.py round weights of four bits to bfloat16 first. A bias is
added in float32, before the product is rounded.

A product can be launched before the kernel in front of it has ended (programmatic dependent launch,
on compute capability 9.0 and later). Then it loads its first weights, which no kernel changes, and
waits for that kernel before it touches anything else. See `EARLY`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.matrix import Matrix
from minikv.kernels.triton.layer import add_norm, rounded
from minikv.kernels.triton.tiles import power, typed
from minikv.kernels.triton.variants import WIDE, Variant

PLAIN, EIGHT, FOUR = range(3)
"""The formats of weights."""
KEEP, ADD, GATE = range(3)
"""What is done with a product: it is the result, or it is added to `out`, or it is the gate of a
second product."""
_PLAIN, _EIGHT, _FOUR = tl.constexpr(PLAIN), tl.constexpr(EIGHT), tl.constexpr(FOUR)
_ADD, _GATE = tl.constexpr(ADD), tl.constexpr(GATE)
EARLY = False
"""Whether a step launches its products early, where the device can. Not measured yet: True is right
where `early_by_own` of tests/gpu/probe.py is below 1."""
_MOST = 16384  # the most columns of a row that is normed
_AT_ONCE = 4096  # how many of these columns are read at once


@triton.jit
def _asked(weights, row, start, N: tl.constexpr, EACH: tl.constexpr, IN: tl.constexpr):
    """The stored numbers of columns start to start + IN - 1 of rows [OUT]; a number holds EACH
    columns."""
    j = start // EACH + tl.arange(0, IN // EACH)
    at = row.to(tl.int64)[:, None] * (N // EACH) + j[None, :]
    return tl.load(weights + at, mask=(j < N // EACH)[None, :], other=0)


@triton.jit
def _columns(x, norm, length, j, N: tl.constexpr):
    """Columns j of the row x. If there is a norm, they are multiplied by `length` and the norm."""
    here = tl.load(x + j, mask=j < N, other=0.0).to(tl.float32)
    if norm is not None:
        by = tl.load(norm + j, mask=j < N, other=0.0).to(tl.float32)
        here = rounded(rounded(here * length, x) * by, x)
    return here


@triton.jit
def _halves(kept, T: tl.constexpr):
    """Split the 16 bytes of each thread, [OUT, T * 16], into the first 8 and the last 8, [OUT, T,
    8] each."""
    each = tl.reshape(kept, [kept.shape[0], T, 2, 8])
    return tl.split(tl.permute(each, (0, 1, 3, 2)))


@triton.jit
def _dot(w, x):
    """[OUT, T, 8] times [T, 8], summed over the columns of a thread: [OUT, T]."""
    return tl.sum(w.to(tl.float32) * x[None, :, :], 2)


@triton.jit
def _added(
    total,
    kept,
    x0,
    x1,
    x2,
    x3,
    scales,
    row,
    outputs,
    start,
    N: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    T: tl.constexpr,
):
    """`total` [OUT, T] plus the products of the weights that `_asked` loaded and the columns of x,
    [T, 8] each, that belong to them."""
    if FORM == _FOUR:
        first, second = _halves(kept, T)
        sums = _dot(first & 15, x0) + _dot(second & 15, x1)
        sums += _dot(first >> 4, x2) + _dot(second >> 4, x3)
        g = start // GROUP + tl.arange(0, T) // (GROUP // 32)
        # Scale and offset of a group in one number: the scale is its lower half.
        pair = tl.load(
            scales + g.to(tl.int64)[None, :] * outputs + row[:, None],
            mask=(g < N // GROUP)[None, :],
            other=0,
        )
        by = (pair << 16).to(tl.float32, bitcast=True)
        least = (pair & -65536).to(tl.float32, bitcast=True) - 8.0 * by
        total += sums * by + tl.sum(x0 + x1 + x2 + x3, 1)[None, :] * least
    elif FORM == _EIGHT:
        first, second = _halves(kept, T)
        total += _dot(first, x0) + _dot(second, x1)
    else:
        total += _dot(tl.reshape(kept, [kept.shape[0], T, 8]), x0)
    return total


@triton.jit
def multiplied(
    x,
    norm,
    weights,
    scales,
    scale,
    row,
    second,
    outputs,
    N: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    IN: tl.constexpr,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The sums [OUT, T] of rows `row` [OUT] of the weights, and those of rows `second`, if there
    are such rows. `summed` makes the products of them. scale: the epsilon of the norm."""
    EACH: tl.constexpr = 2 if FORM == _FOUR else 1  # columns in a number
    WIDTH: tl.constexpr = 8 * (1 if FORM == _PLAIN else 2) * EACH  # columns in 16 bytes
    T: tl.constexpr = IN // WIDTH
    ahead = _asked(weights, row, 0, N, EACH, IN)
    total = tl.zeros([row.shape[0], T], tl.float32)
    if second is not None:
        second_ahead = _asked(weights, second, 0, N, EACH, IN)
        second_total = tl.zeros([row.shape[0], T], tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # all but the weights belongs to the kernels in front until here
        tl.extra.cuda.gdc_launch_dependents()
    length = tl.full((), 0.0, tl.float32)
    if norm is not None:
        squares = tl.zeros([NORMED], tl.float32)
        for s in tl.static_range(0, N, NORMED):
            here = _columns(x, None, length, s + tl.arange(0, NORMED), N)
            squares += here * here
        length = tl.rsqrt(tl.sum(squares, 0) / N + scale)
    t = tl.arange(0, T)
    begins = t * WIDTH
    if FORM == _FOUR:  # 16 bytes have as many columns of a group's lower half, and of the upper one
        begins = t // (GROUP // 32) * GROUP + t % (GROUP // 32) * 16
    columns = begins[:, None] + tl.arange(0, 8)[None, :]
    for start in tl.range(0, N, IN):
        kept = ahead
        ahead = _asked(weights, row, start + IN, N, EACH, IN)
        x0 = _columns(x, norm, length, start + columns, N)
        x1 = x0
        x2 = x0
        x3 = x0
        if FORM != _PLAIN:
            x1 = _columns(x, norm, length, start + columns + 8, N)
        if FORM == _FOUR:
            x2 = _columns(x, norm, length, start + columns + GROUP // 2, N)
            x3 = _columns(x, norm, length, start + columns + GROUP // 2 + 8, N)
        total = _added(total, kept, x0, x1, x2, x3, scales, row, outputs, start, N, FORM, GROUP, T)
        if second is not None:
            kept = second_ahead
            second_ahead = _asked(weights, second, start + IN, N, EACH, IN)
            second_total = _added(
                second_total,
                kept,
                x0,
                x1,
                x2,
                x3,
                scales,
                second,
                outputs,
                start,
                N,
                FORM,
                GROUP,
                T,
            )
    if second is None:
        second_total = total
    return total, second_total


@triton.jit
def summed(total, scales, bias, row, out, FORM: tl.constexpr):
    """The product of each row with its scale and bias, rounded to the dtype of `out`."""
    made = tl.sum(total, 1)
    if FORM == _EIGHT:
        made *= tl.load(scales + row).to(tl.float32)
    if bias is not None:
        made += tl.load(bias + row).to(tl.float32)
    return rounded(made, out)


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
    EARLY: tl.constexpr,
):
    """Grid (rows of the result / OUT,). x [N]; out: as many numbers as the weights have rows, or
    half as many if gated; scale: the epsilon of the norm."""
    results = outputs // 2 if THEN == _GATE else outputs
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row = tl.minimum(n, results - 1)  # beyond the last row it is read again, and not written
    up = row + results if THEN == _GATE else None
    total, up_total = multiplied(
        x, norm, weights, scales, scale, row, up, outputs, N, FORM, GROUP, IN, NORMED, EARLY
    )
    made = summed(total, scales, bias, row, out, FORM)
    if THEN == _GATE:
        gate = rounded(made / (1.0 + tl.exp(-made)), out)
        made = gate * summed(up_total, scales, bias, row + results, out, FORM)
    if THEN == _ADD:
        made += tl.load(out + row).to(tl.float32)
    tl.store(out + n, made.to(out.dtype.element_ty), mask=n < results)


@dataclass(frozen=True, slots=True)
class Config:
    """rows: how many rows of the result a program of `warps` warps computes; columns: how many it
    reads at once."""

    rows: int
    columns: int
    warps: int


CONFIGS = {PLAIN: Config(8, 1024, 4), EIGHT: Config(4, 2048, 4), FOUR: Config(4, 4096, 4)}
"""Each thread has 16 bytes of each row at once. A gated result has half as many rows."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix and how it is multiplied: `group` columns of four bits share a scale. early: launch
    before the kernel in front has ended."""

    matrix: Matrix
    form: int
    group: int
    scales: Tensor | None
    config: Config
    early: bool = False

    @property
    def options(self) -> dict[str, bool]:
        """Of the launch. Not every backend has this one."""
        return {"launch_pdl": True} if self.early else {}

    def __call__(
        self, x: Tensor, out: Tensor, then: int, norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        """x [1, n], and what the product becomes in out [1, outs], [1, outs / 2] gated ones."""
        matrix, config = self.matrix, self.config
        results = matrix.outs // 2 if then == GATE else matrix.outs
        assert x.shape == (1, matrix.n)
        assert out.shape == (1, results)
        assert x.is_contiguous()
        assert out.is_contiguous()
        two, normed = then == GATE, norm is not None
        tiles = tiles_of(config, matrix.n, self.form, self.group, two, normed, self.early)
        _row_product[(-(-results // tiles["OUT"]),)](
            x,
            norm,
            matrix.weights,
            self.scales,
            matrix.bias,
            out,
            eps,
            matrix.outs,
            THEN=then,
            **tiles,
            **self.options,
            num_warps=config.warps,
            num_stages=1,
        )
        return out


def tiles_of(
    config: Config, n: int, form: int, group: int, two: bool, normed: bool, early: bool = False
) -> dict[str, int | bool]:
    """The constants of `multiplied`. two: a program multiplies two sets of OUT rows."""
    return {
        "N": n,
        "FORM": form,
        "GROUP": group,
        "OUT": config.rows // 2 if two else config.rows,
        "IN": min(config.columns, power(n)),
        "NORMED": min(_AT_ONCE, power(n)) if normed else 0,
        "EARLY": early,
    }


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
class Rest:
    """What follows attention in a layer. Called with x [1, hidden], the input of the layer, and
    mixed [1, heads * D], the output of attention, both in the dtype of the norms, it changes x, in
    place, to the input of the next layer, and returns that layer's queries, keys and values before
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
        self.add(x, mixed)
        return self.normed(x) if self.following is None else self.following(x)

    def add(self, x: Tensor, mixed: Tensor) -> None:
        """Change x to the input of the next layer."""
        self.out(mixed, x, ADD)
        gated = x.new_empty((1, self.down.matrix.n))
        self.gate_up(x, gated, GATE, self.mlp_norm, self.eps)
        self.down(gated, x, ADD)

    def normed(self, x: Tensor) -> Tensor:
        """The row after the norm that follows the layer, [1, hidden]."""
        return add_norm(x, None, self.next_norm, self.eps)


def rest(
    out: Matrix,
    gate_up: Matrix,
    down: Matrix,
    following: Matrix | None,
    mlp_norm: Tensor,
    next_norm: Tensor,
    eps: float,
    early: bool = EARLY,
) -> Rest | None:
    """`Rest` of these matrices; None: these kernels do not take such matrices or norms.

    mlp_norm, next_norm: weights [hidden] of the norms before gate and up, and before `following`.
    early: launch the products early, where the device can.
    """
    kind = mlp_norm.dtype
    made = [product_of(matrix, kind, early=early) for matrix in (out, gate_up, down)]
    first, second, third = made
    if first is None or second is None or third is None or not _norms(mlp_norm, out.outs):
        return None
    last = None if following is None else normed_product(following, next_norm, eps, early)
    if following is not None and (last is None or next_norm.dtype != kind):
        return None
    return Rest(first, second, third, mlp_norm, last, next_norm, eps)


def normed_product(
    matrix: Matrix, norm: Tensor, eps: float, early: bool = EARLY
) -> NormedProduct | None:
    """`NormedProduct` of this matrix and norm; None: this kernel does not take them. early: see
    `rest`."""
    made = product_of(matrix, norm.dtype, early=early)
    if made is None or not _norms(norm, matrix.n):
        return None
    return NormedProduct(made, norm, eps)


def product_of(
    matrix: Matrix, kind: torch.dtype, config: Config | None = None, early: bool = EARLY
) -> Product | None:
    """The product of a row of dtype `kind` and the matrix; None if the kernel does not take it."""
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
    early = early and launches_early(weights.device)
    return Product(matrix, form, group, scales, config or CONFIGS[form], early)


def launches_early(device: torch.device) -> bool:
    """Whether kernels can be launched there before the kernel in front has ended."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    has_wait = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")  # not every Triton
    return has_wait and torch.cuda.get_device_capability(device) >= (9, 0)


def _norms(norm: Tensor, size: int) -> bool:
    """Whether the kernel can apply this norm to a row of `size` columns."""
    return size <= _MOST and norm.shape == (size,) and norm.is_contiguous()


_KINDS = {PLAIN: "*bf16", EIGHT: "*i8", FOUR: "*u8"}
_NAMES = {PLAIN: "plain", EIGHT: "int8", FOUR: "int4"}
_BUILDS = (
    ("out", 4096, ADD, False),
    ("gate-up", 4096, GATE, True),
    ("down", 14336, ADD, False),
    ("qkv", 4096, KEEP, True),
)
"""The four products of an 8B model: columns, what is done with the product, whether x is normed."""


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    found = []
    for form, stored in _KINDS.items():
        for name, n, then, normed in _BUILDS:
            group = 128 if form == FOUR else 0
            constants: dict[str, object] = {
                **tiles_of(CONFIGS[form], n, form, group, then == GATE, normed),
                "THEN": then,
                "bias": None,
            }
            kinds = {"x": "*bf16", "weights": stored, "out": "*bf16"}
            if normed:
                kinds["norm"] = "*bf16"
            else:
                constants["norm"] = None
            if form == PLAIN:
                constants["scales"] = None
            else:
                kinds["scales"] = "*bf16" if form == EIGHT else "*i32"
            found.append(
                Variant(
                    f"row-product-{_NAMES[form]}-{name}",
                    _row_product,
                    typed(_row_product, kinds, constants),
                    constants,
                    CONFIGS[form].warps,
                    1,
                    reads={"weights": WIDE, "x": WIDE} | ({"norm": WIDE} if normed else {}),
                )
            )
    return found
