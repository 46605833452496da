"""How wide a compiled Triton kernel reads through each of its pointers, from its LLVM code.

Machine code does not say which argument an address comes from. In LLVM code, every address is made
of an argument by a few instructions, which are followed back here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

UNKNOWN = "?"
"""In place of an argument's name where an address could not be followed."""

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
