"""The decode step's Triton kernels against float64 arithmetic and their twins, on odd sizes, in
NaN-guarded memory; and who is chosen to compute.

Triton's interpreter is chosen when the kernels are imported, so the file runs itself in a process
of its own; where there is a CUDA device, the same tests also run on it (marker `gpu`).
"""

from __future__ import annotations

import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from triton_device import (
    DEVICE,
    INTERPRETED,
    close,
    draw,
    guarded,
    interpret,
    kernel,
    on_device,
    randoms,
    untouched,
)

from minikv.kernels import dispatch
from minikv.kernels.torch import reference
from minikv.kernels.torch.reference import Rows

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton on this system", allow_module_level=True)


def test_in_the_interpreter() -> None:
    if INTERPRETED:
        pytest.skip("this is the interpreter")
    interpret(__file__)


def segments(lengths: list[int], gap: int = 3) -> tuple[Tensor, Tensor, int]:
    """start and length [H] of segments with unused rows between them, and R."""
    length = torch.tensor(lengths)
    start = (length + gap).cumsum(0) - length
    return start, length, int(start[-1] + length[-1]) + gap


def in_use(start: Tensor, length: Tensor, rows: int) -> Tensor:
    """bool [R]"""
    used = torch.zeros(rows, dtype=torch.bool)
    for a, n in zip(start.flatten().tolist(), length.flatten().tolist(), strict=True):
        used[a : a + n] = True
    return used


def attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, length: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """float64: mixed [H, G, D], log-sum-exp [H, G], logits of each head [G, n]; seen bool [R]."""
    mixed = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    logits = []
    for h in range(len(q)):
        rows = slice(int(start[h]), int(start[h] + length[h]))
        x = q[h].double() @ k[rows].double().T / math.sqrt(q.shape[2])
        x = x.masked_fill(~seen[rows], -math.inf)
        if x.shape[1]:
            lse[h] = x.logsumexp(-1)
            mixed[h] = x.softmax(-1).nan_to_num(0.0) @ v[rows].double()
        logits.append(x)
    return mixed, lse, logits


SEGMENTS = [
    # G, D, rows of each head, dtype, programs (None: as configured), of how many rows a tile
    (1, 64, [1], torch.float32, None, None),
    (3, 80, [0, 37, 1], torch.bfloat16, 7, 16),
    (4, 96, [16, 0, 130, 1, 5], torch.float32, 5, 32),
    (7, 128, [3, 0, 0, 200, 17, 64, 1, 16, 9], torch.bfloat16, 6, 64),
    (4, 128, [300, 2], torch.float16, None, None),
    (1, 256, [40, 33, 0], torch.bfloat16, 3, 16),
    (16, 64, [20, 50], torch.float32, 11, 16),
    (2, 64, [0, 0], torch.float32, 3, 16),
]


@on_device
@pytest.mark.parametrize("case", SEGMENTS)
@pytest.mark.parametrize("sees", ["all", "window", "logits"])
def test_attention_over_segments(case: tuple[int, ...], sees: str) -> None:
    group, size, lengths, dtype, programs, block = case
    decode = kernel("triton.decode")
    start, length, rows = segments(lengths)  # type: ignore[arg-type]
    used = in_use(start, length, rows)
    q = draw(1, (len(length), group, size), dtype, 2.0)  # type: ignore[arg-type]
    k, v = (draw(i, (rows, size), dtype) for i in (2, 3))  # type: ignore[arg-type]
    k[~used] = v[~used] = math.nan
    pos = torch.randperm(rows, generator=randoms(4)).to(torch.int32)
    oldest = torch.tensor(rows // 3)
    for a, n in zip(start.tolist(), length.tolist(), strict=True):
        if n:
            pos[a + n // 2] = rows  # a head that has rows sees one
    seen = pos >= oldest if sees != "all" else torch.ones(rows, dtype=torch.bool)
    wide = max(lengths) + 5  # type: ignore[call-overload]
    logits = guarded(torch.full((*q.shape[:2], wide), 7.0)) if sees == "logits" else None
    lse = guarded(torch.zeros(q.shape[:2])) if sees == "logits" else None
    config = decode.configure(size, dtype, torch.device(DEVICE))
    if programs is not None:
        config = decode.Config(block, config.warps, config.stages, programs)
    space = decode.workspace(len(q), group, size, config, torch.device(DEVICE))
    space.part.fill_(math.nan)
    space.lse.fill_(math.nan)
    given = [guarded(t) for t in (q, k, v, start, length)]
    windowed = {} if sees == "all" else {"pos": guarded(pos), "oldest": oldest.to(DEVICE)}
    mixed, sums = decode.ragged_attention(
        *given, width=wide, **windowed, logits=logits, lse=lse, config=config, space=space
    )
    want, want_lse, want_logits = attention(q, k, v, start, length, seen)
    loose = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]  # type: ignore[index]
    close(mixed, want, loose)
    close(sums, want_lse)
    assert mixed.dtype == dtype
    if logits is not None and lse is not None:
        assert sums is lse
        assert untouched(logits)
        assert untouched(lse)
        for h, x in enumerate(want_logits):
            close(logits[h, :, : x.shape[1]], x)
            assert bool((logits[h, :, x.shape[1] :] == 7.0).all())


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_rows_in_int8(dtype: torch.dtype) -> None:
    decode = kernel("triton.decode")
    start, length, rows = segments([30, 0, 1, 70])
    q = draw(1, (4, 3, 96), dtype, 2.0)
    k, k_scale = reference.to_codes(draw(2, (rows, 96), dtype))
    v, v_scale = reference.to_codes(draw(3, (rows, 96), dtype))
    k_scale[~in_use(start, length, rows)] = math.nan
    given = [guarded(t) for t in (q, k, v, start, length)]
    mixed, lse = decode.ragged_attention(
        *given, width=70, k_scale=guarded(k_scale), v_scale=guarded(v_scale)
    )
    plain = k.double() * k_scale.double()[:, None], v.double() * v_scale.double()[:, None]
    want, want_lse, _ = attention(q, *plain, start, length, torch.ones(rows, dtype=torch.bool))
    close(mixed, want, 1e-5 if dtype == torch.float32 else 2e-2)
    close(lse, want_lse)


# -- the end of a step --------------------------------------------------------------------------


def ended(
    shape: tuple[int, int, int, int],
    *,
    sinks: int,
    recent: int,
    pinned: int,
    equal: bool,
    aligned: bool,
) -> tuple[Rows, Tensor, Tensor]:
    """Heads of all layers at the end of a step, their logits [L, H, G, C] and log-sum-exps.

    equal: logits are 0 or 1, so that many scores are alike. aligned: all heads of a layer hold the
    same positions in the same order.
    """
    layers, heads, group, wide = shape
    length = torch.randint(1, wide + 1, (layers, heads), generator=randoms(1))
    length[0, 0] = wide
    cap = (length - torch.randint(0, 2, length.shape, generator=randoms(2))).clamp(min=1)
    if aligned:
        length[:], cap[:] = wide, wide - 1
    start = ((length + 3).flatten().cumsum(0) - length.flatten()).view_as(length)
    newest = 2 * wide
    pos = torch.full((int((start + length).max()) + 3,), torch.iinfo(torch.int32).max // 2)
    logits = torch.full((layers, heads, group, wide), math.nan)
    lse = torch.zeros(layers, heads, group)
    for i in range(layers):
        for h in range(heads):
            a, n = int(start[i, h]), int(length[i, h])
            seed = i if aligned else i * heads + h
            held = torch.randperm(newest, generator=randoms(10 + seed))[: n - 1]
            order = torch.randperm(n, generator=randoms(20 + seed))
            pos[a : a + n] = torch.cat((held, torch.tensor([newest])))[order]
            x = torch.randn(group, n, generator=randoms(30 + i * heads + h)) * 2
            if equal:
                x = torch.randint(0, 2, (1, n), generator=randoms(40 + seed)).expand(group, n)
            logits[i, h, :, :n], lse[i, h] = x, x.float().logsumexp(-1)
    rows = Rows(
        start, length, cap, pos.to(torch.int32), torch.tensor(newest), sinks, recent, pinned
    )
    return rows, logits, lse


def copied(t: object) -> object:
    """On the device, between guards."""
    if isinstance(t, Tensor):
        return guarded(t)
    return [guarded(word) for word in t] if isinstance(t, list) else t


def statistics(policy: str, rows: Rows, equal: bool) -> list[object]:
    """What a policy's step takes after `hole`."""
    count, sides = len(rows.pos), rows.length.shape
    quota = torch.randint(1, int(rows.length.max()) // 2 + 2, sides, generator=randoms(3))
    seen = torch.randint(0, 9, (count,), generator=randoms(4)).float()
    mean, noise = (torch.rand(count, generator=randoms(i)) for i in (5, 6))
    if equal:
        seen, mean, noise = torch.ones(count), torch.full((count,), 0.25), torch.zeros(count)
    if policy == "h2o":
        return [mean * seen, quota]
    if policy == "roco":
        return [mean * seen, (mean * mean + 0.1 * noise) * seen, seen, quota]
    if policy == "scissorhands":
        words = [
            torch.randint(0, 1 << bits, (count,), generator=randoms(7 + bits)) for bits in (32, 8)
        ]
        window = torch.tensor([6, 10**6])[: len(rows.length)]
        return [[w % 2 for w in words] if equal else words, seen, 40, window]
    return []


SCENES = [
    ((2, 3, 2, 21), {"sinks": 2, "recent": 3, "pinned": 0, "equal": False, "aligned": False}),
    ((2, 2, 3, 17), {"sinks": 1, "recent": 1, "pinned": 0, "equal": True, "aligned": False}),
    ((2, 3, 1, 18), {"sinks": 0, "recent": 1, "pinned": 9, "equal": True, "aligned": True}),
    ((1, 5, 4, 16), {"sinks": 999, "recent": 1, "pinned": 3, "equal": False, "aligned": False}),
    ((1, 1, 7, 1), {"sinks": 0, "recent": 1, "pinned": 0, "equal": False, "aligned": False}),
]
POLICIES = ["h2o", "tova", "tova-layerwise", "roco", "scissorhands"]


@on_device
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scene", range(len(SCENES)))
def test_statistics_and_victims(policy: str, scene: int) -> None:
    """As the twin's: the same rows leave, of equal scores the oldest, in tiles of 16 rows."""
    shape, how = SCENES[scene]
    rows, logits, lse = ended(shape, **how)
    name = policy.split("-")[0] + "_step"
    named = {"layerwise": policy == "tova-layerwise"} if name == "tova_step" else {}
    go = torch.tensor(True)
    outcomes = []
    for function, more in (
        (getattr(reference, name), {}),
        (getattr(kernel("triton.step"), name), {"block": 16}),
    ):
        moved = Rows(
            *(guarded(t) for t in (rows.start, rows.length, rows.cap, rows.pos, rows.newest)),
            rows.sinks,
            rows.recent,
            rows.pinned,
        )
        hole = guarded(torch.full(rows.length.shape, 77))
        notes = [copied(t) for t in statistics(policy, rows, how["equal"])]
        function(guarded(logits), guarded(lse), moved, guarded(go), hole, *notes, **named, **more)
        assert untouched(hole)
        outcomes.append((hole, notes))
    (want, wanted), (got, noted) = outcomes
    assert torch.equal(got, want)
    over = rows.length > rows.cap
    assert bool(((got.cpu() >= 0) == over).all())
    for mine, theirs in zip(noted, wanted, strict=True):
        if isinstance(mine, list):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        elif isinstance(mine, Tensor):
            close(mine, theirs)
            assert untouched(mine)


def one_layer(
    positions: list[list[int]], weights: list[list[float]]
) -> tuple[Rows, Tensor, Tensor]:
    """Heads of one layer by hand, all one row over their cap; logits [1, H, 1, C] and lse 0."""
    start, length, count = segments([len(p) for p in positions])
    pos = torch.zeros(count, dtype=torch.int32)
    logits = torch.full((1, len(positions), 1, max(map(len, positions))), math.nan)
    for h, (at, given) in enumerate(zip(positions, weights, strict=True)):
        pos[int(start[h]) : int(start[h]) + len(at)] = torch.tensor(at, dtype=torch.int32)
        logits[0, h, 0, : len(at)] = torch.tensor(given).log()
    rows = Rows(
        *(guarded(t) for t in (start[None], length[None], length[None] - 1, pos)),
        guarded(torch.tensor(max(map(max, positions)))),
        0,
        1,
        0,
    )
    return rows, guarded(logits), guarded(torch.zeros(1, len(positions), 1))


@on_device
@pytest.mark.parametrize(
    ("missing", "lowest", "left"),
    [
        (99, 6, 6),
        (99, 7, 3),
        (8, 7, 3),
        (8, 6, 3),
        (8, 5, 5),
        (1, 7, 3),
        (1, 6, 6),
    ],
)
def test_the_newest_rows_of_h2o_by_hand(missing: int, lowest: int, left: int) -> None:
    """The four newest of rows 0 to 10 stay: 7 to 10, or 6 to 10 without 8; row 3 is the next."""
    held = [i for i in (3, 0, 9, 5, 1, 8, 10, 2, 7, 4, 6) if i != missing]
    given = [0.01 if i == lowest else 0.02 if i == 3 else 0.1 for i in held]
    rows, logits, lse = one_layer([held], [given])
    hole = guarded(torch.zeros((1, 1), dtype=torch.int64))
    sums = guarded(torch.zeros(len(rows.pos)))
    kernel("triton.step").h2o_step(
        logits,
        lse,
        rows,
        guarded(torch.tensor(True)),
        hole,
        sums,
        guarded(torch.tensor([[4]])),
        block=16,
    )
    begin = int(rows.start)
    assert held[int(hole) - begin] == left
    close(sums[begin : begin + len(held)], torch.tensor(given))


@on_device
def test_the_mean_over_a_layers_heads_by_hand() -> None:
    """Position 5 gets 0.2 and 0.3 in two heads, position 3 gets 0.26 in the one that has it."""
    rows, logits, lse = one_layer(
        [[5, 3, 9, 4], [4, 9, 5, 7, 8]], [[0.2, 0.26, 0.9, 0.5], [0.5, 0.9, 0.3, 0.4, 0.4]]
    )
    hole = guarded(torch.zeros((1, 2), dtype=torch.int64))
    kernel("triton.step").tova_step(
        logits, lse, rows, guarded(torch.tensor(True)), hole, layerwise=True, block=16
    )
    start = rows.start.flatten()
    assert (hole.flatten() - start).tolist() == [0, 2]


@on_device
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_is_not_final_changes_nothing(policy: str) -> None:
    shape, how = SCENES[0]
    rows, logits, lse = ended(shape, **how)
    moved = Rows(
        *(guarded(t) for t in (rows.start, rows.length, rows.cap, rows.pos, rows.newest)),
        rows.sinks,
        rows.recent,
        rows.pinned,
    )
    before = statistics(policy, rows, False)
    notes = [copied(t) for t in before]
    hole = guarded(torch.full(rows.length.shape, 77))
    name = policy.split("-")[0] + "_step"
    named = {"layerwise": policy == "tova-layerwise"} if name == "tova_step" else {}
    getattr(kernel("triton.step"), name)(
        guarded(logits), guarded(lse), moved, guarded(torch.tensor(False)), hole, *notes, **named
    )
    assert bool((hole == 77).all())
    for mine, old in zip(notes, before, strict=True):
        pairs = zip(mine, old, strict=True) if isinstance(mine, list) else [(mine, old)]
        for a, b in pairs:
            assert not isinstance(a, Tensor) or torch.equal(a.cpu(), b)


# -- the newcomer ---------------------------------------------------------------------------------


@on_device
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_advance(final: bool, before: bool) -> None:
    sides = (3, 5)
    start, length, cap = (torch.randint(0, 9, sides, generator=randoms(i)) for i in range(3))
    hole = torch.randint(-4, 5, sides, generator=randoms(3)).clamp(min=-1)
    taken = torch.rand(sides, generator=randoms(4)) < 0.5
    outcomes = []
    for advance in (reference.advance, kernel("triton.append").advance):
        mine = [
            guarded(t)
            for t in (
                torch.tensor(final),
                start,
                length,
                cap,
                hole,
                torch.tensor(40),
                length + 1,
                torch.full(sides, 77),
                taken,
            )
        ]
        advance(*mine, before=before)
        assert all(untouched(t) for t in mine)
        outcomes.append(mine)
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert not bool(outcomes[1][0])


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "size", "coded"), [(1, 64, False), (5, 80, True), (9, 256, False)]
)
def test_append(heads: int, size: int, coded: bool, dtype: torch.dtype) -> None:
    rows = 3 * heads + 2
    key, value = (draw(i, (heads, size), dtype, 3.0) for i in (1, 2))
    key[0, :3] = 0.0
    if heads > 1:
        value[1] = 0.0
    wide = guarded(torch.cat((key, value), 1))  # rows of another stride, as a network hands over
    slot = torch.randperm(rows, generator=randoms(3))[:heads]
    stored = torch.int8 if coded else dtype
    outcomes = []
    for append in (reference.append, kernel("triton.append").append):
        k, v = (guarded(torch.full((rows, size), 3).to(stored)) for _ in range(2))
        pos = guarded(torch.full((rows,), 5, dtype=torch.int32))
        kinds = (torch.float32, torch.int16, torch.int64, torch.bool)
        blank = [guarded(torch.ones(rows, dtype=kind)) for kind in kinds]
        scales = [guarded(torch.full((rows,), 9.0)) for _ in range(2)] if coded else []
        append(
            wide[:, :size],
            wide[:, size:],
            slot.to(DEVICE),
            torch.tensor(41, device=DEVICE),
            k,
            v,
            pos,
            blank,
            *scales,
        )
        assert all(untouched(t) for t in (k, v, pos, *blank, *scales))
        outcomes.append([k, v, pos, *blank, *scales])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert bool((outcomes[1][2][slot.to(DEVICE)] == 41).all())


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
    """Heads with a hole, heads that grow and heads that are full; of equal distances the oldest."""
    lengths = [0 if h == 3 else 19 + 7 * h for h in range(heads)]
    start, length, rows = segments(lengths)
    cap = torch.tensor([n + (h % 3 == 1) for h, n in enumerate(lengths)]).clamp(min=1)
    hole = torch.tensor([int(start[h]) + 4 if h % 3 == 2 else -1 for h in range(heads)])
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
        (reference.hash_append, {}),
        (kernel("triton.append").hash_append, {"block": 16}),
    ):
        mine = [guarded(t) for t in (k, v, pos, code)]
        spare = tuple(guarded(torch.zeros((heads, *t.shape[1:]), dtype=t.dtype)) for t in mine)
        holes = guarded(hole)
        function(
            *(guarded(t) for t in (*given, start, length, cap)),
            holes,
            torch.tensor(rows, device=DEVICE),
            *mine,
            spare,
            width=max(lengths),
            sinks=sinks,
            recent=rows // 3,
            pinned=pinned,
            **more,
        )
        assert all(untouched(t) for t in (*mine, *spare, holes))
        outcomes.append([*mine, *spare, holes])
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
    spare = tuple(guarded(torch.zeros((1, *t.shape[1:]), dtype=t.dtype)) for t in mine)
    hole = guarded(torch.tensor([-1]))
    ten = torch.tensor([10])
    kernel("triton.append").hash_append(
        *(guarded(t) for t in (one, one[0], one[0], torch.ones(64, 8), ten - 10, ten, ten)),
        hole,
        guarded(ten[0]),
        *mine,
        spare,
        width=10,
        sinks=3,
        recent=2,
        pinned=0,
        block=16,
    )
    assert pos[int(hole)] == left
    assert int(spare[2]) == left
    assert int(mine[2][int(hole)]) == 10
    assert int(mine[3][int(hole)]) == 255


# -- who computes -------------------------------------------------------------------------------


def test_nobody_expects_triton_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    for name, line in (("auto", False), ("torch", False), ("triton", True)):
        chosen, notice = dispatch.choose(cpu, name, 64, torch.float32)
        assert chosen.name in (("torch", "native") if name == "auto" else ("torch",))
        assert (notice is not None and "CUDA" in notice) == line


@pytest.mark.parametrize(
    ("changed", "head_dim", "dtype", "line"),
    [
        ({"capability": (7, 5)}, 128, torch.bfloat16, "8.0"),
        ({"version": "3.2.0"}, 128, torch.bfloat16, "too old"),
        ({"version": None}, 128, torch.bfloat16, "not installed"),
        ({"version": "3.8.0+git5c8f3d2e"}, 128, torch.bfloat16, None),
        ({"broken": True}, 128, torch.bfloat16, "OSError"),
        ({"hip": "6.0"}, 128, torch.bfloat16, "NVIDIA"),
        ({}, 100, torch.bfloat16, "not 100"),
        ({}, 256, torch.float32, "not 256"),
        ({}, 64, torch.float64, "float64"),
        ({}, 128, torch.bfloat16, None),
    ],
)
def test_a_reason_is_one_line_and_never_an_error(
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, object],
    head_dim: int,
    dtype: torch.dtype,
    line: str | None,
) -> None:
    def load(name: str) -> object:
        if changed.get("version", "") is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if changed.get("broken"):
            raise OSError("a library is missing")
        return SimpleNamespace(Triton=Fake, __version__=changed.get("version", "3.6.0"))

    class Fake(dispatch.Kernels):
        name = "triton"

    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: changed.get("capability", (9, 0))
    )
    monkeypatch.setattr(torch.version, "hip", changed.get("hip"))
    monkeypatch.setattr(dispatch, "import_module", load)
    for name in ("auto", "triton"):
        chosen, notice = dispatch.choose(torch.device("cuda"), name, head_dim, dtype)
        assert (chosen.name == "triton") == (line is None)
        assert (notice is None) == (line is None)
        if notice is not None and line is not None:
            assert line in notice
            assert "\n" not in notice
    assert dispatch.choose(torch.device("cuda"), "torch", head_dim, dtype)[1] is None


LIBRARY = {"int8_product", "row_product", "rows_attention", "last_rows_attention"}
"""What torch does best on a GPU."""


def test_every_operation_has_a_kernel_and_a_twin() -> None:
    triton = (
        kernel("on_gpu").Triton
        if INTERPRETED
        else pytest.importorskip("minikv.kernels.triton.table").Triton
    )
    facts = ("name", "products")
    names = [n for n in vars(dispatch.Kernels) if not n.startswith("_") and n not in facts]
    assert len(names) > 10
    for name in names:
        assert getattr(dispatch.Kernels, name) is getattr(reference, name)
        own = getattr(triton, name) is not getattr(reference, name)
        assert own == (name not in LIBRARY), name
