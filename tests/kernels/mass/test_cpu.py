"""What queries give each row, in C, against float64 arithmetic and the twin, on odd sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prompts import observed, weights
from torch import Tensor

from minikv.kernels import Part
from minikv.kernels.mass import cpu as attention_mass
from minikv.kernels.mass import plain as twin
from minikv.kernels.native.build import library

pytestmark = pytest.mark.skipif(library()[0] is None, reason="no kernels in C here")


class Scene:
    """Queries [H, G, T, D] behind rows of an earlier part, some of them gone, NaN where they were,
    in any order, and those of their own."""

    def __init__(
        self,
        heads: int,
        group: int,
        size: int,
        rows: int,
        old: int,
        own: int,
        window: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        listed: bool = False,
        seed: int = 0,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        q = torch.randn(rows, heads, group, size, generator=draw) * 2
        self.q = q.to(dtype).permute(1, 2, 0, 3)
        self.k = torch.randn(heads, old + own, size, generator=draw).to(dtype)
        gone = torch.rand(heads, old, generator=draw) < 0.2
        pos = torch.stack([torch.randperm(old + 3, generator=draw)[:old] for _ in range(heads)])
        new = torch.arange(old + 3, old + 3 + own)
        self.pos = torch.cat((pos.masked_fill(gone, -1), new.expand(heads, own)), 1)
        self.k[self.pos < 0] = math.nan
        self.at = torch.arange(old + 3 + own - rows, old + 3 + own)
        self.window, self.old = window, old
        first: Part = (self.k[:, :old], self.pos[:, :old])
        if listed:
            index = torch.randperm(heads * old + 5, generator=draw)[: heads * old].view(heads, old)
            memory = torch.full((heads * old + 5, size), math.nan, dtype=dtype)
            memory[index] = self.k[:, :old]
            first = memory, self.pos[:, :old], index
        self.parts: list[Part] = [first, (self.k[:, old:], new[None])]
        self.p, lse = weights(self.q, self.k, self.at, self.pos, window)
        self.lse = lse.float()

    def check(self) -> None:
        found = observed(
            attention_mass.add_attention_mass, self.q, self.at, self.parts, self.window, self.lse
        )
        close(found[0], self.p.sum(2))
        close(found[1], self.p.mean(1).square().sum(1))
        each = attention_mass.each_attention(
            self.q, self.at, self.parts, self.window, self.lse, slice(1, len(self.q))
        )
        close(each, self.p[1:])
        for scored, columns in enumerate((slice(0, self.old), slice(self.old, None))):
            given = self.q, self.at, self.parts, scored, self.window
            for lse in (self.lse, None):
                got = attention_mass.peak_attention(*given, None, lse)
                close(got, self.p[..., columns].amax(2))
            scale = torch.linspace(0.1, 1.1, len(self.at))
            got = attention_mass.peak_attention(*given, scale, self.lse)
            close(got, (self.p * scale.double()[:, None])[..., columns].amax(2))


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def no_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("add_attention_mass", "each_attention", "peak_attention"):
        monkeypatch.setattr(twin, name, None)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "group", "size", "rows", "old", "own"),
    [(1, 1, 16, 1, 1, 1), (3, 4, 80, 7, 63, 111), (2, 3, 64, 33, 1, 63), (5, 1, 256, 17, 111, 40)],
)
def test_odd_sizes(
    heads: int,
    group: int,
    size: int,
    rows: int,
    old: int,
    own: int,
    dtype: torch.dtype,
    window: int | None,
    listed: bool,
) -> None:
    Scene(heads, group, size, rows, old, own, window, dtype, listed=listed).check()


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 4),
    group=st.integers(1, 5),
    size=st.integers(1, 64),
    rows=st.integers(1, 40),
    old=st.integers(1, 130),
    more=st.integers(0, 130),
    window=st.none() | st.integers(1, 200),
    listed=st.booleans(),
)
def test_any_size(
    heads: int,
    group: int,
    size: int,
    rows: int,
    old: int,
    more: int,
    window: int | None,
    listed: bool,
) -> None:
    Scene(heads, group, size, rows, old, rows + more, window, listed=listed, seed=1).check()


def test_more_queries_than_are_floats_at_a_time() -> None:
    """In chunks of a prompt, each added to what is there, more than a thread loads at once."""
    heads, group, rows, size = 2, 2, 1100, 128
    draw = torch.Generator().manual_seed(2)
    q = torch.randn(heads, group, rows, size, generator=draw).bfloat16()
    k = torch.randn(heads, rows, size, generator=draw).bfloat16()
    at = torch.arange(rows)
    p, lse = weights(q, k, at, at.expand(heads, -1), None)
    mass, squares = torch.ones(heads, group, rows), torch.ones(heads, rows)
    for lo, hi in ((0, 1), (1, 40), (40, rows)):
        given = q[:, :, lo:hi], lse[:, :, lo:hi].float(), at[lo:hi], k[:, :hi], at[None, :hi]
        attention_mass.add_attention_mass(mass[..., :hi], squares[:, :hi], *given, None)
    close(mass, 1 + p.sum(2))
    close(squares, 1 + p.mean(1).square().sum(1))
    peak = attention_mass.peak_attention(q, at, [(k, at[None])], 0, None, None, lse.float())
    close(peak, p.amax(2))


def test_queries_at_one_position() -> None:
    """That of the last one, repeated without a copy."""
    scene = Scene(2, 2, 32, 5, 9, 20)
    one = scene.at[-1:].expand(5)
    p, lse = weights(scene.q, scene.k, one, scene.pos, None)
    add = attention_mass.add_attention_mass
    close(observed(add, scene.q, one, scene.parts, None, lse.float())[0], p.sum(2))


def test_a_query_that_sees_nothing_gives_nothing() -> None:
    scene = Scene(2, 2, 32, 5, 9, 20)
    at = scene.at.clone()
    at[0] = -1
    p, lse = weights(scene.q, scene.k, at, scene.pos, None)
    assert bool((lse[:, :, 0] == -math.inf).all())
    add = attention_mass.add_attention_mass
    close(observed(add, scene.q, at, scene.parts, None, lse.float())[0], p.sum(2))


def test_what_is_not_a_number_stays_so_where_it_is_seen() -> None:
    scene = Scene(1, 1, 16, 4, 8, 8)
    scene.k[:, 12] = math.nan  # seen by the last queries
    given = scene.q, scene.at, scene.parts
    lse = torch.zeros_like(scene.lse)
    mass, _ = observed(attention_mass.add_attention_mass, *given, None, lse)
    peak = attention_mass.peak_attention(*given, 1, None, None, lse)
    for found in (mass[0, 0, 8:], peak[0, 0]):
        assert found.isnan().tolist() == [i == 4 for i in range(8)]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_query_that_is_not_a_number_makes_a_peak_of_none(at: int) -> None:
    scene = Scene(1, 1, 16, 4, 8, 8, dtype=torch.float32)
    scene.q[:, :, at] = math.nan
    given = scene.q, scene.at, scene.parts
    peak = attention_mass.peak_attention(*given, 1, None, None, torch.zeros_like(scene.lse))
    seen = scene.parts[1][1][0] <= scene.at[at]
    assert peak[0, 0].isnan().tolist() == seen.tolist()


@pytest.mark.parametrize(
    "what", ["float16", "mixed", "wide", "turned", "positions", "queries' positions"]
)
def test_the_twin_takes_the_rest(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, pos = torch.randn(2, 2, 3, 264)[..., :32], torch.randn(2, 9, 32), torch.arange(9)[None]
    if what == "float16":
        q, k = q.half(), k.half()
    elif what == "mixed":
        q = q.bfloat16()
    elif what == "wide":
        q, k = torch.randn(2, 2, 3, 264), torch.randn(2, 9, 264)
    elif what == "turned":
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    elif what == "positions":
        pos = pos.int()
    asked = []
    for name in ("add_attention_mass", "each_attention", "peak_attention"):
        monkeypatch.setattr(twin, name, lambda *_, name=name, **__: asked.append(name))
    lse, at = torch.zeros(2, 2, 3), torch.arange(6, 9)
    at = at.int() if what == "queries' positions" else at
    mass, squares = torch.zeros(2, 2, 9), torch.zeros(2, 9)
    attention_mass.add_attention_mass(mass, squares, q, lse, at, k, pos, None)
    attention_mass.each_attention(q, at, [(k, pos)], None, lse, slice(0, 2))
    attention_mass.peak_attention(q, at, [(k, pos)], 0, None, None, lse)
    assert asked == ["add_attention_mass", "each_attention", "peak_attention"]


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        @staticmethod
        def minikv_attention_mass(*given: object) -> int:
            return 2

    scene = Scene(1, 1, 16, 4, 8, 8)
    monkeypatch.setattr(attention_mass, "_library", Without)
    with pytest.raises(MemoryError, match="found no memory"):
        scene.check()
