"""Whether an answer repeats itself, which a model does that has lost its way."""

from __future__ import annotations

from collections.abc import Sequence

from minikv.engine.sampling import Sampling

_RUN = 32  # tokens in a row that were there before; rows of a table share fewer
_LAST = 128  # tokens at the end that are looked at
_LEAST = 48  # of them, in such runs


def loops(ids: Sequence[int]) -> bool:
    """Whether at least half of the last tokens, and not only a few, belong to runs that the answer
    had before, word for word. The figures come from answers of a small model to questions about
    real texts: where it goes round in circles, nearly all of the last tokens do, else few."""
    seen: set[tuple[int, ...]] = set()
    again: set[int] = set()
    for end in range(_RUN, len(ids) + 1):
        run = tuple(ids[end - _RUN : end])
        if run in seen:
            again.update(range(end - _RUN, end))
        seen.add(run)
    last = range(max(len(ids) - _LAST, 0), len(ids))
    found = sum(i in again for i in last)
    return found >= max(_LEAST, len(last) / 2)


def line(ids: Sequence[int], sampling: Sampling, own: Sampling) -> list[str]:
    """What to tell the user if the answer repeats itself, with what was not tried. own: how the
    model's makers draw its tokens."""
    if not loops(ids):
        return []
    ways = [] if sampling.repeat_penalty > 1.0 else ["`repeat_penalty=1.1`"]
    if sampling.temperature == 0.0:
        ways.append('`temperature="auto"`' if own.temperature > 0.0 else "`temperature=0.7`")
    return [f"the answer repeats itself{'; ' + ' or '.join(ways) + ' may help' if ways else ''}"]
