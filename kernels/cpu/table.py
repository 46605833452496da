"""The C kernels in the places of their twins. Importing this compiles nothing; `choose` does."""

from __future__ import annotations

import torch

from minikv.kernels.cpu import evict, prefill, product, step
from minikv.kernels.dispatch import Kernels


class Native(Kernels):
    """Operations of `Kernels` by their C kernel."""

    name = "native"

    def __init__(self) -> None:
        # Compiled without threads, they would leave all but one of the processors idle.
        self.products = product.threads() > 1 or torch.get_num_threads() == 1

    ragged_attention = staticmethod(step.ragged_attention)
    advance = staticmethod(step.advance)
    append = staticmethod(step.append)
    hash_append = staticmethod(evict.hash_append)
    h2o_step = staticmethod(evict.h2o_step)
    tova_step = staticmethod(evict.tova_step)
    roco_step = staticmethod(evict.roco_step)
    scissorhands_step = staticmethod(evict.scissorhands_step)
    rows_attention = staticmethod(prefill.rows_attention)
    segments_attention = staticmethod(prefill.segments_attention)
    last_rows_attention = staticmethod(prefill.last_rows_attention)
    add_norm = staticmethod(step.add_norm)
    rotate = staticmethod(step.rotate)
    silu_mul = staticmethod(step.silu_mul)
    int8_product = staticmethod(product.int8_product)
    row_product = staticmethod(product.row_product)
