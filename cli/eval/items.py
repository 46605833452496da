"""A document and its questions, wherever they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from minikv.cli.eval import metrics
from minikv.cli.eval.metrics import Metric


@dataclass(frozen=True, slots=True)
class Item:
    """One document and its questions, asked in one chat in this order; or, if they are asked
    `apart`, each as the first one about the document.

    `right[i]` are the right answers to question i; `classes` what `metric` tells apart. `where`:
    a needle's (depth, length); `source`: file and line. `first_line`: only the first line of an
    answer counts. `name`: the document's in the chat; None: document and question are the whole
    message, to the letter. Without `roles` this text is completed, outside of a chat. `opens[i]`:
    how answer i begins, which is not the model's doing. `groups`: names whose scores are also shown
    apart. Without questions the document is a text to be continued.
    """

    document: str
    questions: tuple[str, ...]
    right: tuple[tuple[str, ...], ...]
    metric: Metric = metrics.exact
    classes: tuple[str, ...] = ()
    max_tokens: int = 32
    where: tuple[float, int] | None = None
    first_line: bool = False
    source: str = ""
    name: str | None = "report.txt"
    roles: bool = True
    apart: bool = False
    opens: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def single(self) -> Iterator[Item]:
        """An item for each question that is asked apart; else this one."""
        if not self.apart:
            yield self
            return
        for i, question in enumerate(self.questions):
            opens, right = self.opens[i : i + 1], self.right[i : i + 1]
            yield replace(self, questions=(question,), right=right, opens=opens, apart=False)


def together(items: Iterable[Item]) -> list[Item]:
    """Join items of one question about the same document, to be asked apart: it is read, and under
    `blind` evicted, once for all of them."""
    found: dict[Item, list[Item]] = {}
    for item in items:
        key = replace(item, questions=(), right=(), opens=("",) * len(item.opens), source="")
        found.setdefault(key, []).append(item)
    return [
        replace(
            alike[0],
            questions=tuple(question for item in alike for question in item.questions),
            right=tuple(right for item in alike for right in item.right),
            opens=tuple(opened for item in alike for opened in item.opens),
            apart=len(alike) > 1,
        )
        for alike in found.values()
    ]
