"""`minikv eval`, run as a command."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.eval import command, passes, run
from minikv.cli.eval.files import Item
from minikv.cli.main import app
from minikv.errors import UsageError


def test_a_small_run(tmp_path: Path) -> None:
    """The bundled model: the table, JSON and CSV agree, the full cache comes first."""
    out, sheet = tmp_path / "out.json", tmp_path / "out.csv"
    result = CliRunner().invoke(
        app,
        [
            "eval",
            "--tasks",
            "facts,followup,agree,ppl,loss",
            "--policy",
            "adakv,kvcrush(h2o)",
            "--budget",
            "64",
            "--length",
            "400",
            "-n",
            "2",
            "--json",
            str(out),
            "--csv",
            str(sheet),
        ],
    )
    assert result.exit_code == 0, result.stderr
    cells = json.loads(out.read_text())["cells"]
    assert [c["policy"] for c in cells[:3]] == ["full", "adakv", "kvcrush(h2o)"]
    assert len(cells) == 5 * 3
    by = {(c["task"], c["policy"]): c for c in cells}
    assert by["agree", "full"]["score"] == 1.0
    assert by["loss", "full"]["score"] == pytest.approx(0.0, abs=1e-5)
    assert by["loss", "adakv"]["score"] > 0.0
    assert by["ppl", "full"]["score"] > 1.0
    assert by["facts", "adakv"]["held"] < 0.5 * by["facts", "full"]["held"]
    assert len(by["followup", "full"]["by_question"]) >= 2
    rows = list(csv.DictReader(io.StringIO(sheet.read_text())))
    assert [float(r["score"]) for r in rows] == pytest.approx([c["score"] for c in cells], abs=1e-6)
    for task in ("facts", "followup", "agree", "ppl", "loss"):
        assert f"{task}\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tasks", "facts,nedle"], "unknown task 'nedle'"),
        (["--policy", "adakv,snapvk"], "unknown policy 'snapvk'"),
        (["--budget", "12x"], "cannot read the budget"),
        (["--length", "none"], "cannot read the lengths"),
        (["--length", "3"], "cannot read the lengths"),
        (["--length", "9" * 400], "cannot read the lengths"),
        (["--length", "9" * 5000], "cannot read the lengths"),
        (["--length", "199"], "a document of 199 tokens holds no fact"),
        (["--length", "100,1000", "--tasks", "needle,ppl"], "a document of 100 tokens holds no"),
        (["--tasks", "codes", "--length", "300"], "300 tokens is too short for the task codes"),
        (["--reuse", "recall,always"], "unknown reuse 'always'"),
        (["--reuse", ","], "--reuse names nothing"),
        (["-n", "0"], "-n must be at least 1"),
        (["--questions", "0"], "--questions must be at least 1"),
        (["-o", "windov=3"], "none of these policies has an option 'windov'"),
        (["--decode", ","], "--decode names nothing"),
        (["--policy", "snapkv", "--stride", "32"], "snapkv cannot read a prompt in blocks"),
        (["--policy", "full", "--decode", "roco", "--stride", "32"], "full cannot read a prompt"),
        (["--budget", "64,20"], "budget 20 is too small for adakv with h2o"),
        (["--policy", "streaming", "--budget", "6,4"], "budget 4 is too small for streaming with"),
        (
            ["--policy", "hashevict", "--stride", "32", "--budget", "45"],
            "budget 45 is too small for hashevict\n  the smallest useful budget is 46 tokens",
        ),
        (
            ["--policy", "adakv", "-o", "alloc=floor", "-o", "normalize=true"],
            "alloc=floor and normalize do not go together",
        ),
        (["--json", "/nowhere/out.json"], "there is no directory"),
        (["--json", "out.txt"], "cannot tell what to write"),
        (["--map", "out.svg"], "there is nothing to map"),
    ],
)
def test_wrong_arguments(arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "build", lambda _: pytest.fail("a model was loaded"))
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) <= 3


def test_recall_beside_the_rest(tmp_path: Path) -> None:
    """One run: the full cache, then every reuse; recall answers as refresh does."""
    out = tmp_path / "out.json"
    arguments = "eval --tasks back --policy adakv --budget 48 --length 500 -n 7 --json"
    result = CliRunner().invoke(
        app, [*arguments.split(), str(out), "--reuse", "once,refresh,blind,recall"]
    )
    assert result.exit_code == 0, result.stderr
    written = json.loads(out.read_text())
    assert written["facts"]["reuse"] == ["once", "refresh", "blind", "recall"]
    full, once, refresh, blind, recall = written["cells"]
    names = [c["reuse"] for c in (full, once, refresh, blind, recall)]
    assert names == ["once", "once", "refresh", "blind", "recall"]
    assert recall["by_question"] == refresh["by_question"]
    assert recall["more"]["same"] > once["more"]["same"]
    assert recall["by_question"][0] == full["by_question"][0]
    assert "same as full" in result.stdout


def test_a_map_needs_matplotlib_before_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "build", lambda _: pytest.fail("a model was loaded"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(
        app, ["eval", "--tasks", "needle", "--map", str(tmp_path / "map.png")]
    )
    assert result.exit_code == 2
    assert "a map needs matplotlib" in result.stderr


def test_a_decode_policy_beside_the_full_cache_is_measured() -> None:
    """The prompt stays whole; while an answer is written, a row leaves for each that comes."""
    result = CliRunner().invoke(
        app,
        [
            "eval",
            "--tasks",
            "ppl",
            "--policy",
            "full",
            "--decode",
            "roco",
            "--budget",
            "64",
            "--length",
            "200",
            "-n",
            "1",
        ],
    )
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.strip().splitlines()[2:]]
    assert [row[:3] for row in rows] == [["full", "none", "-"], ["full", "roco", "64"]]
    assert rows[0][3] != rows[1][3]
    held = [float(row[-1].rstrip("%")) for row in rows]
    assert held[1] < 0.8 * held[0]


def test_a_share_too_small_for_the_shortest_document_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """5 % of the longer documents would do; so would what the message says."""
    arguments = ["eval", "--tasks", "needle", "--length", "1000,400", "-n", "1"]

    def measured(self: run.Run, progress: run.Progress) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(run.Run, "measure", measured)
    result = CliRunner().invoke(app, [*arguments, "--budget", "5%", "--policy", "adakv"])
    assert result.exit_code == 2
    line, hint = result.stderr.strip().splitlines()
    found = re.fullmatch(
        r"error: needle, document (\d+), the shortest: budget 5% of (\d+) tokens is (\d+) "
        r"tokens per head, too small for adakv with h2o",
        line,
    )
    assert found is not None, line
    number, tokens, rows = map(int, found.groups())
    assert 6 <= number <= 10
    assert rows == round(0.05 * tokens) < 33
    told = re.fullmatch(
        r"  nothing was measured; .* (?:is|there is) 33 tokens per head, or (\d+)%", hint
    )
    assert told is not None, hint
    result = CliRunner().invoke(app, [*arguments, "--policy", "adakv", "--budget", f"{told[1]}%"])
    assert "something was measured" in result.stderr


def test_one_document_has_no_interval(tmp_path: Path) -> None:
    """None in JSON that any reader takes, nothing in CSV, a dash in the table."""
    out, sheet = tmp_path / "out.json", tmp_path / "out.csv"
    result = CliRunner().invoke(
        app,
        [
            "eval",
            "--tasks",
            "facts,ppl",
            "--policy",
            "adakv",
            "--budget",
            "64",
            "--length",
            "200",
            "-n",
            "1",
            "--json",
            str(out),
            "--csv",
            str(sheet),
        ],
    )
    assert result.exit_code == 0, result.stderr

    def refuse(name: str) -> None:
        raise AssertionError(name)

    cells = json.loads(out.read_text(), parse_constant=refuse)["cells"]
    assert [(c["low"], c["high"]) for c in cells] == [(None, None)] * 4
    rows = list(csv.DictReader(io.StringIO(sheet.read_text())))
    assert {(r["low"], r["high"]) for r in rows} == {("", "")}
    assert [line.split()[4] for line in result.stdout.splitlines() if "adakv" in line] == ["-"] * 2


def test_what_was_measured_is_kept_when_a_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C in the second policy of the third document: two documents, of every policy."""
    out, asked, ask = tmp_path / "out.json", 0, passes.answers

    def answers(chat: ChatSession, item: Item) -> list[str]:
        nonlocal asked
        asked += 1
        if asked == 6:
            raise KeyboardInterrupt
        return ask(chat, item)

    monkeypatch.setitem(passes.PASSES, "answers", replace(passes.PASSES["answers"], run=answers))
    arguments = [
        "eval",
        "--tasks",
        "facts",
        "--policy",
        "adakv",
        "--budget",
        "64",
        "-n",
        "4",
        "--length",
        "200",
        "--json",
        str(out),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130
    written = json.loads(out.read_text())
    assert [(c["policy"], c["n"]) for c in written["cells"]] == [("full", 2), ("adakv", 2)]
    assert written["facts"]["stopped_after"] == {"facts": "2 of 4"}
    assert f"documents measured: facts: 2 of 4; written to {out}" in result.stderr.replace("\n", "")
    assert "adakv" in result.stdout
    # Stopped before anything was measured: what an earlier run has written stays.
    asked = 5
    assert CliRunner().invoke(app, arguments).exit_code == 130
    assert json.loads(out.read_text()) == written


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("window=0", "give from 1 to 4096; the default is 32"),
        ("window=x", "give from 1 to 4096; the default is 32"),
        ("kernel=4", "give an odd number from 1 to 63; the default is 7"),
        ("pooling=min", "the default is max"),
        ("normalize=x", "give true or false; the default is false"),
    ],
)
def test_a_wrong_value_of_an_option_says_what_is_right(given: str, hint: str) -> None:
    name, value = given.split("=")
    with pytest.raises(UsageError) as refused:
        EvictionConfig.read("adakv", options={name: value})
    assert refused.value.hint == hint


def test_the_answers_stand_beside_the_scores(tmp_path: Path) -> None:
    """What was asked, what would be right, what each policy said and what it scored."""
    out = tmp_path / "out.json"
    arguments = "eval --policy adakv --budget 64 --length 1000 -n 4 --questions 2 --reuse blind"
    result = CliRunner().invoke(app, [*arguments.split(), "--json", str(out)])
    assert result.exit_code == 0, result.stderr
    written = json.loads(out.read_text())
    items = written["items"]["facts"]
    assert [len(item["questions"]) for item in items] == [2, 2]
    for c in written["cells"]:
        for item, given, scores in zip(items, c["answers"], c["scores"], strict=True):
            exact = [float(a.strip() in r) for a, r in zip(given, item["right"], strict=True)]
            assert scores == exact
        flat = [x for row in c["scores"] for x in row]
        assert c["score"] == sum(flat) / len(flat)
        assert c["n"] == 4
    assert [c["reuse"] for c in written["cells"]] == ["once", "blind"]


def test_agreement_perplexity_and_loss_of_records(tmp_path: Path) -> None:
    """With FILEs these are of the files; what is made here needs a task of its own."""
    line = {"input": "The key is 17.\n" * 20 + "What is the key?", "outputs": ["17"]}
    for name in ("vt", "cwe"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "validation.jsonl").write_text(json.dumps(line))
    out, sheet = tmp_path / "out.json", tmp_path / "out.csv"
    files = [str(tmp_path / name / "validation.jsonl") for name in ("vt", "cwe")]
    arguments = "--policy streaming --budget 32 --tasks agree,ppl,loss --length 100 --json".split()
    result = CliRunner().invoke(app, ["eval", *files, *arguments, str(out), "--csv", str(sheet)])
    assert result.exit_code == 0, result.stderr
    cells = json.loads(out.read_text())["cells"]
    kinds = ("", "agree of ", "ppl of ", "loss of ")
    names = [f"{kind}{name}" for name in ("vt", "cwe") for kind in kinds]
    assert [c["task"] for c in cells] == [n for name in names for n in (name, name)]
    by = {(c["task"], c["policy"]): c for c in cells}
    assert by["agree of vt", "full"]["score"] == 1.0
    assert by["loss of vt", "full"]["score"] == pytest.approx(0.0, abs=1e-5)
    assert by["loss of vt", "streaming"]["score"] > 0.0
    assert by["ppl of vt", "full"]["score"] > 1.0
    tasks = [row["task"] for row in csv.DictReader(io.StringIO(sheet.read_text()))]
    assert tasks == [c["task"] for c in cells]
    assert "ppl of cwe\npolicy" in result.stdout


def test_scores_of_groups_are_shown_apart(tmp_path: Path) -> None:
    path = tmp_path / "qasper_e.jsonl"
    path.write_text(
        "\n".join(
            json.dumps(
                {
                    "context": f"The fox number {n}.",
                    "input": "Who?",
                    "answers": ["fox"],
                    "dataset": "qasper",
                    "length": n,
                }
            )
            for n in (10, 20, 9000)
        )
    )
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["eval", str(path), "--policy", "full", "--json", str(out)])
    assert result.exit_code == 0, result.stderr
    assert "by group  0-4k (2)  8k+ (1)\n" in result.stdout
    (cell,) = json.loads(out.read_text())["cells"]
    assert [(name, n) for name, _, n in cell["by_group"]] == [("0-4k", 2), ("8k+", 1)]
