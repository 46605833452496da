"""The registry's rows of the scorers, which say what a token is worth."""

from __future__ import annotations

from dataclasses import replace

from minikv.policies.options import Option
from minikv.policies.tables.part import (
    GROUP,
    KERNEL,
    NEWEST,
    NO_SINKS,
    PER_HEAD,
    POOLING,
    RECENT,
    RECENT_SHARE,
    SEED,
    SINKS,
    WINDOW,
    Part,
)

SCORERS = (
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
                "how many newest tokens stay, instead of `recent_share`; 0: use the share",
                0,
                4096,
            ),
            Option(
                "average",
                False,
                "divide by the number of queries that could see a token, so that old "
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
            Option("proxies", 32, "last queries of the prompt that score, always kept", 1, 4096),
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
                "how many first layers keep every token, above the budget (the release: 2)",
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
                "choose after every block of this many tokens, as the paper does (128 in "
                "kvpress); 0: choose once, from all tokens",
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
            Option("covariance", True, "use the covariance of the queries, not only their mean"),
            Option("value_norm", True, "multiply by the norm of the value"),
            Option(
                "epsilon",
                0.0,
                "added to the attention before it is multiplied by the norm of the value; kvpress' "
                "published scores use 0.01",
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
                "plain: multiply by |v W_O|; heads: by its share of the sum over all heads (the "
                "release); none: attention alone",
                choices=("plain", "heads", "none"),
            ),
            Option(
                "sure",
                0.0,
                "the tokens that hold this share of a head's attention stay before all others (the "
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
            Option(
                "decay",
                0.95,
                "share of a token's score that is passed on to the next token",
                0.01,
                0.9999,
            ),
            Option("gate", 0.5, "exponent of a token's surprise 1 - p", 0.0, 10.0),
            Option(
                "near",
                3,
                "a token's surprise is the largest among this many neighbours (odd)",
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
            "layers do not reuse the choice of the layer before, which is an option of the paper",
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
                "how many last tokens of the chunk before the request for a later chunk quotes",
                0,
                256,
            ),
            Option(
                "said",
                0.25,
                "share of the budget for the newest questions and answers",
                0.0,
                0.9,
            ),
            Option("plus", False, "multiply scores by |v W_O| / |h| (KVzip+)"),
        ),
        differs=(
            "the release's softmax is in the model's number format; here it is float32",
            "the release never evicts the system prompt, and has its tokens for the first ones "
            "(--pin-system); kvpress has 4. The template's and the system's other tokens are "
            "scored as the text is",
            "kvpress repeats 2,048 tokens at once (chunk=2048)",
            "the newest token of every head stays; in kvpress it may leave",
            "near the end of the model's context chunks are shorter; the releases read on "
            "beyond it",
            "the releases take a question and its answer out of the cache again; here they "
            "stay inside the budget: the last question, and the newest of what was said "
            "(said), before the text; the rest leaves first",
            "a text that takes half the budget at most, with all before it, is not scored but kept",
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
)
