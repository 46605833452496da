"""Every Triton kernel is compiled without a GPU, and the result is read: no stack and no spills,
rows read 16 bytes at a time, matrix instructions where they are meant, no more shared memory than
a multiprocessor has.

By default for compute capability 9.0; `pytest -m "soak or not soak"` adds 8.0. Nothing comes from
Triton's cache. With pytest-xdist the workers share the builds; without it threads do.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton on this system")

from minikv.kernels import triton as kernels
from minikv.kernels.triton.variants import Variant

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one block may have (CUDA programming guide, compute capabilities)."""
DEFAULT = 90


def _collect() -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    for module in pkgutil.iter_modules(kernels.__path__):
        source = Path(kernels.__path__[0], f"{module.name}.py").read_text()
        if "\ndef variants(" not in source:
            continue
        for variant in importlib.import_module(f"{kernels.__name__}.{module.name}").variants():
            assert variant.name not in found, f"two variants are called {variant.name}"
            found[variant.name] = variant
    return found


VARIANTS = _collect()
BUILDS = [
    pytest.param(name, arch, marks=[] if arch == DEFAULT else [pytest.mark.soak])
    for name in sorted(VARIANTS)
    for arch in SHARED
]


@dataclass(frozen=True, slots=True)
class Built:
    """One compiled variant: its instructions, and the memory that it needs."""

    instructions: frozenset[str]
    stack: int
    local: int
    shared: int


def compiled(name: str, arch: int, tool: Path, folder: Path) -> Built:
    """Compile a variant and read the machine code. It is disassembled only where a test reads
    instructions: that takes as long as compiling."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant = VARIANTS[name]
    names = list(variant.signature)
    source = ASTSource(
        variant.fn,
        dict(variant.signature),
        {(names.index(n),): value for n, value in variant.constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in variant.aligned},
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = folder / f"{name}-{arch}.cubin"
    cubin.write_bytes(made.asm["cubin"])

    def dump(what: str) -> str:
        ran = subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True)
        return ran.stdout

    usage = dump("--dump-resource-usage")
    number = {k: int(v) for k, v in re.findall(r"(STACK|LOCAL):(\d+)", usage)}
    sass = dump("--dump-sass") if variant.vector or variant.mma else ""
    found = re.findall(r"\b([A-Z][A-Z0-9]*(?:\.[A-Z0-9_]+)*)\b", sass)
    return Built(frozenset(found), number["STACK"], number["LOCAL"], made.metadata.shared)


@pytest.fixture(scope="module")
def build(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, int], Built]]:
    """(name, arch) -> Built. The first call starts all builds of this run."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump")
    folder = tmp_path_factory.mktemp("cubins")
    started: dict[tuple[str, int], Future[Built]] = {}
    with triton.knobs.cache.scope(), ThreadPoolExecutor(os.cpu_count()) as pool:
        triton.knobs.cache.dir = str(folder / "cache")

        def start(name: str, arch: int) -> Future[Built]:
            if (name, arch) not in started:
                started[name, arch] = pool.submit(compiled, name, arch, tool, folder)
            return started[name, arch]

        def one(name: str, arch: int) -> Built:
            if "PYTEST_XDIST_WORKER" not in os.environ:  # its workers divide the tests themselves
                for item in request.session.items:
                    if (
                        isinstance(item, pytest.Function)
                        and item.originalname == "test_machine_code"
                    ):
                        start(**item.callspec.params)
            return start(name, arch).result()

        yield one


@pytest.mark.parametrize(("name", "arch"), BUILDS)
def test_machine_code(build: Callable[[str, int], Built], name: str, arch: int) -> None:
    built, variant = build(name, arch), VARIANTS[name]
    words = {word: word.split(".") for word in built.instructions}
    heads = {parts[0] for parts in words.values()}
    assert built.stack == 0
    assert built.local == 0
    assert not heads & {"LDL", "STL"}
    assert built.shared <= SHARED[arch]
    if variant.vector:
        wide = [w for w, parts in words.items() if parts[0] in ("LDG", "LDGSTS") and "128" in parts]
        assert wide, "no row is read 16 bytes at a time"
    if variant.mma:
        assert heads & {"HMMA", "HGMMA"}, "no matrix instruction"
