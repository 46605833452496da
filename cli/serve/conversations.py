"""Serves many conversations with one chat, one answer at a time.

A request contains its whole conversation. `Conversations` finds the held conversation that it
continues, and the chat reads only the new messages (`ChatSession.follow`). `Desk` queues requests,
and answers them in one thread, because OpenMP keeps a pool for every thread that computes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from minikv.cache.tier import Tier
from minikv.cache.tier_file import FileRows
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.chat.snapshot import ChatSnapshot
from minikv.chat.transcript import Message, Turn, shared
from minikv.cli.serve.request import Request, RequestError, eviction_of
from minikv.errors import Interrupted, UsageError
from minikv.settings import Settings

HELD = 3
"""The most conversations that are held in addition to the one in the cache."""
_SHARE = 4  # they take at most a quarter of the free memory
_AGAIN = 0.02  # seconds between two calls of `cancel`


@dataclass(frozen=True, slots=True)
class News:
    """The progress of a request, which a stream sends as a comment."""

    line: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the answer, or of the thoughts before it."""

    text: str
    thought: bool = False


Event = News | Piece | Turn | Exception
"""The events of a request; the last is a Turn or an exception."""
Tell = Callable[[Event], object]


def _stopping() -> RequestError:
    """The error if the server stops, or the client has left."""
    return RequestError("the server is stopping", status=503)


@dataclass(frozen=True, slots=True)
class _Held:
    """A conversation that is not in the cache. under: policy and budget, as in requests."""

    text: str
    under: tuple[str, str]
    snapshot: ChatSnapshot
    tier: Tier | None

    def leave(self) -> None:
        """Remove its tier."""
        if self.tier is not None and isinstance(self.tier.rows, FileRows):
            self.tier.rows.close()


class Conversations:
    """The conversations of a chat. names: those of its model. log(line): shows a line to the
    server's user."""

    def __init__(
        self,
        session: ChatSession,
        settings: Settings,
        names: Sequence[str],
        log: Callable[[str], None],
    ) -> None:
        self.session, self.names, self.log = session, names, log
        self._settings, self._eviction = settings, session.eviction
        self._under = ("", "")
        self._held: list[_Held] = []  # the last used one is at the end

    def eviction(self, under: tuple[str, str]) -> EvictionConfig:
        """The policy and the budget of a request. Raises RequestError."""
        policy, budget = under
        if not policy:
            return self._eviction
        budget = budget or self._settings.budget
        try:
            return EvictionConfig.read(policy, budget=budget, seed=self._settings.seed)
        except UsageError as error:
            raise RequestError(f"{error}", "model", "model_not_found", 404) from None

    def turn_to(self, request: Request) -> None:
        """Switch the chat to the request's conversation: the one with which it shares the most
        text, if that is at least half of that conversation; otherwise a new one. Raises
        UsageError."""
        session, under = self.session, eviction_of(request.model, self.names)
        eviction, text = self.eviction(under), _text(request.messages)
        session.check(eviction)
        known = [
            *((one.text, one.under) for one in self._held),
            (_text(session.messages), self._under),
        ]
        found = [(shared(was, text), n) for n, (was, of) in enumerate(known) if of == under]
        most, number = max(found, default=(0, 0))
        if not most or 2 * most < len(known[number][0]):
            self._put_aside()
            session.reset()
            session.configure(eviction)
        elif number < len(self._held):
            held = self._held.pop(number)
            self._put_aside()
            try:
                session.restore(held.snapshot)
            except BaseException:
                held.leave()
                raise
            session.recall.exchange(held.tier)
        self._under = under
        session.follow(request.messages[:-1])

    def _put_aside(self) -> None:
        """Hold a copy of the conversation that is in the cache, if there is room for it."""
        session, room = self.session, self.session.recall.free()
        if not session.turns:  # nothing was read, or reading was cancelled
            session.recall.leave()
            return
        size = session.engine.kv.stats().held_bytes
        limit = size if room is None else room // _SHARE
        while self._held and (
            len(self._held) >= HELD or size + sum(h.snapshot.nbytes for h in self._held) > limit
        ):
            self._held.pop(0).leave()
        if size <= limit:
            snapshot, text = session.snapshot(), _text(session.messages)
            tier = session.recall.exchange(None)
            self._held.append(_Held(text, self._under, snapshot, tier))
        session.recall.leave()

    def answer(self, request: Request, tell: Tell, left: Callable[[], bool]) -> Turn:
        """Answer a request, in this thread. left(): nobody waits for the answer any more. Raises
        RequestError if it was cancelled, and the errors of `ask`."""
        session = self.session

        def going_on() -> None:
            if left():
                session.cancel()

        def reads(done: int, total: int) -> None:
            going_on()
            # Tokens that the cache or the disk already has are not part of the total.
            tell(News(f"read {done} of {total} tokens"))

        def thinks(text: str, tokens: int) -> None:
            going_on()
            tell(Piece(text, thought=True))

        if left():
            raise _stopping()
        self.turn_to(request)
        session.seed = secrets.randbits(31) if request.seed is None else request.seed
        how: dict[str, Any] = asdict(request.generation)
        try:
            asked = request.messages[-1].content
            how |= {"progress": reads, "notice": self.log, "thinking": thinks}
            for piece in session.ask(asked, **how):
                going_on()
                tell(Piece(piece))
        except Interrupted:
            raise _stopping() from None
        if left():
            raise _stopping()
        for line in session.turns[-1].report.lines():
            self.log(line)
        return session.turns[-1]

    def close(self) -> None:
        """Remove the files of all conversations."""
        for held in self._held:
            held.leave()
        self.session.close()


class Desk:
    """Answers requests one after another. most: how many may wait."""

    def __init__(self, conversations: Conversations, most: int) -> None:
        self.conversations, self.most = conversations, most
        self._one = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "minikv-serve")
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: Request, tell: Tell) -> asyncio.Task[None]:
        """Answer a request when its turn comes; call `tell` with its events. Cancelling the task
        cancels the request. Raises RequestError if too many wait."""
        before = len(self._tasks)
        if before > self.most:
            raise RequestError(f"{self.most} requests are waiting already", status=429)
        if before:
            tell(News(f"waiting behind {before}"))
        task = asyncio.create_task(self._answer(request, tell))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, request: Request, tell: Tell) -> None:
        try:
            async with self._one:
                tell(await self._in_thread(request, tell))
        except asyncio.CancelledError:
            tell(_stopping())
            raise
        except Exception as error:
            tell(error)

    async def _in_thread(self, request: Request, tell: Tell) -> Turn:
        loop, left = asyncio.get_running_loop(), False

        def tell_here(event: Event) -> None:
            loop.call_soon_threadsafe(tell, event)

        work: Future[Turn] = self._thread.submit(
            self.conversations.answer, request, tell_here, lambda: left
        )
        done = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            left = True
            while not done.done():  # repeatedly, because a turn that begins ignores earlier calls
                self.conversations.session.cancel()
                await asyncio.wait([done], timeout=_AGAIN)
            done.exception()  # otherwise the loop would report it
            raise

    def stop(self) -> None:
        """Cancel all requests."""
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        self._thread.submit(self.conversations.close).result()
        self._thread.shutdown()


def record(turn: Turn) -> dict[str, object]:
    """The cost of an answer, in the form of OpenAI's usage, and under `minikv` in the form of
    `--json`."""
    report, tokens = turn.report, turn.report.tokens
    prompt = tokens.prompt_reused + tokens.prompt_new
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens.generated,
        "total_tokens": prompt + tokens.generated,
        "prompt_tokens_details": {"cached_tokens": tokens.prompt_reused},
        "completion_tokens_details": {"reasoning_tokens": tokens.thoughts},
        "minikv": report.to_dict(),
    }


def _text(messages: Sequence[Message]) -> str:
    """A conversation as one text, for comparing it with others."""
    return "".join(f"\0{message.role}\0{message.content}\0" for message in messages)
