"""Opening a chat on a terminal, and one turn of it: progress, warnings, then the answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from minikv.cli.documents import Text, distinct
from minikv.cli.interrupt import Interrupts
from minikv.cli.progress import Live, Loading
from minikv.cli.terminal import Terminal
from minikv.loader import build
from minikv.settings import Generation, Settings

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession


def open_chat(
    settings: Settings,
    texts: Iterable[Text],
    terminal: Terminal,
    interrupts: Interrupts | None = None,
) -> ChatSession:
    """Load the model and attach the documents, with their warnings. Errors as `build`'s."""
    loading = Loading(terminal)
    terminal.status("loading the model")
    try:
        with terminal.silent(), (interrupts or Interrupts()).stopping(loading.cancel):
            session = build(settings, loading)
    finally:
        loading.finish()
    for note in session.facts.notes:
        terminal.warn(note)
    for text in distinct(texts):
        if text.note:
            terminal.warn(text.note)
        session.attach(text.text, text.name)
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
    """Ask, streaming to stdout if `show`. Returns the answer; the session's errors pass through."""
    pieces: list[str] = []
    finished = False
    setting = terminal.answering() if show else terminal.silent()
    live = Live(terminal, "reading")

    def progress(done: int, total: int) -> None:
        if session.rereading:
            live.label = "reading again, Ctrl-C: do not"
        live(done, total)

    with setting, interrupts.stopping(session.skip, session.cancel):
        answer = session.ask(
            question,
            generation.max_tokens,
            generation.temperature,
            top_k=generation.top_k,
            top_p=generation.top_p,
            min_p=generation.min_p,
            progress=progress,
            notice=terminal.warn,
        )
        try:
            for piece in answer:
                pieces.append(piece)
                if show:
                    terminal.answer(piece)
            finished = True
        finally:
            terminal.clear_status()
            # Also after an error, because what was written stays in the conversation.
            if show and (pieces or finished):
                terminal.end_answer()
    return "".join(pieces)
