"""Compile at load what the steps of an answer will launch, so that none of it waits in a turn."""

from __future__ import annotations

import torch

from minikv.arena import Arena
from minikv.device_step import DeviceStep
from minikv.kernels.dispatch import Kernels
from minikv.scheduler import Scheduler

_ROWS = 4  # of a head; no build of a kernel depends on how many there are


def warm(kv: Scheduler) -> None:
    """Make two steps over a tiny cache of the same network, policy and kernels.

    Two, so that heads also give up a row. What a prompt launches depends on its length and is not
    among it. If the kernels cannot be built (Triton needs a C compiler), the torch twins take their
    place and `kv.notice` says why.
    """
    try:
        _steps(kv)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # what a compiler may raise is its own affair
        why = next(iter(str(error).splitlines()), "")[:200]
        kv.ops = Kernels()
        kv.notice = f"the Triton kernels are not used: {type(error).__name__}: {why}"


def _steps(kv: Scheduler) -> None:
    shape, step = kv.shape, kv.step_policy
    arena = Arena(
        shape.layers, shape.kv_heads, shape.head_dim, kv.dtype, kv.device,
        step.columns if step else {}, kv=kv.kv,
    )  # fmt: skip
    sides = torch.full_like(arena.capacity, _ROWS)
    arena.resize([_ROWS * shape.kv_heads] * shape.layers, sides)
    arena.cap.fill_(1)
    state = DeviceStep(shape, kv.device, kv.ops)
    if not state.takes(arena, step, None):
        return
    with torch.inference_mode():
        state.load(arena, step, 0, 0, None)
        heads = torch.zeros((1, shape.heads, shape.head_dim), dtype=kv.dtype, device=kv.device)
        rows = heads[:, : shape.kv_heads]
        for _ in range(2):
            state.start()
            for layer in range(shape.layers):
                state.attend(layer, heads, rows, rows)
            state.finish(torch.ones((), dtype=torch.bool, device=kv.device))
        state.commit()
