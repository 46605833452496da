"""The HTTP side of `minikv serve`: OpenAI's chat completions, whole and streamed, with starlette.

A page in a browser must not reach a server without a key, even if a foreign name resolves to this
machine (DNS rebinding). So the headers Host and Origin are checked first.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from minikv.chat.transcript import Turn
from minikv.cli.failures import explain
from minikv.cli.serve.conversations import Desk, Event, Full, News, Stopping, record
from minikv.cli.serve.request import Request, RequestError, eviction_of, read
from minikv.errors import ContextError, UsageError
from minikv.settings import Generation

BODY = 8 << 20
"""The most bytes of a request's body; no supported model can read that much text."""
BODY_S, SEND_S, QUIET_S = 60.0, 60.0, 10.0
"""In seconds: the time for a body to arrive, and for a client to take data; and the time after
which a stream without news gets a comment, so that no proxy closes it."""
RETRY_S = 5
_ENDS = {"length": "length", "context": "length"}
"""OpenAI's words for why an answer ended; otherwise "stop"."""


class Failed(HTTPException):
    """The error response to a request. kind: OpenAI's type of error."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str = "",
        code: str = "",
        **headers: str,
    ) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        super().__init__(status, message, named)
        self.error = {
            "message": message,
            "type": kind,
            "param": param or None,
            "code": code or None,
        }

    @property
    def response(self) -> Response:
        return JSONResponse({"error": self.error}, self.status_code, self.headers)


def failed(error: Exception) -> Failed:
    """The error of a request in OpenAI's shape."""
    told = explain(error)
    message = f"{told.message}; {told.hint}" if told.hint else told.message
    match error:
        case Failed():
            return error
        case HTTPException():
            return Failed(error.status_code, error.detail)
        case RequestError():
            return Failed(error.status, message, param=error.param, code=error.code)
        case ContextError():
            return Failed(400, message, param="messages", code="context_length_exceeded")
        case UsageError():
            return Failed(400, message)
        case Full():
            return Failed(429, message, "rate_limit_error", Retry_After=str(RETRY_S))
        case Stopping():
            return Failed(503, message, "server_error")
    return Failed(503 if told.code == 4 else 500, message, "server_error")


# -- who may ask ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Door:
    """Refuses requests before `app` sees them: those from other sites' pages, and, if there is a
    key, those without it."""

    app: ASGIApp
    key: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = _within(send)
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif (no := self._refusal(Http(scope))) is not None:
            await no.response(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, http: Http) -> Failed | None:
        host, origin = http.headers.get("host", ""), http.headers.get("origin")
        if not self.key and not is_loopback(_name(host)):
            return Failed(403, "the header Host must be localhost, 127.0.0.1 or [::1]")
        same = origin in (f"http://{host}", f"https://{host}")
        if origin is not None and not same and not is_loopback(_name(origin.partition("//")[2])):
            return Failed(403, "pages of other sites are refused (the header Origin)")
        if not self.key or http.url.path == "/health":
            return None
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self.key.encode()):
            return None
        return Failed(401, "the API key is missing or wrong", code="invalid_api_key")


def _name(host: str) -> str:
    """The name of a header Host, without its port."""
    with suppress(ValueError):
        return urlsplit(f"//{host}").hostname or ""
    return ""


def is_loopback(name: str) -> bool:
    """Whether a host name can only be this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


# -- answers --------------------------------------------------------------------------------------


class Reply:
    """An ASGI application that answers one request, and cancels it if the client leaves."""

    def __init__(self, desk: Desk, request: Request) -> None:
        self._desk, self._request = desk, request
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        try:
            answer = self._desk.begin(self._request, events.put_nowait)
        except Full as error:
            await failed(error).response(scope, receive, send)
            return
        sending = self._stream if self._request.stream else self._whole
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(sending(events, scope, receive, send)),
            asyncio.create_task(_gone(receive)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answer, *tasks):
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _whole(
        self, events: asyncio.Queue[Event], scope: Scope, receive: Receive, send: Send
    ) -> None:
        while not isinstance(event := await events.get(), Turn | Exception):
            pass
        if isinstance(event, Exception):
            await failed(event).response(scope, receive, send)
            return
        message = {"role": "assistant", "content": event.answer}
        if event.thoughts:
            message["reasoning_content"] = event.thoughts
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _end(event)}
        body = {"object": "chat.completion", "choices": [choice], "usage": record(event)}
        await JSONResponse(self._head | body)(scope, receive, send)

    async def _stream(
        self, events: asyncio.Queue[Event], scope: Scope, receive: Receive, send: Send
    ) -> None:
        first = await events.get()
        if isinstance(first, Exception):  # a status can still be sent
            await failed(first).response(scope, receive, send)
            return
        headers = {"content-type": "text/event-stream", "cache-control": "no-store"}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})
        async for text in self._texts(first, events):
            body = text.encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _texts(self, first: Event, events: asyncio.Queue[Event]) -> AsyncIterator[str]:
        """The data that a stream sends for each event."""
        began, event = False, first
        while True:
            match event:
                case News():
                    yield f": {event.line}\n\n"
                case Exception():
                    yield f"data: {json.dumps({'error': failed(event).error})}\n\n"
                    return
                case _:
                    if not began:
                        yield self._chunk({"role": "assistant", "content": ""})
                    began = True
                    if isinstance(event, Turn):
                        yield self._chunk({}, _end(event))
                        if self._request.usage:
                            yield self._data(choices=[], usage=record(event))
                        yield "data: [DONE]\n\n"
                        return
                    key = "reasoning_content" if event.thought else "content"
                    yield self._chunk({key: event.text})
            while True:
                try:
                    event = await asyncio.wait_for(events.get(), QUIET_S)
                    break
                except TimeoutError:
                    yield ": working\n\n"

    def _chunk(self, delta: dict[str, str], end: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}
        return self._data(choices=[choice], **({"usage": None} if self._request.usage else {}))

    def _data(self, **fields: object) -> str:
        made = self._head | {"object": "chat.completion.chunk"} | fields
        return f"data: {json.dumps(made)}\n\n"


def _end(turn: Turn) -> str:
    return _ENDS.get(turn.report.stop_reason, "stop")


async def _gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _within(send: Send) -> Send:
    """A `send` that raises TimeoutError if the client takes nothing for too long."""

    def sent(message: Any) -> Awaitable[None]:
        return asyncio.wait_for(_all(send(message)), SEND_S)

    return sent


async def _all(sent: Awaitable[None]) -> None:
    await sent


async def _body(http: Http) -> bytes:
    """The body. Raises Failed."""
    with suppress(ValueError):
        if int(http.headers.get("content-length", 0)) > BODY:
            raise _too_large()
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in http.stream():
                parts.append(part)
                size += len(part)
                if size > BODY:
                    raise _too_large()
    except TimeoutError:
        raise Failed(
            408, f"the body took over {BODY_S:.0f} s to arrive", Connection="close"
        ) from None
    return b"".join(parts)


def _too_large() -> Failed:
    return Failed(413, f"the body is larger than {BODY >> 20} MiB", Connection="close")


# -- the application ------------------------------------------------------------------------------


def application(desk: Desk, defaults: Generation, key: str) -> ASGIApp:
    """The server's application. defaults: for settings that a request omits. key: "" for none."""
    names, created = desk.conversations.names, int(time.time())

    def model(name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": created, "owned_by": "minikv"}

    async def health(http: Http) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(http: Http) -> Response:
        return JSONResponse({"object": "list", "data": [model(names[0])]})

    async def one_model(http: Http) -> Response:
        name = http.path_params["name"]
        desk.conversations.eviction(eviction_of(name, names))
        return JSONResponse(model(name))

    async def complete(http: Http) -> Any:
        request = read(await _body(http), defaults)
        desk.conversations.eviction(eviction_of(request.model, names))
        return Reply(desk, request)

    def refused(http: Http, error: Exception) -> Response:
        return failed(error).response

    made: dict[Any, Callable[[Http, Exception], Response | Coroutine[Any, Any, Response]]] = {
        HTTPException: refused,
        RequestError: refused,
        ClientDisconnect: refused,
    }
    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/chat/completions", complete, methods=["POST"]),
    ]
    return Door(Starlette(routes=routes, exception_handlers=made), key)
