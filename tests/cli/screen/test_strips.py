"""Strips of blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rich.cells import cell_len
from test_kept import HOSTILE, STORY, chat, facts

from minikv.cli.chat.kept import Part
from minikv.cli.screen import render
from minikv.cli.screen.terminal import ASCII, BLOCKS


@pytest.mark.parametrize(
    ("share", "most", "expected"),
    [
        (0.0, 8, 0),
        (1e-9, 8, 1),
        (0.125, 8, 1),
        (0.126, 8, 2),
        (0.1 * 3, 10, 3),
        (1.0, 8, 8),
        (1.0, 9, 9),
        (1.5, 8, 8),
        (-0.1, 8, 0),
    ],
)
def test_only_nothing_is_blank(share: float, most: int, expected: int) -> None:
    assert render.level(share, most) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0, "0%"), (0.0001, "<1%"), (0.01, "1%"), (0.29, "29%"), (0.999, "99%"), (1, "100%")],
)
def test_percent_is_rounded_down(share: float, expected: str) -> None:
    assert render.percent(share) == expected


def test_a_strip_is_as_high_as_its_share_of_the_largest() -> None:
    assert render.strip([0, 1, 4, 8], 8) == "| ▁▄█|"
    assert render.strip([0, 1, 5, 9], 9, ASCII) == "| .+@|"
    assert render.strip([0, 0], 0) == "|  |"


# -- layers and heads -----------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (4, 3), (32, 8), (80, 12)])
def test_every_head_and_layer_is_drawn_once(width: int, layers: int, heads: int) -> None:
    rows = [[float(1 + (7 * i + 3 * h) % 64) for h in range(heads)] for i in range(layers)]
    text = render.by_head(rows, width)
    assert all(cell_len(line) <= width for line in text.split("\n"))
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
    text = render.by_head([[1.0] * 8] * 32, 40)
    assert "\n  layers 0 to 15\n" in text
    assert "\n  layers 16 to 31\n" in text
    assert "layers 0 to 31" in render.by_head([[1.0] * 8] * 32, 80)


# -- along the document, along the chat -----------------------------------------------------


def test_along_the_document_is_the_mean_of_each_slice() -> None:
    text = "abcdefgh" * 25
    held = torch.rand(2, 3, 201, generator=torch.Generator().manual_seed(1)) < 0.3
    found = facts(text, held, ("story.txt",))
    title, strip = render.along(found, 80).split("\n")
    share = found.share().tolist()[1:]
    ends = [200 * i // 64 for i in range(65)]
    means = [sum(share[a:b]) / (b - a) for a, b in pairwise(ends)]
    assert strip.strip() == render.strip(means, max(means))
    most = render.percent(max(means))
    assert title == f"kept along story.txt, 64 slices of about 3 tokens: █ is {most} of the heads"


def test_few_tokens_and_no_document() -> None:
    held = torch.zeros(2, 3, 4, dtype=torch.bool)
    held[0, :, 2] = True
    assert render.along(facts("abc", held), 80) == (
        "kept along the chat, a sign per token: █ is 50% of the heads\n  |  █ |"
    )
    held[:] = False
    assert render.along(facts("abc", held), 80).startswith(
        "kept along the chat, a sign per token: nothing\n"
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_many_documents_with_hostile_names(width: int) -> None:
    found = facts("x" * 500)
    names = ["\x1b]0;evil\x07 [bold]\nname 中文" * 9, *(f"{i}.txt" for i in range(9))]
    parts = tuple(Part(name, 1 + 50 * i, 51 + 50 * i) for i, name in enumerate(names))
    found = replace(found, parts=parts)
    lines = render.along(found, width, ASCII, "ascii").split("\n")
    assert lines[-1] == "  and 2 more documents"
    assert sum(line.startswith("  |") for line in lines) == 8
    assert all(cell_len(line) <= width and "\x1b" not in line for line in lines)
    assert all(line.isascii() for line in lines)


# -- the whole ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("plain", [False, True])
def test_strips_of_a_chat(width: int, plain: bool) -> None:
    session = chat()
    assert render.strips(session, width, BLOCKS) == ""
    session.attach(STORY + HOSTILE, "story.txt")
    list(session.ask("Who?", 3))
    text = render.strips(session, width, ASCII if plain else BLOCKS)
    lines = text.split("\n")
    assert all(cell_len(line) <= width for line in lines)
    assert "\x1b" not in text
    rows = [len(session.kept(layer, head)) for layer in range(3) for head in range(3)]
    joined = " ".join(text.split())
    sign = "@" if plain else "█"
    assert f"{sign} is {max(rows)} tokens, the most in one" in joined
    assert "kept along story.txt" in joined
    assert text.isascii() == plain
