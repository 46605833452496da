"""Ada-KV: no head is left nothing, and which rules exclude each other. Shares: `test_selection`."""

from __future__ import annotations

import pytest
import torch
from refusals import refused
from small import engine, ids, network
from views import kept

from minikv import policies


@pytest.mark.parametrize("name", ["l2+ada", "keydiff+ada", "h2o+ada", "expected+ada"])
def test_no_head_is_left_nothing(name: str) -> None:
    options: dict[str, object] = {"alpha": 0.0}
    options |= {"recent_share": 0.0} if "h2o" in name else {"sinks": 0, "recent": 0}
    for seed in range(4):
        run = engine(network(seed=seed), name, "none", 4, prompt_options=options)
        run.prompt(ids(80))
        sizes = torch.tensor([*map(len, kept(run.kv))]).view(3, 3)
        assert sizes.sum(1).tolist() == [12] * 3
        assert int(sizes.min()) >= 1


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
