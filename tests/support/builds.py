"""What the Triton kernels launch for models of about 8B: every kernel's builds, without a GPU.

The host functions are called with tensors that have no memory (`meta`). Their launches are noted
instead of made, and Triton's own binder says what a build for these arguments is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from minikv.kernels import Advancing, NewRow, Queries, Rows, Segments, Slots
from minikv.kernels.append import gpu as append
from minikv.kernels.append import hash_gpu
from minikv.kernels.attention import gpu as attention
from minikv.kernels.decode import gpu as decode
from minikv.kernels.evict import choose_gpu, gather_gpu, heads_gpu
from minikv.kernels.evict import gpu as evict
from minikv.kernels.layer import gpu as layer
from minikv.kernels.layer import tail_gpu
from minikv.kernels.mass import gpu as mass
from minikv.kernels.product import gpu as product
from minikv.kernels.product.matrix import Matrix
from minikv.policies.hashevict import HashEvict

HEADS, GROUP, ROWS = 8, 4, 4096
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INT32, INT64, BOOL, FLOAT = torch.int32, torch.int64, torch.bool, torch.float32
WIDE: Mapping[str, Sequence[str]] = {
    "split": ("q", "k", "v", "part"),
    "mass": ("q", "k"),
    "each": ("q", "k"),
    "ragged_prefill": ("q", "k", "v"),
    "rows": ("k", "v", "old_k", "old_v"),
    "merge": ("a", "b"),
    "add_norm": ("x", "y", "weight"),
    "rotate": ("x",),
    "silu_mul": ("both",),
    "row_product": ("weights", "x", "norm"),
}
"""Kernels that go over all rows, and the pointers through which every load must have 16 bytes."""
MULTIPLIES = {"split": KINDS, "mass": ("bf16", "fp16"), "each": ("bf16", "fp16")}
MULTIPLIES |= {"ragged_prefill": ("bf16", "fp16")}
"""Kernels that must use matrix instructions, and for which dtypes."""


@dataclass(frozen=True, slots=True)
class Build:
    """One build of a kernel, as a launch asks for it. attrs: what is known of its arguments."""

    kernel: str
    fn: Any
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    attrs: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]
    mma: bool

    @property
    def reads(self) -> Mapping[str, int]:
        """The pointers of `WIDE` that it has, and the bytes of a load."""
        there = [n for n in WIDE.get(self.kernel, ()) if self.signature[n] != "constexpr"]
        wide = dict.fromkeys(there, 16)
        if "v" in wide and self.signature["v"] == "*i8":
            wide["v"] = 8  # as Triton reads values in int8 here
        if self.kernel == "split":  # all threads read a part of the queries, once
            names = list(self.signature)
            known = {names[at[0]]: value for at, value in self.constants.items()}
            size = 4 if self.signature["q"] == "*fp32" else 2
            threads = 32 * self.options["num_warps"]
            wide["q"] = min(16, known["GP"] * known["DP"] * size // threads)
        return wide


@contextmanager
def _noted() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    from triton.runtime.jit import JITFunction

    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def note(fn: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        found.append((fn, args, kwargs))

    with patch.object(JITFunction, "run", note):
        yield found


@functools.cache
def builds() -> dict[str, Build]:
    """By name: what was called, and where that launches several kernels, which of them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend, found, known = make_backend(GPUTarget("cuda", 90, 32)), dict[str, Build](), set[str]()
    for name, call in _calls():
        with _noted() as launches:
            call()
        for fn, args, kwargs in launches:
            bind = create_function_from_signature(fn.signature, fn.params, backend)
            bound, special, options = bind(*args, debug=False, **kwargs)
            packed = fn._pack_args(backend, kwargs, bound, special, options)
            (options, signature, constants, attrs), kernel = packed, fn.__name__.strip("_")
            how = {n: getattr(options, n) for n in ("num_warps", "num_stages", "enable_fp_fusion")}
            mma = name.split()[-1].split("-")[0] in MULTIPLIES.get(kernel, ())
            made = Build(kernel, fn, signature, constants, attrs, how, mma)
            if repr(made) not in known:
                known.add(repr(made))
                own = f"{kernel} {name}"
                found[own if own not in found else f"again {own}"] = made
    return found


Call = tuple[str, Callable[[], object]]


def _calls() -> Iterator[Call]:
    """Of each host function: the last word of a name begins with the dtype and the head size."""
    for calls in (_attention, _prompts, _new_rows, _evictions, _layers, _products):
        yield from calls()


def _t(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _heads(count: int) -> list[Tensor]:
    """Numbers of heads: starts, lengths and the like."""
    return [_t(INT64, HEADS) for _ in range(count)]


def _attention() -> Iterator[Call]:
    """Every use with bfloat16 heads of 128; of other sizes, those that need most registers."""
    for name, size, uses in (
        ("bf16", 128, ("window logits", "logits int8", "logits", "")),
        ("bf16", 256, ("window logits", "logits int8")),
        ("bf16", 80, ("logits",)),
        ("fp16", 64, ("window logits",)),
        ("fp32", 128, ("window logits",)),
    ):
        for use in uses:
            kind, rows = KINDS[name], HEADS * ROWS
            stored = torch.int8 if "int8" in use else kind
            more: dict[str, Any] = {}
            if "window" in use:
                more |= {"pos": _t(INT32, rows), "oldest": _t(INT64)}
            if "int8" in use:
                more |= {"k_scale": _t(FLOAT, rows), "v_scale": _t(FLOAT, rows)}
            call = partial(
                decode.ragged_attention,
                _t(kind, HEADS, GROUP, size),
                Segments(*[_t(stored, rows, size)] * 2, *_heads(2), ROWS, **more),
                _t(FLOAT, HEADS, GROUP, ROWS) if "logits" in use else None,
                config=decode.configure(size, stored, torch.device("cpu"), (9, 0)),
            )
            yield " ".join((*use.split(), f"{name}-{size}")), call


def _prompts() -> Iterator[Call]:
    for name, size, group, rows, window in (
        ("bf16", 128, 4, 1024, None),
        ("bf16", 128, 4, 10, None),
        ("fp16", 128, 1, 4096, 9),
        ("bf16", 80, 1, 16, None),
        ("bf16", 256, 2, 2048, None),
        ("fp32", 128, 4, 1024, None),
    ):
        q, k = _t(KINDS[name], HEADS, group, rows, size), _t(KINDS[name], HEADS * ROWS, size)
        earlier, at = Segments(k, k, *_heads(2), ROWS, _t(INT32, len(k))), _t(INT64, rows)
        call = partial(attention.ragged_prefill, q, earlier, *_heads(1), at, window)
        yield f"rows{rows} {name}-{size}", call
    for name, size, parts in (("bf16", 128, 2), ("fp16", 80, 3), ("fp32", 128, 2)):
        out = _t(KINDS[name], HEADS, GROUP, 64, size), _t(FLOAT, HEADS, GROUP, 64)
        yield f"{parts} {name}-{size}", partial(attention.merge, [out] * parts)
    for name, size, group, listed, window, rows in (
        ("bf16", 128, 4, False, None, 2048),
        ("bf16", 128, 4, False, None, 64),
        ("bf16", 128, 4, True, None, 32),
        ("fp16", 128, 1, False, 9, 2048),
        ("bf16", 80, 1, False, None, 32),
        ("bf16", 256, 2, True, 9, 32),
        ("fp32", 128, 4, False, None, 32),
    ):
        q, lse = _t(KINDS[name], HEADS, group, rows, size), _t(FLOAT, HEADS, group, rows)
        at, place = _t(INT64, rows), _t(INT64, HEADS, ROWS)
        part = (_t(KINDS[name], HEADS, ROWS, size), place)
        if listed:
            part = (_t(KINDS[name], HEADS * ROWS, size), place, place)  # type: ignore[assignment]
        sums = _t(FLOAT, HEADS, group, ROWS), _t(FLOAT, HEADS, ROWS)
        use, queries = " listed" * listed + f" {name}-{size}", Queries(q, at, window, lse)
        use = f"rows{rows}{use}"
        yield use, partial(mass.add_attention_mass, *sums, queries, part)
        if rows <= 64:  # never called for so many rows
            yield use, partial(mass.each_attention, queries, [part], slice(0, HEADS))
        elif not window:
            yield f"peak {use}", partial(mass.peak_attention, queries, [part], 0)


def _new_rows() -> Iterator[Call]:
    for size, columns in (
        (80, ()),
        (128, None),
        (128, (FLOAT,)),
        (128, (*(INT64,) * 13, FLOAT)),
        (256, None),
        (256, (FLOAT,) * 3),
    ):
        rows, kind = HEADS * ROWS, torch.int8 if columns is None else KINDS["bf16"]
        k, blank = _t(kind, rows, size), [_t(kind, rows) for kind in columns or ()]
        scales = [_t(FLOAT, rows) for _ in range(2)] if columns is None else [None, None]
        angles = [_t(KINDS["bf16"], 1, 1, size) for _ in range(2)]
        qkv, slot = _t(KINDS["bf16"], HEADS * (GROUP + 2), size), _t(INT64, HEADS)
        given = qkv, *angles, Slots(slot, _t(INT64), k, k, _t(INT32, rows), blank, *scales)
        use = "int8" if columns is None else f"{len(columns)}"
        yield f"{use} bf16-{size}", partial(append.rotate_append, *given)
    sides = [_t(INT64, 32, HEADS) for _ in range(4)]
    for before in (False, True):
        call = partial(append.advance, Advancing(*sides, _t(INT64), *sides[:2]), before=before)
        yield f"before={before}", call
    for size, bits, coded, turned in (
        (80, 8, False, False),
        (128, 16, False, True),
        (128, 24, True, True),
        (256, 64, False, True),
    ):
        rows, bf16 = HEADS * ROWS, KINDS["bf16"]
        how = "key" if coded else "query"
        rule = HashEvict(bits=bits, hash_with=how, matrices={0: _t(FLOAT, size, bits)})
        k = _t(torch.int8 if coded else bf16, rows, size)
        columns = {"k": k, "v": k, "pos": _t(INT32, rows)}  # type: ignore[assignment]
        columns |= {n: _t(kind, rows) for n, kind in rule.columns.items()}  # type: ignore[operator]
        if coded:
            columns |= {"k_scale": _t(FLOAT, rows), "v_scale": _t(FLOAT, rows)}  # type: ignore
            columns |= {"leaves_last": _t(BOOL, rows)}  # type: ignore[operator]
        query, key = _t(bf16, HEADS, GROUP, size), _t(bf16, HEADS, size)
        turn = (*(_t(bf16, 1, 1, size) for _ in range(2)), query) if turned else None
        numbers = [*_heads(4), _t(INT64), columns, ROWS, 0, _t(INT32, rows), turn]
        new = NewRow(0, query, key, key, *numbers)  # type: ignore[arg-type]
        yield f"{bits} bits bf16-{size}", partial(hash_gpu.hash_append, rule, new)


def _evictions() -> Iterator[Call]:
    sides, rows = (32, HEADS), 32 * HEADS * ROWS
    heads = [_t(INT64, *sides) for _ in range(3)]
    every = Rows(*heads, _t(INT32, rows), _t(INT64), 4, 10, 0)
    logits, lse = _t(FLOAT, *sides, GROUP, ROWS), _t(FLOAT, *sides, GROUP)
    for name, count in (("h2o", 1), ("roco", 3)):
        columns = [_t(FLOAT, rows) for _ in range(count)]
        yield name, partial(evict.evict[name], logits, lse, every, heads[0], columns, heads[0])
    place, count = _t(INT64, HEADS, ROWS), _t(INT64, HEADS)
    over, free = _t(BOOL, HEADS), _t(BOOL, HEADS, ROWS)
    scores = _t(FLOAT, HEADS, ROWS)
    yield "lowest", partial(evict.lowest, scores, place, count, over, count)
    yield "key", partial(choose_gpu.order_key, scores, place, free)
    for many in (ROWS, 2 * ROWS):
        key, also = _t(INT64, HEADS, many), _t(BOOL, HEADS, many)
        yield f"best {many}", partial(choose_gpu.best, key, count, many, also)
    yield "wanted", partial(choose_gpu.wanted, place, _t(INT64), ROWS)
    yield "wanted few", partial(choose_gpu.wanted, place[:, :1024], _t(INT64), ROWS)
    yield "stays", partial(heads_gpu.divide, place, 4, 9, 0)
    yield "stays", partial(heads_gpu.survivors, free, place)
    yield "share", partial(heads_gpu.share, count, 1, 1, 1, count, _t(INT64))
    yield "least", partial(heads_gpu.ensure_least, count, count, count, 4)
    yield "tables", partial(heads_gpu.lay_out, count, 0, (count,) * 5, 1, 1, 1, 1)
    for name, size, old in (("bf16", 128, True), ("fp32", 80, False)):
        kind = KINDS[name]
        new, into = (_t(kind, HEADS, ROWS, size),) * 2, (_t(kind, HEADS * ROWS, size),) * 2
        places = place, _t(INT32, HEADS * ROWS)
        earlier = (*into, place) if old else None
        call = partial(gather_gpu.gather_rows, place, count, count, new, earlier)
        yield f"{name}-{size}", partial(call, into, places, ROWS)
    for name, kinds in (("roco", (FLOAT,) * 3), ("scissorhands", (INT64, INT64, FLOAT))):
        values = [_t(kind, HEADS, ROWS) for kind in kinds]
        out = [_t(kind, HEADS * ROWS) for kind in kinds]
        yield name, partial(gather_gpu.gather_columns, place, count, count, values, out, ROWS)


def _layers() -> Iterator[Call]:
    for name, size in (("bf16", 4096), ("fp32", 960)):
        x = _t(KINDS[name], 7, size)
        yield f"{name}-{size}", partial(layer.add_norm, x, x, x[0], 1e-5)
    for name, size in (("bf16", 128), ("fp16", 80)):
        angles = [_t(KINDS[name], 7, 1, size) for _ in range(2)]
        x = _t(KINDS[name], 7, HEADS * (GROUP + 2), size)[:, : HEADS * (GROUP + 1)]
        yield f"{name}-{size}", partial(layer.rotate, x, *angles)
    table = partial(layer.rotary_table, _t(INT64), _t(FLOAT, 64), 1.0, KINDS["bf16"])
    yield "bf16-128", table
    yield "bf16", partial(layer.silu_mul, _t(KINDS["bf16"], 7, 2 * 14336))


def _products() -> Iterator[Call]:
    bf16 = KINDS["bf16"]
    for form in ("plain", "int8", "int4"):
        for name, outs, n, then, normed in (
            ("out", 4096, 4096, tail_gpu.ADD, False),
            ("gate-up", 28672, 4096, tail_gpu.GATE, True),
            ("down", 4096, 14336, tail_gpu.ADD, False),
            ("qkv", 6144, 4096, tail_gpu.KEEP, True),
        ):
            weights = {"plain": _t(bf16, outs, n), "int8": _t(torch.int8, outs, n)}
            weights["int4"] = _t(torch.uint8, outs, n // 2)
            scales = {"int8": _t(bf16, outs), "int4": _t(bf16, n // 128, outs, 2)}
            made = tail_gpu.product_of(Matrix(outs, n, weights[form], scales.get(form)), bf16)
            assert made is not None
            out = _t(bf16, 1, outs // 2 if then == tail_gpu.GATE else outs)
            norm = _t(bf16, n) if normed else None
            yield f"{form} {name} bf16", partial(made, _t(bf16, 1, n), out, then, norm, 1e-5)
    packed, scales = _t(torch.uint8, 4096, 2048), _t(bf16, 32, 4096, 2)  # type: ignore[assignment]
    yield "bf16", partial(product.unpack_int4_rows, packed, scales, _t(bf16, 4096, 4096))
