"""A second pass over a prompt: further texts whose queries score its rows
(`Scorer.second_pass`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from minikv import kernels
from minikv.kernels.dispatch import Kernels


@dataclass(frozen=True, slots=True)
class Wording:
    """The request that asks a network to repeat what it has read, as token ids. first: to repeat it
    from the beginning. later: to repeat the part that begins after certain tokens, which are put
    after these ids. answer: the tokens that the chat template puts between a question and its
    answer."""

    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """A further text, as token ids, which scores the rows `begin` to `end` - 1 of the prompt."""

    ids: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class RepeatView:
    """T queries of a `Repeat` in one layer, and the rows over which their softmax is taken.

    query [H, G, T, D]. at int64 [T]: their positions. first: the conversation's first rows, which
    never leave; chunk: the n rows that are scored; own: the rows of the repeat itself so far; each
    as `kernels.Part`. window: the layer's sliding window. value() [H, n, D]: of the chunk. output:
    as in `PromptView`. lengths float32 [T]: the norms of the layer's input (after its norm) at the
    queries; None unless `Evidence.lengths`. lse float32 [H, G, T]: the log-sum-exp of the queries'
    logits over all of these rows; None if not known. ops: the kernels.
    """

    layer: int
    query: Tensor
    at: Tensor
    first: Sequence[kernels.Part]
    chunk: kernels.Part
    own: kernels.Part
    window: int | None
    value: Callable[[], Tensor]
    output: Callable[[], Tensor] | None = None
    lengths: Tensor | None = None
    lse: Tensor | None = None
    ops: Kernels = field(default_factory=Kernels)
