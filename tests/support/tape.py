"""What a CUDA graph is to a step, on a CPU: no value may be asked for, and what is replayed are the
operations, not the Python that called them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minikv.engine.capture import Eager

# Operations that wait for the device, or whose result's shape depends on values.
_WAITS = frozenset(
    "_local_scalar_dense nonzero nonzero_numpy argwhere masked_select bincount equal allclose "
    "is_nonzero _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive item".split()
)


class NoWaiting(TorchDispatchMode):
    """Refuses every operation that a capture would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.check(func, args)
        return func(*args, **(kwargs or {}))

    def check(self, func: Any, args: Sequence[Any]) -> None:
        name = func.overloadpacket.__name__
        if name == "_to_copy" or name.startswith("index"):
            wanted = [a for a in args[1:2] for a in (a if isinstance(a, (list, tuple)) else [])]
            assert all(a is None or a.dtype != torch.bool for a in wanted), f"{name} by a mask"
        assert name not in _WAITS, f"{name} asks the device for a value"
        if name == "repeat_interleave":
            assert not isinstance(args[0], Tensor), "repeat_interleave by a tensor"


class _Recording(NoWaiting):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.done.append((func, args, kwargs or {}, out))
        return out


class Tape(Eager):
    """Records the operations of a step and repeats them over the same memory."""

    def __init__(self) -> None:
        self.warmed = self.recorded = self.replayed = 0

    def warm(self, body: Callable[[], None]) -> None:
        self.warmed += 1
        with NoWaiting():
            body()

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """A graph does not run while it is recorded; a tape does, which is its first replay."""
        self.recorded += 1
        mode = _Recording()
        with mode:
            body()
        first = True

        def replay() -> None:
            nonlocal first
            self.replayed += 1
            if not first:
                with torch.inference_mode():
                    for func, args, kwargs, out in mode.done:
                        _again(func, args, kwargs, out)
            first = False

        return replay


def _again(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Run an operation again; what it made new goes where it was then."""
    found = func(*args, **kwargs)
    for then, now in zip(tree_leaves(out), tree_leaves(found), strict=True):
        if isinstance(then, Tensor):
            memory, other = (t.untyped_storage().data_ptr() for t in (then, now))
            if memory != other:
                then.copy_(now)
