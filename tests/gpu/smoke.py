"""Does every Triton kernel compute what its torch form computes, at the sizes of an 8B model? Does
a chat write the same with and without the kernels and the graph, and the same as on a CPU?

    python tests/gpu/smoke.py [--json FILE] [--part I/N] [--only CHECK ...]
    TRITON_INTERPRET=1 python tests/gpu/smoke.py --device cpu --small       tries it without a GPU

Every check stands alone: one that fails is reported, and the next one runs. FILE is written after
each. Status 1 if any failed. GPU_TEST_SEED=N repeats the random numbers of a run.

In one process this takes five minutes on a GPU, nearly all of it for compiling. `run.py` starts N
processes, each with its own part.
"""

# ruff: noqa: E402 (where the package is has to be found first)

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

for _folder in (Path(__file__).parents[1] / "support", Path(__file__).parent):
    sys.path.insert(0, str(_folder))


from plain_tree import linked

linked()
if os.environ.get("TRITON_INTERPRET") == "1":
    sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
    import quick_interpreter

    quick_interpreter.install()

import rest_twin
import step_oracle

from minikv.kernels import (
    Advancing,
    NewRow,
    Queries,
    Rows,
    Segments,
    Slots,
    dispatch,
    to_codes,
    window_attention,
)
from minikv.kernels.attention.plain import last_rows_attention
from minikv.kernels.decode import plain as decode
from minikv.kernels.dispatch import on_gpu
from minikv.kernels.mass import plain as attention_mass
from minikv.models.linear import Int4, Int8, Plain, as_read, kept
from minikv.pages import Pages
from minikv.policies.hashevict import HashEvict

SEED = int(os.environ.get("GPU_TEST_SEED") or int.from_bytes(os.urandom(3)))


class Twins(dispatch.Kernels):
    """Every operation in torch, with the policies' own."""

    evict = step_oracle.EVICT
    append_evict = step_oracle.APPEND_EVICT


@dataclass(frozen=True, slots=True)
class Check:
    """run(): what to say of it; it raises if something is wrong. seconds: about how long it takes
    on a GPU whose kernels are not compiled yet."""

    name: str
    run: Callable[[], str]
    seconds: float = 4.0


def dealt(checks: Sequence[Check], part: int, parts: int) -> list[Check]:
    """The checks of one of so many processes, the longest first: each goes to the process that has
    least to do."""
    loads, mine = [0.0] * parts, []
    for check in sorted(checks, key=lambda check: -check.seconds):
        least = loads.index(min(loads))
        loads[least] += check.seconds
        if least == part:
            mine.append(check)
    return mine


class Results:
    """What became of the checks, written to a file after each."""

    def __init__(self, path: Path | None, made: torch.Generator) -> None:
        self.path, self.made, self.done = path, made, list[dict[str, object]]()

    def run(self, check: Check) -> None:
        # The same random numbers, whatever runs before it in this process.
        self.made.manual_seed(SEED ^ zlib.crc32(check.name.encode()))
        began, state, trace = perf_counter(), "ok", ""
        self._note({"check": check.name, "state": "died", "said": "", "seconds": 0.0, "trace": ""})
        try:
            said = check.run()
        except Exception as error:
            state, trace = "FAILED", traceback.format_exc()
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        seconds = round(perf_counter() - began, 2)
        self.done.pop()
        self._note(
            {"check": check.name, "state": state, "said": said, "seconds": seconds, "trace": trace}
        )
        print(f"{state:6} {check.name:40} {seconds:6.1f} s  {said}", flush=True)

    def _note(self, one: dict[str, object]) -> None:
        self.done.append(one)
        if self.path is not None:
            self.path.write_text(json.dumps({"seed": SEED, "checks": self.done}, indent=1))

    @property
    def failed(self) -> list[object]:
        return [one["check"] for one in self.done if one["state"] != "ok"]


class Sizes:
    def __init__(self, small: bool, device: str) -> None:
        self.device = torch.device(device)
        self.layers, self.heads, self.group, self.size = (2, 2, 2, 32) if small else (32, 8, 4, 128)
        self.rows = 70 if small else 5000
        self.interprets = small
        self.hidden, self.mlp = (64, 96) if small else (4096, 14336)
        self.kind = torch.bfloat16
        self.made = torch.Generator().manual_seed(SEED)

    def normal(self, *shape: int, kind: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.made).to(kind or self.kind).to(self.device)

    def lengths(self, mean: int) -> Tensor:
        """Uneven: from none to four times the mean."""
        even = torch.full((self.heads,), mean)
        even[0], even[-1] = 4 * mean, 1
        if self.heads > 2:
            even[1] = 0
        return even.to(self.device)


def far(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    assert bool(torch.isfinite(got).all() == torch.isfinite(want).all()), "NaN or infinite"
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def near(bound: float, **pairs: tuple[Tensor, Tensor]) -> str:
    off = {name: far(*pair) for name, pair in pairs.items()}
    bad = {name: value for name, value in off.items() if not value <= bound}
    assert not bad, f"off by {bad}, {bound} allowed"
    return ", ".join(f"{name} {value:.1e}" for name, value in off.items())


def alike(got: Tensor, want: Tensor, least: float = 0.99) -> str:
    same = float((got == want).float().mean())
    assert same >= least, f"only {same:.1%} alike"
    return f"{same:.1%} alike"


def attention(s: Sizes, uses: str) -> str:
    length = s.lengths(s.rows)
    if "some" not in uses:
        length = length.clamp(min=1)
    start = (length + 3).cumsum(0) - length
    total = int((start + length).max()) + 3
    q = s.normal(s.heads, s.group, s.size)
    k, v = s.normal(total, s.size), s.normal(total, s.size)
    more: dict[str, Any] = {}
    if "int8" in uses:
        (k, ks), (v, vs) = to_codes(k), to_codes(v)
        more |= {"k_scale": ks, "v_scale": vs}
    if "window" in uses:
        pos = torch.arange(total, dtype=torch.int32, device=s.device)
        more |= {"pos": pos, "oldest": torch.tensor(total // 9, device=s.device)}
        length = length.clone()
        length[0] = min(int(length[0]), total - int(start[0]))
    width = int(length.max())
    outs = []
    for ops in (Twins(), on_gpu()):
        logits = torch.zeros(s.heads, s.group, width, device=s.device) if "logits" in uses else None
        arrived = torch.zeros(s.heads, dtype=torch.int32, device=s.device)
        rows = Segments(k, v, start, length, width, **more)
        mixed, lse = ops.ragged_attention(q, rows, logits, arrived=arrived)
        for _ in range(1 if s.rows < 100 else 50):  # whoever arrives last
            again, _ = ops.ragged_attention(q, rows, logits, arrived=arrived)
            assert torch.equal(mixed, again), "other numbers in another launch"
        assert not bool(arrived.any()), "the counter is not zero again"
        seen = torch.isfinite(lse)
        shown = logits if logits is not None else lse
        outs.append((mixed[seen], lse[seen], shown.masked_fill(shown == -torch.inf, 0.0)))
    (m0, l0, x0), (m1, l1, x1) = outs
    return near(1e-2, mixed=(m1, m0), lse=(l1, l0), logits=(x1, x0))


def turned(s: Sizes, coded: bool) -> str:
    """Rotated first; and the angles of a position far out."""
    rows, device = 64 * s.heads, s.device
    qkv = s.normal(s.heads * (s.group + 2), s.size)
    inverse = (1e4 ** -(torch.arange(s.size // 2) / (s.size // 2))).to(device)
    slot = torch.randperm(rows, generator=s.made)[: s.heads].to(device)
    outs = []
    for ops in (Twins(), on_gpu()):
        angles = ops.rotary_table(torch.tensor(131071, device=device), inverse, 1.0, s.kind)
        kind = torch.int8 if coded else s.kind
        k, v = (torch.zeros(rows, s.size, dtype=kind, device=device) for _ in range(2))
        pos = torch.zeros(rows, dtype=torch.int32, device=device)
        blank = [torch.ones(rows, device=device)]
        scales = [torch.ones(rows, device=device) if coded else None for _ in range(2)]
        at = torch.tensor(9, device=device)
        found = ops.rotate_append(qkv, *angles, Slots(slot, at, k, v, pos, blank, *scales))
        assert torch.equal(pos[slot], torch.full_like(slot, 9).to(torch.int32)), "positions"
        assert not bool(blank[0][slot].any()), "columns"
        if scales[0] is not None and scales[1] is not None:
            k, v = (t.float() * by[:, None] for t, by in ((k, scales[0]), (v, scales[1])))
        outs.append((*angles, *found, k, v))
    names = ("cos", "sin", "q", "key", "k", "v")
    return near(2e-2, **dict(zip(names, zip(outs[1], outs[0], strict=True), strict=True)))


def hashed(s: Sizes) -> str:
    each, bits = s.rows, 16
    start = torch.arange(s.heads, device=s.device) * each
    full = torch.full((s.heads,), each, device=s.device)
    probe, key, value = (s.normal(s.heads, n, s.size) for n in (s.group, 1, 1))
    matrix = s.normal(s.size, bits, kind=torch.float32)
    base = [s.normal(s.heads * each, s.size) for _ in range(2)]
    pos = torch.arange(each, dtype=torch.int32, device=s.device).repeat(s.heads)
    code = (
        torch.randint(1 << bits, (s.heads * each,), generator=s.made).to(torch.int32).to(s.device)
    )
    rule = HashEvict(sinks=4, recent=10, bits=bits, hash_with="query", seed=0, matrices={0: matrix})
    outs = []
    for ops in (Twins(), on_gpu()):
        mine = [t.clone() for t in (*base, pos, code)]
        columns = dict(zip(("k", "v", "pos", "code"), mine, strict=True))
        hole = torch.full((s.heads,), -1, device=s.device)
        at = torch.tensor(each, device=s.device)
        given = (probe, key[:, 0], value[:, 0], start, full, full, hole, at)
        new = NewRow(0, *given, columns, each, 0, columns["pos"])
        assert ops.append_evict["hashevict"](rule, new)
        outs.append((hole, mine))
    alike(outs[1][0], outs[0][0], 0.99)
    assert all(torch.equal(a, b) for a, b in zip(outs[1][1], outs[0][1], strict=True)), "not equal"
    return "equal"


def advanced(s: Sizes) -> str:
    sides, outs = (s.layers, s.heads), []
    start, length, cap = (torch.randint(9, sides, generator=s.made) for _ in range(3))
    hole = torch.randint(-3, 5, sides, generator=s.made).clamp(min=-1)
    for ops in (Twins(), on_gpu()):
        state = [
            t.to(s.device)
            for t in (
                start.clone(),
                length.clone(),
                cap.clone(),
                hole.clone(),
                torch.tensor(40),
                length + 1,
                torch.zeros(sides, dtype=torch.int64),
            )
        ]
        ops.advance(Advancing(*state), before=True)
        outs.append(state)
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True)), "not equal"
    return "equal"


def judged(s: Sizes, name: str) -> str:
    """Heads that are one row over; statistics as after some steps, so that H2O's guess fails in
    some heads."""
    sides, wide = (s.layers, s.heads), s.rows // 4 + 1
    length = torch.randint(wide // 2, wide + 1, sides, generator=s.made)
    start = ((length + 2).flatten().cumsum(0) - length.flatten()).view(sides)
    total = int((start + length).max()) + 2
    pos = torch.zeros(total, dtype=torch.int32)
    for a, n in zip(start.flatten().tolist(), length.flatten().tolist(), strict=True):
        held = torch.randperm(2 * wide, generator=s.made)[: n - 1].sort().values
        pos[a : a + n] = torch.cat((held, torch.tensor([2 * wide]))).to(torch.int32)
    logits = torch.randn(*sides, s.group, wide, generator=s.made) * 2
    reach = torch.arange(wide)
    logits = logits.masked_fill((reach >= length[..., None])[:, :, None], -torch.inf).to(s.device)
    lse = logits.logsumexp(-1)
    rows = Rows(
        *(t.to(s.device) for t in (start, length, length - 1, pos)),
        torch.tensor(2 * wide, device=s.device),
        4,
        8,
        0,
    )
    count = torch.randint(1, 40, (total,), generator=s.made).float()
    mean = torch.rand(total, generator=s.made) / wide
    sums, squares = (
        mean * count,
        (mean.square() + torch.rand(total, generator=s.made) * 1e-6) * count,
    )
    half = (length // 2).to(s.device)
    outs = []
    for ops in (Twins(), on_gpu()):
        hole = torch.full(sides, 77, device=s.device)
        mine = [t.to(s.device).clone() for t in (sums, squares, count)]
        mine = mine[:1] if name == "h2o" else mine
        ops.evict[name](logits.clone(), lse, rows, hole, mine, half)
        outs.append((hole, mine))
    pairs = enumerate(zip(outs[1][1], outs[0][1], strict=True))
    said = near(1e-5, **{f"sum{i}": pair for i, pair in pairs})
    return f"{alike(outs[1][0], outs[0][0])}; {said}"


def lowest(s: Sizes) -> str:
    """Of any scores, with ties."""
    heads, wide = s.layers * s.heads, s.rows // 4 + 1
    pos = torch.stack([torch.randperm(2 * wide, generator=s.made)[:wide] for _ in range(heads)])
    scores = torch.randint(0, wide // 3, pos.shape, generator=s.made).float()
    scores[torch.rand(pos.shape, generator=s.made) < 0.3] = torch.inf
    over = torch.rand(heads, generator=s.made) < 0.7
    given = [t.to(s.device) for t in (scores, pos, torch.arange(heads) * wide, over)]
    outs = []
    for ops in (Twins(), on_gpu()):
        free_slot = torch.full((heads,), -1, device=s.device)
        ops.lowest(*given, free_slot)
        outs.append(free_slot)
    assert torch.equal(*outs), "not equal"
    return "equal"


def columns(s: Sizes, n: int, queries: int) -> str:
    """What the last queries of n give every row."""
    q, k = s.normal(s.heads, s.group, queries, s.size), s.normal(s.heads, n, s.size)
    at = torch.arange(n, device=s.device)
    asked, parts = Queries(q, at[n - queries :], None), [(k, at[None])]
    asked = asked._replace(lse=attention_mass.rows_lse(asked, parts))
    outs = []
    for ops in (Twins(), on_gpu()):
        mass = torch.zeros(s.heads, s.group, n, device=s.device)
        squares = torch.zeros(s.heads, n, device=s.device)
        ops.add_attention_mass(mass, squares, asked, parts[0])
        outs.append((mass, squares, ops.peak_attention(asked, parts, 0)))
    names = "mass", "squares", "peak"
    return near(1e-2, **dict(zip(names, zip(*reversed(outs), strict=True), strict=True)))


def segments(s: Sizes, new: int) -> str:
    length = s.lengths(s.rows // 4)
    start = (length + 3).cumsum(0) - length
    total = int((start + length).max()) + 3
    k, v = s.normal(total, s.size), s.normal(total, s.size)
    hole = torch.full((s.heads,), -1, device=s.device)
    hole[0] = start[0] + 2
    q = s.normal(s.heads, s.group, new, s.size)
    outs = [
        ops.ragged_prefill(q, Segments(k, v, start, length, int(length.max())), hole)
        for ops in (Twins(), on_gpu())
    ]
    seen = torch.isfinite(outs[0][1])
    return near(
        1e-2, mixed=(outs[1][0][seen], outs[0][0][seen]), lse=(outs[1][1][seen], outs[0][1][seen])
    )


def chosen(s: Sizes, n: int) -> str:
    """The best of n rows of each head, and of all, whose scores are often equal."""
    pos = torch.arange(n, device=s.device).expand(s.heads, n)
    scores = s.normal(s.heads, n, kind=torch.float32).mul(99).round()
    free = torch.rand((s.heads, n), generator=s.made).to(s.device) < 0.9
    counts = torch.randint(n // 4, (s.heads,), generator=s.made).to(s.device)
    outs = []
    for ops in (Twins(), on_gpu()):
        key = ops.order_key(scores, pos, free)
        some = ops.best(key, counts, n // 4), ops.best(key, counts, n // 4, pos < 9)
        outs.append((key, *some, ops.wanted(key, counts.sum(), s.heads * n // 4)))
    assert all(map(torch.equal, *outs)), "not equal"
    return "equal"


def numbers(s: Sizes, heads: int) -> str:
    """Which rows of each head stay, and the counts and tables of heads."""
    device, rows = s.device, 8 * s.rows + 5
    pos = torch.stack([torch.randperm(2 * rows, generator=s.made)[:rows] for _ in range(heads)])
    keep = torch.rand(heads, rows, generator=s.made) < 0.3
    order = pos[:, :99].argsort(dim=1)
    need, most, sure = (torch.randint(n, (heads,), generator=s.made) for n in (900, 1200, 5))
    outs = []
    for ops, to in ((Twins(), torch.device("cpu")), (on_gpu(), device)):
        there = [t.to(to) for t in (pos, keep, order, need, most, sure)]
        found = [*ops.divide(there[0], 4, rows, 9)]
        index, count = ops.survivors(there[1], there[2])
        found += [index[h, :n] for h, n in enumerate(keep.sum(1).tolist())] + [count]
        found.append(ops.share(there[3], 4 * heads, 1, 5 * heads, there[4], there[3].sum()))
        found += [ops.ensure_least(there[3], there[5], there[4], least) for least in (1, 60)]
        tables = tuple(torch.zeros_like(count) for _ in range(5))
        ops.lay_out(count, 7, tables, 0, int(keep.sum()) + 77, 1, rows * heads)
        outs.append([t.cpu() for t in (*found, *tables)])
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True)), "not equal"
    return "equal"


def gathered(s: Sizes) -> str:
    n, stays = s.rows, s.rows // 4
    index = (
        torch.rand(s.heads, n, generator=s.made).argsort(1)[:, :stays].sort(1).values.to(s.device)
    )
    count = torch.full((s.heads,), stays, device=s.device)
    count[0] = stays // 2
    start = torch.arange(s.heads, device=s.device) * stays
    fresh = s.normal(s.heads, n, s.size), s.normal(s.heads, n, s.size)
    values, outs = s.normal(s.heads, n, kind=torch.float32), []
    pos = torch.arange(n, device=s.device).expand(s.heads, n)
    for ops in (Twins(), on_gpu()):
        into = tuple(
            torch.zeros(s.heads * stays, s.size, dtype=s.kind, device=s.device) for _ in range(2)
        )
        column = torch.zeros(s.heads * stays, device=s.device)
        places = torch.zeros(s.heads * stays, dtype=torch.int32, device=s.device)
        ops.gather_rows(index, count, start, fresh, None, into, (pos, places), stays)
        again = torch.zeros_like(places)
        ops.gather_columns(index, count, start, [values, pos], [column, again], stays)
        outs.append((*into, places, column, again))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True)), "not equal"
    return "equal"


def between(s: Sizes) -> str:
    said = []
    for t in (1, 7 if s.rows < 100 else 2048):
        x, y, weight = s.normal(t, s.hidden), s.normal(t, s.hidden), s.normal(s.hidden)
        qkv = s.normal(t, s.heads * (s.group + 2), s.size)
        cos, sin = s.normal(t, 1, s.size), s.normal(t, 1, s.size)
        both, outs = s.normal(t, 2 * s.mlp), []
        for ops in (Twins(), on_gpu()):
            here = x.clone()
            normed = ops.add_norm(here, y, weight, 1e-5)
            outs.append(
                (
                    here,
                    normed,
                    ops.rotate(qkv[:, : s.heads * (s.group + 1)], cos, sin),
                    ops.silu_mul(both.clone()),
                )
            )
        names = ("sum", "norm", "rotate", "silu")
        said.append(
            near(
                3e-2 if s.interprets else 1e-2,  # the interpreter cuts bfloat16 off
                **dict(zip(names, zip(outs[1], outs[0], strict=True), strict=True)),
            )
        )
    return said[-1]


def packed(s: Sizes, form: str) -> str:
    """Packed weights of the sizes of a layer: one row and many, which unpack."""
    said = []
    for rows, columns in ((s.hidden + s.hidden // 2, s.hidden), (s.hidden, s.mlp)):
        plain = Plain(s.normal(rows, columns) / columns**0.5)
        kind = Int8 if form == "int8" else Int4
        matrix = kind(plain, Pages(s.device).empty, packing=None)
        dense = matrix.dense()
        if isinstance(matrix, Int4):
            matrix.unpack = on_gpu().unpack_int4_rows
        for t in (1, 40):
            x = s.normal(t, columns)
            said.append(near(2e-2, product=(matrix(x), x.double() @ dense.double().T)))
    return said[-1]


def behind_attention(s: Sizes, form: str) -> str:
    """The rest of a layer, and of the last one, in launches of its own."""
    attended, hidden, mlp = s.heads * s.group * s.size, s.hidden, s.mlp
    following = attended + 2 * s.heads * s.size
    if s.interprets:
        attended, hidden, mlp, following = 32, 32, 32, 48  # a program takes tens of milliseconds
    matrices = []
    for rows, columns in (
        (hidden, attended),
        (2 * mlp, hidden),
        (hidden, mlp),
        (following, hidden),
    ):
        plain = Plain(s.normal(rows, columns) / columns**0.5)
        # As on a GPU also in the interpreter: a CPU has other layouts.
        matrices.append(as_read(kept(plain, form, Pages(s.device).empty, packing=None)))
    norms = [s.normal(hidden) for _ in range(2)]
    x, mixed = s.normal(1, hidden), s.normal(1, attended)
    said, again = "", [] if s.interprets else [on_gpu().rest]
    for last in (False, True):
        given = (*matrices[:3], None if last else matrices[3], *norms, 1e-5)
        outs = []
        for make in (rest_twin.rest, on_gpu().rest, *again):
            made, here = make(*given), x.clone()
            assert made is not None, "not taken"
            outs.append((made(here, mixed), here))
        for other in outs[2:]:
            assert all(map(torch.equal, other, outs[1])), "not the same again"
        # The interpreter cuts bfloat16 off where a GPU rounds, and here it has few numbers.
        bound = 5e-2 if s.interprets else 2e-2
        said = near(bound, made=(outs[1][0], outs[0][0]), x=(outs[1][1], outs[0][1]))
    got, want = (
        make(matrices[3], norms[0], 1e-5)(x)
        for make in (on_gpu().normed_product, rest_twin.normed_product)
    )
    return said + ", " + near(4e-2, first=(got, want))


def library(s: Sizes) -> str:
    """torch's own attention, called beneath its front door: results and log-sum-exps."""
    t, n = (256, 1024) if s.rows > 100 else (8, 24)
    q = s.normal(t, s.heads, s.group, s.size).permute(1, 2, 0, 3)
    k, v = s.normal(s.heads, n, s.size), s.normal(s.heads, n, s.size)
    mixed, lse = last_rows_attention(q, k, v)
    slid, slid_lse = window_attention(q, k, v, t // 2)
    x = q.double() @ k.double()[:, None].transpose(2, 3) / s.size**0.5
    at = torch.arange(n, device=s.device)
    back = at[n - t :, None] - at
    x, y = (x.masked_fill((back < 0) | (back >= w), -torch.inf) for w in (n, t // 2))
    values = v.double()[:, None]
    return near(
        1e-2,
        mixed=(mixed, x.softmax(-1) @ values),
        lse=(lse, x.logsumexp(-1)),
        window=(slid, y.softmax(-1) @ values),
        window_lse=(slid_lse, y.logsumexp(-1)),
    )


def long_prompt(s: Sizes) -> str:
    """Attention of many rows, whichever library computes it, beside that of few at a time."""
    if s.device.type != "cuda":
        return "only on a GPU"
    rows, keys = 8192 + 2048 + 260, 8192 + 3 * 2048 + 13
    qkv = s.normal(rows, s.heads * (s.group + 1), s.size)[:, : s.heads * s.group]
    q = qkv.unflatten(1, (s.heads, s.group)).permute(1, 2, 0, 3)
    k, v = (s.normal(s.heads, keys + rows, s.size) for _ in range(2))
    mixed, lse = on_gpu().last_rows_attention(q, k, v)
    want, sums = last_rows_attention(q, k, v)
    return near(1e-2, mixed=(mixed, want)) + ", " + near(1e-5, lse=(lse, sums))


def far_rows(s: Sizes) -> str:
    """Rows beyond 2^31 numbers of k: 64-bit indices."""
    if s.device.type != "cuda":
        return "only on a GPU"
    last = (1 << 31) // s.size + 4096
    k = torch.empty(last + 512, s.size, dtype=s.kind, device=s.device)
    v = torch.empty_like(k)
    k[last:], v[last:] = s.normal(512, s.size), s.normal(512, s.size)
    q = s.normal(1, s.group, s.size)
    start, length = (torch.tensor([n], device=s.device) for n in (last, 512))
    got = on_gpu().ragged_attention(q, Segments(k, v, start, length, 512))
    near_rows = Segments(k[last:].clone(), v[last:].clone(), start * 0, length, 512)
    want = decode.ragged_attention(q, near_rows)
    return near(1e-2, mixed=(got[0], want[0]), lse=(got[1], want[1]))


QUESTIONS = ("What does Halhart Works make?", "Who runs it?", "What does Halhart Works make?")


def chats(
    device: str, dtype: str, policy: str, decode: str, document: str, weights: str = "auto"
) -> str:
    """Three turns: with the kernels and the graph, without the graph, with torch alone, and, in
    float32, on the CPU. There also the tokens that the first answer leaves in the cache."""
    import minikv

    answers: dict[str, list[str]] = {}
    kept: dict[str, list[set[int]]] = {}
    ways = [("graph", device, "auto"), ("steps", device, "auto"), ("torch", device, "torch")]
    if dtype == "float32":
        ways.append(("cpu", "cpu", "torch"))
    for name, where, kernels in ways:
        chat = minikv.load(
            policy=policy,
            decode=decode,
            budget=128,
            device=where,
            dtype=dtype,
            kernels=kernels,
            weights=weights,
        )
        if name == "steps":
            chat.engine._loop = None
        chat.attach(document, name="document")
        answers[name] = []
        for question in QUESTIONS:
            answers[name].append("".join(chat.ask(question, max_tokens=48)))
            if len(answers[name]) == 1 and name in ("graph", "cpu"):
                sides = chat.engine.kv.shape.layers, chat.engine.kv.shape.kv_heads
                held = (chat.kept(i, h) for i in range(sides[0]) for h in range(sides[1]))
                kept[name] = [{*rows.tolist()} for rows in held]
        if name != "torch":
            assert not chat.engine.notices, chat.engine.notices
        if name == "graph" and device != "cpu":
            assert chat.engine.kv.ops.name == "triton", chat.engine.kv.ops.name
            # These answers are short: without eviction every prompt moves the cache, and steps that
            # evict first are not launched ahead.
            short = policy == "full" or decode == "hashevict"
            assert chat.engine.captured or short, "no step was captured"
    others = {name: found for name, found in answers.items() if found != answers["graph"]}
    # In bfloat16 two orders of adding may differ at a near tie; in float32 not within 48 tokens.
    assert dtype != "float32" or "steps" not in others, answers
    said = f"{answers['graph'][0]!r}; otherwise: {others or 'the same'}"
    if "cpu" in kept:
        pairs = zip(kept["graph"], kept["cpu"], strict=True)
        same = mean(len(a & b) / len(a | b) for a, b in pairs)
        assert answers["cpu"][0] == answers["graph"][0], answers
        assert same > 0.98, f"{same:.1%} of the kept tokens are those of the CPU"
        said += f"; {same:.1%} of the kept tokens are those of the CPU"
    return said


def network(small: bool) -> Any:
    """Two layers of an 8B model."""
    from minikv.cli.bench import networks

    if small:
        return networks.llama(2, 64, 4, 2, 16, 128, 256)
    return networks.llama(2, 4096, 32, 8, 128, 14336, 128256)


def captured(device: str, policy: str, decode: str, weights: str, *, small: bool) -> str:
    """A long answer over the budget: is a step one graph, does the graph write what the same calls
    write uncaptured, and from when on does a step without `DecodeLoop` write something else?"""
    from minikv.chat.eviction_config import EvictionConfig
    from minikv.cli.bench import networks
    from minikv.cli.bench.systems import Cached
    from minikv.engine.capture import Eager
    from minikv.engine.decode_loop import DecodeLoop

    net = networks.network(networks.Spec(network(small), None, "bfloat16", device, weights))
    eviction = EvictionConfig.read(policy, decode, "128")
    steps, tokens, seconds = 12 if small else 64, dict[str, list[int]](), 0.0
    ids = networks.prompt(600 if small else 3000, net.config.vocab)
    for name in ("graph", "uncaptured", "host"):
        one = Cached(net, eviction)
        engine = one.engine
        if name == "uncaptured":
            engine._loop = DecodeLoop(net, engine.kv, Eager())
        elif name == "host":
            engine._loop = None
        one.read(ids, 256)
        tokens[name] = []
        for _ in range(steps):
            one.write(1)
            tokens[name].append(one._token)
        if name == "graph" and device != "cpu":
            assert engine.captured, f"not captured: {engine.notices}"
            one.read(ids, 256)
            one.write(4)
            seconds = one.write(steps)
        assert not engine.notices, engine.notices
        one.close()
    assert tokens["uncaptured"] == tokens["graph"], f"the graph writes something else: {tokens}"
    pairs = enumerate(zip(tokens["graph"], tokens["host"], strict=True))
    first = next((i for i, (a, b) in pairs if a != b), None)
    # In bfloat16 two orders of adding may differ at a near tie, but not from the first tokens on.
    assert first is None or first > 8, f"the host has other tokens from step {first} on"
    return f"{seconds * 1e6:.0f} us a step (2 layers); the host's tokens: {first or 'all'}"


STEPS = (
    ("full", "none", "auto"),
    ("adakv", "roco", "auto"),
    ("adakv", "roco", "int8"),
    ("adakv", "roco", "int4"),
    ("h2o", "h2o", "auto"),
    ("adakv", "tova", "auto"),
    ("snapkv", "hashevict", "auto"),
    ("adakv", "streaming", "auto"),
)
"""Policy, step policy and weights of the steps that are captured."""


def checks(s: Sizes, device: str, *, small: bool) -> list[Check]:
    """All of them."""
    found = [
        *(
            Check(f"ragged_attention {uses}".strip(), partial(attention, s, uses), 6.0)
            for uses in ("", "some empty", "logits", "window", "window logits", "int8 logits")
        ),
        Check("rotate_append", partial(turned, s, False)),
        Check("rotate_append int8", partial(turned, s, True)),
        Check("hash_append", partial(hashed, s)),
        Check("advance", partial(advanced, s)),
        *(Check(f"{name} step", partial(judged, s, name), 6.0) for name in ("h2o", "roco")),
        Check("lowest", partial(lowest, s)),
    ]
    few = 32 if s.rows > 100 else 8
    both = s.rows // 5 * 2
    found += [
        Check("the last queries' attention", partial(columns, s, 4 * s.rows // 5, few), 10.0),
        Check("add_attention_mass, peak_attention", partial(columns, s, both, both), 10.0),
        *(
            Check(f"ragged_prefill, {new} new", partial(segments, s, new))
            for new in (3, 9 if small else 300)
        ),
        *(Check(f"the best of {n} rows", partial(chosen, s, n)) for n in (s.rows, 12 * s.rows)),
        *(Check(f"numbers of {n} heads", partial(numbers, s, n)) for n in (s.heads, 33)),
        Check("gather_rows, gather_columns", partial(gathered, s)),
        Check("add_norm, rotate, silu_mul", partial(between, s)),
        *(Check(f"{form} weights", partial(packed, s, form), 10.0) for form in ("int8", "int4")),
    ]
    for form in ("auto", "int8", "int4"):
        name = "bfloat16" if form == "auto" else form
        run = partial(behind_attention, s, form)
        found.append(Check(f"rest of a layer, {name} weights", run, 12.0))
    found += [
        Check("torch's attention", partial(library, s)),
        Check("attention of a long prompt", partial(long_prompt, s), 6.0),
        Check("beyond 2^31 numbers", partial(far_rows, s), 6.0),
    ]
    found += [
        Check(
            f"captured {policy}+{decode}, {weights} weights",
            partial(captured, device, policy, decode, weights, small=small),
            30.0,
        )
        for policy, decode, weights in (STEPS[1:2] if small else STEPS)
    ]
    if not small:
        document = (Path(__file__).parents[2] / "models" / "bundled" / "sample.txt").read_text()
        found += [
            Check(f"chat {dtype} {policy}+{decode}, {weights} weights", partial(*run), 60.0)
            for dtype, policy, decode, text, weights in (
                ("float32", "adakv", "roco", document, "auto"),
                ("bfloat16", "adakv", "roco", document, "auto"),
                ("float32", "full", "none", document[:9000], "auto"),
                ("bfloat16", "adakv", "roco", document, "int4"),
                ("float32", "snapkv", "hashevict", document, "auto"),
            )
            for run in [(chats, device, dtype, policy, decode, text, weights)]
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the checks of one process")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="these checks")
    asked = parser.parse_args()
    part, parts = map(int, asked.part.split("/"))
    s = Sizes(asked.small, asked.device)
    results = Results(asked.json, s.made)
    print(f"seed {SEED} (GPU_TEST_SEED repeats it), torch {torch.__version__}", flush=True)
    began = perf_counter()
    results.run(Check("torch", lambda: str(torch.ones(8, device=asked.device).sum().item())))
    if results.failed:
        return 1
    for check in dealt(checks(s, asked.device, small=asked.small), part - 1, parts):
        if asked.only is None or check.name in asked.only:
            results.run(check)
    if asked.device == "cuda":
        print(f"peak {torch.cuda.max_memory_allocated() >> 20} MiB")
    failed = results.failed
    ok, bad = len(results.done) - len(failed), ", ".join(map(str, failed)) or "none"
    seconds = perf_counter() - began
    print(f"{ok} of {len(results.done)} ok in {seconds:.0f} s; failed: {bad}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
