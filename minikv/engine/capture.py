"""How a repeated step is launched: as a CUDA graph, or directly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Capture(Protocol):
    """How a repeated step is launched."""

    def warm(self, body: Callable[[], None]) -> None:
        """Run `body` uncaptured, so that everything is compiled and allocated before `record`."""
        ...

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture `body` without running it. Returns a function that runs it on the same memory."""
        ...

    def post(self, values: Tensor) -> Callable[[], list[int]]:
        """Send values (int64, on the device) to the host. Returns a function that waits for them
        and returns them."""
        ...


class Eager:
    """A `Capture` that captures nothing and runs every step: for a CPU, and for tests."""

    def warm(self, body: Callable[[], None]) -> None:
        """See `Capture`."""
        body()

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`."""
        return body

    def post(self, values: Tensor) -> Callable[[], list[int]]:
        """See `Capture`."""
        sent = values.to("cpu", copy=True)
        return lambda: list(map(int, sent))


class CudaGraphs:
    """A `Capture` with CUDA graphs. Warms up on a separate stream, as graph capture requires."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # At most two steps are under way: the result of one is read before a third is launched.
        self._host = [torch.zeros(2, dtype=torch.int64, pin_memory=True) for _ in range(3)]
        self._sent = 0

    def warm(self, body: Callable[[], None]) -> None:
        """See `Capture`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            body()
        current.wait_stream(self._stream)

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`."""
        return captured(body, self._stream)

    def post(self, values: Tensor) -> Callable[[], list[int]]:
        """See `Capture`."""
        host = self._host[self._sent % len(self._host)]
        self._sent += 1
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))

        def wait() -> list[int]:
            event.synchronize()
            return list(map(int, host))

        return wait


def captured(body: Callable[[], None], stream: torch.cuda.Stream) -> Callable[[], None]:
    """Capture `body` on a stream; returns the graph's replay. Raises torch's error if something in
    `body` waits for the device; torch can be used after that.

    `torch.cuda.graph` is not used, because it waits for the device and frees all cached memory
    first, and because it stays on its stream after an error.
    """
    graph, pool, done = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), False
    with torch.cuda.stream(stream):
        # Other threads may use the device: the terminal reads memory figures.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            body()
            graph.capture_end()
            done = True
        finally:
            if not done:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                # Before 2.12, torch's allocator stays in capture mode after a capture that failed,
                # and frees nothing more. If the capture did end, these calls raise.
                with contextlib.suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(stream.device.index, pool)
                    torch._C._cuda_releasePool(stream.device.index, pool)
    return graph.replay
