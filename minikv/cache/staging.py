"""The staging buffers of a tier: one layer's keys and values on the device.

On CUDA there are two of them and a stream for copies: while the network computes with a layer, the
next layer's rows come from the host and the last layer's new rows go there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from minikv import kernels
from minikv.cache.stats import Shape
from minikv.cache.tier_rows import SCALE, Rows, copy_heads


class Copies(Protocol):
    """A stream for copies, beside the one that computes."""

    def run(self) -> contextlib.AbstractContextManager[None]:
        """What is launched within runs on it, after all that was launched for computing."""
        ...

    def mark(self) -> Any:
        """A point behind all that was launched on it."""
        ...

    def wait(self, mark: Any) -> None:
        """What is launched for computing from now on waits for that point."""
        ...

    def finish(self) -> None:
        """Wait on the host until all of it is done."""
        ...


class CudaCopies:  # pragma: no cover - CUDA only
    """`Copies` on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """See `Copies`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """See `Copies`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """See `Copies`."""
        torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def finish(self) -> None:
        """See `Copies`."""
        self._stream.synchronize()


@dataclass(slots=True)
class _Buffer:
    """key and value [H, N, D]; the layer whose rows are in them or on their way; `there`: the point
    of the copies' stream at which they are."""

    key: Tensor
    value: Tensor
    layer: int | None = None
    there: Any = None


class Staging:
    """For one prompt of `tokens` tokens, the first `length` of which are in `rows`.

    coded: the rows are int8 codes with a scale each. copies: a stream for them, with which the next
    layer is brought while one is computed with; only for rows whose `read` of one layer leaves
    another's valid.
    """

    def __init__(
        self,
        rows: Rows,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int,
        length: int,
        *,
        coded: bool = False,
        copies: Copies | None = None,
    ) -> None:
        self._rows, self._layers, self._length = rows, shape.layers, length
        self._dtype, self._coded, self._copies = dtype, coded, copies
        wide = (shape.kv_heads, tokens, shape.head_dim)
        self._buffers = [
            _Buffer(
                torch.empty(wide, dtype=dtype, device=device),
                torch.empty(wide, dtype=dtype, device=device),
            )
            for _ in range(1 if copies is None else 2)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.key.nbytes + buffer.value.nbytes for buffer in self._buffers)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, N, D]; the rows below `length` are there for what is launched now."""
        buffer = self._fetched(layer)
        if self._copies is not None:
            self._copies.wait(buffer.there)
            if layer + 1 < self._layers:
                self._fetched(layer + 1)
        return buffer.key, buffer.value

    def _fetched(self, layer: int) -> _Buffer:
        """The layer's buffer, with its rows in it or on their way."""
        buffer = self._buffers[layer % len(self._buffers)]
        if buffer.layer == layer:
            return buffer
        with contextlib.nullcontext() if self._copies is None else self._copies.run():
            if self._length:
                columns = self._rows.read(layer, self._length)
                for name, into in (("k", buffer.key), ("v", buffer.value)):
                    self._fill(into[:, : self._length], columns[name], columns.get(f"{name}_scale"))
        if self._copies is not None:  # also without rows: the last layer's may still be going out
            buffer.there = self._copies.mark()
        buffer.layer = layer
        return buffer

    def _fill(self, into: Tensor, rows: Tensor, scales: Tensor | None) -> None:
        """Bring rows [H, n, D] to the device."""
        wait = self._copies is None
        if scales is None:
            copy_heads(into, rows, wait=wait)
            return
        codes, scale = (torch.empty_like(t, device=into.device) for t in (rows, scales))
        copy_heads(codes, rows, wait=wait)
        copy_heads(scale, scales, wait=wait)
        into.copy_(kernels.from_codes(codes, scale.float(), self._dtype))

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """A layer was computed with: keep its rows from `length` on."""
        with contextlib.nullcontext() if self._copies is None else self._copies.run():
            new = {"k": key[:, self._length :], "v": value[:, self._length :]}
            if self._coded:
                for name in ("k", "v"):
                    new[name], scale = kernels.to_codes(new[name])
                    new[f"{name}_scale"] = scale.to(SCALE)
            self._rows.write(layer, self._length, new)

    def close(self) -> None:
        """Wait for the copies. Cannot fail: what a copy ran into is met by the next computation."""
        if self._copies is not None:
            with contextlib.suppress(RuntimeError):
                self._copies.finish()
