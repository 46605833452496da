"""The tasks that are chats: several questions about one document. The first starts with an empty
cache; `--reuse` says what the later ones are answered from. Also the tasks with one long answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from minikv.cli.evaluation import telling
from minikv.cli.evaluation.back import back
from minikv.cli.evaluation.counting import count
from minikv.cli.evaluation.digits import CODES, codes, digits
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.interview import QUESTIONS, interview
from minikv.cli.evaluation.long_answers import LEAST as LONG
from minikv.cli.evaluation.long_answers import lists, passage
from minikv.cli.evaluation.several import several
from minikv.cli.evaluation.tasks import FOLLOWUPS, LEAST, Manner, followup
from minikv.models.bundled.exam import Codec

Make = Callable[[Codec, int, int, int, Manner], Iterator[Item]]
"""(codec, tokens of a document, chats, seed, how the model is asked) -> items."""


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A task. questions: per chat. least: tokens of the shortest document."""

    make: Make
    questions: int
    least: int = telling.LEAST

    def items(
        self, codec: Codec, tokens: int, count: int, seed: int, how: Manner
    ) -> Iterator[Item]:
        """As many chats as `count` questions need."""
        return self.make(codec, tokens, -(-count // self.questions), seed, how)


CHATS: Mapping[str, ChatTask] = {
    "followup": ChatTask(followup, FOLLOWUPS, LEAST),
    "digits": ChatTask(digits, 3),
    "codes": ChatTask(codes, CODES),
    "several": ChatTask(several, 5),
    "count": ChatTask(count, 3),
    "back": ChatTask(back, 7),
    "interview": ChatTask(interview, QUESTIONS, LEAST * QUESTIONS),
    "lists": ChatTask(lists, 1, LONG),
    "passage": ChatTask(passage, 1, LONG),
}
