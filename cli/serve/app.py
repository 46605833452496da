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
from collections.abc import AsyncIterator
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
from minikv.cli.serve.conversations import Desk, Event, News, record
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


def refused(error: Exception) -> Response:
    """The response to an error, in OpenAI's shape."""
    told = explain(error)
    message = f"{told.message}; {told.hint}" if told.hint else told.message
    status, param, code, headers = 503 if told.code == 4 else 500, "", "", dict[str, str]()
    match error:
        case HTTPException():
            status, message = error.status_code, error.detail
        case RequestError():
            status, param, code = error.status, error.param, error.code
            headers = {429: {"Retry-After": str(RETRY_S)}}.get(status, {})
        case ContextError():
            status, param, code = 400, "messages", "context_length_exceeded"
        case UsageError():
            status = 400
    kind = "server_error" if status >= 500 else "invalid_request_error"
    fields = {
        "message": message,
        "type": "rate_limit_error" if status == 429 else kind,
        "param": param or None,
        "code": code or None,
    }
    if status in (408, 413):  # the rest of the body is not read
        headers = {"Connection": "close"}
    return JSONResponse({"error": fields}, status, headers)


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
        elif (error := self._refusal(Http(scope))) is not None:
            await refused(error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, http: Http) -> RequestError | None:
        host, origin = http.headers.get("host", ""), http.headers.get("origin")
        if not self.key and not is_loopback(_name(host)):
            return RequestError("the header Host must be localhost, 127.0.0.1 or [::1]", status=403)
        same = origin in (f"http://{host}", f"https://{host}")
        if origin is not None and not same and not is_loopback(_name(origin.partition("//")[2])):
            return RequestError("pages of other sites are refused (the header Origin)", status=403)
        if not self.key or http.url.path == "/health":
            return None
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self.key.encode()):
            return None
        return RequestError("the API key is missing or wrong", code="invalid_api_key", status=401)


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
        except RequestError as error:  # too many wait
            await refused(error)(scope, receive, send)
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
            await refused(event)(scope, receive, send)
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
            await refused(first)(scope, receive, send)
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
                    yield f"data: {bytes(refused(event).body).decode()}\n\n"
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

    async def sent(message: Any) -> None:
        async with asyncio.timeout(SEND_S):
            await send(message)

    return sent


async def _body(http: Http) -> bytes:
    """The body. Raises RequestError."""
    too_large = RequestError(f"the body is larger than {BODY >> 20} MiB", status=413)
    with suppress(ValueError):
        if int(http.headers.get("content-length", 0)) > BODY:
            raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in http.stream():
                parts.append(part)
                size += len(part)
                if size > BODY:
                    raise too_large
    except TimeoutError:
        late = f"the body took over {BODY_S:.0f} s to arrive"
        raise RequestError(late, status=408) from None
    return b"".join(parts)


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

    async def refuse(http: Http, error: Exception) -> Response:
        return refused(error)

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/chat/completions", complete, methods=["POST"]),
    ]
    errors: tuple[Any, ...] = (HTTPException, RequestError, ClientDisconnect)
    return Door(Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, refuse)), key)
