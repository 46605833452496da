"""Tensors that say they are on a GPU and lie in the memory of the CPU, and what is asked of it.

The code under test takes the way that it takes on a GPU, since `device` says so, and mixing the two
kinds is refused as torch refuses it. Every operator of torch that would run there is counted. So
are copies to the GPU, and what is fetched from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

GPU = torch.device("cuda:0")
_CPU = torch.device("cpu")
_FREE = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided empty_permuted lift_fresh "
    "_unsafe_view _reshape_alias resize_ set_ is_same_size detach alias".split()
)
"""Operators that launch nothing, beside views."""
_FUSED = frozenset(("_fused_rms_norm",))
"""Made of others on a CPU, while CUDA has a kernel of its own."""
_INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
_COPYING = frozenset(("_to_copy", "copy_", "_local_scalar_dense"))
_INSIDE: ContextVar[bool] = ContextVar("_INSIDE", default=False)


@contextmanager
def _on_gpu() -> Iterator[None]:
    """Operators in here count as the GPU's, whatever they are given."""
    token = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(token)


class StandIn(Tensor):
    """`near`, a tensor of the CPU, as a tensor of the GPU at the same address."""

    near: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: Tensor) -> StandIn:
        place = {"strides": near.stride(), "storage_offset": near.storage_offset()}
        kind = {"dtype": near.dtype, "device": GPU}
        made: StandIn = Tensor._make_wrapper_subclass(cls, near.shape, **place, **kind)
        made.near = near
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.near.data_ptr()

    # A torch without CUDA cannot do these to a tensor of a GPU. The operators are the same.

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def copy_(self, other: Tensor, non_blocking: bool = False) -> StandIn:
        with torch._C._AutoDispatchBelowAutograd():
            torch.ops.aten.copy_.default(self, other, non_blocking)
        return self

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        if self.near.is_contiguous(memory_format=memory_format):
            return self
        return self.clone(memory_format=memory_format)

    def __invert__(self) -> Tensor:
        return torch.bitwise_not(self)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.item())

    def __getitem__(self, index: Any) -> Any:
        with _on_gpu():
            return StandIn(self.near[near(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, Tensor) and value.dim() and not isinstance(value, StandIn):
            self[index].copy_(value)
            return
        with _on_gpu():
            self.near[near(index)] = near(value)


LAUNCHES = {"topk": 33, "sort": 5}
"""Of operators that launch several kernels, for as many rows as a document has."""


class Counts(TorchDispatchMode):
    """While it is active: launches of `operators` of torch on the GPU by name, copies that were
    `sent` to it, and copies and values that were `fetched` from it."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.sent = self.fetched = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would go around every operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_composed(func) and _on_the_gpu(args, kwargs or {}):
            with self:  # in inference mode it arrives here whole
                return func.decompose(*args, **(kwargs or {}))
        out = _run(func, args, kwargs or {})
        name = func.overloadpacket.__name__
        if name in _FREE or func.is_view:
            return out
        if name in _COPYING:
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], out)
            if isinstance(source, StandIn) != isinstance(target, StandIn):
                self.sent += isinstance(target, StandIn)
                self.fetched += isinstance(source, StandIn)
                return out
        if _INSIDE.get() or any(isinstance(t, StandIn) for t in _tensors((args, out))):
            self.operators[name] += LAUNCHES.get(name, 1)
        return out


def near(given: Any) -> Any:
    """The tensors on the CPU for those of the GPU, in any nesting."""
    if isinstance(given, StandIn):
        return given.near
    if given is None or isinstance(given, (int, float, str, Tensor)):
        return given
    if isinstance(given, (tuple, list)):
        kind = getattr(given, "_make", type(given))  # of a named tuple
        return kind(map(near, given))
    if isinstance(given, dict):
        return {key: near(value) for key, value in given.items()}
    if is_dataclass(given) and not isinstance(given, type):
        return replace(given, **{f.name: near(getattr(given, f.name)) for f in fields(given)})
    return given


def uncounted() -> AbstractContextManager[object]:
    """Nothing in here is the GPU's work."""
    modes: AbstractContextManager[object] = _disable_current_modes()
    return modes


def _tensors(given: Any) -> list[Tensor]:
    """All tensors in lists and tuples."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, (tuple, list)):
        return [t for one in given if isinstance(one, _NESTED) for t in _tensors(one)]
    return []


_NESTED = (Tensor, tuple, list)


@cache
def _is_composed(func: Any) -> bool:
    """torch makes the operator of others on CUDA."""
    if func.overloadpacket.__name__ in _FUSED:
        return False
    found = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return bool(found)


def _on_the_gpu(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == GPU.type:
        return True
    given = _tensors((args, list(kwargs.values())))
    return _INSIDE.get() or any(isinstance(t, StandIn) for t in given)


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operator on tensors of the CPU. Its results replace tensors of the GPU where they would be
    there."""
    name = func.overloadpacket.__name__
    tensors = _tensors((args, list(kwargs.values())))
    known = {id(t.near): t for t in tensors if isinstance(t, StandIn)}
    # As torch does: a tensor of the CPU goes with those of a GPU only if it is one number, or an
    # index.
    here = any(not isinstance(t, StandIn) and t.dim() for t in tensors)
    if known and here and name not in _COPYING and name not in _INDEXING:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    device = kwargs.get("device")
    far = bool(known) if device is None else torch.device(device).type == GPU.type
    if name == "copy_":
        far = isinstance(args[0], StandIn)
    if kwargs:
        kwargs = near(kwargs)
        if device is not None:
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
    out = _ELSEWISE.get(name, func)(*near(args), **kwargs)
    if not far:
        return out

    def there(found: Any) -> Any:
        if isinstance(found, (tuple, list)):
            return type(found)(map(there, found))
        if not isinstance(found, Tensor):
            return found
        return known[id(found)] if id(found) in known else StandIn(found)

    if func.is_view and not any(t.is_inference() for t in known.values()):
        with torch.inference_mode(False):  # torch wants a view to be like what it is of
            return there(out)
    return there(out)


# -- what a CPU computes in another way -------------------------------------------------------


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> list[Tensor]:
    """q [B, T, Hq, D]; k and v [B, N, H, D]; query i is at row N - T + i. As on CUDA, the output
    is in the order of rows."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 1).float() for t in (k, v))  # bfloat16 takes longer
    x = q.float() @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    rows = torch.arange(k.shape[2])
    back = rows[-q.shape[2] :, None] - rows
    if causal or window is not None:
        x = x.masked_fill(back < 0, -math.inf)
    if window is not None:
        x = x.masked_fill(back >= window, -math.inf)
    out = (x.softmax(-1) @ v).to(q.dtype)
    return [out.transpose(1, 2).contiguous(), x.logsumexp(-1)]


def _flash(q: Tensor, k: Tensor, v: Tensor, *more: Any, **window_size: int | None) -> Any:
    _, _, q_most, k_most, dropout, causal, debug = more
    assert (q_most, k_most, dropout, debug) == (q.shape[1], k.shape[1], 0.0, False)
    assert {*window_size} <= {"window_size_left", "window_size_right"}
    left = window_size.get("window_size_left")
    assert window_size.get("window_size_right") == (None if left is None else 0)
    window = None if left is None else left + 1
    return *_attention(q, k, v, causal, window), None, None, None


def _efficient(q: Tensor, k: Tensor, v: Tensor, *more: Any, window_size: int | None = None) -> Any:
    mask, with_lse = more[-2:]
    assert with_lse
    assert mask in (0, 2)
    assert mask or window_size is None
    out, lse = _attention(q, k, v, mask == 2, window_size)
    padding = -lse.shape[2] % 32
    return out, torch.nn.functional.pad(lse, (0, padding), value=math.inf), None, None, 0, 0


def _copied(t: Tensor, *, device: torch.device | None = None, **kwargs: Any) -> Tensor:
    return torch.ops.aten._to_copy(t, **kwargs)


_ELSEWISE: Mapping[str, Callable[..., Any]] = {
    "_flash_attention_forward": _flash,
    "_efficient_attention_forward": _efficient,
    "_to_copy": _copied,
}


# -- the process ------------------------------------------------------------------------------


def install() -> None:
    """Let torch of this process take `GPU` for a device. There is no way back."""
    if torch.version.cuda is not None:  # a build for GPUs, on a machine without one
        torch._C._ensureCUDADeviceGuardSet()
    torch.cuda._lazy_init = lambda: None  # type: ignore[assignment]
    torch.cuda.Event = _Event  # type: ignore[assignment,misc]
    torch.cuda.cudart = _Runtime  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment]
    torch.tensor = _made_here(torch.tensor)
    torch.as_tensor = _made_here(torch.as_tensor)


def _made_here(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes a tensor of numbers of the host: they are copied to the GPU."""

    def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        given = args[0]
        if isinstance(given, StandIn):  # as_tensor of a tensor
            return given.to(device=device, **kwargs)
        found = make(*args, **kwargs)
        if device is None:
            return found
        return found.to(GPU if torch.device(device).type == GPU.type else device)

    return made


class _Runtime:
    """CUDA's runtime, which pins every memory."""

    cudaError = SimpleNamespace(success=0)
    cudaHostRegister = cudaHostUnregister = lambda *_: 0


class _Event:
    """A GPU's clock, which does not move."""

    __init__ = record = synchronize = lambda *_, **__: None
    elapsed_time = lambda *_: 0.0  # noqa: E731
