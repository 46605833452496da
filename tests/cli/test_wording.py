"""What the runtime says in Python is shown as it is typed."""

from __future__ import annotations

import pytest

from minikv.cli.failures import explain
from minikv.cli.settings.values import worded
from minikv.errors import UsageError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('try `dtype="float32"`', "try --dtype float32"),
        ('`dtype="auto", weights="int4+head"` fits', "--dtype auto --weights int4+head fits"),
        ("run without `offline=True` once", "run without --offline once"),
        ("`max_tokens` must be 1", "--max-tokens must be 1"),
        ("a larger `budget` or less", "a larger --budget or less"),
        ("start anew with `chat.reset()`", "start anew with /reset"),
        ("`chat.undo(2)` works", "/undo 2 works"),
        ('`chat.reuse = "once"` turns it off', "/set reuse once turns it off"),
        ("log in with `hf auth login`", "log in with `hf auth login`"),
        ("`minikv ask -` reads", "`minikv ask -` reads"),
        ("`nonsense=3` and `budgt`", "`nonsense=3` and `budgt`"),
        ("no code at all", "no code at all"),
    ],
)
def test_python_becomes_flags_and_commands(text: str, shown: str) -> None:
    assert worded(text) == shown


def test_errors_and_hints_are_reworded() -> None:
    error = UsageError("`top_p` is wrong", 'use `device="cpu"`; `policy` takes: h2o')
    made = explain(error)
    assert (made.message, made.hint) == (
        "--top-p is wrong",
        "use --device cpu; --policy takes: h2o",
    )
    made = explain(error, chat=True)
    assert (made.message, made.hint) == (
        "/set top_p is wrong",
        "use --device cpu; /set policy takes: h2o",
    )
