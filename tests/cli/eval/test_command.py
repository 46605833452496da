"""`minikv eval`, run as a command."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from tables import table
from typed import invoke
from typer.testing import Result

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.eval import command, passes, tasks
from minikv.cli.eval.items import Item
from minikv.cli.eval.passes import PASSES
from minikv.cli.eval.tasks import CHATS
from minikv.cli.measure import choices
from minikv.errors import ContextError


def evaluate(arguments: str, *more: object, code: int = 0) -> Result:
    result = invoke("eval", *arguments.split(), *map(str, more))
    assert result.exit_code == code, result.stderr
    return result


def test_a_small_run(tmp_path: Path) -> None:
    """The table and JSON agree; the full cache comes first."""
    out = tmp_path / "out.json"
    flags = "--policy adakv,kvcrush(h2o) --budget 64 --length 400 -n 2 --tasks"
    tasks = ("facts", "followup", "agree", "ppl", "kl")
    result = evaluate(flags, ",".join(tasks), "--json", out)
    written = json.loads(out.read_text())
    cells = written["cells"]
    policies = ["full", "adakv", "kvcrush(h2o)"]
    assert [c["policy"] for c in cells] == policies * 5
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


@table(f"""
    arguments                               | says
    --tasks facts,nedle                     | unknown task 'nedle'
    --policy adakv,snapvk                   | unknown policy 'snapvk'
    --budget 12x                            | the budget cannot be
    --length none                           | cannot read the number of tokens
    --length 3                              | --length must be 64 to 1,000,000, got 3
    --length {"9" * 5000}                   | cannot read the number of tokens
    --length 199          | a document of 199 tokens is too short for the task facts
    --length 100,1000 --tasks needle,ppl    | 100 tokens is too short for the task ppl
    --tasks long --length 300               | 300 tokens is too short for the task long
    --reuse recall,always                   | unknown reuse 'always'
    --reuse auto                            | unknown reuse 'auto'
    --reuse ,                               | --reuse names nothing
    -n 0                                    | -n must be at least 1
    --questions 0                           | --questions must be at least 1
    -o windov=3                             | none of these policies has an option 'windov'
    -o window=0                             | give from 1 to 4096; the default is 32
    --decode ,                              | --decode names nothing
    --policy snapkv --stride 32             | snapkv cannot read a prompt in blocks
    --policy full --decode roco --stride 32 | full cannot read a prompt
    --budget 64,20                          | budget 20 is too small for adakv with h2o
    --tasks answers                         | the task answers needs records
    LICENSE --tasks answers                 | the task answers needs records
    --tasks loss                            | unknown task 'loss'
    --haystack LICENSE --tasks long         | the task long makes its own documents
    --needle a|b|c                          | --needle needs a text
    --haystack LICENSE --needle a|b         | cannot read the needle
    --haystack /nowhere/x.txt               | /nowhere/x.txt
    --json /nowhere/out.json                | there is no directory
    --json /                                | is a directory
""")
def test_wrong_arguments(arguments: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "build", lambda _: pytest.fail("a model was loaded"))
    said = evaluate(arguments, code=2).stderr
    assert (says in said, len(said.splitlines()) <= 3) == (True, True), said


def test_a_decode_policy_beside_the_full_cache_is_measured() -> None:
    """The prompt stays whole; while an answer is written, a row leaves for each that comes. One
    document has no interval."""
    flags = "--tasks ppl --policy full --decode roco --budget 64 --length 200 -n 1"
    rows = [line.split() for line in evaluate(flags).stdout.strip().splitlines()[2:]]
    assert [row[:3] for row in rows] == [["full", "none", "-"], ["full", "roco", "64"]]
    assert rows[0][3] != rows[1][3]
    assert "(" not in str(rows)
    held = [float(row[5].rstrip("%")) for row in rows]
    assert held[1] < 0.8 * held[0]


def test_a_share_too_small_for_a_document_ends_the_run(tmp_path: Path) -> None:
    """5 % of the longer documents would do."""
    out = tmp_path / "out.json"
    flags = "--tasks needle --length 1000,400 -n 1 --policy adakv --budget 5% --json"
    said = evaluate(flags, out, code=2).stderr
    assert "is too small for adakv" in " ".join(said.split())
    assert [c["n"] for c in json.loads(out.read_text())["cells"]] == [5, 5]


def test_a_stopped_run_keeps_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for some, named in (("", ["ppl"]), ("--tasks kl,ppl,agree", ["kl", "ppl", "agree"])):
        evaluate(f"{some} {flags}", out, text)
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


def test_a_record_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "two: of 1 record 1 too long and skipped" in result.stderr
    written = json.loads(out.read_text())
    assert written["facts"]["skipped"] == {"vt": 2, "two": 1}
    assert [c["n"] for c in written["cells"]] == [1, 1]
    assert [i["source"] for i in written["items"]["vt"]] == [f"{one}, line 2"]
    nothing = evaluate(str(two), code=5)
    assert "two: of 1 record 1 too long and skipped" in nothing.stderr


# -- what is measured, and what is refused before anything is --------------------------------
def test_every_policy_with_every_decode_policy() -> None:
    wanted = choices("adakv,full,snapkv", "64,20%", "none,roco")
    pairs = "adakv/none adakv/roco full/roco snapkv/none snapkv/roco".split()
    both = [(f"{c.policy}/{c.decode}", str(c.budget)) for c in wanted[1:]]
    assert both == [*product(pairs, ("64", "20%"))]
    for plain in ("auto", "none"):
        assert len(choices("full", "64", plain)) == 1
    assert len(choices("full,roco", "64", "auto", 0, 32)) == 2
    strided = choices("roco,tova", "64", "auto", 0, 32)[1:]
    found = [f"{c.policy}/{c.decode}/{c.stride}" for c in strided]
    assert found == ["roco/roco/32", "tova/tova/32"]
    wrong: dict[str, Any] = {"stride": 32, "options": {"windov": 3}}
    refused(r"^roco has no option 'windov'", EvictionConfig.read, "roco", **wrong)
    few = choices("snapkv,l2", "64", "none", 0, 0, {"window": "16"})
    assert few[1].policy_options["window"] == 16
    assert "window" not in few[2].policy_options


def full() -> list[EvictionConfig]:
    return choices("full", "64", "auto")


def never(done: int, total: int) -> None:
    """Progress that nobody looks at."""


@pytest.mark.parametrize("task", ["facts", "ppl", "kl"])
def test_nothing_is_cut_to_fit(task: str) -> None:
    """An item that does not fit is an error with the documented code, not a cut document."""
    chat = minikv.load(policy="full")
    long = Item("word " * 9000, ("What?",), (("word",),), source="x.jsonl, line 7")
    fits = Item("word " * 90, ("What?",), (("word",),))
    one = command.Run(chat, [task], [fits, long], full())
    refused("^x.jsonl, line 7: needs .*8,192 positions", one.check, error=ContextError)
    if task != "ppl":  # where a long document takes long
        refused("", one.measure, never, error=ContextError)
        assert one.completed == 1
    mine = command.Run(chat, [task], [replace(long, source="")], full(), name="mine")
    refused("mine, document 1: needs", mine.check, error=ContextError)


def test_every_answer_must_have_room() -> None:
    """The check counts what a chat feeds, at least, whatever its answers are."""
    chat = minikv.load(policy="full")
    questions = ("Who?", "What is it?", "Where?")
    item = Item("The town of Velmora has a mayor.", questions, (("a",),) * 3, max_tokens=8)
    one = command.Run(chat, ["followup"], [item], full())
    lengths: list[int] = []
    reset = chat.reset
    chat.reset = lambda **_: (lengths.append(len(chat.fed)), reset())[1]  # type: ignore
    one.measure(never)
    chat.max_context = max(lengths) - 1
    error = refused("", one.check, error=ContextError)
    needed = int(str(error).split("needs ")[1].split()[0])
    assert max(lengths) <= needed <= max(lengths) + 3 * 8
    chat.max_context = needed
    one.check()


CHAT = Item(
    "The mayor of Velmora is Ivo Kalman. " + "The road was dull and the carts moved slowly. " * 40,
    ("Who is the mayor of Velmora?", "Tell me the mayor of Velmora.", "Who is mayor in Velmora?"),
    (("Ivo Kalman",),) * 3,
)


def test_every_reuse_beside_the_full_cache() -> None:
    """Each finds what it says: by the chat's own records; and the chat is as it was afterwards."""
    chat = minikv.load(policy="full")
    wanted = [*full(), EvictionConfig.read("adakv", budget="48")]
    one = command.Run(chat, ["followup"], [CHAT, CHAT], wanted, command.REUSES)
    one.check()
    found: list[list[str]] = []
    answers = passes.answers

    def seen(session: ChatSession, item: Item, _: passes.Memory) -> list[str]:
        made = answers(session, item)
        found.append([report.reuse for report in session.reports])
        return made

    before = chat.reuse, chat.recall.kind
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(passes.PASSES, "answers", replace(passes.PASSES["answers"], run=seen))
        one.measure(never)
    each = [["once"] * 3] * 2 + [["once", "refresh", "refresh"], ["blind", "once", "once"]]
    assert found == [*each, ["once", "recall", "recall"]] * 2
    cells = one.cells()
    mine = [("adakv", reuse) for reuse in command.REUSES]
    assert [(c.policy, c.reuse) for c in cells] == [("full", "once"), *mine]
    by = {c.reuse: c for c in cells[1:]}
    assert by["recall"].answers == by["refresh"].answers
    assert by["recall"].by_group[0] == by["once"].by_group[0]
    assert (chat.reuse, chat.recall.kind) == before
    assert not chat.recall.nbytes
    # Without questions nothing is measured twice.
    one = command.Run(chat, ["facts", "ppl"], [CHAT], wanted, ["recall", "once"])
    one.measure(never)
    found = [[c.task, c.policy, c.reuse] for c in one.cells()]
    asked = "facts full once, facts adakv recall, facts adakv once"
    told = f"{asked}, ppl full once, ppl adakv recall"
    assert found == [line.split() for line in told.split(", ")]


def test_a_tier_whose_prompt_was_read_for_another_policy_is_the_same() -> None:
    """A document that is computed once for all policies goes to each one's tier all the same: the
    answers are those of a chat that read it itself."""
    chat = minikv.load(policy="full")
    item = next(CHATS["followup"].items(chat.tokenizer, 600, 6, 5))
    wanted = [*full(), *(EvictionConfig.read("adakv", budget=b) for b in ("48", "128"))]
    one = command.Run(chat, ["followup"], [item], wanted, ["once", "recall"])
    one.measure(never)
    made = [cell.answers for cell in one.cells()]
    for number, budget in ((3, "48"), (4, "128")):
        alone = minikv.load(policy="adakv", budget=budget, reuse="recall", tier="ram")
        assert passes.answers(alone, item) == made[number][0]
    assert made[3] != made[1], "recall and once answer alike: the test sees nothing"


def test_what_cannot_be_is_refused_before_anything_is_measured() -> None:
    """A policy that cannot recall, and too few bytes."""
    chat = minikv.load(policy="full")
    strided = [*full(), EvictionConfig.read("roco", budget="64", stride=32)]
    recalls, once = (
        command.Run(chat, ["followup"], [CHAT], strided, [reuse]) for reuse in ("recall", "once")
    )
    refused("--reuse recall is not possible: with a stride", recalls.check)
    once.check()
    few = [*full(), EvictionConfig.read("adakv", budget="1KiB")]
    item = Item("word " * 90, ("What?",), (("word",),))
    refused("budget 1KiB, which is", command.Run(chat, ["facts"], [item], few).check)


@pytest.fixture(scope="module")
def about() -> Item:
    """A document of 1,000 tokens with three questions, each asked apart."""
    (item,) = tasks.facts(minikv.load(policy="full").tokenizer, 1000, 1, 77, questions=3)
    assert item.apart
    assert len(item.questions) == 3
    return item


def test_questions_that_are_asked_apart_are_each_the_first(about: Item) -> None:
    """Under each reuse, the answers are those of a chat of its own for each question."""
    chat = minikv.load(policy="full")
    seen = EvictionConfig.read("snapkv", budget="64")
    wanted = [*full(), seen]
    one = command.Run(chat, ["facts", "agree"], [about], wanted, ["once", "blind"])
    one.check()
    one.measure(never)
    made = [cell.answers for cell in one.cells()[:3]]
    for number, reuse in ((1, "once"), (2, "blind")):
        for question, answer in zip(about.questions, made[number][0], strict=True):
            chat.reset()
            chat.configure(seen)
            chat.reuse = reuse
            chat.attach(about.document, "report.txt")
            assert "".join(chat.ask(question, max_tokens=16)) == answer
    assert made[1] != made[2], "seen and unseen answer alike: the test sees nothing"
    cells = one.cells()
    assert [c.n for c in cells] == [3] * 6
    assert not any(c.by_group for c in cells)
    assert [len(row) for row in cells[0].scores] == [3]


@pytest.mark.parametrize(
    ("policy", "reuse"), [("snapkv", "once"), ("global-span", "blind"), ("kvzip", "blind")]
)
def test_what_is_shared_is_as_if_each_was_alone(policy: str, reuse: str, about: Item) -> None:
    """KL beside the full cache, also under a policy that reads twice, without `Rereading` and after
    answers to the same prompts."""
    chat = minikv.load(policy="full")
    some = replace(about, questions=about.questions[:2], right=about.right[:2])
    mine = [EvictionConfig.read(policy, budget=str(budget)) for budget in (48, 256)]
    memory: passes.Memory = {}
    alone = []
    for eviction in (*full(), *mine):
        chat.configure(eviction)
        chat.reuse = reuse if eviction.evicts else "once"
        alone.append(passes.PASSES["beside"].run(chat, some, memory))
    chat.reset()
    one = command.Run(chat, ["facts", "kl"], [some], [*full(), *mine], [reuse])
    one.measure(never)
    found = [cell.score for cell in one.cells() if cell.task == "kl"]
    flat = [[t[1] for answer in made for t in answer] for made in alone]
    assert found == [sum(values) / len(values) for values in flat]
    assert found[0] == 0.0 < found[2] <= found[1]
