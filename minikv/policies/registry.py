"""The table of eviction policies: one row per published method, one per part it is made of.

A row names the module and the class that hold the method, and the options, which are the fields of
that class. `composition` makes the object. Importing this needs no torch, so that `--help`, checks
and `minikv policies` answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from minikv.policies.options import Option, Value


@dataclass(frozen=True, slots=True)
class Part:
    """One answer to one of the four questions: a class whose fields are `options`.

    `axis`: what it answers, and with it the base class in `policies.base`: "scorer" (`Scorer`),
    "layers" (`LayerAllocator` or
    `GlobalAllocator`), "heads" (`HeadAllocator`), "select" (`Selector`), "weigh"
    (`Reweighter`) or "prefer" (`Preference`).
    """

    name: str
    axis: str
    module: str
    cls: str
    summary: str
    options: tuple[Option, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """The facts of one method, from which help, validation and the policies table are made.

    `parts`: what it is made of as --policy (empty: it is none, or evicts nothing). `module` and
    `cls`: its step form, a `StepPolicy` whose fields are the options `own`.
    """

    name: str
    prompt: bool  # may be given as --policy
    step: bool  # may be given as --decode
    when: str  # "never", "prompt", "step", "prompt + step"
    shape: str  # how the budget is spread: "uniform", "per head", ...
    scores: str  # what a row is worth
    state: str  # what is stored per row beyond k, v, position
    second: str  # what a second question finds
    paper: str  # arXiv number or "baseline"
    summary: str
    parts: tuple[str, ...] = ()
    module: str = ""
    cls: str = ""
    own: tuple[Option, ...] = ()
    preset: Mapping[str, Value] = field(default_factory=dict)  # other defaults of the parts
    stride: str = ""  # what --stride makes of a prompt

    @property
    def prompt_options(self) -> tuple[Option, ...]:
        """What it takes as --policy: the options of its parts, one of each name."""
        named: dict[str, Option] = {}
        for part in self.parts:
            for option in PARTS[part].options:
                value = self.preset.get(option.name, option.default)
                named.setdefault(option.name, replace(option, default=value))
        return tuple(named.values())

    @property
    def options(self) -> tuple[Option, ...]:
        """All that it takes, in either form."""
        both = {option.name: option for option in (*self.prompt_options, *self.own)}
        return tuple(both.values())


WINDOW = Option("window", 32, "observation window: the last tokens, always kept", 1, 4096)
KERNEL = Option("kernel", 7, "pooling width over neighbouring tokens (odd)", 1, 63, odd=True)
POOLING = Option("pooling", "max", "pooling of neighbouring scores", choices=("max", "avg"))
GROUP = Option(
    "group", "mean", "how the query heads of a KV head are joined", choices=("mean", "sum", "max")
)
SINKS = Option("sinks", 4, "first tokens of the conversation, always kept", 0, 4096)
RECENT = Option("recent", 10, "newest tokens, always kept", 0, 4096)
SEED = Option("seed", 0, "of the random draws", 0, (1 << 31) - 1)
ROUNDING = Option(
    "rounding",
    "exact",
    "exact: totals are kept to the token; official: the authors' rounding, "
    "which drifts by a few tokens (per head and per layer)",
    choices=("exact", "official"),
)
NO_SINKS = replace(SINKS, default=0)
RECENT_SHARE = Option(
    "recent_share", 0.5, "share of a head's tokens that are the newest", 0.0, 0.95
)
NEWEST = Option("protect_newest", True, "the newest token stays (the release lets it go)")
PER_HEAD = Option(
    "per_head", False, "judge each KV head by itself, not all heads of a layer together"
)

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part(
            "snapkv",
            "scorer",
            "minikv.policies.snapkv",
            "SnapKV",
            "last-window attention, pooled",
            (WINDOW, KERNEL, POOLING, GROUP, NO_SINKS),
        ),
        Part(
            "h2o",
            "scorer",
            "minikv.policies.h2o",
            "H2OScorer",
            "attention of all queries, summed",
            (
                RECENT_SHARE,
                NO_SINKS,
                Option(
                    "window",
                    0,
                    "so many last tokens stay instead of that share; 0: the share",
                    0,
                    4096,
                ),
                Option(
                    "average",
                    False,
                    "divide by the queries that could see a token, so that old "
                    "tokens have no advantage (kvpress' observed attention)",
                ),
            ),
        ),
        Part(
            "tova",
            "scorer",
            "minikv.policies.tova",
            "TovaScorer",
            "the last query's attention",
            (PER_HEAD, NEWEST),
        ),
        Part(
            "proxies",
            "scorer",
            "minikv.policies.nacl",
            "Proxies",
            "attention of proxy queries, summed",
            (
                Option(
                    "proxies", 32, "last queries of the prompt that score, always kept", 1, 4096
                ),
                SINKS,
                Option("non_causal", False, "a proxy also sees the tokens after it (the release)"),
            ),
        ),
        Part("l2", "scorer", "minikv.policies.l2", "L2Scorer", "small key norm", (SINKS, RECENT)),
        Part(
            "keydiff",
            "scorer",
            "minikv.policies.keydiff",
            "KeyDiff",
            "key unlike the others",
            (SINKS, RECENT),
        ),
        Part(
            "expected",
            "scorer",
            "minikv.policies.expected",
            "ExpectedAttention",
            "expected attention",
            (
                SINKS,
                RECENT,
                Option("future", 512, "positions over which the rotation is averaged", 1, 1 << 20),
                Option("covariance", True, "count the spread of the queries, not their mean only"),
                Option("value_norm", True, "times the length of the value"),
                Option("epsilon", 0.0, "added to the attention before that", 0.0, 1.0),
            ),
        ),
        Part(
            "random",
            "scorer",
            "minikv.policies.random",
            "RandomScorer",
            "a draw",
            (SINKS, RECENT, SEED),
        ),
        Part(
            "streaming",
            "scorer",
            "minikv.policies.streaming",
            "StreamingScorer",
            "position only",
            (SINKS,),
        ),
        Part(
            "pyramid",
            "layers",
            "minikv.policies.pyramidkv",
            "PyramidKV",
            "more tokens in the first layers",
            (
                Option("beta", 20, "the last layer keeps about the mean over this", 1, 1000),
                Option(
                    "line",
                    "exact",
                    "exact: totals are kept to the token; or as a release rounds",
                    choices=("exact", "official", "factory", "kvpress"),
                ),
                ROUNDING,
            ),
        ),
        Part(
            "ada",
            "heads",
            "minikv.policies.adakv",
            "AdaKV",
            "head budgets by need",
            (
                Option("alpha", 0.2, "share of the budget that every head is sure of", 0.0, 1.0),
                ROUNDING,
                Option(
                    "normalize",
                    False,
                    "weigh a head's scores by how concentrated they are "
                    "before heads are compared (as KVCache-Factory does, not the authors)",
                ),
                Option(
                    "alloc",
                    "blend",
                    "blend: the paper; floor: alpha of its even share is a "
                    "head's own, the rest goes to the best tokens (kvpress)",
                    choices=("blend", "floor"),
                ),
            ),
        ),
        Part(
            "draw",
            "select",
            "minikv.policies.nacl",
            "Draw",
            "a share of each head's tokens is drawn",
            (
                Option("random", 0.35, "share of the free budget that is drawn", 0.0, 1.0),
                Option(
                    "draw",
                    "score",
                    "score: in proportion to the score; softmax: to its exponential (the release)",
                    choices=("score", "softmax"),
                ),
                Option("temperature", 1.0, "above 1 the draw is more even", 0.01, 1e6),
                SEED,
            ),
        ),
        Part(
            "critical",
            "weigh",
            "minikv.policies.critical",
            "CriticalKV",
            "values weighed by |v W_O|",
            (
                Option(
                    "by_score", 0.5, "share of a head's tokens that the score alone picks", 0.0, 1.0
                ),
                Option("epsilon", 1e-4, "added to the score, so that large values count", 0.0, 1.0),
            ),
        ),
        Part(
            "turns",
            "prefer",
            "minikv.policies.turns",
            "Turns",
            "the ends of every turn",
            (Option("edge", 8, "tokens at either end of a turn", 1, 4096),),
        ),
        Part(
            "kvcrush",
            "select",
            "minikv.policies.kvcrush",
            "KVCrush",
            "representatives beside the best tokens",
            (
                Option("ratio", 0.25, "share of the free budget for representatives", 0.0, 1.0),
                Option(
                    "bits",
                    "kv",
                    "one bit of a token per KV head or, as in the paper, per query head",
                    choices=("kv", "query"),
                ),
                Option(
                    "anchor",
                    "mean",
                    "what the bits of a token are compared with",
                    choices=("mean", "inv_mean", "alternate", "random", "zeros", "ones"),
                ),
                Option(
                    "ranks",
                    "ends",
                    "ends: evenly from the nearest to the farthest; step: "
                    "evenly from the nearest (OpenVINO)",
                    choices=("ends", "step"),
                ),
                SEED,
            ),
        ),
    )
}
"""Every answer by name; a policy is a scorer and, where they are not the plain ones, others."""

_LAST = "last-window attention"
_AFTER = "a block attends to what is left, then as many tokens leave"
_BEFORE = "as many tokens leave as a block brings, then it attends"
POLICIES: dict[str, PolicyInfo] = {
    info.name: info
    for info in (
        PolicyInfo(
            "full",
            True,
            False,
            "never",
            "-",
            "-",
            "-",
            "safe",
            "baseline",
            "keeps every token; the baseline",
        ),
        PolicyInfo(
            "streaming",
            True,
            True,
            "prompt + step",
            "uniform",
            "position only",
            "-",
            "recent only",
            "2309.17453",
            "the first tokens (sinks) and the most recent ones; keys keep their positions, so the "
            "trained context is not extended",
            ("streaming",),
            "minikv.policies.streaming",
            "Streaming",
            (SINKS,),
            stride=_BEFORE,
        ),
        PolicyInfo(
            "snapkv",
            True,
            False,
            "prompt",
            "uniform",
            _LAST,
            "-",
            "needs recall",
            "2404.14469",
            "tokens that the last window of the prompt attends to",
            ("snapkv",),
        ),
        PolicyInfo(
            "pyramidkv",
            True,
            False,
            "prompt",
            "per layer",
            _LAST,
            "-",
            "needs recall",
            "2406.02069",
            "SnapKV's scores, with more tokens in the first layers than in the last",
            ("snapkv", "pyramid"),
        ),
        PolicyInfo(
            "adakv",
            True,
            False,
            "prompt",
            "per head",
            _LAST,
            "-",
            "needs recall",
            "2407.11550",
            "SnapKV's scores, with the layer's budget spread over heads by need",
            ("snapkv", "ada"),
        ),
        PolicyInfo(
            "ada-pyramid",
            True,
            False,
            "prompt",
            "layer and head",
            _LAST,
            "-",
            "needs recall",
            "2407.11550",
            "Ada-KV's head budgets within PyramidKV's layer budgets",
            ("snapkv", "pyramid", "ada"),
        ),
        PolicyInfo(
            "nacl",
            True,
            False,
            "prompt",
            "uniform",
            "proxy attention + draw",
            "-",
            "needs recall",
            "2408.03675",
            "tokens that proxy queries attend to, and a share drawn at random in every head",
            ("proxies", "draw"),
        ),
        PolicyInfo(
            "kvcrush",
            True,
            False,
            "prompt",
            "uniform",
            "window attention + bits",
            "-",
            "needs recall",
            "2503.00022",
            "representatives of the tokens that go, beside SnapKV's choice; kvcrush(h2o) and the "
            "like take another base",
            ("snapkv", "kvcrush"),
            preset={"sinks": 4},
        ),
        PolicyInfo(
            "h2o",
            True,
            True,
            "prompt + step",
            "uniform",
            "accumulated attention",
            "1 sum per token",
            "fades",
            "2306.14048",
            "tokens with the most accumulated attention, and the newest; what tokens got before a "
            "later prompt counts there only with --decode h2o or roco",
            ("h2o",),
            "minikv.policies.h2o",
            "H2O",
            (RECENT_SHARE, NO_SINKS),
            stride=_AFTER,
        ),
        PolicyInfo(
            "tova",
            True,
            True,
            "prompt + step",
            "uniform",
            "newest query's attention",
            "-",
            "needs recall",
            "2401.06104",
            "the tokens that the newest query attends to least leave",
            ("tova",),
            "minikv.policies.tova",
            "Tova",
            (PER_HEAD, NEWEST, NO_SINKS),
            stride=_AFTER,
        ),
        PolicyInfo(
            "l2",
            True,
            True,
            "prompt + step",
            "uniform",
            "key norm",
            "1 norm per token",
            "safe",
            "2406.11430",
            "tokens whose key has a large norm leave; reads no attention",
            ("l2",),
            "minikv.policies.l2",
            "L2",
            (SINKS, RECENT),
            stride=_BEFORE,
        ),
        PolicyInfo(
            "keydiff",
            True,
            False,
            "prompt",
            "uniform",
            "key unlike the others",
            "-",
            "safe",
            "2504.15364",
            "tokens whose key is unlike the others stay; reads no attention",
            ("keydiff",),
        ),
        PolicyInfo(
            "expected",
            True,
            False,
            "prompt",
            "uniform",
            "expected attention",
            "-",
            "safe",
            "2510.00636",
            "tokens that the queries to come are expected to look at, whatever is asked",
            ("expected",),
        ),
        PolicyInfo(
            "random",
            True,
            True,
            "prompt + step",
            "uniform",
            "a draw",
            "-",
            "safe",
            "baseline",
            "any token may leave; the floor that a method should beat",
            ("random",),
            "minikv.policies.random",
            "Random",
            (SINKS, RECENT, SEED),
            stride=_BEFORE,
        ),
        PolicyInfo(
            "roco",
            False,
            True,
            "step",
            "each head's own cap",
            "mean and std of attention",
            "2 sums and 1 count per token",
            "fades",
            "2402.06262",
            "evicts the lowest mean attention among the tokens of steady attention",
            (),
            "minikv.policies.roco",
            "RoCo",
            (
                SINKS,
                replace(RECENT, low=1),
                Option("scope", 0.3, "share of the cap that a high deviation saves", 0.0, 0.95),
                Option("scope_prompt", 0.1, "the same while --stride reads a prompt", 0.0, 0.95),
            ),
            stride=_AFTER,
        ),
        PolicyInfo(
            "scissorhands",
            False,
            True,
            "step",
            "each head's own cap",
            "below-uniform count",
            "a bit per query of the window",
            "fades",
            "2305.17118",
            "evicts the token that most often got less than a uniform share of attention",
            (),
            "minikv.policies.scissorhands",
            "ScissorHands",
            (
                SINKS,
                replace(RECENT, low=1),
                Option("history", 400, "queries that are remembered", 1, 4096),
            ),
            stride=_AFTER,
        ),
        PolicyInfo(
            "hashevict",
            False,
            True,
            "step",
            "each head's own cap",
            "hashed similarity",
            "1 code per token",
            "safe",
            "2412.16187",
            "evicts the token whose hash differs most from the current query's, before attention",
            (),
            "minikv.policies.hashevict",
            "HashEvict",
            (
                SINKS,
                RECENT,
                Option("bits", 16, "length of a code", 4, 64),
                Option(
                    "hash_with",
                    "query",
                    "query: the paper; key: the release",
                    choices=("query", "key"),
                ),
                SEED,
            ),
            stride=_BEFORE,
        ),
        PolicyInfo(
            "none",
            False,
            True,
            "never",
            "-",
            "-",
            "-",
            "-",
            "-",
            "the answer's tokens are all kept until the next prompt (one-shot papers' setting)",
        ),
    )
}
"""Every method by name."""

DEFAULT_PROMPT = "adakv"
DEFAULT_STEP = "roco"
DEFAULT_BUDGET = "512"


def prompt_names() -> list[str]:
    """Names that `--policy` takes."""
    return [p.name for p in POLICIES.values() if p.prompt]


def step_names() -> list[str]:
    """Names that `--decode` takes, besides "auto"."""
    return [p.name for p in POLICIES.values() if p.step]
