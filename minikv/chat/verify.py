"""Writes an answer again without eviction, from all that was read, and compares the two answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

import torch

from minikv.cache.tier import TierSteps
from minikv.chat.answer import Answer
from minikv.chat.protocols import Tokenizer
from minikv.chat.recall import Recall
from minikv.chat.report import AgainstFull, TurnReport
from minikv.engine.engine import Engine
from minikv.engine.sampling import WINDOW, Sampling, pick
from minikv.errors import UsageError


@dataclass(frozen=True, slots=True)
class Verification:
    """Compares an answer with the one that was written without eviction.

    tokens: ids of the second answer. text: its text. same: how many first tokens are equal in both.
    differs: whether the answers differ after these. was and now: the text of the first token that
    differs, in the first and in the second answer; None if that answer has ended. complete: False
    if writing was stopped. seconds: wall time.
    """

    tokens: tuple[int, ...]
    text: str
    same: int
    differs: bool
    was: str | None
    now: str | None
    complete: bool
    seconds: float

    @property
    def against_full(self) -> AgainstFull | None:
        """The result for the turn record; None if there is none."""
        if not (self.differs or self.complete):
            return None
        tokens = self.same if self.differs else None
        return AgainstFull(not self.differs, checked=True, tokens=tokens)


def rewritten(
    engine: Engine,
    tokenizer: Tokenizer,
    recall: Recall,
    ids: Sequence[int],
    report: TurnReport | None,
    progress: Callable[[int, int], None] | None,
    stopped: Callable[[], bool],
) -> Generator[str, None, Verification]:
    """Write the answer of `report` again, which is the last one of the conversation `ids`; yield
    its text.

    The chat and its cache do not change. Raises UsageError if there is no answer, or no tier that
    has its question, and what a step raises.
    """
    began = perf_counter()
    if report is None or not report.tokens.generated:
        raise UsageError("there is no answer to verify", "ask something first")
    read = report.tokens.prompt_reused + report.tokens.prompt_new
    tier = recall.tier
    if tier is None or recall.has(ids[:read]) < read:
        raise UsageError(f"this answer cannot be verified: {_why(recall, report)}", _HINT)
    how: Any = report.sampling
    # A chat that was saved by an earlier version has no penalty in its record.
    sampling = Sampling(**{one.name: how[one.name] for one in fields(Sampling) if one.name in how})
    # An answer that did not end by itself is compared up to its length.
    itself = report.stop_reason in ("eos", "stop")
    most = max(int(how["max_tokens"]), 1) if itself else report.tokens.generated
    most = min(most, engine.kv.shape.max_context - read + 1)
    first = list(ids[read:])
    answer, ended = Answer(tokenizer.stream(), how["stop"]), False
    second: list[int] = []
    ops = engine.kv.ops
    steps = TierSteps(tier, read - 1, ops)
    token = ids[read - 1]
    try:
        while not stopped() and answer.generated < most and not ended:
            logits = engine.network.forward(
                torch.tensor([token], dtype=torch.int64, device=engine.kv.device), steps
            )
            recent = [*ids[:read][-WINDOW:], *second] if sampling.penalizes else []
            token = pick(
                logits, tokenizer.vocab, sampling, report.seed, steps.position, ops, recent
            )
            if progress is not None:
                progress(answer.generated + 1, report.tokens.generated)
            if token in tokenizer.stop_ids:
                ended = True
                break
            piece = answer.push(token)
            ended = answer.stopped
            if not answer.overshot:  # an overshot token does not belong to the answer
                second.append(token)
            if piece:
                yield piece
    finally:
        steps.close()
    if rest := answer.finish():
        yield rest
    same = next(
        (i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )
    complete = ended or answer.generated >= most
    differs = same < min(len(first), len(second))
    differs = differs or (complete and len(first) != len(second))

    def text(tokens: Sequence[int]) -> str | None:
        return tokenizer.decode(tokens[same : same + 1]) if same < len(tokens) else None

    return Verification(
        tuple(second),
        answer.text,
        same,
        differs,
        text(first) if differs else None,
        text(second) if differs else None,
        complete,
        perf_counter() - began,
    )


_HINT = "with `tier` and `reuse` at auto, the next answer can be"


def _why(recall: Recall, report: TurnReport) -> str:
    if recall.tier is None or not recall.tokens:
        return "there is no tier that has what was read" + (
            f" ({recall.why})" if recall.why else ""
        )
    return "the tier does not have its question any more"
