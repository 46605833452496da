"""An answer in pieces: whole characters, stop texts, and one that goes on."""

from __future__ import annotations

import pytest
from fakes import ByteStream

from minikv.chat.answer import Anew, Answer

TEXT = "für\n\nalle Q"
IDS = list(TEXT.encode())


@pytest.mark.parametrize("stop", [(), ("\n\n#",), ("\n\nalle",), ("ü",), ("le Q",)])
def test_an_answer_that_goes_on_is_the_one_that_never_stopped(stop: tuple[str, ...]) -> None:
    """At every token, also inside of a character and of a stop text."""

    def run(answer: Answer, ids: list[int]) -> str:
        out = ""
        for id in ids:
            out += answer.push(id)
            if answer.stopped:
                break
        return out + answer.finish()

    whole = Answer(ByteStream(), stop)
    run(whole, IDS)
    for at in range(1, len(IDS)):
        first = Answer(ByteStream(), stop)
        shown = run(first, IDS[:at])
        assert first.text == shown
        if first.stopped:
            continue
        second = Answer.resumed(ByteStream(), stop, IDS[:at], shown)
        more = run(second, IDS[at:])
        assert second.text == whole.text
        assert second.stopped == whole.stopped
        assert second.generated == whole.generated
        # On the screen it reads on, but for a character or a stop text that was shown in part.
        if whole.text.startswith(shown):
            assert shown + more == whole.text


def test_the_last_token_is_no_part_of_the_answer_where_a_stop_text_began_before_it() -> None:
    answer = Answer(ByteStream(), ("ll",))
    for id in b"al":
        assert answer.push(id) in ("a", "")
    assert answer.push(b"l"[0]) == ""
    assert answer.stopped
    assert answer.overshot


def test_what_is_shown_already_is_not_shown_again() -> None:
    answer = Answer.resumed(ByteStream(), ("\nQ",), b"ab\n", "ab\n")
    assert answer.text == "ab"
    assert answer.push(b"c"[0]) == "c"
    assert answer.text == "ab\nc"


def test_the_rows_are_chosen_anew_after_every_so_many_tokens() -> None:
    assert [n for n in range(13) if Anew(4).due(n)] == [4, 8, 12]
    assert not any(Anew(0).due(n) for n in range(13))
