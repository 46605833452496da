"""`minikv serve`: each answer is that of `minikv ask` or of a chat; what clients send, and what
they get; those that wait, leave or are slow; who may ask."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fakes import FakeEngine
from serving import Served, content, deltas, read
from small_chat import chat, scripted
from tables import table
from typed import fails, fake_chat, invoke

from minikv.chat.recall import Recall
from minikv.chat.session import ChatSession
from minikv.chat.store import Store
from minikv.chat.transcript import Message
from minikv.cli.serve import app, command
from minikv.loader import build
from minikv.models import BUNDLED
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Generation, Settings

DOCUMENT = "The mill by the river is run by Ada. " * 8
WHOLE = (BUNDLED / "sample.txt").read_text()
SAMPLE = "".join(WHOLE[at - 700 : at + 700] for at in (WHOLE.index(n) for n in ("Halhart", "Rosa")))
MAKES, KEEPS = "What does Halhart Works make?", "Which animal does Rosa Zemstrom keep?"


def recalling(tier: str, folder: Path | None = None, **given: Any) -> ChatSession:
    """A chat over the small random network, with a tier. folder: of a store."""
    session = chat(reuse="auto", **given)
    session.recall = Recall(session.engine.kv, tier)
    if folder is not None:
        session.recall.store = Store(folder, 1 << 30, {"model": "x"}, least=100)
    return session


def said(session: ChatSession, question: str, tokens: int = 12) -> str:
    return "".join(session.ask(question, tokens))


@pytest.fixture(scope="module")
def toy() -> Iterator[Served]:
    with Served(build(Settings(remember="off")), name="bundled") as server:
        yield server


# -- the same answers ------------------------------------------------------------------------
@pytest.mark.parametrize("under", ["", "@adakv:64", "@streaming:128", "@full", "@kvzip:256"])
@pytest.mark.parametrize("parts", [False, True])
def test_an_answer_is_that_of_ask(toy: Served, under: str, parts: bool) -> None:
    policy, _, budget = under[1:].partition(":")
    flags = ["--policy", policy, "--budget", budget or "auto"] if under else []
    client = openai.OpenAI(base_url=f"{toy.url}/v1", api_key="x")
    for question in (MAKES, KEEPS):
        text = f"{SAMPLE}\n\n{question}"
        asked = invoke("ask", "-", "--remember", "off", *flags, input=text)
        assert asked.exit_code == 0, asked.output
        pieces = [{"type": "text", "text": each} for each in text.split("\n", 3)]
        said: Any = [{"role": "user", "content": pieces if parts else text}]
        model = f"bundled{under}"
        create: Any = partial(client.chat.completions.create, model=model, messages=said)
        whole = create(temperature=0)
        chunks = list(create(stream=True, stream_options={"include_usage": True}))
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert whole.choices[0].message.content == streamed == asked.stdout[:-1]
        assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert whole.usage.total_tokens == chunks[-1].usage.total_tokens > 400
        assert whole.usage.model_dump()["minikv"]["policy"] == (policy or DEFAULT_PROMPT)


@pytest.mark.parametrize("where", ["system", "user"])
@pytest.mark.parametrize(
    ("policy", "budget", "tier"),
    [
        ("adakv", 48, "file"),
        ("adakv", 48, "none"),
        ("adakv", "auto", "file"),
        ("streaming", 48, "file"),
        ("full", "auto", "none"),
    ],
)
def test_a_client_that_sends_the_conversation_each_time_gets_the_answers_of_a_chat(
    tmp_path: Path, where: str, policy: str, budget: int | str, tier: str
) -> None:
    """As Open WebUI does: a document in front, a second question, a title in between, the answer
    regenerated, either question edited, and an answer that was stopped."""
    system, before = (DOCUMENT, "") if where == "system" else ("", DOCUMENT)
    one, two = f"{before}Who runs the mill?", "And where is it?"
    how: dict[str, Any] = {"policy": policy, "budget": budget}

    def asked(*questions: str, system: str = system, tokens: int = 12) -> str:
        """The last answer of a chat; its first one has at most so many tokens."""
        anew, answer = recalling(tier, system=system, **how), ""
        for number, question in enumerate(questions):
            if number and tier == "none" and budget == 48:  # all is read again
                known = anew.messages
                anew.reset()
                anew.follow(known)
            answer = said(anew, question, 12 if number else tokens)
        return answer

    first, title = asked(one), "Write a title for this conversation: Who runs the mill?"
    with Served(recalling(tier, tmp_path, **how)) as server:

        def answer(*texts: str, max_tokens: int = 12, reads: int = 60) -> str:
            made = server.ask(*texts, system=system, max_tokens=max_tokens)
            assert read(made) <= reads
            return content(made)

        assert answer(one, reads=500) == first
        second = asked(one, two)
        assert answer(one, first, two) == second
        assert content(server.ask(title)) == asked(title, system="")
        assert answer(one, first, two) == second
        assert answer(one, first, f"{two}?") == asked(one, f"{two}?")
        assert answer(f"{one}!") == asked(f"{one}!")
        assert answer(one) == first
        short = asked(one, tokens=5)
        assert answer(one, max_tokens=5) == short
        assert answer(one, short, two) == asked(one, two, tokens=5)
    with Served(recalling(tier, tmp_path, **how)) as server:  # it has what the store kept
        assert answer(one) == first


_LLM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("more", "roles"),
    [
        (_LLM, "system user"),
        (_LLM, "user assistant user"),
        ({"stream": False, "max_tokens": 10, "seed": 5, "temperature": 0.0}, "user"),
        ({"temperature": 0, "stream": True}, f"system user{' assistant user' * 3}"),
    ],
    ids=["llm", "llm-later", "llm-whole", "aider"],
)
def test_requests_as_clients_send_them(more: dict[str, Any], roles: str) -> None:
    """As recorded from llm 0.36 and aider 0.86 (which gives examples and files as turns)."""
    messages = [Message(role, f"{n}: {DOCUMENT[:50]}") for n, role in enumerate(roles.split())]
    anew = recalling("file")
    anew.follow(messages[:-1])
    expected = said(anew, messages[-1].content, more.get("max_tokens", 12))
    with Served(recalling("file")) as server:
        body = {"model": "m", "messages": [asdict(each) for each in messages], **more}
        text = deltas(server.lines(body)) if more["stream"] else content(server.post(body).json())
    assert text == expected != ""


def test_thoughts_are_a_part_of_their_own() -> None:
    with Served(scripted("<think>It is a mill.</think>Ada runs it.")) as server:
        message = server.ask("Who?", max_tokens=99)["choices"][0]["message"]
        told = {"content": "Ada runs it.", "reasoning_content": "It is a mill."}
        assert message == {"role": "assistant"} | told
        lines = list(server.lines(server.body("Who?", max_tokens=99)))
        assert {key: deltas(iter(lines), key) for key in told} == told
        assert lines[-1] == "data: [DONE]"


def test_how_an_answer_is_written_is_as_of_ask(toy: Served) -> None:
    """Each request has its own sampling, and the server's where it says nothing."""
    session = build(Settings(remember="off", seed=7))
    how: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "max_tokens": 9}
    drawn = "".join(session.ask("Tell me.", **how))
    made = [content(toy.ask("Tell me.", seed=7, **how)) for _ in range(2)]
    assert made == [drawn, drawn]
    session.reset()
    stop = drawn[3:5]
    stopped = "".join(session.ask("Tell me.", stop=stop, **how))
    whole = toy.ask("Tell me.", seed=7, stop=[stop], **how)
    assert (content(whole), whole["choices"][0]["finish_reason"]) == (stopped, "stop")
    short = toy.ask("Tell me.", seed=7, **how | {"max_tokens": 99, "max_completion_tokens": 2})
    assert short["choices"][0]["finish_reason"] == "length"
    assert drawn.startswith(content(short))
    seeds = {toy.ask("Tell me.")["usage"]["minikv"]["seed"] for _ in range(2)}
    assert len(seeds) == 2


# -- what is refused -------------------------------------------------------------------------
SAY = {"model": "bundled", "messages": [{"role": "user", "content": "Hi"}]}
PART = "messages[0].content[0] must be a part of type text"
_UNKNOWN = {"functions": [{}], "response_format": {"type": "json_object"}, "logprobs": True}
_UNKNOWN |= {"logit_bias": {"5": 1}}


def say(content: object, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        *((data, 400, "not valid JSON") for data in (b"", b"{", b"[" * 99_999, b'"\xff"')),
        (b"[]", 400, "must be a JSON object"),
        ({"model": None}, 400, "model is missing"),
        ({"model": 5}, 400, "model must be a text"),
        *(({"model": f"gpt-4{under}"}, 404, "this server has bundled") for under in ("", "@full")),
        ({"model": "bundled@best"}, 404, "'best'"),
        ({"model": "bundled@adakv:lots"}, 404, "budget"),
        ({"model": "bundled@:64"}, 400, "names no policy"),
        *(({"messages": said}, 400, "messages must be a list") for said in (None, [])),
        ({"messages": ["Hi"]}, 400, "messages[0] must be an object"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content must be text"),
        (say(" "), 400, "the question is empty"),
        (say("\ud800"), 400, "not valid Unicode"),
        (say("Hi", "god"), 400, "messages[0].role must be"),
        (say("Hi", "tool"), 400, "gives a model no tools"),
        (say("Hi", "assistant"), 400, "must be the user's"),
        (say([{"type": "image_url", "image_url": {}}]), 400, f"{PART}, got 'image_url'"),
        *((say(text), 400, "trained for") for text in ("x " * 99_999, "kiwi " * 9_000)),
        ({"tools": [{"type": "function"}]}, 400, "tools is not supported: minikv gives"),
        *(({name: value}, 400, f"{name} is not supported") for name, value in _UNKNOWN.items()),
        ({"presence_penalty": 0.5}, 400, "repeat_penalty"),
        ({"n": 2}, 400, "n is not supported: minikv writes one answer"),
        ({"n": 0, "stream": "yes"}, 400, "stream must be true or false"),
        ({"stream_options": 1}, 400, "stream_options must be an object"),
        ({"temperature": -1}, 400, "temperature must be between 0 and 100"),
        ({"temperature": float("nan")}, 400, "temperature must be between"),
        ({"temperature": "hot"}, 400, "temperature must be a number"),
        ({"top_p": 2}, 400, "top_p must be between 0 and 1"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"max_completion_tokens": 1.5}, 400, "max_tokens must be a whole number"),
        ({"stop": 5}, 400, "stop must be"),
        ({"stop": [""]}, 400, "stop must not have an empty text"),
        ({"stop": ["\ud800"]}, 400, "not valid Unicode"),
        ({"stop": ["a"] * 17}, 400, "more than 16 texts"),
        ({"seed": "x"}, 400, "seed must be a whole number"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_what_is_wrong_is_said_in_a_sentence(
    toy: Served, change: bytes | dict[str, Any], status: int, words: str
) -> None:
    for stream in (False, True):
        body = change if isinstance(change, bytes) else {**SAY, "stream": stream} | change
        refused = toy.post(body)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"]) == (status, "invalid_request_error")
        assert words in error["message"]
        assert "Traceback" not in refused.text


def test_what_asks_for_nothing_is_no_error(toy: Served) -> None:
    """Other paths have errors of the same shape."""
    neutral = {"tools": [], "tool_choice": "auto", "n": 1, "logprobs": False, "stop": []}
    neutral |= {"response_format": {"type": "text"}, "frequency_penalty": 0, "user": "me"}
    assert content(toy.ask("Hi", **neutral)) == content(toy.ask("Hi", stop=None))
    assert toy.get("/v1/models/bundled@adakv:512").json()["id"] == "bundled@adakv:512"
    for path, status in {"/": 404, "/v1/chat/completions": 405, "/v1/models/x": 404}.items():
        refused = toy.get(path)
        assert (refused.status_code, set(refused.json())) == (status, {"error"})


@pytest.mark.parametrize(
    ("key", "headers", "status"),
    [
        ("", {}, 200),
        *(("", {"host": host}, 200) for host in ("localhost", "[::1]:80")),
        *(("", {"host": host}, 403) for host in ("evil.example", "", "[::1", "192.168.0.7")),
        ("", {"host": "localhost.evil.example:8080"}, 403),
        ("", {"origin": "http://localhost:3000"}, 200),
        *(("", {"origin": origin}, 403) for origin in ("https://evil.example", "null", "http://[")),
        ("", {"origin": "http://127.0.0.1.evil.example"}, 403),
        ("k", {}, 401),
        ("k", {"authorization": "Bearer q"}, 401),
        ("k", {"authorization": "Bearer k"}, 200),
        ("k", {"authorization": "Bearer k", "host": "box.lan:8080"}, 200),
        ("k", {"authorization": "Bearer k", "origin": "http://evil.example"}, 403),
    ],
    ids=str,
)
def test_who_may_ask(toy: Served, key: str, headers: dict[str, str], status: int) -> None:
    door = app.Door(app.application(toy.desk, Generation(), key).app, key)
    transport = httpx2.ASGITransport(app=door)

    async def get(path: str) -> httpx2.Response:
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path, headers=headers)

    found = asyncio.run(get("/v1/models"))
    assert found.status_code == status
    assert ("error" in found.json()) == (status != 200)
    assert asyncio.run(get("/health")).status_code == (200 if status == 401 else status)


# -- those that wait, leave, or are slow -----------------------------------------------------
class Slow(Served):
    """A server over a fake that takes 10 ms for each step about a text with "slow" in it. steps:
    how many of these there were."""

    def __init__(self, queue: int = 8) -> None:
        engine, self.steps = FakeEngine(length=10_000), 0
        engine.hook = self._step
        super().__init__(fake_chat(engine), queue=queue)

    def _step(self, fed: list[int]) -> None:
        if b"slow" in bytes(id for id in fed if id < 256):
            self.steps += 1
            time.sleep(0.01)


def written(question: str, tokens: int = 12) -> str:
    """What the fake answers."""
    return said(fake_chat(FakeEngine(length=10_000)), question, tokens)


@pytest.mark.parametrize("text", ["slow", f"slow{'ly' * 900}"], ids=["writing", "reading"])
def test_a_client_that_leaves_ends_its_answer(text: str) -> None:
    with Slow() as server:
        body, writes = server.body(text, max_tokens=3000), text == "slow"
        lines = server.lines(body)
        next(line for line in lines if line.startswith('data: {"id"' if writes else ": read"))
        lines.close()
        with pytest.raises(httpx2.TimeoutException):  # one that is not streamed
            server.post(body, seconds=0.2)
        assert content(server.ask("Who?")) == written("Who?")
        assert server.steps < 400
        if writes:  # what was written of it is known
            held = next(h for h in server.conversations._held if "slow" in h.text)
            turn = held.snapshot.said.turns[-1]
            assert written("slow", 3000).startswith(turn.answer)


def test_the_queue_has_an_end_and_who_leaves_it_makes_room() -> None:
    with Slow(queue=1) as server, ThreadPoolExecutor() as threads:
        first = server.lines(server.body("slow", max_tokens=3000))
        next(first)
        waiting = server.lines(server.body("Who?"))
        assert next(waiting) == ": waiting behind 1"
        full = server.post(server.body("Where?"))
        assert (full.status_code, full.headers["retry-after"]) == (429, str(app.RETRY_S))
        assert "1 request" in full.json()["error"]["message"]
        waiting.close()
        later = threads.submit(lambda: content(server.ask("When?")))
        while len(server.desk._tasks) < 2:
            time.sleep(0.01)
        first.close()
        assert later.result() == written("When?")


def test_a_client_that_takes_nothing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SEND_S", 0.2)
    with Served(fake_chat(FakeEngine(length=10_000))) as server:
        data = json.dumps(server.body("Who?", max_tokens=4000, stream=True)).encode()
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect(("127.0.0.1", server.port))
            lazy.sendall(_head(len(data)) + data)
            assert content(server.ask("When?")) == written("When?")
            time.sleep(1)
            lazy.settimeout(20)
            with suppress(ConnectionError):
                assert b"[DONE]" not in b"".join(iter(lambda: lazy.recv(1 << 16), b""))


def _head(length: int) -> bytes:
    first = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    return first + f"Content-Length: {length}\r\n\r\n".encode()


_CHUNKED = _head(9).replace(b"Content-Length: 9", b"Transfer-Encoding: chunked")
_CONNECTIONS: dict[str, tuple[bytes, bytes]] = {
    "slow": (_head(100) + b"{", b"408"),
    "long": (_head(app.BODY + 1), b"413"),
    "chunked": (_CHUNKED + 2 * (b"400\r\n" + b" " * 0x400 + b"\r\n"), b"413"),
    "head": (b"POST /v1/chat/comple", b""),
    "nothing": (b"", b""),
    "second": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET", b"200"),
    "wide": (b"GET / HTTP/1.1\r\nX: " + b"a" * command.HEAD, b"400"),
    "tls": (b"\x16\x03\x01 what", b"400"),
    "no-host": (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
    "old": (b"GET /health HTTP/1.0\r\n\r\n", b"403"),
}


@pytest.mark.parametrize(("data", "status"), _CONNECTIONS.values(), ids=_CONNECTIONS)
def test_limits_of_a_connection(
    toy: Served, data: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where, name, value in ((app, "BODY", 1500), (app, "BODY_S", 1.0), (command, "HEAD_S", 1.0)):
        monkeypatch.setattr(where, name, value)
    assert toy.raw(data)[9:12] == status
    assert toy.get("/health").status_code == 200


# -- the command -----------------------------------------------------------------------------
@table("""
    flags                                   | code | words
    --host 0.0.0.0 | 2 | --host 0.0.0.0 lets other machines ask, and there is no API key
    --host no.such.host.invalid --api-key k | 1 | cannot listen at no.such.host.invalid
    --port 99999                            | 2 | --port
    --port TAKEN                            | 1 | Address already in use
    --policy best                           | 2 | best
""")
def test_what_cannot_be_served_is_one_line(toy: Served, flags: str, code: str, words: str) -> None:
    done = invoke("serve", *flags.replace("TAKEN", str(toy.port)).split())
    fails(done, int(code), words)
    assert done.stdout == ""


def test_without_the_extra_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "minikv.cli.serve.command")
    fails(invoke("serve"), 2, "needs the package uvicorn", "pip install 'minikv[serve]'")


@pytest.mark.parametrize(
    ("number", "times", "code", "limit"),
    [("INT", 1, 130, 3), ("INT", 2, 130, 4096), ("TERM", 1, 143, 3)],
)
def test_the_server_of_the_command_line(number: str, times: int, code: int, limit: int) -> None:
    """A process of its own answers, says what it cost, and ends with a signal, also while a client
    is sending."""
    flags = ["--max-tokens", str(limit)] if limit != 4096 else []
    started = subprocess.Popen(
        [sys.executable, "-m", "minikv", "serve", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"MINIKV_API_KEY": "k", "MINIKV_POLICY": "streaming"},
    )
    with started:
        line = started.stderr.readline()
        url = line.split()[3]
        client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
        said: Any = [{"role": "user", "content": MAKES}]
        made = client.chat.completions.create(model="bundled", messages=said)
        record = made.usage.model_dump()["minikv"]
        assert (record["policy"], record["sampling"]["max_tokens"]) == ("streaming", limit)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="q", max_retries=0).models.list()
        port = int(url.split(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as sending:
            sending.sendall(_head(100).replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer k\r\n\r\n"))
            for _ in range(times):
                time.sleep(0.3)
                started.send_signal(signal.Signals[f"SIG{number}"])
            assert started.wait(60) == code
        told = started.stderr.read()
    assert told.startswith(f"{made.usage.completion_tokens} token")
    assert "nothing evicted" in told
    assert "Traceback" not in told


# -- for long --------------------------------------------------------------------------------
def _resident() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_an_hour_with_four_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Questions, aborts, bad bodies and slow readers, for SERVE_SOAK seconds (an hour): each answer
    is that of a chat, and after the first tenth no more memory is needed."""
    length = float(os.environ.get("SERVE_SOAK", "3600"))
    asks = [(f"Number {n}: {DOCUMENT}Who runs the mill?", "And where is it?") for n in range(8)]
    known = []
    for one, two in asks:
        anew = recalling("file", policy="adakv", budget=48)
        first, second = said(anew, one), said(anew, two)
        known_by = anew.messages[:2]  # a conversation that is not held is read as its text
        anew.reset()
        anew.follow(known_by)
        known.append(({first}, {second, said(anew, two)}))
    ends, wrong, done = time.monotonic() + length, list[str](), [0] * 4
    session = recalling("file", tmp_path, policy="adakv", budget=48)
    ways = ("asks", "asks", "leaves", "sends nonsense", "is slow")

    def client(number: int, server: Served) -> None:
        drawn = random.Random(number)
        while time.monotonic() < ends:
            case, way = drawn.randrange(len(asks)), drawn.choice(ways)
            (one, two), (first, second) = asks[case], known[case]
            stream = drawn.random() < 0.5
            data = bytearray(json.dumps(server.body(one, stream=way == "is slow")).encode())
            if way == "asks":
                for texts, right in (((one,), first), ((one, *first, two), second)):
                    body = server.body(*texts)
                    text = deltas(server.lines(body)) if stream else content(server.ask(*texts))
                    if text not in right:
                        wrong.append(f"{case}: {text!r} is not one of {right!r}")
            elif way == "leaves":
                lines = server.lines(server.body(one, max_tokens=900))
                for _ in range(drawn.randrange(9)):
                    next(lines, None)
                lines.close()
            elif way == "sends nonsense":
                for _ in range(drawn.randrange(1, 9)):
                    data[drawn.randrange(40)] = drawn.randrange(256)
                server.post(bytes(data))
            else:
                with socket.create_connection(("127.0.0.1", server.port)) as lazy:
                    lazy.sendall((_head(len(data)) + data)[: drawn.randrange(400) * 20 or None])
                    time.sleep(drawn.random())
            done[number] += 1

    with Served(session) as server, ThreadPoolExecutor(4) as threads:
        clients = [threads.submit(client, number, server) for number in range(4)]
        time.sleep(length / 10)
        begins, most = _resident(), 0
        while not all(each.done() for each in clients):
            time.sleep(min(5, length / 100))
            most = max(most, _resident())
        for each in clients:
            each.result()
        assert wrong == []
        with capsys.disabled():
            print(f"\n{sum(done)} requests, {begins >> 20} MiB, then at most {most >> 20} MiB")
        assert most <= 1.02 * begins
        assert len(list(tmp_path.iterdir())) <= len(asks)
