"""The tier of one chat, lent to another over the same network for one question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minikv.cache.kv_cache import KVCache
from minikv.cache.tier import Tier
from minikv.cache.tier_rows import TierError
from minikv.chat.recall import Recall
from minikv.chat.reuse import Stored


class Lent(Recall):
    """`Recall` over the rows that another chat's tier has. It keeps no rows itself, so the other
    chat's tier stays as it is, and counts none as its own.

    chunk: how many tokens the network reads together. What the tier does not give is read from the
    beginning of a chunk on: then the numbers are those of reading everything, to the last bit, if
    the tier's rows were read in the same chunks.
    """

    def __init__(self, lender: Recall, kv: KVCache, chunk: int) -> None:
        """lender: its tier has exact rows (`dtype` "same")."""
        super().__init__(kv, lender.kind)
        assert lender.tier is not None
        assert lender.dtype == "same"
        kv.tier = Tier(kv.shape, kv.dtype, kv.device, rows=lender.tier.rows, lent=True)
        kv.tier.ids, kv.tier.length, self._chunk = lender.ids, lender.tokens, chunk

    @property
    def nbytes(self) -> int:
        """See `Recall`."""
        return 0

    @property
    def place(self) -> str:
        """See `Recall`."""
        return ""

    def ready(self, tokens: int) -> bool:
        """See `Recall`."""
        return self.tier is not None and self._kv.rules.cannot_recall is None

    def stored(self, tokens: int | None = None) -> Stored:
        """See `Recall`."""
        # A single token would be read as a step is, with other sums.
        least = max(2, self._kv.observed(tokens or 0, 0))
        return replace(super().stored(tokens), least=least, chunk=self._chunk)

    def given(self, ids: Sequence[int]) -> int:
        """See `Recall`."""
        assert self.tier is not None
        self.tier.truncate(self.stored(len(ids)).gives(ids))
        return super().given(ids)

    def keep(self, ids: Sequence[int]) -> str:
        """See `Recall`."""
        return ""

    def failed(self, error: TierError) -> str:
        """See `Recall`. A damaged part stays in the other chat's file, so nothing of it is used."""
        self.leave()
        return f"the tier is damaged: {error}; everything is read again"
