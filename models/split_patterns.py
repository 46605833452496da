"""How the vocabularies of known families cut a text into words, before they look these up.

A file with another pattern than its family's loads and works, but gives some words other ids than
the model was trained with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tokenizers
from tokenizers import pre_tokenizers

_SAMPLE = "eBay mL NaOH pH don't WE'LL it's x2 1234567 a/b//\n\n\tif (x) {\r\n  y=1;  }\n /é"


@dataclass(frozen=True, slots=True)
class _Split:
    """The pattern of a vocabulary. types: the model_type of its models. ids: how many they have,
    with the tokens that others added."""

    name: str
    types: tuple[str, ...]
    ids: range
    pattern: str


_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPLITS = (
    _Split("Llama 3", ("llama",), range(128_000, 129_000), _START + r"\p{N}{1,3}" + _END),
    _Split("Qwen 2", ("qwen2", "qwen3"), range(151_000, 153_000), _START + r"\p{N}" + _END),
    _Split(
        "tekken",
        ("mistral", "ministral", "ministral3"),
        range(131_000, 132_000),
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
)
PATTERNS = frozenset(split.pattern for split in _SPLITS)
"""The regular expressions of these families."""


def foreign(kind: str, vocab: int, cuts: Callable[[str], list[tuple[int, int]]]) -> str | None:
    """A note for the user if the tokenizer cuts texts in another way than its family; None if it
    does not, or the family is not known.

    kind: the model_type. vocab: rows of the embedding. cuts: where the tokenizer cuts a text.
    """
    for split in _SPLITS:
        if kind in split.types and vocab in split.ids:
            theirs = pre_tokenizers.Split(tokenizers.Regex(split.pattern), "isolated")
            if cuts(_SAMPLE) != [span for _, span in theirs.pre_tokenize_str(_SAMPLE)]:
                return (
                    f"the tokenizer does not cut texts as {split.name} vocabularies do: words get "
                    "other ids than the model was trained with"
                )
    return None
