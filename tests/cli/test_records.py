"""JSON that would take far more memory than its file is refused before it is parsed."""

from __future__ import annotations

import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import pytest
from refusals import refused

from minikv.cli import paths
from minikv.cli.eval.items import read_items
from minikv.cli.paths import CONTAINERS, ITEMS, refuse_many

OPEN, ITEM = b"{},", b"1,"


@pytest.mark.parametrize(
    "data", [OPEN * (CONTAINERS + 1), b"[" * (CONTAINERS + 1), ITEM * (ITEMS + 1)]
)
def test_many_parts_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="are too many"):
        refuse_many(data)


@pytest.mark.parametrize(
    ("text", "many"),
    [
        (b'["' + b"{,[" * 9 + b'"]', False),
        (b'["\\"' + b"{,[" * 9 + b'"]', False),  # an escaped quotation mark
        (b'["\\\\",' + b"{,[" * 9 + b'""]', True),  # an escaped backslash ends the text
        (b'["x"' + b"{,[" * 9 + b'"x"]', True),
        (b'"' + b"{" * 99, False),  # a text without end, which no parser takes
    ],
)
def test_only_what_is_outside_of_texts_counts(
    text: bytes, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "CONTAINERS", 5)
    monkeypatch.setattr(paths, "ITEMS", 5)
    with pytest.raises(ValueError, match="are too many") if many else nullcontext():
        refuse_many(text)


def test_a_long_text_costs_little_to_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "CONTAINERS", 5)
    refuse_many(b'"' + b"{\\n" * (1 << 20) + b'"')
    refuse_many(b'"' + b'{\\"' * (1 << 20))  # without end: it took hours


def test_many_short_texts_cost_little_to_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """45 bytes for each byte, when what is between all of them was kept at once."""
    monkeypatch.setattr(paths, "ITEMS", 5)
    data = b'["' + b'{", "[' * (1 << 18) + b'"'
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="are too many"):
            refuse_many(data)
        monkeypatch.setattr(paths, "ITEMS", 1 << 18)
        refuse_many(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_such_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    path.write_bytes(b"[" + OPEN * CONTAINERS + b"{}]")
    refused("are too many", list, read_items(path))
