"""Records that are longer than the model's context are left out and counted, or cut."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import minikv
from minikv.chat.session import ChatSession
from minikv.cli.eval import command, fitting, passes, run, wording
from minikv.cli.eval.files import Item
from minikv.cli.eval.passes import PASSES
from minikv.cli.main import app
from minikv.errors import ContextError

ANSWERS = [PASSES["answers"]]


@pytest.fixture(scope="module")
def chat() -> ChatSession:
    """The bundled model with a context of 300 positions."""
    chat = minikv.load(policy="full")
    chat.max_context = 300
    return chat


def words(count: int, **changes: object) -> Item:
    text = "Read this.\n" + " ".join(f"word{i}" for i in range(count))
    item = Item(text, ("\nWho is it?",), (("fox",),), max_tokens=20, name=None)
    return replace(item, **changes)


def test_a_record_that_fits_stays_as_it_is_and_one_that_does_not_is_counted(
    chat: ChatSession,
) -> None:
    items = [words(20), words(400), words(30)]
    found = fitting.fitted(chat, items, ANSWERS, "none")
    assert (found.items, found.cut, found.skipped) == ([items[0], items[2]], 0, 1)
    found = fitting.fitted(chat, items, ANSWERS, "middle")
    assert (found.cut, found.skipped) == (1, 0)
    assert [found.items[0], found.items[2]] == [items[0], items[2]]


def test_the_middle_is_cut_out_as_longbench_does(chat: ChatSession) -> None:
    """Half of what there is room for from either end of the whole prompt, the question with it."""
    long = words(400)
    (short,) = fitting.fitted(chat, [long], ANSWERS, "middle").items
    assert short.questions == long.questions
    size = len(wording.opening(chat, short, 0)) + short.max_tokens
    assert 290 < size <= 300
    prompt, cut = long.document + long.questions[0], short.document + short.questions[0]
    half = len(chat.tokenizer.encode(cut)) // 2
    ids = chat.tokenizer.encode(prompt)
    front, back = (chat.tokenizer.decode(part) for part in (ids[: half - 8], ids[8 - half :]))
    assert cut.startswith(front)
    assert cut.endswith(back)
    assert passes.answers(chat, short) != []


def test_a_question_that_is_longer_than_half_of_the_room_cannot_be_cut(chat: ChatSession) -> None:
    long = words(400, questions=(" why" * 300,))
    found = fitting.fitted(chat, [long], ANSWERS, "middle")
    assert (found.items, found.skipped) == ([], 1)


def test_a_line_says_what_was_left_out() -> None:
    assert fitting.told("qasper", 0, 0, 200) == ""
    assert fitting.told("qasper", 0, 3, 200) == "qasper: of 200 records 3 too long and skipped"
    both = "x: of 9 records 1 too long and skipped and 2 cut in the middle"
    assert fitting.told("x", 2, 1, 9) == both


def qasper(path: Path, *words: int) -> Path:
    lines = [
        {"context": "word " * n, "input": "Who?", "answers": ["fox"], "dataset": "qasper"}
        for n in words
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_record_that_is_too_long_does_not_end_a_run(tmp_path: Path) -> None:
    """It is skipped and counted, on the terminal and in JSON; so is a file that has no other."""
    files = qasper(tmp_path / "qasper.jsonl", 20, 9000), qasper(tmp_path / "two.jsonl", 9000)
    out = tmp_path / "out.json"
    arguments = ["eval", *map(str, files), "--policy", "full", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert "qasper: of 2 records 1 too long and skipped" in result.stderr
    assert "two: of 1 records 1 too long and skipped" in result.stderr
    written = json.loads(out.read_text())
    assert written["facts"]["skipped"] == {"qasper": 1, "two": 1}
    assert [(c["task"], c["n"]) for c in written["cells"]] == [("qasper", 1)]


def test_where_no_record_fits_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.Run, "measure", lambda *_: pytest.fail("measured"))
    path = qasper(tmp_path / "qasper.jsonl", 9000)
    result = CliRunner().invoke(app, ["eval", str(path)])
    assert result.exit_code == 5
    assert "qasper: of 1 records 1 too long and skipped" in result.stderr
    assert "--truncate middle" in result.stderr


def test_a_record_that_turns_out_not_to_fit_is_counted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that reads twice may need more positions than a prompt and its answer."""
    ask = passes.answers

    def answers(chat: ChatSession, item: Item) -> list[str]:
        if "word word word" in item.document and chat.eviction.evicts:
            raise ContextError("scoring takes more positions")
        return ask(chat, item)

    monkeypatch.setitem(PASSES, "answers", replace(PASSES["answers"], run=answers))
    monkeypatch.setattr(command, "build", lambda _: minikv.load(policy="full"))
    path, out = qasper(tmp_path / "qasper.jsonl", 40, 1), tmp_path / "out.json"
    arguments = ["eval", str(path), "--policy", "adakv", "--budget", "64", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert "qasper: of 2 records 1 too long and skipped" in result.stderr
    written = json.loads(out.read_text())
    assert [c["n"] for c in written["cells"]] == [1, 1]
    assert [i["source"] for i in written["items"]["qasper"]] == [f"{path}, line 2"]


def test_truncation_is_one_of_two() -> None:
    result = CliRunner().invoke(app, ["eval", "--truncate", "left"])
    assert result.exit_code == 2
    assert "--truncate takes: none, middle" in result.stderr
