"""HashEvict's rows in Triton, as torch chooses and writes them, in NaN-guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import math

import pytest
import step_oracle as twins
import torch
from ragged import in_use, segments
from triton_device import DEVICE, draw, guarded, kernel, on_device, randoms, untouched

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize(
    ("heads", "probes", "size", "bits", "dtype", "sinks", "pinned"),
    [
        (1, 1, 64, 8, torch.float32, 8, 0),
        (3, 4, 80, 15, torch.bfloat16, 0, 20),
        (5, 3, 96, 31, torch.float32, 25, 0),
        (2, 7, 128, 64, torch.bfloat16, 1, 5),
        (4, 2, 256, 3, torch.float16, 10**6, 0),
    ],
)
def test_hash_append(
    heads: int, probes: int, size: int, bits: int, dtype: torch.dtype, sinks: int, pinned: int
) -> None:
    """Heads with a free slot, heads that grow, full heads; of equal distances the oldest leaves."""
    lengths = [0 if h == 3 else 19 + 7 * h for h in range(heads)]
    start, length, rows = segments(lengths)
    cap = torch.tensor([n + (h % 3 == 1) for h, n in enumerate(lengths)]).clamp(min=1)
    free_slot = torch.tensor([int(start[h]) + 4 if h % 3 == 2 else -1 for h in range(heads)])
    kind = torch.int16 if bits < 16 else torch.int32 if bits < 32 else torch.int64
    used = in_use(start, length, rows)
    pos = torch.randperm(rows, generator=randoms(1)).to(torch.int32)
    code = torch.randint(0, 4, (rows,), generator=randoms(2)).to(kind)
    k, v = (draw(i, (rows, size), dtype) for i in (3, 4))
    k[~used] = v[~used] = math.nan
    given = [
        draw(5, (heads, probes, size), dtype),
        draw(6, (heads, size), dtype),
        draw(7, (heads, size), dtype),
        draw(8, (size, bits), torch.float32),
    ]
    outcomes = []
    for function, more in (
        (twins.hash_append, {}),
        (kernel("triton.hash_append").hash_append, {"block": 16}),
    ):
        mine = [guarded(t) for t in (k, v, pos, code)]
        undo_rows = tuple(guarded(torch.zeros((heads, *t.shape[1:]), dtype=t.dtype)) for t in mine)
        slots = guarded(free_slot)
        function(
            *(guarded(t) for t in (*given, start, length, cap)),
            slots,
            torch.tensor(rows, device=DEVICE),
            *mine,
            undo_rows,
            width=max(lengths),
            sinks=sinks,
            recent=rows // 3,
            pinned=pinned,
            **more,
        )
        assert all(untouched(t) for t in (*mine, *undo_rows, slots))
        outcomes.append([*mine, *undo_rows, slots])
    for got, want in zip(outcomes[1], outcomes[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert int(outcomes[1][-1][0]) >= 0  # the first head was full


@on_device
@pytest.mark.parametrize(("unlike", "left"), [(2, 3), (3, 3), (7, 7), (8, 3)])
def test_the_ends_that_hashevict_keeps_by_hand(unlike: int, left: int) -> None:
    """Of rows 0 to 9 the first three and the last two stay; the other rows are like the query."""
    pos = torch.tensor([4, 9, 1, 7, 3, 0, 8, 2, 6, 5], dtype=torch.int32)
    code = torch.where(pos == unlike, 0, 255)
    one = torch.ones((1, 1, 64))
    mine = [guarded(t) for t in (torch.zeros(10, 64), torch.zeros(10, 64), pos, code)]
    undo_rows = tuple(guarded(torch.zeros((1, *t.shape[1:]), dtype=t.dtype)) for t in mine)
    free_slot = guarded(torch.tensor([-1]))
    ten = torch.tensor([10])
    kernel("triton.hash_append").hash_append(
        *(guarded(t) for t in (one, one[0], one[0], torch.ones(64, 8), ten - 10, ten, ten)),
        free_slot,
        guarded(ten[0]),
        *mine,
        undo_rows,
        width=10,
        sinks=3,
        recent=2,
        pinned=0,
        block=16,
    )
    assert pos[int(free_slot)] == left
    assert int(undo_rows[2]) == left
    assert int(mine[2][int(free_slot)]) == 10
    assert int(mine[3][int(free_slot)]) == 255
