"""How a repeated step is launched: as a CUDA graph, or directly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor


class Eager:
    """Runs every step directly: on a CPU, and in tests."""

    def warm(self, body: Callable[[], None]) -> None:
        """Run `body` uncaptured, so that everything is compiled and allocated before `record`."""
        body()

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture `body` without running it. Returns a function that runs it on the same memory."""
        return body

    def post(self, values: Tensor) -> Callable[[], list[int]]:
        """Send values (int64, on the device) to the host. Returns a function that waits for them
        and returns them."""
        sent = values.to("cpu", copy=True)
        return lambda: list(map(int, sent))


class CudaGraphs(Eager):
    """Captures steps as CUDA graphs. Warms up on a separate stream, as graph capture requires."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # At most two steps are under way: the result of one is read before a third is launched.
        self._host = [torch.zeros(2, dtype=torch.int64, pin_memory=True) for _ in range(3)]
        self._sent = 0

    def warm(self, body: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            body()
        current.wait_stream(self._stream)

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        return captured(body, self._stream)

    def post(self, values: Tensor) -> Callable[[], list[int]]:
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
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with torch.cuda.stream(stream):
        # Other threads may use the device: the terminal reads memory figures.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            body()
            graph.capture_end()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            # Before 2.12, torch's allocator stays in capture mode after a capture that failed,
            # and frees nothing more. If the capture did end, these calls raise.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(stream.device.index, pool)
                torch._C._cuda_releasePool(stream.device.index, pool)
            raise
    return graph.replay
