"""`minikv eval FILE`: what is read from records, and refused by line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import cast

import pytest
from refusals import refused

import minikv
from minikv.chat.transcript import Message
from minikv.cli.eval import items, passes
from minikv.cli.eval.items import read_items
from minikv.models.tokenizer import Tokenizer

GOOD = {"input": "A key is 17.\nWhat is the key?", "outputs": ["17"]}


def record(**changes: object) -> str:
    return json.dumps({k: v for k, v in (GOOD | changes).items() if v is not None})


def written(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "line 2: a number too long or lists too"),
        ('{"a": ' + "1" * 9000 + "}", "line 2: a number too long or lists too deep"),
        (record(input=None), "line 2: no input"),
        (record(input=7), "line 2: input is not a text"),
        (record(input=" \n"), "line 2: input is empty"),
        (record(input="a\ud800b\nWho?"), "line 2: input has a lone surrogate at character 1"),
        (record(input="\nWhat is the key?"), "line 2: input has no document before its last line"),
        (record(input="What is the key?"), "line 2: input has no document"),
        (record(outputs=None), "line 2: no outputs"),
        (record(outputs=[]), "line 2: no outputs"),
        (record(outputs="17"), "line 2: outputs is not a list of texts"),
        (record(outputs=[17]), "line 2: outputs is not a text"),
        (record(outputs=["a", " "]), "line 2: outputs is empty"),
        (record(outputs=["a", "\ud800"]), "line 2: outputs has a lone surrogate"),
        (record(answer_prefix=7), "line 2: answer_prefix is not a text"),
    ],
)
def test_a_wrong_record_is_named_by_its_line(tmp_path: Path, line: str, says: str) -> None:
    path = written(tmp_path / "vt.jsonl", record(), line)
    refused(f"^{re.escape(f'{path}, {says}')}", list, read_items(path))


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "is empty"), (b"\n \n", "is empty"), (b"\xff{}", "cannot read"), (b"\0", "not JSON")],
)
def test_a_file_that_has_no_records(tmp_path: Path, data: bytes, says: str) -> None:
    """Only regular files are read: a device would be until there is no memory, and a pipe waited
    for without end."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    refused(says, list, read_items(path))
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        refused("not a regular file", list, read_items(path))
    refused("missing", list, read_items(tmp_path / "none.jsonl"))


def test_only_a_line_feed_ends_a_record(tmp_path: Path) -> None:
    """JSON texts may hold other line ends of Unicode. A byte order mark is no part of a file."""
    path, odd = tmp_path / "x.jsonl", "one\u2028two\x85three.\nWho?"
    line = json.dumps(GOOD | {"input": odd}, ensure_ascii=False)
    path.write_bytes(("\ufeff" + "\r\n".join([line, "", record(), ""])).encode())
    first, second = read_items(path)
    assert first.document + first.questions[0] == odd
    assert second.source.endswith("line 3")


@pytest.mark.parametrize(
    ("names", "metric", "tokens"),
    [
        ("niah_multikey_3.jsonl my_qa_runs/niah_single_1.jsonl", items.contains, 128),
        ("RULER.vt.8k.json", items.contains, 30),
        ("cwe/test.jsonl", items.contains, 120),
        ("qa_2/fwe/validation.jsonl", items.contains, 50),
        ("ruler_qa_1.jsonl ruler-QA-2.jsonl qa_2/validation.jsonl", items.contains_any, 32),
        # Others: all answers are wanted, in up to 128 tokens.
        ("squad_qa.jsonl acwe.jsonl qa_1/data.jsonl vt_and_qa_1.jsonl", items.contains, 128),
    ],
)
def test_a_ruler_task_is_told_by_its_name(
    tmp_path: Path, names: str, metric: items.Metric, tokens: int
) -> None:
    for name in names.split():
        (item,) = read_items(written(tmp_path / name, record()))
        assert (item.metric, item.max_tokens) == (metric, tokens), name


WHO = "Question: Who?"


@pytest.mark.parametrize(
    ("asked", "prefix"),
    [(WHO, None), (WHO, ""), (WHO, " Answer: they are: "), (f"{WHO}\n", "Answer:")],
)
def test_a_prompt_is_fed_to_the_letter(tmp_path: Path, asked: str, prefix: str | None) -> None:
    """Without a header in front, in the user's turn; how the answer begins opens the model's."""
    prompt = f"Some words.\nMore.\n{asked}"
    path = written(tmp_path / "qa_1.jsonl", record(input=prompt, answer_prefix=prefix))
    (item,) = read_items(path)
    assert (item.document, item.questions) == ("Some words.\nMore.\n", (asked,))
    chat = minikv.load(policy="full")
    before = chat.template.opening([Message("user", prompt)])
    opens = cast(Tokenizer, chat.tokenizer).encode(prefix or "", "inside")
    assert passes.prompts(chat, item) == (before + opens,)
    chat.reset()
    (answer,) = passes.answers(chat, item)
    assert chat.fed[: len(before) + len(opens)] == before + opens
    assert prefix is None or not prefix.strip() or not answer.startswith(prefix)
    assert chat.template.opening([Message("user", prompt)]) == before, "the chat's own is back"


# -- scores ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("metric", "answer", "right", "score"),
    [
        (items.exact, " Velgate ", ["Velgate"], 1.0),
        (items.exact, "velgate", ["Velgate"], 0.0),
        (items.exact, "Velgate.", ["Velgate"], 0.0),
        (items.exact, "Velgate and Orlin", ["Velgate"], 0.0),
        (items.exact, "", ["Velgate"], 0.0),
        (items.exact, "Orlin", ["Velgate", "Orlin"], 1.0),
        (items.contains, "It is 12 and 7.", ["12", "8"], 0.5),
        (items.contains_any, "It is 12 and 7.", ["12", "8"], 1.0),
    ],
)
def test_metrics(metric: items.Metric, answer: str, right: list[str], score: float) -> None:
    assert metric(answer, right) == pytest.approx(score)


WHITE = "The favourite colour of Tarin Velvin is **white**."
ISH = "A whitewash, and it is white-ish. White"


@pytest.mark.parametrize(
    ("right", "found", "not_found"),
    [
        ("white", ["White.", WHITE, ISH, "It is white - or was", "_white_"], ["", " \n"]),
        ("white", [], ["whitewash", "offwhite", "off-white", "white-washed"]),
        ("white.", ["'white'"], []),
        ("Tarin Velvin", ["The mayor is Tarin\nVelvin, it says."], ["Velvin, Tarin"]),
        ("Tarin", ["Tarin's"], []),
        ("red|blue", ["blue"], []),
        ("17", ["It is 17.", "12, 17, 5", "Answer:17", "\uff11\uff17"], ["117", "1,17,5"]),
        ("17", [], ["17,5 or 3.17 or 12:17"]),
        # Case and form: sharp s, a composed and a decomposed e, full width, a mark of its own.
        ("Straße", ["Es ist die STRASSE."], []),
        ("CAF\u00c9", ["un cafe\u0301."], []),
        ("cafe", [], ["un cafe\u0301"]),
        ("x", [], ["x\u0301"]),
        ("велград", ["“Велград”, сказал он"], ["Велградский"]),
        ("", [], ["white", ""]),
        ("...", [], ["It is ..."]),
    ],
)
def test_a_value_is_whole_words(right: str, found: list[str], not_found: list[str]) -> None:
    for answer in found + not_found:
        assert items.contains_words(answer, right.split("|")) == (answer in found), answer
