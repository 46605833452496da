"""Renders a model's chat template in another process, within limits (`minikv.models.sandbox`).

There is one such process. It starts with the first model, while weights are read, and ends with
this process. A template that exceeds a limit ends it; then the next rendering starts another one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minikv.models.errors import CorruptModel, ModelError

SOURCE_LIMIT = 256 << 10
"""The most bytes of a template's source."""
_WORKER = Path(__file__).with_name("sandbox.py")
_START = """
import runpy, sys
sys.path += sys.argv[2:]
try:
    serve = runpy.run_path(sys.argv[1])["main"]
except Exception as error:
    print(" ".join(f"{type(error).__name__}: {error}".split())[:200], flush=True)
else:
    print("{}", flush=True)
    serve()
"""
"""Code of the process. With -I, Python does not import from the folders of its environment, nor
from the current one. So it gets the folders from which this process imports."""
_ENDS = {-signal.SIGPROF: "it ran for too long", -signal.SIGKILL: "it did not end"}
"""Why the process ended, by its exit status, for messages."""
_WAIT = 60.0  # seconds until the process is killed; its own limit counts only processor time


class TemplateRefusal(Exception):
    """The template called `raise_exception`: it does not accept this conversation."""


class TemplatesUnavailable(ModelError):
    """The process that renders cannot be started. This is not a fault of the model."""

    exit_code = 1

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the process that renders chat templates cannot be started: {why}",
            "it needs jinja2 and a second Python process",
        )


def render(source: str, name: str, variables: Mapping[str, Any]) -> str:
    """The text of a template rendered with plain data (strings, numbers, lists, dicts). name: the
    origin of the template, for messages.

    Raises TemplateRefusal if the template calls `raise_exception`, CorruptModel if it fails or
    exceeds a limit of time, memory or size, and TemplatesUnavailable.
    """
    if len(source.encode("utf-8", "replace")) > SOURCE_LIMIT:
        raise CorruptModel(f"{name} is larger than {SOURCE_LIMIT >> 10} KiB")
    found, text = process().ask({"source": source, "data": variables})
    if "refused" in found:
        raise TemplateRefusal(found["refused"])
    if "syntax" in found:
        raise CorruptModel(
            f"{name}, line {found['line']}: {found['syntax']}",
            "minikv runs chat templates with a limited set of Jinja's filters",
        )
    for what, words in (("stopped", "was stopped"), ("failed", "failed")):
        if what in found:
            raise CorruptModel(f"{name} {words}: {found[what]}")
    return text


@functools.cache
def process() -> _Process:
    """The process that renders, not necessarily started."""
    return _Process()


class _Process:
    """Runs `minikv.models.sandbox`. One request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._end: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start the process, unless it is running. It is ready about a tenth of a second later. If
        that fails, the first rendering raises the error."""
        with self._lock, contextlib.suppress(OSError):
            self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._running is not None and self._running.poll() is None:
            return self._running
        self._end()
        self._ready = False
        folders = [folder for folder in sys.path if os.path.isabs(folder)]
        self._running = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, str(_WORKER), *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches only this process
        )
        self._end = weakref.finalize(self, _end, self._running)
        return self._running

    def ask(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Send a request. Returns the reply's line and its text. Raises TemplatesUnavailable."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            try:
                running = self._start()
            except OSError as error:
                raise TemplatesUnavailable(error.strerror or str(error)) from None
            timer = threading.Timer(_WAIT, running.kill)
            timer.daemon = True
            timer.start()
            try:
                return self._exchange(running, line)
            except BaseException:  # also Ctrl-C: the next request must not receive this one's reply
                running.kill()
                running.wait()
                raise
            finally:
                timer.cancel()

    def _exchange(
        self, running: subprocess.Popen[bytes], line: bytes
    ) -> tuple[dict[str, Any], str]:
        assert running.stdin is not None
        assert running.stdout is not None
        if not self._ready:
            hello = running.stdout.readline()
            if hello != b"{}\n":
                raise TemplatesUnavailable(hello.decode("utf-8", "replace").strip() or "it ended")
            self._ready = True
        try:
            running.stdin.write(line)
            running.stdin.flush()
            reply = running.stdout.readline()
            found = json.loads(reply) if reply.endswith(b"\n") else {}
            text = running.stdout.read(found["bytes"]) if found else b""
        except BrokenPipeError:
            found, text = {}, b""
        if not found or len(text) < found["bytes"]:  # the process ended, perhaps within the text
            why = _ENDS.get(running.wait(), "it crashed the process that renders it")
            return {"stopped": why}, ""
        return found, text.decode("utf-8", "surrogatepass")


def _end(running: subprocess.Popen[bytes]) -> None:
    running.kill()
    for pipe in (running.stdin, running.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    running.wait()
