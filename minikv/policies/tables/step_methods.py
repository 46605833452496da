"""The registry's rows of the methods that may only be given as --decode."""

from __future__ import annotations

from dataclasses import replace

from minikv.policies.options import Option
from minikv.policies.tables.method import ATTENDS_FIRST, EVICTS_FIRST, PolicyInfo
from minikv.policies.tables.part import KERNEL, NO_SINKS, RECENT, SEED, SINKS

STEP_METHODS = (
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
            Option(
                "scope",
                0.3,
                "share of the budget for the tokens whose attention varies most; these stay",
                0.0,
                0.95,
            ),
            Option("scope_prompt", 0.1, "`scope` while --stride reads a prompt", 0.0, 0.95),
            Option(
                "pool",
                7,
                "a prompt's tokens start with the largest statistics among this many neighbours "
                "(odd; 1: with their own)",
                1,
                63,
                odd=True,
            ),
            Option(
                "lead",
                100.0,
                "attention from a prompt counts this many times as much as attention from the "
                "answer, so that the answer's tokens leave first (1: the same)",
                1.0,
                1e6,
            ),
        ),
        stride=ATTENDS_FIRST,
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
            Option("history", 400, "how many last queries count", 1, 4096),
        ),
        stride=ATTENDS_FIRST,
        differs=(
            "one token leaves at every step; in the paper half of the cache at once",
            "counts are relative to the queries that a token was there for, so that young "
            "tokens are not favoured",
            "the first 4 tokens stay (`sinks`); in the paper only the newest 10",
            "of a prompt the last 32 queries count; the paper's window of 400 includes the "
            "prompt's",
            "of a prompt, what is below the even share by up to 1/8192 of it is not below: that "
            "may be rounding",
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
        stride=EVICTS_FIRST,
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
                "how many tokens a head takes in before it evicts as many; at least the window",
                1,
                4096,
            ),
            KERNEL,
            Option("mix", 0.07, "weight of attention; 1 - mix is that of redundancy", 0.0, 1.0),
            Option(
                "threshold",
                0.5,
                "keys with a larger cosine are similar; the newest of them is not redundant",
                -1.0,
                1.0,
            ),
            Option(
                "softmax",
                "all",
                "softmax of attention: all: over all tokens; past: over those before the "
                "window (the release)",
                choices=("all", "past"),
            ),
            Option(
                "group",
                "mean",
                "how the query heads of a KV head are joined; max: the maximum before "
                "the softmax (the release)",
                choices=("mean", "sum", "max"),
            ),
        ),
        stride=ATTENDS_FIRST,
        differs=(
            "attention counts the window's tokens in its softmax; the release leaves them "
            "out (softmax=past)",
            "the query heads of a KV head are joined by the mean of their attention; in "
            "the release by the max before the softmax (group=max)",
            "neighbours and the newest of similar keys are meant by position; in the "
            "release by slot, and its slots are shuffled by its own choice",
            "a key that is like no other excuses none; in the release it excuses the first token",
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
