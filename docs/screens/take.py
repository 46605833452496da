"""Pictures of the main screens, taken from real runs: `python docs/screens/take.py`.

Each screen is a run of minikv, with the bundled model, in a child process on a pseudo-terminal. A
terminal emulator (pyte) reads its output, and rich draws the emulator's cells as an SVG. The
picture has only what was on the screen, and the command line if it begins with the run.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import select
import shlex
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minikv.cli.export.command import write
from minikv.cli.screen.terminal import Terminal
from minikv.errors import UsageError

if TYPE_CHECKING:
    from rich.style import Style
    from rich.text import Text

WIDTH, HEIGHT = 100, 90  # columns, and enough rows that nothing scrolls away
MAX_BYTES = 60_000
PROMPT = "›"
_QUIET = 0.4  # seconds without output after which a prompt is ready for a line
_PATIENCE = 600.0  # the most seconds for one line of a screen
_DOCUMENT, _CHARACTERS = "sample.txt", 2_600
_QUESTION, _ANSWER = "Who leads Project Faithful Swallow?", "Henrik Torova"


@dataclass(frozen=True, slots=True)
class Screen:
    """A command and the lines to type. The picture begins at line number `since` of `typed`; with
    None, at the command."""

    name: str
    command: str
    typed: tuple[str, ...] = ()
    since: int | None = None


_CHAT = f"minikv chat {_DOCUMENT} --budget 64"
SCREENS = (
    Screen("answer", _CHAT, (_QUESTION, "Which animal does Anton Thalezzo keep?")),
    Screen("stats", _CHAT, (_QUESTION, "/stats"), since=1),
    Screen("kept", _CHAT, (_QUESTION, "/kept"), since=1),
    Screen("find", _CHAT, (_QUESTION, "/kept top 5", f'/kept find "{_ANSWER}"'), since=1),
    Screen("compare", _CHAT, (_QUESTION, "/compare adakv streaming"), since=1),
    Screen("policies", "minikv policies"),
    Screen("plan", "minikv plan --tokens 8000 --budget 256"),
)


def take(screen: Screen, folder: str) -> str:
    """Run the command in `folder`, which has the document; return the SVG. Raises UsageError."""
    emulator = _Emulator(WIDTH, HEIGHT)
    child = _Child(shlex.split(screen.command)[1:], folder, emulator)
    begin = 0
    try:
        for number, line in enumerate(screen.typed):
            child.wait()
            if screen.since == number:
                begin = emulator.row
            child.type(f"{line}\r")
        if screen.typed:
            child.wait()
            end = emulator.row
            child.type("/exit\r")
        child.finish()
    finally:
        child.close()
    rows = emulator.rows()
    if not screen.typed:
        end = len(rows)
    return _svg(screen, rows[begin:end])


class _Emulator:
    """The cells of a terminal. row: the cursor's."""

    def __init__(self, columns: int, rows: int) -> None:
        try:
            pyte: Any = import_module("pyte")
        except ImportError:
            raise UsageError(
                "the screens need pyte, a terminal emulator", "pip install pyte"
            ) from None
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)

    def feed(self, data: bytes) -> None:
        self._stream.feed(_DIM.sub(_grey, data))

    @property
    def row(self) -> int:
        return int(self.screen.cursor.y)

    @property
    def line(self) -> str:
        """The text of the cursor's row."""
        return str(self.screen.display[self.row])

    def rows(self) -> list[Text]:
        """The rows as rich texts, without the empty ones at the end."""
        from rich.text import Text

        texts = []
        for y in range(self.screen.lines):
            cells = [self.screen.buffer[y][x] for x in range(self.screen.columns)]
            text = Text()
            # One piece per style. Else every letter would become an element of the picture.
            for style, run in groupby(cells, key=_style):
                text.append("".join(cell.data for cell in run), style)
            text.rstrip()
            texts.append(text)
        while texts and not texts[-1].plain:
            texts.pop()
        return texts


class _Child:
    """A run of minikv on a pseudo-terminal, with its own home directory."""

    def __init__(self, arguments: Sequence[str], folder: str, emulator: _Emulator) -> None:
        self.emulator = emulator
        # The line editor asks where the cursor is, and the emulator answers.
        emulator.screen.write_process_input = self.type
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            plain = {k: v for k, v in os.environ.items() if not k.startswith(("MINIKV_", "XDG_"))}
            plain.pop("NO_COLOR", None)
            os.chdir(folder)
            os.execve(
                sys.executable,
                [sys.executable, "-m", "minikv.cli", *arguments],
                {**plain, "HOME": folder, "TERM": "xterm-256color", "COLUMNS": str(WIDTH)},
            )
        size = struct.pack("HHHH", HEIGHT, WIDTH, 0, 0)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, size)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self) -> None:
        """Wait until the cursor is at a prompt and there is no more output. Raises UsageError."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            if self._read(_QUIET):
                continue
            if self.emulator.line.strip() == PROMPT:
                return
        raise UsageError("the chat gave no prompt", f"its last line: {self.emulator.line.strip()}")

    def finish(self) -> None:
        """Wait until the process has ended. Raises UsageError if it failed."""
        while self._read(_PATIENCE):
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        if os.waitstatus_to_exitcode(status):
            raise UsageError("the run failed", "\n".join(t.plain for t in self.emulator.rows()))

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def _read(self, seconds: float) -> bool:
        """Wait at most `seconds` for output and feed it to the emulator. Whether there was any."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:  # the child has ended
            return False
        self.emulator.feed(data)
        return bool(data)


_DIM = re.compile(rb"\x1b\[([0-9;]*)m")


def _grey(match: re.Match[bytes]) -> bytes:
    """Replace dim text, which the emulator does not support, by bright black."""
    codes = match[1].split(b";")
    if b"38" in codes or b"48" in codes or b"2" not in codes:
        return match[0]
    return b"\x1b[" + b";".join(b"90" if code == b"2" else code for code in codes) + b"m"


def _style(cell: Any) -> Style:
    from rich.style import Style

    return Style(
        color=_colour(cell.fg),
        bgcolor=_colour(cell.bg),
        bold=cell.bold,
        italic=cell.italics,
        underline=cell.underscore,
        reverse=cell.reverse,
    )


def _colour(name: str) -> str | None:
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    name = "yellow" if name == "brown" else name.replace("bright", "bright_")
    return name.replace("bright_brown", "bright_yellow")


def _svg(screen: Screen, rows: Sequence[Text]) -> str:
    from rich.console import Console
    from rich.text import Text

    console = Console(
        record=True,
        width=WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    if screen.since is None:
        console.print(Text(f"$ {screen.command}", "bold"))
    for row in rows:
        console.print(row, no_wrap=True, crop=True)
    picture = console.export_svg(title="minikv", unique_id=f"minikv-{screen.name}")
    # Without the fonts, which a viewer would load from the internet.
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write one SVG per screen. Exits with 2 if one cannot be taken or is too large."""
    parser = argparse.ArgumentParser(description="Take pictures of the main screens.")
    parser.add_argument("--out", type=Path, default=Path("docs/screens"))
    names = [screen.name for screen in SCREENS]
    parser.add_argument(
        "names", nargs="*", default=names, metavar="NAME", help=f"which ones: {', '.join(names)}"
    )
    given = parser.parse_args(arguments)
    terminal = Terminal()
    try:
        _take(given.names, given.out, terminal)
    except UsageError as error:
        terminal.fail(str(error), error.hint)
        raise SystemExit(error.exit_code) from None


def _take(names: Sequence[str], out: Path, terminal: Terminal) -> None:
    by_name = {screen.name: screen for screen in SCREENS}
    for name in names:
        if name not in by_name:
            raise UsageError(f"no screen {name!r}", f"there are {', '.join(by_name)}")
    out.mkdir(parents=True, exist_ok=True)
    text = resources.files("minikv.models.bundled").joinpath(_DOCUMENT).read_text("utf-8")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, _DOCUMENT).write_text(text[:_CHARACTERS], "utf-8")
            picture = take(by_name[name], folder)
        if len(picture.encode()) > MAX_BYTES:
            raise UsageError(f"the screen {name} is larger than {MAX_BYTES:,} bytes")
        written = write(out / f"{name}.svg", picture, force=True)
        terminal.say(f"{out / f'{name}.svg'}: {written:,} bytes")


if __name__ == "__main__":
    main()
