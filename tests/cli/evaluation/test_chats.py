"""The table of the tasks that are chats."""

from __future__ import annotations

import pytest
from word_codec import Words

from minikv.cli.evaluation import chats, names, tasks


@pytest.mark.parametrize("name", chats.CHATS)
def test_a_task_has_as_many_questions_as_its_row_says(name: str) -> None:
    task = chats.CHATS[name]
    items = list(task.items(Words(), task.least + 100, task.questions + 1, 5, tasks.TRAINED))
    assert len(items) == 2
    for item in items:
        # The shortest document of followup has fewer facts than questions.
        assert len(item.questions) == len(item.right) <= task.questions
        assert len(item.questions) == task.questions or name == "followup"
        assert all(item.metric(" ".join(right), right, ()) == 1.0 for right in item.right[:1])
    assert name in names.TASKS


@pytest.mark.parametrize("name", chats.CHATS)
def test_the_shortest_document_is_made(name: str) -> None:
    task = chats.CHATS[name]
    assert len(list(task.items(Words(), task.least, 1, 5, tasks.TRAINED))) == 1
