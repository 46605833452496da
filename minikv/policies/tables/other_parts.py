"""The registry's rows of all parts except scorers: how a budget is shared, and which tokens
stay."""

from __future__ import annotations

from minikv.policies.options import Option
from minikv.policies.tables.part import ROUNDING, SEED, Part

OTHER_PARTS = (
    Part(
        "pyramid",
        "layers",
        "minikv.policies.pyramidkv",
        "PyramidKV",
        "more tokens in the first layers",
        (
            Option("beta", 20, "the last layer keeps about the mean divided by this", 1, 1000),
            Option(
                "line",
                "exact",
                "exact: totals are exact to the token; otherwise, a release's rounding",
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
            "first tokens that a scorer protects do not count in a head's own share; in kvpress "
            "they do",
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
            "its own with Ada-KV's, where the score alone picks a head's own share, also where "
            "that is more than `by_score` of its tokens",
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
