"""Figures in words: what was saved is the same wherever it is said, and never negative."""

from __future__ import annotations

import json
import re

import pytest

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli import compare, render
from minikv.cli.evaluation import run, show
from minikv.cli.evaluation.files import Item
from minikv.cli.export import figures, html, markdown
from minikv.cli.export.facts import gather

SHORT = "Velgate exports mostly salt."
LONG = SHORT + " The mill of Orlin is closed." * 40


@pytest.fixture(scope="module")
def session() -> ChatSession:
    return minikv.load(policy="full")


@pytest.mark.parametrize(
    ("policy", "text", "words"),
    [
        ("full", SHORT, "nothing to save"),
        ("full", LONG, "nothing to save"),
        ("adakv", SHORT, "nothing to save yet"),
        ("h2o", SHORT, "nothing to save yet"),
        ("snapkv", LONG, None),
    ],
)
def test_all_that_say_what_was_saved_agree(
    session: ChatSession, policy: str, text: str, words: str | None
) -> None:
    """The line under the answer, /stats, /compare, the HTML page, the transcript, the record."""
    session.reset()
    session.configure(EvictionConfig.read(policy, budget=128))
    session.attach(text, "n.txt")
    answer = "".join(session.ask("What does Velgate export?", max_tokens=4))
    report = session.report
    assert report is not None
    kv = json.loads(json.dumps(report.to_dict()))["kv_bytes"]
    saved = max(0.0, 1 - kv["held"] / kv["full"])
    if words is None:
        words = f"{int(1000 * saved) / 10:.1f}% saved"
    else:
        assert saved == 0
        assert kv["held"] - kv["policy_state"] == kv["full"]
    facts = gather(session)
    ran = compare.Run("x", answer, (), report)
    page, column = html.render(facts), compare.facts(ran, ran)["KV held"]
    assert column.endswith(f", {words}")
    for place in (
        report.lines()[1],
        render.stats(report),
        dict(figures.rows(report))["KV held"],
        markdown.render(facts),
        page,
    ):
        assert f"({words})" in place
        assert not re.search(r"-\d+(\.\d+)?%", place)
    figure = f"{words.removesuffix(' saved')}" if saved else "–"
    assert f'<dd class="figure">{figure}</dd>' in page
    assert f"{round(100 * (1 - saved))}% of a full cache is held" in page


def test_a_measurement_holds_no_more_than_all() -> None:
    """`minikv eval` over a document that fits into the budget: every policy holds 100 %, also one
    with data of its own beside the tokens."""
    chat = minikv.load(policy="full")
    wanted = run.choices(["adakv", "h2o"], ["128"], ["auto"], 0)
    measured = run.Run(chat, ["facts"], [Item(SHORT, ("What?",), (("salt",),))], wanted)
    measured.measure(lambda done, total: None)
    cells = measured.cells()
    assert [cell.held for cell in cells] == [1.0, 1.0, 1.0]
    assert show.table(cells).count("100.0%") >= 3
