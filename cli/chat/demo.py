"""`minikv demo`: a guided chat over the bundled document. Every turn is run, none is canned."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from minikv.cli.chat import slash_commands
from minikv.cli.chat.interrupt import Interrupts
from minikv.cli.chat.slash import Context
from minikv.cli.chat.turn import note_report, open_chat, run_turn
from minikv.cli.documents.text import read_file
from minikv.cli.saved.keeper import Keeper
from minikv.cli.screen import render
from minikv.cli.screen.terminal import Terminal, window
from minikv.cli.screen.text import folded
from minikv.errors import Interrupted
from minikv.settings import Generation, Settings

BUDGET = "256"
_WIDE = 88


@dataclass(frozen=True, slots=True)
class Step:
    """One part of the demo. `text`: what is about to happen. `before`: commands before the
    question, `after`: those after it. `answer`: what the document says, and `about`: a word of the
    sentences that say it; `fails`: the model is expected to answer otherwise. `then` is said after
    all that, if it went as expected."""

    title: str
    text: str
    question: str
    answer: str
    about: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    then: str = ""
    fails: bool = False


STEPS = (
    Step(
        "A long document in a small cache",
        "The document is read once. Then each head keeps 256 of its tokens on average, those that "
        "the question looks at, and the rest is freed. The answer is written from what is left.",
        "Who leads Project Misty Clover?",
        "Axel Narolt",
        "Misty Clover",
        after=('/kept find "Axel Narolt"', '/kept find "Katya Warulf"'),
        then="The name that answers this question was kept. Another name was not needed, and is "
        "gone from nearly all heads. That matters for the next question.",
    ),
    Step(
        "A follow-up from the same cache",
        "With --reuse once, a later question is answered from the cache of the first one. That "
        "takes no time. But what the first question did not need is gone.",
        "Please find the accountant of Halhart Works.",
        "Katya Warulf",
        "Halhart Works",
        before=("/set reuse once",),
        then="A wrong answer reads like a right one. So a line below such an answer says what it "
        "may miss.",
        fails=True,
    ),
    Step(
        "The same follow-up, recalled",
        "By default every question is answered from all that was read. Its keys and values are "
        "kept beside the cache, and what the answer is written from is chosen for each question. "
        "Nothing is read again.",
        "Please find the accountant of Halhart Works.",
        "Katya Warulf",
        "Halhart Works",
        before=("/set reuse auto",),
    ),
    Step(
        "Beside the full cache, and beside another policy",
        "Policies differ in what they keep. streaming keeps the first and the last tokens, "
        "whatever is asked. /compare asks the same question under it and with the full cache.",
        "What is the site of Project Merry Horizon?",
        "Morthorpe",
        "Merry Horizon",
        after=("/compare global-span streaming",),
    ),
    Step(
        "A quarter of that",
        "How small can it be? Here each head keeps 64 tokens on average, of about 7,000.",
        "According to the text, what is the budget of Project Golden Dolphin?",
        "2869",
        "Golden Dolphin",
        before=("/budget 64",),
    ),
)
_END = """That was the demo. Now try it yourself:

  minikv chat FILE              your document; /help lists the commands
  minikv policies               the other methods
  minikv plan -m MODEL          whether a larger model fits on this machine

The bundled model is a toy that knows only its own made-up world: your documents need -m NAME."""


def demo(terminal: Terminal, *, debug: bool = False) -> None:
    """Run the steps, waiting for Enter between them where a person is at the terminal."""
    from minikv.models import BUNDLED

    person = sys.stdin.isatty() and terminal.err.isatty()
    text = read_file(str(BUNDLED / "sample.txt"))
    interrupts = Interrupts()
    session = open_chat(Settings(budget=BUDGET, remember="off"), [text], terminal, interrupts)
    context = Context(
        session,
        terminal,
        "strict",
        Generation(max_tokens=32),
        interrupts,
        Keeper(terminal, active=False),
        debug=debug,
    )
    _prose(
        f"minikv demo: {len(STEPS)} questions about a report of {len(text.text.split()):,} words, "
        "with the small bundled model. It takes about two minutes.",
        terminal,
        margin="",
    )
    terminal.say(f"  {render.policy_line(session)}", "dim")
    for number, step in enumerate(STEPS, 1):
        terminal.say(f"\n{number} of {len(STEPS)}  {step.title}", "head")
        _prose(step.text, terminal)
        if person and not _goes_on(terminal):
            return
        try:
            _run(context, step, text.text)
        except Interrupted as stopped:
            terminal.say(f"{stopped}; {stopped.hint}")
    terminal.say(f"\n{_END}")


def _run(context: Context, step: Step, document: str) -> None:
    session, terminal = context.session, context.terminal
    for line in step.before:
        _command(context, line)
    terminal.say(f"\n› {step.question}", "head")
    answer = run_turn(session, step.question, context.generation, terminal, context.interrupts)
    assert session.report is not None
    if session.report.stop_reason == "user":
        return
    note_report(session.report, terminal)
    right = answer.strip() == step.answer
    terminal.say(f"  {'Right' if right else 'Wrong'}. The document says: {_said(document, step)}")
    for line in step.after:
        _command(context, line)
    if step.then and right != step.fails:
        _prose(step.then, terminal)


def _command(context: Context, line: str) -> None:
    context.terminal.say(f"\n› {line}", "head")
    with context.interrupts.stopping(lambda: None), context.terminal.silent():
        slash_commands.execute(context, line)


def _said(document: str, step: Step) -> str:
    """The sentence of the document that has the answer."""
    sentences = re.split(r"(?<=\.)\s+", document)
    return next(s for s in sentences if step.answer in s and step.about in s)


def _prose(text: str, terminal: Terminal, margin: str = "  ") -> None:
    width = min(window(terminal.err)[0], _WIDE)
    terminal.say("\n".join(folded(margin + text, width, margin, whole=True)))


def _goes_on(terminal: Terminal) -> bool:
    """Wait for Enter; False if the user leaves."""
    terminal.err.write("  [Enter: continue, q: leave] ")
    terminal.err.flush()
    try:
        return input().strip().lower() not in ("q", "quit", "exit", "/exit")
    except EOFError:
        terminal.say("")
        return False
