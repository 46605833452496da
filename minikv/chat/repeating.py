"""For policies that read a prompt twice. With a second pass (`minikv.policies.kvzip`): how a chat's
model is asked to repeat what it has read, what that costs, and where the keys and values are kept
meanwhile. With probabilities (`minikv.policies.queryspan`): what that costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minikv.cache.kv_cache import KVCache
from minikv.cache.plan import RowsBefore
from minikv.chat.planning import Planner
from minikv.chat.prompt_plan import PromptPlan
from minikv.chat.protocols import Template, Tokenizer
from minikv.chat.recall import Recall
from minikv.chat.report import size
from minikv.chat.reuse import shared
from minikv.chat.transcript import Message
from minikv.engine.engine import Engine
from minikv.errors import MemoryShortError, UsageError
from minikv.policies.base import Wording

_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with "
_PROBES = ("a", "7?")  # two questions without a common last character
_FEW = 256  # of fewer tokens that are read twice nothing is said: a question alone is read at once


def wording(tokenizer: Tokenizer, template: Template) -> Wording:
    """The requests of KVzip's release, and the tokens that the template puts after a question."""
    one, two = (template.opening([Message("user", text)]) for text in _PROBES)
    count = shared(one[::-1], two[::-1])
    return Wording(
        tuple(tokenizer.encode(_FIRST)),
        tuple(tokenizer.encode(_LATER)),
        tuple(one[len(one) - count :]),
    )


def prepare(kv: KVCache, tokenizer: Tokenizer, template: Template) -> None:
    """Make the requests of the cache, unless they were made before."""
    if not any((kv.words.first, kv.words.later, kv.words.answer)):
        kv.words = wording(tokenizer, template)


@dataclass(frozen=True, slots=True)
class Scoring:
    """What scoring costs in addition to reading.

    read: tokens of the prompts that are scored. longest: tokens of the longest one. tokens: of the
    second pass. For the longest prompt: ram: bytes of RAM, if its keys and values are kept there;
    file: bytes of the file, if they are kept in one; reads: how often the file is read; file_ram:
    bytes of RAM in addition to the file.
    """

    read: int = 0
    longest: int = 0
    tokens: int = 0
    reads: int = 0
    ram: int = 0
    file: int = 0
    file_ram: int = 0

    def line(self, *, in_file: bool) -> str:
        """A line that tells the user the cost beforehand. in_file: keys and values are kept in a
        file."""
        times = (self.read + self.tokens) / max(1, self.read)
        held = f"{size(self.ram)} of RAM"
        if in_file:
            held = (
                f"{size(self.file)} in a file, read {self.reads} times, and {size(self.file_ram)} "
                "of RAM"
            )
        return (
            f"it reads {self.tokens:,} tokens more to score {self.read:,} ({times:.1f} times the "
            f"tokens, 2 to 4 times the time), with {held} until then"
        )


def scoring(engine: Engine, parts: Sequence[Sequence[int]], position: int, asks: bool) -> Scoring:
    """The cost of scoring the prompts `parts`, the first of which begins at `position`. asks: the
    last one is only a question. Raises ContextError if no position is left for a second pass."""
    kv, made = engine.kv, Scoring()
    for part in parts:
        cost = kv.scoring_cost(len(part), position, asks=asks and part is parts[-1])
        if cost is not None:
            made = Scoring(
                made.read + len(part),
                max(made.longest, len(part)),
                made.tokens + cost.tokens,
                max(made.reads, cost.reads),
                max(made.ram, cost.ram),
                max(made.file, cost.file),
                max(made.file_ram, cost.file_ram),
            )
        position += len(part)
    return made


def foreseen(kv: KVCache, plan: PromptPlan) -> int:
    """How many tokens of the prompts are read once before, because the policy needs their
    probabilities: those of the prompts after which it must evict (see `KVCache.foresees`). Raises
    UsageError if the budget is too small."""
    rules, shape = kv.rules, kv.shape
    if rules.prompt is None or not rules.prompt.evidence.predicted:
        return 0
    position, found = plan.behind(kv.position), 0
    pinned = plan.pinned if plan.anew else kv.pinned
    known = None if plan.anew else kv.budget_rows
    held = RowsBefore.read(shape, kv.arena, position, len(plan.parts[0])).seen
    for part in plan.parts:
        position += len(part)
        # A share becomes a number of rows with the first prompt.
        each = known = known or rules.budget_rows(position, shape, kv.kv)
        held = [
            rows + shape.kv_heads * len(part)
            if window is None
            else min(rows + shape.kv_heads * len(part), shape.kv_heads * window)
            for rows, window in zip(held, shape.windows, strict=True)
        ]
        totals = rules.layer_totals(each, position, shape, pinned)
        if totals is None:  # all layers share one budget
            most = each * shape.kv_heads * shape.layers
            evicts, held = sum(held) > most, [min(sum(held), most), *[0] * (shape.layers - 1)]
        else:
            evicts = any(rows > total for rows, total in zip(held, totals, strict=True))
            held = list(map(min, held, totals))
        found += len(part) * evicts
    return found


def keep(recall: Recall, policy: str, cost: Scoring) -> bool:
    """Decide where keys and values are kept until they are scored, and create the file if it is
    one. Returns True for a file, which exists until `Recall.scored`, and False for RAM, of which
    nothing is allocated yet. If `recall.kind` is "file", RAM is used only if a file failed before
    in this conversation, or needs more RAM than is free.

    Raises MemoryShortError if there is no room, and UsageError if `recall.kind` is "file" and the
    file cannot be created.
    """
    recall.scored()
    holds = f"{policy} holds all keys and values until they are scored"
    short = too_much(cost.ram, recall.free)
    if recall.kind in ("none", "ram") and short:
        raise MemoryShortError(
            f"{holds}: {short}",
            'nothing was read; `tier="file"` keeps them in a file instead, or take another '
            "`policy` or a shorter document",
        )
    if recall.kind in ("none", "ram") or (recall.kind == "auto" and not short):
        return False
    unfit = recall.broken or too_much(cost.file_ram, recall.free)
    disk = unfit or recall.keep_in_file(cost.longest)
    if not disk:
        return True
    if short:
        raise MemoryShortError(
            f"{holds}: {short}; in a file: {disk}",
            "nothing was read; take another `policy`, or a shorter document",
        )
    if not unfit:
        raise UsageError(
            f'`tier="file"` cannot be had: {disk}', '`tier="ram"` keeps keys and values in memory'
        )
    return False


def too_much(nbytes: int, free: int | None) -> str:
    """Why host memory has no room for `nbytes` bytes; "" if it has. free: free bytes, None if not
    known."""
    if free is None or nbytes <= free - free // 8:
        return ""
    return f"that takes {size(nbytes)} of RAM, and {size(free)} are free"


def lines(
    engine: Engine, tokenizer: Tokenizer, planner: Planner, plan: PromptPlan
) -> Iterator[str]:
    """If a second pass scores this prompt, prepare it: make the requests, and a place for keys and
    values until `Recall.scored`. Yields lines that tell the user the cost, also of a prompt that is
    read once before for the probabilities of its tokens.

    Raises ContextError, UsageError if the budget is too small, and what `keep` raises.
    """
    if plan.recalled:
        return
    kv = engine.kv
    if not planner.scores_twice:
        tokens = foreseen(kv, plan)
        if tokens >= _FEW:
            yield (
                f"{planner.wanted.eviction.policy} reads {tokens:,} tokens twice, first for their "
                "probabilities, which takes about twice the time"
            )
        return
    prepare(kv, tokenizer, planner.composer.template)
    cost = scoring(engine, plan.parts, plan.behind(kv.position), plan.asks)
    if not cost.tokens:
        return
    policy = planner.wanted.eviction.policy
    line = cost.line(in_file=keep(planner.recall, policy, cost))
    if planner.wanted.reuse == "auto":
        yield (
            f'`reuse="auto"` evicts before the question is seen, so that one cache serves all '
            f"questions; {policy}: {line}"
        )
    else:
        yield f"{policy} scores what is read by having it repeated: {line}"
