"""RoCo's rule worked by hand."""

from __future__ import annotations

import torch
from small import victims

from minikv import policies
from minikv.policies.base import (
    StepView,
)


def roco_view(mean: list[float], spread: list[float], age: list[int], cap: int) -> StepView:
    count = torch.full((1, len(mean)), 10.0)
    m, s = torch.tensor([mean]), torch.tensor([spread])
    columns = {"sum": m * count, "squares": (s**2 + m**2) * count, "count": count}
    pos = torch.tensor([age])
    zero = torch.zeros(1, dtype=torch.int64)
    return StepView(100, pos, torch.tensor([cap]), zero, zero, columns)


def test_roco_spares_the_unsteady() -> None:
    """Row 0 has the lowest mean but the highest deviation; of the steady ones row 2 is lowest."""
    roco = policies.step_policy("roco", {"sinks": 1, "recent": 1, "scope": 0.25})
    assert roco is not None
    view = roco_view(
        [0.01, 0.30, 0.05, 0.20, 0.00], [0.9, 0.1, 0.1, 0.1, 0.0], [10, 20, 30, 40, 99], cap=4
    )
    assert victims(roco, view).tolist() == [2]
    plain = policies.step_policy("roco", {"sinks": 1, "recent": 1, "scope": 0.0})
    assert plain is not None
    assert victims(plain, view).tolist() == [0]


def test_roco_evicts_the_older_of_equals() -> None:
    roco = policies.step_policy("roco", {"sinks": 0, "recent": 1})
    assert roco is not None
    view = roco_view([0.1, 0.1, 0.1, 0.1], [0.0] * 4, [50, 20, 30, 99], cap=3)
    assert victims(roco, view).tolist() == [1]


def test_roco_takes_a_constant_stream_for_steady() -> None:
    """Rounding makes some of their variances negative; none may pass for steadier than another."""
    roco = policies.step_policy("roco", {"sinks": 0, "recent": 1, "scope": 0.8})
    assert roco is not None
    values = torch.linspace(0.02, 0.018, 40)  # the older, the more attention
    columns = {name: torch.zeros(40) for name in roco.columns}
    for _ in range(30):
        roco.update(columns, values, lambda: torch.ones(40))
    variance = columns["squares"] / 30 - (columns["sum"] / 30).square()
    assert (variance < 0).any()
    pos, zero = torch.arange(40)[None], torch.zeros(1, dtype=torch.int64)
    view = StepView(
        40, pos, torch.tensor([39]), zero, zero, {n: c[None] for n, c in columns.items()}
    )
    in_scope = 39 - int(39 * 0.8)
    steady = variance.clamp(min=0)[:39].sort().values[in_scope - 1]
    lowest = max(i for i in range(39) if variance[i] <= steady)
    assert victims(roco, view).tolist() == [lowest]


def test_roco_never_evicts_the_newest_row() -> None:
    """Not even in a head whose cap is below sinks + recent, where nothing else protects it."""
    roco = policies.step_policy("roco")
    assert roco is not None
    view = roco_view([0.3, 0.2, 0.4, 0.0], [0.0] * 4, [91, 93, 98, 99], cap=3)
    assert victims(roco, view).tolist() == [1]
