"""The tasks of `minikv eval` by name; a document with its questions, wherever it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from minikv.cli.eval import metrics
from minikv.cli.eval.metrics import Metric

CHATS = ("followup", "long")
ANSWERED = ("needle", "facts", *CHATS, "answers")
BESIDE = ("agree", "kl", "ppl")
"""What is measured beside the full cache, of questions and of texts."""
TASKS = (*ANSWERED, *BESIDE)
"""Those that --tasks takes; `answers` are those to the records of FILEs."""


@dataclass(frozen=True, slots=True)
class Item:
    """One document and its questions, asked in one chat in this order; or, if they are asked
    `apart`, each as the first one about the document.

    `right[i]` are the right answers to question i. `source`: file and line. `name`: the document's
    in the chat; None: document and question are the whole message, to the letter. `opens`: how
    an answer begins, which is not the model's doing. `groups`: names whose scores are also shown
    apart. Without questions the document is a text to be continued.
    """

    document: str
    questions: tuple[str, ...]
    right: tuple[tuple[str, ...], ...]
    metric: Metric = metrics.exact
    max_tokens: int = 32
    source: str = ""
    name: str | None = "report.txt"
    apart: bool = False
    opens: str = ""
    groups: tuple[str, ...] = ()

    def single(self) -> Iterator[Item]:
        """An item for each question that is asked apart; else this one."""
        if not self.apart:
            yield self
            return
        for question, right in zip(self.questions, self.right, strict=True):
            yield replace(self, questions=(question,), right=(right,), apart=False)
