"""Ada-KV: which of its rules exclude each other. What heads get: `test_selection`, `test_parts`."""

from __future__ import annotations

import pytest
from refusals import refused

from minikv import policies

FLOOR = {"alloc": "floor"}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("adakv", FLOOR | {"rounding": "official"}, "rounding=official cannot be combined"),
        ("adakv", FLOOR | {"normalize": True}, "normalize cannot be combined"),
        ("l2+ada", {"normalize": True}, "normalize needs scores that add up"),
    ],
)
def test_rules_that_exclude_each_other_are_refused(
    name: str, options: dict[str, object], says: str
) -> None:
    assert refused(says, policies.prompt_policy, name, options).hint
    for single in options:
        if name == "adakv":
            assert policies.prompt_policy(name, {single: options[single]}) is not None
