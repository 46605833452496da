"""The C kernels in the places of their twins. Importing this compiles nothing; `choose` does."""

from __future__ import annotations

from minikv.kernels.dispatch import Kernels
from minikv.kernels.native import product, step


class Native(Kernels):
    """Operations of `Kernels` by their C kernel."""

    name = "native"
    ragged_attention = staticmethod(step.ragged_attention)
    advance = staticmethod(step.advance)
    append = staticmethod(step.append)
    add_norm = staticmethod(step.add_norm)
    rotate = staticmethod(step.rotate)
    silu_mul = staticmethod(step.silu_mul)
    int8_product = staticmethod(product.int8_product)
