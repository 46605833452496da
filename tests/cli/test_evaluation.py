"""`minikv eval`: metrics and intervals worked by hand, a small run, and runs that are stopped.

Files are in test_evaluation_files.py.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from small import engine, ids, network
from typer.testing import CliRunner

import minikv
from minikv.cache.attend import Attend, DenseAttend
from minikv.cache.budget import Budget
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.chat.transcript import Message
from minikv.cli.evaluation import command, intervals, metrics, run, show, tasks
from minikv.cli.evaluation.files import Item
from minikv.cli.evaluation.measure import Shadow, agreement, negative_log_likelihood
from minikv.cli.evaluation.rereading import Rereading
from minikv.cli.main import app
from minikv.engine.engine import Engine
from minikv.errors import ContextError, UsageError
from minikv.policies import default_step, prompt_names


def test_wilson_interval() -> None:
    low, high = intervals.wilson(0.9, 100)
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)
    assert intervals.wilson(1.0, 20)[1] == 1.0
    assert intervals.wilson(0.0, 20)[0] == 0.0
    assert intervals.wilson(0.5, 0) == (0.0, 1.0)


def test_an_interval_of_shares_is_over_documents() -> None:
    single = [[1.0]] * 90 + [[0.0]] * 10
    assert intervals.of_shares(single) == pytest.approx(intervals.wilson(0.9, 100))
    # Six answers that are always alike say as much as one, and Student's t makes it a little less.
    alike = intervals.of_shares([row * 6 for row in single])
    t = 1.9842
    assert alike == pytest.approx(intervals.wilson(0.9, 99 * (1.96 / t) ** 2), abs=1e-4)
    # Documents that do not differ at all are worth every question; more than that none is.
    t = 2.0096
    even = intervals.of_shares([[1.0, 0.0]] * 50)
    assert even == pytest.approx(intervals.wilson(0.5, 100 * (1.96 / t) ** 2), abs=1e-4)
    # All right: nothing is known of how alike they are, so a document counts once.
    low, high = intervals.of_shares([[1.0] * 6] * 50)
    assert (low, high) == pytest.approx(intervals.wilson(1.0, 50 * (1.96 / t) ** 2), abs=1e-4)
    assert intervals.of_shares([[1.0, 0.0, 1.0]]) == (None, None)
    assert intervals.of_shares([]) == (None, None)


def test_an_interval_of_means_is_over_documents() -> None:
    """Two sums and counts by hand: 3 + 1 over 2 + 2 tokens; the mean 1, its error (1, -1) / 4."""
    low, high = intervals.of_means([[2.0, 1.0], [0.0, 1.0]])
    assert (low, high) == pytest.approx((1 - 12.706 * 0.5, 1 + 12.706 * 0.5))
    # A document twice as long weighs twice as much, and does not count as two.
    rows = [[1.0] * 20, [2.0] * 10, [4.0] * 10]
    apart = [20 * (1 - 2), 10 * (2 - 2), 10 * (4 - 2)]
    error = (3 / 2 * sum(x * x for x in apart)) ** 0.5 / 40
    assert intervals.of_means(rows) == pytest.approx((2 - 4.303 * error, 2 + 4.303 * error))
    assert intervals.of_means([[1.0, 2.0]]) == (None, None)


@pytest.mark.parametrize(("documents", "quantile"), [(12, 2.201), (31, 2.042), (201, 1.972)])
def test_students_t_beyond_the_table(documents: int, quantile: float) -> None:
    rows = [[float(i % 2)] for i in range(documents)]
    mean = sum(r[0] for r in rows) / documents
    error = (sum((r[0] - mean) ** 2 for r in rows) / documents / (documents - 1)) ** 0.5
    low, _ = intervals.of_means(rows)
    assert low is not None
    assert (mean - low) / error == pytest.approx(quantile, abs=5e-4)


@pytest.mark.parametrize(
    ("metric", "answer", "right", "classes", "score"),
    [
        (metrics.exact, " Velgate ", ["Velgate"], [], 1.0),
        (metrics.exact, "velgate", ["Velgate"], [], 0.0),
        (metrics.contains, "It is 12 and 7.", ["12", "8"], [], 0.5),
        (metrics.contains_any, "It is 12 and 7.", ["12", "8"], [], 1.0),
        (metrics.qa_f1, "The red fox", ["a red wolf", "fox"], [], 2 / 3),
        (metrics.qa_f1, "", ["fox"], [], 0.0),
        (metrics.classification, "Food or Sport", ["Food"], ["Food", "Sport"], 0.5),
        (metrics.classification, "Fast food", ["Fast food"], ["food", "Fast food"], 1.0),
        (metrics.classification, "Weather", ["Food"], ["Food", "Sport"], 0.0),
        # Official: the name after one that is taken out is skipped, and stays.
        (
            metrics.classification,
            "Human group or body",
            ["Human group or body"],
            ["Human", "Human group", "Human group or body"],
            0.5,
        ),
        (metrics.classification, "ab", ["ab"], ["a", "b", "ab"], 0.5),
        (metrics.classification, "ab", ["ab"], ["a", "ab", "b"], 1.0),
        (metrics.classification, "ab or c", ["x", "c"], ["a", "ab", "c"], 1 / 3),
        (metrics.retrieval, "Paragraph 3, or 4", ["Paragraph 3"], [], 0.5),
        (metrics.retrieval, "Paragraph 4", ["Paragraph 3", "Paragraph 4"], [], 1.0),
        (metrics.count, "There are 7.", ["7"], [], 1.0),
        (metrics.count, "7 or 8, so 8", ["7", "8"], [], 2 / 3),
        (metrics.count, "None.", ["7"], [], 0.0),
        (metrics.code, "# comment\nreturn x", ["return x"], [], 1.0),
        (metrics.code, "return y", ["return x"], [], 0.88),
        (metrics.code, "\n    return x\nmore", ["    return x"], [], 1.0),
    ],
)
def test_metrics(
    metric: metrics.Metric, answer: str, right: list[str], classes: list[str], score: float
) -> None:
    assert metric(answer, right, classes) == pytest.approx(score)


def test_likeness_and_agreement() -> None:
    assert metrics.lcs("abcde", "ace") == 3
    assert metrics.likeness("a b c d", "a c d") == pytest.approx(6 / 7)
    assert metrics.likeness("", "") == 1.0
    assert agreement("a b c", "a b c").exact
    assert agreement("a b c", "a x c").first == 1
    assert agreement("a b", "a b c").first == 2
    assert not agreement("a b", "a b c").exact


class Bytes:
    """A codec of one token per character."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_needles_lie_where_they_should() -> None:
    items = list(tasks.needle(Bytes(), [2000, 4000], 2, 5))
    assert len(items) == 2 * 5 * 2
    for item in items:
        assert item.where is not None
        depth, length = item.where
        assert abs(len(item.document) - length) < 160
        answer = item.right[0][0]
        at = item.document.index(answer) / len(item.document)
        assert abs(at - depth) < 0.12
        assert item.document.count(answer) == 1 or len(answer) < 4
    assert len({item.document for item in items}) == len(items)


def test_ppl_is_that_of_a_plain_forward() -> None:
    """Under the full cache, token by token or at once."""
    net = network()
    tokens = ids(60)
    losses = negative_log_likelihood(engine(net), tokens, 40)
    with torch.inference_mode():
        states = net.hidden(torch.tensor(tokens), DenseAttend((None,) * 3))
        want = torch.nn.functional.cross_entropy(
            net.logits(states[39:-1]), torch.tensor(tokens[40:]), reduction="none"
        )
    assert losses == pytest.approx(want.tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("windows", [None, (20, None, 30)])
def test_the_shadow_sees_what_was_lost(windows: tuple[int | None, ...] | None) -> None:
    net = network(windows=windows)
    for policy, step, nothing in (("full", "none", True), ("streaming", "streaming", False)):
        kv = engine(net, policy, step, 16).kv
        shadow = Shadow(kv)
        kv.begin(50)
        with torch.inference_mode():
            net.forward(torch.tensor(ids(50)), shadow)
            for token in range(6):
                net.forward(torch.tensor([token]), shadow)
        lost = torch.stack(shadow.lost)
        assert lost.shape == (6, 3)
        if nothing:
            assert float(lost.abs().max()) < 1e-5
        else:
            assert float(lost.min()) > 0.0
            assert float(lost.max()) < 1.0


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
            "3",
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
        (["--length", "199"], "a document of 199 tokens holds no fact"),
        (["--length", "100,1000", "--tasks", "needle,ppl"], "a document of 100 tokens holds no"),
        (["-n", "0"], "-n must be at least 1"),
        (["-o", "windov=3"], "none of these policies has an option 'windov'"),
        (["--decode", ","], "--decode names nothing"),
        (["--policy", "snapkv", "--stride", "32"], "snapkv cannot read a prompt in blocks"),
        (["--policy", "full", "--decode", "roco", "--stride", "32"], "full cannot read a prompt"),
        (["--budget", "64,20"], "budget 20 is too small for adakv with roco"),
        (["--policy", "streaming", "--budget", "6,4"], "budget 4 is too small for streaming with"),
        (
            ["--policy", "hashevict", "--stride", "32", "--budget", "45"],
            "budget 45 is too small for hashevict\n  the smallest useful budget is 46 rows",
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


def test_every_policy_with_every_decode_policy() -> None:
    wanted = run.choices(["adakv", "full", "snapkv"], ["64", "20%"], ["none", "roco"], 0)
    assert [(c.policy, c.decode, str(c.budget)) for c in wanted[1:]] == [
        (p, d, b)
        for p, d in (
            ("adakv", "none"),
            ("adakv", "roco"),
            ("full", "roco"),
            ("snapkv", "none"),
            ("snapkv", "roco"),
        )
        for b in ("64", "20%")
    ]
    for plain in ("auto", "none"):
        assert len(run.choices(["full"], ["64"], [plain], 0)) == 1
    assert len(run.choices(["full", "roco"], ["64"], ["auto"], 0, 32)) == 2
    strided = run.choices(["roco", "tova"], ["64"], ["auto"], 0, 32)
    assert [(c.policy, c.decode, c.stride) for c in strided[1:]] == [
        ("roco", "roco", 32),
        ("tova", "tova", 32),
    ]
    with pytest.raises(UsageError, match=r"^roco has no option 'windov'$"):
        EvictionConfig.read("roco", stride=32, options={"windov": 3})
    few = run.choices(["snapkv", "l2"], ["64"], ["none"], 0, 0, {"window": "16"})
    assert few[1].policy_options["window"] == 16
    assert "window" not in few[2].policy_options


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


def _cell(task: str, policy: str, decode: str, budget: str = "64", **more: Any) -> run.Cell:
    return run.Cell(task, policy, decode, budget, 0, 4, 0.5, 0.2, 0.8, 0.3, **more)


def test_rows_are_told_apart_by_their_decode_policy(tmp_path: Path) -> None:
    """Questions and maps name it where one was chosen, and not where it goes without saying."""
    plain = _cell("followup", "full", "none", "-", by_question=[1.0, 1.0])
    chosen = [_cell("followup", "snapkv", d, by_question=[1.0, 0.0]) for d in ("roco", "none")]
    assert show.names([plain, *chosen]) == ["full", "snapkv with roco 64", "snapkv with none 64"]
    text = show.table([plain, *chosen])
    for name in ("snapkv with roco 64", "snapkv with none 64"):
        assert f"\n{name} 100.0%   0.0%" in text
    auto = [_cell("followup", name, default_step(name)) for name in ("snapkv", "streaming")]
    assert show.names([plain, *auto]) == ["full", "snapkv 64", "streaming 64"]
    assert show.names([plain, _cell("ppl", "full", "roco")]) == ["full", "full with roco 64"]
    strided = run.Cell("facts", "tova", "tova", "64", 32, 4, 0.5, 0.2, 0.8, 0.3)
    assert show.names([plain, strided]) == ["full", "tova /32 64"]

    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    places = [(0.0, 1000, 0.5, 4)]
    mapped = [_cell("needle", "snapkv", d, by_place=places) for d in ("roco", "none")]
    with pyplot.rc_context({"svg.fonttype": "none"}):
        show.write(mapped, {}, [tmp_path / "map.svg"])
    drawn = (tmp_path / "map.svg").read_text()
    for name in ("snapkv with roco 64", "snapkv with none 64"):
        assert f">{name}<" in drawn


def test_agreement_is_shown_in_full() -> None:
    """Where answers begin to differ and their ROUGE-L, in the table and the CSV."""
    plain = _cell("agree", "full", "none", "-", more={"rouge_l": 1.0})
    mine = _cell(
        "agree", "snapkv", "none", more={"rouge_l": 0.8125, "median_first_difference": 3.0}
    )
    other = _cell("facts", "snapkv", "none")
    head, first, second = show.table([plain, mine]).splitlines()[1:]
    assert head.endswith("  held  ROUGE-L  words before difference")
    assert first.split()[-2:] == ["1.000", "-"]
    assert second.split()[-2:] == ["0.812", "3"]
    assert "ROUGE-L" not in show.table([other])
    rows = list(csv.DictReader(io.StringIO(show.as_csv([plain, mine, other]))))
    assert [(r["rouge_l"], r["median_first_difference"]) for r in rows] == [
        ("1.000000", ""),
        ("0.812500", "3.000000"),
        ("", ""),
    ]


def test_no_zero_has_a_sign() -> None:
    cell = run.Cell("loss", "full", "none", "-", 0, 4, -1e-9, -2e-9, 1e-9, 1.0)
    assert "-0.0" not in show.table([cell])
    assert "-0.0" not in show.as_csv([cell])
    assert cell.record()["score"] == -1e-9, "what was measured stays"


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
        r"error: needle, document (\d+), the shortest: budget 5% of (\d+) tokens is (\d+) rows per "
        r"head, too small for adakv with roco",
        line,
    )
    assert found is not None, line
    number, tokens, rows = map(int, found.groups())
    assert 6 <= number <= 10
    assert rows == round(0.05 * tokens) < 37
    told = re.fullmatch(r"  nothing was measured; .* is 37 tokens per head, or (\d+)%", hint)
    assert told is not None, hint
    result = CliRunner().invoke(app, [*arguments, "--policy", "adakv", "--budget", f"{told[1]}%"])
    assert "something was measured" in result.stderr


@pytest.mark.parametrize("task", ["facts", "ppl", "loss"])
def test_the_least_share_is_that_of_the_first_prompt(task: str) -> None:
    """A share one row above what is refused works, and one row below is what the run would refuse,
    whatever the task feeds first."""
    chat = minikv.load(policy="full")
    items = [
        Item("word " * n, ("What?",), (("word",),), source=f"x.jsonl, line {n}") for n in (90, 60)
    ]
    tokens = run._READS["answers" if task == "facts" else task](chat, items[1])
    least = EvictionConfig.read("adakv").least_rows()

    def share(rows: int) -> EvictionConfig:
        return replace(
            EvictionConfig.read("adakv", budget="50%"),
            budget=Budget("share", Fraction(rows, tokens)),
        )

    small = run.Run(chat, [task], items, [*full(), share(least - 1)])
    with pytest.raises(UsageError, match=r"^x.jsonl, line 60, the shortest: budget"):
        small.check("mine")
    with pytest.raises(UsageError, match="is too small for adakv with roco"):
        small.measure(never)
    assert small.completed == 1
    enough = run.Run(chat, [task], items, [*full(), share(least)])
    enough.check("mine")
    enough.measure(never)
    assert enough.completed == 2


def test_bytes_too_few_are_refused_before_anything_is_measured() -> None:
    chat = minikv.load(policy="full")
    item = Item("word " * 90, ("What?",), (("word",),))
    one = run.Run(chat, ["facts"], [item], [*full(), EvictionConfig.read("adakv", budget="1KiB")])
    with pytest.raises(UsageError, match="budget 1KiB, which is"):
        one.check("mine")


def test_the_bar_says_how_long() -> None:
    line = show.bar(30, 120, 60.0, "facts")
    assert line == f"facts  [{'=' * 7}{' ' * 23}] 30/120  3:00 left"
    assert show.bar(0, 5, 0.0, "ppl").endswith("0/5")


def test_the_map(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cell = run.Cell(
        "needle",
        "full",
        "none",
        "-",
        0,
        4,
        0.5,
        0.2,
        0.8,
        1.0,
        by_place=[
            (0.0, 1000, 0.0, 1),
            (0.0, 2000, 1.0, 1),
            (1.0, 1000, 1.0, 1),
            (1.0, 2000, 0.0, 1),
        ],
    )
    for name in ("map.svg", "map.png"):
        show.write([cell], {}, [tmp_path / name])
        assert (tmp_path / name).stat().st_size > 2000


def full() -> list[EvictionConfig]:
    return run.choices([], [], [], 0)


def never(done: int, total: int) -> None:
    """Progress that nobody looks at."""


@pytest.mark.parametrize("task", ["facts", "ppl", "loss"])
def test_nothing_is_cut_to_fit(task: str) -> None:
    """An item that does not fit is an error with the documented code, not a cut document."""
    chat = minikv.load(policy="full")
    long = Item("word " * 9000, ("What?",), (("word",),), source="x.jsonl, line 7")
    fits = Item("word " * 90, ("What?",), (("word",),))
    one = run.Run(chat, [task], [fits, long], full())
    with pytest.raises(ContextError) as refused:
        one.check("mine")
    assert str(refused.value).startswith("x.jsonl, line 7: needs ")
    assert "8,192 positions" in str(refused.value)
    if task != "ppl":  # where a long document takes long
        with pytest.raises(ContextError):
            one.measure(never)
        assert one.completed == 1
    with pytest.raises(ContextError, match="mine, document 1: needs"):
        run.Run(chat, [task], [Item(long.document, ("What?",), (("word",),))], full()).check("mine")


def test_every_answer_must_have_room() -> None:
    """The check counts what a chat feeds, at least, whatever its answers are."""
    chat = minikv.load(policy="full")
    item = Item(
        "The town of Velmora has a mayor.",
        ("Who?", "What is it?", "Where?"),
        (("a",),) * 3,
        max_tokens=8,
    )
    one = run.Run(chat, ["followup"], [item], full())
    lengths: list[int] = []
    reset = chat.reset
    chat.reset = lambda **_: (lengths.append(len(chat.fed)), reset())[1]  # type: ignore
    one.measure(never)
    chat.max_context = max(lengths) - 1
    with pytest.raises(ContextError) as refused:
        one.check("followup")
    needed = int(str(refused.value).split("needs ")[1].split()[0])
    assert max(lengths) <= needed <= max(lengths) + 3 * 8
    chat.max_context = needed
    one.check("followup")


def test_perplexity_begins_as_a_chat_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the BOS and what stands before the user's words; the last quarter is scored."""
    chat = minikv.load(policy="full")
    fed: list[tuple[list[int], int]] = []

    def spy(engine: Engine, tokens: list[int], read: int) -> list[float]:
        fed.append((tokens, read))
        return negative_log_likelihood(engine, tokens, read)

    monkeypatch.setattr(run, "negative_log_likelihood", spy)
    text = "The mill was cold. " * 20
    one = run.Run(chat, ["ppl"], [Item(text, ("What?",), (("a",),))] * 2, full())
    one.measure(never)
    tokens, read = fed[0]
    plain = chat.tokenizer.encode(text)
    start = tokens[: len(tokens) - len(plain)]
    assert start
    assert tokens[len(start) :] == plain
    assert chat.template.opening([Message("user", text)])[: len(tokens)] == tokens
    assert read == len(start) + 3 * len(plain) // 4
    assert one.cells()[0].n == 2 * (len(tokens) - read)


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


def test_json_has_no_infinity() -> None:
    cell = run.Cell("ppl", "full", "none", "-", 0, 4, 9.0, 0.0, float("inf"), 1.0)
    assert cell.record()["high"] is None
    assert cell.record()["score"] == 9.0


def test_what_was_measured_is_kept_when_a_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C in the second policy of the third document: two documents, of every policy."""
    out, asked, ask = tmp_path / "out.json", 0, run._answers

    def answers(chat: ChatSession, item: Item) -> list[str]:
        nonlocal asked
        asked += 1
        if asked == 6:
            raise KeyboardInterrupt
        return ask(chat, item)

    monkeypatch.setattr(run, "_answers", answers)
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


def test_needles_of_different_lengths_are_different() -> None:
    """1000 apart in length, and one apart in number, were the same."""
    items = list(tasks.needle(Bytes(), [1000, 2000], 2, 5, depths=(0.5,)))
    assert len({item.right for item in items}) == 4


@pytest.mark.parametrize("windows", [None, (20, None, 30)])
def test_a_document_read_once_is_as_if_each_had_read_it(
    windows: tuple[int | None, ...] | None,
) -> None:
    """Bit for bit, for every prompt policy: what is kept, the logits, those of a second prompt."""
    net, forwards = network(windows=windows), 0

    class Counted:
        def forward(self, tokens: torch.Tensor, kv: Attend) -> torch.Tensor:
            nonlocal forwards
            forwards += len(tokens) == 150
            return net.forward(tokens, kv)

    kv = engine(net).kv
    shared = Engine(Rereading(Counted(), kv), kv)
    names = [*prompt_names(), "h2o+ada+pyramid", "kvcrush(h2o)", "snapkv+critical+turns"]
    for name in names:
        alone = engine(net, name, default_step(name), 40)
        shared.reset()
        kv.configure(*EvictionConfig.read(name, budget=40).policies())
        for tokens in (ids(150), ids(20, seed=7)):
            assert torch.equal(alone.prompt(tokens), shared.prompt(tokens)), name
            for layer in range(3):
                for head in range(kv.shape.kv_heads):
                    assert torch.equal(alone.kv.kept(layer, head), kv.kept(layer, head)), name
            assert torch.equal(alone.step(5), shared.step(5)), name
    assert 1 < forwards < len(names) // 2


def test_loss_is_the_same_however_the_document_was_read() -> None:
    """The shadow given the keys, and the shadow that saw them pass."""
    net = network()
    kv = engine(net, "snapkv", "roco", 40).kv
    lost = []
    for given in (False, True):
        shared = Rereading(net, kv)
        Engine(shared, kv).reset()
        if given:
            Engine(shared, kv).prompt(ids(100))
            shadow = Shadow(kv, shared.keys())
        else:
            shadow = Shadow(kv)
            kv.begin(100)
            net.forward(torch.tensor(ids(100)), shadow)
        for token in range(5):
            net.forward(torch.tensor([token]), shadow)
        lost.append(torch.stack(shadow.lost))
    assert torch.equal(*lost)
    assert float(lost[0].min()) > 0.0


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
