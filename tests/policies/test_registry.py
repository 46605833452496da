"""The table: what a row says is what the class takes."""

from __future__ import annotations

import pytest
from rows import check_part, check_step

from minikv.policies import PARTS, POLICIES, Part, PolicyInfo


@pytest.mark.parametrize("part", PARTS.values(), ids=lambda part: part.name)
def test_the_fields_of_a_part_are_the_options_of_its_row(part: Part) -> None:
    check_part(part)


@pytest.mark.parametrize(
    "info", [p for p in POLICIES.values() if p.module], ids=lambda info: info.name
)
def test_the_fields_of_a_step_policy_are_the_options_of_its_row(info: PolicyInfo) -> None:
    check_step(info)
