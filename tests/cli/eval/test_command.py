"""`minikv eval`, run as a command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import minikv
from minikv.chat.session import ChatSession
from minikv.cli.eval import command, passes
from minikv.cli.eval.items import Item
from minikv.cli.eval.passes import PASSES
from minikv.cli.main import app
from minikv.errors import ContextError


def evaluate(arguments: str, *more: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["eval", *arguments.split(), *map(str, more)])
    assert result.exit_code == code, result.stderr
    return result


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "build", lambda _: pytest.fail("a model was loaded"))


def test_a_small_run(tmp_path: Path) -> None:
    """The table and JSON agree; the full cache comes first."""
    out = tmp_path / "out.json"
    flags = "--policy adakv,kvcrush(h2o) --budget 64 --length 400 -n 2 --tasks"
    tasks = ("facts", "followup", "agree", "ppl", "kl")
    result = evaluate(flags, ",".join(tasks), "--json", out)
    written = json.loads(out.read_text())
    cells = written["cells"]
    assert [c["policy"] for c in cells[:3]] == ["full", "adakv", "kvcrush(h2o)"]
    assert len(cells) == 5 * 3
    by = {(c["task"], c["policy"]): c for c in cells}
    assert by["agree", "full"]["score"] == 1.0
    assert by["kl", "full"]["score"] == 0.0 < by["kl", "adakv"]["score"]
    assert by["ppl", "full"]["score"] > 1.0
    assert by["facts", "adakv"]["held"] < 0.5 * by["facts", "full"]["held"]
    assert [name for name, *_ in by["followup", "full"]["by_group"]][:2] == ["Q1", "Q2"]
    assert all(f"{task}\n" in result.stdout for task in tasks)
    # What was asked, what would be right, what each policy said and what it scored.
    items = written["items"]["facts, agree, ppl, kl"]
    for c in cells[3:6]:
        for item, given, scores in zip(items, c["answers"], c["scores"], strict=True):
            exact = [float(a.strip() in r) for a, r in zip(given, item["right"], strict=True)]
            assert scores == exact


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--tasks facts,nedle", "unknown task 'nedle'"),
        ("--policy adakv,snapvk", "unknown policy 'snapvk'"),
        ("--budget 12x", "the budget cannot be"),
        ("--length none", "cannot read the number of tokens"),
        ("--length 3", "--length must be 64 to 1,000,000, got 3"),
        (f"--length {'9' * 5000}", "cannot read the number of tokens"),
        ("--length 199", "a document of 199 tokens is too short for the task facts"),
        ("--length 100,1000 --tasks needle,ppl", "100 tokens is too short for the task ppl"),
        ("--tasks long --length 300", "300 tokens is too short for the task long"),
        ("--reuse recall,always", "unknown reuse 'always'"),
        ("--reuse auto", "unknown reuse 'auto'"),
        ("--reuse ,", "--reuse names nothing"),
        ("-n 0", "-n must be at least 1"),
        ("--questions 0", "--questions must be at least 1"),
        ("-o windov=3", "none of these policies has an option 'windov'"),
        ("-o window=0", "give from 1 to 4096; the default is 32"),
        ("--decode ,", "--decode names nothing"),
        ("--policy snapkv --stride 32", "snapkv cannot read a prompt in blocks"),
        ("--policy full --decode roco --stride 32", "full cannot read a prompt"),
        ("--budget 64,20", "budget 20 is too small for adakv with h2o"),
        ("--tasks answers", "answers are to the questions of records"),
        ("LICENSE --tasks answers", "answers are to the questions of records"),
        ("--tasks loss", "unknown task 'loss'"),
        ("--haystack LICENSE --tasks long", "the task long is about a world of its own"),
        ("--needle a|b|c", "--needle needs a text"),
        ("--haystack LICENSE --needle a|b", "cannot read the needle"),
        ("--haystack /nowhere/x.txt", "/nowhere/x.txt"),
        ("--json /nowhere/out.json", "there is no directory"),
        ("--json /", "is a directory"),
    ],
)
def test_wrong_arguments(arguments: str, says: str) -> None:
    result = evaluate(arguments, code=2)
    assert says in result.stderr
    assert len(result.stderr.splitlines()) <= 3


def test_a_decode_policy_beside_the_full_cache_is_measured() -> None:
    """The prompt stays whole; while an answer is written, a row leaves for each that comes. One
    document has no interval: a dash."""
    flags = "--tasks ppl --policy full --decode roco --budget 64 --length 200 -n 1"
    rows = [line.split() for line in evaluate(flags).stdout.strip().splitlines()[2:]]
    assert [row[:3] for row in rows] == [["full", "none", "-"], ["full", "roco", "64"]]
    assert rows[0][3] != rows[1][3]
    assert [row[4] for row in rows] == ["-", "-"]
    held = [float(row[-1].rstrip("%")) for row in rows]
    assert held[1] < 0.8 * held[0]


def test_a_share_too_small_for_a_document_ends_the_run_with_what_was_measured(
    tmp_path: Path,
) -> None:
    """5 % of the longer documents would do."""
    out = tmp_path / "out.json"
    flags = "--tasks needle --length 1000,400 -n 1 --policy adakv --budget 5% --json"
    said = evaluate(flags, out, code=2).stderr
    assert "is too small for adakv" in " ".join(said.split())
    assert [c["n"] for c in json.loads(out.read_text())["cells"]] == [5, 5]


def test_what_was_measured_is_kept_when_a_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C in the second policy of the third document: two documents, of every policy."""
    out, asked, ask = tmp_path / "out.json", 0, passes.answers

    def answers(chat: ChatSession, item: Item, _: passes.Memory) -> list[str]:
        nonlocal asked
        asked += 1
        if asked == 6:
            raise KeyboardInterrupt
        return ask(chat, item)

    monkeypatch.setitem(PASSES, "answers", replace(PASSES["answers"], run=answers))
    flags = "--tasks facts --policy adakv --budget 64 -n 4 --length 200 --json"
    result = evaluate(flags, out, code=130)
    written = json.loads(out.read_text())
    assert [(c["policy"], c["n"]) for c in written["cells"]] == [("full", 2), ("adakv", 2)]
    assert written["facts"]["stopped_after"] == {"facts": "2 of 4"}
    assert "documents measured: facts: 2 of 4" in " ".join(result.stderr.split())
    assert "adakv" in result.stdout
    # Stopped before anything was measured: what an earlier run has written stays.
    asked = 5
    evaluate(flags, out, code=130)
    assert json.loads(out.read_text()) == written


def test_what_is_measured_beside_the_full_cache_of_records(tmp_path: Path) -> None:
    """With FILEs these are of the files, which are told apart by their folders: RULER calls every
    task's file validation.jsonl."""
    line = {"input": "The key is 17.\n" * 20 + "What is the key?", "outputs": ["17"]}
    files = [tmp_path / name / "validation.jsonl" for name in ("vt", "qa_1", "4096/vt")]
    for path in files:
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(line))
    out = tmp_path / "out.json"
    flags = "--policy streaming --budget 32 --tasks answers,agree,ppl,kl --length 100 --json"
    result = evaluate(flags, out, *files)
    written = json.loads(out.read_text())
    cells = written["cells"]
    kinds, called = ("", "agree of ", "ppl of ", "kl of "), (files[0], "qa_1", files[2])
    names = [f"{kind}{name}" for name in called for kind in kinds]
    assert [c["task"] for c in cells] == [n for name in names for n in (name, name)]
    assert written["facts"]["metrics"]["qa_1"] == "contains_any"
    by = {(c["task"], c["policy"]): c for c in cells}
    assert by["agree of qa_1", "full"]["score"] == 1.0
    assert by["kl of qa_1", "full"]["score"] == 0.0 < by["kl of qa_1", "streaming"]["score"]
    assert by["ppl of qa_1", "full"]["score"] > 1.0
    assert "ppl of qa_1\npolicy" in result.stdout


def test_texts_and_facts_in_a_text(tmp_path: Path) -> None:
    """A text is cut into parts, and nothing is asked unless it is the haystack. The bundled model
    cannot answer: that is said."""
    text, out = tmp_path / "a.txt", tmp_path / "out.json"
    text.write_text("The mill stood by the river. Nobody came on Monday, but the bell rang. " * 40)
    flags = "--policy streaming --budget 32 --length 200 -n 3 --json"
    for tasks, named in (("", ["ppl"]), ("--tasks kl,ppl,agree", ["kl", "ppl", "agree"])):
        evaluate(f"{tasks} {flags}", out, text)
        written = json.loads(out.read_text())
        assert [c["task"] for c in written["cells"][::2]] == [f"{name} of a" for name in named]
        assert {len(c["by_item"]) for c in written["cells"]} == {3}
    result = evaluate(f"{flags} {out} --questions 3 --haystack {text}")
    assert "the comparison means nothing" in result.stdout
    (item,) = json.loads(out.read_text())["items"]["facts"]
    assert len(item["questions"]) == len(item["right"]) == 3


@pytest.mark.parametrize(("model", "metric"), [("other", "contains_words"), (None, "exact")])
def test_another_model_is_told_how_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str | None, metric: str
) -> None:
    """Not the bundled model, which was trained to answer with the value alone."""
    monkeypatch.setattr(command, "build", lambda _: minikv.load(policy="full"))
    out, named = tmp_path / "out.json", ["-m", model] if model else []
    evaluate("--tasks facts --policy full --length 300 -n 1 --json", out, *named)
    written = json.loads(out.read_text())
    assert written["facts"]["metrics"] == {"facts": metric}
    (question,) = written["items"]["facts"][0]["questions"]
    assert question.endswith("Answer with the value alone.") == bool(model)


def records(path: Path, *words: int) -> Path:
    lines = [{"input": "word " * n + "\nWho?", "outputs": ["fox"]} for n in words]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_record_that_is_too_long_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is skipped and counted, on the terminal and in JSON, also where that turns out while it is
    measured: a policy that reads twice may need more positions than a prompt and its answer."""
    ask = passes.answers

    def answers(chat: ChatSession, item: Item, _: passes.Memory) -> list[str]:
        if "word word word" in item.document and chat.eviction.evicts:
            raise ContextError("scoring takes more positions")
        return ask(chat, item)

    monkeypatch.setitem(PASSES, "answers", replace(PASSES["answers"], run=answers))
    one, two = records(tmp_path / "vt.jsonl", 40, 1, 9000), tmp_path / "two.jsonl"
    out = tmp_path / "out.json"
    flags = "--policy adakv --budget 64 --json"
    result = evaluate(flags, out, one, records(two, 9000))
    assert "vt: of 3 records 2 too long and skipped" in result.stderr
    assert "two: of 1 records 1 too long and skipped" in result.stderr
    written = json.loads(out.read_text())
    assert written["facts"]["skipped"] == {"vt": 2, "two": 1}
    assert [c["n"] for c in written["cells"]] == [1, 1]
    assert [i["source"] for i in written["items"]["vt"]] == [f"{one}, line 2"]
    nothing = evaluate(str(two), code=5)
    assert "two: of 1 records 1 too long and skipped" in nothing.stderr
