"""Hash codes of keys, and their distances, in Triton. Specification: `torch/hash_codes.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minikv.kernels.triton.tiles import head_stride, in_rows, lines, power, row_stride, typed
from minikv.kernels.triton.variants import WIDE, Variant

_NUMBERS = 4096  # of keys, in one program
_ROWS = 256  # codes of a program
_PROBES = 1024  # probes that it reads at once


@triton.jit(
    do_not_specialize=["k_head", "k_row", "rows", "bits"],
    do_not_specialize_on_alignment=["matrix"],
)
def _hash_codes(
    key,
    matrix,
    out,
    k_head,
    k_row,
    rows,
    bits,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, DP)
    inside = j < rows
    line = h * k_head + j.to(tl.int64) * k_row
    mine = inside[:, None] & (d < D)[None, :]
    x = tl.load(key + line[:, None] * D + d[None, :], mask=mine, other=0.0).to(tl.float32)
    code = tl.zeros((BN,), tl.int64)
    for b in tl.range(0, bits):
        column = tl.load(matrix + d * bits + b, mask=d < D, other=0.0)
        along = tl.sum(x * column[None, :], 1)
        code |= (along >= 0).to(tl.int64) << b
    tl.store(out + h * rows + j, code.to(out.dtype.element_ty), mask=inside)


def hash_codes(key: Tensor, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """See `torch.hash_codes.hash_codes`."""
    assert matrix.is_contiguous()
    key = in_rows(key)
    heads, rows, size = key.shape
    out = torch.empty((heads, rows), dtype=dtype, device=key.device)
    block = _NUMBERS // power(size)
    numbers = row_stride(key, 0), row_stride(key, 1), rows, matrix.shape[1]
    _hash_codes[(max(1, -(-rows // block)), heads)](
        key, matrix, out, *numbers, D=size, DP=power(size), BN=block
    )
    return out


@triton.jit(
    do_not_specialize=["stored_head", "rows", "probes", "bits"],
    do_not_specialize_on_alignment=["stored", "probe"],
)
def _code_distances(
    stored, probe, out, stored_head, rows, probes, bits, BN: tl.constexpr, BP: tl.constexpr
):
    h = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = j < rows
    code = tl.load(stored + h * stored_head + j, mask=inside, other=0).to(tl.int64)
    distance = tl.zeros((BN,), tl.int32)
    for b in tl.range(0, bits):
        seen = tl.zeros((BP,), tl.int32)
        for s in tl.range(0, probes, BP):
            i = s + tl.arange(0, BP)
            mine = tl.load(probe + h * probes + i, mask=i < probes, other=0)
            seen += ((mine >> b) & 1).to(tl.int32)
        having = tl.sum(seen, 0)  # probes with a 1
        distance += tl.where(((code >> b) & 1) == 1, probes - having, having)
    tl.store(out + h * rows + j, distance.to(tl.float32), mask=inside)


def code_distances(stored: Tensor, probes: Tensor, bits: int) -> Tensor:
    """See `torch.hash_codes.code_distances`."""
    stored, probes = lines(stored), probes.contiguous()
    heads, rows = stored.shape
    out = torch.empty((heads, rows), dtype=torch.float32, device=stored.device)
    numbers = head_stride(stored), rows, probes.shape[1], bits
    _code_distances[(max(1, -(-rows // _ROWS)), heads)](
        stored, probes, out, *numbers, BN=_ROWS, BP=_PROBES
    )
    return out


def variants() -> list[Variant]:
    """Builds for the compile gate."""
    found = []
    for size, kind, code in ((128, "bf16", "i32"), (80, "fp16", "i64"), (256, "bf16", "i16")):
        constants: dict[str, object] = {
            "D": size,
            "DP": power(size),
            "BN": _NUMBERS // power(size),
        }
        kinds = {"key": f"*{kind}", "matrix": "*fp32", "out": f"*{code}"}
        signature = typed(_hash_codes, kinds, constants)
        name = f"hash-codes-{kind}-d{size}"
        found.append(Variant(name, _hash_codes, signature, constants, reads={"key": WIDE}))
    constants = {"BN": _ROWS, "BP": _PROBES}
    for code in ("i16", "i32", "i64"):
        kinds = {"stored": f"*{code}", "probe": "*i64", "out": "*fp32"}
        signature = typed(_code_distances, kinds, constants)
        found.append(Variant(f"code-distances-{code}", _code_distances, signature, constants))
    return found
