"""The staging buffers of a tier: one layer's keys and values on the device.

On CUDA there are two of them and a stream for copies. While the network computes with one layer,
the next layer's rows are copied from the host, and the last layer's new rows are copied to it.
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
    """A stream for copies, separate from the stream that computes."""

    def run(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, launches go to this stream, after all that was launched on the
        computing stream."""
        ...

    def mark(self) -> Any:
        """A point after everything launched so far on this stream."""
        ...

    def wait(self, mark: Any) -> None:
        """Later launches on the computing stream wait for that point."""
        ...

    def finish(self) -> None:
        """Block the host until everything launched on this stream is done."""
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
    """key and value [H, N, D]. layer: whose rows they hold, or will hold once the copies are done.
    there: the point of the copy stream at which the copies are done."""

    key: Tensor
    value: Tensor
    layer: int | None = None
    there: Any = None


class Staging:
    """Staging for one prompt of `tokens` tokens, the first `length` of which are in `rows`.

    coded: `rows` holds int8 codes with a scale per row. copies: a stream with which the next layer
    is copied while the network computes with the present one. Only for `rows` whose `read` of one
    layer leaves another layer's result valid (`Rows.apart`).
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
        """Keys and values [H, N, D]. Work launched from now on finds the rows below `length` in
        them."""
        buffer = self._fetched(layer)
        if self._copies is not None:
            self._copies.wait(buffer.there)
            if layer + 1 < self._layers:
                self._fetched(layer + 1)
        return buffer.key, buffer.value

    def _fetched(self, layer: int) -> _Buffer:
        """The layer's buffer. Its rows are in it, or their copy has been launched."""
        buffer = self._buffers[layer % len(self._buffers)]
        if buffer.layer == layer:
            return buffer
        with contextlib.nullcontext() if self._copies is None else self._copies.run():
            if self._length:
                first = self._rows.first(layer)
                columns = self._rows.read(layer, self._length)
                for name, into in (("k", buffer.key), ("v", buffer.value)):
                    into[:, :first] = 0.0  # nothing sees these rows, but they must be finite
                    place = into[:, first : self._length]
                    self._fill(place, columns[name], columns.get(f"{name}_scale"))
        if self._copies is not None:  # also if length is 0: new rows may still be copied from here
            buffer.there = self._copies.mark()
        buffer.layer = layer
        return buffer

    def _fill(self, into: Tensor, rows: Tensor, scales: Tensor | None) -> None:
        """Copy rows [H, n, D] to the device, and decode them if they have scales [H, n]."""
        wait = self._copies is None
        if scales is None:
            copy_heads(into, rows, wait=wait)
            return
        codes, scale = (torch.empty_like(t, device=into.device) for t in (rows, scales))
        copy_heads(codes, rows, wait=wait)
        copy_heads(scale, scales, wait=wait)
        into.copy_(kernels.from_codes(codes, scale.float(), self._dtype))

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The network is done with the layer: write its rows from `length` on to `rows`."""
        with contextlib.nullcontext() if self._copies is None else self._copies.run():
            begin = max(self._length, self._rows.first(layer))
            new = {"k": key[:, begin:], "v": value[:, begin:]}
            if self._coded:
                for name in ("k", "v"):
                    new[name], scale = kernels.to_codes(new[name])
                    new[f"{name}_scale"] = scale.to(SCALE)
            self._rows.write(layer, begin, new)

    def close(self) -> None:
        """Wait for the copies. Cannot fail: if a copy failed, the next computation raises."""
        if self._copies is not None:
            with contextlib.suppress(RuntimeError):
                self._copies.finish()
