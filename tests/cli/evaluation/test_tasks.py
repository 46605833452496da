"""Where needles lie."""

from __future__ import annotations

from minikv.cli.evaluation import tasks


class Bytes:
    """A codec of one token per character."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_needles_lie_where_they_should() -> None:
    items = list(tasks.needle(Bytes(), [2000, 4000], 2, 5))
    assert len(items) == 2 * 5 * 2
    for item in items:
        assert item.where is not None
        depth, length = item.where
        assert abs(len(item.document) - length) < 160
        answer = item.right[0][0]
        at = item.document.index(answer) / len(item.document)
        assert abs(at - depth) < 0.12
        assert item.document.count(answer) == 1 or len(answer) < 4
    assert len({item.document for item in items}) == len(items)


def test_needles_of_different_lengths_are_different() -> None:
    """1000 apart in length, and one apart in number, were the same."""
    items = list(tasks.needle(Bytes(), [1000, 2000], 2, 5, depths=(0.5,)))
    assert len({item.right for item in items}) == 4
