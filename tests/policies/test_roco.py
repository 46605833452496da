"""RoCo's rule worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small import victims
from views import asked, rule, view

from minikv.policies.base import StepPolicy, StepView

PAPER = {"pool": 1, "lead": 1}


def roco_view(
    roco: StepPolicy, mean: list[float], spread: list[float], age: list[int], many: int = 1
) -> StepView:
    count = torch.full((1, len(mean)), 10.0)
    m, s = torch.tensor([mean]), torch.tensor([spread])
    columns = {"sum": m * count, "squares": (s**2 + m**2) * count, "count": count}
    return asked(roco, 100, torch.tensor([age]), columns, cap=torch.tensor([4]), count=many)


def test_roco_spares_the_unsteady() -> None:
    """Row 0 has the lowest mean but the highest deviation; of the steady ones row 2 is lowest."""
    roco = rule("roco", {"sinks": 1, "recent": 1, "scope": 0.25, **PAPER})
    means, spreads = [0.01, 0.30, 0.05, 0.20, 0.00], [0.9, 0.1, 0.1, 0.1, 0.0]
    view = roco_view(roco, means, spreads, [10, 20, 30, 40, 99])
    assert victims(roco, view).tolist() == [2]
    plain = rule("roco", {"sinks": 1, "recent": 1, "scope": 0.0, **PAPER})
    assert victims(plain, view).tolist() == [0]


def test_roco_takes_a_constant_stream_for_steady() -> None:
    """Rounding makes some of their variances negative; none may pass for steadier than another."""
    roco = rule("roco", {"sinks": 0, "recent": 1, "scope": 0.8, **PAPER})
    values = torch.linspace(0.02, 0.018, 40)  # the older, the more attention
    columns = {name: torch.zeros(40) for name in roco.columns}
    for _ in range(30):
        roco.update(columns, values, lambda: torch.ones(40))
    variance = columns["squares"] / 30 - (columns["sum"] / 30).square()
    assert (variance < 0).any()
    view = asked(roco, 40, torch.arange(40)[None], {n: c[None] for n, c in columns.items()})
    in_scope = 39 - int(39 * 0.8)
    steady = variance.clamp(min=0)[:39].sort().values[in_scope - 1]
    lowest = max(i for i in range(39) if variance[i] <= steady)
    assert victims(roco, view).tolist() == [lowest]


def started(
    mass: list[float], observed: int = 2, *, causal: bool = True, **options: float
) -> dict[str, list[float]]:
    """A head's columns after a first prompt, of whose queries the last ones gave this attention."""
    roco = rule("roco", options)
    seen = view(torch.tensor([[mass]]), observed)  # squares are those of the sum
    none = {name: torch.zeros(1, len(mass)) for name in roco.columns}
    found = roco.init(replace(seen, causal=causal, carried=none))
    return {name: column[0].tolist() for name, column in found.items()}


MASS = [0.5, 0.25, 0.0, 0.0, 1.0, 0.0, 8.0, 9.0]


SQUARES = [m * m for m in MASS]
SEEN = [2.0] * 7 + [1.0]


@pytest.mark.parametrize(
    ("given", "observed", "options", "columns"),
    [
        # All but the two observed rows, the last one of which was seen once, take the largest mean
        # and mean square of themselves and their neighbours; counts stay as they are.
        (MASS, 2, {"pool": 1, "lead": 1}, {"sum": MASS, "squares": SQUARES, "count": SEEN}),
        (
            *(MASS, 2, {"pool": 3, "lead": 1}),
            {
                "weighed": [0.5, 0.5, 0.25, 1.0, 1.0, 1.0, 8.0, 9.0],
                "squares": [0.25, 0.25, 0.0625, 1.0, 1.0, 1.0, 64.0, 81.0],
                "count": SEEN,
            },
        ),
        # What a prompt gave is worth more than what an answer gives, and so are deviations.
        (
            *(MASS, 2, {"pool": 1, "lead": 8}),
            {"weighed": [8 * m for m in MASS], "squares": [64 * m for m in SQUARES], "count": SEEN},
        ),
        # Every row was seen once: the largest of three neighbours, and the last one its own.
        (
            *(MASS, 1, {"pool": 3, "lead": 1}),
            {"weighed": [0.5, 0.5, 0.25, 1.0, 1.0, 8.0, 8.0, 9.0], "count": [1.0] * 8},
        ),
        # Where a prompt's queries are taken to stand behind all of its rows.
        ([1.0] * 6, 4, {"causal": False, **PAPER}, {"count": [4.0] * 6}),
    ],
    ids=["paper", "pooled", "led", "one query", "not causal"],
)
def test_what_rows_start_with_after_a_prompt(
    given: list[float], observed: int, options: Any, columns: dict[str, list[float]]
) -> None:
    found = started(given, observed, **options)
    assert {name: found[name] for name in columns} == columns


def leaves(**options: float) -> list[int]:
    """Who leaves of 16 rows of a prompt, of which row 4 was attended to and its neighbours were
    not, and four of the answer."""
    mass = [0.02, 0.02, 0.02, 0.0, 1.0, 0.0] + [0.02] * 8 + [0.3, 0.3]
    roco = rule("roco", {"sinks": 0, "recent": 2, "scope": 0.3, **options})
    made = started(mass, **options)
    answer = {roco.total: 0.2, "squares": 0.02, "count": 4.0}
    columns = {name: torch.tensor([[*c, *[answer[name]] * 4]]) for name, c in made.items()}
    return victims(roco, asked(roco, 20, torch.arange(20)[None], columns)).tolist()


def test_what_leaves_first_while_an_answer_is_written() -> None:
    """Under the paper's statistics a neighbour of what was attended to, which pooling had kept at
    the prompt; pooled, a row that has no neighbour to be kept for; by default one of the answer."""
    assert leaves(**PAPER) == [3]
    assert leaves(pool=3, lead=1) == [0]
    assert leaves() == [16]


def test_where_several_rows_leave_the_steady_ones_are_sorted() -> None:
    """Rows 0 and 2 have the lowest means, but row 2's attention varies most."""
    roco = rule("roco", {"sinks": 0, "recent": 1, "scope": 0.25, **PAPER})
    means, spreads = [0.1, 0.3, 0.2, 0.4, 0.0], [0.1, 0.2, 0.9, 0.3, 0.0]
    seen = roco_view(roco, means, spreads, [1, 2, 3, 4, 99], 2)
    assert roco.worth(seen).isfinite().tolist() == [[True, True, False, True, False]]
