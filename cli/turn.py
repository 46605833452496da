"""A chat on a terminal, and one turn of it: progress, warnings first, the answer as it comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minikv.cli.documents import Text, distinct
from minikv.cli.interrupt import Interrupts, held
from minikv.cli.progress import Live, Loading
from minikv.cli.terminal import Terminal
from minikv.errors import UsageError
from minikv.loader import Settings, build

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession


@dataclass(frozen=True, slots=True)
class Limits:
    """How an answer is written. `check` refuses before a model is loaded."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def check(self) -> None:
        """Raise the UsageError that a turn would raise."""
        if self.max_tokens < 1:
            raise UsageError(f"--max-tokens must be at least 1, got {self.max_tokens}")
        with held():  # torch comes with it, and would lose a Ctrl-C or end by it
            from minikv.engine.sampling import Sampling

        Sampling(self.temperature, self.top_k, self.top_p, self.min_p)


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
    limits: Limits,
    terminal: Terminal,
    interrupts: Interrupts,
    *,
    show: bool = True,
) -> str:
    """Ask, streaming to stdout if `show`. Returns the answer; the session's errors pass through."""
    pieces: list[str] = []
    finished = False
    setting = terminal.answering() if show else terminal.silent()
    with setting, interrupts.stopping(session.cancel):
        answer = session.ask(
            question,
            limits.max_tokens,
            limits.temperature,
            top_k=limits.top_k,
            top_p=limits.top_p,
            min_p=limits.min_p,
            progress=Live(terminal, "reading"),
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
            # Also after an error: what was written stays in the conversation, so it ends properly.
            if show and (pieces or finished):
                terminal.end_answer()
    return "".join(pieces)
