"""The covering sets by which tests are chosen."""

from __future__ import annotations

from itertools import combinations, product

from pairwise import beside, covering, pairwise


def pairs(cases: object) -> set[object]:
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}  # type: ignore[attr-defined]


def test_any_two_values_meet_in_few_cases() -> None:
    values = ("abcd", (1, 2, 3), (True, False), ("x", "y"))
    found = pairwise(*values)
    assert pairs(found) == pairs(product(*values))
    assert len(found) <= 15  # of 48
    assert found == pairwise(*values)


def test_what_cannot_meet_does_not() -> None:
    cases = [case for case in product(range(4), repeat=3) if case[0] != case[1]]
    found = covering(cases)
    assert set(found) <= set(cases)
    assert pairs(found) == pairs(cases)
    assert len(found) < len(cases) / 2


def test_each_case_comes_with_some_of_the_rest() -> None:
    assert beside([("a", "b"), ("a", "c")], (1, 2)) == [
        ("a", "b", 1),
        ("a", "b", 2),
        ("a", "c", 1),
        ("a", "c", 2),
    ]
