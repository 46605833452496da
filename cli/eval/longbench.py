"""LongBench and LongBench v2: prompts, how long an answer may be, and how it is scored.

All of it is the official one (arXiv 2308.14508 and 2412.15204, and their repository): the prompts
are in `prompts/`, under the licence beside them. LongBench-E has the same prompts for other records
(`qasper_e`). The Chinese datasets are not supported.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minikv.cli.eval import metrics
from minikv.cli.eval.metrics import Metric

_PROMPTS = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class Dataset:
    """How a dataset is asked and scored.

    `max_tokens` of an answer, of which only the first line counts if `first_line` is set. Without
    `roles` the prompt is fed as it is, to be completed: the release does so with examples and code,
    also to chat models.
    """

    metric: Metric
    max_tokens: int
    roles: bool = True
    first_line: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt around its document: `head`, then the document, then `tail`, which asks."""

    head: str
    tail: str

    @property
    def has_input(self) -> bool:
        """Whether a record says something of its own after its document."""
        return "{input}" in self.tail


def prompt(dataset: str) -> Prompt:
    """The official prompt of a dataset; `{input}` in its tail stands for the record's input."""
    head, tail = _prompts()[dataset].split("{context}")
    return Prompt(head, tail)


@functools.cache
def _prompts() -> Mapping[str, str]:
    found: Mapping[str, str] = json.loads((_PROMPTS / "longbench.json").read_text("utf-8"))
    return found


def choice_prompt(question: str, choices: Mapping[str, str]) -> Prompt:
    """LongBench v2's, for four choices by their letters."""
    head, tail = (_PROMPTS / "longbench-v2.txt").read_text("utf-8").split("$DOC$")
    said = {"$Q$": question, **{f"$C_{letter}$": text for letter, text in choices.items()}}
    # In one go, so that nothing in a question is taken for a mark.
    marks = "|".join(map(re.escape, said))
    return Prompt(head, re.sub(marks, lambda found: said[found[0]].strip(), tail))


CHOICES = Dataset(metrics.choice, 128)
"""LongBench v2."""

_QA, _SHORT_QA = Dataset(metrics.qa_f1, 128), Dataset(metrics.qa_f1, 32)
_SUMMARY = Dataset(metrics.rouge_l, 512)

DATASETS = {
    "narrativeqa": _QA,
    "qasper": _QA,
    "multifieldqa_en": Dataset(metrics.qa_f1, 64),
    "hotpotqa": _SHORT_QA,
    "2wikimqa": _SHORT_QA,
    "musique": _SHORT_QA,
    "gov_report": _SUMMARY,
    "qmsum": _SUMMARY,
    "multi_news": _SUMMARY,
    "trec": Dataset(metrics.classification, 64, roles=False, first_line=True),
    "triviaqa": Dataset(metrics.qa_f1, 32, roles=False, first_line=True),
    "samsum": Dataset(metrics.rouge_l, 128, roles=False, first_line=True),
    "passage_count": Dataset(metrics.count, 32),
    "passage_retrieval_en": Dataset(metrics.retrieval, 32),
    "lcc": Dataset(metrics.code, 64, roles=False),
    "repobench-p": Dataset(metrics.code, 64, roles=False),
}


def length_group(words: int) -> str:
    """LongBench-E's scores are told apart by the length of the record's document in words."""
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"
