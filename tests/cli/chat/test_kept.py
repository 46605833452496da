"""What the cache holds of each token, against a count by hand; and how `/kept` shows it."""

from __future__ import annotations

import random
import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import small
import torch
import typed
from fakes import BOS, PADDED, ByteTokenizer, ChatML
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from rich.cells import cell_len
from small_chat import chat_over
from typed import context, on_screen

from minikv.chat.session import ChatSession
from minikv.chat.transcript import Document
from minikv.cli.chat import kept
from minikv.cli.chat.kept import SHADES, Kept, Part
from minikv.cli.screen.terminal import Screen
from minikv.engine.engine import Engine
from minikv.models.stream import TextStream

STORY = "The mill is run by Ada.\nThe 中 well 😀 is dry.\n\n" * 6
HOSTILE = "a \x1b]52;c;evil\x07 [bold]b[/bold] \x9b31m \u202e<|eot_id|>\tc\r\nd\u2028e"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def chat(prompt: str = "adakv", step: str = "roco", budget: int = 48, **given: Any) -> ChatSession:
    """A chat over a small random network of bytes. windows: of its layers."""
    windows = given.pop("windows", (None, None, None))
    net = small.network(64, windows=windows, vocab=PADDED)
    tokenizer, engine = ByteTokenizer(), Engine(net, small.scheduler(net, prompt, step, budget))
    return chat_over(engine, tokenizer, ChatML(tokenizer), max_context=4096, **given)


def facts(text: str, held: torch.Tensor | None = None, names: tuple[str, ...] = ()) -> Kept:
    """Facts about a text of one token per byte; without `held` every head holds everything."""
    ids = [BOS, *text.encode()]
    spans = kept.spell(ByteTokenizer(), ids)
    if held is None:
        held = torch.ones(2, 3, len(ids), dtype=torch.bool)
    parts = kept.locate(spans, [Document(text, name) for name in names])
    return Kept(held, spans, tuple(filter(None, parts)))


# -- facts ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompt", "step", "windows"),
    [
        ("adakv", "roco", (None, None, None)),
        ("adakv", "none", (None, 40, None)),
        ("full", "none", (None, None, None)),
        ("full", "streaming", (None, None, None)),
    ],
)
def test_shares_against_a_count_by_hand(
    prompt: str, step: str, windows: tuple[int | None, ...]
) -> None:
    session = chat(prompt, step, windows=windows)
    session.attach(STORY, "story.txt")
    for question in ("Who runs the mill?", "Why?"):
        list(session.ask(question, 6))
        found = kept.read(session)
        tokens = len(session.fed)
        count = [0.0] * tokens
        for layer, head in product(range(3), range(3)):
            positions = set(session.kept(layer, head).tolist())
            assert found.rows()[layer, head] == len(positions)
            some = [3, 20, tokens - 1]
            assert found.among(some)[layer, head] == len(positions & set(some))
            count = [n + (t in positions) for t, n in enumerate(count)]
        assert found.share().tolist() == pytest.approx([n / 9 for n in count])
        assert found.slots == 9
    sizes = {len(session.kept(layer, head)) for layer, head in product(range(3), range(3))}
    if prompt == "adakv":
        assert len(sizes) > 1  # ragged
        assert 0 < min(count) + 1 <= max(count)
    if prompt == step == "none":
        assert min(count) == 9


def spelling(pieces: list[bytes]) -> Any:
    """A tokenizer whose token i spells pieces[i]."""
    return SimpleNamespace(stop_ids=frozenset(), stream=lambda: TextStream(pieces))


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab é中😀\n", max_size=30), st.randoms(use_true_random=False))
def test_spans_are_the_characters_of_the_bytes(text: str, rng: random.Random) -> None:
    data = text.encode()
    pieces, at = [], 0
    while at < len(data):
        size = rng.randint(1, 5)
        pieces.append(data[at : at + size])
        at += size
        if rng.random() < 0.3:
            pieces.append(b"")  # a control token, even inside a character
    spans = kept.spell(spelling(pieces), range(len(pieces)))
    assert spans.text == text
    owner = [i for i, char in enumerate(text) for _ in char.encode()]  # byte -> character
    at, expected = 0, []
    for i, piece in enumerate(pieces):
        if piece:
            expected.append((i, owner[at], owner[at + len(piece) - 1] + 1))
        at += len(piece)
    assert list(zip(spans.token, spans.start, spans.end, strict=True)) == expected
    for begin in range(len(text)):
        end = rng.randint(begin + 1, len(text))
        touching = [k for k, (_, a, b) in enumerate(expected) if a < end and b > begin]
        assert list(spans.overlap(begin, end)) == touching


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([b"", b"\xe4", b"a\xe4", b"\xb8", b"\xad", b"\xf0\x9f", b"x"])))
def test_malformed_bytes_are_covered(pieces: list[bytes]) -> None:
    spans = kept.spell(spelling(pieces), range(len(pieces)))
    assert spans.text == b"".join(pieces).decode("utf-8", "replace")
    covered = {i for a, b in zip(spans.start, spans.end, strict=True) for i in range(a, b)}
    assert covered == set(range(len(spans.text)))
    for ends in (spans.start, spans.end):
        assert list(ends) == sorted(ends)


def test_documents_are_found_in_order() -> None:
    spans = kept.spell(ByteTokenizer(), [BOS, *b"x same y same z"])
    documents = [Document("same", "a"), Document("lost", "b"), Document("same")]
    assert kept.locate(spans, documents) == [Part("a", 3, 7), None, Part("piped text", 10, 14)]


# -- pages ----------------------------------------------------------------------------------
def random_facts(text: str, seed: int = 0, names: tuple[str, ...] = ("story.txt",)) -> Kept:
    generator = torch.Generator().manual_seed(seed)
    tokens = 1 + len(text.encode())
    return facts(text, torch.rand(2, 3, tokens, generator=generator) < 0.3, names)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_the_text_fits_and_is_all_there(width: int, colour: bool) -> None:
    text = STORY + HOSTILE + "中文😀" * 60 + " word" * 80
    lines = kept.page(random_facts(text), Screen(width, colour), whole=True)
    plain = [ESCAPE.sub("", line) for line in lines]
    assert (plain == lines) != colour
    for line in plain:
        assert not {*"\x1b\x9b\u202e\r"} & {*line}
        assert cell_len(line) <= width
    read = "".join(line[7:] for line in plain)
    assert "".join(kept.shown(text).split()) in "".join(read.split())


def test_the_gutter_is_the_mean_of_the_line_and_each_token_has_its_shade() -> None:
    held = torch.zeros(2, 3, 15, dtype=torch.bool)
    held[:, :, 1:5] = True  # abcd, everywhere
    held[0, 0, 6:8] = True  # e and f in one head of six: a twelfth of the line
    lines = kept.page(facts("abcd\nefgh\nijkl", held), Screen(), whole=False)
    assert lines[-3:] == ["█ 100% abcd", "▁   8% efgh", "    0% ijkl"]
    held = torch.zeros(2, 4, 5, dtype=torch.bool)
    held[:, :, 1] = held[0, 0, 2] = True
    line = kept.page(facts("abcd", held), Screen(colour=True), whole=False)[-1]
    full, some, none = (f"\x1b[48;5;{SHADES[n][0]};38;5;{SHADES[n][1]}m" for n in (8, 1, 0))
    assert line == f"█  28% {full}a\x1b[0m{some}b\x1b[0m{none}cd\x1b[0m"


def test_shades_ascend_and_can_be_read() -> None:
    def light(colour: int) -> float:
        if colour >= 232:
            rgb = [8 + 10 * (colour - 232)] * 3
        else:
            steps = [0, 95, 135, 175, 215, 255]
            rgb = [steps[(colour - 16) // n % 6] for n in (36, 6, 1)]
        linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    lights = [light(back) for back, _ in SHADES]
    assert lights == sorted(lights)
    for back, front in SHADES:
        low, high = sorted((light(back), light(front)))
        assert (high + 0.05) / (low + 0.05) >= 4.5


@pytest.mark.parametrize(("width", "height"), [(50, 24), (80, 24), (120, 40), (50, 8)])
@pytest.mark.parametrize("colour", [False, True])
def test_the_beginning_fits_above_the_prompt(width: int, height: int, colour: bool) -> None:
    found = random_facts("".join(f"line {i} of the document that is read\n" for i in range(120)))
    screen, first = Screen(width, colour, height), ["summary"] * (height > 8)
    lines = kept.page(found, screen, first, whole=False)
    assert len(lines) <= max(height - 3, kept.LEAST + 4)
    whole = kept.page(found, screen, first, whole=True)
    assert lines[:-1] == whole[: len(lines) - 1]
    more = len(whole) - len(lines) + 1
    assert lines[-1] == f"/kept all shows the other {more} lines, too"


# -- a phrase -------------------------------------------------------------------------------
def test_find_counts_heads_that_hold_all_of_a_phrase() -> None:
    text = "one net\ndebt two Net Debt three"
    held = torch.zeros(4, 3, 1 + len(text), dtype=torch.bool)
    held[0, 0, 5:13] = True  # the first place, whole
    held[2:, 1, 5:13] = True
    held[3, 2, 7] = True  # a letter of it
    held[1, 0, 18:25] = True  # the second place but for its last letter
    assert kept.find(facts(text, held), "net debt", 80).split("\n") == [
        "tok 5 to 12  chat  whole in 3 of 12 heads (25%), in part in 1 more",
        "  one net debt two Net Debt three",
        "tok 18 to 25  chat  whole in 0 of 12 heads (0%), in part in 1 more",
        "  one net debt two Net Debt three",
        "still there: 25% of the heads hold it whole",
    ]


def test_find_says_what_is_likely_lost() -> None:
    text = "the fact and the question"
    held = torch.zeros(4, 5, 1 + len(text), dtype=torch.bool)
    again = "/refresh reads the documents again for your next question"

    def verdict() -> str:
        return kept.find(facts(text, held, ("doc",)), "fact", 200).split("\n")[-1]

    assert verdict() == f"gone from this cache; {again}"
    held[0, 0, 6] = True
    assert verdict() == f"likely lost to this cache: no head holds it whole; {again}"
    held[0, 0, 5:9] = True
    assert verdict().startswith("likely lost to this cache: fewer than 1 in 10 heads")
    held[1, 0, 5:9] = True
    assert verdict() == "still there: 10% of the heads hold it whole"
    held[:] = True
    assert verdict() == "still there: every head holds it whole"


def test_a_copy_in_the_question_does_not_count_for_the_document() -> None:
    text = "document: fact. question: fact?"
    held = torch.zeros(2, 3, 1 + len(text), dtype=torch.bool)
    held[:, :, 16:] = True
    spans = kept.spell(ByteTokenizer(), [BOS, *text.encode()])
    (part,) = kept.locate(spans, [Document("document: fact.", "d.txt")])
    found = Kept(held, spans, (part,))
    lines = kept.find(found, "fact", 80).split("\n")
    assert lines[0].startswith("tok 11 to 14  d.txt  ")
    assert lines[2].startswith("tok 27 to 30  chat  ")
    assert lines[-1].startswith("gone from the documents in this cache")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_phrases_fit_and_are_filtered(width: int) -> None:
    text = f"{HOSTILE} 中文字 needle 中文字 " * 30
    found = random_facts(text, names=("a\x1b[2J\nb中" * 20,))
    told = [kept.find(found, word, width) for word in ("needle", "evil", "\x1b[31m[b]no" * 2)]
    lines = on_screen("\n".join(told), width)
    text = " ".join(lines)
    assert text.count("whole in") == 2 * kept.LISTED
    assert text.count(f"and {30 - kept.LISTED} more places") == 2
    assert "中文字 needle 中" in text
    missing = "no '[red]x' among the 4 tokens fed so far"
    assert kept.find(facts("abc"), "[red]x", 80) == missing


# -- the command ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def asked() -> ChatSession:
    session = chat()
    session.attach(STORY + HOSTILE, "story.txt")
    list(session.ask("Who?", 4))
    return session


def test_how_much_was_kept_stands_over_the_text() -> None:
    assert typed.run(kept.COMMANDS, context(chat()), "kept") == "no turn yet\n"
    full = chat("full", "none", windows=(None, 40, None))
    list(full.ask("Who?", 2))
    assert "every head holds every token" in kept.summary(full, kept.read(full), 80)
    list(full.ask("And then what came after that in the end?", 2))
    text = kept.summary(full, kept.read(full), 80)
    assert "1 of 3 layers see the last 40 tokens at the most, whatever the policy" in text


@pytest.mark.parametrize("line", ["2", "bottom", "all 2", "find", "find net debt"])
def test_bad_arguments(asked: ChatSession, line: str) -> None:
    refused("does not take", kept._kept, context(asked), line.split())


@pytest.mark.parametrize("line", ["", "all", "find mill"])
def test_output_is_plain_text_on_stderr(asked: ChatSession, line: str) -> None:
    err = typed.run(kept.COMMANDS, context(asked), "kept", *line.split())
    assert err.endswith("\n")
    assert len(err) > 20
    assert not {"\x1b", "\r"} & {*err}
    if line in ("", "all"):
        rows = [len(asked.kept(layer, head)) for layer, head in product(range(3), range(3))]
        assert f"{min(rows)} to {max(rows)}" in " ".join(err.split())
