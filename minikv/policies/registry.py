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
    (`Reweighter`) or "prefer" (`Preference`). `shares_all`: a `GlobalAllocator`, beside which
    nothing shares among heads.
    """

    name: str
    axis: str
    module: str
    cls: str
    summary: str
    options: tuple[Option, ...] = ()
    differs: tuple[str, ...] = ()  # from paper and release, and the option that does as they do
    shares_all: bool = False


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """The facts of one method, from which help, validation and the policies table are made.

    `parts`: what it is made of as --policy (empty: it is none, or evicts nothing). `module` and
    `cls`: its step form, a `StepPolicy` whose fields are the options `own`. `differs`: as a part's,
    of the step form.
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
    decode: str = ""  # what --decode auto means; empty: its own step form, or the default
    differs: tuple[str, ...] = ()

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
    def differences(self) -> tuple[str, ...]:
        """How it differs from paper and release, in either form."""
        return (*(line for part in self.parts for line in PARTS[part].differs), *self.differs)

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
            differs=(
                "scores are computed in float32; SnapKV's release rounds them to the model's "
                "precision, where most are equal to others",
                "a KV head keeps one set of tokens, by the mean of its query heads; in "
                "SnapKV's release each query head keeps its own, and keys are stored once per "
                "query head (`group`)",
                "a max over 7 neighbours, as in the published LongBench runs; the class in "
                "SnapKV's release has an average over 5 (`kernel`, `pooling`)",
                "of equal scores the younger token stays; releases leave that to the device",
                "at a later prompt its own queries judge old and new tokens together; releases "
                "know no second prompt",
            ),
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
            differs=(
                "a KV head is judged by the mean of its query heads; the release fails where "
                "there are fewer KV heads",
                "follows the release's cache that evicts; the paper's figures come from one "
                "that only masks, with budgets that are shares of the prompt",
                "KVCache-Factory protects a fixed window (`window`); kvpress divides by age "
                "(`average`) and protects nothing (`recent_share`)",
            ),
        ),
        Part(
            "tova",
            "scorer",
            "minikv.policies.tova",
            "TovaScorer",
            "the last query's attention",
            (PER_HEAD, NEWEST),
            differs=(
                "the newest token stays; the release lets it go if it attends to itself least "
                "(`protect_newest`)",
                "where the heads of a layer hold different tokens, the mean is over those that "
                "hold a token; the release always evicts the same in all",
            ),
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
            differs=(
                "a proxy does not see the tokens after it; in the release it does (`non_causal`)",
                "all proxies stay; in the release only the last 1 % of the prompt less 256 "
                "tokens, which is none of a prompt below 25,600",
                "`proxies` and `sinks` are numbers of tokens; in the release 1 % of the prompt "
                "and 256, in the paper about 10 %",
                "a KV head is judged by the mean of its query heads; the release may take a "
                "query head of another one",
                "evicts after a prompt; the paper may also evict every few tokens of an answer",
            ),
        ),
        Part(
            "l2",
            "scorer",
            "minikv.policies.l2",
            "L2Scorer",
            "small key norm",
            (
                SINKS,
                RECENT,
                Option(
                    "skip",
                    0,
                    "so many first layers keep every token, above the budget (the release: 2)",
                    0,
                    4096,
                ),
            ),
            differs=(
                "the first 4 and the newest 10 tokens stay; kvpress and KVCache-Factory "
                "protect none (`sinks`, `recent`)",
                "norms are float32; in the model's precision many are equal",
                "evicts in every layer; the release leaves the first two as they are (`skip`)",
            ),
        ),
        Part(
            "keydiff",
            "scorer",
            "minikv.policies.keydiff",
            "KeyDiff",
            "key unlike the others",
            (
                SINKS,
                RECENT,
                Option(
                    "block",
                    0,
                    "choose after every block of so many tokens, as the paper does (128 in "
                    "kvpress); 0: once, from all of them",
                    0,
                    1 << 20,
                ),
            ),
            differs=(
                "the first 4 and the newest 10 tokens stay; paper and kvpress protect none "
                "(`sinks`, `recent`)",
                "in the paper a prompt is read in blocks, and later blocks do not see what left; "
                "here all are compared once, or (`block`) block by block, as in "
                "kvpress, and attention stays exact",
            ),
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
                Option(
                    "epsilon",
                    0.0,
                    "added to the attention before that; kvpress' published scores have 0.01",
                    0.0,
                    1.0,
                ),
            ),
            differs=(
                "the newest 10 tokens stay, too; kvpress protects only the first 4 (`recent`)",
                "epsilon=0, as the formula has it; published comparisons with kvpress use 0.01 "
                "and Ada-KV's budgets, which is ada-expected",
            ),
        ),
        Part(
            "defensive",
            "scorer",
            "minikv.policies.defensive",
            "Defensive",
            "worst-case attention x value",
            (
                WINDOW,
                replace(KERNEL, default=5),
                Option(
                    "values",
                    "plain",
                    "plain: times |v W_O|; heads: times its share of all heads' at a token (the "
                    "release); none: attention alone",
                    choices=("plain", "heads", "none"),
                ),
                Option(
                    "sure",
                    0.0,
                    "each head's tokens that hold this share of its attention come first (the "
                    "release: 0.9)",
                    0.0,
                    1.0,
                ),
                NO_SINKS,
            ),
            differs=(
                "the release takes the tokens that hold 90 % of a head's attention first, less the "
                "attention on tokens before the window, which it takes for the window's own; here "
                "that is `sure` without the mistake, and off",
                "the release divides |v W_O| by its sum over heads (`values`)",
                "the release gives out a layer's budget by the scores alone (`+ada` with alpha=0), "
                "or that of all layers (`+global`); alone it is even here",
            ),
        ),
        Part(
            "queryspan",
            "scorer",
            "minikv.policies.queryspan",
            "QuerySpan",
            "question's attention, carried on",
            (
                Option(
                    "window",
                    32,
                    "last queries that score; they should cover the question (the release: 64)",
                    1,
                    4096,
                ),
                SINKS,
                RECENT,
                Option("decay", 0.95, "of what is carried on to the next token", 0.01, 0.9999),
                Option("gate", 0.5, "power of the surprise 1 - p of a token", 0.0, 10.0),
                Option(
                    "near",
                    3,
                    "the most surprising of so many neighbours counts (odd)",
                    1,
                    63,
                    odd=True,
                ),
            ),
            differs=(
                "a prompt that must evict is read twice, first for the probabilities of its "
                "tokens; the release reads once and holds every layer until the end. The choice "
                "is the same",
                "tokens of answers, and what another policy read, count as not foreseen",
                "the release always gives out one budget over all layers (`+global`)",
                "the release protects no newest tokens (`recent`); without them small budgets lose "
                "the end of the question",
            ),
        ),
        Part(
            "dropkv",
            "scorer",
            "minikv.policies.dropkv",
            "DropKV",
            "change of the output, squared",
            (
                WINDOW,
                KERNEL,
                replace(POOLING, default="avg"),
                GROUP,
                Option("epsilon", 1e-6, "added to 1 - p, which may be 0", 1e-12, 1.0),
                NO_SINKS,
            ),
            differs=(
                "kvpress pools over the window's own tokens, too; here they count as 0",
                "kvpress rounds probabilities to the model's number format; here they are float32",
            ),
        ),
        Part(
            "chunkkv",
            "scorer",
            "minikv.policies.chunkkv",
            "ChunkKV",
            "last-window attention of chunks",
            (
                Option("chunk", 10, "tokens of a chunk (kvpress: 20)", 1, 4096),
                WINDOW,
                replace(KERNEL, default=1),
                POOLING,
                GROUP,
                NO_SINKS,
            ),
            differs=(
                "the releases keep whole chunks only; here the youngest tokens of one more "
                "fill the budget",
                "a chunk is worth the mean of its tokens that are still there and not protected; "
                "kvpress has the mean of the whole chunk",
                "kvpress pools scores before (`kernel`, `pooling`), counts the window's "
                "tokens in their chunk, and has chunks of 20 (`chunk`)",
                "layers do not reuse the choice of the layer before, which is an option of the "
                "paper",
            ),
        ),
        Part(
            "kvzip",
            "scorer",
            "minikv.policies.kvzip",
            "KVzip",
            "needed to repeat the text",
            (
                SINKS,
                Option("chunk", 2000, "tokens that are repeated at once", 16, 1 << 20),
                Option(
                    "overlap",
                    8,
                    "last tokens of the chunk before by which a later chunk is asked for",
                    0,
                    256,
                ),
                Option(
                    "said",
                    0.25,
                    "share of the budget for the newest of what was said since",
                    0.0,
                    0.9,
                ),
                Option("plus", False, "times |v W_O| / |h| (KVzip+)"),
            ),
            differs=(
                "the release's softmax is in the model's number format; here it is float32",
                "the release never evicts the system prompt, and has its tokens for the first ones "
                "(--pin-system); kvpress has 4. The template's and the system's other tokens are "
                "scored as the text is",
                "kvpress repeats 2,048 tokens at once (chunk=2048)",
                "near the end of the model's context chunks are shorter; the releases read on "
                "beyond it",
                "the releases take a question and its answer out of the cache again; here they "
                "stay inside the budget: the last question, and the newest of what was said "
                "(said), before the text; the rest leaves first",
                "a text that takes half the budget at most, with all before it, is not scored but "
                "kept",
                "|h| is the length of the layer's input after its norm, as in kvpress; the paper "
                "writes of the hidden state",
                "in a layer with a sliding window a repeat scores only what it still sees",
                "the request is the release's for every model. The bundled one never learned to "
                "obey it, but attends to what it is fed again all the same",
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
            differs=(
                "keys keep their positions; paper and release number them anew inside of the "
                "cache at every step, which also extends the context",
            ),
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
            differs=(
                "layers sum to the budget to the token; the releases' whole steps exceed it "
                "(`line`, `rounding`)",
                "computed anew for every prompt; in Ada-KV's release the first prompt decides "
                "for all later ones",
                "short prompts follow the line, too; KVCache-Factory gives all layers the same "
                "below twice the budget (line=factory)",
                "the window is no part of the line; in kvpress it is (line=kvpress)",
            ),
        ),
        Part(
            "uniform",
            "layers",
            "minikv.policies.uniform",
            "Uniform",
            "every layer keeps the same",
        ),
        Part(
            "global",
            "layers",
            "minikv.policies.global_budget",
            "GlobalBudget",
            "one budget for all layers and heads",
            shares_all=True,
            differs=(
                "scores are compared as they are, which suits attention; of key norms or a draw, "
                "layers may not be comparable",
                "every head keeps what its scorer protects and a token that an answer may "
                "overwrite; the releases may leave a head without any",
                "the releases hold every layer until all are scored; here the best tokens so far "
                "are held. The choice is the same",
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
            differs=(
                "heads sum to the layer's budget to the token; the authors' rounding drifts "
                "(rounding=official)",
                "alpha=0.2, as in the authors' scripts; the example in their README has 0.5",
                "scores are compared as they are, as in the authors' code; KVCache-Factory "
                "weighs each head's first (`normalize`)",
                "a head's budget is a blend; kvpress gives each head a floor instead (alloc=floor)",
                "with a decode policy each head keeps its own budget while an answer is "
                "written; the release then evicts nothing",
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
            differs=(
                "draw=score: a token is drawn in proportion to its score; the release draws by "
                "a softmax of summed scores, which is nearly even (draw=softmax)",
                "random=0.35 of the free budget; the release has 7 of 19 parts, and the "
                "paper's best is about 0.7",
                "draws are seeded by layer and head; the release has no seed",
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
            differs=(
                "head budgets are those of the policy it is added to; kvpress has a variant of "
                "its own with Ada-KV's",
                "scores that are no attention, such as a key's norm, count by their rank; the "
                "paper has none of these",
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
            differs=(
                "bits=kv: a token has one bit per KV head; in the paper one per query head "
                "(bits=query)",
                "each KV head chooses among the tokens that it loses itself; OpenVINO and "
                "vLLM's branch choose once for all heads, the latter by what the first one "
                "loses, so that others keep a token twice",
                "tokens, not pages or blocks; representatives are part of the budget, in "
                "OpenVINO they come on top",
                "the paper leaves its buckets open: here even ranks by distance to one anchor, "
                "then by position (`ranks`)",
                "anchor=mean; OpenVINO's default is random (`anchor`)",
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
            "later prompt counts there only with --decode h2o",
            ("h2o",),
            "minikv.policies.h2o",
            "H2O",
            (RECENT_SHARE, NO_SINKS),
            stride=_AFTER,
            differs=(
                "beside another prompt policy its sums begin with the queries which that one "
                "reads, 32 at least; the paper sums over all of the prompt",
            ),
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
            "kvzip",
            True,
            False,
            "prompt",
            "one for all layers and heads",
            "needed to repeat the text",
            "1 score per token",
            "safe",
            "2505.23416",
            "tokens that the model needs to repeat what it has read, whatever is asked; reads "
            "twice, and holds the whole cache in RAM until then",
            ("kvzip", "global"),
            decode="none",
        ),
        PolicyInfo(
            "kvzip+",
            True,
            False,
            "prompt",
            "one for all layers and heads",
            "needed to repeat the text",
            "1 score per token",
            "safe",
            "2601.07891",
            "KVzip's scores, times |v W_O| / |h|: what a token can write to the layer's output",
            ("kvzip", "global"),
            preset={"plus": True},
            decode="none",
        ),
        PolicyInfo(
            "ada-expected",
            True,
            False,
            "prompt",
            "per head",
            "expected attention",
            "-",
            "safe",
            "2510.00636",
            "expected attention with the settings of the published scores: epsilon 0.01, and "
            "kvpress' head budgets",
            ("expected", "ada"),
            preset={"epsilon": 0.01, "alloc": "floor", "recent": 0},
        ),
        PolicyInfo(
            "defensive",
            True,
            False,
            "prompt",
            "uniform",
            "worst-case attention",
            "-",
            "needs recall",
            "2510.13334",
            "tokens that may cost most in the worst case: the most attention of any query, times "
            "the length of the value; made for defensive+global",
            ("defensive",),
        ),
        PolicyInfo(
            "queryspan",
            True,
            False,
            "prompt",
            "uniform",
            "question's attention",
            "-",
            "reads again",
            "kvpress292",
            "tokens that the question attends to, and the text after them that could not be "
            "foreseen (kvpress' pull request 292); reads a prompt twice; made for queryspan+global",
            ("queryspan",),
        ),
        PolicyInfo(
            "dropkv",
            True,
            False,
            "prompt",
            "uniform",
            "change of the output",
            "-",
            "needs recall",
            "MqfNzH3TVH",
            "tokens without which the output of the last window's queries would change most "
            "(openreview MqfNzH3TVH, kvpress' pull request 285); made for dropkv+global",
            ("dropkv",),
        ),
        PolicyInfo(
            "chunkkv",
            True,
            False,
            "prompt",
            "uniform",
            "chunks' attention",
            "-",
            "needs recall",
            "2502.00299",
            "chunks of neighbouring tokens that the last window attends to, the same for all heads "
            "of a layer",
            ("chunkkv",),
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
                Option(
                    "pool",
                    7,
                    "a prompt's tokens start with the largest statistics of so many neighbours "
                    "(odd; 1: with their own)",
                    1,
                    63,
                    odd=True,
                ),
                Option(
                    "lead",
                    100.0,
                    "what a token got from a prompt is worth so many times what it gets from the "
                    "answer, so that the answer's tokens leave first (1: as much)",
                    1.0,
                    1e6,
                ),
            ),
            stride=_AFTER,
            differs=(
                "a head's budget counts the prompt's tokens; in the release they never leave "
                "and are not counted",
                "statistics begin with the last 32 queries of the prompt; the release begins "
                "with the first token of the answer",
                "those of the prompt are pooled over neighbours and count 100 times: short answers "
                "then show no loss beside --decode none, which exceeds the budget "
                "(docs/results.md); pool=1 and lead=1 count every query alike, as the paper does",
                "with --stride statistics begin with the first block; the release's begin with "
                "the first block over the budget (its keep_attention=False)",
                "the first 4 and the newest 10 tokens are protected by position; the paper "
                "protects none, and the release's protection fails for budgets below about 30",
                "what is left of the scope is at least one token, and a variance is at least "
                "0; in the release rounding can make it NaN, which protects a token",
            ),
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
            differs=(
                "one token leaves at every step; in the paper half of the cache at once",
                "counts are relative to the queries that a token was there for, so that young "
                "tokens are not favoured",
                "the first 4 tokens stay (`sinks`); in the paper only the newest 10",
                "of a prompt the last 32 queries count; the paper's window of 400 includes the "
                "prompt's",
                "a fixed budget, as in the paper; the authors' code keeps whatever got more "
                "than a quantile",
            ),
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
            differs=(
                "the new query's code is compared, as in the paper; the release compares the "
                "new key's (hash_with=key)",
                "the codes of a KV head's query heads count together; the paper does not say "
                "what a group does",
                "of equal distances the oldest token leaves; the release takes the first slot",
                "a prompt is read whole unless --stride is given; the paper feeds it token by "
                "token (--stride 1), the release's runs cut it to the first and last tokens",
            ),
        ),
        PolicyInfo(
            "rkv",
            False,
            True,
            "step",
            "each head's own cap",
            "attention - redundancy",
            "a number per query of the window",
            "fades",
            "2505.24133",
            "tokens stay that are looked at and whose key is unlike the others; a head grows by "
            "`buffer` tokens over its budget, then gives up as many at once",
            (),
            "minikv.policies.rkv",
            "RKV",
            (
                NO_SINKS,
                Option("window", 8, "last queries that score; their tokens always stay", 1, 256),
                Option(
                    "buffer",
                    128,
                    "tokens that a head takes in before it gives up as many; at least the window",
                    1,
                    4096,
                ),
                KERNEL,
                Option("mix", 0.07, "weight of the attention; redundancy has the rest", 0.0, 1.0),
                Option(
                    "threshold",
                    0.5,
                    "of keys with a larger cosine, the newest is not redundant",
                    -1.0,
                    1.0,
                ),
                Option(
                    "softmax",
                    "all",
                    "all: attention as it was; past: over the tokens before the window (the "
                    "release)",
                    choices=("all", "past"),
                ),
                Option(
                    "group",
                    "mean",
                    "how the query heads of a KV head are joined; max: of what comes before the "
                    "softmax (the release)",
                    choices=("mean", "sum", "max"),
                ),
            ),
            stride=_AFTER,
            differs=(
                "attention counts the window's tokens in its softmax; the release leaves them "
                "out (softmax=past)",
                "the query heads of a KV head are joined by the mean of their attention; in "
                "the release by the max before the softmax (group=max)",
                "neighbours and the newest of similar keys are meant by position; in the "
                "release by slot, and its slots are shuffled by its own choice",
                "a key that is like no other excuses none; in the release it excuses the first "
                "token",
                "prompts are left to the prompt policy, or to --stride; the release also "
                "applies its rule to a prompt over the budget",
                "pinned tokens are not compared",
            ),
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
