"""`full` and `none`, which evict nothing: the baselines."""

from __future__ import annotations

from minikv.policies.options import Method

FULL = Method(
    "full",
    "keeps every token; the baseline",
    good="answers of any length",
    paper="baseline",
    told="-",
    spread="-",
    second="safe",
)

NONE = Method(
    "none",
    "the answer's tokens are all kept until the next prompt (one-shot papers' setting)",
    good="answers of any length",
    paper="-",
    told="-",
    spread="-",
    second="-",
)
