"""A child process on a pseudo-terminal, for tests of what a person types and sees."""

from __future__ import annotations

import os
import pty
import select
import signal
import time


class Terminals:
    """A child on a pseudo-terminal: `until` reads on from what it found before."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, {**os.environ, **env})
        self.seen = ""
        self.at = 0  # the text before this has been waited for
        self.prompt = ""

    def ready(self, prompt: str = "") -> None:
        """Wait for the prompt and a little longer: keys typed before would meet a terminal in
        another mode, and a Ctrl-C a Python that is not yet waiting, which then still waits."""
        self.until(prompt or self.prompt)
        time.sleep(0.2)

    def until(self, text: str, seconds: float = 60.0) -> str:
        end = time.monotonic() + seconds
        while (found := self.seen.find(text, self.at)) < 0:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen[self.at :]!r}"
            try:
                data = os.read(self.fd, 4096)
            except OSError:
                data = b""
            assert data, f"ended without {text!r}: {self.seen[self.at :]!r}"
            self.seen += data.decode("utf-8", "replace")
            if b"\x1b[6n" in data:  # the line editor asks where the cursor is
                os.write(self.fd, b"\x1b[1;1R")
        before, self.at = self.at, found + len(text)
        return self.seen[before : self.at]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def code(self) -> int:
        """Wait for the end and return the exit code."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self.fd, 4096).decode("utf-8", "replace")
                    continue
                except OSError:  # nobody has the other side any more
                    time.sleep(0.02)
            code = self.ended()
            if code is not None:
                return code
        raise AssertionError(f"still running: {self.seen!r}")

    def ended(self) -> int | None:
        """The exit code, once there is one."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done:
            return None
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)
