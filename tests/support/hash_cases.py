"""New rows of a layer under HashEvict, drawn at random, for the kernels of `Kernels.append_evict`:
odd sizes, with NaN or absurd numbers in every row that no head has and around every tensor."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import step_oracle
import torch
from guards import absurd, guarded, untouched
from ragged import in_use
from torch import Tensor

from minikv.kernels import NewRow
from minikv.policies.hashevict import HashEvict

LAYER = 3
_PLACED = "query", "key", "value", "start", "length", "cap", "free_slot", "position"


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of a kernel."""

    rule: HashEvict
    new: NewRow


def run(
    kernel: Callable[..., bool], case: Case, place: Callable[[Tensor], Tensor], **more: int
) -> tuple[bool, dict[str, Tensor]]:
    """What a kernel returns and writes."""
    new = case.new
    columns = {name: place(column) for name, column in new.columns.items()}
    shown = columns["pos"] if new.shown is new.columns["pos"] else place(new.shown)
    turn = None if new.turn is None else tuple(map(place, new.turn))
    arrived = place(torch.zeros(len(new.key), dtype=torch.int32))
    there = {name: place(getattr(new, name)) for name in _PLACED}
    there |= {"columns": columns, "shown": shown, "turn": turn, "arrived": arrived}  # type: ignore[dict-item]
    matrix = place(case.rule.matrix(LAYER, new.key))
    took = kernel(replace(case.rule, matrices={LAYER: matrix}), replace(new, **there), **more)  # type: ignore[arg-type]
    written = columns | {"free_slot": there["free_slot"]}
    if turn is not None:
        written["turned"] = turn[2]
    assert all(untouched(t) for t in (*written.values(), arrived))
    assert not arrived.any()
    for name in _PLACED:
        assert name == "free_slot" or torch.equal(there[name].cpu(), getattr(new, name)), name
    return took, {name: t.cpu() for name, t in written.items()}


def check(
    kernel: Callable[..., bool],
    case: Case,
    place: Callable[[Tensor], Tensor],
    loose: float = 0.0,
    **more: int,
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
    turn = None
    if turned:
        angle = normal(1, 1, size // 2) * 3
        cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
        turn = cos.to(dtype), sin.to(dtype), torch.zeros(heads, group, size, dtype=dtype)
    new = NewRow(
        LAYER,
        x[:, :-1].contiguous(),
        x[:, -1].contiguous(),
        normal(heads, size).to(dtype),
        start,
        length,
        cap,
        free_slot,
        torch.tensor(rows),
        columns,
        int(length.max()) + 2,
        pick.choice((0, 9)),
        shown,
        turn,
    )
    rule = HashEvict(
        sinks=pick.choice((0, 5, 10**6)),
        recent=pick.choice((0, 1, rows // 3)),
        bits=bits,
        hash_with=pick.choice(("query", "key")),
        seed=0,
        matrices={LAYER: matrix},
    )
    return Case(rule, new)
