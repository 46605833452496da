"""What Python code is told about a wrong argument."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

import minikv
from minikv import checks
from minikv.chat.session import ChatSession
from minikv.errors import ContextError, UsageError
from minikv.models.errors import ModelError

ROOT = Path(__file__).resolve().parent.parent
TYPED = re.compile(r"(^|[\s(,;])(--[a-z]+|/(reset|refresh|undo|retry|set|load|clear|drop)\b)")


@pytest.fixture(scope="module")
def chat() -> ChatSession:
    session = minikv.load(budget=64)
    session.attach("Velgate exports mostly salt.")
    return session


@pytest.mark.parametrize(
    ("given", "words", "hint"),
    [
        (
            {"temperature": 1},
            "minikv.load() has no argument 'temperature'",
            "ask(..., temperature=",
        ),
        ({"max_tokens": 8}, "minikv.load() has no argument 'max_tokens'", "chat.ask("),
        ({"modle": "x"}, "minikv.load() has no argument 'modle'", "did you mean model"),
        ({"windw": 8}, "minikv.load() has no argument 'windw'", "did you mean window"),
        ({"zzz": 1}, "minikv.load() has no argument 'zzz'", "it takes: model, revision"),
        ({"windo": 1}, "no policy has such an option", "did you mean window"),
        ({"polici": 1}, "no policy has such an option", "did you mean policy or"),
        ({"zzzzzz": 1}, "no policy has such an option", "it takes: model, revision"),
        ({"quality": 0.1}, "`quality` is gone: choose `budget`", ""),
        ({"policy": "l2", "alpha": 0.1}, "l2 with l2 has no option 'alpha'", "it takes"),
        ({"window": "wide"}, "global-span: window must be int, got 'wide'", "the default is 32"),
        ({"budget": None}, "`budget` must be a whole number or a text, got None", "'20%'"),
        ({"budget": True}, "`budget` must be a whole number or a text, got True", "(512), a share"),
        ({"budget": [512]}, "`budget` must be a whole number or a text", "20%"),
        ({"budget": 0.2}, "`budget` must be a whole number or a text, got 0.2", "'20%'"),
        ({"budget": 3}, "budget 3 is too small for global-span with h2o", "smallest useful budget"),
        ({"policy": None}, "`policy` must be a text, got None", ""),
        ({"policy": "adkv"}, "unknown policy 'adkv'", "did you mean adakv"),
        ({"decode": "adakv"}, "adakv works only as `policy`", "`decode` takes"),
        ({"seed": "1"}, "`seed` must be a whole number, got '1'", ""),
        ({"seed": True}, "`seed` must be a whole number, got True", ""),
        ({"model": 3}, "`model` must be a text, got 3", ""),
        ({"system": b"x"}, "`system` must be a text, got b'x'", ""),
        ({"offline": 1}, "`offline` must be true or false, got 1", ""),
        ({"threads": -1}, "`threads` must be between 0", ""),
        ({"stride": 3}, "`stride` must be a power of two", ""),
        ({"dtype": "int3"}, "`dtype` must be one of auto", ""),
        ({"device": "tpu"}, "unknown device 'tpu'", "cuda:N"),
        ({"kernels": "triton", "device": "cpu"}, "no triton kernels", '`kernels="auto"`'),
        ({"weights": "int8", "dtype": "float32"}, '`weights="int8"` needs', '`dtype="auto"`'),
        ({"model": "no/such", "offline": True}, "no/such is not in the", "`offline=True`"),
    ],
    ids=str,
)
def test_load_says_what_is_wrong(given: dict[str, Any], words: str, hint: str) -> None:
    error = refused(re.escape(words), minikv.load, **given, error=(UsageError, ModelError))
    assert hint in error.hint
    assert not TYPED.search(f"{error} {error.hint}")


def test_load_takes_what_its_help_says(tmp_path: Path) -> None:
    """A path object as the model, a system prompt, and policy options. Nothing is guessed for a
    name like no other."""
    refused("no model", minikv.load, tmp_path, error=ModelError)
    assert refused("policy 'qqqq'", minikv.load, policy="qqqq").hint.startswith("`policy` takes: ")
    chat = minikv.load(system="Be short.", window=16, threads=None)
    assert chat.system == "Be short."
    assert chat.eviction.policy_options["window"] == 16


@pytest.mark.parametrize(
    ("call", "words", "hint"),
    [
        (lambda c: c.attach(b"x"), "the document must be text (str), got bytes", "data.decode()"),
        (lambda c: c.attach(Path("x")), "the document must be text (str), got", "read_text()"),
        (lambda c: c.attach(None), "the document must be text (str), got NoneType", ""),
        (lambda c: c.attach("x", name=3), "`name` must be text (str), got int", ""),
        (lambda c: c.attach(" "), "the document is empty", ""),
        (lambda c: c.ask(b"x"), "the question must be text (str), got bytes", "data.decode()"),
        (lambda c: c.ask(3), "the question must be text (str), got int", ""),
        (lambda c: c.ask(""), "the question is empty", ""),
        (lambda c: c.ask("q", max_tokens=0), "`max_tokens` must be at least 1, got 0", ""),
        (lambda c: c.ask("q", max_tokens=2.5), "`max_tokens` must be a whole number", ""),
        (lambda c: c.ask("q", temperature="1"), "`temperature` must be a number, got '1'", ""),
        (lambda c: c.ask("q", temperature=-1), "`temperature` must be between", ""),
        (lambda c: c.ask("q", top_k=1.5), "`top_k` must be a whole number", ""),
        (lambda c: c.ask("q", top_p=math.nan), "`top_p` must be between", ""),
        (lambda c: c.ask("q", progress=3), "`progress` must be a function, got 3", ""),
        (lambda c: c.ask("q", notice="x"), "`notice` must be a function, got 'x'", ""),
        (lambda c: c.undo(), "there is no turn to undo", ""),
        (lambda c: c.undo("1"), "`turns` must be a whole number (int), got '1'", ""),
        (lambda c: c.undo(0), "a number of turns is 1 or more, got 0", "`chat.undo(2)`"),
        (lambda c: c.kept(99, 0), "`layer` must be between 0 and 3, got 99", ""),
        (lambda c: c.kept(0, -1), "`head` must be between 0 and 2, got -1", ""),
        (lambda c: c.refresh(), "there is nothing to read again", ""),
        (lambda c: setattr(c, "reuse", "x"), "reuse must be one of auto", ""),
        (lambda c: list(c.ask("q " * 9000)), "the prompt needs", "a shorter document"),
    ],
)
def test_a_chat_says_what_is_wrong(chat: ChatSession, call: Any, words: str, hint: str) -> None:
    """At the call, and without a change to the chat."""
    waiting = list(chat.pending)
    error = refused(re.escape(words), call, chat, error=(UsageError, ContextError))
    assert hint in error.hint
    assert not TYPED.search(f"{error} {error.hint}")
    assert chat.pending == waiting
    assert not chat.turns


def test_unknown_arguments_of_a_method_are_pythons_own_error(chat: ChatSession) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        chat.ask("q", temprature=1)  # type: ignore[call-arg]


def test_no_text_of_the_runtime_names_a_flag_or_a_slash_command() -> None:
    """They are written as Python, and the command line rewords them (`worded`). Help of settings
    and policies is shown by the command line alone."""
    found = []
    for folder in ("minikv", "models"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name == "train.py":
                continue
            tree = ast.parse(path.read_text())
            skipped = {id(c) for node in ast.walk(tree) if _help(node) for c in ast.walk(node)}
            for node in ast.walk(tree):
                text = node.value if isinstance(node, ast.Constant) else None
                if isinstance(text, str) and id(node) not in skipped and TYPED.search(text):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text[:60]}")
    assert found == []


def _help(node: ast.AST) -> bool:
    """A docstring or another bare text, what declares a setting, or what a policy says of
    itself."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in ("summary", "differs")
    declares = ("setting", "option", "Method")
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") in declares


def test_a_check_says_nothing_about_what_is_right() -> None:
    checks.whole("n", 3, 1, 3)
    checks.number("x", 0, 0, 1)
    checks.number("x", 0.5)
    checks.text("the text", "")
    checks.function("call", None)
    checks.function("call", print)
    assert checks.quoted("x" * 100) == f"'{'x' * 56}..."


SLIPS = "hepl=/help /rset=/reset verfy=/verify h20=h2o top-p=top_p nonsense= foo= list= lru="


@pytest.mark.parametrize("slip", SLIPS.split())
def test_only_a_slip_is_taken_for_another_name(slip: str) -> None:
    word, near = slip.split("=")
    known = "/help /kept /tokens /fork /set /reset /verify h2o l2 top_p".split()
    assert checks.guess(word, known) == (f"did you mean {near}? " if near else "")
