"""`minikv chat` with lines from a pipe: turns, slash commands, refusals."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tables import table
from typed import World, answer_of, fails

from minikv.cli.documents import named

TEXT = "The mill is run by Ada."


def test_piped_questions_are_turns(world: World, document: str) -> None:
    result = world.ok("chat", document, input="first?\nsecond?\n\n")
    first, second = result.stdout.splitlines()
    assert first == answer_of(TEXT, "first?")
    assert first != second
    assert world.session.turn == 2
    assert result.stderr.count("first token") == 2
    # A turn that fails leaves the chat intact.
    world.max_context = 120
    result = world.run("chat", document, input=f"{'long ' * 30}\nshort?\n")
    fails(result, 5, "/drop NUMBER removes one")
    assert result.stdout == answer_of(TEXT, "short?") + "\n"


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]
)
def test_piped_questions_are_decoded(world: World, document: str, encoding: str) -> None:
    """As PowerShell and Notepad write them; U+0A3E and U+0D0A have a line end's byte in them."""
    mark = "\ufeff" if encoding.endswith("e") else ""
    text = f"{mark}/tokens\r\nਾഊ first?\r\n\nsecond?"
    world.ok("chat", document, input=text.encode(encoding))
    assert [turn.question for turn in world.session.turns] == ["ਾഊ first?", "second?"]


@pytest.mark.parametrize(
    ("data", "message", "turns"),
    [
        (b"\xff\xfea\0\n\0\0\xd8?\0\n\0b\0", "a lone surrogate at character 0", 2),
        (b"\xff\xfea\0\n\0b\0c", "standard input is not valid UTF-16-LE", 1),
        (b"\xff\xfea\0\n\0b\0\n", "standard input is not valid UTF-16-LE", 1),
        (b"\xff\xfe\0\0a\0\0\0\n\0\0", "standard input is not valid UTF-32-LE", 0),
        (b"a\n\xc3", "byte 0xc3 at character 0 is not UTF-8", 1),
        (b"caf\xe9?\nfine?\n", "not valid Unicode: byte 0xe9 at character 3 is not UTF-8", 1),
        (b"/system caf\xe9\nfine?\n", "0xe9", 1),
        (b"%PDF-1.7\n", "standard input is a PDF", 0),
        (b"a\0b\0\n\0", "standard input looks binary, not text", 0),
        (b"\x7fELF\n", "standard input is a program", 0),
    ],
)
def test_piped_lines_that_are_no_text_are_refused(
    world: World, document: str, data: bytes, message: str, turns: int
) -> None:
    """A wrong line is refused, and the chat continues."""
    fails(world.run("chat", document, input=data), 2, message)
    assert (world.session.turn, world.session.system) == (turns, "")


@table("""
    words                   | message
                            | not a terminal
    FILE -                  | no terminal to read questions from
    FILE --reread           | minikv chat --resume NAME --reread
    FILE --system caf\udce9 | 0xe9
    FILE --system @LATIN    | 0xe9
    FILE                    | 0xe9
""")
def test_what_cannot_begin(world: World, document: str, words: str, message: str) -> None:
    latin, opened = Path(document).with_name("latin.txt"), os.open
    latin.write_bytes(b"caf\xe9")

    def without_terminal(path: Any, *how: int, **more: Any) -> int:
        if path == "/dev/tty":
            raise OSError
        return opened(path, *how, **more)

    world.patch.setattr(os, "open", without_terminal)
    if words == "FILE":
        world.patch.setenv("MINIKV_SYSTEM", "caf\udce9")
    given = words.replace("FILE", document).replace("LATIN", str(latin)).split()
    result = world.run("chat", *given, input="a text\nof two lines\n")
    fails(result, 2, message)
    assert (result.stdout, world.settings) == ("", None)


# -- saved chats ----------------------------------------------------------------------------
def test_a_resumed_chat_says_which_settings_are_its_own(world: World, document: str) -> None:
    world.run("chat", document, "--budget", "64", "-S", "be brief", input="q\n/save x\n")
    for name, value in (("BUDGET", "128"), ("SEED", "9"), ("TOP_K", "5")):
        world.patch.setenv(f"MINIKV_{name}", value)
    flags = ("--seed", "3", "-S", "be long", "--pin-system", "--offline")
    plain = """budget 64 chat x
        seed 0 chat x
        system be brief chat x
        dtype - chat x
        top_k 5 MINIKV_TOP_K
        offline false default"""
    stated = """seed 3 --seed
        system be long --system
        pin_system true --pin-system
        offline true --offline"""
    for given, rows in (((), plain.splitlines()), (flags, stated.splitlines())):
        result = world.ok("chat", "--resume", "x", *given, input="/set\n")
        found = {line.split()[0]: line.split()[1:] for line in result.stderr.splitlines()}
        for name, *row in map(str.split, rows):
            assert found[name][row[0] == "-" :] == row[row[0] == "-" :]


def test_a_chat_that_is_not_saved_is_told_as_in_a_shell(world: World, document: str) -> None:
    first, hint = fails(world.run("chat", "--resume", "thesis"), 2).splitlines()
    assert first == "error: no saved chat 'thesis'"
    assert hint.startswith("  there is none in /")
    for n in range(6):
        world.run("chat", document, input=f"q\n/save theses-{n}\n")
    first, hint = world.run("chat", "--resume", "thesis-3").stderr.splitlines()
    assert first == "error: no saved chat 'thesis-3'"
    assert hint == (
        "  did you mean theses-3? saved are theses-5, theses-4, theses-3, theses-2, theses-1, ...; "
        "`minikv chats` lists all"
    )


# -- slash commands -------------------------------------------------------------------------
def test_slash_commands(world: World, document: str, tmp_path: Path) -> None:
    (tmp_path / "other file.txt").write_text("more")
    lines = f"""/help
/stats
/policy
/set budget
 /policy streaming sinks=2
/policy\tstreaming sinks=2
/set budget 64
q1
/stats
/add '{tmp_path}/other file.txt'
q2
/clear
q3
/reset
q4
  //x
/exit
never asked"""
    result, session = world.ok("chat", document, input=lines), world.session
    assert [m.content for m in session.messages if m.role == "user"] == ["q4", "  /x"]
    eviction = session.eviction
    told = (eviction.policy, eviction.policy_options["sinks"], str(eviction.budget))
    assert told == ("streaming", 2, "64")
    assert len(result.stdout.splitlines()) == 5
    for text, count in {
        "/help, /?": 1,
        "no turn yet": 1,
        "nothing evicted · budget auto, global-span, then h2o if not all fits": 1,
        "streaming, then streaming": 2,
        "from the next question on: ": 2,
        "other file.txt: 4 characters": 1,
        "2 documents will be read": 1,
        "memory     KV": 1,
    }.items():
        assert result.stderr.count(text) >= count, text


def test_help_has_a_narrow_first_column(world: World, document: str) -> None:
    lines = world.run("chat", document, input="/help\n/help kept\n").stderr.splitlines()
    assert "/stats                   what the last turn cost, measured" in lines
    shown = [i for i, line in enumerate(lines) if line.startswith("/kept ")]
    assert len(shown) == 2
    for i in shown:
        assert lines[i].endswith('"TEXT"]')
        assert re.match(r" {25}\S", lines[i + 1])
    world.patch.setenv("COLUMNS", "50")  # where it would leave too little
    lines = world.run("chat", document, input="/help\n").stderr.splitlines()
    assert lines[lines.index("/stats") + 1] == "    what the last turn cost, measured"


@table(r"""
    line              | message
    /settle           | unknown command /settle
    /hlep             | did you mean /help?
    /exitnow          | unknown command /exitnow
    /nonsense         | unknown command /nonsense\n  /help lists the commands
    /policy nonsense  | unknown policy 'nonsense'\n  /policy takes: full
    /exit now         | /exit takes nothing
    /add              | /add takes files
    /add /nonexistent | no such file
    /add 'unclosed    | No closing quotation
    /kept find it's   | put a text with ' in it in double quotes
    / kept            | unknown command /
    /help add docs    | /help takes one command, got 'add docs'
    /undo 0           | /undo or /undo 2
    /save _x          | beginning with a letter or digit
    /policy adakb     | did you mean adakv?
    /add ~/report     | no such file: /nonexistent/report
    /set budget 5     | smallest useful
    /budget 5         | /budget is gone\n  /set budget 256 changes it
    /help nothing     | no command /nothing
""")
def test_bad_commands_explain_themselves_and_the_chat_goes_on(
    world: World, document: str, line: str, message: str
) -> None:
    world.patch.setenv("HOME", "/nonexistent")
    result = world.run("chat", document, input=f"{line}\nstill here?\n")
    fails(result, 2, message)  # scripted: the first failure's code
    assert len(result.stdout.splitlines()) == 1
    assert world.session.messages[0].content.endswith("still here?")


def test_ctrl_c_in_a_command_does_not_end_the_chat(world: World, document: str) -> None:
    read = named.read_file

    def interrupted(path: str, *rest: Any, **more: Any) -> named.Text:
        if world.settings is not None:
            os.kill(os.getpid(), signal.SIGINT)
        return read(path, *rest, **more)

    world.patch.setattr(named, "read_file", interrupted)
    other = Path(document).with_name("more.txt")
    other.write_text("More.")
    result = world.ok("chat", document, input=f"/add {other}\nstill here?\n")
    assert len(result.stdout.splitlines()) == 1
    assert "stopped reading the documents; nothing was added" in result.stderr
    assert len(world.session.documents) == 1
