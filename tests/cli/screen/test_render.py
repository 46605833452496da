"""Figures in words: what was saved is the same wherever it is said, and never negative."""

from __future__ import annotations

import json
import re

import pytest
from typed import invoke

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.chat import compare
from minikv.cli.eval import command, results
from minikv.cli.eval.items import Item
from minikv.cli.export import page
from minikv.cli.export.facts import gather
from minikv.cli.measure import choices
from minikv.cli.screen import render
from minikv.policies import registry

SHORT = "Velgate exports mostly salt."
LONG = SHORT + " The mill of Orlin is closed." * 40


@pytest.fixture(scope="module")
def session() -> ChatSession:
    return minikv.load(policy="full")


@pytest.mark.parametrize(
    ("policy", "text", "words"),
    [
        ("full", SHORT, "nothing evicted"),
        ("full", LONG, "nothing evicted"),
        ("adakv", SHORT, "nothing evicted"),
        ("h2o", SHORT, "nothing evicted"),
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
    html, column = page.render(facts), compare.facts(ran, ran)["memory"]
    assert column == report.memory
    for place in (report.lines()[1], render.stats(report), page.as_markdown(facts), html):
        assert f"({words})" in place
        assert not re.search(r"-\d+(\.\d+)?%", place)
    figure = f"{words.removesuffix(' saved')}" if saved else "–"
    assert f'<dd class="figure">{figure}</dd>' in html


def test_a_measurement_holds_no_more_than_all() -> None:
    """`minikv eval` over a document that fits into the budget: every policy holds 100 %, also one
    with data of its own beside the tokens."""
    chat = minikv.load(policy="full")
    wanted = choices("adakv,h2o", "128", "auto")
    measured = command.Run(chat, ["facts"], [Item(SHORT, ("What?",), (("salt",),))], wanted)
    measured.measure(lambda done, total: None)
    cells = measured.cells()
    assert [cell.held for cell in cells] == [1.0, 1.0, 1.0]
    assert results.table(cells).count("100.0%") >= 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kvcrush", "bits=kv: a token has one bit per KV head; in the paper one per query head"),
        ("nacl", "draw=score: a token is drawn in proportion to its score; the release draws by"),
        ("draw", "draw=score"),
        ("roco", "with --stride statistics begin with the first block; the release's begin with"),
        ("keydiff", "the first 4 and the newest 10 tokens stay; paper and kvpress protect none"),
        ("l2", "kvpress and KVCache-Factory protect none"),
        ("tova", "the newest token stays; the release lets it go"),
        ("streaming", "keys keep their positions"),
        ("pyramidkv", "layers sum to the budget to the token"),
        ("adakv", "alpha=0.2, as in the authors' scripts"),
        ("h2o", "beside another prompt policy its sums begin with"),
        ("scissorhands", "one token leaves at every step; in the paper half of the cache"),
        ("hashevict", "the release compares the new key's (hash_with=key)"),
        ("rkv", "the release leaves them out (softmax=past)"),
        ("h2o+ada", "the authors' rounding drifts (rounding=official)"),
    ],
)
def test_a_card_says_how_a_policy_differs_from_paper_and_release(name: str, words: str) -> None:
    """Of all its parts; and JSON has the same lines."""
    card = invoke("policies", "show", name).stdout.rstrip("\n")
    title, lines = card.split("\n\ndifferences from paper and release\n")
    assert title
    items = [" ".join(item.split()) for item in re.split(r"^- ", lines, flags=re.M)[1:]]
    assert any(item.startswith(words) or words in item for item in items), lines
    record = json.loads(invoke("policies", "show", name, "--json").stdout)
    assert record["differences"] == items
    assert all(len(line) <= 80 for line in lines.splitlines())


def test_every_published_method_says_how_it_differs_and_names_only_its_options() -> None:
    for info in registry.methods():
        published = info.paper not in ("baseline", "-")
        assert bool(info.differences) == published, info.name
        own = {option.name: option for option in info.options}
        for line in info.differences:
            assert set(re.findall(r"`(\w+)`", line)) <= {*own}, line
            for option, value in re.findall(r"\b([a-z_]+)=([\w.]+\w)", line):
                if option in own and own[option].choices:
                    assert value in own[option].choices, line
    assert "differences" not in invoke("policies", "show", "none").stdout
