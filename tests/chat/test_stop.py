"""Stop texts: an answer ends before them, however the text is cut into tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_session import make

from minikv.chat.stop import StopTexts, stop_texts
from minikv.errors import UsageError


def cut(texts: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    found, out = StopTexts(texts), ""
    for piece in pieces:
        out += found.push(piece)
        if found.found:
            return out, True
    return out + found.flush(), False


@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab\n", max_size=5), max_size=8),
)
@example(["abc", "b"], ["abc"])
@example(["aab"], ["a", "aa", "b"])
def test_the_cut_does_not_depend_on_how_the_text_comes(stops: list[str], pieces: list[str]) -> None:
    texts, whole = tuple(stops), "".join(pieces)
    # By its meaning: the shortest beginning that ends with a stop text, without the longest such.
    ends = [n for n in range(1, len(whole) + 1) if whole[:n].endswith(texts)] if texts else []
    expected = whole
    if ends:
        start = whole[: ends[0]]
        expected = start[: -max(len(t) for t in texts if start.endswith(t))]
    assert cut(texts, pieces) == (expected, bool(ends))
    assert cut(texts, list(whole)) == (expected, bool(ends))


def test_nothing_that_may_become_a_stop_text_is_given_out() -> None:
    found = StopTexts(("\n\nQ:",))
    assert found.push("yes\n") == "yes"
    assert found.push("\n") == ""
    assert found.push("R") == "\n\nR"
    assert found.push("\n\nQ") == ""
    assert found.push(":x") == ""
    assert found.found


@pytest.mark.parametrize("given", [[""], "", ["a", ""]])
def test_an_empty_stop_text_is_refused(given: str | list[str]) -> None:
    with pytest.raises(UsageError, match="empty"):
        stop_texts(given)


@pytest.mark.parametrize("given", [5, 0, True, b"x", [b"x"], [None], object(), 1.5])
def test_what_is_no_text_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="`stop`"):
        make().ask("tell me", stop=given)
    with pytest.raises(UsageError, match="`stop`"):
        make().continue_answer(stop=given)


def test_none_is_no_stop_text() -> None:
    assert list(make().ask("tell me", stop=None)) == list(make().ask("tell me"))


def test_one_text_may_stand_alone() -> None:
    assert stop_texts("ab") == ("ab",)
    assert stop_texts(["x", "y", "x"]) == ("x", "y")


def test_an_answer_ends_before_a_stop_text_over_several_tokens() -> None:
    whole = "".join(make().ask("tell me"))
    assert len(whole) == 12  # one character per token
    chat = make()
    pieces = list(chat.ask("tell me", stop=[whole[4:7], "no such text"]))
    assert "".join(pieces) == whole[:4]
    assert chat.report is not None
    assert chat.report.stop_reason == "stop"
    assert chat.report.sampling["stop"] == [whole[4:7], "no such text"]
    assert chat.report.tokens.generated == 7
    assert chat.messages[-1].content == chat.turns[-1].answer == whole[:4]
    # The last token of the stop text was not fed, and is not fed later.
    assert chat.pending_token is None
    following = chat.template.following([*chat.messages, type(chat.messages[0])("user", "and?")])
    before = list(chat.fed)
    list(chat.ask("and?"))
    assert chat.fed[: len(before) + len(following)] == before + following


def test_text_that_a_stop_text_could_have_begun_with_is_not_lost() -> None:
    whole = "".join(make().ask("tell me"))
    for end in (whole[-1] + "#", whole[4] + "#"):
        assert "".join(make().ask("tell me", stop=end)) == whole
    chat = make()
    assert "".join(chat.ask("tell me", max_tokens=5, stop=[whole[4] + "#"])) == whole[:5]
    chat = make()
    answer = chat.ask("tell me", stop=[whole[1:3] + "#"])
    assert next(answer) == whole[0]
    assert next(answer) == whole[1:4]  # held back, then not a stop text
    answer.close()  # type: ignore[attr-defined]
    assert chat.messages[-1].content == whole[:4]
    chat = make()
    answer = chat.ask("tell me", stop=[whole[1:5] + "#"])
    assert next(answer) == whole[0]
    answer.close()  # type: ignore[attr-defined]
    assert chat.messages[-1].content == whole[:1]
