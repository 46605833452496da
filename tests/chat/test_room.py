"""What does not fit the model's context is refused before anything is read."""

from __future__ import annotations

import pytest
from test_session import check, make

from minikv.chat.min_tokens import longest_token
from minikv.errors import ContextError


def test_a_prompt_over_the_context_is_refused_with_numbers_and_nothing_is_fed() -> None:
    chat = make(max_context=64)
    chat.attach("y" * 50)
    # 52 + 6 + 4 control tokens = 62 fit and leave room for one more; 63 do not.
    with pytest.raises(ContextError, match=r"needs 64 tokens and 63 are left.* 64 positions") as e:
        list(chat.ask("question"[:8]))
    assert e.value.exit_code == 5
    assert "nothing was cut" in e.value.hint
    assert chat.fed == []
    check(chat)
    list(chat.ask("quest", max_tokens=1))
    check(chat)


def test_prompt_that_leaves_exactly_one_position_is_answered_to_the_end_of_the_context() -> None:
    chat = make(max_context=20)
    pieces = list(chat.ask("q" * 13))  # 13 + 4 = 17 fed; 3 positions left
    assert chat.report is not None
    assert chat.report.stop_reason == "context"
    assert len(chat.fed) == 20
    assert len("".join(pieces)) == 4  # the fourth is pending_token: no position is left to feed it
    check(chat)
    with pytest.raises(ContextError, match="used by this chat"):
        list(chat.ask("more"))
    check(chat)


def test_ten_megabytes_are_refused_before_tokenizing() -> None:
    chat = make(max_context=4096)
    chat.attach("word " * 2_000_000)
    longest_token(chat.tokenizer)
    tokenizer = chat.tokenizer
    before = tokenizer.encoded  # type: ignore[attr-defined]
    with pytest.raises(ContextError, match=r"needs at least [\d,]+ tokens"):
        list(chat.ask("q"))
    assert tokenizer.encoded - before < 1000  # type: ignore[attr-defined]
    assert len(chat.pending) == 1
