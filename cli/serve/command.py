"""`minikv serve`: binds the address, loads the model, then answers until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from minikv.cli.chat.turn import open_chat
from minikv.cli.serve.app import SEND_S, application, is_loopback
from minikv.cli.serve.conversations import Conversations, Desk
from minikv.cli.settings.config import worded
from minikv.cli.settings.flags import Call
from minikv.errors import MinikvError, UsageError
from minikv.models import refuse_without_torch
from minikv.settings import Generation, Settings

CONNECTIONS = 64
"""The most connections at once; more get status 503."""
GRACE_S = 3
"""Seconds that a client has to receive the end of its answer when the server stops."""
HEAD, HEAD_S = 32 << 10, 10.0
"""The most bytes of a request's line and headers, and the seconds within which they must arrive."""


def serve(
    settings: Settings,
    generation: Generation,
    call: Call,
    *,
    host: str,
    port: int,
    key: str,
    queue: int,
) -> None:
    """Answer requests. Raises UsageError if the address cannot be used or needs a key."""
    terminal = call.terminal
    if not key and not is_loopback(host):
        raise UsageError(
            f"--host {host} lets other machines ask, and there is no API key",
            "set MINIKV_API_KEY, or leave out --host",
        )
    if not key.isascii():
        raise UsageError("an API key must be ASCII: a header cannot contain other characters")
    if "key" in call.given:
        terminal.warn("--api-key can be seen in the list of processes; MINIKV_API_KEY cannot")
    refuse_without_torch()
    settings.check_eviction()
    with _listening(host, port) as listening:
        session = open_chat(settings, [], terminal)

        def log(line: str) -> None:
            terminal.note(worded(line))

        model = session.facts.model
        names = [Path(model).name if Path(model).exists() else model, model]
        desk = Desk(Conversations(session, settings, names, log), queue)
        address, number = listening.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        terminal.say(f"{names[0]} answers at http://{shown}:{number}/v1 (Ctrl-C ends it)")
        try:
            asyncio.run(Server(desk, generation, key).serve(sockets=[listening]))
        finally:
            desk.close()


def _listening(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises MinikvError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise MinikvError(
            f"cannot listen at {host} port {port}: {why}", "--port takes another; 0 is any free one"
        ) from None


class Server(uvicorn.Server):
    """Serves `desk`. Ctrl-C ends all answers and the server; a second one ends the process at
    once."""

    def __init__(self, desk: Desk, generation: Generation, key: str) -> None:
        self._desk = desk
        config = uvicorn.Config(
            application(desk, generation, key),
            http=_Protocol,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            h11_max_incomplete_event_size=HEAD,
            timeout_keep_alive=int(HEAD_S),
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        asyncio.get_running_loop().call_soon_threadsafe(self._desk.stop)
        super().handle_exit(sig, frame)


class _Protocol(H11Protocol):
    """Closes a connection if no complete request headers arrive in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # drops clients that do not read
            own = transport.get_extra_info("socket")
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_S))
        self._late = self.loop.call_later(HEAD_S, self._close_unasked)

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:  # it was answered before its body arrived
            self.transport.close()
        self._late = self.loop.call_later(HEAD_S, self._close_unasked)
        super().on_response_complete()

    def handle_events(self) -> None:
        super().handle_events()
        if self._late is not None and self.conn.their_state is not h11.IDLE:
            self._late.cancel()
            self._late = None

    def _close_unasked(self) -> None:
        self._late = None
        self.transport.abort()  # `close` would wait for data that the client does not read
