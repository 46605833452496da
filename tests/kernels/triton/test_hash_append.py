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
from triton_device import DEVICE, close, draw, guarded, kernel, on_device, randoms, untouched

pytest.importorskip("triton", reason="no Triton on this system")


@on_device
@pytest.mark.parametrize(
    ("heads", "probes", "size", "bits", "dtype", "sinks", "pinned", "least"),
    [
        (1, 1, 64, 8, torch.float32, 8, 0, 19),
        (3, 4, 80, 15, torch.bfloat16, 0, 20, 19),
        (5, 3, 96, 31, torch.float32, 25, 0, 4),
        (2, 7, 128, 64, torch.bfloat16, 1, 5, 19),
        (4, 2, 256, 3, torch.float16, 10**6, 0, 19),
        (3, 2, 16, 8, torch.float32, 3, 0, 320),  # some of its 16 programs have two tiles
    ],
)
def test_hash_append(
    heads: int,
    probes: int,
    size: int,
    bits: int,
    dtype: torch.dtype,
    sinks: int,
    pinned: int,
    least: int,
) -> None:
    """Heads with a free slot, heads that grow, full heads, divided among programs; of equal
    distances the oldest leaves."""
    lengths = [0 if h == 3 else least + 7 * h for h in range(heads)]
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
    arrived = guarded(torch.zeros(heads, dtype=torch.int32))
    for function, more in (
        (twins.hash_append, {}),
        (kernel("triton.hash_append").hash_append, {"block": 16, "arrived": arrived}),
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
        assert all(untouched(t) for t in (*mine, *undo_rows, slots, arrived))
        assert not arrived.any()
        outcomes.append([*mine, *undo_rows, slots])
    for got, want in zip(outcomes[1], outcomes[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert int(outcomes[1][-1][0]) >= 0  # the first head was full


@on_device
@pytest.mark.parametrize("coded", [False, True])
def test_codes_further_columns_and_rows_that_are_not_shown(coded: bool) -> None:
    """In int8 with scales; other columns become 0, and are put aside with the row that leaves."""
    heads, probes, size, bits = 4, 2, 64, 15
    start, length, rows = segments([23, 17, 30, 9])
    cap = length + torch.tensor([0, 0, 1, 0])
    free_slot = torch.tensor([-1, -1, -1, int(start[3]) + 2])
    pos = torch.randperm(rows, generator=randoms(1)).to(torch.int32)
    shown = torch.where(torch.rand(rows, generator=randoms(2)) < 0.4, -1, pos)
    code = torch.randint(0, 4, (rows,), generator=randoms(3)).to(torch.int16)
    k, v = (draw(i, (rows, size), torch.float32, 40.0) for i in (4, 5))
    if coded:
        k, v = k.to(torch.int8), v.to(torch.int8)
    kinds = [torch.float32] * (2 * coded) + [torch.float32, torch.int64, torch.bool]
    others = [torch.randint(1, 9, (rows,), generator=randoms(6)).to(kind) for kind in kinds]
    given = [
        draw(7, (heads, probes, size), torch.bfloat16),
        draw(8, (heads, size), torch.bfloat16, 3.0),
        draw(9, (heads, size), torch.bfloat16, 3.0),
        draw(10, (size, bits), torch.float32),
    ]
    outcomes = []
    for function, more in (
        (twins.hash_append, {}),
        (kernel("triton.hash_append").hash_append, {"block": 16}),
    ):
        mine = [guarded(t) for t in (k.clone(), v.clone(), pos, code)]
        further = [guarded(t) for t in others]
        undo_rows, undo_others = (
            [guarded(torch.zeros((heads, *t.shape[1:]), dtype=t.dtype)) for t in held]
            for held in (mine, further)
        )
        slots = guarded(free_slot)
        if coded:
            more = more | {"k_scale": further[0], "v_scale": further[1]}
        else:  # the rows are of the network's dtype
            mine[:2] = [guarded(t.to(torch.bfloat16)) for t in (k, v)]
            undo_rows[:2] = [guarded(torch.zeros(heads, size, dtype=torch.bfloat16))] * 2
            undo_rows[1] = undo_rows[0].clone()
        function(
            *(guarded(t) for t in (*given, start, length, cap)),
            slots,
            torch.tensor(rows, device=DEVICE),
            *mine,
            tuple(undo_rows),
            width=30,
            sinks=1,
            recent=3,
            pinned=2,
            shown=guarded(shown.to(torch.int32)),
            others=further,
            undo_others=undo_others,
            **more,
        )
        outcomes.append([*mine, *further, *undo_rows, *undo_others, slots])
    for got, want in zip(outcomes[1], outcomes[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert (outcomes[1][-1] >= 0).tolist() == [True, True, False, True]


@on_device
@pytest.mark.parametrize("keyed", [False, True])
def test_queries_and_keys_that_must_be_rotated_first(keyed: bool) -> None:
    heads, group, size, bits = 3, 4, 80, 15
    start, length, rows = segments([23, 17, 30])
    cap = length + torch.tensor([0, 1, 0])
    pos = torch.randperm(rows, generator=randoms(1)).to(torch.int32)
    code = torch.randint(0, 4, (rows,), generator=randoms(3)).to(torch.int16)
    k, v = (draw(i, (rows, size), torch.float32) for i in (4, 5))
    qkv = draw(6, (heads * (group + 2), size), torch.float32)
    angle = draw(7, (1, 1, size // 2), torch.float32, 3.0)
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin()), -1)
    outcomes = []
    for function, more in (
        (twins.hash_append, {}),
        (kernel("triton.hash_append").hash_append, {"block": 16}),
    ):
        mine = [guarded(t) for t in (k, v, pos, code)]
        undo_rows = [guarded(torch.zeros((heads, *t.shape[1:]), dtype=t.dtype)) for t in mine]
        slots = guarded(torch.full((heads,), -1))
        turned = guarded(torch.zeros((heads, group, size)))
        given = guarded(qkv)
        function(
            given[: -2 * heads].view(heads, group, size),
            given[-2 * heads : -heads],
            given[-heads:],
            *(guarded(t) for t in (draw(8, (size, bits), torch.float32), start, length, cap)),
            slots,
            torch.tensor(rows, device=DEVICE),
            *mine,
            tuple(undo_rows),
            width=30,
            sinks=1,
            recent=3,
            pinned=0,
            turn=(guarded(cos), guarded(sin), turned),
            keyed=keyed,
            **more,
        )
        assert all(untouched(t) for t in (*mine, *undo_rows, slots, turned))
        outcomes.append([turned, *mine, *undo_rows, slots])
    for got, want in zip(outcomes[1], outcomes[0], strict=True):
        close(got, want)
    assert (outcomes[1][-1] >= 0).tolist() == [True, False, True]


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
