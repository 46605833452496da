"""Take the pictures of the README from real runs: `python docs/screens/take.py [NAME ...]`.

Each is a chat with the bundled model on a pseudo-terminal. A terminal emulator (pyte) reads what it
prints, and rich draws the emulator's cells as an SVG.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import sys
import tempfile
import termios
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

WIDTH, HEIGHT = 100, 90  # columns, and enough rows that nothing scrolls away
QUIET = 0.4  # seconds without output after which a prompt is ready for a line
COMMAND = ["minikv", "chat", "sample.txt", "--budget", "64"]
QUESTION = "Who leads Project Faithful Swallow?"
SCREENS = {  # the lines to type; the picture begins at the one with this number, None: the command
    "answer": ((QUESTION, "Which animal does Anton Thalezzo keep?"), None),
    "kept": ((QUESTION, "/kept"), 1),
    "compare": ((QUESTION, "/compare global-span streaming"), 1),
}


class Child:
    """A chat on a pseudo-terminal, with its own home directory, and the cells of its screen."""

    def __init__(self, folder: str) -> None:
        self.screen: Any = pyte.Screen(WIDTH, HEIGHT)
        self.screen.write_process_input = self.type  # the line editor asks where the cursor is
        self._stream = pyte.ByteStream(self.screen)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            plain = {k: v for k, v in os.environ.items() if not k.startswith(("MINIKV_", "XDG_"))}
            plain.pop("NO_COLOR", None)
            os.chdir(folder)
            run = [sys.executable, "-m", "minikv.cli", *COMMAND[1:]]
            os.execve(sys.executable, run, {**plain, "HOME": folder, "TERM": "xterm-256color"})
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self) -> int:
        """Wait for a prompt with nothing behind it; return its row."""
        while self._read() or self.screen.display[self.screen.cursor.y].strip() != "›":
            pass
        return int(self.screen.cursor.y)

    def leave(self) -> None:
        """End the chat. Raises SystemExit if it failed."""
        self.type("/exit\r")
        try:
            while True:
                self._read()
        except OSError:  # it has closed its terminal
            os.close(self.fd)
        if code := os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]):
            raise SystemExit(f"minikv ended with {code}:\n" + "\n".join(self.screen.display))

    def _read(self) -> bool:
        if not select.select([self.fd], [], [], QUIET)[0]:
            return False
        # pyte does not know dim text; bright black takes its place.
        data = re.sub(rb"(\x1b\[(?:0;)?)2(?=[;m])", rb"\g<1>90", os.read(self.fd, 1 << 16))
        self._stream.feed(data)
        return True

    def rows(self, begin: int, end: int) -> list[Text]:
        """These rows of the screen, one piece of text per style."""
        texts = []
        for y in range(begin, end):
            text = Text()
            cells = [self.screen.buffer[y][x] for x in range(WIDTH)]
            for style, run in groupby(cells, key=style_of):
                text.append("".join(cell.data for cell in run), style)
            text.rstrip()
            texts.append(text)
        return texts


def style_of(cell: Any) -> Style:
    """rich's style for a cell of pyte."""

    def colour(name: str) -> str | None:
        if name == "default":
            return None
        if re.fullmatch("[0-9a-f]{6}", name):
            return f"#{name}"
        return name.replace("brown", "yellow").replace("bright", "bright_")

    return Style(
        color=colour(cell.fg),
        bgcolor=colour(cell.bg),
        bold=cell.bold,
        italic=cell.italics,
        underline=cell.underscore,
        reverse=cell.reverse,
    )


def take(name: str) -> str:
    """The SVG of a screen."""
    typed, since = SCREENS[name]
    text = resources.files("minikv.models.bundled").joinpath("sample.txt").read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sample.txt").write_text(text[:2600], "utf-8")
        child = Child(folder)
        at = []
        for line in typed:
            at.append(child.wait())
            child.type(f"{line}\r")
        end = child.wait()
        child.leave()
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    if since is None:
        console.print(Text(f"$ {' '.join(COMMAND)}", "bold"))
    for row in child.rows(0 if since is None else at[since], end):
        console.print(row, no_wrap=True, crop=True)
    picture = console.export_svg(title="minikv", unique_id=f"minikv-{name}")
    # Without the fonts, which a viewer would load from the internet.
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or SCREENS:
        Path(__file__).with_name(f"{chosen}.svg").write_text(take(chosen), "utf-8")
