"""A chat that goes back."""

from __future__ import annotations

from word_codec import Words

from minikv.cli.evaluation import back


def test_later_questions_go_back_to_the_first() -> None:
    for item in back.back(Words(), 600, 4, 5):
        first, _, born, _, export, again, answer = item.questions
        mayor = item.right[0][0]
        assert item.right[5] == item.right[6] == (mayor,)
        assert mayor in born, "asks about what the first answer names"
        assert mayor not in first + again + answer
        assert first != again
        words = [{*question.rstrip("?.").split()} for question in (first, export, again)]
        town = {word for word in set.intersection(*words) if word[0].isupper()}
        assert len(town - {"What", "Who", "Tell", "Please", "According"}) == 1
        assert item.right[2][0] in item.document
        assert item.right[4][0] in item.document
