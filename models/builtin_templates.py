"""Chat formats of known families, for model folders without a template.

A family is recognised by its vocabulary: by the version of Mistral's tokenizer, if the file states
it; by control tokens that no other family has; or, if the turn markers are plain text, by the ids
of these markers. Llama-2 and TinyLlama share one vocabulary, and Mistral-7B v0.1 and Zephyr
another; for these the folder's name decides. The templates have two variables: `gap` is a space, or
empty if the vocabulary itself puts a space before a text; `start` is the BOS token, or empty if the
folder says that a text gets none.

In the plain-text formats (Llama-2, Mistral v1, Zephyr, TinyLlama) the model cannot distinguish a
marker that the user typed from a genuine one, because both have the same ids.
"""

from __future__ import annotations

from pathlib import Path

from minikv.models.tokenizer import Tokenizer

PLAIN = "plain"
"""The format of a completion, not a chat."""
_VERSIONS = {
    "v1": "mistral-v1",
    **dict.fromkeys(("v2", "v3"), "mistral-v3"),
    **dict.fromkeys(("v7", "v11", "v13"), "mistral-v7"),
}
"""Versions of Mistral's tokenizer. Those in one row differ only in how they format tools."""

# The ids of "[INST]" at the start of a text.
_LLAMA_2_INST = [518, 25580, 29962]
_MISTRAL_V1_INST = [733, 16289, 28793]


def source(format: str) -> str:
    """The Jinja template of a format."""
    name = "zephyr" if format == "tinyllama" else format
    return (Path(__file__).with_name("templates") / f"{name}.jinja").read_text("utf-8")


def recognise(tokenizer: Tokenizer, folder: Path) -> str | None:
    """The name of the chat format of the family with this vocabulary; None if it is not known."""

    def has(*control: str) -> bool:
        return all(text in tokenizer.control for text in control)

    if tokenizer.version in _VERSIONS:
        return _VERSIONS[tokenizer.version]
    if has("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"):
        return "llama-3"
    if has("<|im_start|>", "<|im_end|>"):
        return "chatml"
    if has("<s>", "</s>", "[INST]", "[/INST]"):
        return "mistral-v7" if has("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]") else "mistral-v3"
    if not has("<s>", "</s>"):
        return None
    name = str(folder).lower()
    inst = tokenizer.encode("[INST]")
    if inst == _LLAMA_2_INST:
        return "tinyllama" if "tinyllama" in name else "llama-2"
    if inst == _MISTRAL_V1_INST:
        return "zephyr" if "zephyr" in name else "mistral-v1"
    return None
