"""`full` and `none`, which evict nothing: the baselines."""

from __future__ import annotations

from minikv.policies.options import Method

FULL = Method(
    "full",
    "keeps every token; the baseline",
    good="answers of any length",
    paper="baseline",
)

NONE = Method(
    "none",
    "all tokens of the answer stay until the next prompt (the setting of most papers)",
    good="answers of any length",
    paper="-",
    again="-",
)
