"""The warnings of a turn, and the check that a text is valid Unicode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from minikv.cache.stats import Fidelity
from minikv.chat.planning import Planner
from minikv.chat.prompt_plan import PromptPlan
from minikv.chat.protocols import Template
from minikv.chat.reuse import Decision
from minikv.chat.transcript import Document


class Warnings:
    """The warnings of one turn. lines: those for the turn record. words(line): rewrites a line for
    the user. notice(line): called with each line; may be None."""

    def __init__(self, words: Callable[[str], str], notice: Callable[[str], None] | None) -> None:
        self.lines: list[str] = []
        self._words, self._notice = words, notice

    def tell(self, line: str) -> None:
        """Rewrite a line, keep it for the record and pass it to `notice`."""
        line = self._words(line)
        self.lines.append(line)
        self.say([line])

    def tell_all(self, lines: Iterable[str]) -> None:
        """`tell` each of them."""
        for line in lines:
            self.tell(line)

    def say(self, lines: Iterable[str]) -> None:
        """Pass lines to `notice` that are already in the record."""
        if self._notice is not None:
            for line in lines:
                self._notice(line)


class AutoLine:
    """Tells the user once what `auto` does, and again when that changes."""

    def __init__(self) -> None:
        self._told: object = None

    def lines(self, planner: Planner, decision: Decision | None) -> Iterator[str]:
        """The reason for the decision, unless it was already told."""
        if decision is None or not decision.why:
            return
        wanted = planner.wanted
        about = decision.reuse, wanted.eviction.policy, wanted.keeps_cache
        if about != self._told:
            self._told = about
            yield decision.why


def before(template: Template, question: str, planner: Planner, plan: PromptPlan) -> Iterator[str]:
    """Warnings before the texts of a turn are read."""
    past, wanted = planner.past, planner.wanted
    first = not past.turns
    if first:
        yield from template.notes
    yield from marker_lines(template, past.pending, question)
    if wanted.reuse == "blind" and plan.reuse == "once" and first and wanted.eviction.evicts:
        yield 'there is no document to evict beforehand: `reuse="blind"` changes nothing here'


def after(lost: Fidelity | None) -> Iterator[str]:
    """Warnings after the prompt was read. lost: what eviction lost, if measured."""
    if lost is not None and lost.bound is not None and not lost.bounded:
        much = "not known" if lost.kl_first_token is None else f"{lost.kl_first_token:.2g} nats"
        yield (
            f"`quality={lost.bound:g}` is not met under the whole budget of {lost.budget:,} tokens "
            f"per head: what the first token loses is {much}"
        )


def marker_lines(template: Template, documents: Iterable[Document], question: str) -> Iterator[str]:
    """Warnings about strings that look like control tokens or turn markers of the model, and about
    characters that its tokenizer loses."""
    texts = [(document.name or "the document", document.text) for document in documents]
    for name, text in [*texts, ("the question", question)]:
        count = template.lookalikes(text)
        if count:
            strings = "1 string" if count == 1 else f"{count:,} strings"
            verb = "looks" if count == 1 else "look"
            tokens = "a control token; it was" if count == 1 else "control tokens; they were"
            yield f"{strings} in {name} {verb} like {tokens} read as plain text"
        count = template.markers(text)
        if count:
            strings = "1 string" if count == 1 else f"{count:,} strings"
            yield (
                f"{strings} in {name} may pass for turn markers, which are plain text for this "
                "model: it cannot tell them from real ones"
            )
        count = template.lost(text)
        if count:
            characters = "1 character" if count == 1 else f"{count:,} characters"
            yield f"the model's tokenizer drops or changes {characters} of {name}"
