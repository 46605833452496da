"""How the tokenizers of known families split a text into words, before they look these up.

A file with a pattern other than its family's loads and works, but gives some words ids other than
those that the model was trained with (Mistral Small 3.1: transformers, pull request 42299).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import pre_tokenizers

SAMPLE = "eBay mL NaOH pH don't WE'LL it's x2 1234567 a/b//\n\n\tif (x) {\r\n  y=1;  }\n /é"
"""A text that every pattern splits differently."""


@dataclass(frozen=True, slots=True)
class Split:
    """The pattern of a vocabulary. types: the model_type of its models. rows: how many ids they
    have, including those that others added. known: pieces whose ids no other vocabulary has. whole:
    whether a word that is itself a piece is looked up directly, without merges."""

    name: str
    types: tuple[str, ...]
    rows: range
    known: Mapping[str, int]
    whole: bool
    pattern: str

    def cuts(self) -> list[tuple[int, int]]:
        """How it splits `SAMPLE`: (first character, the one after the last) of each part."""
        split = pre_tokenizers.Split(tokenizers.Regex(self.pattern), "isolated")
        return [span for _, span in split.pre_tokenize_str(SAMPLE)]

    def certain(self, vocab: Mapping[str, int]) -> bool:
        """Whether this vocabulary, piece to id, is the family's."""
        return all(vocab.get(piece) == id for piece, id in self.known.items())


_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPLITS = (
    Split(
        "Llama 3",
        ("llama",),
        range(128_000, 129_000),
        {"This": 2028, "\u0120sentence": 11914},
        True,
        _START + r"\p{N}{1,3}" + _END,
    ),
    Split(
        "Qwen 2",
        ("qwen2", "qwen3"),
        range(151_000, 153_000),
        {"Hello": 9707, "\u0120world": 1879},
        False,
        _START + r"\p{N}" + _END,
    ),
    Split(
        "tekken",
        ("mistral", "ministral", "mistral3", "ministral3"),
        range(131_000, 132_000),
        {"Hello": 22177, "\u0120world": 4304},
        True,
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
)


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a pre-tokenizer of GGUF splits: by `patterns`, one after the other. whole: see `Split`.
    composes: the text is first normalised to NFC."""

    patterns: tuple[str, ...]
    whole: bool = False
    composes: bool = False


_LLAMA_3, _QWEN_2, _TEKKEN = ((split.pattern,) for split in _SPLITS)
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", r"[0-9][0-9][0-9]")
CUTS: Mapping[str, Cuts] = {
    name: cuts
    for names, cuts in (
        ("llama-bpe llama3 llama-v3 falcon3 pixtral", Cuts(_LLAMA_3, whole=True)),
        ("dbrx smaug-bpe", Cuts(_LLAMA_3)),
        ("qwen2 deepseek-r1-qwen", Cuts(_QWEN_2, composes=True)),
        ("tekken", Cuts(_TEKKEN, whole=True)),
        ("smollm codeshell command-r refact starcoder", Cuts((r"\p{N}", _GPT_2 + r"|\s+"))),
        ("gpt-2 mpt olmo phi-2", Cuts((_GPT_2 + r"|\s+",))),
        ("default", Cuts(_DEFAULT)),
    )
    for name in names.split()
}
"""The pre-tokenizers of GGUF, by `tokenizer.ggml.pre`, as in llama.cpp."""


def family_split(kind: str, rows: int, vocab: Mapping[str, int]) -> Split | None:
    """The family of a model, if known, according to its model_type and to the rows of its embedding
    or its vocabulary."""
    ours = (split for split in _SPLITS if kind in split.types)
    return next((split for split in ours if rows in split.rows or split.certain(vocab)), None)
