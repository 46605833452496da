"""kvpress keeps the same positions, where it is installed (`pip install -e '.[kvpress]'`)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import minikv
from minikv.cli.evaluation import wording

kvpress = pytest.importorskip("kvpress")

FOLDER = Path(__file__).resolve().parents[2] / "docs/measurements"


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module("beside_kvpress")


@pytest.fixture(scope="module")
def read(script: Any) -> Any:
    """(model, chat, ids of a document)."""
    chat = minikv.load(policy="full", budget=512)
    item = next(script.documents(chat, 700, 1, 1))
    chat.reuse = "blind"
    return script.load(), chat, wording.parts(chat, item, 0)[0]


PRESSES = (
    "SnapKVPress",
    "AdaKVPress(SnapKVPress)",
    "PyramidKVPress",
    "KeyDiffPress",
    "KnormPress",
    "ExpectedAttentionPress",
    "TOVAPress",
    "StreamingLLMPress",
)


def test_every_method_that_both_have_is_compared(script: Any) -> None:
    assert tuple(script.PAIRS) == PRESSES


@pytest.mark.parametrize("name", PRESSES)
@pytest.mark.parametrize("budget", [32, 100])
def test_the_same_positions_stay(script: Any, read: Any, name: str, budget: int) -> None:
    """But for ties: a word has the same key norm wherever it stands in the first layer."""
    model, chat, ids = read
    pair = script.PAIRS[name]
    theirs = script.pressed(model, pair.press(kvpress, len(ids), budget), ids)
    mine = script.ours(chat, pair, budget, ids)
    found = script.compared(pair, mine, theirs)
    assert found.kept == sum(len(head) for layer in mine for head in layer)
    assert found.other == 0
    assert found.tied == found.first
    assert found.tied == 0 or name == "KnormPress"
    # It sees a difference: the rows of another budget are not these.
    other = script.compared(pair, script.ours(chat, pair, budget + 8, ids), theirs)
    assert other.tied + other.other > 0
