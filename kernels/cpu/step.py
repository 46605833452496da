"""The token's way between the products, in C: `step.c` behind the signatures of the torch twins.

What the C does not take (other dtypes, heads of more than 256) goes to the twin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minikv.kernels.cpu.build import library
from minikv.kernels.torch import reference

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_CODES = 3
_WIDEST = 256  # numbers of a head


@cache
def _bound() -> ctypes.CDLL:
    """The library, its arguments declared."""
    found, why = library()
    assert found is not None, why
    p, i, n = c_void_p, c_int, c_int64
    found.minikv_ragged_attention.argtypes = [i] * 5 + [p] * 9 + [p, n, p, p]
    found.minikv_ragged_attention.restype = c_int
    found.minikv_append.argtypes = [i, i, i, i, p, n, p, n, p, p, p, p, p, p, p, i, p, p]
    found.minikv_advance.argtypes = [n, i] + [p] * 9
    found.minikv_add_norm.argtypes = [i, n, n, n, p, p, p, c_double, p]
    found.minikv_rotate.argtypes = [i, n, n, n, n, p, p, p, p]
    found.minikv_silu_mul.argtypes = [i, n, n, n, p]
    for name in ("append", "advance", "add_norm", "rotate", "silu_mul"):
        getattr(found, f"minikv_{name}").restype = None
    return found


def unfit(dtype: torch.dtype, head_dim: int) -> str:
    """Why the C does not attend to such heads, or ""."""
    if dtype not in _KINDS:
        return f"they take no {str(dtype).removeprefix('torch.')}"
    return f"they take heads of at most {_WIDEST}, not {head_dim}" if head_dim > _WIDEST else ""


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    *,
    width: int,
    pos: Tensor | None = None,
    oldest: Tensor | None = None,
    logits: Tensor | None = None,
    lse: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.ragged_attention`."""
    heads, group, size = q.shape
    stored = _CODES if k_scale is not None else _KINDS.get(k.dtype, -1)
    kind = _KINDS.get(q.dtype, -1)
    fits = kind >= 0 and stored in (kind, _CODES) and size <= _WIDEST and q.is_contiguous()
    if not (fits and _exact(logits) and _exact(lse)):
        return reference.ragged_attention(
            q,
            k,
            v,
            start,
            length,
            width=width,
            pos=pos,
            oldest=oldest,
            logits=logits,
            lse=lse,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    seen = None if pos is None or oldest is None else pos
    out = torch.empty_like(q)
    sums = lse
    if sums is None:
        sums = torch.empty((heads, group), dtype=torch.float32, device=q.device)
    failed = _bound().minikv_ragged_attention(
        kind,
        stored,
        heads,
        group,
        size,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        start.data_ptr(),
        length.data_ptr(),
        _at(seen),
        _at(oldest),
        _at(k_scale),
        _at(v_scale),
        _at(logits),
        0 if logits is None else logits.shape[-1],
        sums.data_ptr(),
        out.data_ptr(),
    )
    if failed:
        raise MemoryError("attention found no memory")
    return out, sums


def append(
    key: Tensor,
    value: Tensor,
    slot: Tensor,
    position: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    blank: Sequence[Tensor],
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See `reference.append`."""
    kind, coded = _KINDS.get(key.dtype, -1), k_scale is not None
    dense = key.stride(1) == 1 == value.stride(1)
    if kind < 0 or not dense or not (coded or k.dtype == key.dtype):
        reference.append(key, value, slot, position, k, v, pos, blank, k_scale, v_scale)
        return
    count = len(blank)
    columns = (c_void_p * count)(*(column.data_ptr() for column in blank))
    sizes = (ctypes.c_int32 * count)(*(column.itemsize for column in blank))
    _bound().minikv_append(
        kind,
        coded,
        len(slot),
        key.shape[1],
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        slot.data_ptr(),
        position.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        pos.data_ptr(),
        _at(k_scale),
        _at(v_scale),
        count,
        columns,
        sizes,
    )


def advance(
    go: Tensor,
    start: Tensor,
    length: Tensor,
    cap: Tensor,
    hole: Tensor,
    position: Tensor,
    count: Tensor,
    slot: Tensor,
    taken: Tensor,
    *,
    before: bool,
) -> None:
    """See `reference.advance`."""
    _bound().minikv_advance(
        length.numel(),
        before,
        go.data_ptr(),
        start.data_ptr(),
        length.data_ptr(),
        cap.data_ptr(),
        hole.data_ptr(),
        position.data_ptr(),
        count.data_ptr(),
        slot.data_ptr(),
        taken.data_ptr(),
    )


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `reference.add_norm`."""
    kind = _KINDS.get(x.dtype, -1)
    dense = x.stride(1) == 1 and (y is None or (y.is_contiguous() and y.dtype == x.dtype))
    if kind < 0 or not dense or weight.dtype != x.dtype:
        return reference.add_norm(x, y, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _bound().minikv_add_norm(
        kind,
        x.shape[0],
        x.shape[1],
        x.stride(0),
        x.data_ptr(),
        _at(y),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
    )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `reference.rotate`."""
    rows, heads, size = x.shape
    kind = _KINDS.get(x.dtype, -1)
    dense = x.stride(2) == 1 and x.stride(1) == size and cos.is_contiguous() and sin.is_contiguous()
    if kind < 0 or not dense or not cos.dtype == sin.dtype == x.dtype:
        return reference.rotate(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _bound().minikv_rotate(
        kind,
        rows,
        heads,
        size,
        x.stride(0),
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
    )
    return out


def silu_mul(both: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    kind, size = _KINDS.get(both.dtype, -1), both.shape[1] // 2
    if kind < 0 or both.stride(1) != 1:
        return reference.silu_mul(both)
    _bound().minikv_silu_mul(kind, both.shape[0], size, both.stride(0), both.data_ptr())
    return both[:, :size]


def _exact(tensor: Tensor | None) -> bool:
    return tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
