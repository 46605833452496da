"""Every Triton kernel becomes machine code for sm_80 and sm_90 without a GPU, and it is read: no
stack, no spills, rows read 16 bytes at a time, matrix instructions where they are meant, no more
shared memory than a multiprocessor has."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from minikv.kernels import triton as kernels
from minikv.kernels.triton.variants import Variant

pytest.importorskip("triton", reason="no Triton on this system")

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one block may have (CUDA programming guide, compute capabilities)."""


def _modules() -> Iterator[str]:
    for module in pkgutil.iter_modules(kernels.__path__):
        source = Path(kernels.__path__[0], f"{module.name}.py").read_text()
        if "\ndef variants(" in source:
            yield f"{kernels.__name__}.{module.name}"


def _collect() -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    for name in _modules():
        for variant in importlib.import_module(name).variants():
            assert variant.name not in found, f"two variants are called {variant.name}"
            found[variant.name] = variant
    return found


VARIANTS = _collect()
BUILDS = [(name, arch) for name in sorted(VARIANTS) for arch in SHARED]


@dataclass(frozen=True, slots=True)
class Built:
    """What became of one variant: machine code, and what it needs of a multiprocessor."""

    sass: str
    stack: int
    local: int
    registers: int
    shared: int


def _tool() -> Path:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump")
    return tool


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Built]:
    """(name, arch) -> Built, each built once."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tool, folder, made = _tool(), tmp_path_factory.mktemp("cubins"), {}

    def one(name: str, arch: int) -> Built:
        if (name, arch) in made:
            return made[name, arch]
        variant = VARIANTS[name]
        names = list(variant.signature)
        attributes = {(i,): [["tt.divisibility", 16]] for i in variant.aligned}
        source = ASTSource(
            variant.fn,
            dict(variant.signature),
            {(names.index(n),): value for n, value in variant.constants.items()},
            attributes,
        )
        options = {"num_warps": variant.warps, "num_stages": variant.stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        cubin = folder / f"{name}-{arch}.cubin"
        cubin.write_bytes(compiled.asm["cubin"])

        def dump(what: str) -> str:
            ran = subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True)
            return ran.stdout

        usage = dump("--dump-resource-usage")
        number = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
        made[name, arch] = Built(
            dump("--dump-sass"),
            number["STACK"],
            number["LOCAL"],
            number["REG"],
            compiled.metadata.shared,
        )
        return made[name, arch]

    return one


@pytest.mark.parametrize(("name", "arch"), BUILDS)
def test_machine_code(build: Callable[[str, int], Built], name: str, arch: int) -> None:
    built, variant = build(name, arch), VARIANTS[name]
    found = set(re.findall(r"\b([A-Z][A-Z0-9]*(?:\.[A-Z0-9_]+)*)\b", built.sass))
    heads = {word.split(".")[0] for word in found}
    assert built.stack == 0
    assert built.local == 0
    assert not heads & {"LDL", "STL"}
    assert built.shared <= SHARED[arch]
    if variant.vector:
        wide = [w for w in found if w.split(".")[0] in ("LDG", "LDGSTS") and "128" in w.split(".")]
        assert wide, "no row is read 16 bytes at a time"
    if variant.mma:
        assert heads & {"HMMA", "HGMMA"}, "no matrix instruction"
