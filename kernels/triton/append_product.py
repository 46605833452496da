"""The product of a normed row and the matrix for queries, keys and values, in Triton, with what
`rotate_append` does with it, in one launch. Specification: `rest.NormedProduct`, then
`torch.append.rotate_append` without scales. The numbers are the same.

Rotation combines numbers d and d + D / 2 of a head. So a program computes a few numbers of a head's
lower half and those of the upper half that belong to them. Values are written as they are. The
program that has number 0 of a key also writes the position and the other columns of the new row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.layer import rounded
from minikv.kernels.triton.rest import (
    CONFIGS,
    EIGHT,
    FOUR,
    PLAIN,
    NormedProduct,
    multiplied,
    summed,
    tiles_of,
)
from minikv.kernels.triton.step_arena import StepArena
from minikv.kernels.triton.tiles import typed
from minikv.kernels.triton.variants import WIDE, Variant


@triton.jit(do_not_specialize=["outputs"], do_not_specialize_on_alignment=["slot", "position"])
def _append_product(
    x,
    norm,
    weights,
    scales,
    bias,
    cos,
    sin,
    slot,
    position,
    k,
    v,
    pos,
    blank,
    query,
    scale,
    outputs,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (outputs / 2 / OUT,); OUT divides D / 2. x, norm [N], weights [outputs, N] with scales
    and bias; cos to blank: the arguments of `rotate_append`; query [H, G, D] gets the rotated
    queries; scale: the epsilon of the norm."""
    HALF: tl.constexpr = D // 2
    head = tl.program_id(0) // (HALF // OUT)  # all queries, then all keys, then all values
    begin = tl.program_id(0) % (HALF // OUT) * OUT
    d = begin + tl.arange(0, OUT)
    # No row is beyond the last one. But where the compiler knows that rows follow each other, it
    # takes more registers, and reads scales of four bits in another order.
    lower = tl.minimum(head * D + d, outputs - 1)
    upper = tl.minimum(head * D + HALF + d, outputs - 1)
    one, two = multiplied(
        x, norm, weights, scales, scale, lower, upper, outputs, N, FORM, GROUP, IN, NORMED, EARLY
    )
    at = tl.load(slot + (head - H * G) % H, mask=head >= H * G, other=0) * D
    c1 = tl.load(cos + d).to(tl.float32)
    c2 = tl.load(cos + HALF + d).to(tl.float32)
    s1 = tl.load(sin + d).to(tl.float32)
    s2 = tl.load(sin + HALF + d).to(tl.float32)
    one = summed(one, scales, bias, lower, query, FORM)
    two = summed(two, scales, bias, upper, query, FORM)
    if head >= H * G + H:
        tl.store(v + at + d, one.to(v.dtype.element_ty))
        tl.store(v + at + HALF + d, two.to(v.dtype.element_ty))
    else:
        # Rounded where torch's operators round, as in `append.turned_rows`.
        low = rounded(one * c1, query) + two * s1
        high = rounded(two * c2, query) + one * s2
        if head < H * G:
            tl.store(query + head * D + d, low.to(query.dtype.element_ty))
            tl.store(query + head * D + HALF + d, high.to(query.dtype.element_ty))
        else:
            tl.store(k + at + d, low.to(k.dtype.element_ty))
            tl.store(k + at + HALF + d, high.to(k.dtype.element_ty))
            if begin == 0:
                row = at // D
                for i in tl.static_range(len(blank)):
                    tl.store(blank[i] + row, tl.zeros((), tl.int32).to(blank[i].dtype.element_ty))
                tl.store(pos + row, tl.load(position).to(tl.int32))


def append_product(
    normed: NormedProduct, x: Tensor, cos: Tensor, sin: Tensor, arena: StepArena, layer: int
) -> Tensor:
    """Write the new row of each head of a layer, whose input is x [1, n]. cos and sin [1, 1, D].
    Returns the rotated queries [H, G, D]."""
    product, slot = normed.product, arena.layers[layer].slot
    matrix, config = product.matrix, product.config
    heads, size = len(slot), arena.k.shape[1]
    group = matrix.outs // size // heads - 2
    assert x.shape == (1, matrix.n)
    assert matrix.outs == heads * (group + 2) * size
    assert all(t.is_contiguous() for t in (x, cos, sin, slot, arena.k, arena.v))
    tiles = tiles_of(config, matrix.n, product.form, product.group, True, True, product.early)
    assert size // 2 % tiles["OUT"] == 0
    query = x.new_empty((heads, group, size))
    _append_product[(matrix.outs // 2 // tiles["OUT"],)](
        x,
        normed.norm,
        matrix.weights,
        product.scales,
        matrix.bias,
        cos,
        sin,
        slot,
        arena.position,
        arena.k,
        arena.v,
        arena.pos,
        arena.blank,
        query,
        normed.eps,
        matrix.outs,
        H=heads,
        G=group,
        D=size,
        **tiles,
        **product.options,
        num_warps=config.warps,
        num_stages=1,
    )
    return query


_BUILDS = (
    ("plain", PLAIN, 128, ("*fp32",)),
    ("plain-scissorhands", PLAIN, 128, (*("*i64",) * 13, "*fp32")),
    ("plain", PLAIN, 80, ()),
    ("plain", PLAIN, 256, ()),
    ("int8", EIGHT, 128, ("*fp32",)),
    ("int4", FOUR, 128, ("*fp32",)),
)
"""Format of the weights, head size, and columns in which the new row becomes 0."""


def variants() -> list[Variant]:
    """Builds for the compile gate: models of 4,096 columns and 8 KV heads of 4 queries."""
    found = []
    for name, form, size, blank in _BUILDS:
        constants: dict[str, object] = {
            **tiles_of(CONFIGS[form], 4096, form, 128 if form == FOUR else 0, True, True),
            **{"H": 8, "G": 4, "D": size},
            "bias": None,
        }
        kinds: dict[str, str | tuple[str, ...]] = {
            **dict.fromkeys(("x", "norm", "cos", "sin", "k", "v", "query"), "*bf16"),
            **{"slot": "*i64", "position": "*i64", "pos": "*i32", "blank": blank},
            "weights": {PLAIN: "*bf16", EIGHT: "*i8", FOUR: "*u8"}[form],
        }
        if form == PLAIN:
            constants["scales"] = None
        else:
            kinds["scales"] = "*bf16" if form == EIGHT else "*i32"
        found.append(
            Variant(
                f"append-product-{name}-{size}",
                _append_product,
                typed(_append_product, kinds, constants),
                constants,
                CONFIGS[form].warps,
                1,
                reads={"weights": WIDE, "x": WIDE, "norm": WIDE},
            )
        )
    return found
