"""The C kernels of a step against float64 arithmetic and their twins, on odd sizes, with NaN in
every row that nobody holds; and how the library comes to be."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from minikv.kernels import dispatch
from minikv.kernels.cpu import build, product
from minikv.kernels.cpu import step as native
from minikv.kernels.torch import reference

needs_compiler = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")
DTYPES = [torch.float32, torch.bfloat16]
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def randoms(seed: int, *shape: int, dtype: torch.dtype = torch.float32, by: float = 1.0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (made * by).to(dtype)


def close(got: Tensor, want: Tensor, loose: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=loose, atol=loose)


def segments(lengths: list[int], gap: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """start and length [H] with unused rows between the heads, and which rows are in use [R]."""
    length = torch.tensor(lengths)
    start = (length + gap).cumsum(0) - length
    used = torch.zeros(int(start[-1] + length[-1]) + gap, dtype=torch.bool)
    for a, n in zip(start.tolist(), lengths, strict=True):
        used[a : a + n] = True
    return start, length, used


CASES = [
    (1, 64, [1]),
    (3, 80, [0, 37, 1]),
    (4, 96, [16, 0, 130, 1, 5]),
    (7, 128, [3, 0, 200, 17, 64]),
    (1, 256, [40, 33, 0]),
    (5, 8, [9, 30]),
    (2, 20, [31, 2]),
    (4, 64, [700, 900, 513]),
]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "size", "lengths"), CASES)
@pytest.mark.parametrize("sees", ["all", "window", "logits"])
def test_attention_over_segments(
    group: int, size: int, lengths: list[int], dtype: torch.dtype, sees: str
) -> None:
    start, length, used = segments(lengths)
    q = randoms(1, len(lengths), group, size, dtype=dtype, by=2.0)
    k, v = (randoms(i, len(used), size, dtype=dtype) for i in (2, 3))
    k[~used] = v[~used] = math.nan
    pos = torch.randperm(len(used), generator=torch.Generator().manual_seed(4)).to(torch.int32)
    for a, n in zip(start.tolist(), lengths, strict=True):
        if n:
            pos[a + n // 2] = len(used)  # a head that has rows sees one
    oldest = torch.tensor(len(used) // 3)
    wide = max(lengths) + 5
    logits = torch.full((len(lengths), group, wide), 7.0) if sees == "logits" else None
    lse = torch.empty(len(lengths), group) if sees == "logits" else None
    windowed = {} if sees == "all" else {"pos": pos, "oldest": oldest}
    mixed, sums = native.ragged_attention(
        q, k, v, start, length, width=wide, logits=logits, lse=lse, **windowed
    )
    assert mixed.dtype == dtype
    for h, (a, n) in enumerate(zip(start.tolist(), lengths, strict=True)):
        x = q[h].double() @ k[a : a + n].double().T / math.sqrt(size)
        if sees != "all":
            x = x.masked_fill(pos[a : a + n] < oldest, -math.inf)
        want = x.softmax(-1) @ v[a : a + n].double() if n else torch.zeros(group, size)
        close(mixed[h], want, LOOSE[dtype])
        close(sums[h], x.logsumexp(-1) if n else torch.full((group,), -math.inf))
        if logits is not None:
            close(logits[h, :, :n], x)
            assert bool((logits[h, :, n:] == 7.0).all())
    if lse is not None:
        assert sums is lse


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [20, 64, 96])
def test_attention_over_codes(dtype: torch.dtype, size: int) -> None:
    start, length, used = segments([30, 0, 1, 70])
    q = randoms(1, 4, 3, size, dtype=dtype, by=2.0)
    (k, ks), (v, vs) = (reference.to_codes(randoms(i, len(used), size)) for i in (2, 3))
    got, lse = native.ragged_attention(q, k, v, start, length, width=70, k_scale=ks, v_scale=vs)
    want, other = reference.ragged_attention(
        q.double(), k.double() * ks[:, None], v.double() * vs[:, None], start, length, width=70
    )
    close(got, want, LOOSE[dtype])
    close(lse, other)


@needs_compiler
def test_what_is_not_finite_is_not_hidden() -> None:
    """A NaN in a row that is seen comes out, so that the turn is stopped."""
    q, k = randoms(1, 1, 2, 64).abs(), randoms(2, 9, 64)
    start, length = torch.tensor([0]), torch.tensor([9])
    for bad in (math.nan, math.inf):
        k[4, 3] = bad
        mixed, _ = native.ragged_attention(q, k, randoms(3, 9, 64), start, length, width=9)
        assert bool(mixed.isnan().any())


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coded", [False, True])
def test_newcomers(dtype: torch.dtype, coded: bool) -> None:
    heads, size, rows = 3, 20, 40
    both = randoms(1, heads, 2, size, dtype=dtype)
    key, value, slot = both[:, 0], both[:, 1], torch.tensor([7, 39, 0])
    key[1] = 0.0
    kinds = (torch.float32, torch.int16, torch.int32, torch.int64, torch.bool)

    def fresh() -> tuple[list[Tensor], list[Tensor]]:
        kind = torch.int8 if coded else dtype
        columns = [torch.full((rows, size), 5).to(kind) for _ in range(2)]
        columns.append(torch.full((rows,), 5, dtype=torch.int32))
        scales = [torch.full((rows,), 5.0) for _ in range(2)] if coded else []
        return columns + [torch.full((rows,), 1).to(kind) for kind in kinds], scales

    (ours, mine), (theirs, other) = fresh(), fresh()
    for who, columns, scales in ((native, ours, mine), (reference, theirs, other)):
        who.append(key, value, slot, torch.tensor(77), *columns[:3], columns[3:], *scales)
    for one, two in zip([*ours, *mine], [*theirs, *other], strict=True):
        assert torch.equal(one, two)
    assert int(ours[2].sum()) == 5 * (rows - heads) + 77 * heads


@needs_compiler
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("go", [False, True])
def test_advancing(before: bool, go: bool) -> None:
    generator = torch.Generator().manual_seed(before + 2 * go)
    for _ in range(20):
        heads = torch.randint(0, 9, (5, 2, 3), generator=generator)
        start, length, cap, count, slot = heads.unbind(0)
        hole = torch.randint(-2, 4, (2, 3), generator=generator).clamp(min=-1)
        taken = torch.randint(0, 2, (2, 3), generator=generator).to(torch.bool)
        flag, position = torch.tensor(go), torch.tensor(11)
        given = [flag, start, length, cap, hole, position, count, slot, taken]
        ours, theirs = ([t.clone() for t in given] for _ in range(2))
        native.advance(*ours, before=before)
        reference.advance(*theirs, before=before)
        for one, two in zip(ours, theirs, strict=True):
            assert torch.equal(one, two)
        assert int(ours[5]) == 11 + go


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 768), (3, 77), (200, 640)])
def test_the_operators_between_products(dtype: torch.dtype, rows: int, size: int) -> None:
    x = randoms(1, rows, 2 * size, dtype=dtype, by=3.0)[:, :size]
    y, weight = randoms(2, rows, size, dtype=dtype), randoms(3, size, dtype=dtype)
    loose = LOOSE[dtype]
    for more in (None, y):
        one, two = (torch.cat((x, x), 1)[:, :size] for _ in range(2))  # rows that are apart
        got = native.add_norm(one, more, weight, 1e-5)
        want = reference.add_norm(two, more, weight, 1e-5)
        close(got, want, loose)
        close(one, two, loose)
        exact = one.double()
        exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        close(got, exact, loose)
    both = randoms(4, rows, 2 * size, dtype=dtype, by=20.0)
    want = torch.nn.functional.silu(both[:, :size].double()) * both[:, size:].double()
    got = native.silu_mul(both)
    assert got.data_ptr() == both.data_ptr()
    close(got, want, loose)
    heads, angle = randoms(5, rows, 5, 22, dtype=dtype)[:, :3], randoms(6, rows, 1, 11)
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((-angle, angle), -1).sin()
    given = heads, cos.to(dtype), sin.to(dtype)
    got = native.rotate(*given)
    assert got.is_contiguous()
    close(got, reference.rotate(*given), loose)


@needs_compiler
@pytest.mark.parametrize("value", [0.0, -1e-3, -20.0, -87.5, -200.0, 80.0, math.inf, math.nan])
def test_silu_at_its_ends(value: float) -> None:
    both = torch.tensor([[value] * 17 + [1.0] * 17])
    want = torch.nn.functional.silu(torch.tensor(value))
    torch.testing.assert_close(
        native.silu_mul(both)[0], want.expand(17), equal_nan=True, rtol=1e-6, atol=1e-6
    )


# -- how the library comes to be ----------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, nothing loaded, and one small source that compiles at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FOLDER", tmp_path / "sources")
    build.FOLDER.mkdir()
    (build.FOLDER / "tiny.c").write_text("int tiny(void) { return 7; }\n")
    monkeypatch.delenv(build.OFF, raising=False)
    build.library.cache_clear()
    yield tmp_path / "minikv" / "kernels"  # type: ignore[misc]
    build.library.cache_clear()


@needs_compiler
@pytest.mark.parametrize("umask", [0o022, 0o002])
def test_it_is_compiled_once(kept: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert build.compiles()
        assert build.library()[0] is not None
    finally:
        os.umask(before)
    made = list(kept.iterdir())
    assert [path.suffix for path in made] == [".so"]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert not build.compiles()
    build.library.cache_clear()
    assert not build.compiles()
    monkeypatch.setattr(build.subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    assert build.library()[0] is not None
    assert list(kept.iterdir()) == made


@needs_compiler
@pytest.mark.parametrize("which", ["folder", "parent"])
def test_what_others_may_write_to_is_not_run(kept: Path, which: str) -> None:
    """A library in a directory that others write to could be theirs: it is compiled anew."""
    kept.mkdir(parents=True)
    open_ = kept if which == "folder" else kept.parent
    open_.chmod(0o777)
    assert build.store() is None
    found, why = build.library()
    assert found is not None, why
    assert list(kept.iterdir()) == []


@needs_compiler
def test_a_damaged_library_is_made_anew(kept: Path) -> None:
    compiler = build.find()
    assert compiler is not None
    kept.mkdir(parents=True)
    path = kept / f"{build.key(compiler)}.so"
    path.write_bytes(b"")
    old = kept / "old.so"
    old.write_bytes(b"")
    os.utime(old, (1e9, 1e9))
    assert build.library()[0] is not None
    assert path.stat().st_size > 0
    assert not old.exists()


@needs_compiler
def test_another_source_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = build.find()
    assert compiler is not None
    before = build.key(compiler)
    for path in (*build.FOLDER.glob("*.c"), *build.FOLDER.glob("*.h")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    assert build.key(compiler) == before
    with (tmp_path / "numbers.h").open("a") as file:
        file.write("\n")
    assert build.key(compiler) != before


def test_no_compiler_is_one_line_and_the_twins(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    chosen, notice = dispatch.choose(torch.device("cpu"), "auto", 64, torch.bfloat16)
    assert chosen.name == "torch"
    assert notice is not None
    assert "no C compiler" in notice
    assert "\n" not in notice


@pytest.mark.parametrize(
    ("said", "status", "ways"),
    [
        ("", 1, len(build.WAYS)),
        ("native.c:1: error: nothing works\nmore", 1, len(build.WAYS)),
        ("", -9, 1),
    ],
)
def test_a_compiler_that_fails_is_one_line(
    kept: Path, monkeypatch: pytest.MonkeyPatch, said: str, status: int, ways: int
) -> None:
    """One that is killed is not asked for something worse, which would be kept."""
    tried = []

    def run(command: list[str], **more: object) -> SimpleNamespace:
        if command[1:] == ["--version"]:
            return SimpleNamespace(returncode=0, stdout=b"cc 12", stderr=b"")
        tried.append(command)
        return SimpleNamespace(returncode=status, stderr=said.encode())

    monkeypatch.setattr(build, "find", lambda: "/usr/bin/env")
    monkeypatch.setattr(build.subprocess, "run", run)
    found, why = build.library()
    assert found is None
    assert "env failed" in why
    assert "\n" not in why
    assert len(tried) == ways * len(build.sources())
    assert not [path for path in kept.iterdir() if path.suffix == ".so"]


def test_clang_is_asked_for_no_threads(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    tried = []

    def run(command: list[str], **more: object) -> SimpleNamespace:
        tried.append(command)
        return SimpleNamespace(returncode=1, stdout=b"Apple clang version 16", stderr=b"no")

    monkeypatch.setattr(build, "find", lambda: "/usr/bin/env")
    monkeypatch.setattr(build.subprocess, "run", run)
    assert build.library()[0] is None
    assert len(tried) == 1 + (len(build.WAYS) - 1) * len(build.sources())
    assert not any("-fopenmp" in command for command in tried)


@needs_compiler
def test_torchs_defaults_do_not_matter() -> None:
    """The C writes float32, whatever torch would make."""
    q, k = randoms(1, 1, 2, 64, dtype=torch.bfloat16), randoms(2, 9, 64, dtype=torch.bfloat16)
    start, length = torch.tensor([0]), torch.tensor([9])
    torch.set_default_dtype(torch.bfloat16)
    try:
        _, lse = native.ragged_attention(q, k, k, start, length, width=9)
        logits = torch.zeros(1, 2, 9)
        native.ragged_attention(q, k, k, start, length, width=9, logits=logits)
    finally:
        torch.set_default_dtype(torch.float32)
    assert lse.dtype == torch.float32
    assert logits.dtype == torch.bfloat16
    want = (q[0].float() @ k.float().T / 8).logsumexp(-1)
    close(lse[0], want, 1e-2)
    close(logits[0].logsumexp(-1), want, 5e-2)


def test_it_can_be_switched_off(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.OFF, "0")
    chosen, notice = dispatch.choose(torch.device("cpu"), "auto", 64, torch.bfloat16)
    assert (chosen.name, notice) == ("torch", None)
    assert not kept.exists()


def test_what_the_c_does_not_take_is_said(kept: Path) -> None:
    for size, dtype in ((64, torch.float16), (264, torch.float32)):
        chosen, notice = dispatch.choose(torch.device("cpu"), "auto", size, dtype)
        assert chosen.name == "torch"
        assert notice is not None
        assert ("float16" if size == 64 else "264") in notice


@needs_compiler
def test_without_threads_it_compiles_too(tmp_path: Path) -> None:
    """A compiler without OpenMP, as on some systems, still makes a library."""
    for way in build.WAYS[1:]:
        quick = ["-O1" if flag == "-O3" else flag for flag in build.FLAGS]
        command = [str(build.find()), *quick, *way, "-shared", *map(str, build.sources())]
        done = subprocess.run(
            [*command, "-o", str(tmp_path / "made.so"), "-lm"],
            capture_output=True,
            check=False,
            env={**os.environ},
        )
        assert done.returncode == 0, done.stderr.decode()
        made = ctypes.CDLL(str(tmp_path / "made.so"))
        assert made.minikv_threads() == 1
        (tmp_path / "made.so").unlink()  # the next is another file, not another state of this one


@needs_compiler
@pytest.mark.parametrize(("threads", "torchs", "ours"), [(4, 4, True), (1, 4, False), (1, 1, True)])
def test_products_without_threads_are_left_to_torch(
    threads: int, torchs: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "threads", lambda: threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    chosen, _ = dispatch.choose(torch.device("cpu"), "auto", 64, torch.bfloat16)
    assert (chosen.name, chosen.products) == ("native", ours)


@needs_compiler
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="x86's names")
@pytest.mark.parametrize("processor", ["haswell", "x86-64"])
def test_processors_with_shorter_vectors(processor: str, tmp_path: Path) -> None:
    """What one with AVX2, and one without any AVX, would compile passes the same tests."""
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nexec "{build.find()}" "$@" -march={processor}\n')
    compiler.chmod(0o755)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            __file__,
            "-k",
            "attention or not_finite or products_of or products_in",
        ],
        env={**os.environ, "CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert list((tmp_path / "minikv" / "kernels").glob("*.so"))


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 1), (3, 31), (7, 255), (33, 256), (300, 768), (5, 5632), (0, 64), (2, 0)],
)
def test_products_of_one_row(rows: int, columns: int) -> None:
    """Rounded once, at the end; what is beside the matrix is not read into it."""
    guarded = torch.full((rows + 2, columns), math.nan, dtype=torch.bfloat16)
    guarded[1:-1] = randoms(1, rows, columns, dtype=torch.bfloat16)
    x, weight = randoms(2, 1, columns, dtype=torch.bfloat16), guarded[1:-1]
    want = x.double() @ weight.double().T
    size = (x.double().abs() @ weight.double().abs().T).clamp_min(1e-9)
    got = product.row_product(x, weight)
    assert got.shape == (1, rows)
    assert bool(((got.double() - want).abs() <= want.abs() / 256 + 1e-6 * size).all())
    for bad in (math.nan, math.inf):
        if rows and columns:
            x[0, columns // 2] = bad
            assert not bool(product.row_product(x, weight).isfinite().any())


@needs_compiler
def test_products_that_do_not_fit_are_refused_as_torch_refuses_them() -> None:
    """Nothing beside a row is read, and nothing is left unwritten."""
    x, weight = randoms(1, 1, 64, dtype=torch.bfloat16), randoms(2, 4, 64, dtype=torch.bfloat16)
    codes, scale = weight.to(torch.int8), torch.ones(4, dtype=torch.bfloat16)
    for wrong in (x.float(), x[:, :32], x.expand(2, 64)[:, :63]):
        with pytest.raises(RuntimeError):
            product.row_product(wrong, weight)
        with pytest.raises(RuntimeError):
            product.int8_product(wrong, codes, scale)
    for matrix, scales in ((codes.short(), scale), (codes, scale.float())):
        with pytest.raises(RuntimeError):
            product.int8_product(x, matrix, scales)
    apart = torch.stack((weight, weight), 2)[..., 0]  # every other number
    want = product.row_product(x, weight)
    torch.testing.assert_close(product.row_product(x, apart), want, rtol=1e-2, atol=1e-2)
    odd = torch.cat((x, x), 1)[:, 1:65]
    shifted = torch.empty(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 64).copy_(weight)
    want = (odd.double() @ weight.double().T).bfloat16()
    torch.testing.assert_close(product.row_product(odd, shifted), want, rtol=1e-2, atol=1e-2)


@needs_compiler
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (7, 255), (33, 256), (64, 768), (5, 5632)])
@pytest.mark.parametrize("few", [1, 3])
def test_products_in_eight_bits(rows: int, columns: int, few: int) -> None:
    """As exact as bfloat16 lets a result be, also where one activation dwarfs the others."""
    x = randoms(1, few, columns, dtype=torch.bfloat16)
    x[0, columns // 2] = 900.0
    numbers = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=numbers)
    scale = randoms(2, rows, dtype=torch.bfloat16).abs() + 0.1
    got = product.int8_product(x, codes, scale)
    want = (x.double() @ codes.double().T) * scale.double()
    assert float((got.double() - want).norm() / want.norm()) < 3e-3
    most = codes.new_full((rows, columns), 127)  # nothing overflows
    got = product.int8_product(torch.full_like(x, 7.0), most, scale)
    torch.testing.assert_close(
        got.double(), (7.0 * 127 * columns * scale.double()).expand(few, rows), rtol=1e-2, atol=0.0
    )
    for bad in (math.nan, math.inf):
        x[0, 0] = bad
        assert not bool(product.int8_product(x, codes, scale)[0].isfinite().any())
