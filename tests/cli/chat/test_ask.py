"""`minikv ask`: which words are the question, what is read, what goes to which stream, settings and
exit codes."""

from __future__ import annotations

import errno
import json
import os
import shlex
from functools import partial
from pathlib import Path

import pytest
from refusals import refused
from tables import table
from typed import World, answer_of, fails, said, screen

from minikv.cache.rules import Rules
from minikv.cli.asked import Question
from minikv.cli.chat.ask import ask, sorted_out
from minikv.cli.failures import explain
from minikv.cli.settings.config import Config, Interface
from minikv.cli.settings.flags import Call
from minikv.errors import ContextError, Interrupted, MemoryShortError, NumericsError, UsageError
from minikv.models.errors import CorruptModel, ModelUnavailable
from minikv.settings import Generation, Settings

HERE = Path(__file__)
TEXT = "The mill is run by Ada."
NAMED = f"Document: report.txt\n\n{TEXT}"
KEYS = """
turn policy policy_options budget kernels dtype device tokens kv_bytes time_s rate loss
shaped_by_turn stop_reason seed sampling device_mem warnings reuse kv_dtype weights tier
fidelity against_full dropped
""".split()
HOSTILE = "a\x1b]52;c;QUJD\x07b\x9b31mc\u202ed\u2066e\U000e0041f\u2028g\x00\x7f\b\rh"


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (None, answer_of(TEXT, "Who?")),
        ("\none\n\ntwo\n\n\n", "\none\n\ntwo"),
        (HOSTILE, "a]52;c;QUJDb31mcdefgh"),
    ],
)
def test_stdout_has_the_answer_and_one_newline(
    world: World, document: str, answer: str | None, shown: str
) -> None:
    if answer is not None:
        world.writes(answer)
    result = world.ok("ask", "Who?", document)
    assert result.stdout == f"{shown}\n"
    assert not {"\x1b", "\r"} & {*result.output}


@pytest.mark.parametrize(
    ("why", "words", "kind"),
    [
        (None, "FILE --remember off", "none"),
        ("it reads everything twice", "FILE --remember off", "file"),
        (None, "FILE --remember off --check on", "file"),
        (None, "-c", "file"),
    ],
)
def test_a_single_question_has_a_tier_only_for_what_is_read_twice(
    world: World, document: str, why: str | None, words: str, kind: str
) -> None:
    """There is no later question for which all that was read could be kept, but for --check, and in
    a chat that continues."""
    world.ok("ask", "Where?", document)
    world.patch.setattr(Rules, "cannot_recall", why)
    world.ok("ask", "Who?", *words.replace("FILE", document).split(), "--tier", "file")
    assert world.session.recall.kind == kind


# -- what is read ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "piped", "read"),
    [
        ("Who?", "piped text", "piped text\n\nWho?"),
        # Beside named files, stdin is read only for a dash.
        ("Who? FILE", "piped", f"{NAMED}\n\nWho?"),
        ("Who? FILE", "", f"{NAMED}\n\nWho?"),
        ("Who? - FILE", "piped", f"piped\n\n{NAMED}\n\nWho?"),
        ("Who? FILE -", "piped", f"{NAMED}\n\npiped\n\nWho?"),
        ("FILE Who?", "", f"{NAMED}\n\nWho?"),
        # A dash as the question is the whole message but for one line end.
        ("- FILE", "  A text,\n\nand a question?", f"{NAMED}\n\n  A text,\n\nand a question?"),
        ("- FILE", "Who?\n", f"{NAMED}\n\nWho?"),
        ("- FILE", "Who?\r\n", f"{NAMED}\n\nWho?"),
        ("- FILE", "Who?\n\n", f"{NAMED}\n\nWho?\n"),
        ("- FILE", "Who?\r\n\r\n", f"{NAMED}\n\nWho?\r\n"),
        ("- FILE", "\nWho? ", f"{NAMED}\n\n\nWho? "),
    ],
)
def test_what_is_read(world: World, document: str, words: str, piped: str, read: str) -> None:
    result = world.ok("ask", *words.replace("FILE", document).split(), input=piped)
    assert world.session.messages[0].content == read
    told = f"read as minikv ask 'Who?' {document}\n"
    assert (told in result.stderr) == (words == "FILE Who?")


@pytest.mark.parametrize(
    ("words", "piped", "message"),
    [
        ("- -", "text", "standard input cannot be both"),
        ("-", "\n", ""),
        ("Who?", "", "no document"),
        ("Who? FILE -", "", "is empty"),
        ("FILE", None, "there is no question: every word names a file\n"),
        ("- FILE", b"\xff\xfea\0\n\0b\0c", "standard input is not valid UTF-16: byte 8 (0x63)"),
        ("- FILE", b"\xff\xfe\0\0a\0\0\0\n\0\0", "input is not valid UTF-32: byte 8 (0x0a)"),
    ],
)
def test_what_is_no_question_about_a_text_is_a_usage_error(
    world: World, document: str, words: str, piped: str | bytes | None, message: str
) -> None:
    result = world.run("ask", *words.replace("FILE", document).split(), input=piped)
    fails(result, 2, message)
    assert (result.stdout, world.settings) == ("", None)


@pytest.mark.parametrize(
    ("files", "piped"),
    [("FILE", b"text"), ("FILE", b""), ("FILE", None), ("FILE -", b"text"), ("", b"text")],
)
def test_a_pipe_that_was_not_read_is_told(
    world: World, document: str, monkeypatch: pytest.MonkeyPatch, files: str, piped: bytes | None
) -> None:
    """None: /dev/null."""
    terminal, named = screen(), files.replace("FILE", document).split()
    call, asked = Call(terminal, Config()), Question("Who?", named)
    reader, writer = os.pipe()
    os.write(writer, piped or b"")
    os.close(writer)
    with open(reader) as pipe, open(os.devnull) as null:
        monkeypatch.setattr("sys.stdin", null if piped is None else pipe)
        ask(asked, Settings(remember="off"), Generation(max_tokens=3), Interface(), call)
    told = "what is piped in was not read: `-` as a FILE reads it" in said(terminal)
    assert told == ((files, piped) == ("FILE", b"text"))


def test_a_directory_and_a_pattern_are_documents(world: World, tmp_path: Path) -> None:
    for name, data in (("b.txt", b"two"), ("a.txt", b"one"), ("x.bin", bytes(range(256)))):
        (tmp_path / name).write_bytes(data)
    for words in (("ask", "q", str(tmp_path)), ("chat", str(tmp_path / "*.txt"))):
        result = world.ok(*words, input="q\n" if words[0] == "chat" else None)
        told = f"{tmp_path}: 2 documents, in the order of their paths; skipped 1 binary (x.bin)"
        assert (told in result.stderr) == (words[0] == "ask")
        both = "Document: a.txt\n\none\n\nDocument: b.txt\n\ntwo\n\nq"
        assert world.session.messages[0].content == both


# -- what is said beside the answer ---------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "flags", "told"),
    [
        (b"plain", "--stats", "memory     KV "),
        (b"plain", "--stats", "allocated  "),
        (b"plain", "--stats", "peak  "),
        (b"plain", "--stats --weights int4", "weights    int4\n"),
        (b"plain", "-n 3", "stopped at --max-tokens 3"),
        (b"<end> in a text", "", "looks like a control token"),
    ],
)
def test_facts_go_to_stderr_and_quiet_leaves_them_out(
    world: World, tmp_path: Path, text: bytes, flags: str, told: str
) -> None:
    (tmp_path / "d.txt").write_bytes(text)
    words = ("ask", "q", str(tmp_path / "d.txt"))
    loud, plain = world.run(*words, *flags.split()), world.ok(*words)
    quiet = world.run(*words, *flags.split(), "-q")
    assert told in loud.stderr
    assert (told in plain.stderr) == (not flags)
    assert quiet.stdout == loud.stdout
    assert (told in quiet.stderr) == ("--stats" in flags)
    assert len(quiet.stdout) == (4 if "-n" in flags else 13)


def test_an_answer_that_repeats_itself_is_told_of_below_it(world: World, document: str) -> None:
    text = ("no, " * 40)[:150]
    world.writes(text)
    run = partial(world.ok, input="Who?\n")
    for arguments, words in (
        (("ask", "Who?", document), "--repeat-penalty 1.1 or --temperature 0.7"),
        (("chat", document, "--no-save"), "/set repeat_penalty 1.1 or /set temperature 0.7"),
    ):
        result, line = run(*arguments), f"! the answer repeats itself; {words} may help\n"
        assert text in result.stdout
        assert result.output.index(line) > result.output.index(text) + len(text)
        assert result.stderr.count(line) == 1
    quiet = run("ask", "Who?", document, "-q")
    assert (quiet.stdout, quiet.stderr) == (f"{text}\n", "")
    record = json.loads(run("ask", "Who?", document, "--json", "-q").stdout)
    assert [one[:25] for one in record["warnings"]] == ["the answer repeats itself"]
    assert record["sampling"]["repeat_penalty"] == 1.0


def test_json_has_the_answer_and_the_turn_record(world: World, document: str) -> None:
    answer = "é\x7f\x1b[3m☃"
    world.writes(answer)
    result = world.run("ask", "q", document, "--json")
    record = json.loads(result.stdout)
    assert record.pop("answer") == answer  # JSON keeps what a terminal must not see
    assert {*record} == {*KEYS}
    assert result.stdout.isascii()
    assert not {"\x1b", "\x7f"} & {*result.stdout}
    assert record["tokens"]["generated"] == len(answer.encode())
    assert record["kv_bytes"]["full"] == record["kv_bytes"]["held"] > 0
    assert record["weights"] == "plain"
    packed = world.run("ask", "q", document, "--json", "--weights", "int4")
    assert json.loads(packed.stdout)["weights"] == "int4"


# -- settings -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "adakb"], "did you mean adakv?"),
        (["-o", "window"], "an option is name=value"),
        (["-o", "colour=red"], "no option 'colour'"),
        (["-o", "window=0"], "must be between"),
        (["-n", "0"], "--max-tokens must be"),
        (["--system", "@/nonexistent"], "no such file"),
        (["/nonexistent.txt"], "no such file"),
        ([""], "no such file: ''"),
        (["nothing/*.txt"], "no file matches nothing/*.txt"),
        (["https://x.org/a"], "curl -sL https://x.org/a | minikv ask"),
        (["cli.text"], "minikv looked in /"),
        ([str(HERE.with_name("test_as.py"))], f"did you mean {HERE}?"),
        (["/nowhere/x"], "there is no directory /nowhere"),
        (["--budget", "9" * 20], "more than any memory holds"),
    ],
)
def test_usage_errors_are_one_line_and_a_hint(
    world: World, document: str, arguments: list[str], message: str
) -> None:
    result = world.run("ask", "q", document, *arguments)
    said = fails(result, 2, message)
    assert said.startswith("error: ")
    assert said.count("\n") <= 2
    assert world.run("chat", document, *arguments, input="q\n").stderr == said
    assert result.stdout == ""
    assert world.settings is None, "refused before a model is loaded"


# -- failures -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (UsageError("x"), 2, "error: x\n"),
        (ModelUnavailable("repo \x1b[2Jx", "try \x1b]0;y"), 3, "error: repo [2Jx\n  try ]0;y\n"),
        (MemoryShortError("x"), 4, "error: x\n"),
        (MemoryError(), 4, ""),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 4, ""),
        (RuntimeError("could not create a primitive"), 4, ""),
        (RuntimeError("can't start new thread"), 4, ""),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 4, ""),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), 4, ""),
        (OSError(errno.EIO, "I/O", "a\x1b.txt"), 1, "error: the system refused: I/O: a.txt\n"),
        (ContextError("x"), 5, "error: x\n"),
        (CorruptModel("x"), 6, "error: x\n"),
        (Interrupted("x"), 130, ""),
        (NumericsError("x"), 1, "error: x\n"),
        (ZeroDivisionError("inside"), 1, "bug in minikv"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_every_kind_of_failure_has_its_exit_code(
    world: World, document: str, error: BaseException, code: int, told: str
) -> None:
    world.failure = error
    result = world.run("ask", "q", document)
    assert ("bug in" in fails(result, code, told)) == isinstance(error, ZeroDivisionError)
    assert result.stdout == ""


def test_debug_shows_where(world: World, document: str) -> None:
    def fail(fed: list[int]) -> None:
        raise ZeroDivisionError("inside")

    world.engine.hook = fail
    for words in (("ask", "q", document), ("chat", document)):
        plain, debug = (world.run(*words, *flag, input="q\n") for flag in ((), ("--debug",)))
        assert "Traceback" not in plain.stderr
        where, _, error = debug.stderr.partition(", in fail\n")
        assert "Traceback" in where
        assert "error: ZeroDivisionError: inside" in error
        assert debug.exit_code == 1
    # An error text of many lines becomes one.
    assert "\n" not in explain(ValueError("a\nb\n\nc" * 500)).message
    assert len(explain(ValueError("x" * 10_000)).message) < 500


# -- which words are the question: the first, or the only one that names no file --------------
@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("report.txt", "notes.md", "my report.txt", "todo", "docs/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")


@table("""
    line                                         | asked
    'What is it?' report.txt                     |
    'What is it?'                                |
    What                                         |
    What report.txt                              |
    'report.txt is what?' notes.md - docs '*.md' |
    - report.txt                                 |
    - -                                          |
    'What is it?' reprot.txt                     |
    'What is it?' reprot.txt notes.md            |
    '' report.txt                                |
    'a\0b' report.txt                            |
    'Does **this** match [anything]?' report.txt |
    report.txt 'What is it?'                     | 'What is it?' report.txt
    report.txt Why                               | Why report.txt
    report.txt Why?                              | 'Why?' report.txt
    'my report.txt' 'What is new in v1.2'        | 'What is new in v1.2' 'my report.txt'
    report.txt notes.md 'What is it?'            | 'What is it?' report.txt notes.md
    report.txt 'What is it?' notes.md -          | 'What is it?' report.txt notes.md -
    docs 'What is it?'                           | 'What is it?' docs
    'docs/*.txt' 'What is it?'                   | 'What is it?' 'docs/*.txt'
    reprot.txt 'What is it?'                     | 'What is it?' reprot.txt
    reprot.txt What?                             | 'What?' reprot.txt
    reprot.txt notes.md Why                      | Why reprot.txt notes.md
    report.txt nots.md 'Who is it'               | 'Who is it' report.txt nots.md
""")
@pytest.mark.usefixtures("here")
def test_the_first_word_is_the_question_or_the_only_one_without_a_file(
    line: str, asked: str
) -> None:
    """asked: what it was taken for, if that is not the line itself. Reading a file that is not
    there says so."""
    first, *others = shlex.split(line)
    question, *files = shlex.split(asked or line)
    note = f"read as minikv ask {asked}" if asked else ""
    assert sorted_out(first, others) == (question, files, note)
    assert sorted_out(question, files) == (question, files, "")


@table("""
    line                             | typed
    report.txt                       | QUESTION report.txt
    report.txt notes.md              | QUESTION report.txt notes.md
    report.txt -                     | QUESTION report.txt -
    todo report.txt                  | QUESTION todo report.txt
    report.txt nots.md               | QUESTION report.txt nots.md
    report.txt who knows             | 'who knows' report.txt
    report.txt 'Who is it' 'And why' | 'Who is it And why' report.txt
    report.txt what is notes.md then | 'what is then' report.txt notes.md
    hello there                      | 'hello there' FILE
    Who notes                        | 'Who notes' FILE
    What is this about               | 'What is this about' FILE
    What 'is it' report.txt          | 'What is it' report.txt
    What is this about reprot.txt    | 'What is this about' reprot.txt
    What is in docs about report.txt | 'What is in about' docs report.txt
    report.txt what is it            | 'what is it' report.txt
    What is this about report.txt    | 'What is this about' report.txt
    What is this docs/ notes.md -    | 'What is this' docs/ notes.md -
    Who runs reprot.txt notes.md     | 'Who runs' reprot.txt notes.md
    Summarise briefly report.txt     | 'Summarise briefly' report.txt
    reprot.txt what is it?           | 'what is it?' reprot.txt
    What is a 'b c' report.txt       | 'What is a b c' report.txt
""")
@pytest.mark.usefixtures("here")
def test_the_rest_is_refused_with_the_line_to_type(line: str, typed: str) -> None:
    first, *others = shlex.split(line)
    words = shlex.split(typed)
    message = "there is no question" if "QUESTION" in words else "name no file"
    assert f"minikv ask {typed}" in refused(message, sorted_out, first, others).hint
    if "QUESTION" not in words:
        assert sorted_out(words[0], words[1:]) == (words[0], words[1:], "")
