"""Every Triton kernel is compiled without a GPU, and the result is read: no stack and no spills,
keys, values and other rows read as wide as `builds.WIDE` says, pointer by pointer, matrix
instructions where they are meant, no more shared memory than a multiprocessor has.

By default some of what a model of 8B launches, for compute capability 9.0; `pytest -m "soak or not
soak"` adds the rest of it, other head sizes and dtypes, and 8.0. Nothing comes from Triton's cache.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from pairwise import some_by_day

pytest.importorskip("triton", reason="no Triton on this system")

from builds import builds

UNKNOWN = "?"
"""In place of an argument's name where an address could not be followed."""

# Machine code does not say which argument an address comes from. In LLVM code, every address is
# made of an argument by a few instructions, which are followed back here.
_REGISTER = r"%[\w.]+"
_POINTER = re.compile(rf"ptr addrspace\(1\)[^,%]* ({_REGISTER})")
_MADE = re.compile(
    rf"^\s*({_REGISTER}) = (?:getelementptr|select|phi|bitcast|freeze) (.*)$", re.MULTILINE
)
_MERGED = re.compile(rf"\[ ({_REGISTER}), {_REGISTER} \]")  # in a phi
_ASSEMBLY = re.compile(
    r"ld\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+) "
    r"|cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)"
)
_PLAIN = re.compile(rf"= load (?:<(\d+) x )?[a-z]+(\d+)>?, ptr addrspace\(1\) ({_REGISTER})")


def reads(code: str, pointers: Sequence[str]) -> Mapping[str, Collection[int]]:
    """By argument, the numbers of bytes that its loads have. `pointers`: the names of the arguments
    of the compiled function, in order."""
    sources: dict[str, set[str]] = defaultdict(set)
    for register, rest in _MADE.findall(code):
        sources[register] |= {*_POINTER.findall(rest), *_MERGED.findall(rest)}
    head = re.search(r"^define .*?@\w+\((.*)\)", code, re.MULTILINE)
    assert head is not None, "no function in the code"
    arguments = dict(zip(re.findall(rf"({_REGISTER})(?=,|$)", head[1]), pointers, strict=False))

    def names(register: str, seen: tuple[str, ...] = ()) -> set[str]:
        if register in arguments:
            return {arguments[register]}
        before = [r for r in sources[register] if r not in seen]
        found = [names(r, (*seen, register)) for r in before]
        return set().union(*found) if found else ({UNKNOWN} if not seen else set())

    widths: dict[str, set[int]] = defaultdict(set)
    for line in code.splitlines():
        if found := _ASSEMBLY.search(line):
            numbers, bits, copied = found.groups()
            width = int(copied, 0) if copied else int(numbers or 1) * int(bits) // 8
            registers = _POINTER.findall(line)
        elif found := _PLAIN.search(line):
            width, registers = int(found[1] or 1) * int(found[2]) // 8, [found[3]]
        else:
            continue
        for name in set().union(*map(names, registers)) or {UNKNOWN}:
            widths[name].add(width)
    return widths


def too_narrow(found: Mapping[str, Collection[int]], wanted: Mapping[str, int]) -> list[str]:
    """What is wrong with the reads through the pointers in `wanted`, which says how many bytes each
    of their loads must have."""
    wrong = []
    for name, least in wanted.items():
        widths = found.get(name, ())
        if not widths:
            wrong.append(f"{name} is not read")
        elif min(widths) < least:
            wrong.append(f"{name} is read {min(widths)} bytes at a time, not {least}")
    return wrong


SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one block may have (CUDA programming guide, compute capabilities)."""
DEFAULT = 90
KNOWN = builds()
RARE = re.compile(r"fp16|fp32|\b(?:80|256|64)\b")


def _daily(name: str) -> bool:
    """By day: of each kernel that must read widely or multiply, the last that an 8B model launches
    (bfloat16, heads of 128)."""
    others = [n for n, other in KNOWN.items() if other.kernel == KNOWN[name].kernel]
    typical = [n for n in others if not RARE.search(n)] or others
    return bool(KNOWN[name].mma or KNOWN[name].reads) and name == max(typical)


BUILDS = some_by_day(
    [(name, arch) for name in sorted(KNOWN) for arch in SHARED],
    lambda case: case[1] == DEFAULT and _daily(case[0]),
)


@dataclass(frozen=True, slots=True)
class Built:
    """What was compiled: its instructions, the bytes of its loads by pointer, and the memory
    that it needs."""

    instructions: frozenset[str]
    ptx: str
    llvm: str
    reads: Mapping[str, Collection[int]]
    stack: int
    local: int
    shared: int


def compiled(name: str, arch: int, folder: Path, unaligned: Collection[str] = ()) -> Built:
    """Compile a build and read the machine code. It is disassembled only where a test reads
    instructions: that takes as long as compiling. unaligned: pointers that the compiler is not told
    to be aligned, as it would be by a mistake in the kernel's decorator."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    build = KNOWN[name]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump")
    names = list(build.signature)
    attrs = {at: value for at, value in build.attrs.items() if names[at[0]] not in unaligned}
    source = ASTSource(build.fn, dict(build.signature), dict(build.constants), attrs)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder / "cache")
        target = GPUTarget("cuda", arch, 32)
        made = triton.compile(source, target=target, options=dict(build.options))
    cubin = folder / "made.cubin"
    cubin.write_bytes(made.asm["cubin"])

    def said(*command: str | Path) -> str:
        return subprocess.run([*command, cubin], capture_output=True, text=True, check=True).stdout

    usage = said(tool, "--dump-resource-usage")
    number = {k: int(v) for k, v in re.findall(r"(STACK|LOCAL):(\d+)", usage)}
    disassembled = build.mma and not unaligned
    sass = said(tool.with_name("nvdisasm"), "-ndf", "-c") if disassembled else ""
    found = re.findall(r"\b([A-Z][A-Z0-9]*(?:\.[A-Z0-9_]+)*)\b", sass)
    widths: Mapping[str, Collection[int]] = {}
    if build.reads:
        taken = [n for n, kind in build.signature.items() if kind != "constexpr"]
        widths = reads(made.asm["llir"], taken)
    memory = number["STACK"], number["LOCAL"], made.metadata.shared
    return Built(frozenset(found), made.asm["ptx"], made.asm["llir"], widths, *memory)


OLD_SINE = {"rotary_table bf16-128": 32}
"""Bytes of stack in which Triton 3.6 reduces large angles. It runs once a step."""


@pytest.mark.parametrize(("name", "arch"), BUILDS)
def test_machine_code(name: str, arch: int, tmp_path: Path) -> None:
    built, asked = compiled(name, arch, tmp_path), KNOWN[name]
    words = {word: word.split(".") for word in built.instructions}
    heads = {parts[0] for parts in words.values()}
    assert built.local == 0
    if name not in OLD_SINE or built.stack != OLD_SINE[name]:
        assert built.stack == 0
        assert not heads & {"LDL", "STL"}
    assert built.shared <= SHARED[arch]
    assert too_narrow(built.reads, asked.reads) == []
    assert UNKNOWN not in built.reads, "a load whose pointer is not known"
    if asked.mma:
        assert heads & {"HMMA", "HGMMA"}, "no matrix instruction"
    if asked.kernel == "split" and arch == DEFAULT:
        # Of attention, the program that arrives last reads what all threads of the others wrote:
        # each has a barrier between its stores and the counter, which releases and acquires.
        before, counter, after = re.split(r"(atom\.\S+)", built.ptx)
        assert {"gpu", "acq_rel", "add"} <= set(counter.split("."))
        assert "bar.sync" in before[before.rindex("st.global") :]
        assert "ld.global.cg" in after
        assert "ld.global.b" not in after


@pytest.mark.soak
@pytest.mark.parametrize("unaligned", [("v",), ("k",), ("k", "v")], ids="-".join)
def test_the_gate_refuses_keys_or_values_that_are_read_narrowly(
    tmp_path: Path, unaligned: tuple[str, ...]
) -> None:
    """A `split` that is not told that keys or values are aligned reads them two bytes at a time.
    Its queries are still read 16 bytes at a time, which is no excuse."""
    name = "split bf16-128"
    built = compiled(name, DEFAULT, tmp_path, unaligned)
    assert set(built.reads["q"]) == {16}
    assert too_narrow(built.reads, KNOWN[name].reads) == [
        f"{pointer} is read 2 bytes at a time, not 16" for pointer in sorted(unaligned)
    ]
