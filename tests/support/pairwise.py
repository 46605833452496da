"""Few cases that still try every two values together.

Most faults need two particular values, hardly one needs three (Kuhn, Wallace and Gallo, "Software
fault interactions", IEEE TSE 30(6), 2004): a set of cases in which any two values of two parameters
that can meet do meet finds nearly what the full product finds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case", bound=tuple[Hashable, ...])


def covering(cases: Iterable[Case]) -> list[Case]:
    """Some of `cases`, in their order: any two values that stand in one of them at two places
    stand in one of the result. Greedy, the same for the same cases."""
    everything = list(cases)
    pairs = [frozenset(combinations(enumerate(case), 2)) for case in everything]
    left, chosen = frozenset[object]().union(*pairs), set[int]()
    while left:
        best = max(range(len(pairs)), key=lambda i: len(pairs[i] & left))
        chosen.add(best)
        left -= pairs[best]
    return [everything[i] for i in sorted(chosen)]


def pairwise(*values: Sequence[Hashable]) -> list[tuple[Hashable, ...]]:
    """`covering` of the product of some parameters' values."""
    return covering(product(*values))


def beside(cases: Sequence[Case], *values: Sequence[Hashable]) -> list[tuple[Hashable, ...]]:
    """Each of `cases` with values of more parameters: `covering` of their product."""
    return covering((*case, *more) for case, *more in product(cases, *values))


def some_by_day(cases: Iterable[Any], daily: Callable[[Any], bool]) -> list[Any]:
    """All of `cases`; those that are not `daily` run at night only."""
    return [
        case if daily(case) else pytest.param(*values, marks=pytest.mark.soak)
        for case in cases
        for values in [case if isinstance(case, tuple) else (case,)]
    ]
