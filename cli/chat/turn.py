"""Opens a chat on a terminal, and runs turns: progress, warnings, then the answer.

Every answer that a user sees is written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from minikv.cli.documents.named import attach
from minikv.cli.documents.text import Text
from minikv.cli.failures import Interrupts
from minikv.cli.screen.progress import Live, Loading, Thinking
from minikv.cli.screen.terminal import Terminal
from minikv.loader import build
from minikv.settings import Generation, Settings

if TYPE_CHECKING:
    from minikv.chat.report import TurnReport
    from minikv.chat.session import ChatSession
    from minikv.chat.transcript import Turn


TOY = "bundled: a toy that knows only a made-up world; your documents need -m NAME"
_SAMPLE = 20_000  # characters of a document that are examined
_FOREIGN = 3.2
"""Characters per token that separate texts of that world, with at least 4.5, from others, with at
most 2.2 (English, code, Markdown)."""
_SPARE = ("kept ", "first token ")
"""The figures under an answer that a narrow terminal omits."""


def is_toy(session: ChatSession) -> bool:
    """Whether the bundled model answers."""
    return session.facts.model == "bundled"


def warn_of_toy(session: ChatSession, terminal: Terminal, texts: Sequence[str]) -> None:
    """Warn if the bundled model is asked about texts that are not of its world, or about none."""
    if not is_toy(session):
        return
    for text in [text[:_SAMPLE] for text in texts] or [""]:
        if not text or len(text) < _FOREIGN * len(session.tokenizer.encode(text)):
            terminal.warn(TOY)
            return


def note_report(report: TurnReport, terminal: Terminal) -> None:
    """The short lines under an answer. On a terminal, a line that would wrap is written without its
    least important figures."""
    screen = terminal.screen
    for line in map(terminal.words, report.lines()):
        short = line.replace(" tokens per head", "")
        bare = " · ".join(item for item in short.split(" · ") if not item.startswith(_SPARE))
        fit = [form for form in (line, short) if not screen.rows or len(form) + 2 <= screen.width]
        terminal.note(f"  {(fit or [bare])[0]}")


def open_chat(
    settings: Settings,
    texts: Iterable[Text],
    terminal: Terminal,
    interrupts: Interrupts | None = None,
) -> ChatSession:
    """Load the model and attach the documents, with their warnings. Errors as in `build`."""
    loading = Loading(terminal)
    with terminal.silent(), (interrupts or Interrupts()).stopping(loading.cancel):
        terminal.status("loading the model")
        session = build(settings, loading)
    session.words = terminal.words
    session.recall.say = lambda line: terminal.note(terminal.words(line))
    for note in session.facts.notes:
        terminal.warn(note)
    attach(session, texts, terminal)
    return session


def run_turn(
    session: ChatSession,
    question: str,
    generation: Generation,
    terminal: Terminal,
    interrupts: Interrupts,
    *,
    show: bool = True,
) -> str:
    """Ask, streaming to stdout if `show`. Returns the answer. Raises the session's errors."""
    if session.pending:
        warn_of_toy(session, terminal, [document.text for document in session.pending])
    live = Live(terminal, "reading")

    def progress(done: int, total: int) -> None:
        if session.scoring:
            live.label = "scoring the text"
        live(done, total)

    ask = partial(session.ask, question, **asdict(generation), progress=progress)
    return _stream(session, ask, terminal, interrupts, show=show)


def continue_turn(
    session: ChatSession, generation: Generation, terminal: Terminal, interrupts: Interrupts
) -> str:
    """Continue the last answer, as `run_turn` does. Returns the added text."""
    session.continuable()
    go_on = partial(session.continue_answer, **asdict(generation))
    return _stream(session, go_on, terminal, interrupts, after=session.turns[-1].answer)


def _stream(
    session: ChatSession,
    write: Callable[..., Generator[str, None, None]],
    terminal: Terminal,
    interrupts: Interrupts,
    *,
    show: bool = True,
    after: str = "",
) -> str:
    """Show the pieces that `write` yields as they come, or, if the terminal takes records, the
    record of the turn. Returns the text. after: the part of the answer that was shown before."""
    pieces: list[str] = []
    late: list[str] = []
    finished = False
    before, show = session.report, show and not terminal.records
    setting = terminal.answering() if show else terminal.silent()
    thinking = Thinking(terminal)

    def notice(line: str) -> None:
        """Show a warning at once, but not in the middle of the answer."""
        if show and (pieces or after or thinking.tokens):
            late.append(line)
        else:
            terminal.warn(line)

    answer = write(notice=notice, thinking=thinking if show else None)
    with setting, interrupts.stopping(session.cancel):
        if show and after:
            terminal.resume_answer(after)
        try:
            for piece in answer:
                thinking.end()
                pieces.append(piece)
                if show:
                    terminal.answer(piece)
            finished = True
        finally:
            answer.close()
            thinking.end()
            # Also after an error, because what was written stays in the conversation.
            if show and (pieces or finished):
                terminal.end_answer()
            for line in late:
                terminal.warn(line)
            if terminal.records and session.report is not before:
                terminal.data(json.dumps(record(session.turns[-1], terminal)))
    return "".join(pieces)


def thoughts_of(turn: Turn) -> dict[str, str]:
    """The thoughts as a part of a record; empty if there are none."""
    return {"thoughts": turn.thoughts} if turn.thoughts else {}


def figures(report: TurnReport, terminal: Terminal) -> dict[str, Any]:
    """The figures of a turn for --json, with every warning on stderr since the last turn."""
    warned, terminal.warned = terminal.warned, []
    return report.to_dict() | {"warnings": list(dict.fromkeys((*warned, *report.warnings)))}


def record(turn: Turn, terminal: Terminal) -> dict[str, Any]:
    """A turn for `chat --json`: question, answer, thoughts if there are any, the names of its
    documents, figures."""
    return {
        "question": turn.question,
        "answer": turn.answer,
        **thoughts_of(turn),
        "documents": [document.name for document in turn.documents],
        **figures(turn.report, terminal),
    }
