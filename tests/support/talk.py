"""A chat with the commands about its turns and about saving it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from operator import attrgetter

import pytest
from typed import context

from minikv.chat.session import ChatSession
from minikv.cli.chat import answer_commands
from minikv.cli.chat.slash import Context
from minikv.cli.chat.turn import run_turn
from minikv.cli.saved import commands
from minikv.cli.screen.terminal import Terminal
from minikv.errors import UsageError
from minikv.settings import Generation

RUN = {
    word: command.run
    for command in (*answer_commands.COMMANDS, *commands.COMMANDS)
    for word in command.words
}


@dataclass
class Talk:
    """A chat with commands; what was printed since the last look."""

    session: ChatSession
    context: Context
    capsys: pytest.CaptureFixture[str]

    def ask(self, question: str) -> str:
        how = self.context
        run_turn(self.session, question, how.generation, self.terminal(), how.interrupts)
        return self.capsys.readouterr().out

    def terminal(self) -> Terminal:
        """With the streams of now: those of a fixture are closed when the test begins."""
        terminal = self.context.terminal
        terminal.out, terminal.err = sys.stdout, sys.stderr
        return terminal

    def run(self, line: str) -> tuple[str, str]:
        """What went to stdout and to stderr."""
        word, *arguments = line.split()
        self.terminal()
        RUN[word](self.context, arguments)
        captured = self.capsys.readouterr()
        return captured.out, captured.err

    def refused(self, line: str) -> str:
        facts = attrgetter("messages", "fed", "eviction", "seed")
        before = facts(self.session)
        with pytest.raises(UsageError) as error:
            self.run(line)
        assert before == facts(self.session)
        return f"{error.value}; {error.value.hint}"


def make(session: ChatSession, capsys: pytest.CaptureFixture[str], active: bool = True) -> Talk:
    return Talk(session, context(session, Terminal(), Generation(12), save=active), capsys)
