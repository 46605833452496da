"""A chat's tier: where the exact keys and values of its conversation are kept, and of what tokens.

The tokens in the tier are remembered, so that after a turn was taken back, another chat was loaded
or a policy was tried, just what the conversation shares with them is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minikv.cache.kv_cache import KVCache
from minikv.cache.tier import Tier, row_nbytes
from minikv.chat.report import size
from minikv.chat.reuse import shared
from minikv.errors import UsageError


class Recall:
    """`kind`: one of `reuse.TIERS`; may be set between turns. `why`: why there is no tier, once one
    was wanted; else ""."""

    def __init__(
        self,
        kv: KVCache,
        kind: str = "none",
        dtype: str = "same",
        free: Callable[[], int | None] = lambda: None,
    ) -> None:
        """dtype: of `reuse.TIER_DTYPES`. free(): bytes of host memory that are free, None if that
        is not known."""
        self._kv, self._coded, self._free = kv, dtype == "int8", free
        self.kind = kind
        self._ids: list[int] = []
        self.why = ""

    @property
    def tier(self) -> Tier | None:
        """The tier, where there is one."""
        return self._kv.tier

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values are in the tier."""
        return 0 if self.tier is None else len(self._ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the tier."""
        return 0 if self.tier is None else self.tier.nbytes

    @property
    def place(self) -> str:
        """Where the tier is, ram or file, while it holds anything; else ""."""
        return self.tier.kind if self.tier is not None and self._ids else ""

    def has(self, ids: Sequence[int]) -> int:
        """As `given`, but nothing is forgotten."""
        return 0 if self.tier is None else shared(self._ids, ids)

    def ready(self, tokens: int) -> bool:
        """Whether a conversation of so many tokens has a tier, which is made if need be. If not,
        `why` says why. Raises UsageError where one was asked for by name and does not fit."""
        if self.kind == "none":
            self.why = '`tier="none"`'
            return False
        refused = self._kv.recalls
        if refused is not None:
            self.why = refused
            return False
        tier = self.tier
        have = 0 if tier is None else tier.nbytes
        most = self._kv.shape.max_context
        rows = min(most, tokens + tokens // 4)
        need = row_nbytes(self._kv.shape, self._kv.dtype, self._coded) * rows
        free = self._free()
        if free is not None and need - have > free - free // 8:
            self.why = f"what was read takes {size(need)} of RAM, and {size(free + have)} are free"
            if self.kind == "ram":
                raise UsageError(
                    f'`tier="ram"` does not fit: {self.why}',
                    '`tier_dtype="int8"` takes about half, `tier="none"` reads again instead',
                )
            return False
        if tier is None:
            self._kv.tier = Tier(self._kv.shape, self._kv.dtype, self._kv.device, coded=self._coded)
            self._ids = []
        self.why = ""
        return True

    def given(self, ids: Sequence[int]) -> int:
        """How many first tokens of a conversation are in the tier; what else was there is
        forgotten."""
        assert self.tier is not None
        del self._ids[shared(self._ids, ids) :]
        self.tier.truncate(len(self._ids))
        return len(self._ids)

    def keep(self, ids: Sequence[int]) -> None:
        """The whole conversation was read: the tier has it."""
        self._ids = list(ids)

    def clear(self) -> None:
        """Forget the conversation and give its memory back."""
        if self.tier is not None:
            self.tier.clear()
        self._ids = []
