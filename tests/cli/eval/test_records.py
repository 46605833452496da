"""`minikv eval FILE`: what is read from LongBench and RULER records, and refused by line."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import cast

import pytest

import minikv
from minikv.chat.transcript import Message
from minikv.cli.eval import metrics, passes
from minikv.cli.eval.items import together
from minikv.cli.eval.records import DATASETS, PROMPTS, read_items
from minikv.errors import UsageError
from minikv.models.tokenizer import Tokenizer


def record(**changes: object) -> str:
    good = {"context": "The fox.", "input": "Who?", "answers": ["fox"], "dataset": "qasper"}
    return json.dumps({k: v for k, v in (good | changes).items() if v is not None})


def ruler(**changes: object) -> str:
    return json.dumps({"input": "A key is 17.\nWhat is the key?", "outputs": ["17"]} | changes)


def written(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path


def choices(**changes: object) -> str:
    good = {
        "context": " The fox. ",
        "question": "Which $C_A$ is it?",
        **{f"choice_{x}": f"the {x.lower()} one " for x in "ABCD"},
        "answer": "C",
        "difficulty": "hard",
        "length": "short",
    }
    return json.dumps({k: v for k, v in (good | changes).items() if v is not None})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "line 2: a number too long or lists too"),
        ('{"a": ' + "1" * 9000 + "}", "line 2: a number too long or lists too deep"),
        (record(context=None), "line 2: no context"),
        (record(context=7), "line 2: context is not a text"),
        (record(context=" \n"), "line 2: context is empty"),
        (record(context="a\ud800b"), "line 2: context has a lone surrogate at character 1"),
        (record(input="\udc00"), "line 2: input has a lone surrogate"),
        (record(answers=["a", "\ud800"]), "line 2: answers has a lone surrogate"),
        (record(dataset="\ud800"), "line 2: dataset has a lone surrogate"),
        (record(answers=None), "line 2: no answers"),
        (record(answers="fox"), "line 2: answers is not a list of texts"),
        (record(answers=[]), "line 2: answers is empty"),
        (record(input=""), "line 2: input is empty"),
        (record(dataset="vcsum"), "line 2: dataset 'vcsum' is not supported"),
        (record(dataset="lsht_e"), "line 2: dataset 'lsht_e' is not supported"),
        (choices(choice_D=None), "line 2: no choice_D"),
        (choices(answer="E"), "line 2: answer is not A, B, C or D"),
        (choices(question=" "), "line 2: question is empty"),
        (choices(difficulty={"a": 1}), "line 2: difficulty is not a text"),
        (choices(length=7), "line 2: length is not a text"),
        (choices(length=" "), "line 2: length is empty"),
        (choices(difficulty="x" * 41), "line 2: difficulty is not a line of at most 40 characters"),
        (choices(length="a\x1b[2J"), "line 2: length is not a line of at most 40 characters"),
        (choices(length="a\nb"), "line 2: length is not a line of at most 40 characters"),
        (record(dataset="qasper_e", length=True), "line 2: length is not a whole number of 0"),
        (record(dataset="qasper_e", length=-1), "line 2: length is not a whole number of 0"),
        (record(dataset="qasper_e", length="9"), "line 2: length is not a whole number of 0"),
        (record(dataset="qasper_e", length=9.5), "line 2: length is not a whole number of 0"),
        (record(dataset="trec"), "line 2: no all_classes"),
        (
            record(dataset="trec")[:-1] + ', "all_classes": null}',
            "line 2: all_classes is not a list of texts",
        ),
        (record(dataset="trec", all_classes=[]), "line 2: all_classes is empty"),
        (record(dataset="trec", all_classes=["dog"]), "line 2: none of answers is in all_classes"),
        (record(dataset="trec", all_classes=["fox", "\ud800"]), "line 2: all_classes has a lone"),
        (
            record(dataset="passage_retrieval_en", answers=["Paragraph 3", "4"]),
            "line 2: an answer names no paragraph",
        ),
        (ruler(input="x"), "line 2: input has no document"),
        (ruler(input="a\n\ud800"), "line 2: input has a lone surrogate"),
        (ruler(outputs=[]), "line 2: outputs is empty"),
        (ruler(outputs=["17", ""]), "line 2: outputs has an empty text"),
        (ruler(answer_prefix=["x"]), "line 2: answer_prefix is not a text"),
        (ruler(answer_prefix="\ud800"), "line 2: answer_prefix has a lone surrogate"),
    ],
)
def test_a_wrong_record_is_named_by_its_line(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        list(read_items(written(tmp_path / "x.jsonl", record(), line, "")))
    assert says in str(refused.value)


def test_longbench_and_ruler_records(tmp_path: Path) -> None:
    path = tmp_path / "niah_single_1.jsonl"
    path.write_text(record() + "\n\n" + ruler(input="Some words.\nA key is 17.\nWhich?") + "\n")
    first, second = read_items(path)
    assert first.document.endswith("\n\nArticle: The fox.")
    assert first.right == (("fox",),)
    assert (first.metric, first.max_tokens) == (metrics.qa_f1, 128)
    assert first.source == f"{path}, line 1"
    assert second.document == "Some words.\nA key is 17.\n"
    assert second.questions == ("Which?",)
    assert second.metric is metrics.contains
    assert second.source == f"{path}, line 3"
    empty = tmp_path / "e.jsonl"
    empty.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        list(read_items(empty))
    with pytest.raises(UsageError, match="cannot read"):
        list(read_items(tmp_path / "none.jsonl"))


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    odd = "one\u2028two\u2029three\x85four"
    line = json.dumps(json.loads(record(context=odd)), ensure_ascii=False)
    path.write_bytes("\r\n".join([line, record(), ""]).encode())
    first, second = read_items(path)
    assert first.document.endswith(f"Article: {odd}")
    assert second.document.endswith("Article: The fox.")
    assert second.source.endswith("line 2")


DIGESTS = {"longbench.json": "1e34c07872360e20", "longbench-v2.txt": "68a162252bc9ff71"}


def test_the_prompts_are_the_published_ones() -> None:
    """Nothing changes them by accident; their licence is beside them."""
    digests = {name: sha256((PROMPTS / name).read_bytes()).hexdigest()[:16] for name in DIGESTS}
    assert digests == DIGESTS
    assert "Permission is hereby granted" in (PROMPTS / "LICENSE").read_text()


def test_every_dataset_is_asked_as_it_is_published(tmp_path: Path) -> None:
    """The official prompt to the letter, and the official lengths; also LongBench-E's records."""
    lengths = {
        **dict.fromkeys(("gov_report", "qmsum", "multi_news"), 512),
        **dict.fromkeys(("narrativeqa", "qasper", "samsum"), 128),
        **dict.fromkeys(("multifieldqa_en", "trec", "lcc", "repobench-p"), 64),
        **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa"), 32),
        **dict.fromkeys(("passage_count", "passage_retrieval_en"), 32),
    }
    assert {name: d.max_tokens for name, d in DATASETS.items()} == lengths
    assert {name for name, d in DATASETS.items() if d.first_line} == {"trec", "triviaqa", "samsum"}
    completed = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    assert {name for name, d in DATASETS.items() if not d.roles} == completed
    without = {"gov_report", "multi_news", "passage_count", "lcc"}
    official = json.loads((PROMPTS / "longbench.json").read_text())
    assert set(official) == set(DATASETS)
    for name, dataset in DATASETS.items():
        path = tmp_path / f"{name}.jsonl"
        given = "" if name in without else "    if {context}:\n"
        for called in (name, f"{name}_e"):
            path.write_text(
                record(
                    dataset=called,
                    context=" {input}\nThe fox. ",
                    input=given,
                    answers=["Paragraph 1"],
                    all_classes=["Paragraph 1"],
                )
            )
            (item,) = read_items(path)
            said = official[name].replace("{input}", "INPUT").replace("{context}", "CONTEXT")
            said = said.replace("INPUT", given).replace("CONTEXT", " {input}\nThe fox. ")
            assert item.document + item.questions[0] == said
            assert item.document.endswith(" {input}\nThe fox. ")
            assert (item.metric, item.name) == (dataset.metric, None)
        path.write_text(record(dataset=name, input=" ", answers=["Paragraph 1"], all_classes=["x"]))
        if name not in without:
            with pytest.raises(UsageError, match="input is empty"):
                list(read_items(path))


def test_examples_and_code_are_completed_and_not_asked_in_a_chat(tmp_path: Path) -> None:
    """As LongBench's pred.py does: a BOS and the prompt, without roles."""
    path = tmp_path / "x.jsonl"
    path.write_text(record(dataset="lcc", input="") + "\n" + record())
    code, question = read_items(path)
    chat = minikv.load(policy="full")
    plain = chat.tokenizer.encode(code.document + code.questions[0])
    completed = [chat.start()[0], *plain]
    assert passes.prompts(chat, code)[0] == completed
    asked = passes.prompts(chat, question)[0]
    whole = [Message("user", question.document + question.questions[0])]
    assert asked == chat.template.opening(whole)
    passes.answers(chat, code)
    assert chat.fed[: len(completed)] == completed
    assert chat.template.opening(whole) == asked, "the chat's own template is back"


def test_longbench_v2_in_lines_and_in_one_list(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(f"[{choices()},\n {choices(answer='A')}]")
    first, second = read_items(path)
    prompt = (PROMPTS / "longbench-v2.txt").read_text()
    said = prompt.replace("$DOC$", "The fox.").replace("$Q$", "Which QUESTION is it?")
    for x in "ABCD":
        said = said.replace(f"$C_{x}$", f"the {x.lower()} one")
    assert first.document + first.questions[0] == said.replace("QUESTION", "$C_A$")
    assert (first.right, second.right) == ((("C",),), (("A",),))
    assert (first.max_tokens, first.metric) == (128, metrics.choice)
    assert (first.groups, second.source) == (("hard", "short"), f"{path}, record 2")
    path.write_text(f"{choices()}\n{choices()}\n")
    assert len(list(read_items(path))) == 2
    for text, says in (("[]", "is empty"), ('[{"a": 1}', "not JSON"), ("[7]", "record 1: not a")):
        path.write_text(text)
        with pytest.raises(UsageError, match=says):
            list(read_items(path))


@pytest.mark.parametrize(
    ("name", "text", "groups"),
    [
        *(
            ("qasper_e.jsonl", record(length=n), (group,))
            for n, group in ((3999, "0-4k"), (4000, "4-8k"), (7999, "4-8k"), (8000, "8k+"))
        ),
        ("qasper_e.jsonl", record(), ()),
        ("qasper.jsonl", record(length=10), ()),
        # Tables write null, an empty text or 3000.0 where a column has gaps.
        ("data.json", record(dataset="qasper_e", length=None), ()),
        ("data.json", record(dataset="qasper_e", length=3000.0), ("0-4k",)),
        ("data.json", choices(difficulty="", length=None), ()),
        ("data.json", choices(difficulty="schwierig, über 9"), ("schwierig, über 9", "short")),
        ("data.json", f"\ufeff[{choices()}]", ("hard", "short")),
        ("data.json", f"\ufeff{record()}", ()),
    ],
)
def test_the_groups_of_a_record(
    tmp_path: Path, name: str, text: str, groups: tuple[str, ...]
) -> None:
    """LongBench-E is told apart by length, LongBench v2 by its own names. A byte order mark is no
    part of a file."""
    assert next(read_items(written(tmp_path / name, text))).groups == groups


def test_records_about_one_document_become_one_item(tmp_path: Path) -> None:
    """Questions are asked apart; another document or another kind of answer is another item."""
    path = tmp_path / "x.jsonl"
    lines = [
        record(),
        record(context="The owl."),
        record(input="What?", answers=["a", "b"]),
        record(dataset="hotpotqa"),
    ]
    path.write_text("\n".join(lines))
    items = together(read_items(path))
    assert [len(item.questions) for item in items] == [2, 1, 1]
    assert [item.apart for item in items] == [True, False, False]
    assert items[0].right == (("fox",), ("a", "b"))
    assert items[0].source == f"{path}, line 1"
    assert ["Who?" in one.questions[0] for one in items[0].single()] == [True, False]
    assert [one.right for one in items[0].single()] == [(("fox",),), (("a", "b"),)]


@pytest.mark.parametrize(
    ("name", "metric", "tokens"),
    [
        ("niah_multikey_3.jsonl", metrics.contains, 128),
        ("my-niah_multiquery_4096.jsonl", metrics.contains, 128),
        ("my_qa_runs/niah_single_1.jsonl", metrics.contains, 128),
        ("RULER.vt.8k.json", metrics.contains, 30),
        ("qa_runs/vt.jsonl", metrics.contains, 30),
        ("cwe/test.jsonl", metrics.contains, 120),
        ("qa_2/fwe/validation.jsonl", metrics.contains, 50),
        ("ruler_qa_1.jsonl", metrics.contains_any, 32),
        ("ruler-QA-2.jsonl", metrics.contains_any, 32),
        ("qa_2/validation.jsonl", metrics.contains_any, 32),
    ],
)
def test_a_ruler_task_is_told_by_its_name(
    tmp_path: Path, name: str, metric: metrics.Metric, tokens: int
) -> None:
    (item,) = read_items(written(tmp_path / name, ruler()))
    assert (item.metric, item.max_tokens) == (metric, tokens)


@pytest.mark.parametrize(
    ("name", "many"),
    [
        *(
            (f"{n}.jsonl", "no")
            for n in ("x", "qa_3", "squad_qa", "qa_11", "qaint", "cwes", "acwe")
        ),
        ("qa_1/data.jsonl", "no"),
        ("x/validation.jsonl", "no"),
        ("vt_and_qa_1.jsonl", "more than one"),
    ],
)
def test_another_name_is_refused(tmp_path: Path, name: str, many: str) -> None:
    path = written(tmp_path / name, ruler())
    with pytest.raises(UsageError) as refused:
        list(read_items(path))
    said = f"names {many} RULER task (known: niah_*, vt, cwe, fwe, qa_1, qa_2)"
    assert said in str(refused.value)
    # What a record of LongBench is, it says itself.
    assert len(list(read_items(written(path, record())))) == 1


@pytest.mark.parametrize(
    ("asked", "prefix"),
    [
        ("Question: Who?", None),
        ("Question: Who?", ""),
        ("Question: Who?", " Answer: they are: "),
        ("Question: Who?\n", "Answer:"),
        ("Question: Who? Answer:", None),
    ],
)
def test_a_ruler_prompt_is_fed_to_the_letter(
    tmp_path: Path, asked: str, prefix: str | None
) -> None:
    """Without a header in front, in the user's turn; how the answer begins opens the model's."""
    prompt = f"Some words.\nMore.\n{asked}"
    path = written(tmp_path / "qa_1.jsonl", ruler(input=prompt, answer_prefix=prefix))
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


def test_rouge_of_the_package() -> None:
    pytest.importorskip("rouge")
    assert metrics.rouge_l("the cat sat", ["the cat sat", "no"]) == pytest.approx(1.0)
    # Longest common subsequence 2 of 3 and 3 words.
    assert metrics.rouge_l("the cat sat", ["the cat ran"]) == pytest.approx(2 / 3)
    for answer in ("", " ", "...", " . "):
        assert metrics.rouge_l(answer, ["the cat"]) == 0.0
    assert metrics.rouge_l("the cat", [""]) == 0.0


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A device would be read until there is no memory, a pipe waited for without end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        with pytest.raises(UsageError, match="not a regular file"):
            list(read_items(path))
    with pytest.raises(UsageError, match="missing"):
        list(read_items(tmp_path / "none.jsonl"))
