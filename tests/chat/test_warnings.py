"""What a turn tells the user, and what its record says of that."""

from __future__ import annotations

from fakes import FakeEngine
from test_session import make


def test_warnings_come_before_the_answer_and_stay_in_the_record() -> None:
    engine = FakeEngine()
    chat = make(engine=engine, notes=("no chat template: plain completion",))
    chat.attach("a <end> b <end>", "d.txt")
    order: list[str] = []
    for piece in chat.ask("q <end>", notice=order.append):
        order.append(f"piece {piece}")
    assert chat.report is not None
    warnings = chat.report.warnings
    assert order[: len(warnings)] == list(warnings)
    assert warnings[0] == "no chat template: plain completion"
    assert warnings[1].startswith("2 strings in d.txt look like control tokens")
    assert warnings[2].startswith("1 string in the question looks like a control token")
    assert len(warnings) == 3
    engine.kv.shaped = True
    list(chat.ask("second"))
    assert chat.report.shaped_by_turn == 2
    assert chat.report.warnings == ()  # notes are said once, and no document was new
    list(chat.ask("third"))
    assert chat.report.warnings == ()  # the line under the answer says it
    assert chat.report.shaped_by_turn == chat.report.misses == 2


def test_strings_that_pass_for_control_or_for_turn_markers_are_told_apart() -> None:
    chat = make()
    chat.attach("one <end> two", name="a.txt")
    notes: list[str] = []
    list(chat.ask("what is [USER]?", max_tokens=2, notice=notes.append))
    first, second = [n for n in notes if "string" in n]
    assert first.startswith("1 string in a.txt looks like a control token")
    assert first.endswith("read as plain text")
    assert second.startswith("1 string in the question may pass for turn markers")


def test_characters_that_the_tokenizer_loses_are_counted() -> None:
    chat = make()
    chat.attach("one \u2620 two \u2620", name="a.txt")
    notes: list[str] = []
    list(chat.ask("what is \u2620?", max_tokens=2, notice=notes.append))
    assert [n for n in notes if "tokenizer" in n] == [
        "the model's tokenizer drops or changes 2 characters of a.txt",
        "the model's tokenizer drops or changes 1 character of the question",
    ]
