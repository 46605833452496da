"""`minikv eval` of models other than the bundled one, and RULER files by their names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

import minikv
from minikv.chat.session import ChatSession
from minikv.chat.transcript import Message
from minikv.cli.eval import command, metrics, passes, tasks, wording
from minikv.cli.eval.files import Item, read_items, scored
from minikv.cli.main import app
from minikv.errors import UsageError
from minikv.models import BUNDLED
from minikv.models.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("answer", "right", "score"),
    [
        ("White.", ["white"], 1.0),
        ("The favourite colour of Tarin Velvin is **white**.", ["white"], 1.0),
        ("whitewash", ["white"], 0.0),
        ("offwhite", ["white"], 0.0),
        ("off-white", ["white"], 0.0),
        ("white-washed", ["white"], 0.0),
        ("A whitewash, and it is white-ish. White", ["white"], 1.0),
        ("It is white - or was", ["white"], 1.0),
        ("_white_", ["white"], 1.0),
        ("'white'", ["white."], 1.0),
        ("The mayor is Tarin\nVelvin, it says.", ["Tarin Velvin"], 1.0),
        ("Velvin, Tarin", ["Tarin Velvin"], 0.0),
        ("Tarin's", ["Tarin"], 1.0),
        ("blue", ["red", "blue"], 1.0),
        ("117", ["17"], 0.0),
        ("It is 17.", ["17"], 1.0),
        ("17,5 or 3.17 or 12:17", ["17"], 0.0),
        ("1,17,5", ["17"], 0.0),
        ("12, 17, 5", ["17"], 1.0),
        ("Answer:17", ["17"], 1.0),
        # Case and form: sharp s, a composed and a decomposed e, full width, a mark of its own.
        ("Es ist die STRASSE.", ["Straße"], 1.0),
        ("un cafe\u0301.", ["CAF\u00c9"], 1.0),
        ("un cafe\u0301", ["cafe"], 0.0),
        ("x\u0301", ["x"], 0.0),
        ("\uff11\uff17", ["17"], 1.0),
        ("“Велград”, сказал он", ["велград"], 1.0),
        ("Велградский", ["велград"], 0.0),
        ("", ["white"], 0.0),
        (" \n", ["white"], 0.0),
        ("white", [""], 0.0),
        ("It is ...", ["..."], 0.0),
        ("", [""], 0.0),
    ],
)
def test_a_value_is_found_as_whole_words(answer: str, right: list[str], score: float) -> None:
    assert metrics.contains_words(answer, right) == score


class Words:
    """A tokenizer that has every word in one token, as large vocabularies nearly do."""

    def encode(self, text: str) -> list[int]:
        return [0] * len(text.split())


def made(how: tasks.Manner | None) -> list[Item]:
    """Of each task; None: as those ask who know nothing of manners."""
    first = 900_000_000
    if how is None:
        return [
            *tasks.facts(Words(), 400, 6, first),
            *tasks.followup(Words(), 600, 3, first),
            *tasks.needle(Words(), [300, 500], 1, first),
        ]
    return [
        *tasks.facts(Words(), 400, 6, first, how),
        *tasks.followup(Words(), 600, 3, first, how),
        *tasks.needle(Words(), [300, 500], 1, first, how=how),
    ]


def test_the_bundled_model_is_asked_as_it_always_was() -> None:
    """The digest is of the items before there were manners."""
    items = made(None)
    assert items == made(tasks.TRAINED)
    told = [
        (i.document, i.questions, i.right, i.metric.__name__, i.max_tokens, i.where) for i in items
    ]
    digest = "fafbe7909e7ff1ef5fbd249875754817cc23a88d99e4eae0c1639236c9229b86"
    assert sha256(repr(told).encode()).hexdigest() == digest
    assert scored(items) == "exact"


def test_another_model_is_told_what_is_wanted() -> None:
    """The same documents; in needles and follow-ups the same questions, with an instruction."""
    before, after = made(tasks.TRAINED), made(tasks.TOLD)
    assert [i.document for i in before] == [i.document for i in after]
    for old, new in zip(before[6:], after[6:], strict=True):
        assert new.questions == tuple(f"{q} Answer with the value alone." for q in old.questions)
        assert (new.right, new.where) == (old.right, old.where)
    assert {(i.metric, i.max_tokens) for i in after} == {(metrics.contains_words, 48)}
    assert scored(after) == "contains_words"


def test_only_the_bundled_model_is_asked_for_long_answers_alone() -> None:
    """Words of one token are most of what another tokenizer could be asked for."""
    long = [i.right[0][0] for i in tasks.facts(Words(), 1000, 12, 5)]
    every = [i.right[0][0] for i in tasks.facts(Words(), 1000, 12, 5, tasks.TOLD)]
    assert all(" " in answer for answer in long)
    assert sum(" " not in answer for answer in every) > 6


def test_the_bundled_model_is_known_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tasks.manner(None) is tasks.TRAINED
    assert tasks.manner(str(BUNDLED)) is tasks.TRAINED
    (tmp_path / "link").symlink_to(BUNDLED)
    (tmp_path / "bundled").mkdir()
    monkeypatch.chdir(tmp_path)
    assert tasks.manner("link") is tasks.TRAINED
    assert tasks.manner("bundled") is tasks.TOLD
    assert tasks.manner("owner/name") is tasks.TOLD


def sentences(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Any model that is loaded answers rightly, in a sentence; the room it had each time."""
    rooms: list[int] = []
    plain = passes.answers

    def answers(chat: ChatSession, item: Item) -> list[str]:
        right = dict(zip(item.questions, item.right, strict=True))

        def ask(question: str, max_tokens: int) -> Iterator[str]:
            rooms.append(max_tokens)
            value = right[question][0]
            return iter(["The document says that it is ", value[0].upper(), value[1:] + "."])

        monkeypatch.setattr(chat, "ask", ask)
        return plain(chat, item)

    monkeypatch.setitem(passes.PASSES, "answers", replace(passes.PASSES["answers"], run=answers))
    return rooms


@pytest.mark.parametrize(
    ("model", "metric", "score", "room"),
    [("other", "contains_words", 1.0, 48), (None, "exact", 0.0, 16)],
)
def test_a_sentence_is_right_if_the_value_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str | None,
    metric: str,
    score: float,
    room: int,
) -> None:
    """Not of the bundled model, which was trained to answer otherwise."""
    monkeypatch.setattr(command, "build", lambda _: minikv.load(policy="full"))
    rooms, out = sentences(monkeypatch), tmp_path / "out.json"
    path = tmp_path / "ruler_qa_1.jsonl"
    path.write_text(json.dumps({"input": "A key is 17.\nWhich?", "outputs": ["17"]}))
    result = CliRunner().invoke(
        app,
        [
            "eval",
            str(path),
            "--tasks",
            "facts,followup,needle",
            "--policy",
            "full",
            "--length",
            "300",
            "-n",
            "1",
            "--json",
            str(out),
            *(["-m", model] if model else []),
        ],
    )
    assert result.exit_code == 0, result.stderr
    written = json.loads(out.read_text())
    assert written["facts"]["metrics"] == {
        "ruler_qa_1": "contains_any",
        "needle": metric,
        "followup": metric,
        "facts": metric,
    }
    scores = {cell["task"]: cell["score"] for cell in written["cells"]}
    assert scores == {
        "ruler_qa_1": 1.0,
        "needle": score,
        "followup": score,
        "facts": score,
    }
    assert rooms[0] == 32
    assert set(rooms[1:]) == {room}


def ruler(folder: Path, name: str, **changes: object) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {"input": "Keys are 17 and 18.\nWhat are the keys?", "outputs": ["17", "18"]} | changes
        )
    )
    return path


@pytest.mark.parametrize(
    ("name", "metric", "tokens"),
    [
        *(
            (f"{before}{task}{after}", metric, tokens)
            for task, metric, tokens in (
                *(
                    (f"niah_{kind}", metrics.contains, 128)
                    for kind in (
                        "single_1",
                        "single_2",
                        "single_3",
                        "multikey_1",
                        "multikey_2",
                        "multikey_3",
                        "multivalue",
                        "multiquery",
                    )
                ),
                ("vt", metrics.contains, 30),
                ("cwe", metrics.contains, 120),
                ("fwe", metrics.contains, 50),
                ("qa_1", metrics.contains_any, 32),
                ("qa_2", metrics.contains_any, 32),
            )
            for before, after in (
                ("", ".jsonl"),
                ("ruler_", ".jsonl"),
                ("my-", "_4096.jsonl"),
                ("RULER.", ".8k.json"),
                ("ruler_", "/validation.jsonl"),
            )
        ),
        ("ruler-QA-2.jsonl", metrics.contains_any, 32),
        ("ruler_qa_1/vt.jsonl", metrics.contains, 30),
    ],
)
def test_every_ruler_task_is_known_by_its_name(
    tmp_path: Path, name: str, metric: metrics.Metric, tokens: int
) -> None:
    (item,) = read_items(ruler(tmp_path, name))
    assert (item.metric, item.max_tokens) == (metric, tokens)


@pytest.mark.parametrize(
    ("name", "many"),
    [
        ("x.jsonl", "no"),
        ("qa_3.jsonl", "no"),
        ("squad_qa.jsonl", "no"),
        ("qa_11.jsonl", "no"),
        ("qaint.jsonl", "no"),
        ("cwes.jsonl", "no"),
        ("acwe.jsonl", "no"),
        ("qa_1/data.jsonl", "no"),
        ("x/validation.jsonl", "no"),
        ("vt_and_qa_1.jsonl", "more than one"),
    ],
)
def test_another_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, many: str
) -> None:
    monkeypatch.setattr(command, "build", lambda _: pytest.fail("a model was loaded"))
    path = ruler(tmp_path, name)
    with pytest.raises(UsageError) as refused:
        list(read_items(path))
    said = f"names {many} RULER task (known: niah_*, vt, cwe, fwe, qa_1, qa_2)"
    assert said in str(refused.value)
    result = CliRunner().invoke(app, ["eval", str(path)])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    # What a record of LongBench is, it says itself.
    path.write_text(
        json.dumps(
            {"context": "The fox.", "input": "Who?", "answers": ["fox"], "dataset": "qasper"}
        )
    )
    assert len(list(read_items(path))) == 1


@pytest.mark.parametrize(
    ("asked", "prefix"),
    [
        ("Question: Who?", None),
        ("Question: Who?", ""),
        ("Question: Who?", " Answer: they are: "),
        ("Question: Who?", "\nAnswer:"),
        ("Question: Who?\n", "Answer:"),
        ("Question: Who? Answer:", None),
    ],
)
def test_a_ruler_prompt_is_fed_to_the_letter(
    tmp_path: Path, asked: str, prefix: str | None
) -> None:
    """Without a header in front, in the user's turn; how the answer begins opens the model's."""
    prompt = f"Some words.\nMore.\n{asked}"
    (item,) = read_items(ruler(tmp_path, "qa_1.jsonl", input=prompt, answer_prefix=prefix))
    assert (item.document, item.questions) == ("Some words.\nMore.\n", (asked,))
    chat = minikv.load(policy="full")
    before = chat.template.opening([Message("user", prompt)])
    opens = cast(Tokenizer, chat.tokenizer).encode(prefix or "", "inside")
    assert wording.opening(chat, item, 0) == before + opens
    chat.reset()
    (answer,) = passes.answers(chat, item)
    assert chat.fed[: len(before) + len(opens)] == before + opens
    assert prefix is None or not prefix.strip() or not answer.startswith(prefix)


def test_an_answer_prefix_is_a_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 1: answer_prefix is not a text"):
        list(read_items(ruler(tmp_path, "vt.jsonl", answer_prefix=["x"])))
    with pytest.raises(UsageError, match="line 1: answer_prefix has a lone surrogate"):
        list(read_items(ruler(tmp_path, "vt.jsonl", answer_prefix="\ud800")))
