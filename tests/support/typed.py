"""The command line in this process: all of `minikv` over a fake model, a terminal in memory, and
slash commands."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import typer
from fakes import ByteTokenizer, ChatML, FakeEngine
from rich.cells import cell_len
from small_chat import chat_over
from typer.testing import CliRunner, Result

from minikv.chat.closing import Facts
from minikv.chat.recall import Recall
from minikv.chat.session import ChatSession
from minikv.cli.chat.slash import Command, Context
from minikv.cli.failures import Interrupts
from minikv.cli.main import app
from minikv.cli.saved.keeper import Keeper
from minikv.cli.screen.terminal import Terminal, in_columns
from minikv.cli.screen.text import clean
from minikv.settings import Generation, Settings


def invoke(*arguments: str, **given: Any) -> Result:
    """The command with these arguments. given: as `input` and `env` of the runner."""
    return CliRunner().invoke(app, list(arguments), **given)


def fails(done: Result, code: int, *says: str) -> str:
    """What a command said that ended with this code, with all of these texts and no traceback."""
    assert done.exit_code == code, done.output
    assert [text for text in says if text not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.output
    return done.stderr


def body(app: typer.Typer, *words: str) -> Callable[..., None]:
    """The function of an app's command, as it is behind its flags; words: a command below it."""
    name = words[0] if words else None
    found = [one for one in app.registered_commands if name in (None, one.name)]
    run: Callable[..., None] = inspect.unwrap(found[0].callback or app)
    return run


class World:
    """A fake model in the place of any other. Fixture `world` puts it there. patch: for what a test
    changes besides."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.engine = patch, FakeEngine()
        self.max_context = 4096
        self.failure: BaseException | None = None
        self.settings: Settings | None = None
        self._session: ChatSession | None = None

    @property
    def session(self) -> ChatSession:
        """Of the last command."""
        assert self._session is not None
        return self._session

    def build(self, settings: Settings, progress: object = None) -> ChatSession:
        if self.failure is not None:
            raise self.failure
        self.settings, tokenizer, kv = settings, ByteTokenizer(), self.engine.kv
        engine: Any = self.engine
        given = {"max_context": self.max_context, "facts": Facts(weights=settings.weights)}
        given |= {"recall": Recall(kv, settings.tier)}  # type: ignore[arg-type]
        settings = replace(settings, reuse="once")
        self._session = ChatSession(engine, tokenizer, ChatML(tokenizer), settings, **given)
        return self._session

    def writes(self, answer: str | bytes) -> None:
        """What every answer is from now on."""
        self.engine.script = [*(answer.encode() if isinstance(answer, str) else answer)]
        self.engine.length = len(self.engine.script)

    def run(self, *arguments: str, input: str | bytes | None = None, anew: bool = True) -> Result:
        """Anew: with an empty cache, as another process begins."""
        if anew:
            self.engine.reset()
        return invoke(*arguments, input=input)

    def ok(self, *arguments: str, **given: Any) -> Result:
        """As `run`, of a command that succeeds."""
        done = self.run(*arguments, **given)
        assert done.exit_code == 0, done.stderr
        return done


def fake_chat(engine: Any = None, **given: Any) -> ChatSession:
    """A chat over a fake. given: as of `small_chat.chat_over`."""
    return chat_over(engine or FakeEngine(), **given)


def answer_of(document: str, question: str, length: int = 12) -> str:
    """What the fake model says about report.txt, worked out without the command line."""
    chat = fake_chat(FakeEngine(length))
    if document:
        chat.attach(document, "report.txt")
    return "".join(chat.ask(question))


class Tty(io.StringIO):
    """A terminal in memory."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def screen() -> Terminal:
    """A terminal whose streams are in memory: `printed` and `said` give what came."""
    terminal = Terminal()
    terminal.out, terminal.err = io.StringIO(), io.StringIO()
    return terminal


def printed(terminal: Terminal) -> str:
    assert isinstance(terminal.out, io.StringIO)
    return terminal.out.getvalue()


def said(terminal: Terminal) -> str:
    assert isinstance(terminal.err, io.StringIO)
    return terminal.err.getvalue()


def on_screen(text: str, width: int) -> list[str]:
    """The rows of a message on a terminal of so many columns."""
    rows = in_columns(clean(text), width).split("\n")
    assert all(cell_len(row) <= width for row in rows), rows
    return rows


def context(
    session: ChatSession,
    terminal: Terminal | None = None,
    generation: Generation | None = None,
    *,
    save: bool = False,
    **given: Any,
) -> Context:
    """Of a slash command; its terminal is in memory unless one is given."""
    terminal = terminal or screen()
    keeper = Keeper(terminal, active=save)
    generation = generation or Generation(max_tokens=5)
    return Context(session, terminal, generation, Interrupts(), keeper, **given)


def run(commands: Iterable[Command], context: Context, word: str, *arguments: str) -> str:
    """What one of these commands says; its terminal is in memory."""
    context.terminal.out, context.terminal.err = io.StringIO(), io.StringIO()
    (command,) = (one for one in commands if word in one.words)
    command.run(context, list(arguments))
    assert printed(context.terminal) == ""
    return said(context.terminal)
