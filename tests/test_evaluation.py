"""`minikv eval`: metrics worked by hand, files that are refused by line, and a small run."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from small import engine, ids, network
from typer.testing import CliRunner

import minikv
from minikv.attend import Attend, DenseAttend
from minikv.choice import Choice
from minikv.cli.evaluation import metrics, run, tasks
from minikv.cli.evaluation.files import Item, read_items
from minikv.cli.evaluation.measure import Shadow, agreement, negative_log_likelihood
from minikv.cli.evaluation.rereading import Rereading
from minikv.cli.main import app
from minikv.engine import Engine
from minikv.errors import UsageError
from minikv.policies import default_step, prompt_names


def test_wilson_interval() -> None:
    low, high = metrics.interval(0.9, 100)
    assert (round(low, 4), round(high, 4)) == (0.8256, 0.9448)
    assert metrics.interval(1.0, 20)[1] == 1.0
    assert metrics.interval(0.0, 20)[0] == 0.0
    assert metrics.interval(0.5, 0) == (0.0, 1.0)


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
        (metrics.retrieval, "Paragraph 3, or 4", ["Paragraph 3"], [], 0.5),
        (metrics.count, "There are 7.", ["7"], [], 1.0),
        (metrics.count, "None.", ["7"], [], 0.0),
        (metrics.code, "# comment\nreturn x", ["return x"], [], 1.0),
        (metrics.code, "return y", ["return x"], [], 0.88),
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


def record(**changes: object) -> str:
    good = {"context": "The fox.", "input": "Who?", "answers": ["fox"], "dataset": "qasper"}
    return json.dumps({k: v for k, v in (good | changes).items() if v is not None})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        (record(context=None), "line 2: no context"),
        (record(context=7), "line 2: context is not a text"),
        (record(answers=None), "line 2: no answers"),
        (record(answers="fox"), "line 2: answers is not a list of texts"),
        (record(answers=[]), "line 2: answers is empty"),
        (record(input=""), "line 2: input is empty"),
        (record(dataset="vcsum"), "line 2: dataset 'vcsum' is not supported"),
        (json.dumps({"input": "x", "outputs": ["y"]}), "line 2: input has no document"),
        (json.dumps({"input": "a\nb", "outputs": []}), "line 2: outputs is empty"),
    ],
)
def test_a_wrong_record_is_named_by_its_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(record() + "\n" + line + "\n")
    with pytest.raises(UsageError) as refused:
        list(read_items(path))
    assert says in str(refused.value)
    result = CliRunner().invoke(app, ["eval", str(path)])
    assert result.exit_code == 2
    assert says in result.stderr


def test_longbench_and_ruler_records(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    ruler = {"index": 0, "input": "Some words.\nA key is 17.\nWhat is the key?", "outputs": ["17"]}
    path.write_text(record() + "\n\n" + json.dumps(ruler) + "\n")
    first, second = read_items(path)
    assert (first.document, first.questions, first.right) == ("The fox.", ("Who?",), (("fox",),))
    assert first.metric is metrics.qa_f1
    assert second.document == "Some words.\nA key is 17."
    assert second.questions == ("What is the key?",)
    assert second.metric is metrics.contains
    empty = tmp_path / "e.jsonl"
    empty.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        list(read_items(empty))
    with pytest.raises(UsageError, match="cannot read"):
        list(read_items(tmp_path / "none.jsonl"))


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
        ["eval", "--tasks", "facts,followup,agree,ppl,loss", "--policy", "adakv,kvcrush(h2o)",
         "--budget", "64", "--length", "400", "-n", "3", "--json", str(out), "--csv", str(sheet)],
    )  # fmt: skip
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
        (["-n", "0"], "-n must be at least 1"),
        (["-o", "windov=3"], "none of these policies has an option 'windov'"),
        (["--decode", ","], "--decode names nothing"),
        (["--policy", "snapkv", "--stride", "32"], "snapkv cannot read a prompt in blocks"),
        (["--json", "/nowhere/out.json"], "there is no directory"),
        (["--json", "out.txt"], "cannot tell what to write"),
    ],
)
def test_wrong_arguments(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) <= 3


def test_every_policy_with_every_decode_policy() -> None:
    wanted = run.choices(["adakv", "full", "snapkv"], ["64", "20%"], ["none", "roco"], 0)
    assert [(c.policy, c.decode, str(c.budget)) for c in wanted[1:]] == [
        (p, d, b) for p in ("adakv", "snapkv") for d in ("none", "roco") for b in ("64", "20%")
    ]
    strided = run.choices(["roco", "tova"], ["64"], ["auto"], 0, 32)
    assert [(c.policy, c.decode, c.stride) for c in strided[1:]] == [
        ("roco", "roco", 32), ("tova", "tova", 32)
    ]  # fmt: skip
    few = run.choices(["snapkv", "l2"], ["64"], ["none"], 0, 0, {"window": "16"})
    assert few[1].policy_options["window"] == 16
    assert "window" not in few[2].policy_options


def test_the_bar_says_how_long() -> None:
    from minikv.cli.evaluation import show

    line = show.bar(30, 120, 60.0, "facts")
    assert line == f"facts  [{'=' * 7}{' ' * 23}] 30/120  3:00 left"
    assert show.bar(0, 5, 0.0, "ppl").endswith("0/5")


def test_the_map(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from minikv.cli.evaluation import show

    cell = run.Cell(
        "needle", "full", "none", "-", 0, 4, 0.5, 0.2, 0.8, 1.0,
        by_place=[(0.0, 1000, 0.0, 1), (0.0, 2000, 1.0, 1), (1.0, 1000, 1.0, 1),
                  (1.0, 2000, 0.0, 1)],
    )  # fmt: skip
    for name in ("map.svg", "map.png"):
        show.write([cell], {}, [tmp_path / name])
        assert (tmp_path / name).stat().st_size > 2000


def test_chats_are_not_disturbed_by_a_longer_document() -> None:
    """An item that does not fit is an error with the documented code, not a cut document."""
    chat = minikv.load(policy="full")
    long = Item("word " * 9000, ("What?",), (("word",),))
    from minikv.errors import ContextError

    with pytest.raises(ContextError):
        run.evaluate(chat, ["facts"], [long], run.choices([], [], [], 0), lambda *_: None)


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
        kv.configure(*Choice.read(name, budget=40).policies())
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
