"""Attention of prompts in C, by products of bfloat16 and of floats, against float64 arithmetic and
torch, on odd sizes and in the strides that a prefill has."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minikv import kernels
from minikv.kernels.attention import cpu as prefill
from minikv.kernels.attention import plain as attention
from minikv.kernels.native import build

WAYS = {"tiles": prefill.TILES, "bfloat16": prefill.BF16, "floats": prefill.FLOAT}
why = build.library()[1] or "the processor multiplies no bf16 vectors"
skips = {name: pytest.mark.skipif(not way.available(), reason=why) for name, way in WAYS.items()}
NAN = math.nan

Inputs = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(
    scope="module",
    params=[pytest.param(way, marks=skips[name], id=name) for name, way in WAYS.items()],
)
def way(request: pytest.FixtureRequest) -> prefill.Prefill:
    found: prefill.Prefill = request.param
    return found


def make(
    heads: int, group: int, rows: int, keys: int, size: int, *, seed: int = 0, by: float = 2.0
) -> Inputs:
    """q [H, G, T, D], k and v [H, N, D] as `minikv.cache.prefill` has them: queries [T, H, G, D] in
    memory, rows those of a longer staging buffer, with NaN beyond them."""
    generator = torch.Generator().manual_seed(seed + 7 * rows + keys)
    q = torch.randn(rows, heads, group, size, generator=generator) * by
    k, v = torch.full((2, heads, keys + 5, size), NAN)
    for x in (k, v):
        x[:, :keys] = torch.randn(heads, keys, size, generator=generator)
    k, v = k.bfloat16()[:, :keys], v.bfloat16()[:, :keys]
    return q.bfloat16().permute(1, 2, 0, 3), k, v


def truth(q: Tensor, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Query i sees the rows below first + i."""
    logits = torch.einsum("hgtd,hnd->hgtn", q.double(), k.double()) / math.sqrt(q.shape[-1])
    limit = first + torch.arange(q.shape[2])
    hidden = torch.arange(k.shape[1]) >= limit[:, None]
    logits = logits.masked_fill(hidden, -math.inf)
    return torch.einsum("hgtn,hnd->hgtd", logits.softmax(-1), v.double()), logits.logsumexp(-1)


def check(found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, first: int) -> None:
    out, lse = found
    want, sums = truth(q, k, v, first)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert out.shape == q.shape
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-4)
    # The weights and the result are rounded to 8 bits each.
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=2**-7)
    assert float((out.double() - want).square().mean().sqrt()) < 3e-3


SIZES = [
    (1, 1, 1, 1, 32),
    (3, 2, 5, 17, 64),
    (5, 3, 33, 70, 64),
    (2, 7, 7, 3, 96),
    (1, 4, 64, 300, 80),
    (2, 5, 131, 129, 128),
    (1, 6, 100, 257, 256),
    (4, 3, 300, 8, 64),
    (1, 1, 1, 300, 16),
    (2, 1, 49, 64, 48),
    (1, 3, 171, 128, 64),
    (7, 1, 95, 65, 32),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", ["rows", "causal", "last"])
def test_odd_sizes(
    way: prefill.Prefill, sizes: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "rows_attention", lambda *_, **__: pytest.fail("the twin"))
    heads, group, rows, keys, size = sizes
    keys = rows if kind == "causal" else rows + keys if kind == "last" else keys
    q, k, v = make(heads, group, rows, keys, size)
    if kind == "last":
        check(way.last_rows_attention(q, k, v), q, k, v, keys - rows + 1)
        return
    found = way.rows_attention(q, k, v, causal=kind == "causal")
    check(found, q, k, v, 1 if kind == "causal" else keys)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 7),
    rows=st.integers(1, 200),
    keys=st.integers(1, 300),
    steps=st.integers(1, 16),
    causal=st.booleans(),
)
def test_any_size(
    way: prefill.Prefill, heads: int, group: int, rows: int, keys: int, steps: int, causal: bool
) -> None:
    q, k, v = make(heads, group, rows, rows if causal else keys, 16 * steps, seed=3)
    found = way.rows_attention(q, k, v, causal=causal)
    check(found, q, k, v, 1 if causal else keys)


@pytest.mark.parametrize(
    ("rows", "kind", "most", "least"),
    [
        (40, torch.bfloat16, 1.1, 1e-5),
        (300, torch.bfloat16, 1.1, 1e-5),
        (300, torch.float32, 1.5, 2e-6),
    ],
)
def test_as_precise_as_the_twin(
    way: prefill.Prefill, rows: int, kind: torch.dtype, most: float, least: float
) -> None:
    inputs = make if kind == torch.bfloat16 else floats
    q, k, v = inputs(2, 3, rows, rows, 64, seed=5)
    want, sums = truth(q, k, v, 1)
    errors = []
    for attend in (way.rows_attention, attention.rows_attention):
        out, lse = attend(q, k, v, causal=True)
        off = (out.double() - want).square().mean().sqrt()
        errors.append((float(off), float((lse.double() - sums).abs().max())))
    ours, theirs = errors
    assert ours[0] < most * theirs[0]
    assert ours[1] < max(least, most * theirs[1])


@pytest.mark.parametrize("steep", [4.0, -4.0, 40.0, -40.0])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_logits_that_rise_and_fall_by_thousands(
    way: prefill.Prefill, steep: float, size: int, causal: bool
) -> None:
    """Far beyond what an exponent holds, above or below the first logits: the bound must move."""
    q, k, v = make(2, 3, 270, 270, size, seed=1, by=1.0)
    q, k = q.clone(), k.clone()
    q[..., 0] = math.sqrt(size)
    q[:, 1, ::2, 0] *= -1
    k[..., 0] = steep * torch.arange(270)
    found = way.rows_attention(q, k, v, causal=causal)
    want, sums = truth(q, k, v, 1 if causal else 270)
    torch.testing.assert_close(found[1].double(), sums, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(found[0].double(), want, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("height", [10.0, 25.0, 80.0, 100.0])
def test_one_row_that_outweighs_all_before_it(way: prefill.Prefill, height: float) -> None:
    """In the middle of a block, seen by some queries of a strip only, among large values."""
    q, k, v = make(1, 2, 200, 200, 64, seed=2, by=0.25)
    q, k, v = q.clone(), k.clone(), v * 2**17
    q[..., 0] = 8.0
    k[..., 0] = 0.0
    k[:, 150, 0] = height
    out, lse = way.rows_attention(q, k, v, causal=True)
    check((out / 2**17, lse), q, k, v / 2**17, 1)
    if height > 25:
        assert bool((out[:, :, 150:] == v[:, None, 150:151]).all())


def test_strides(way: prefill.Prefill) -> None:
    """Rows of an arena of all heads, of a wider row, at odd places; queries head by head."""
    q, k, v = make(4, 3, 60, 90, 64, seed=4)
    want = way.rows_attention(q, k, v)
    among = torch.full((2, 91, 6, 64), NAN).bfloat16()
    among[0, 1:, 1:5], among[1, 1:, 1:5] = k.transpose(0, 1), v.transpose(0, 1)
    wide = torch.full((2, 4, 90, 71), NAN).bfloat16()
    wide[0, :, :, 3:67], wide[1, :, :, 3:67] = k, v
    for rows in (among[:, 1:, 1:5].transpose(1, 2), wide[..., 3:67]):
        for queries in (q, q.contiguous(), q.transpose(0, 1).contiguous().transpose(0, 1)):
            found = way.rows_attention(queries, rows[0], rows[1])
            for got, expected in zip(found, want, strict=True):
                assert torch.equal(got, expected)
    same = way.rows_attention(q[:, :1].expand(4, 3, 60, 64), k[:1].expand(4, -1, -1), v)
    each = way.rows_attention(q[:, :1], k[:1].repeat(4, 1, 1), v)
    assert torch.equal(same[0], each[0].expand(4, 3, 60, 64))


def test_parts_join_and_lie_as_the_products_take_them(way: prefill.Prefill) -> None:
    q, k, v = make(4, 3, 70, 210, 64, seed=6)
    parts = [
        way.rows_attention(q, k[:, :140], v[:, :140]),
        way.rows_attention(q, k[:, 140:], v[:, 140:], causal=True),
    ]
    whole = way.last_rows_attention(q, k, v)
    check(kernels.merge(parts), q, k, v, 141)
    check(whole, q, k, v, 141)
    for mixed in (whole[0], kernels.merge(parts)[0]):
        assert mixed.permute(2, 0, 1, 3).is_contiguous()


def test_threads_change_no_number(way: prefill.Prefill) -> None:
    q, k, v = make(3, 3, 260, 260, 64, seed=7)
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            made.append(way.rows_attention(q, k, v, causal=True))
    finally:
        torch.set_num_threads(before)
    for out, lse in made[1:]:
        assert torch.equal(out, made[0][0])
        assert torch.equal(lse, made[0][1])


def floats(
    heads: int, group: int, rows: int, keys: int, size: int, *, seed: int = 0, by: float = 2.0
) -> Inputs:
    """`make`, with all the bits of a float32."""
    q, k, v = (x.float() for x in make(heads, group, rows, keys, size, seed=seed, by=by))
    generator = torch.Generator().manual_seed(seed)
    for x in (q, k, v):
        x *= 1 + 2**-8 * torch.rand(x.shape, generator=generator)
    return q, k, v


def close(found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, first: int) -> None:
    out, lse = found
    want, sums = truth(q, k, v, first)
    assert out.dtype == lse.dtype == torch.float32
    assert out.permute(2, 0, 1, 3).is_contiguous()
    torch.testing.assert_close(lse.double(), sums, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 7),
    rows=st.integers(1, 200),
    keys=st.integers(0, 300),
    steps=st.integers(1, 16),
    kind=st.sampled_from(["rows", "causal", "last"]),
)
def test_float32_of_any_size(
    way: prefill.Prefill, heads: int, group: int, rows: int, keys: int, steps: int, kind: str
) -> None:
    keys = {"rows": 1 + keys, "causal": rows, "last": rows + keys}[kind]
    q, k, v = floats(heads, group, rows, keys, 16 * steps, seed=9)
    if kind == "last":
        close(way.last_rows_attention(q, k, v), q, k, v, keys - rows + 1)
    else:
        causal = kind == "causal"
        close(way.rows_attention(q, k, v, causal=causal), q, k, v, 1 if causal else keys)


@pytest.mark.parametrize("steep", [4.0, -4.0, 40.0, -40.0])
def test_float32_logits_that_rise_and_fall_by_thousands(way: prefill.Prefill, steep: float) -> None:
    q, k, v = floats(2, 3, 270, 270, 64, seed=1, by=1.0)
    q[..., 0] = 8.0
    q[:, 1, ::2, 0] *= -1
    k[..., 0] = steep * torch.arange(270)
    want, sums = truth(q, k, v, 1)
    out, lse = way.rows_attention(q, k, v, causal=True)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=2e-3)  # logits have an error


@pytest.mark.parametrize(
    "what", ["float16", "mixed", "size", "wide", "turned", "nothing", "no library"]
)
def test_the_twin_takes_the_rest(
    way: prefill.Prefill, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"size": 40, "wide": 272}.get(what, 64)
    q, k, v = make(2, 3, 20, 30, size)
    if what == "float16":
        q, k, v = q.half(), k.half(), v.half()
    elif what == "mixed":
        q = q.float()
    elif what == "turned":
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    elif what == "nothing":
        q = q[:, :, :0]
    elif what == "no library":
        monkeypatch.setattr(prefill, "_function", lambda _: None)
        assert not way.available()
    asked = []

    def twin(*inputs: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
        asked.append(causal)
        out = torch.zeros(inputs[0].shape)
        return out, out[..., 0]

    # Only who is asked: torch's kernel fails on no queries.
    monkeypatch.setattr(attention, "rows_attention", twin)
    way.rows_attention(q, k, v)
    way.rows_attention(q, k, v, causal=True)
    way.last_rows_attention(q, k, v)
    assert asked == [False, True, True, False]


def test_the_last_rows_without_the_kernel(
    way: prefill.Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_function", lambda _: None)
    q, k, v = make(2, 3, 20, 50, 64)
    check(way.last_rows_attention(q, k, v), q, k, v, 31)
    check(way.last_rows_attention(q, k[:, :20], v[:, :20]), q, k[:, :20], v[:, :20], 1)


NO_INSTRUCTIONS = SimpleNamespace(
    minikv_rows_attention_available=int, minikv_rows_attention_tiles_available=int
)


@pytest.mark.parametrize("library", [None, NO_INSTRUCTIONS])
def test_a_machine_without_the_instructions(
    library: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No library, or one that says no: without it floats are not there either."""
    monkeypatch.setattr(prefill, "library", lambda: (library, "" if library else "no compiler"))
    prefill._function.cache_clear()
    try:
        assert not prefill.TILES.available()
        assert not prefill.BF16.available()
        assert library is not None or not prefill.FLOAT.available()
    finally:
        prefill._function.cache_clear()


def test_memory_that_cannot_be_had(way: prefill.Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_function", lambda _: lambda *_: 2)
    with pytest.raises(MemoryError):
        way.rows_attention(*make(1, 1, 3, 3, 64))
