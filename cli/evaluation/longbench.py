"""What LongBench's English datasets ask, how long an answer may be, and how it is scored.

Lengths and metrics are the official ones (arXiv 2308.14508 and its repository). The instructions
are ours: they say what the official prompts say, in other words, and come after the document, where
the official ones stand around it. So scores compare policies with each other on one model, and not
with published tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from minikv.cli.evaluation import metrics
from minikv.cli.evaluation.metrics import Metric


@dataclass(frozen=True, slots=True)
class Dataset:
    """`says` stands before a record's input, which is empty where `has_input` is not set.

    `max_tokens` of an answer, of which only the first line counts if `first_line` is set.
    """

    metric: Metric
    max_tokens: int
    says: str
    has_input: bool = True
    first_line: bool = False


_PASSAGES = "Reply to the question from the passages above. Write the answer alone."

DATASETS = {
    "narrativeqa": Dataset(
        metrics.qa_f1,
        128,
        "The text above is a novel or a screenplay. Reply to the question about it in as few words "
        "as will do, without giving reasons.",
    ),
    "qasper": Dataset(
        metrics.qa_f1,
        128,
        "The text above is a scientific paper. Reply to the question about it with a phrase or, if "
        "need be, a sentence, without giving reasons. Where yes or no is asked for, write yes or "
        "no. If the paper does not tell, write unanswerable.",
    ),
    "multifieldqa_en": Dataset(
        metrics.qa_f1, 64, "Reply to the question from the text above. Write the answer alone."
    ),
    "hotpotqa": Dataset(metrics.qa_f1, 32, _PASSAGES),
    "2wikimqa": Dataset(metrics.qa_f1, 32, _PASSAGES),
    "musique": Dataset(metrics.qa_f1, 32, _PASSAGES),
    "gov_report": Dataset(
        metrics.rouge_l,
        512,
        "The text above is a report of a government agency. Summarise it on about one page.",
        has_input=False,
    ),
    "qmsum": Dataset(
        metrics.rouge_l,
        512,
        "The text above records what was said at a meeting. Reply to the following about it in one "
        "sentence or several.",
    ),
    "multi_news": Dataset(
        metrics.rouge_l,
        512,
        "The articles above report the same news. Summarise them all on about one page.",
        has_input=False,
    ),
    "trec": Dataset(
        metrics.classification,
        64,
        "The examples above give the type of each question. Give the type of the next one in the "
        "same words.",
        first_line=True,
    ),
    "triviaqa": Dataset(
        metrics.qa_f1,
        32,
        "Reply to the question from its passage, as the examples above do. Write the answer alone.",
        first_line=True,
    ),
    "samsum": Dataset(
        metrics.rouge_l,
        128,
        "Summarise the dialogue in a few short sentences, as the examples above do.",
        first_line=True,
    ),
    "passage_count": Dataset(
        metrics.count,
        32,
        "Some of the paragraphs above may repeat others. How many are there if each is counted "
        "once? Write the number alone.",
        has_input=False,
    ),
    "passage_retrieval_en": Dataset(
        metrics.retrieval,
        32,
        "Which of the numbered paragraphs above does the following abstract sum up? Write its "
        "number alone, in the form: Paragraph 1",
    ),
    "lcc": Dataset(
        metrics.code,
        64,
        "Write the line of code that comes next, without any other text.",
        has_input=False,
    ),
    "repobench-p": Dataset(
        metrics.code,
        64,
        "The files above belong to one project, as does the code below. Write the line of code "
        "that comes next, without any other text.",
    ),
}
