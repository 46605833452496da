"""`minikv demo`: a guided chat over the bundled document. Every turn is really run."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from minikv.cli.chat import slash_commands
from minikv.cli.chat.slash import Context
from minikv.cli.chat.turn import note_report, open_chat, run_turn
from minikv.cli.documents.text import read_file
from minikv.cli.failures import Interrupts
from minikv.cli.saved.keeper import Keeper
from minikv.cli.screen import render
from minikv.cli.screen.terminal import Terminal
from minikv.errors import Interrupted
from minikv.settings import Generation, Settings

BUDGET = "256"


@dataclass(frozen=True, slots=True)
class Step:
    """One part of the demo. text: an introduction. lines: a question and commands, as a user would
    type them. said: the sentence of the document with the answer; answer: a part of it. fails: the
    model should answer something else. then: shown afterwards, if everything went as expected."""

    title: str
    text: str
    lines: tuple[str, ...]
    answer: str
    said: str
    then: str = ""
    fails: bool = False


_ACCOUNTANT = "The accountant of Halhart Works is Katya Warulf."
STEPS = (
    Step(
        "A long document in a small cache",
        "The document is read once. Then each head keeps 256 of its tokens on average, those that "
        "the question looks at, and the rest is freed. The answer is written from what is left.",
        (
            "Who leads Project Misty Clover?",
            '/kept find "Axel Narolt"',
            '/kept find "Katya Warulf"',
        ),
        "Axel Narolt",
        "The leader of Project Misty Clover, as everyone knows, is Axel Narolt.",
        then="The name that answers this question was kept. Another name was not needed, and is "
        "gone from nearly all heads. That matters for the next question.",
    ),
    Step(
        "A follow-up from the same cache",
        "With --reuse once, a later question is answered from the cache of the first one. That "
        "takes no time. But what the first question did not need is gone.",
        ("/set reuse once", "Please find the accountant of Halhart Works."),
        "Katya Warulf",
        _ACCOUNTANT,
        then="A wrong answer reads like a right one. So a line below such an answer says what it "
        "may miss.",
        fails=True,
    ),
    Step(
        "The same follow-up, recalled",
        "By default every question is answered from all that was read. Its keys and values are "
        "stored outside the cache, and for each question minikv chooses which tokens stay. "
        "Nothing is read again.",
        ("/set reuse auto", "Please find the accountant of Halhart Works."),
        "Katya Warulf",
        _ACCOUNTANT,
    ),
    Step(
        "Compared with the full cache and another policy",
        "Policies differ in what they keep. streaming keeps the first and the last tokens, "
        "whatever is asked. /compare asks the same question under it and with the full cache.",
        ("What is the site of Project Merry Horizon?", "/compare streaming"),
        "Morthorpe",
        "As for Project Merry Horizon, the site is Morthorpe.",
    ),
)
_END = """That was the demo. Now try it yourself:

  minikv chat FILE              your document; /help lists the commands
  minikv policies               the other methods
  minikv plan -m MODEL          whether a larger model fits on this machine

The bundled model is a toy that knows only its own made-up world: your documents need -m NAME."""


def demo(terminal: Terminal, *, debug: bool = False) -> None:
    """Run the steps. On a terminal, wait for Enter between them."""
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
    terminal.say(
        f"minikv demo: {len(STEPS)} questions about a report of {len(text.text.split()):,} words, "
        "with the small bundled model. It takes about two minutes."
    )
    terminal.say(f"  {render.policy_line(session)}", "dim")
    for number, step in enumerate(STEPS, 1):
        terminal.say(f"\n{number} of {len(STEPS)}  {step.title}", "head")
        terminal.say(f"    {step.text}")
        if person and not _goes_on(terminal):
            return
        try:
            _run(context, step)
        except Interrupted as stopped:
            terminal.say(f"{stopped}; {stopped.hint}")
    terminal.say(f"\n{_END}")


def _run(context: Context, step: Step) -> None:
    session, terminal, right = context.session, context.terminal, False
    for line in step.lines:
        terminal.say(f"\n› {line}", "head")
        if slash_commands.is_command(line):
            with context.interrupts.stopping(lambda: None), terminal.silent():
                slash_commands.execute(context, line)
            continue
        answer = run_turn(session, line, context.generation, terminal, context.interrupts)
        assert session.report is not None
        if session.report.stop_reason == "user":
            return
        note_report(session.report, terminal)
        right = answer.strip() == step.answer
        terminal.say(f"  {'Right' if right else 'Wrong'}. The document says: {step.said}")
    if step.then and right != step.fails:
        terminal.say(f"    {step.then}")


def _goes_on(terminal: Terminal) -> bool:
    """Wait for Enter; False if the user leaves."""
    terminal.err.write("  [Enter: continue, q: leave] ")
    terminal.err.flush()
    try:
        return input().strip().lower() not in ("q", "quit", "exit", "/exit")
    except EOFError:
        terminal.say("")
        return False
