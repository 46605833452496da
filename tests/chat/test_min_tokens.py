"""The fewest tokens that a text can take."""

from __future__ import annotations

from fakes import ByteTokenizer

from minikv.chat.min_tokens import longest_token


def test_the_bound_is_never_above_the_truth_and_lossy_vocabularies_have_none() -> None:
    assert longest_token(ByteTokenizer()) == 4  # a lone byte decodes to U+FFFD, and one more

    class Lossy(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(" ".join(text.split()))

    assert longest_token(Lossy()) is None
