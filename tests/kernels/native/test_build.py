"""Compiling the C library: where it is kept, what is trusted, and compilers that fail."""

from __future__ import annotations

import ctypes
import grp
import os
import platform
import pwd
import stat
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minikv.kernels import dispatch
from minikv.kernels.native import build

needs_compiler = pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    """The folder of libraries in a cache directory that is not made yet, nothing loaded, and one
    small source that compiles at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(build, "FOLDER", tmp_path / "sources")
    (build.FOLDER / "native").mkdir(parents=True)
    (tmp_path / "tmp").mkdir(mode=0o700)
    (build.FOLDER / "native" / "tiny.c").write_text("int tiny(void) { return 7; }\n")
    monkeypatch.delenv(build.OFF, raising=False)
    build.library.cache_clear()
    yield tmp_path / "home" / "cache" / "minikv" / "kernels"  # type: ignore[misc]
    build.library.cache_clear()


@pytest.fixture
def kept(cache: Path) -> Path:
    """The same, where there is a compiler."""
    if build.find() is None:
        pytest.skip("no C compiler on this system")
    return cache


@pytest.fixture
def home(kept: Path) -> Path:
    """The cache directory's parent, made, and the private folder in it."""
    kept.parents[1].mkdir(parents=True)
    return kept.parents[2]


def answer() -> int:
    """What the function in the library returns, at a start of its own."""
    build.library.cache_clear()
    found, why = build.library()
    assert found is not None, why
    return int(found.tiny())


def own(kept: Path) -> Path:
    """The library of the sources as they are, by the compiler that is there."""
    return kept / f"{build.key(str(build.find()))}.so"


def plant(path: Path, number: int = 8) -> Path:
    """A whole library that was made from another source."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(f"int tiny(void) {{ return {number}; }}\n")
    subprocess.run([str(build.find()), "-shared", "-fPIC", source, "-o", path], check=True)
    source.unlink()
    path.write_bytes(path.read_bytes() + build._digest(path.read_bytes()))
    path.chmod(0o700)
    return path


def compile_nothing(monkeypatch: Any) -> None:
    """From now on nothing may be compiled."""
    monkeypatch.setattr(build.subprocess, "run", lambda *a, **k: pytest.fail("compiled"))


@pytest.mark.parametrize("umask", [0, 0o002, 0o077, 0o177])
def test_it_is_compiled_once(kept: Path, monkeypatch: Any, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert build.compiles()
        assert build.library()[0] is not None
    finally:
        os.umask(before)
    made = list(kept.iterdir())
    assert [path.suffix for path in made] == [".so"]
    for folder in (kept, *kept.parents[:3]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not build.compiles()
    build.library.cache_clear()
    assert not build.compiles()
    compile_nothing(monkeypatch)
    assert build.library()[0] is not None
    assert list(kept.iterdir()) == made


@pytest.mark.parametrize(
    ("which", "mode"),
    [("file", 0o722), ("kernels", 0o777), ("minikv", 0o770), ("cache", 0o777), ("home", 0o720)],
)
def test_what_others_may_change_is_not_run(
    kept: Path, monkeypatch: Any, which: str, mode: int
) -> None:
    """A library in a folder that others may write to, or may exchange, could be theirs."""
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="staff", gr_mem=[]))
    path = plant(own(kept))
    assert answer() == 8
    places = {folder.name: folder for folder in (kept, *kept.parents)}
    (path if which == "file" else places[which]).chmod(mode)
    build.library.cache_clear()
    remark = build.remarks()[0]
    assert remark.startswith(f"{path} cannot be used")
    assert answer() == 7
    assert (build.store()[0] == kept) == (which == "file")
    assert not build.compiles()


def test_a_folder_of_the_system_that_all_may_write_to_is_no_danger(kept: Path) -> None:
    """In /tmp nobody renames what belongs to others."""
    kept.parents[2].mkdir(mode=0o700)
    kept.parents[2].chmod(0o1777)
    assert answer() == 7
    assert len(list(kept.iterdir())) == 1


@pytest.mark.parametrize(
    ("group", "members", "trusted"),
    [("ada", [], True), ("ada", ["ada"], True), ("ada", ["bob"], False), ("staff", [], False)],
)
def test_the_group_of_one_user_is_no_other_user(
    kept: Path, home: Path, monkeypatch: Any, group: str, members: list[str], trusted: bool
) -> None:
    """Where each user has a group, a home directory often lets it write."""
    for folder in kept.parents[1:3]:
        folder.chmod(0o775)
    user = SimpleNamespace(pw_name="ada", pw_gid=kept.parents[1].stat().st_gid)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    about = SimpleNamespace(gr_name=group, gr_mem=members)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: about)
    assert (build.store()[0] == kept) == trusted
    user.pw_gid += 1
    assert build.store()[0] != kept
    monkeypatch.setattr(grp, "getgrgid", {}.__getitem__)
    assert build.store()[0] != kept


def test_a_link_leads_nowhere_that_others_may_change(kept: Path, tmp_path: Path) -> None:
    """It is followed once. A later link would not be."""
    there = tmp_path / "open" / "cache" / "minikv" / "kernels"
    plant(own(there))
    kept.parents[2].mkdir()
    kept.parents[1].symlink_to(os.path.relpath(there.parents[1], kept.parents[2]))
    assert answer() == 8
    assert build.store()[0] == there
    there.parents[2].chmod(0o777)
    assert answer() == 7


@pytest.mark.parametrize("namespace", [False, True])
def test_an_unknown_owner_is_the_system_only_in_a_user_namespace(
    kept: Path, home: Path, monkeypatch: Any, namespace: bool
) -> None:
    """There the root directory is that user's, too."""
    lstat, foreign = Path.lstat, [home, *[Path("/")] * namespace]

    def seen(path: Path) -> os.stat_result:
        about = lstat(path)
        return os.stat_result((*about[:4], 65534, *about[5:10])) if path in foreign else about

    monkeypatch.setattr(Path, "lstat", seen)
    assert (build.store()[0] == kept) == namespace


def test_what_was_compiled_where_others_lead_is_not_loaded(
    kept: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """The folder is exchanged between the check and the compiler's start."""
    store = build.store

    def exchanged() -> tuple[Path | None, str]:
        found = store()
        kept.rename(tmp_path / "mine")
        kept.mkdir()
        kept.chmod(0o777)
        return found

    monkeypatch.setattr(build, "store", exchanged)
    found, why = build.library()
    assert (found, why) == (None, f"the library compiled in {kept} is damaged, or not yours alone")


def test_a_library_that_is_exchanged_after_the_check_is_not_loaded(
    kept: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    path, digest = plant(own(kept)), build._digest
    other = plant(tmp_path / "other.so", 9)

    def exchanged(data: bytes) -> bytes:
        if other.exists():
            os.replace(other, path)
        return digest(data)

    monkeypatch.setattr(build, "_digest", exchanged)
    assert answer() == 8
    assert not other.exists()


NO_ROOM = SimpleNamespace(total=1 << 40, free=1 << 20)


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("no home", "there is no home directory"),
        ("a file", "cannot be made (Not a directory)"),
        ("others", "other users may change"),
        ("full", "less than 32 MiB are free in"),
        ("read-only", "cannot be written to"),
    ],
)
def test_without_a_cache_directory_a_private_temporary_one_is_found_again(
    kept: Path, tmp_path: Path, monkeypatch: Any, why: str, said: str
) -> None:
    """It is said once, and compiled once."""
    home = kept.parents[2]
    usage, access = build.shutil.disk_usage, os.access
    if why == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "")
    elif why == "a file":
        home.write_text("")
    elif why == "others":
        home.mkdir()
        home.chmod(0o777)
    elif why == "full":
        full = {kept: NO_ROOM}
        monkeypatch.setattr(build.shutil, "disk_usage", lambda path: full.get(path) or usage(path))
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: path != kept and access(path, mode))
    assert build.compiles()
    (remark,) = build.remarks()
    place = tmp_path / "tmp" / f"minikv-kernels-{os.getuid()}"
    assert said in remark
    assert remark.endswith(f": the compiled kernels are kept in {place}")
    assert answer() == 7
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    compile_nothing(monkeypatch)
    build.library.cache_clear()
    assert not build.compiles()
    assert answer() == 7


@pytest.mark.parametrize("why", ["link", "mode", "owner", "full", "none"])
def test_without_any_place_nothing_is_compiled(
    kept: Path, tmp_path: Path, monkeypatch: Any, why: str
) -> None:
    """The name of the temporary folder is known, so that others can make it first."""
    place = tmp_path / "tmp" / f"minikv-kernels-{os.getuid()}"
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    old = other / f"{'0' * 24}.so"
    old.write_bytes(b"")
    os.utime(old, (1e9, 1e9))
    kept.parents[2].write_text("")
    if why == "link":
        place.symlink_to(other)
    elif why == "mode":
        place.mkdir()
        place.chmod(0o777)
    elif why == "owner":
        place.mkdir(mode=0o700)
        monkeypatch.setattr(os, "getuid", lambda: int(place.name.rpartition("-")[2]) + 1)
        place.rename(place.with_name(f"minikv-kernels-{os.getuid()}"))
    elif why == "full":
        monkeypatch.setattr(build.shutil, "disk_usage", lambda path: NO_ROOM)
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(kept.parents[2]))
    compile_nothing(monkeypatch)
    assert not build.compiles()
    assert build.remarks() == []
    found, said = build.library()
    assert found is None
    assert "cannot be made (Not a directory); " in said
    assert "\n" not in said
    assert old.exists()


@pytest.mark.parametrize("damage", ["empty", "half", "cut", "altered", "pipe", "large"])
def test_what_is_no_library_is_not_read_and_made_anew(kept: Path, damage: str) -> None:
    """To load a file that is shorter than it says ends the process with SIGBUS; to open a named
    pipe would wait for ever. What nobody has used for long is taken away."""
    assert build.remarks() == []
    path, old, foreign = own(kept), kept / f"{'0' * 24}.so", kept / "foreign.so"
    assert answer() == 7
    whole = path.read_bytes()
    parts = {"half": whole[: len(whole) // 2], "cut": whole[:-1]}
    parts["altered"] = whole[:5000] + b"?" + whole[5001:]
    path.unlink()  # not written over: it is loaded here
    if damage == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(parts.get(damage, b""))
    if damage == "large":
        os.truncate(path, build._LARGEST + 1)
    path.chmod(0o700)
    for one in (old, foreign):
        one.write_bytes(b"")
        os.utime(one, (1e9, 1e9))
    build.library.cache_clear()
    assert build._checked(path) is None
    (remark,) = build.remarks()
    assert remark.startswith(f"{path} cannot be used")
    assert build.compiles()
    assert answer() == 7
    assert path.is_file()
    assert path.read_bytes() not in parts.values()
    assert build.remarks() == []
    assert (old.exists(), foreign.exists()) == (False, True)


@pytest.mark.parametrize("answers", ["", 'if [ "$1" = --version ]; then echo cc; exit; fi\n'])
def test_a_compiler_that_hangs_is_found_out_by_an_empty_file(
    kept: Path, tmp_path: Path, monkeypatch: Any, answers: str
) -> None:
    """Also one that says its name, as a wrapper does that waits for another machine."""
    hangs = tmp_path / "cc"
    hangs.write_text(f"#!/bin/sh\n{answers}exec sleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setenv("CC", str(hangs))
    monkeypatch.setattr(build, "_ANSWER", 0.2)
    began = time.monotonic()
    assert build.library() == (None, "cc does not answer")
    assert time.monotonic() - began < 20


def test_another_source_is_another_library(kept: Path) -> None:
    before, header = own(kept), build.FOLDER / "native" / "tiny.h"
    header.write_text("")
    assert own(kept) != before
    header.unlink()
    assert own(kept) == before


def falls_back(size: int = 64, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why torch computes in place of C."""
    chosen, notice = dispatch.choose(torch.device("cpu"), "auto", size, dtype)
    assert chosen.name == "torch"
    return notice


def test_no_compiler_is_one_line_and_the_twins(cache: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    notice = falls_back() or ""
    assert "no C compiler" in notice
    assert "\n" not in notice


def fails(monkeypatch: Any, said: str, status: int, about: bytes, known: int) -> list[list[str]]:
    """A compiler that says what it is, with the status `known`, and fails at all else; what it was
    asked for."""
    tried: list[list[str]] = []

    def run(command: list[str], **more: object) -> SimpleNamespace:
        tried.append(command)
        code = known if "-dM" in command else status
        return SimpleNamespace(returncode=code, stdout=about, stderr=said.encode())

    monkeypatch.setattr(build, "find", lambda: "/usr/bin/env")
    monkeypatch.setattr(build.subprocess, "run", run)
    return tried


SETS = len(build.FLAG_SETS)


@pytest.mark.parametrize(
    ("said", "status", "ways"),
    [
        ("", 1, SETS),
        ("native.c:1: error: nothing works\nmore", 1, SETS),
        ("", -9, 1),
        ("x.s: Assembler messages:\nFatal error: can't write: No space left on device", 1, 1),
        ("ld: final link failed: Disk quota exceeded", 1, 1),
    ],
)
def test_a_compiler_that_fails_is_one_line(
    cache: Path, monkeypatch: Any, said: str, status: int, ways: int
) -> None:
    """One that is killed is not asked for something worse, which would be kept, and no flags make
    room on a disk."""
    tried = fails(monkeypatch, said, status, b"cc 12", 0)
    found, why = build.library()
    assert found is None
    assert "env failed" in why
    assert "\n" not in why
    assert "space" not in said or "No space left on device" in why
    assert len(tried) == 1 + ways * len(build.sources())
    assert not [path for path in cache.iterdir() if path.suffix == ".so"]


def test_clang_is_asked_for_no_threads(monkeypatch: Any, cache: Path) -> None:
    tried = fails(monkeypatch, "no", 1, b"#define __clang__ 1", 1)
    assert build.library()[0] is None
    assert len(tried) == 1 + (SETS - 1) * len(build.sources())
    assert not any("-fopenmp" in command for command in tried)


def test_it_can_be_switched_off(cache: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(build.OFF, "0")
    assert falls_back() is None
    assert not cache.exists()


def test_what_the_c_does_not_take_is_said(cache: Path) -> None:
    for size, dtype, word in ((64, torch.float16, "float16"), (264, torch.float32, "264")):
        assert word in (falls_back(size, dtype) or "")


@needs_compiler
@pytest.mark.soak
@pytest.mark.parametrize("way", range(1, SETS))
def test_without_threads_it_compiles_too(way: int, tmp_path: Path) -> None:
    """A compiler without OpenMP, as on some systems, still makes a library."""
    quick = ["-O0" if flag == "-O3" else flag for flag in build.FLAGS]
    flags = [*quick, *build.FLAG_SETS[way], build.headers(), "-shared", "-lm"]
    compile_all(tmp_path, *flags, "-o", "made.so")
    assert ctypes.CDLL(str(tmp_path / "made.so")).minikv_threads() == 1


def ran(*command: str, **more: Any) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, (done.stderr + done.stdout)[-3000:]
    return done.stdout


def compile_all(folder: Path, *flags: str) -> None:
    ran(str(build.find()), *map(str, build.sources()), *flags, cwd=folder)


needs_x86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="x86's names"
)


@needs_compiler
@needs_x86
@pytest.mark.soak
@pytest.mark.parametrize(
    ("processor", "level", "openmp"),
    [
        ("sandybridge", "-O0", False),
        ("x86-64", "-O0", False),
        *product(("haswell", "x86-64"), ("-O1", "-O3"), (True,)),
    ],
)
def test_processors_with_shorter_vectors(
    processor: str, level: str, openmp: bool, tmp_path: Path
) -> None:
    """What one with AVX2, one with AVX, and one without both would compile passes the same tests.
    An instruction that a set lacks is an error."""
    compiler = tmp_path / "cc"
    refuses = "" if openmp else 'case "$*" in *-fopenmp*) echo "no OpenMP" >&2; exit 1;; esac\n'
    exec = f'exec "{build.find()}" "$@" -march={processor} {level}'
    compiler.write_text(f"#!/bin/sh\n{refuses}{exec}\n")
    compiler.chmod(0o755)
    here = Path(__file__).parents[1]
    files = [str(here / name) for name in ("decode/test_forms.py", "product/test_cpu.py")]
    options = ["-q", "-p", "no:cacheprovider", "-n", "0", "-k", "not plain"]
    env = {**os.environ, "CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    assert " passed" in ran(sys.executable, "-m", "pytest", *options, *files, env=env)
    (made,) = (tmp_path / "minikv" / "kernels").glob("*.so")
    if not openmp:
        assert ctypes.CDLL(str(made)).minikv_threads() == 1


@needs_compiler
@needs_x86
@pytest.mark.soak
@pytest.mark.parametrize(
    "processor", ["sandybridge", "bdver4", "knl", "skylake-avx512", "cooperlake"]
)
def test_every_set_of_instructions_compiles(processor: str, tmp_path: Path) -> None:
    """-O1 also warns of values that are used before they are set."""
    flags = ("-std=gnu11", "-O1", "-fPIC", "-fopenmp", "-Wall", "-Wextra", "-Werror", "-c")
    compile_all(tmp_path, *flags, f"-march={processor}", build.headers())
