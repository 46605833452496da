"""Figures in words: what was saved is the same wherever it is said, and never negative."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from small_chat import reported
from tables import table
from test_kept import HOSTILE, STORY, chat, facts
from typed import invoke, on_screen

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.chat import compare, kept
from minikv.cli.chat.kept import Part
from minikv.cli.eval import command, results
from minikv.cli.eval.items import Item
from minikv.cli.export import page
from minikv.cli.export.facts import gather
from minikv.cli.measure import choices
from minikv.cli.screen import render
from minikv.cli.screen.terminal import BLOCKS
from minikv.policies import registry

SHORT = "Velgate exports mostly salt."
LONG = SHORT + " The mill of Orlin is closed." * 40


@pytest.fixture(scope="module")
def session() -> ChatSession:
    return minikv.load(policy="full")


@pytest.mark.parametrize(
    ("policy", "text"),
    [("full", SHORT), ("full", LONG), ("adakv", SHORT), ("h2o", SHORT), ("snapkv", LONG)],
)
def test_all_that_say_what_was_saved_agree(session: ChatSession, policy: str, text: str) -> None:
    """The line under the answer, /stats, /compare, the HTML page, the record."""
    session.reset()
    session.configure(EvictionConfig.read(policy, budget=128))
    session.attach(text, "n.txt")
    answer = "".join(session.ask("What does Velgate export?", max_tokens=4))
    report = reported(session)
    kv = json.loads(json.dumps(report.to_dict()))["kv_bytes"]
    saved = max(0.0, 1 - kv["held"] / kv["full"])
    words = f"{int(1000 * saved) / 10:.1f}% saved"
    if policy != "snapkv":
        assert saved == 0
        assert kv["held"] - kv["policy_state"] == kv["full"]
        words = "nothing evicted"
    facts = gather(session)
    ran = compare.Run("x", answer, (), report)
    html, column = page.render(facts), compare.facts(ran, ran)["memory"]
    assert column == report.memory
    for place in (report.lines()[1], render.stats(report), html):
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


@table("""
    name         | words
    kvcrush      | bits=kv: a token has one bit per KV head; in the paper one per query head
    nacl         | draw=score: a token is drawn in proportion to its score; the release draws by
    draw         | draw=score
    roco         | with --stride statistics begin with the first block; the release's begin with
    keydiff      | the first 4 and the newest 10 tokens stay; paper and kvpress protect none
    l2           | kvpress and KVCache-Factory protect none
    tova         | the newest token stays; the release lets it go
    streaming    | keys keep their positions
    pyramidkv    | layers sum to the budget to the token
    adakv        | alpha=0.2, as in the authors' scripts
    h2o          | after another prompt policy its sums begin with
    scissorhands | one token leaves at every step; in the paper half of the cache
    hashevict    | the release compares the new key's (hash_with=key)
    rkv          | the release leaves them out (softmax=past)
    h2o+ada      | the authors' rounding drifts (rounding=official)
""")
def test_a_card_says_how_a_policy_differs_from_paper_and_release(name: str, words: str) -> None:
    """Of all its parts."""
    card = invoke("policies", "show", name).stdout.rstrip("\n")
    title, lines = card.split("\n\ndifferences from paper and release\n")
    assert title
    items = [" ".join(item.split()) for item in re.split(r"^- ", lines, flags=re.M)[1:]]
    assert any(item.startswith(words) or words in item for item in items), lines
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


# -- strips of blocks ------------------------------------------------------------------------
def test_only_nothing_is_blank_and_a_strip_is_as_high_as_its_share_of_the_largest() -> None:
    levels = {0.0: 0, 1e-9: 1, 0.125: 1, 0.126: 2, 1.0: 8, 1.5: 8, -0.1: 0}
    assert {share: render.level(share, 8) for share in levels} == levels
    assert (render.level(0.1 * 3, 10), render.level(1.0, 9)) == (3, 9)
    assert render.strip([0, 1, 4, 8], 8) == "| ▁▄█|"
    assert render.strip([0, 0], 0) == "|  |"
    # Percent are rounded down.
    shares = {0: "0%", 0.0001: "<1%", 0.01: "1%", 0.29: "29%", 0.999: "99%", 1: "100%"}
    assert {share: render.percent(share) for share in shares} == shares


# -- layers and heads -----------------------------------------------------------------------
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (4, 3), (32, 8), (80, 12)])
def test_every_head_and_layer_is_drawn_once(width: int, layers: int, heads: int) -> None:
    rows = [[float(1 + (7 * i + 3 * h) % 64) for h in range(heads)] for i in range(layers)]
    text = "\n".join(on_screen(kept.by_head(rows, width), width))
    largest = max(map(max, rows))
    assert f"█ is {largest:.0f} tokens" in " ".join(text.split())
    drawn = dict.fromkeys(range(heads), "")
    for line in text.split("\n"):
        for cell in line.split("head ")[1:]:
            number, strip, *_ = cell.split("|")
            drawn[int(number)] += strip
    for head in range(heads):
        column = [layer[head] for layer in rows]
        assert f"|{drawn[head]}|" == render.strip(column, largest)


def test_layers_in_equal_groups_where_they_do_not_fit() -> None:
    text, wide = (kept.by_head([[1.0] * 8] * 32, width) for width in (40, 80))
    assert re.search(r"\n  layers 0 to 15\n(.*\n)+  layers 16 to 31\n", text)
    assert "layers 0 to 31" in wide


# -- along the document, along the chat -----------------------------------------------------
def test_along_the_document_is_the_mean_of_each_slice() -> None:
    text = "abcdefgh" * 25
    held = torch.rand(2, 3, 201, generator=torch.Generator().manual_seed(1)) < 0.3
    found = facts(text, held, ("story.txt",))
    title, strip = kept.along(found, 80).split("\n")
    share = found.share().tolist()[1:]
    ends = [200 * i // 64 for i in range(65)]
    means = [sum(share[a:b]) / (b - a) for a, b in pairwise(ends)]
    assert strip.strip() == render.strip(means, max(means))
    most = render.percent(max(means))
    assert title == f"kept along story.txt, 64 slices of about 3 tokens: █ is {most} of the heads"
    # Few tokens and no document.
    held = torch.zeros(2, 3, 4, dtype=torch.bool)
    held[0, :, 2] = True
    title = "kept along the chat, a sign per token:"
    assert kept.along(facts("abc", held), 80) == f"{title} █ is 50% of the heads\n  |  █ |"
    held[:] = False
    assert kept.along(facts("abc", held), 80).startswith(f"{title} nothing\n")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_many_documents_with_hostile_names(width: int) -> None:
    found = facts("x" * 500)
    names = ["\x1b]0;evil\x07 [bold]\nname 中文" * 9, *(f"{i}.txt" for i in range(9))]
    parts = tuple(Part(name, 1 + 50 * i, 51 + 50 * i) for i, name in enumerate(names))
    found = replace(found, parts=parts)
    lines = on_screen(kept.along(found, width), width)
    assert lines[-1] == "  and 2 more documents"
    assert sum(line.startswith("  |") for line in lines) == 8
    assert not any("\x1b" in line for line in lines)


# -- the whole ------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [40, 80, 200])
def test_strips_of_a_chat(width: int) -> None:
    session = chat()
    assert kept.strips(session, width) == ""
    session.attach(STORY + HOSTILE, "story.txt")
    list(session.ask("Who?", 3))
    text = kept.strips(session, width)
    on_screen(text, width)
    assert "\x1b" not in text
    most = max(len(session.kept(layer, head)) for layer in range(3) for head in range(3))
    joined = " ".join(text.split())
    assert f"{BLOCKS[-1]} is {most} tokens, the most in one" in joined
    assert "kept along story.txt" in joined
