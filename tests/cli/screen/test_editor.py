"""The line editor on a pseudo-terminal, completion, the history file, and plain `input()`."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from small_chat import chat
from terminals import Terminals

from minikv.cli.failures import Terminated
from minikv.cli.screen import editor, render
from minikv.cli.screen.editor import Commands, Help

# Asks for messages and shows each in one line; `pause` stands for an answer that takes a while.
LOOP = """
import sys, time
from pathlib import Path
from minikv.cli.screen.editor import Help, open_reader
from minikv.cli.screen.terminal import Terminal
history, pause = sys.argv[1], float(sys.argv[2])
words = {1: ["/add", "/policy", "/exit"], 2: ["adakv", "snapkv"]}
terminal = Terminal()
terminal.open_keyboard()
after, bar = lambda typed: words.get(len(typed), []), "BAR 7 · {}".format
help = Help(after, "/add".__eq__, bar)
read = open_reader(terminal, help, Path(history) if history else None)
print("open", flush=True)
while True:
    try:
        text = read()
    except EOFError:
        print("end"); break
    except KeyboardInterrupt:
        print("interrupt", flush=True)
        continue
    print("got", ascii(text), flush=True)
    with terminal.answering():
        print("writing", flush=True)
        time.sleep(pause)
    print("ready", flush=True)
"""
PROMPT = {"xterm": "\x1b[?25h", "dumb": "> "}
READY = "ready\r\n"
PASTE = "\x1b[200~{}\x1b[201~"

Start = Callable[..., Terminals]


@pytest.fixture(scope="module")
def opened() -> Iterator[dict[object, Terminals]]:
    """Loops that stand at their prompt, for the next test that wants one like it."""
    opened: dict[object, Terminals] = {}
    yield opened
    for terminal in opened.values():
        terminal.close()


@pytest.fixture
def start(opened: dict[object, Terminals]) -> Iterator[Start]:
    """Open the loop on a terminal, or take one whose last message has arrived."""
    used: dict[tuple[object, int], Terminals] = {}

    def begin(term: str = "xterm", history: str = "", pause: float = 0.0, **env: str) -> Terminals:
        key = (term, history, pause, *env.items())
        terminal = opened.pop(key, None)
        if terminal is None:
            command = [sys.executable, "-c", LOOP, history, str(pause)]
            terminal = Terminals(command, {"TERM": term, **env})
            terminal.prompt = PROMPT[term]
            terminal.until("open")
        used[(key, len(used))] = terminal
        terminal.ready()
        return terminal

    yield begin
    for (key, _), terminal in used.items():
        rests = terminal.seen[: terminal.at].endswith(READY)
        if terminal.pid and rests and key not in opened:
            opened[key] = terminal
        else:
            terminal.close()


def got(terminal: Terminals, *typed: str) -> str:
    """The next message that arrived, after this was typed."""
    for keys in typed:
        terminal.type(keys)
    terminal.until("got ")
    text = terminal.until("\r\n")
    terminal.until(READY)
    return str(eval(text))


def began(terminal: Terminals, *typed: str) -> None:
    """An answer is being written, in which this is typed."""
    terminal.type("first\r")
    terminal.until("writing")
    for keys in typed:
        terminal.type(keys)


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_lines_blocks_pastes_and_the_end(start: Start, kind: str) -> None:
    """Lines with an Enter each are messages, however fast they come; a block is one, and so is a
    bracketed paste."""
    terminal = start(term=kind)
    assert got(terminal, "a line\r") == "a line"
    terminal.ready()
    assert got(terminal, '"""\r', "one\r", "/two\r", '"""\r') == "one\n/two"
    terminal.ready()
    # Which the chat sends with one slash.
    assert got(terminal, '"""/etc is a folder"""\r') == "//etc is a folder"
    terminal.ready()
    terminal.type('one\rtwo\r"""three\rfour"""\r')
    for message in ("one", "two", "three\nfour"):
        assert got(terminal) == message
    if kind == "xterm":  # a paste waits for Enter; Alt-Enter and Ctrl-J make a new line
        terminal.ready()
        terminal.type(PASTE.format("one\rtwo\r\nthree\r"))
        with pytest.raises(AssertionError, match="no 'got"):
            terminal.until("got", 0.5)
        assert got(terminal, "\r") == "one\ntwo\nthree"
        terminal.ready()
        assert got(terminal, "one\x1b\rtwo\nthree\r") == "one\ntwo\nthree"
    terminal.ready()
    terminal.type("\x04")
    terminal.until("end")
    assert terminal.code() == 0


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_lines_typed_during_an_answer_are_sent_after_it_in_order(start: Start, kind: str) -> None:
    """A paste is one message then, too, and waits."""
    terminal = start(term=kind, pause=0.5)
    began(terminal, "\r", "/next\r", "then\rlast\r")
    echoed = terminal.until("ready")
    assert ("next" in echoed) == (kind == "dumb")  # it would move what the answer writes
    for message in ("", "/next", "then", "last"):
        shown = terminal.until("got ")
        assert kind == "dumb" or message in shown  # the message is above its answer
        assert terminal.until("\r\n").strip() == repr(message)
    terminal.until(READY)
    if kind == "dumb":
        return
    terminal.ready()
    terminal.type("first\r")
    assert "\x1b[?2004h" in terminal.until("writing")[-40:]  # pastes keep their marks
    terminal.type(PASTE.format("pas\rted"))
    terminal.until("ready")
    terminal.ready()
    with pytest.raises(AssertionError, match="no 'got"):
        terminal.until("got", 0.5)
    assert got(terminal, "!\r") == "pas\nted!"
    terminal.ready()  # Ctrl-J is a new line then, too
    began(terminal, "one\ntwo\x1b\rthree\r")
    terminal.until("ready")
    assert got(terminal) == "one\ntwo\nthree"


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_lines_typed_while_the_program_starts_are_sent(kind: str) -> None:
    """Before minikv has the terminal, an Enter arrives as Ctrl-J."""
    code = f"print('starts', flush=True)\nimport time; time.sleep(1)\n{LOOP}"
    with closing(Terminals([sys.executable, "-c", code, "", "0"], {"TERM": kind})) as terminal:
        terminal.until("starts")
        terminal.type("one\rtwo\rthr")
        terminal.until("open")
        terminal.prompt = PROMPT[kind]
        assert (got(terminal), got(terminal)) == ("one", "two")
        terminal.ready()
        assert got(terminal, "ee\r") == "three"


def test_ctrl_c_clears_a_line_and_is_told_apart_from_one_without_text(start: Start) -> None:
    """Without an editor it takes an unfinished block away."""
    terminal, dumb = start(), start(term="dumb")
    terminal.type("text")
    terminal.until("text")
    assert got(terminal, "\x03") == ""
    terminal.ready()
    dumb.type('"""one\r')
    dumb.ready(". ")
    for each in (terminal, dumb):
        each.type("\x03")
        each.until("interrupt")
        each.ready()
        assert got(each, "more\r") == "more"


_ENDS = """
import termios
from minikv.cli.screen.keyboard import Keyboard
from minikv.cli.screen.terminal import Terminal

def signalled(self):
    raise SystemExit(143)

Keyboard._typed = signalled
before, terminal = termios.tcgetattr(0), Terminal()
try:
    terminal.open_keyboard()
except SystemExit:
    pass
finally:
    terminal.close()
print("same" if termios.tcgetattr(0) == before else "changed")
"""


def test_a_signal_while_the_terminal_is_switched_leaves_it_as_it_was() -> None:
    with closing(Terminals([sys.executable, "-c", _ENDS], {"TERM": "xterm"})) as terminal:
        assert "changed" not in terminal.until("\r\n")


@pytest.mark.parametrize("key", ["\x07", "\x18\x05"])
def test_the_editor_of_the_user(start: Start, tmp_path: Path, key: str) -> None:
    script = tmp_path / "edit.sh"
    script.write_text('#!/bin/sh\ncat "$1" > "$0.seen"\nprintf "from\\nthere" > "$1"\n')
    script.chmod(0o755)
    terminal = start(VISUAL=str(script))
    terminal.type("from here")
    terminal.until("here")
    terminal.type(key)
    terminal.until("there")
    assert got(terminal, "\r") == "from\nthere"
    assert (tmp_path / "edit.sh.seen").read_text() == "from here"


def test_tab_completes(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file.txt").write_text("x")
    monkeypatch.chdir(tmp_path)  # what is typed fits a line of 80 columns, wherever that is
    terminal = start(FOLDER=str(tmp_path))  # one of its own, which begins there
    for keys, completed, line in (
        (["/po\t", " s\t"], ["licy", "napkv"], "/policy snapkv"),
        (["/add ./a\t"], ["file.txt"], "/add ./a\\ file.txt"),
    ):
        for typed, shown in zip(keys, completed, strict=True):
            terminal.type(typed)
            terminal.until(shown)
        assert got(terminal, "\r") == line
        terminal.ready()


def test_history_is_kept_found_and_recalled(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    first = start(history=str(path))
    for text in ("the mill", "the river\x1b\rbank"):
        got(first, f"{text}\r")
        first.ready()
    first.type("\x04")
    assert first.code() == 0
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent)] == [0o600, 0o700]
    second = start(history=str(path))
    second.type("\x12mill")
    second.until("mill")
    assert got(second, "\r", "\r") == "the mill"  # the first one ends the search
    second.ready()
    assert got(second, "\x1b[A", "\x1b[A", "\r") == "the river\nbank"


@pytest.mark.parametrize("place", ["/proc/none/history", "/dev/null/history", ""])
def test_where_no_history_can_be_kept_the_chat_goes_on(start: Start, place: str) -> None:
    terminal = start(history=place)
    assert got(terminal, "a\r") == "a"
    terminal.ready()
    assert got(terminal, "\x1b[A", "\r") == "a"  # of this chat


ASCII = {"PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}


@pytest.mark.parametrize("env", [{}, {"term": "dumb"}, ASCII], ids=["xterm", "dumb", "ascii"])
def test_the_toolbar_and_plain_terminals(start: Start, env: dict[str, str]) -> None:
    terminal = start(**env)
    columns = termios.tcgetwinsize(terminal.fd)[1] or 80
    got(terminal, "x\r")
    sign = "-" if env is ASCII else "·"
    assert (f"BAR 7 {sign} {columns}" in terminal.seen) == ("term" not in env)
    assert ("\x1b" in terminal.seen) == ("term" not in env)
    if env is ASCII:
        assert terminal.seen.isascii()
        assert "> " in terminal.seen
        assert "?" not in terminal.seen.replace("\x1b[?", "")


@pytest.mark.parametrize("policy", ["adakv", "full"])
def test_the_toolbar_holds_whole_items_at_any_width(policy: str) -> None:
    session = chat(policy)
    session.attach("The mill stands by the river. " * 20)
    list(session.ask("Who?", 4))
    items = [render.toolbar(session, width).split(" · ") for width in range(20, 140)]
    for width, shown in enumerate(items, 20):
        assert len(" · ".join(shown)) <= max(width, len(shown[-1]))
        assert shown[-1] == f"{len(session.fed):,} of 2,048 tokens"
        assert {*shown} <= {*items[-1], policy}
    assert items[50 - 20][0] == policy
    assert len(items[-1]) > len(items[0]) == 1
    session, opened = chat(), chat()  # without its cache, as by `--resume NAME --budget N`
    list(session.ask("Who?", 4))
    opened.restore(replace(session.snapshot(), held=None))
    assert render.toolbar(opened, 20) == f"{len(session.log.ids):,} of 2,048 tokens"


# -- without a terminal ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("x", "x"),
        ('"""\na\n\nb\n"""', "a\n\nb"),
        ('"""a"""', "a"),
        ('"""//x"""', "///x"),
        ('""" /x"""', " //x"),  # what is sent is " /x"
        ('say """x"""', 'say """x"""'),
        ('a """', 'a """'),
        ('""""""', ""),
        ('"""a', None),
        ('"""', None),
        (' """a\n', None),
    ],
)
def test_messages_of_blocks(typed: str, message: str | None) -> None:
    """None: the block is not finished."""
    assert editor.unfinished(typed) == (message is None)
    if message is not None:
        assert editor.message(typed) == message


def test_completion_knows_words_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub dir").mkdir()
    for name in ("a.txt", "b'c.txt", ".hidden", "evil\x1b[31m.txt", "line\nbreak"):
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = {"/policy": ["adakv", "snapkv"], "/drop": ["a b", "a'c", "bad\x1b"]}

    def after(typed: Sequence[str]) -> list[str]:
        return words.get(typed[0], []) if len(typed) > 1 else ["/add", "/policy"]

    for text, offered in {
        "/": ["/add", "/policy"],
        "/policy s": ["/policy snapkv"],
        "/policy snapkv a": ["/policy snapkv adakv"],
        "/drop a": ["/drop a\\ b", "/drop a\\'c"],
        "/drop a\\ ": ["/drop a\\ b"],
        "/drop ": ["/drop a\\ b", "/drop a\\'c"],
        "/add ": ["/add a.txt", "/add b\\'c.txt", "/add sub\\ dir/"],
        "/add a.txt .": ["/add a.txt .hidden"],
        "/add sub\\ d": ["/add sub\\ dir/"],
        "/add ~/a": ["/add ~/a.txt"],
        **{text: [] for text in ("/none x", "/add none/", "hello /a", "//a", "", "/add\n/a")},
    }.items():
        commands = Commands(Help(after, "/add".__eq__))
        found = commands.get_completions(Document(text), CompleteEvent())
        assert [text[: len(text) + one.start_position] + one.text for one in found] == offered


def test_history_survives_damage_and_is_its_users_alone(tmp_path: Path) -> None:
    def newest() -> list[str]:
        return list(editor.history_in(path).load_history_strings())

    path = tmp_path / "history"
    path.write_bytes(b"\xff\xfe\n+old\n" + b'"of an earlier version"\n')
    path.chmod(0o644)
    editor.history_in(path).store_string("new\n[bold]\x1b")
    assert newest() == ["new\n[bold]\x1b", "old"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    history = editor.HistoryFile(path)
    history.store_string("again")  # as it was removed, it is made anew
    assert (newest(), stat.S_IMODE(path.stat().st_mode)) == (["again"], 0o600)
    full = editor.HistoryFile("/dev/full")
    full.store_string("x")  # a disk without room costs no chat
    assert [entry.name for entry in tmp_path.iterdir()] == ["history"]


@pytest.mark.parametrize("kind", ["link", "pipe", "pipe with a reader"])
def test_history_follows_no_link_and_waits_for_no_pipe(tmp_path: Path, kind: str) -> None:
    other, path = tmp_path / "other", tmp_path / "history"
    other.write_text("+secret\n")
    path.symlink_to(other) if kind == "link" else os.mkfifo(path)
    reader = os.open(path if "reader" in kind else other, os.O_RDONLY | os.O_NONBLOCK)
    assert isinstance(editor.history_in(path), InMemoryHistory)
    editor.HistoryFile(path).store_string("new")  # it was put there while the chat ran
    assert os.read(reader, 99) == (b"" if "reader" in kind else b"+secret\n")
    os.close(reader)


@pytest.mark.parametrize("moment", ["typing", "Enter was pressed", "about to begin"])
def test_a_signal_ends_the_prompt(moment: str) -> None:
    """Between Enter and the end of the prompt there is nothing that could be left. As the prompt
    begins, asyncio may lose what the signal raises; the prompt then ends as it begins."""
    running, before = moment != "about to begin", signal.getsignal(signal.SIGTERM)
    loop = SimpleNamespace(call_soon_threadsafe=lambda leave: leave())
    app: Any = SimpleNamespace(is_running=running, loop=loop if running else None)
    app.is_done, app.exit = moment.startswith("Enter"), Mock(side_effect=Terminated)
    ending = editor._ending(app)
    if running:
        with pytest.raises(Terminated), ending:
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is before
        assert app.exit.called == (moment == "typing")
        return
    begins = ending.__enter__()
    with contextlib.suppress(Terminated):
        os.kill(os.getpid(), signal.SIGTERM)
    for act in (begins, lambda: ending.__exit__(None, None, None)):
        with pytest.raises(Terminated):
            act()
