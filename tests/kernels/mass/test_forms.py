"""What queries give each row, in every form, against float64 arithmetic, on odd sizes, in memory
full of NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from forms import Form, each, forms, needs_c
from hypothesis import given, settings
from hypothesis import strategies as st
from prompts import observed, weights
from tensors import untouched
from torch import Tensor
from triton_device import close

from minikv.kernels import Part, Queries
from minikv.kernels.mass import cpu as native
from minikv.kernels.mass import plain as twin

NAMES = ("add_attention_mass", "each_attention", "peak_attention")
FORM = "quadratic_forms"


class Scene:
    """Queries [H, G, T, D] behind rows of an earlier part, some of them gone, NaN where they were,
    in any order, and those of their own. sizes: H, G, D, T, earlier rows and own ones."""

    def __init__(
        self,
        sizes: Sequence[int],
        window: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        listed: bool = False,
        seed: int = 0,
    ) -> None:
        heads, group, size, rows, old, own = sizes
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

    @property
    def queries(self) -> Queries:
        return Queries(self.q, self.at, self.window, self.lse)

    def placed(self, form: Form) -> tuple[Queries, list[Any]]:
        """Queries, which are [T, H, G, D] in memory, and the parts."""
        q = form.place(self.q.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)
        asked = Queries(q, form.place(self.at), self.window, form.place(self.lse))
        return asked, [tuple(map(form.place, part)) for part in self.parts]

    def check(self, form: Form, name: str, scaled: bool = False) -> None:
        """Of the operation `name`, all that it makes."""
        queries, parts = self.placed(form)
        if name == "add_attention_mass":
            found = observed(form, queries, parts, form.place)
            same(found[0], self.p.sum(2))
            same(found[1], self.p.mean(1).square().sum(1))
        elif name == "each_attention":
            many = len(self.q)
            for heads in {(0, many), (many - 1, many)}:
                same(form(queries, parts, slice(*heads)), self.p[slice(*heads)])
        else:
            scale = torch.linspace(0.1, 1.1, len(self.at)) if scaled else None
            want = self.p if scale is None else self.p * scale.double()[:, None]
            for scored, columns in enumerate((slice(0, self.old), slice(self.old, None))):
                for known in (queries, queries._replace(lse=None)):
                    by = None if scale is None else form.place(scale)
                    same(form(known, parts, scored, by), want[..., columns].amax(2))


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    torch.testing.assert_close(got.cpu().double(), want.cpu().double(), rtol=2e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def no_twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms in C do not ask torch."""
    form = request.node.callspec.params.get("form") if hasattr(request.node, "callspec") else None
    for name in (*NAMES, FORM) if form is None or form.by == "c" else ():
        monkeypatch.setattr(twin, name, None)


SIZES = [
    # H, G, D, queries, rows of the first and second part
    (1, 1, 16, 1, 1, 1),
    (3, 4, 80, 7, 63, 111),
    (2, 3, 64, 33, 1, 63),
    (5, 1, 256, 17, 111, 40),
    (5, 3, 96, 33, 1, 63),
    (1, 3, 128, 17, 111, 40),
    (2, 5, 16, 3, 30, 11),
    (3, 2, 8, 150, 700, 1600),
]
KINDS = [
    # window, dtype, first part by a list
    (None, torch.float32, False),
    (None, torch.bfloat16, True),
    (20, torch.float16, False),
    (9, torch.bfloat16, True),
    (1, torch.float32, True),
    (40, torch.bfloat16, False),
]


def takes(form: Form, case: tuple[int, int]) -> bool:
    """Triton takes each size in one kind, C and torch in every kind."""
    size, kind = case
    if form.by == "triton":
        return kind == size % len(KINDS) and SIZES[size][2] >= 16
    return KINDS[kind][1] != torch.float16 and (form.by == "c" or KINDS[kind][1] == torch.float32)


CASES = [(size, kind) for size in range(len(SIZES)) for kind in range(len(KINDS))]


@pytest.mark.parametrize(
    ("name", "form", "case"),
    [
        pytest.param(name, *one.values, marks=one.marks, id=f"{name}-{one.id}")
        for name in NAMES
        for one in each(forms(name), CASES, takes)
    ],
)
def test_odd_sizes(name: str, form: Form, case: tuple[int, int]) -> None:
    window, dtype, listed = KINDS[case[1]]
    scene = Scene(SIZES[case[0]], window, dtype, listed)
    scene.check(form, name, scaled=bool(case[0] % 2))


@needs_c
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (4, 5, 64, 40, 130)), st.integers(0, 130)),
    window=st.none() | st.integers(1, 200),
    listed=st.booleans(),
    scaled=st.booleans(),
)
def test_any_size_in_c(sizes: Any, window: int | None, listed: bool, scaled: bool) -> None:
    *others, more = sizes
    scene = Scene((*others, others[3] + more), window, listed=listed, seed=1)
    for name in NAMES:
        scene.check(Form("c", lambda name=name: getattr(native, name)), name, scaled)


@pytest.mark.parametrize("form", forms("add_attention_mass"))
@pytest.mark.parametrize(("rows", "window"), [(150, None), (150, 37), (1100, None)])
def test_a_prompt_in_chunks(form: Form, rows: int, window: int | None) -> None:
    """Every query of a prompt, in chunks of uneven length, each added to what is there: of 1,100
    rows more than a thread in C loads at once."""
    if form.by == "triton" and rows > 150:
        pytest.skip("is no more to Triton")
    heads, group, size = 2, 3, 128 if rows > 150 else 96
    draw = torch.Generator().manual_seed(2)
    dtype = torch.bfloat16 if form.by == "c" else torch.float32
    q = torch.randn(rows, heads, group, size, generator=draw).to(dtype).permute(1, 2, 0, 3)
    k = torch.randn(heads, rows, size, generator=draw).to(dtype)
    at = torch.arange(1000, 1000 + rows)
    p, lse = weights(q, k, at, at.expand(heads, -1), window)
    mass, squares = (form.place(torch.ones(heads, *n, rows)) for n in ((group,), ()))
    keys, places = form.place(k), form.place(at[None])
    for lo, hi in ((0, 1), (1, 112), (112, rows)):
        chunk = form.place(q[:, :, lo:hi].permute(2, 0, 1, 3)).permute(1, 2, 0, 3)
        sums = form.place(lse[:, :, lo:hi].float())
        queries = Queries(chunk, form.place(at[lo:hi]), window, sums)
        form(mass[..., :hi], squares[:, :hi], queries, (keys[:, :hi], places[:, :hi]))
    close(mass, 1 + p.sum(2), 2e-5)
    close(squares, 1 + p.mean(1).square().sum(1), 2e-5)
    assert untouched(mass)
    assert untouched(squares)


@pytest.mark.parametrize("form", forms("add_attention_mass"))
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("blind", [False, True])
def test_queries_at_one_position_and_one_that_sees_nothing(
    form: Form, listed: bool, blind: bool
) -> None:
    """The position of the last one, repeated without a copy: what is behind it is not read. A query
    that sees nothing gives nothing."""
    scene = Scene((3, 2, 64, 5, 33, 17), dtype=torch.float32, listed=listed)
    at = scene.at.clone()
    at[0] = -1
    at = form.place(at) if blind else form.place(scene.at[-1:]).expand(5)
    p, lse = weights(scene.q, scene.k, at.cpu(), scene.pos, None)
    assert bool((lse[:, :, 0] == -math.inf).all()) == blind
    queries, parts = scene.placed(form)
    queries = queries._replace(at=at, lse=form.place(lse.float()))
    mass, squares = observed(form, queries, parts, form.place)
    same(mass, p.sum(2))
    same(squares, p.mean(1).square().sum(1))


@pytest.mark.parametrize("form", forms(FORM))
@pytest.mark.parametrize("size", range(len(SIZES)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quadratic_forms(form: Form, size: int, dtype: torch.dtype) -> None:
    heads, group, wide, _, _, rows = SIZES[size]
    draw = torch.Generator().manual_seed(size)
    x = torch.randn(rows, heads, wide, generator=draw).to(dtype).transpose(0, 1)
    factor = torch.randn(heads, group, wide, wide + 3, generator=draw)
    matrices = factor @ factor.transpose(2, 3)
    found = form(form.place(x), form.place(matrices), 2 * rows * wide)
    line = x.double()[:, None]
    same(found, (line @ matrices.double() * line).sum(-1))


@needs_c
@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_is_not_a_number_stays_so_where_it_is_seen(at: int) -> None:
    """A key, and a query."""
    scene = Scene((1, 1, 16, 4, 8, 8), dtype=torch.float32)
    lse = torch.zeros_like(scene.lse)
    scene.k[:, 12] = math.nan  # seen by the last queries
    queries = scene.queries._replace(lse=lse)
    mass, _ = observed(native.add_attention_mass, queries, scene.parts)
    peak = native.peak_attention(queries, scene.parts, 1)
    for found in (mass[0, 0, 8:], peak[0, 0]):
        assert found.isnan().tolist() == [i == 4 for i in range(8)]
    scene = Scene((1, 1, 16, 4, 8, 8), dtype=torch.float32)
    scene.q[:, :, at] = math.nan
    peak = native.peak_attention(scene.queries._replace(lse=lse), scene.parts, 1)
    assert peak[0, 0].isnan().tolist() == (scene.parts[1][1][0] <= scene.at[at]).tolist()


@pytest.mark.parametrize(
    "what", ["float16", "mixed", "wide", "turned", "positions", "queries' positions"]
)
def test_torch_takes_the_rest(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, dtype = 264 if what == "wide" else 32, torch.float16 if what == "float16" else None
    q, k = torch.randn(2, 2, 3, 264, dtype=dtype)[..., :size], torch.randn(2, 9, size, dtype=dtype)
    q = q.bfloat16() if what == "mixed" else q
    k = k.transpose(1, 2).contiguous().transpose(1, 2) if what == "turned" else k
    pos = torch.arange(9, dtype=torch.int32 if what == "positions" else None)[None]
    at = torch.arange(6, 9, dtype=torch.int32 if what == "queries' positions" else None)
    lse, asked = torch.zeros(2, 2, 3), []
    for name in NAMES:
        monkeypatch.setattr(twin, name, lambda *_, name=name, **__: asked.append(name))
    mass, squares = torch.zeros(2, 2, 9), torch.zeros(2, 9)
    queries, part = Queries(q, at, None, lse), (k, pos)
    native.add_attention_mass(mass, squares, queries, part)
    native.each_attention(queries, [part], slice(0, 2))
    native.peak_attention(queries, [part], 0)
    assert asked == [*NAMES]


@pytest.mark.parametrize("what", ["float16", "wide", "turned"])
def test_torch_takes_other_forms(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 9, 264 if what == "wide" else 16)
    x = x.half() if what == "float16" else x
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if what == "turned" else x
    monkeypatch.setattr(twin, FORM, lambda *_: "torch's")
    assert native.quadratic_forms(x, torch.zeros(2, 3, *x.shape[2:], x.shape[2]), 64) == "torch's"
