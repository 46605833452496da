"""All layers of a decode step in Triton: five launches a layer. The one that multiplies queries,
keys and values also writes the new row (`append_product`). Then come attention and the three
products of `Rest.add`. Without it, the network calls each layer's attention and `Rest` one after
the other, in six launches, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from minikv.kernels.triton.append_product import append_product
from minikv.kernels.triton.decode import ragged_attention
from minikv.kernels.triton.rest import NormedProduct, Rest
from minikv.kernels.triton.step_arena import StepArena

Layers = Callable[[Tensor, None, Tensor, Tensor, StepArena], Tensor]
"""Takes x [1, hidden], the input of the first layer, None, cos and sin [1, 1, D], and the arena.
Returns x after the final norm [1, hidden]; x itself is overwritten."""


def layers(rests: Sequence[object], first: object) -> Layers | None:
    """All layers of a decode step, from the `Rest` of each and the `NormedProduct` before the first
    layer. None if they are not of Triton."""
    each = [rest for rest in rests if isinstance(rest, Rest)]
    between = [rest.following for rest in each[:-1] if rest.following is not None]
    if not isinstance(first, NormedProduct) or len(between) + 1 != len(rests):
        return None
    products = [first, *between]

    def compute(x: Tensor, qkv: None, cos: Tensor, sin: Tensor, arena: StepArena) -> Tensor:
        assert len(arena.layers) == len(each)
        for i, (product, rest) in enumerate(zip(products, each, strict=True)):
            query = append_product(product, x, cos, sin, arena, i)
            heads = arena.layers[i]
            mixed, _ = ragged_attention(
                query,
                arena.k,
                arena.v,
                heads.start,
                heads.length,
                width=0,
                pos=arena.pos,
                oldest=heads.oldest,
                logits=heads.logits,
                lse=heads.lse,
                arrived=arena.arrived,
            )
            rest.add(x, mixed.view(1, -1))
        return each[-1].normed(x)

    return compute
