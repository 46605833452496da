"""`Part`: a registry row about a part of a policy; and the options that several parts share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minikv.policies.options import Option


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a prompt policy: a class whose fields are `options`.

    axis: the question that it answers, which says its base class in `policies.base`: "scorer"
    (`Scorer`), "layers" (`LayerAllocator` or `GlobalAllocator`), "heads" (`HeadAllocator`),
    "select" (`Selector`), "weigh" (`Reweighter`) or "prefer" (`Preference`). shares_all: it is a
    `GlobalAllocator`, which cannot be combined with parts that share a budget among heads.
    """

    name: str
    axis: str
    module: str
    cls: str
    summary: str
    options: tuple[Option, ...] = ()
    differs: tuple[str, ...] = ()  # from paper and release, with the option that does as they do
    shares_all: bool = False


WINDOW = Option("window", 32, "observation window: the last tokens, always kept", 1, 4096)
KERNEL = Option("kernel", 7, "pooling width over neighbouring tokens (odd)", 1, 63, odd=True)
POOLING = Option("pooling", "max", "pooling of neighbouring scores", choices=("max", "avg"))
GROUP = Option(
    "group", "mean", "how the query heads of a KV head are joined", choices=("mean", "sum", "max")
)
SINKS = Option("sinks", 4, "first tokens of the conversation, always kept", 0, 4096)
RECENT = Option("recent", 10, "newest tokens, always kept", 0, 4096)
SEED = Option("seed", 0, "seed of the random draws", 0, (1 << 31) - 1)
ROUNDING = Option(
    "rounding",
    "exact",
    "exact: totals are exact to the token; official: the authors' rounding, "
    "which drifts by a few tokens (per head and per layer)",
    choices=("exact", "official"),
)
NO_SINKS = replace(SINKS, default=0)
RECENT_SHARE = Option(
    "recent_share", 0.5, "share of a head's tokens that are the newest", 0.0, 0.95
)
NEWEST = Option("protect_newest", True, "the newest token stays (the release lets it go)")
PER_HEAD = Option(
    "per_head", False, "average attention in each KV head, not over all heads of a layer"
)
