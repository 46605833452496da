"""Records that are longer than the model's context: skip them, or cut out their middle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from minikv.chat.session import ChatSession
from minikv.cli.eval.files import Item
from minikv.cli.eval.passes import Pass

TRUNCATIONS = ("none", "middle")


@dataclass(frozen=True, slots=True)
class Fitted:
    """items: those that fit, in their order. cut: how many of them were cut to fit. skipped: how
    many others do not fit."""

    items: list[Item]
    cut: int
    skipped: int


def fitted(
    chat: ChatSession, items: Iterable[Item], passes: Sequence[Pass], truncate: str
) -> Fitted:
    """The items that fit the model's context with their answers, in each of the passes; with
    `truncate` "middle", longer items are cut."""
    found: list[Item] = []
    cut = skipped = 0
    for item in items:
        fits = _over(chat, item, passes) <= 0
        shorter = None if fits or truncate == "none" else _shortened(chat, item, passes)
        if fits:
            found.append(item)
        elif shorter is not None:
            found.append(shorter)
            cut += 1
        else:
            skipped += 1
    return Fitted(found, cut, skipped)


def _over(chat: ChatSession, item: Item, passes: Sequence[Pass]) -> int:
    """How many positions more than the model has the item takes."""
    return max(one.needs(chat, item) for one in passes) - chat.max_context


def _shortened(chat: ChatSession, item: Item, passes: Sequence[Pass]) -> Item | None:
    """The item without the middle of its prompt, as LongBench's pred.py does it: equally many
    tokens stay at either end. None where the document would not be more than its question."""
    tokenizer, question = chat.tokenizer, item.questions[0]
    ids = tokenizer.encode(item.document + question)
    over = _over(chat, item, passes)
    keep = len(ids)
    while over > 0:
        keep -= over
        half = keep // 2
        if half < 1:
            return None
        end = tokenizer.decode(ids[-half:])
        if not end.endswith(question) or len(end) == len(question):
            return None
        document = tokenizer.decode(ids[:half]) + end[: len(end) - len(question)]
        item = replace(item, document=document)
        over = _over(chat, item, passes)
    return item


def told(name: str, cut: int, skipped: int, records: int) -> str:
    """A line about the records of a file; empty where there is nothing to say."""
    parts = []
    if skipped:
        parts.append(f"{skipped:,} too long and skipped")
    if cut:
        parts.append(f"{cut:,} cut in the middle")
    return f"{name}: of {records:,} records {' and '.join(parts)}" if parts else ""
