"""Records that are longer than the model's context: skip them, or cut out their middle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from minikv.chat.session import ChatSession
from minikv.cli.eval.items import Item
from minikv.cli.eval.passes import Pass

TRUNCATIONS = ("none", "middle")


def fitted(
    chat: ChatSession, items: Iterable[Item], passes: Sequence[Pass], truncate: str
) -> tuple[list[Item], int, int]:
    """The items that fit the model's context with their answers in each of the passes, in their
    order; how many of them were cut to fit, with `truncate` "middle"; how many others do not fit.
    """
    found: list[Item] = []
    cut = skipped = 0
    for item in items:
        fits = _over(chat, item, passes) <= 0
        shorter = item if fits else _shortened(chat, item, passes) if truncate == "middle" else None
        found += [] if shorter is None else [shorter]
        cut += not fits and shorter is not None
        skipped += shorter is None
    return found, cut, skipped


def _over(chat: ChatSession, item: Item, passes: Sequence[Pass]) -> int:
    """How many positions more than the model has the item takes."""
    return max(one.needs(chat, item) for one in passes) - chat.max_context


def _shortened(chat: ChatSession, item: Item, passes: Sequence[Pass]) -> Item | None:
    """The item without the middle of its prompt, as LongBench's pred.py does it: equally many
    tokens stay at either end. None where the document would not be more than its question."""
    tokenizer, question = chat.tokenizer, item.questions[0]
    ids = tokenizer.encode(item.document + question)
    keep = len(ids)
    while (over := _over(chat, item, passes)) > 0:
        keep -= over
        half = keep // 2
        end = tokenizer.decode(ids[-half:]) if half > 0 else ""
        if not end.endswith(question) or len(end) == len(question):
            return None
        document = tokenizer.decode(ids[:half]) + end[: len(end) - len(question)]
        item = replace(item, document=document)
    return item
