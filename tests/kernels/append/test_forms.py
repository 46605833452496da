"""The row of a new token in every form, as torch writes it, in guarded memory; and HashEvict's rows
as its rule in torch chooses them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import step_oracle
import torch
from forms import Form, forms, needs_c
from pairwise import pairwise, some_by_day
from tensors import absurd, angles, guarded, in_use, randoms, untouched
from torch import Tensor
from triton_device import INTERPRETED, close, kernel, on_device
from triton_device import guarded as place

from minikv.kernels import Advancing, NewRow, Slots
from minikv.kernels.append import cpu as native
from minikv.kernels.append import plain
from minikv.policies.hashevict import HashEvict

LAYER = 3
Place = Callable[[Tensor], Tensor]
_PLACED = "query", "key", "value", "start", "length", "cap", "free_slot", "position"


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of a kernel."""

    rule: HashEvict
    new: NewRow


def run(
    kernel: Callable[..., bool], case: Case, place: Place, **more: int
) -> tuple[bool, dict[str, Tensor]]:
    """What a kernel returns and writes."""
    new = case.new
    columns = {name: place(column) for name, column in new.columns.items()}
    shown = columns["pos"] if new.shown is new.columns["pos"] else place(new.shown)
    rotation = None if new.rotation is None else tuple(map(place, new.rotation))
    arrived = place(torch.zeros(len(new.key), dtype=torch.int32))
    there = {name: place(getattr(new, name)) for name in _PLACED}
    there |= {"columns": columns, "shown": shown, "rotation": rotation, "arrived": arrived}  # type: ignore[dict-item]
    matrix = place(case.rule.matrix(LAYER, new.key))
    took = kernel(replace(case.rule, matrices={LAYER: matrix}), replace(new, **there), **more)  # type: ignore[arg-type]
    written = columns | {"free_slot": there["free_slot"]}
    if rotation is not None:
        written["turned"] = rotation[2]
    assert all(untouched(t) for t in (*written.values(), arrived))
    assert not arrived.any()
    for name in _PLACED:
        assert name == "free_slot" or torch.equal(there[name].cpu(), getattr(new, name)), name
    return took, {name: t.cpu() for name, t in written.items()}


def check(
    kernel: Callable[..., bool], case: Case, place: Place, loose: float = 0.0, **more: int
) -> None:
    """The kernel chooses and writes what the rule chooses and torch writes."""
    _, want = run(step_oracle.hash_append, case, guarded)
    took, got = run(kernel, case, place, **more)
    assert took
    for name, t in want.items():
        assert got[name].dtype == t.dtype
        torch.testing.assert_close(got[name], t, rtol=loose, atol=loose, equal_nan=True, msg=name)


def drawn(
    seed: int,
    dtype: torch.dtype,
    bits: int,
    *,
    exact: bool,
    sizes: Sequence[int] = (5, 16, 64, 80, 129),
    more: str = "",
    turned: bool = False,
) -> Case:
    """Heads with a free slot, heads that grow and heads that are full, one of them without a row.

    exact: entries of queries, keys and matrix are small whole numbers (of 2^-24 in float16: half of
    what it has below its normal numbers), so that every order of summing gives the same, often 0.
    Otherwise products are well away from 0. more: "columns" for further ones, of rows of which some
    leave last; "int8" for these and rows in int8. turned: queries and keys are not rotated yet.
    """
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads, group, size = pick.randint(1, 5), pick.randint(1, 7), pick.choice(sizes)
    length = torch.tensor([pick.choice((0, 1, 2, 19, 40, 77)) for _ in range(heads)])
    length[0] = 40
    start = (length + 3).cumsum(0) - length
    rows = int(start[-1] + length[-1]) + 3
    cap, free_slot = length.clone(), torch.full((heads,), -1)
    for h in range(1, heads):  # the first one is full
        kind = pick.choice(("free", "grows", "full", "full"))
        if kind == "grows":
            cap[h] += 1
        elif kind == "free" and length[h] > 0:
            free_slot[h] = start[h] + length[h] // 2
    used = in_use(start, length, rows)
    pos = torch.randperm(rows, generator=generator).to(torch.int32)
    # As `HashEvict.columns`: only a code of 64 bits has none to spare for the sign.
    wide = torch.int16 if bits < 16 else torch.int32 if bits < 32 else torch.int64
    x, matrix = normal(heads, group + 1, size).to(dtype), normal(size, bits)
    if exact:
        unit, most = (2.0**-24, 1500) if dtype == torch.float16 else (1.0, 4)
        whole = torch.randint(-most, most + 1, x.shape, generator=generator)
        x = (whole * unit).to(dtype)
        matrix = torch.randint(-1, 2, (size, bits), generator=generator).float()
    while not (exact or bool(((x.double() @ matrix.double()).abs() > 1e-5).all())):
        x, matrix = normal(heads, group + 1, size).to(dtype), normal(size, bits)
    code = torch.randint(0, 1 << min(bits, 4), (rows,), generator=generator).to(wide)
    if bits == 64:
        code[::3] = -1 - code[::3]
    stored = torch.int8 if more == "int8" else dtype
    k, v = ((normal(rows, size) * 9).to(stored) for _ in range(2))
    if stored == dtype:
        k[~used] = v[~used] = math.nan
    code[~used], pos[~used] = absurd(wide), absurd(torch.int32)  # type: ignore[call-overload]
    columns, shown = {"k": k, "v": v, "pos": pos, "code": code}, pos
    if more:
        kinds = {"sum": torch.float32, "seen": torch.int64, "leaves_last": torch.bool}
        kinds |= dict.fromkeys(["k_scale", "v_scale"] * (more == "int8"), torch.float32)
        columns |= {name: torch.ones(rows, dtype=kind) for name, kind in kinds.items()}
        shown = pos.where(torch.rand(rows, generator=generator) < 0.6, -1)
    rotation = None
    if turned:
        angle = normal(1, 1, size // 2) * 3
        cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
        rotation = cos.to(dtype), sin.to(dtype), torch.zeros(heads, group, size, dtype=dtype)
    vectors = x[:, :-1].contiguous(), x[:, -1].contiguous(), normal(heads, size).to(dtype)
    tables = start, length, cap, free_slot, torch.tensor(rows)
    width, pinned = int(length.max()) + 2, pick.choice((0, 9))
    new = NewRow(LAYER, *vectors, *tables, columns, width, pinned, shown, rotation)
    sinks, recent = pick.choice((0, 5, 10**6)), pick.choice((0, 1, rows // 3))
    by, matrices = pick.choice(("query", "key")), {LAYER: matrix}
    rule = HashEvict(sinks=sinks, recent=recent, bits=bits, hash_with=by, seed=0, matrices=matrices)
    return Case(rule, new)


KINDS = (torch.float32, torch.int16, torch.int32, torch.int64, torch.bool)


def arena(form: Form, rows: int, size: int, dtype: torch.dtype, coded: bool) -> list[Any]:
    """k, v, pos, the further columns in `KINDS`, and two scales or None, all with a number."""
    stored = torch.int8 if coded else dtype
    k, v = (form.place(torch.full((rows, size), 3).to(stored)) for _ in range(2))
    pos = form.place(torch.full((rows,), 5, dtype=torch.int32))
    blank = [form.place(torch.ones(rows, dtype=kind)) for kind in KINDS]
    scales = [form.place(torch.full((rows,), 9.0)) if coded else None for _ in range(2)]
    return [k, v, pos, blank, *scales]


def flat(columns: list[Any]) -> list[Tensor]:
    k, v, pos, blank, *scales = columns
    return [t.cpu() for t in (k, v, pos, *blank, *scales) if t is not None]


@pytest.mark.parametrize("form", forms("rotate_append", torch_too=False))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "group", "size", "coded"),
    [(1, 1, 64, False), (5, 3, 80, True), (3, 4, 256, False), (3, 2, 20, True)],
)
def test_rotate_append(
    form: Form, heads: int, group: int, size: int, coded: bool, dtype: torch.dtype
) -> None:
    """Queries and keys as `rotate` makes them; what is written is what `append` writes of them."""
    rows = 3 * heads + 2
    qkv = randoms(1, heads * (group + 2), size, dtype=dtype, by=3.0)
    qkv[-1] = 0.0
    cos, sin = angles(2, 1, size, dtype)
    slot = torch.randperm(rows, generator=torch.Generator().manual_seed(3))[:heads]
    given = [qkv, cos, sin, slot, torch.tensor(41)]
    ours = arena(form, rows, size, dtype, coded)
    qkv_, cos_, sin_, *at = map(form.place, given)
    query, key = form(qkv_, cos_, sin_, Slots(*at, *ours))
    assert (query.shape, key.shape) == ((heads, group, size), (heads, size))
    assert all(untouched(t) for t in (*ours[:3], *ours[3], *ours[4:]) if t is not None)
    torchs = Form("torch", lambda: plain.append)
    theirs = arena(torchs, rows, size, dtype, coded)
    more = arena(torchs, rows, size, dtype, coded)
    want = plain.rotate_append(qkv, cos, sin, Slots(slot, torch.tensor(41), *more))
    for got, wanted in zip((query, key), want, strict=True):
        close(got, wanted, 1e-5 if dtype == torch.float32 else 2e-2)
    plain.append(key.cpu(), qkv[-heads:], Slots(slot, torch.tensor(41), *theirs))
    for one, two in zip(flat(ours), flat(theirs), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("form", forms("append"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coded", [False, True])
def test_append(form: Form, dtype: torch.dtype, coded: bool) -> None:
    """By index, one head after the other; of codes each is within half a step."""
    heads, size, rows = 3, 20, 40
    both = randoms(1, heads, 2, size, dtype=dtype)
    key, value, slot = both[:, 0], both[:, 1], torch.tensor([7, 39, 0])
    key[1] = 0.0
    before, columns = (arena(form, rows, size, dtype, coded) for _ in range(2))
    form(key, value, Slots(form.place(slot), form.place(torch.tensor(77)), *columns))
    written = torch.zeros(rows, dtype=torch.bool).index_fill_(0, slot, True)
    for old, new in zip(flat(before), flat(columns), strict=True):
        assert torch.equal(old[~written], new[~written])
    k, v, pos, blank, *scales = columns
    assert pos[slot].tolist() == [77] * heads
    assert not any(bool(column[slot].any()) for column in blank)
    for stored, scale, new in zip((k, v), scales, (key, value), strict=True):
        if scale is None:
            assert torch.equal(stored[slot], new)
        else:
            most = new.float().abs().amax(1)
            torch.testing.assert_close(scale[slot], torch.where(most > 0, most / 127, 1.0))
            off = stored[slot].float() * scale[slot, None] - new.float()
            assert bool((off.abs() <= 0.5001 * scale[slot, None]).all())


@pytest.mark.parametrize("form", forms("advance"))
@pytest.mark.parametrize("before", [False, True])
def test_advance(form: Form, before: bool) -> None:
    """As the docstring of kernels/append/plain.py says, head by head."""
    generator = torch.Generator().manual_seed(int(before))
    for _ in range(2 if form.by == "triton" else 20):
        heads = torch.randint(0, 9, (5, 3, 5), generator=generator)
        start, length, cap, count, slot = heads.unbind(0)
        free_slot = torch.randint(-4, 5, (3, 5), generator=generator).clamp(min=-1)
        position = torch.tensor(40)
        mine = [*map(form.place, (start, length, cap, free_slot, position, count, slot))]
        form(Advancing(*mine), before=before)
        assert all(untouched(t) for t in mine)
        grown, at = count.clone(), start + count
        for i in range(count.numel()):
            free = int(free_slot.view(-1)[i])
            if free >= 0:
                at.view(-1)[i] = free
            elif not (before and count.view(-1)[i] >= cap.view(-1)[i]):
                grown.view(-1)[i] += 1
        want = start, count, cap, free_slot, torch.tensor(41), grown, at
        assert all(torch.equal(one.cpu(), two) for one, two in zip(mine, want, strict=True))


CASES = (
    (torch.float32, torch.bfloat16, torch.float16),
    (1, 8, 15, 16, 31, 32, 63, 64),
    (True, False),
)


@needs_c
@pytest.mark.parametrize(
    ("dtype", "bits", "exact"), some_by_day(product(*CASES), {*pairwise(*CASES)}.__contains__)
)
def test_victims_and_new_rows_in_c(dtype: torch.dtype, bits: int, exact: bool) -> None:
    for seed in range(10):
        check(native.hash_append, drawn(seed + 100 * bits, dtype, bits, exact=exact), guarded)


@needs_c
@pytest.mark.parametrize(("more", "turned"), [("columns", False), ("int8", False), ("", True)])
def test_what_c_does_not_take_is_left_alone(more: str, turned: bool) -> None:
    case = drawn(1, torch.float32, 8, exact=True, sizes=(16,), more=more, turned=turned)
    took, found = run(native.hash_append, case, guarded)
    assert not took
    for name, column in case.new.columns.items():
        torch.testing.assert_close(found[name], column, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found["free_slot"], case.new.free_slot)


@needs_c
def test_other_strides_and_dtypes_are_refused() -> None:
    case = drawn(1, torch.float32, 8, exact=True)
    matrix = case.rule.matrix(LAYER, case.new.key)
    for rule, new, why in (
        (matrix.T.contiguous().T, case.new, "CPU tensors: a float32 matrix"),
        (torch.zeros(len(matrix), 65), case.new, "at most 64 bits"),
        (matrix, replace(case.new, free_slot=case.new.free_slot.int()), "tensors: int64 layouts"),
    ):
        with pytest.raises(AssertionError, match=why):
            native.hash_append(replace(case.rule, matrices={LAYER: rule}), new)


HASHED = [
    (torch.float32, 8, 64),
    (torch.bfloat16, 15, 80),
    (torch.float32, 31, 96),
    (torch.bfloat16, 64, 128),
    (torch.float16, 3, 256),
    (torch.bfloat16, 16, 16),
]


@on_device
@pytest.mark.parametrize(
    ("dtype", "bits", "size", "more"),
    [
        (*sizes, more)
        for i, sizes in enumerate(HASHED)
        for j, more in enumerate(("", "columns", "int8"))
        if not INTERPRETED or j == i % 3
    ],
    ids=str,
)
def test_victims_and_new_rows_in_triton(dtype: Any, bits: int, size: int, more: str) -> None:
    """A head's rows are divided among programs, some of which have two tiles."""
    for seed in range(2):
        case = drawn(seed + bits, dtype, bits, exact=seed == 0, sizes=(size,), more=more)
        check(kernel("append.hash_gpu").hash_append, case, place, block=16 >> 2 * seed)


@on_device
@pytest.mark.parametrize("more", ["", "int8"])
def test_queries_and_keys_that_must_be_rotated_first(more: str) -> None:
    for seed in range(4):
        case = drawn(seed, torch.float32, 15, exact=False, sizes=(16, 80), more=more, turned=True)
        check(kernel("append.hash_gpu").hash_append, case, place, 1e-5, block=16)


@on_device
@pytest.mark.parametrize(("unlike", "left"), [(2, 3), (3, 3), (7, 7), (8, 3)])
def test_the_ends_that_hashevict_keeps_by_hand(unlike: int, left: int) -> None:
    """Of rows 0 to 9 the first three and the last two stay; the other rows are like the query."""
    pos = torch.tensor([4, 9, 1, 7, 3, 0, 8, 2, 6, 5], dtype=torch.int32)
    held = {"k": torch.zeros(10, 64), "v": torch.zeros(10, 64), "pos": pos}
    held["code"] = torch.where(pos == unlike, 0, 255)
    columns = {name: place(column) for name, column in held.items()}
    one, ten = torch.ones(1, 1, 64), torch.tensor([10])
    free_slot = place(torch.tensor([-1]))
    given = (place(t) for t in (one, one[0], one[0], ten - 10, ten, ten))
    matrix = place(torch.ones(64, 8))
    rule = HashEvict(sinks=3, recent=2, bits=8, hash_with="query", seed=0, matrices={LAYER: matrix})
    new = NewRow(LAYER, *given, free_slot, place(ten[0]), columns, 10, 0, columns["pos"])
    assert kernel("append.hash_gpu").hash_append(rule, new, block=16)
    assert pos[int(free_slot)] == left
    assert int(columns["pos"][int(free_slot)]) == 10
    assert int(columns["code"][int(free_slot)]) == 255
