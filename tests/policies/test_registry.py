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


LOOKS: dict[str, object] = {"kernel": 7, "pooling": "max", "group": "mean"}
SNAPKV: dict[str, object] = {"window": 32, "sinks": 0, **LOOKS}
ADA: dict[str, object] = {"alpha": 0.2, "rounding": "exact", "normalize": False, "alloc": "blend"}
PYRAMID: dict[str, object] = {"beta": 20, "line": "exact", "rounding": "exact"}
EXPECTED: dict[str, object] = {"sinks": 4, "future": 512, "covariance": True, "value_norm": True}
KVZIP: dict[str, object] = {"sinks": 4, "chunk": 2000, "overlap": 8, "said": 0.25}
ENDS: dict[str, object] = {"sinks": 4, "recent": 10}
DEFAULTS: dict[str, dict[str, object]] = {
    "full": {},
    "none": {},
    "streaming": {"sinks": 4},
    "snapkv": SNAPKV,
    "pyramidkv": SNAPKV | PYRAMID,
    "adakv": SNAPKV | ADA,
    "ada-pyramid": SNAPKV | PYRAMID | ADA,
    "nacl": {
        "proxies": 32,
        "sinks": 4,
        "non_causal": False,
        "random": 0.35,
        "draw": "score",
        "temperature": 1.0,
        "seed": 0,
    },
    "kvcrush": SNAPKV
    | {"sinks": 4, "ratio": 0.25, "bits": "kv", "anchor": "mean", "ranks": "ends", "seed": 0},
    "h2o": {"recent_share": 0.5, "sinks": 0, "window": 0, "average": False},
    "tova": {"per_head": False, "protect_newest": True, "sinks": 0},
    "l2": ENDS | {"skip": 0},
    "keydiff": ENDS | {"block": 0},
    "expected": EXPECTED | {"recent": 10, "epsilon": 0.0},
    "ada-expected": EXPECTED | ADA | {"recent": 0, "epsilon": 0.01, "alloc": "floor"},
    "kvzip": KVZIP | {"plus": False},
    "kvzip+": KVZIP | {"plus": True},
    "defensive": {"window": 32, "kernel": 5, "values": "plain", "sure": 0.0, "sinks": 0},
    "queryspan": ENDS | {"window": 32, "decay": 0.95, "gate": 0.5, "near": 3},
    "dropkv": SNAPKV | {"pooling": "avg", "epsilon": 1e-6},
    "chunkkv": SNAPKV | {"chunk": 10, "kernel": 1},
    "random": ENDS | {"seed": 0},
    "roco": ENDS | {"scope": 0.3, "scope_prompt": 0.1, "pool": 7, "lead": 100.0},
    "scissorhands": ENDS | {"history": 400},
    "hashevict": ENDS | {"bits": 16, "hash_with": "query", "seed": 0},
    "rkv": {
        "sinks": 0,
        "window": 8,
        "buffer": 128,
        "kernel": 7,
        "mix": 0.07,
        "threshold": 0.5,
        "softmax": "all",
        "group": "mean",
    },
}
"""Of every option of every policy: a default changes here, in the docs and by a measurement."""


@pytest.mark.parametrize("name", POLICIES)
def test_defaults(name: str) -> None:
    found = {option.name: option.default for option in POLICIES[name].options}
    assert found == DEFAULTS[name]
