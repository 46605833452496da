"""A server of `minikv serve` in a thread of the test, at a port of its own, and clients."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Self

import httpx2

from minikv.chat.session import ChatSession
from minikv.cli.serve.command import Server
from minikv.cli.serve.conversations import Conversations, Desk
from minikv.settings import Generation, Settings


class Served:
    """`with Served(session) as server`: answers at `server.url` with this chat."""

    def __init__(self, session: ChatSession, *, name: str = "m", queue: int = 8) -> None:
        self.name, self.logged = name, list[str]()
        log = self.logged.append
        self.conversations = Conversations(session, Settings(budget="48"), [name], log)
        self._queue = queue
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of its connections
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self.desk = Desk(self.conversations, self._queue)
        self.server = Server(self.desk, Generation(max_tokens=12), "")
        await self.server.serve(sockets=[self._socket])
        self.desk.close()

    def __enter__(self) -> Self:
        self._thread.start()
        self.get("/health")  # it has begun
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=30)

    def post(self, body: object, seconds: float = 60) -> httpx2.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx2.post(f"{self.url}/v1/chat/completions", content=data, timeout=seconds)

    def ask(self, *said: str, system: str = "", **more: Any) -> dict[str, Any]:
        """A whole answer. said: question, answer, question."""
        response = self.post(self.body(*said, system=system, **more))
        assert response.status_code == 200, response.text
        return dict(response.json())

    def body(self, *said: str, system: str = "", **more: Any) -> dict[str, Any]:
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]
        opening = [{"role": "system", "content": system}] if system else []
        return {"model": self.name, "messages": [*opening, *messages], "temperature": 0, **more}

    def lines(self, body: dict[str, Any]) -> Iterator[str]:
        """What a stream sends, without empty lines. Closing the iterator leaves the server."""
        path = f"{self.url}/v1/chat/completions"
        with httpx2.stream("POST", path, json=body | {"stream": True}, timeout=60) as response:
            assert response.status_code == 200
            yield from filter(None, response.iter_lines())

    def raw(self, data: bytes) -> bytes:
        """What comes back for these bytes, until the server closes the connection."""
        with closing(socket.create_connection(("127.0.0.1", self.port), 20)) as wire:
            wire.sendall(data)
            return b"".join(iter(lambda: wire.recv(1 << 16), b""))


def deltas(lines: Iterator[str], key: str = "content") -> str:
    """The text of a stream."""
    found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(c["delta"].get(key, "") for one in found for c in one["choices"])


def content(answer: dict[str, Any]) -> str:
    """The text of a whole answer."""
    return str(answer["choices"][0]["message"]["content"])


def read(answer: dict[str, Any]) -> int:
    """How many tokens were read for it."""
    return int(answer["usage"]["minikv"]["tokens"]["prompt_new"])
