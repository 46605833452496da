"""HashEvict's rows in Triton, as its rule in torch chooses them and torch writes them.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import torch
from hash_cases import LAYER, check, drawn
from triton_device import guarded, kernel, on_device

from minikv.kernels import NewRow
from minikv.policies.hashevict import HashEvict

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize(
    ("dtype", "bits", "size"),
    [
        (torch.float32, 8, 64),
        (torch.bfloat16, 15, 80),
        (torch.float32, 31, 96),
        (torch.bfloat16, 64, 128),
        (torch.float16, 3, 256),
        (torch.bfloat16, 16, 16),
    ],
    ids=str,
)
@pytest.mark.parametrize("more", ["", "columns", "int8"])
def test_victims_and_new_rows(dtype: torch.dtype, bits: int, size: int, more: str) -> None:
    """A head's rows are divided among programs, some of which have two tiles."""
    for seed in range(2):
        case = drawn(seed + bits, dtype, bits, exact=seed == 0, sizes=(size,), more=more)
        check(kernel("append.hash_gpu").hash_append, case, guarded, block=16 >> 2 * seed)


@on_device
@pytest.mark.parametrize("more", ["", "int8"])
def test_queries_and_keys_that_must_be_rotated_first(more: str) -> None:
    for seed in range(4):
        case = drawn(seed, torch.float32, 15, exact=False, sizes=(16, 80), more=more, turned=True)
        check(kernel("append.hash_gpu").hash_append, case, guarded, 1e-5, block=16)


@on_device
@pytest.mark.parametrize(("unlike", "left"), [(2, 3), (3, 3), (7, 7), (8, 3)])
def test_the_ends_that_hashevict_keeps_by_hand(unlike: int, left: int) -> None:
    """Of rows 0 to 9 the first three and the last two stay; the other rows are like the query."""
    pos = torch.tensor([4, 9, 1, 7, 3, 0, 8, 2, 6, 5], dtype=torch.int32)
    held = {"k": torch.zeros(10, 64), "v": torch.zeros(10, 64), "pos": pos}
    held["code"] = torch.where(pos == unlike, 0, 255)
    columns = {name: guarded(column) for name, column in held.items()}
    one, ten = torch.ones(1, 1, 64), torch.tensor([10])
    free_slot = guarded(torch.tensor([-1]))
    given = (guarded(t) for t in (one, one[0], one[0], ten - 10, ten, ten))
    matrix = guarded(torch.ones(64, 8))
    rule = HashEvict(sinks=3, recent=2, bits=8, hash_with="query", seed=0, matrices={LAYER: matrix})
    new = NewRow(LAYER, *given, free_slot, guarded(ten[0]), columns, 10, 0, columns["pos"])
    assert kernel("append.hash_gpu").hash_append(rule, new, block=16)
    assert pos[int(free_slot)] == left
    assert int(columns["pos"][int(free_slot)]) == 10
    assert int(columns["code"][int(free_slot)]) == 255
