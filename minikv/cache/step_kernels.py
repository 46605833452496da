"""Which step policies have a kernel of their own for the decisions of a step on the device.

The others go through `StepPolicy.judge` over padded views, in `DecodeStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv import kernels
from minikv.kernels.dispatch import Kernels
from minikv.policies.base import StepPolicy
from minikv.policies.h2o import H2O
from minikv.policies.hashevict import HashEvict
from minikv.policies.roco import RoCo
from minikv.policies.scissorhands import ScissorHands
from minikv.policies.tova import Tova


@dataclass(frozen=True, slots=True)
class Step:
    """What the end of a step reads: see `kernels.h2o_step`. quota int64 [L, H]: what `Fused.quota`
    made of the caps; window int64 [L]: rows that a layer's query sees at most."""

    ops: Kernels
    logits: Tensor
    lse: Tensor
    rows: kernels.Rows
    go: Tensor
    columns: Mapping[str, Tensor]
    quota: Tensor
    window: Tensor


@dataclass(frozen=True, slots=True)
class Fused:
    """quota: what the kernel must know of the caps, int64 [L, H] both. finish(step, hole): update
    the policy's columns and write the row that leaves each head, or -1, to `hole` [L, H]."""

    quota: Callable[[Tensor], Tensor]
    finish: Callable[[Step, Tensor], None]


def fused(policy: StepPolicy) -> Fused | None:
    """The kernel that ends a step under `policy`, if there is one."""
    # A class derived from one of these may judge otherwise, so that only these very ones count.
    if type(policy) is H2O:
        return Fused(lambda cap: _share(cap, policy.share).clamp(min=1), _h2o)
    if type(policy) is RoCo:
        return Fused(lambda cap: cap - _share(cap, policy.scope), _roco)
    if type(policy) is Tova:
        layerwise = not policy.per_head
        return Fused(
            torch.zeros_like,
            lambda s, hole: s.ops.tova_step(
                s.logits,
                s.lse,
                s.rows,
                s.go,
                hole,
                layerwise=layerwise,
            ),
        )
    if type(policy) is ScissorHands:
        history = policy.queries

        def scissorhands(s: Step, hole: Tensor) -> None:
            words = [column for name, column in s.columns.items() if name != "queries"]
            s.ops.scissorhands_step(
                s.logits, s.lse, s.rows, s.go, hole, words, s.columns["queries"], history, s.window
            )

        return Fused(torch.zeros_like, scissorhands)
    return None


def averages(policy: StepPolicy | None) -> bool:
    """Whether the policy judges by a mean over layers, which without its kernel asks for values."""
    return isinstance(policy, Tova) and not policy.per_head


def hashes(policy: StepPolicy | None) -> HashEvict | None:
    """The policy, if `kernels.hash_append` chooses its victims."""
    return policy if type(policy) is HashEvict else None


def _h2o(s: Step, hole: Tensor) -> None:
    s.ops.h2o_step(s.logits, s.lse, s.rows, s.go, hole, s.columns["sum"], s.quota)


def _roco(s: Step, hole: Tensor) -> None:
    c = s.columns
    s.ops.roco_step(
        s.logits, s.lse, s.rows, s.go, hole, c["sum"], c["squares"], c["count"], s.quota
    )


def _share(cap: Tensor, share: float) -> Tensor:
    return (cap.to(torch.float64) * share).to(torch.int64)
