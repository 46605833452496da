"""The small operators of a layer in Triton, against torch, on odd sizes, in NaN-guarded memory.

Triton's interpreter runs these tests in a process of its own (test_interpreter.py). Where there is
a CUDA device, they also run on it (marker `gpu`).
"""

from __future__ import annotations

import pytest
import small
import torch
import torch.nn.functional as F
from triton_device import INTERPRETED, close, draw, guarded, kernel, on_device, untouched

from minikv.cache import kv_cache
from minikv.kernels.dispatch import Kernels
from minikv.kernels.layer import plain as plain_torch
from minikv.loader import build
from minikv.models.rope import RopeConfig, Rotary
from minikv.settings import Settings

pytest.importorskip("triton", reason="no Triton on this system")

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 48), (3, 129), (17, 576)])
@pytest.mark.parametrize("adds", [False, True])
def test_add_norm(dtype: torch.dtype, rows: int, size: int, adds: bool) -> None:
    x, y, weight = (draw(i, s, dtype, 2.0) for i, s in enumerate([(rows, size)] * 2 + [(size,)]))
    there, beside = guarded(x), guarded(y) if adds else None
    got = kernel("layer.gpu").add_norm(there, beside, guarded(weight), 1e-5)
    want = plain_torch.add_norm(x, y if adds else None, weight, 1e-5)
    close(got, want, DTYPES[dtype])
    close(there, x, 1e-6 if dtype == torch.float32 else DTYPES[dtype])
    assert untouched(there)


@on_device
def test_a_row_that_no_program_holds() -> None:
    x, y, weight = (draw(i, s, torch.float32) for i, s in enumerate([(2, 16400)] * 2 + [(16400,)]))
    there = guarded(x)
    got = kernel("layer.gpu").add_norm(there, guarded(y), guarded(weight), 1e-6)
    close(got, plain_torch.add_norm(x, y, weight, 1e-6))


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "more", "size"),
    [
        (1, 3, 2, 64),
        (5, 9, 0, 80),
        (7, 5, 3, 96),
        (2, 16, 8, 128),
        (3, 1, 1, 256),
    ],
)
def test_rotate(dtype: torch.dtype, rows: int, heads: int, more: int, size: int) -> None:
    """Of some heads of a product: rows do not lie close together."""
    qkv = draw(1, (rows, heads + more, size), dtype)
    angle = draw(2, (rows, 1, size // 2), torch.float32, 3.0)
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    there = guarded(qkv)
    there[:, heads:] = float("nan")
    got = kernel("layer.gpu").rotate(there[:, :heads], guarded(cos), guarded(sin))
    assert got.is_contiguous()
    one, two = qkv[:, :heads].double().chunk(2, -1)
    c, s = angle.cos(), angle.sin()
    close(got, torch.cat((one * c - two * s, two * c + one * s), -1), 2 * DTYPES[dtype])
    close(got, plain_torch.rotate(qkv[:, :heads], cos, sin), DTYPES[dtype])


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "scale"), [(16, 1.0), (80, 1.25), (256, 1.0)])
@pytest.mark.parametrize("position", [0, 7, 131071])
def test_the_table_of_a_position(
    dtype: torch.dtype, size: int, scale: float, position: int
) -> None:
    """That of the network, in float32 up to the last cast."""
    rotary = Rotary(RopeConfig(kind="yarn", factor=4.0, original=64, attention_factor=scale), size)
    at = torch.tensor(position)
    for module, place in ((plain_torch, lambda t: t), (kernel("layer.gpu"), guarded)):
        got = module.rotary_table(place(at), place(rotary.inverse), rotary.scale, dtype)
        for mine, want, one in zip(
            got, rotary.table(position, 1, dtype), rotary.table(at, 1, dtype), strict=True
        ):
            assert (mine.shape, mine.dtype) == (want.shape, want.dtype)
            close(mine, want, 1e-5 if dtype == torch.float32 else DTYPES[dtype])
            close(mine, one, 1e-5 if dtype == torch.float32 else DTYPES[dtype])


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 1025), (6, 300)])
def test_silu_mul(dtype: torch.dtype, rows: int, size: int) -> None:
    both = draw(1, (rows, 2 * size), dtype, 4.0)
    gate, up = both.clone().double().chunk(2, 1)
    there = guarded(both)
    got = kernel("layer.gpu").silu_mul(there)
    assert got.data_ptr() == there.data_ptr()
    close(got, F.silu(gate) * up, 2 * DTYPES[dtype])
    close(got, plain_torch.silu_mul(both), DTYPES[dtype])
    assert untouched(there)
    close(there[:, size:], up)


class Counted:
    """Notes how often each is called."""

    def __init__(self, ops: object) -> None:
        self.ops, self.calls = ops, dict.fromkeys(("add_norm", "rotate", "silu_mul"), 0)

    def __getattr__(self, name: str) -> object:
        self.calls[name] += 1
        return getattr(self.ops, name)


def test_a_network_computes_the_same_with_them() -> None:
    """A prompt in two chunks and steps: by the twins, and in the interpreter by the kernels."""
    net = small.network(layers=2, rows=16)
    logits = []
    for ops in (Kernels(), Counted(kernel("layer.gpu") if INTERPRETED else Kernels())):
        net.ops = ops
        engine = small.engine(net, "full", "none", None)
        logits.append([engine.prompt(small.ids(20)), *map(engine.step, small.ids(2, 1))])
    torch.testing.assert_close(*map(torch.stack, logits), rtol=1e-4, atol=1e-4)
    # Four pieces of work a layer, and the final norm; of the last layer's first chunk only the keys
    # are needed. What is rotated in a step, the cache rotates.
    assert net.ops.calls == {"add_norm": 18, "rotate": 4, "silu_mul": 7}


@pytest.mark.parametrize("broken", [False, True])
def test_a_chat_takes_them_where_the_cache_does(
    monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    class Stand(Kernels):
        name = "triton"

        @staticmethod
        def silu_mul(both: torch.Tensor) -> torch.Tensor:
            if broken:
                raise RuntimeError("cannot be built")
            return plain_torch.silu_mul(both)

    monkeypatch.setattr(
        kv_cache, "choose", lambda *a: ((Stand() if a[1] == "auto" else Kernels()), None)
    )
    chat = build(Settings())
    net, kv = chat.engine.network, chat.engine.kv
    assert (kv.ops.name, chat.engine.notices != []) == (
        ("torch", True) if broken else ("triton", False)
    )
    assert broken or net.ops is kv.ops  # type: ignore[attr-defined]
