"""kvpress keeps the same positions, where it is installed (`pip install -e '.[kvpress]'`)."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from itertools import chain
from typing import Any

import pytest

import minikv
from minikv.cli.eval import passes

kvpress = pytest.importorskip("kvpress")


@pytest.fixture(scope="module")
def script() -> Any:
    return importlib.import_module("kvpress_pairs")


@pytest.fixture(scope="module")
def chat() -> Any:
    return minikv.load(policy="full", budget=512)


@pytest.fixture(scope="module")
def models(script: Any) -> Any:
    """kvpress' model, by whether its attention can be read."""
    return {eager: script.load(eager=eager) for eager in (False, True)}


@pytest.fixture(scope="module")
def parts(script: Any, chat: Any) -> Any:
    """The ids of a document and of a question about it."""
    item = next(script.documents(chat, 700, 1, 1))
    chat.reuse = "blind"
    return passes.prompts(chat, item)


def found(script: Any, models: Any, chat: Any, name: str, budget: int, ids: Any) -> Any:
    """(what minikv kept, what kvpress kept, how they agree)."""
    pair = script.PAIRS[name]
    press = pair.press(kvpress, len(ids), budget)
    theirs = script.pressed(models[pair.eager], press, ids, chat)
    mine = script.ours(chat, pair, budget, ids)
    return mine, theirs, script.compared(pair, mine, theirs)


PRESSES = (
    "SnapKVPress",
    "AdaKVPress(SnapKVPress)",
    "PyramidKVPress",
    "KeyDiffPress",
    "KnormPress",
    "ExpectedAttentionPress",
    "AdaKVPress(ExpectedAttentionPress)",
    "TOVAPress",
    "StreamingLLMPress",
    "ChunkKVPress(SnapKVPress)",
    "CriticalKVPress(SnapKVPress)",
    "CriticalAdaKVPress(SnapKVPress)",
    "ObservedAttentionPress",
    "BlockPress(KeyDiffPress)",
    "KVzipPress",
    "KVzipPress, plus",
)


def test_every_method_that_both_have_is_compared(script: Any) -> None:
    assert tuple(script.PAIRS) == PRESSES


@pytest.mark.skipif(metadata.version("kvpress") != "0.5.5", reason="another list of presses")
def test_every_press_is_compared_or_has_a_reason(script: Any) -> None:
    named = {press for name in PRESSES for press in re.findall(r"\w+Press", name)}
    presses = {name for name in kvpress.__all__ if name.endswith("Press")}
    assert named | set(script.LEFT_OUT) == presses
    assert not named & set(script.LEFT_OUT)


@pytest.mark.parametrize("name", PRESSES)
@pytest.mark.parametrize("budget", [32, 96])
def test_the_same_positions_stay(
    script: Any, models: Any, chat: Any, parts: Any, name: str, budget: int
) -> None:
    """But for ties, and for rules that are known to be others. Ties: a word has the same key norm
    wherever it stands in the first layer."""
    pair, ids = script.PAIRS[name], parts[0]
    ids = ids[: len(ids) // pair.chunk * pair.chunk]
    mine, theirs, same = found(script, models, chat, name, budget, ids)
    assert same.kept == sum(len(head) for layer in mine for head in layer)
    assert same.other == 0
    assert same.tied == same.first
    assert same.tied == 0 or name == "KnormPress"
    assert same.named == 0 or pair.righted
    # It sees a difference: the rows of another budget are not these.
    other = script.compared(pair, script.ours(chat, pair, budget + 8, ids), theirs)
    assert other.tied + other.other > 0


@pytest.mark.parametrize(
    "name", ["AdaKVPress(ExpectedAttentionPress)", "CriticalAdaKVPress(SnapKVPress)", "KVzipPress"]
)
def test_a_rule_that_is_another_one_explains_all_that_differs(
    script: Any, models: Any, chat: Any, parts: Any, name: str
) -> None:
    mine, theirs, same = found(script, models, chat, name, 256, parts[0])
    assert same.named > 0
    assert mine == script.PAIRS[name].righted(theirs)


def test_kvpress_keeps_whole_chunks_only(script: Any, models: Any, chat: Any, parts: Any) -> None:
    """Of a document that does not end with a chunk it keeps fewer rows than the budget."""
    size = script.WINDOW
    ids = parts[0][: len(parts[0]) // size * size - 5]
    mine, theirs, _ = found(script, models, chat, "ChunkKVPress(SnapKVPress)", 96, ids)
    heads = zip(chain.from_iterable(mine), chain.from_iterable(theirs.kept), strict=True)
    for ours, rows in heads:
        chunks = {row // size for row in rows}
        whole = {row for row in range(len(ids)) if row // size in chunks}
        assert rows == whole
        assert len(rows) < len(ours) == 96
