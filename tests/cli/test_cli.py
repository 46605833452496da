"""The command line: streams, exit codes, slash commands, interrupts, hostile text."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_chat
from fakes import ByteTokenizer, ChatML, FakeEngine
from forked import Forked, Piped, run
from pairwise import some_by_day
from terminals import Terminals
from typer.testing import CliRunner, Result

import minikv
import minikv.cli.turn
from minikv.cache.rules import Rules
from minikv.chat.closing import Facts
from minikv.chat.recall import Recall
from minikv.chat.session import ChatSession
from minikv.cli.chat import converse
from minikv.cli.command import Context
from minikv.cli.documents import named
from minikv.cli.documents.stdin import PipedLines
from minikv.cli.failures import explain
from minikv.cli.interrupt import Interrupts
from minikv.cli.main import app
from minikv.cli.saved.keeper import Keeper
from minikv.cli.saved.listing import listing
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import clean
from minikv.errors import ContextError, Interrupted, MemoryShortError, NumericsError, UsageError
from minikv.models.errors import CorruptModel, ModelUnavailable
from minikv.settings import Generation, Settings

HERE = Path(__file__).parents[1]
KEYS = {
    *(
        "turn policy policy_options budget kernels dtype device tokens kv_bytes time_s rate loss "
        "shaped_by_turn stop_reason seed sampling device_mem warnings reuse kv_dtype weights tier "
        "refreshes fidelity against_full"
    ).split()
}


class World:
    """What the fake `build` makes and has made."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.max_context = 4096
        self.failure: Exception | None = None
        self.settings: Settings | None = None
        self.session: ChatSession | None = None

    def build(self, settings: Settings, progress: object = None) -> ChatSession:
        if self.failure is not None:
            raise self.failure
        self.settings = settings
        tokenizer = ByteTokenizer()
        self.session = ChatSession(
            self.engine,
            tokenizer,
            ChatML(tokenizer),
            replace(settings, reuse="once"),
            max_context=self.max_context,
            facts=Facts(weights=settings.weights),
            recall=Recall(self.engine.kv, settings.tier),  # type: ignore[arg-type]
        )  # type: ignore[arg-type]
        return self.session

    def run(self, *arguments: str, input: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=input)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(minikv.cli.turn, "build", world.build)
    return world


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "report.txt"
    path.write_text("The mill is run by Ada.")
    return str(path)


def answer_of(document: str, question: str, length: int = 12) -> str:
    """What the fake model says about a text, worked out without the command line."""
    tokenizer = ByteTokenizer()
    chat = ChatSession(
        FakeEngine(length),
        tokenizer,
        ChatML(tokenizer),
        Settings(),
        max_context=4096,  # type: ignore[arg-type]
    )
    if document:
        chat.attach(document, "report.txt")
    return "".join(chat.ask(question))


# -- ask ------------------------------------------------------------------------------------


def test_ask_prints_the_answer_alone(world: World, document: str) -> None:
    result = world.run("ask", "Who runs it?", document)
    assert result.exit_code == 0
    assert result.stdout == answer_of("The mill is run by Ada.", "Who runs it?") + "\n"
    assert "\x1b" not in result.output
    assert "\r" not in result.output


@pytest.mark.parametrize(("why", "kind"), [(None, "none"), ("it reads everything twice", "file")])
def test_a_single_question_has_a_tier_only_for_what_is_read_twice(
    world: World, document: str, why: str | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no later question for which all that was read could be kept."""
    monkeypatch.setattr(Rules, "cannot_recall", why)
    assert world.run("ask", "Who?", document, "--tier", "file").exit_code == 0
    assert world.session is not None
    assert world.session.recall.kind == kind


def test_piped_text_is_a_document_before_the_question(world: World) -> None:
    result = world.run("ask", "Who?", input="piped text")
    assert result.exit_code == 0
    assert world.session is not None
    assert world.session.messages[0].content == "piped text\n\nWho?"


def test_beside_named_files_stdin_is_read_only_for_a_dash(world: World, document: str) -> None:
    world.run("ask", "Who?", document, input="piped")
    assert world.session is not None
    named = "Document: report.txt\n\nThe mill is run by Ada."
    assert world.session.messages[0].content == f"{named}\n\nWho?"
    world.run("ask", "Who?", "-", document, input="piped")
    assert world.session.messages[0].content == f"piped\n\n{named}\n\nWho?"
    world.run("ask", "Who?", document, "-", input="piped")
    assert world.session.messages[0].content == f"{named}\n\npiped\n\nWho?"


def test_the_message_and_a_document_cannot_both_be_stdin(world: World) -> None:
    result = world.run("ask", "-", "-", input="text")
    assert result.exit_code == 2
    assert "standard input cannot be both" in result.stderr
    assert world.session is None


def test_a_chat_over_piped_text_needs_a_terminal_for_its_questions(
    world: World, document: str
) -> None:
    done = run("chat", document, "-", stdin="text", pace=0)
    assert done.code == 2
    assert "no terminal to read questions from" in done.err


def test_a_directory_and_a_pattern_are_documents(world: World, tmp_path: Path) -> None:
    for name, data in (("b.txt", b"two"), ("a.txt", b"one"), ("x.bin", bytes(range(256)))):
        (tmp_path / name).write_bytes(data)
    result = world.run("ask", "q", str(tmp_path))
    assert result.exit_code == 0
    assert f"{tmp_path}: 2 documents; skipped 1 binary" in result.stderr
    assert world.session is not None
    both = "Document: a.txt\n\none\n\nDocument: b.txt\n\ntwo\n\nq"
    assert world.session.messages[0].content == both
    world.run("chat", str(tmp_path / "*.txt"), input="q\n")
    assert world.session.messages[0].content == both
    quiet = world.run("ask", "q", str(tmp_path), "-q")
    assert (quiet.exit_code, quiet.stderr) == (0, "")


@pytest.mark.parametrize(
    ("piped", "asked"),
    [
        ("  A text,\n\nand a question?", "  A text,\n\nand a question?"),
        ("Who?\n", "Who?"),
        ("Who?\r\n", "Who?"),
        ("Who?\n\n", "Who?\n"),
        ("Who?\r\n\r\n", "Who?\r\n"),
        ("\nWho? ", "\nWho? "),
    ],
)
def test_a_dash_as_question_is_the_whole_message_but_for_one_line_end(
    world: World, document: str, piped: str, asked: str
) -> None:
    """The tokens are those of the argument."""
    fed = []
    for question, text in (("-", piped), (asked, None)):
        world.engine = FakeEngine()
        assert world.run("ask", question, document, input=text).exit_code == 0
        assert world.session is not None
        assert world.session.messages[0].content.endswith(f"Ada.\n\n{asked}")
        fed.append(world.session.fed)
    assert fed[0] == fed[1]
    assert world.run("ask", "-", input="\n").exit_code == 2


def test_an_answer_that_repeats_itself_is_told_of_below_it(world: World, document: str) -> None:
    def run(*arguments: str) -> Result:
        world.engine = FakeEngine(150)
        world.engine.script = [*(b"no, " * 40)]
        return world.run(*arguments, input="Who?\n")

    text = ("no, " * 40)[:150]
    line = "! the answer repeats itself; --repeat-penalty 1.1 or --temperature 0.7 may help\n"
    for arguments in (("ask", "Who?", document), ("chat", document, "--no-save")):
        result = run(*arguments)
        assert result.exit_code == 0
        assert text in result.stdout
        assert result.output.index(line) > result.output.index(text) + len(text)
        assert result.stderr.count(line) == 1
    quiet = run("ask", "Who?", document, "-q")
    assert (quiet.stdout, quiet.stderr) == (f"{text}\n", "")
    record = json.loads(run("ask", "Who?", document, "--json", "-q").stdout)
    assert [one[:25] for one in record["warnings"]] == ["the answer repeats itself"]
    assert record["sampling"]["repeat_penalty"] == 1.0


def test_the_order_of_question_and_file_is_found_out_and_said(world: World, document: str) -> None:
    first = world.run("ask", "Who runs it?", document)
    other = world.run("ask", document, "Who runs it?")
    assert other.stdout == first.stdout
    assert f"read as minikv ask 'Who runs it?' {document}\n" in other.stderr
    alone = world.run("ask", document)
    assert (alone.exit_code, alone.stdout) == (2, "")
    assert "there is no question: it is a file\n" in alone.stderr


def test_nothing_to_ask_about_is_a_usage_error(world: World, document: str) -> None:
    result = world.run("ask", "Who?", input="")
    assert result.exit_code == 2
    assert "no document" in result.stderr
    assert result.stdout == ""
    # With a file named, an empty standard input is what a batch job has.
    assert world.run("ask", "Who?", document, input="").exit_code == 0
    assert world.run("ask", "Who?", document, "-", input="").exit_code == 2


def test_json_has_the_answer_and_the_turn_record(world: World, document: str) -> None:
    world.engine.script = list("é\x7f\x1b[3m☃".encode())
    world.engine.length = len(world.engine.script)
    result = world.run("ask", "q", document, "--json")
    record = json.loads(result.stdout)
    assert record.pop("answer") == "é\x7f\x1b[3m☃"  # JSON keeps what a terminal must not see
    assert set(record) == KEYS
    assert result.stdout.isascii()
    assert "\x1b" not in result.stdout
    assert "\x7f" not in result.stdout
    assert record["tokens"]["generated"] == world.engine.length
    assert record["kv_bytes"]["full"] == record["kv_bytes"]["held"] > 0


def test_stats_go_to_stderr(world: World, document: str) -> None:
    plain = world.run("ask", "q", document)
    result = world.run("ask", "q", document, "--stats")
    assert result.stdout == plain.stdout
    assert "memory     KV" in result.stderr
    assert "memory" not in plain.stderr
    assert "allocated" in result.stderr
    assert "peak" in result.stderr


def test_the_form_of_the_weights_is_in_the_record(world: World, document: str) -> None:
    for flag, form in (("auto", "plain"), ("int4", "int4")):
        result = world.run("ask", "q", document, "--weights", flag, "--json", "--stats")
        assert json.loads(result.stdout)["weights"] == form
        assert ("weights    int4\n" in result.stderr) == (form == "int4")


def test_an_answer_cut_by_its_limit_says_so(world: World, document: str) -> None:
    result = world.run("ask", "q", document, "-n", "3")
    assert len(result.stdout) == 4
    assert "stopped at --max-tokens 3" in result.stderr
    assert result.exit_code == 0


def test_stdout_ends_with_one_newline_whatever_the_answer_ends_with(
    world: World, document: str
) -> None:
    world.engine.script = list(b"\none\n\ntwo\n\n\n")
    world.engine.length = len(world.engine.script)
    assert world.run("ask", "q", document).stdout == "\none\n\ntwo\n"


def test_flags_reach_the_settings(world: World, document: str, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("be brief\n")
    flags = (
        "-m some/model --policy snapkv --budget 20% --decode none -o window=16 --device cpu "
        "--dtype bfloat16 --kernels torch -s 7 --revision abc --offline -t 0.5 --top-p 0.9 "
        "--top-k 5 --repeat-penalty 1.2 --min-p 0.1 --json --reuse blind --max-thoughts 50"
    )
    result = world.run("ask", "q", document, *flags.split(), "-S", f"@{tmp_path / 'system.txt'}")
    assert result.exit_code == 0, result.output
    assert world.settings == Settings(
        keep_packed="on",
        model="some/model",
        policy="snapkv",
        budget="20%",
        decode="none",
        device="cpu",
        dtype="bfloat16",
        kernels="torch",
        seed=7,
        options={"window": "16"},
        revision="abc",
        offline=True,
        system="be brief",
        reuse="blind",
        threads=0,
    )
    record = json.loads(result.stdout)
    assert record["policy"] == "snapkv"
    assert record["policy_options"]["window"] == 16
    assert record["policy_options"]["decode"] == {"policy": "none"}
    assert record["budget"] == {"unit": "share", "value": 0.2}
    assert record["sampling"] == {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.2,
        "max_tokens": 512,
        "stop": [],
        "max_thoughts": 50,
    }
    assert record["seed"] == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "adakb"], "did you mean adakv?"),
        (["--decode", "snapkv"], "works only as --policy"),
        (["--budget", "lots"], "cannot read the budget 'lots'"),
        (["-o", "window"], "an option is name=value"),
        (["-o", "colour=red"], "no option 'colour'"),
        (["-o", "window=0"], "must be between"),
        (["--temp", "-1"], "--temperature must be"),
        (["-n", "0"], "--max-tokens must be"),
        (["--system", "@/nonexistent"], "no such file"),
        (["/nonexistent.txt"], "no such file"),
        ([""], "no such file: ''"),
        (["nothing/*.txt"], "no file matches nothing/*.txt"),
        (["https://x.org/a"], "curl -sL https://x.org/a | minikv ask"),
        (["--device", "foo"], "unknown device 'foo'"),
        (["--threads", "9999"], "--threads must be between 0 and 4,096, got 9999"),
        (["cli.text"], "it is looked for in /"),
        ([str(HERE / "cli" / "test_cl.py")], f"did you mean {HERE / 'cli' / 'test_cli.py'}?"),
        (["/nowhere/x"], "there is no directory /nowhere"),
        (["--budget", "9" * 20], "more than any memory holds"),
    ],
)
def test_usage_errors_are_one_line_and_a_hint(
    world: World, document: str, arguments: list[str], message: str
) -> None:
    result = world.run("ask", "q", document, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") <= 2
    assert world.settings is None, "refused before a model is loaded"
    assert world.run("chat", document, *arguments, input="q\n").stderr == result.stderr
    assert world.settings is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (ModelUnavailable("x"), 3),
        (MemoryShortError("x"), 4),
        (MemoryError(), 4),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 4),
        (RuntimeError("could not create a primitive"), 4),
        (RuntimeError("can't start new thread"), 4),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 4),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), 4),
        (OSError(errno.EIO, "Input/output error", "a.txt"), 1),
        (ContextError("x"), 5),
        (CorruptModel("x"), 6),
        (Interrupted("x"), 130),
        (NumericsError("x"), 1),
        (ZeroDivisionError("x"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
    ],
)
def test_every_kind_of_failure_has_its_exit_code(
    world: World, document: str, error: Exception, code: int
) -> None:
    world.failure = error
    result = world.run("ask", "q", document)
    assert result.exit_code == code
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_debug_shows_where(world: World, document: str) -> None:
    world.failure = ZeroDivisionError("inside")
    result = world.run("ask", "q", document, "--debug")
    assert "Traceback" in result.stderr
    assert "error: ZeroDivisionError: inside" in result.stderr
    assert result.exit_code == 1


def test_debug_shows_where_in_a_chat_too(world: World, document: str) -> None:
    def fail(fed: list[int]) -> None:
        raise ZeroDivisionError("inside")

    world.engine.hook = fail
    plain = world.run("chat", document, input="q\n")
    assert "Traceback" not in plain.stderr
    result = world.run("chat", document, "--debug", input="q\n")
    assert re.search(
        r"Traceback(.|\n)+, in fail\n(.|\n)+error: ZeroDivisionError: inside", result.stderr
    )


def test_what_the_system_refuses_is_no_bug() -> None:
    failure = explain(OSError(errno.EIO, "Input/output error", "a\x1b.txt"))
    assert failure.message == "the system refused: Input/output error: a.txt"
    assert "bug in" not in failure.hint


def test_an_error_text_of_many_lines_becomes_one() -> None:
    assert "\n" not in explain(ValueError("a\nb\n\nc" * 500)).message
    assert len(explain(ValueError("x" * 10_000)).message) < 500


def test_a_document_over_the_context_is_refused(world: World, document: str) -> None:
    world.max_context = 20
    result = world.run("ask", "q", document)
    assert result.exit_code == 5
    assert "this model was trained for 20 positions" in result.stderr
    assert "nothing was cut" in result.stderr
    assert result.stdout == ""


def test_nan_logits_stop_the_turn_and_say_so(world: World, document: str) -> None:
    world.engine.nan_at = 0
    result = world.run("ask", "q", document)
    assert result.exit_code == 1
    assert "NaN" in result.stderr


def test_invalid_bytes_can_be_let_in(world: World, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 and more")
    assert world.run("ask", "q", str(path)).exit_code == 2
    result = world.run("ask", "q", str(path), "--encoding-errors", "replace")
    assert result.exit_code == 0
    assert "1 invalid UTF-8 sequence was read as U+FFFD" in result.stderr


def test_quiet_leaves_only_the_answer(world: World, tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_text("<end> in a text")
    loud = world.run("ask", "q", str(path))
    assert "looks like a control token" in loud.stderr
    quiet = world.run("ask", "q", str(path), "-q")
    assert quiet.stderr == ""
    assert quiet.stdout == loud.stdout


# -- hostile text ---------------------------------------------------------------------------

HOSTILE = "a\x1b]52;c;QUJD\x07b\x9b31mc\u202ed\u2066e\U000e0041f\u2028g\x00\x7f\b\rh"


def test_control_characters_never_reach_the_terminal(world: World, document: str) -> None:
    world.engine.script = list(HOSTILE.encode())
    world.engine.length = len(world.engine.script)
    result = world.run("ask", "q", document)
    assert result.stdout == "a]52;c;QUJDb31mcdefgh\n"


def test_the_filter_keeps_text_and_cannot_be_split_around() -> None:
    kept = "tab\tnewline\né 世界 👩\u200d🚀 \ufe0f e\u0301 שלום"
    assert clean(kept) == kept
    assert "".join(clean(c) for c in HOSTILE) == clean(HOSTILE) == "a]52;c;QUJDb31mcdefgh"
    assert clean("\ud800x") == "x"


def test_error_texts_are_filtered_too(world: World, document: str) -> None:
    world.failure = ModelUnavailable("repo \x1b[2Jx not found", "try \x1b]0;y")
    result = world.run("ask", "q", document)
    assert "\x1b" not in result.stderr
    assert "repo [2Jx not found" in result.stderr


class Screen(io.StringIO):
    """A terminal in memory."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize(("columns", "width"), [("40", 40), ("", 80), ("0", 80), ("3", 20)])
def test_messages_break_between_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int, term: str
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", "1")
    words = "table  of  two " + "and some more words " * 9 + "/a/path" * 12
    Terminal().say(f"  {words}\nnext")
    *lines, last = screen.getvalue().removesuffix("\n").split("\n")
    assert last == "next"
    assert len(lines) > 2
    assert lines[0].startswith("  table  of  two"[:width])
    assert all(line.startswith("    ") for line in lines[1:])
    assert " ".join(lines).split() == words.split()
    assert all(len(line) <= width for line in lines if "/a/path" not in line)


def test_messages_are_not_broken_where_there_is_no_terminal(capsys: Any) -> None:
    Terminal().say("word " * 100)
    assert capsys.readouterr().err == "word " * 100 + "\n"


def test_an_ascii_stream_gets_escapes_and_no_exception(capsysbinary: Any) -> None:
    import io

    terminal = Terminal()
    raw = io.BytesIO()
    terminal.out = io.TextIOWrapper(raw, encoding="ascii")
    terminal.answer("naïve · 世")
    terminal.end_answer()
    assert raw.getvalue() == b"na\\xefve - \\u4e16\n"


# -- chat -----------------------------------------------------------------------------------


def test_piped_questions_are_turns(world: World, document: str) -> None:
    result = world.run("chat", document, input="first?\nsecond?\n\n")
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert first == answer_of("The mill is run by Ada.", "first?")
    assert first != second
    assert world.session is not None
    assert world.session.turn == 2
    assert result.stderr.count("first token") == 2


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]
)
def test_piped_questions_are_decoded_as_documents_are(
    world: World, document: str, encoding: str
) -> None:
    """As PowerShell and Notepad write them; U+0A3E and U+0D0A have a line end's byte in them."""
    mark = "\ufeff" if encoding.endswith("e") else ""
    text = f"{mark}/tokens\r\nਾഊ first?\r\n\nsecond?"
    result = world.run("chat", document, input=text.encode(encoding))
    assert result.exit_code == 0, result.stderr
    assert world.session is not None
    assert [turn.question for turn in world.session.turns] == ["ਾഊ first?", "second?"]


@pytest.mark.parametrize(
    ("data", "message", "turns"),
    [
        (b"\xff\xfea\0\n\0\0\xd8?\0\n\0b\0", "a lone surrogate at character 0", 2),
        (b"\xff\xfea\0\n\0b\0c", "standard input is not valid UTF-16: byte 8 (0x63)", 1),
        (b"\xff\xfea\0\n\0b\0\n", "standard input is not valid UTF-16: byte 8 (0x0a)", 1),
        (b"\xff\xfe\0\0a\0\0\0\n\0\0", "standard input is not valid UTF-32: byte 8 (0x0a)", 0),
        (b"a\n\xc3", "byte 0xc3 at character 0 is not UTF-8", 1),
        (b"%PDF-1.7\n", "standard input is a PDF", 0),
        (b"a\0b\0\n\0", "standard input looks binary, not text", 0),
        (b"\x7fELF\n", "standard input is a program", 0),
    ],
)
def test_piped_questions_that_are_no_text_are_refused(
    world: World, document: str, data: bytes, message: str, turns: int
) -> None:
    """A part of a character at the end is named as `minikv ask -` names it."""
    if "is not valid" in message:
        assert message in world.run("ask", "-", document, input=data).stderr
    result = world.run("chat", document, input=data)
    assert message in result.stderr
    assert result.exit_code == 2
    assert world.session is not None
    assert world.session.turn == turns


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("\ufeff\ufeffone\n\ufefftwo\n", ["one", "\ufefftwo"]),
        ("one\rtwo\r\n\nthree\r", ["one", "two", "", "three"]),
        ("one\r\rtwo", ["one", "", "two"]),
        ("\n", [""]),
        ("\ufeff\ufeff", []),
        ("", []),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_where_piped_lines_begin_and_end(
    monkeypatch: pytest.MonkeyPatch, text: str, lines: list[str], encoding: str
) -> None:
    data = io.BytesIO(text.encode(encoding))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=data))
    read = PipedLines()
    assert [read() for _ in lines] == lines
    for _ in range(2):
        with pytest.raises(EOFError):
            read()


def test_a_piped_question_is_there_before_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in UTF-16, where a line's end has two bytes."""
    read, write = os.pipe()
    os.set_blocking(read, False)  # to read on would end the line
    with open(read, "rb") as stream, open(write, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
        lines = PipedLines()
        for question in ("\ufeffone", "two"):
            pipe.write(f"{question}\r\n".encode("utf-16-le"))
            assert lines() == question.strip("\ufeff")
            assert stream.peek(1) == b""


def test_chat_without_terminal_and_document_is_a_usage_error(world: World) -> None:
    result = world.run("chat", input="a text\nof two lines\n")
    assert result.exit_code == 2
    assert "not a terminal" in result.stderr
    assert world.session is None


def test_a_resumed_chat_says_which_settings_are_its_own(
    world: World, document: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run("chat", document, "--budget", "64", "-S", "be brief", input="q\n/save x\n")
    monkeypatch.setenv("MINIKV_BUDGET", "128")
    monkeypatch.setenv("MINIKV_SEED", "9")
    monkeypatch.setenv("MINIKV_TOP_K", "5")

    def shown(*flags: str) -> dict[str, list[str]]:
        world.engine = FakeEngine()
        result = world.run("chat", "--resume", "x", *flags, input="/set\n")
        assert result.exit_code == 0, result.stderr
        return {line.split()[0]: line.split()[1:] for line in result.stderr.splitlines()}

    rows = shown()
    assert rows["budget"] == ["64", "chat", "x"]
    assert rows["seed"] == ["0", "chat", "x"]
    assert rows["system"] == ["be", "brief", "chat", "x"]
    assert rows["dtype"][1:] == ["chat", "x"]
    assert rows["top_k"] == ["5", "MINIKV_TOP_K"]
    assert rows["offline"] == ["false", "default"]
    rows = shown("--seed", "3", "-S", "be long", "--pin-system", "--offline")
    assert rows["seed"] == ["3", "--seed"]
    assert rows["system"] == ["be", "long", "--system"]
    assert rows["pin_system"] == ["true", "--pin-system"]
    assert rows["offline"] == ["true", "--offline"]


def test_blanks_before_and_after_a_command_are_no_part_of_it(world: World, document: str) -> None:
    lines = [" /policy streaming", "/policy\tsnapkv", "  //x"]
    result = world.run("chat", document, input="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("from the next question on: ") == 2
    assert "snapkv, then" in result.stderr
    assert world.session is not None
    assert world.session.messages[0].content.endswith("\n\n  /x")


def test_help_has_a_narrow_first_column(world: World, document: str) -> None:
    lines = world.run("chat", document, input="/help\n/help kept\n").stderr.splitlines()
    assert "/stats                    what the last turn cost, measured" in lines
    shown = [i for i, line in enumerate(lines) if line.startswith("/kept ")]
    assert len(shown) == 2
    for i in shown:
        assert lines[i].endswith("head H]]")
        assert re.match(r" {26}\S", lines[i + 1])


def test_a_chat_that_is_not_saved_is_told_in_the_words_of_a_shell(
    world: World, document: str
) -> None:
    result = world.run("chat", "--resume", "thesis")
    assert result.exit_code == 2
    first, hint = result.stderr.splitlines()
    assert first == "error: no saved chat 'thesis'"
    assert hint.startswith("  there is none in /")
    for n in range(6):
        world.engine = FakeEngine()
        world.run("chat", document, input=f"q\n/save theses-{n}\n")
    result = world.run("chat", "--resume", "thesis-3")
    first, hint = result.stderr.splitlines()
    assert first == "error: no saved chat 'thesis-3'"
    assert hint == (
        "  did you mean theses-3? saved are theses-5, theses-4, theses-3, theses-2, theses-1, ...; "
        "`minikv chats` lists all"
    )


def test_reread_is_for_a_saved_chat(world: World, document: str) -> None:
    result = world.run("chat", document, "--reread", input="q\n")
    assert result.exit_code == 2
    assert "minikv chat --resume NAME --reread" in result.stderr
    assert world.session is None


def test_a_report_of_what_is_no_export_says_how_to_make_one(world: World, document: str) -> None:
    world.run("chat", document, input="q\n/save x\n")
    result = world.run("report", "x")
    assert result.exit_code == 2
    assert "minikv chat --resume x, then /export chat.json" in result.stderr
    result = world.run("report", "nope")
    assert result.exit_code == 2
    assert "cannot read nope: No such file" in result.stderr
    assert "in a chat, /export chat.json writes one" in result.stderr


def test_slash_commands(world: World, document: str, tmp_path: Path) -> None:
    other = tmp_path / "other file.txt"
    other.write_text("more")
    lines = [
        "/help",
        "/stats",
        "/policy",
        "/budget",
        "/policy streaming sinks=2",
        "/budget 64",
        "q1",
        "/stats",
        f"/add '{other}'",
        "q2",
        "/clear",
        "q3",
        "/reset",
        "q4",
        "//x",
        "/exit",
        "never asked",
    ]
    result = world.run("chat", document, input="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    session = world.session
    assert session is not None
    assert [m.content for m in session.messages if m.role == "user"] == ["q4", "/x"]
    assert session.eviction.policy == "streaming"
    assert session.eviction.policy_options["sinks"] == 2
    assert str(session.eviction.budget) == "64"
    assert len(result.stdout.splitlines()) == 5
    for text in (
        "/help, /?",
        "no turn yet",
        "nothing evicted · budget auto, adakv, then h2o if not all fits",
        "streaming, then streaming",
        "other file.txt: 4 characters",
        "2 documents will be read",
        "memory     KV",
    ):
        assert text in result.stderr, text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/settle", "unknown command /settle"),
        ("/hlep", "did you mean /help?"),
        ("/exitnow", "unknown command /exitnow"),
        ("/exit now", "/exit takes nothing"),
        ("/add", "/add takes files"),
        ("/add /nonexistent", "no such file"),
        ("/add 'unclosed", "No closing quotation"),
        ("/kept find it's", "put a text with ' in it in double quotes"),
        ("/ kept", "unknown command /"),
        ("/help add docs", "/help takes one command, got 'add docs'"),
        ("/undo 0", "/undo or /undo 2"),
        ("/save _x", "beginning with a letter or digit"),
        ("/policy adakb", "did you mean adakv?"),
        ("/budget tiny", "cannot read the budget"),
        ("/budget 99999999999999999999", "more than any memory holds"),
        ("/add ~/report", "no such file: /nonexistent/report"),
        ("/budget 5", "smallest useful"),
        ("/budget 5 6", "/budget takes one value"),
        ("/help nothing", "no command /nothing"),
    ],
)
def test_bad_commands_explain_themselves_and_the_chat_goes_on(
    world: World, document: str, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    result = world.run("chat", document, input=f"{line}\nstill here?\n")
    assert message in result.stderr
    assert result.exit_code == 2  # scripted: the first failure's code
    assert len(result.stdout.splitlines()) == 1
    assert world.session is not None
    assert world.session.messages[0].content.endswith("still here?")


def test_ctrl_c_in_a_command_does_not_end_the_chat(
    world: World, document: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = named.read_file

    def interrupted(path: str, *rest: Any, **more: Any) -> named.Text:
        if world.session is not None:
            os.kill(os.getpid(), signal.SIGINT)
        return read(path, *rest, **more)

    monkeypatch.setattr(named, "read_file", interrupted)
    result = world.run("chat", document, input=f"/add {document}\nstill here?\n")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 1
    assert world.session is not None
    assert len(world.session.documents) == 2


def test_a_turn_that_fails_leaves_the_chat_intact(world: World, document: str) -> None:
    world.max_context = 120
    result = world.run("chat", document, input=f"{'long ' * 30}\nshort?\n")
    assert result.exit_code == 5
    assert "/drop NUMBER takes one out" in result.stderr
    assert result.stdout == answer_of("The mill is run by Ada.", "short?") + "\n"


def test_invalid_bytes_in_a_piped_question_are_refused_and_the_chat_goes_on(
    world: World, document: str
) -> None:
    result = world.run("chat", document, input=b"caf\xe9?\nfine?\n")
    assert "not valid Unicode: byte 0xe9 at character 3 is not UTF-8" in result.stderr
    assert len(result.stdout.splitlines()) == 1
    assert result.exit_code == 2


@pytest.mark.parametrize("where", ["flag", "variable", "file", "command"])
def test_a_system_prompt_that_is_not_utf_8_is_refused(
    world: World, document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    wrong, flags, typed = "caf\udce9", [], b"fine?\n"
    if where == "flag":
        flags = ["--system", wrong]
    elif where == "variable":
        monkeypatch.setenv("MINIKV_SYSTEM", wrong)
    elif where == "file":
        (tmp_path / "system.txt").write_bytes(os.fsencode(wrong))
        flags = ["--system", f"@{tmp_path / 'system.txt'}"]
    else:
        typed = b"/system caf\xe9\n" + typed
    result = world.run("chat", document, *flags, input=typed)
    assert result.exit_code == 2
    assert "0xe9" in result.stderr
    if where == "command":
        assert world.session is not None
        assert (world.session.turn, world.session.system) == (1, "")
    else:
        assert world.session is None


# -- policies, version, help ----------------------------------------------------------------


def test_policies_come_from_the_registry() -> None:
    from minikv.policies import method_names, prompt_names, read_options, registry, step_names

    table = CliRunner().invoke(app, ["policies"]).stdout
    records = json.loads(CliRunner().invoke(app, ["policies", "--json"]).stdout)
    assert [record["name"] for record in records] == method_names()
    assert all(len(line) <= 80 for line in table.splitlines())
    words = " ".join(table.split())
    assert f" --policy takes {', '.join(prompt_names())} --decode" in words
    assert f" --decode takes {', '.join(step_names())} parts" in words
    for info in registry.methods():
        name = info.name
        assert re.search(rf"^{re.escape(name)} .*{info.paper}$", table, re.MULTILINE)
        card = CliRunner().invoke(app, ["policies", "show", name])
        assert card.exit_code == 0
        for option in info.options:
            default = re.search(rf"^-o {option.name}=(.+)$", card.stdout, re.MULTILINE)
            assert default is not None
            given = {option.name: default[1]}
            assert read_options(name, info.options, given)[option.name] == option.default
        assert all(len(line) <= 80 for line in card.stdout.splitlines())
        shown = json.loads(CliRunner().invoke(app, ["policies", "show", name, "--json"]).stdout)
        assert shown == next(record for record in records if record["name"] == name)
    assert CliRunner().invoke(app, ["policies", "show", "adakb"]).exit_code == 2


def test_version_and_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"minikv {minikv.__version__}\n"
    for arguments in ([], ["ask"], ["chat"], ["policies"]):
        result = CliRunner().invoke(app, [*arguments, "--help"])
        assert result.exit_code == 0
        lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
        assert re.match(r"(echo .* \| )?minikv ", lines[1]), "help begins with an example to copy"
    # The very first example is complete: it needs no file that a stranger does not have.
    assert re.search(r'^ *echo ".+" \| minikv ask ".+\?" *$', CliRunner().invoke(app).stdout, re.M)


# -- as a process ---------------------------------------------------------------------------


def spawn(*arguments: str, pace: float = 0.0) -> list[str]:
    return [sys.executable, str(HERE / "support" / "fake_main.py"), str(pace), *arguments]


@pytest.mark.parametrize("name", ["config", "bench"])
def test_a_command_without_the_one_below_it_shows_its_help(name: str) -> None:
    done = run(name, pace=0)
    assert done.code == 2
    assert f"Usage: minikv {name}" in done.out + done.err
    assert "error" not in done.err


def test_no_document_and_no_terminal_does_not_hang() -> None:
    done = subprocess.run(
        spawn("ask", "q"), stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("script", "answered"),
    [
        ('read -r line; "$@" "$line" "$FILE" && cat', 1),
        pytest.param(
            'while read -r line; do "$@" "$line" "$FILE" || exit; done', 3, marks=pytest.mark.soak
        ),
    ],
    ids=["first", "loop"],
)
def test_a_loop_over_lines_runs_for_every_line(document: str, script: str, answered: int) -> None:
    """Each one leaves what follows on standard input to the next."""
    lines = ["one?", "two?", "three?"]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *spawn("ask", "-q")],
        env={**os.environ, "FILE": document},
        input="\n".join([*lines, ""]),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = [answer_of(Path(document).read_text(), line, 40) for line in lines[:answered]]
    assert done.stdout.splitlines() == [*said, *lines[answered:]]


def test_an_open_pipe_does_not_make_it_wait(document: str) -> None:
    with Piped("ask", "q", document, pace=0) as process:
        assert process.wait() == 0  # nobody has closed its standard input
        assert process.stdout.read() != b""


def test_a_broken_pipe_ends_quietly(document: str) -> None:
    with Piped("ask", "q", document, "-q", pace=0.01) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait() == 0
        assert process.stderr.read() == b""


def redirected(how: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with a shell's redirection, such as `2>&-`."""
    shell = ["sh", "-c", f'exec "$@" {how}', "sh", *spawn(*arguments)]
    return subprocess.run(
        shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("how", ["2>&-", "<&-"])
def test_an_answer_needs_neither_stderr_nor_stdin(document: str, how: str) -> None:
    done = redirected(how, "ask", "q", document, "--stats")
    said = answer_of(Path(document).read_text(), "q", 40)
    assert (done.returncode, done.stdout) == (0, f"{said}\n")
    assert redirected(how, "ask", "q", f"{document}.not").returncode == 2


def test_an_answer_needs_no_room_for_what_is_said_beside_it(document: str) -> None:
    done = run("ask", "q", document, "--stats", errors="/dev/full", pace=0)
    said = answer_of(Path(document).read_text(), "q", 40)
    assert (done.code, done.out) == (0, f"{said}\n")
    assert run("ask", "q", f"{document}.not", errors="/dev/full", pace=0).code == 2


@pytest.mark.parametrize(
    ("arguments", "how", "reason"),
    some_by_day(
        [
            (arguments, *how)
            for arguments in (("ask", "q"), ("policies",), ("--version",), ("--help",))
            for how in (
                (">&-", "Bad file descriptor"),
                (">/dev/full", "No space left on device"),
            )
        ],
        lambda case: case[:2] != (("ask", "q"), ">&-"),
    ),
)
def test_output_that_cannot_be_written_is_an_error_and_no_bug(
    document: str, arguments: tuple[str, ...], how: str, reason: str
) -> None:
    files = [document, "-q"] if arguments[0] == "ask" else []
    done = redirected(how, *arguments, *files)
    assert done.returncode == 1
    assert done.stderr == f"error: cannot write the output: {reason}\n"


@pytest.mark.parametrize("module", ["minikv", "minikv.cli"])
def test_ctrl_c_while_python_imports_is_quiet(module: str, tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, b"")


def test_interrupted_ask_keeps_what_was_written_and_leaves_with_130(document: str) -> None:
    with Piped("ask", "q", document, pace=0.05) as process:
        start = process.stdout.read(2)
        process.send_signal(signal.SIGINT)
        said = start + process.stdout.read()
        assert process.wait() == 130
        assert 2 < len(said) < 40
        assert said.endswith(b"\n")
        assert b"Traceback" not in process.stderr.read()


def test_a_piped_chat_that_waits_for_a_line_ends_with_ctrl_c(document: str) -> None:
    with Piped("chat", document, pace=0) as process:
        process.stdin.write(b"q\n")
        assert process.stdout.readline()
        time.sleep(0.3)  # from the answer to the next line
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130


_ECHO = """
import os, sys, termios
from fakes import ByteTokenizer, ChatML, FakeEngine
import minikv.cli.turn
from minikv.cli.main import run
from minikv.chat.session import ChatSession

def note(where):
    with open(os.environ["NOTES"], "a") as file:
        echoed = termios.tcgetattr(2)[3] & termios.ECHO
        print(where, "echoed" if echoed else "silent", file=file)

class Tokenizer(ByteTokenizer):
    def encode(self, text):
        note("encoding")
        return super().encode(text)

def build(settings, progress=None):
    note("loading")
    engine, tokenizer = FakeEngine(), Tokenizer()
    engine.hook = lambda fed: note("reading")
    return ChatSession(engine, tokenizer, ChatML(tokenizer), settings, max_context=4096)

minikv.cli.turn.build = build
run()
"""


@pytest.mark.parametrize("out", some_by_day(["/dev/null", "/dev/stdout"], "/dev/null".__eq__))
def test_keys_pressed_while_something_runs_are_not_echoed(
    document: str, tmp_path: Path, out: str
) -> None:
    """While the model loads, under a command and around an answer, wherever that goes."""
    notes = tmp_path / "notes"
    terminal = Terminals(
        ["sh", "-c", f'exec "$@" >{out}', "sh", sys.executable, "-c", _ECHO, "chat", document],
        {
            "TERM": "xterm",
            "COLUMNS": "100",
            "NOTES": str(notes),
            "PYTHONPATH": str(HERE / "support"),
        },
    )
    terminal.prompt = "\x1b[?25h"
    try:
        terminal.until("Ctrl-D leaves.")
        for line, end in (("/docs", "read with your next question"), ("q", "without eviction")):
            terminal.ready()
            terminal.type(f"{line}\r")
            terminal.until(end)
        terminal.ready()
        terminal.type("/exit\r")
        assert terminal.code() == 0
    finally:
        terminal.close()
    assert set(notes.read_text().splitlines()) == {
        "loading silent",
        "encoding silent",
        "reading silent",
    }


ANSWER = "dbp"
"""What the answer to the first question begins with."""


@pytest.fixture(params=["dumb", "xterm"])
def talk(request: pytest.FixtureRequest, document: str) -> Iterator[Terminals]:
    """A chat on a terminal, with plain input and with the line editor."""
    env = {"TERM": request.param, "COLUMNS": "100", "LINES": "40"}
    terminal = Forked("chat", document, env=env, pace=0.04)
    terminal.until("Ctrl-D leaves.")
    terminal.ready()
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_only_and_ctrl_d_leaves(talk: Terminals) -> None:
    talk.type("first?\r")
    talk.until(ANSWER)
    talk.type("\x03")
    talk.until("stopped by user")
    talk.until("without eviction")
    talk.ready()
    talk.type("second?\r")
    talk.until("40 tokens · ")
    talk.until("without eviction")
    talk.ready()
    talk.type("\x04")
    assert talk.code() == 0
    assert "Traceback" not in talk.seen


def test_ctrl_c_at_the_prompt_hints_and_twice_leaves(talk: Terminals) -> None:
    talk.type("\x03")
    talk.until("Ctrl-D or /exit leaves")
    talk.ready()
    talk.type("\x03")
    assert talk.code() == 130
    assert "Traceback" not in talk.seen


def test_ctrl_c_at_the_prompt_drops_nothing_that_is_typed_later(talk: Terminals) -> None:
    talk.type("\x03")
    talk.until("Ctrl-D or /exit leaves")
    talk.ready()
    talk.type("/docs\r/tokens\r")
    talk.until("report.txt")
    talk.until("room left")


def test_ctrl_c_while_reading_adds_nothing(talk: Terminals) -> None:
    talk.type(f"{'word ' * 60}\r")
    talk.until("\n")
    time.sleep(0.8)
    talk.type("\x03")
    text = talk.until("nothing was added")
    assert re.search(r"stopped reading at [\d,]+ of [\d,]+ tokens", text)
    talk.ready()
    talk.type("short?\r")
    talk.until("40 tokens · ")
    talk.until("without eviction")
    talk.ready()
    talk.type("/exit\r")
    assert talk.code() == 0


def test_two_interrupts_within_two_seconds_leave(talk: Terminals) -> None:
    talk.type("first?\r")
    talk.until("\n")
    time.sleep(0.5)
    talk.type("\x03")
    time.sleep(0.02)
    talk.type("\x03")
    assert talk.code() == 130
    assert "Traceback" not in talk.seen


@pytest.mark.parametrize("typed", [True, False])
def test_a_sent_question_begins_the_count_anew(
    monkeypatch: pytest.MonkeyPatch, typed: bool
) -> None:
    """Of lines from a pipe none is sent by the user, who presses twice to leave all of them."""
    monkeypatch.setattr("minikv.cli.interrupt.TWICE", 1e9)
    session, terminal, interrupts = small_chat.chat(), Terminal(), Interrupts()
    keeper = Keeper(terminal, active=False)
    context = Context(session, terminal, "strict", Generation(4), interrupts, keeper)
    prompt = session.engine.prompt

    def pressing(*given: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return prompt(*given)

    monkeypatch.setattr(session.engine, "prompt", pressing)
    at_the_prompt = [KeyboardInterrupt, "/docs", KeyboardInterrupt]
    coming = iter(["Who?", "Why?", "/docs", *at_the_prompt, EOFError])

    def read_line() -> str:
        line = next(coming)
        if isinstance(line, str):
            return line
        raise line

    if typed:
        assert converse(context, read_line, typed=True) == 0
    else:
        with pytest.raises(KeyboardInterrupt):
            converse(context, read_line, typed=False)
    assert len(list(coming)) == (0 if typed else 5)


def test_what_was_typed_ahead_is_sent_and_ctrl_c_drops_it(talk: Terminals) -> None:
    """Questions and commands typed during an answer run in order; Ctrl-C takes back all of them."""
    talk.type("first?\r")
    talk.until(ANSWER)
    talk.type("/docs\rsecond?\r")
    for found in ("without eviction", "report.txt", "second?", "without eviction"):
        talk.until(found)
    talk.ready()
    talk.type("third?\rfourth?\r")
    talk.until("third?")
    talk.until("\n")
    time.sleep(0.8)
    talk.type("fifth?\r")
    time.sleep(0.2)
    talk.type("\x03")
    talk.until("stopped by ")
    talk.until("without eviction")
    talk.ready()
    with pytest.raises(AssertionError, match="no 'tok/s"):
        talk.until("tok/s", 1.5)
    talk.type("/exit\r")
    assert talk.code() == 0
    assert "fifth" not in talk.seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_ends_a_question_with_143(document: str, number: int) -> None:
    """Without a terminal, too: what was written stays, and one newline ends it."""
    with Piped("ask", "first?", document, pace=0.05) as process:
        first = process.stdout.read(3)
        process.send_signal(number)
        out = process.stdout.read()
        assert process.wait() == 143
        assert re.fullmatch(rb"[a-z]{3,39}\n", first + out)
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("moment", "term", "number"),
    some_by_day(
        [
            (moment, *how)
            for moment in ("prompt", "answer", "loading")
            for how in (
                ("dumb", signal.SIGTERM),
                ("xterm", signal.SIGTERM),
                ("xterm", signal.SIGHUP),
            )
        ],
        lambda case: case[1:] == ("xterm", signal.SIGTERM) or case[0] == "answer",
    ),
)
def test_sigterm_saves_the_chat_and_leaves_the_terminal_clean(
    document: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    term: str,
    number: int,
) -> None:
    """143, no toolbar, the terminal's mode as before, and what was written of the answer kept."""
    import pyte

    home = tmp_path / "home"
    env = {"TERM": term, "COLUMNS": "100", "LINES": "24", "MINIKV_HOME": str(home)}
    talk: Terminals
    if moment == "loading":  # the imports of a process of its own take long enough
        command = ["sh", "-c", 'echo up; exec "$@"', "sh", *spawn("chat", document)]
        talk = Terminals(command, env)
        talk.until("up")
        before = termios.tcgetattr(talk.fd)
    else:
        talk = Forked("chat", document, env=env, pace=0.04)
        before = talk.modes
    try:
        if moment == "loading":
            while termios.tcgetattr(talk.fd) == before:
                time.sleep(0.01)
        else:
            talk.until("Ctrl-D leaves.")
            talk.ready()
        if moment == "answer":
            talk.type("first?\r")
            talk.until(ANSWER)
        os.kill(talk.pid, number)
        with contextlib.suppress(AssertionError):
            talk.until("never", 2)  # read on to the end
        after = termios.tcgetattr(talk.fd)
        assert talk.code() == 143
    finally:
        talk.close()
    assert after == before
    assert "Traceback" not in talk.seen
    screen = pyte.Screen(100, 24)
    pyte.Stream(screen).feed(talk.seen)
    assert not any("of 4,096 tokens" in line for line in screen.display)
    assert talk.seen.rfind("\x1b[?2004h") <= talk.seen.rfind("\x1b[?2004l")
    monkeypatch.setenv("MINIKV_HOME", str(home))
    assert [entry.turns for entry in listing()] == [1] * (moment == "answer")
