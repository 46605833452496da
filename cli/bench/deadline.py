"""Until when a run may go on, and what work will take, judged by what it took before."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

from minikv.errors import MinikvError


class Late(MinikvError):
    """Work that was stopped, or not begun, because the time is up."""


class Deadline:
    """`fits` before work says whether to begin it; `check` in the midst of it stops what took
    longer than anybody thought. Without seconds there is time for everything."""

    def __init__(
        self,
        seconds: float = math.inf,
        *,
        grace: float = 0.0,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        """`grace`: seconds by which work that has begun may be late."""
        self.now = now
        self._until = now() + seconds
        self._last = self._until + grace

    @property
    def left(self) -> float:
        """Seconds in which work may begin; below 0 when there are none."""
        return self._until - self.now()

    @property
    def patience(self) -> float:
        """Seconds after which `check` raises, at least 0."""
        return max(0.0, self._last - self.now())

    def fits(self, seconds: float) -> bool:
        """Whether so much can still be done."""
        return seconds <= self.left

    def require(self, seconds: float) -> None:
        """Raise Late unless so much can still be done."""
        if not self.fits(seconds):
            raise Late(f"needs about {seconds:,.0f} s, {max(0.0, self.left):,.0f} s are left")

    def check(self) -> None:
        """Raise Late when even the grace is over."""
        if self.now() > self._last:
            raise Late("the time was up in the middle of it")


_KINDS = {"read": 2.0, "step": 3.0}  # of their bounds, until something like it is measured


class Guesses:
    """Seconds that work will take: what the machine's rates allow, times how far above that the
    same work was before.

    A guess for what was never measured goes by what came nearest to its bound, so that only what
    clearly takes too long is left out.
    """

    def __init__(self) -> None:
        self._above: dict[tuple[str, ...], float] = {}

    def learn(self, kind: str, system: str, seconds: float, bound: float) -> None:
        """`kind` of work ("read" a prompt, "step") of a system took so many seconds."""
        self._above[kind, system] = seconds / bound

    def say(self, kind: str, system: str, bound: float) -> float:
        """Seconds for such work whose bound is this."""
        known = self._above.get((kind, system))
        if known is None:
            like = (above for (each, _), above in self._above.items() if each == kind)
            known = min(like, default=_KINDS[kind])
        return known * bound
