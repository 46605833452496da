"""The live line: what it says at every width, how often it is drawn, and who is told what."""

from __future__ import annotations

import io
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pyte
import pytest
import tiny
from refusals import refused
from small_chat import scripted
from typed import Tty

from minikv.cli.chat.turn import record, run_turn
from minikv.cli.failures import Interrupts
from minikv.cli.screen.progress import Live, Loading, duration
from minikv.cli.screen.terminal import Terminal
from minikv.errors import Interrupted
from minikv.models.checkpoint import Checkpoint
from minikv.models.config import ModelConfig
from minikv.models.errors import ModelUnavailable
from minikv.models.hub import resolve
from minikv.models.weights import load_network
from minikv.settings import Generation

REPO = "owner/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Usage = namedtuple("Usage", "total used free")


class Screen(Tty):
    """A terminal's stderr in some encoding, or a file's; `frames` are the lines that were drawn."""

    def __init__(self, encoding: str = "utf-8", tty: bool = True) -> None:
        super().__init__()
        self.encoding, self.isatty = encoding, lambda: tty  # type: ignore[method-assign]

    @property
    def frames(self) -> list[str]:
        return [frame for frame in self.getvalue().split("\r\x1b[K") if frame]


Shown = Callable[..., Any]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Makes a terminal, the screen that it writes to, and its clock if that is to stand still."""

    def begin(columns: int = 80, still: bool = True, **given: Any) -> tuple[Any, ...]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        screen, clock = Screen(**given), SimpleNamespace(now=100.0)
        monkeypatch.setattr("sys.stderr", screen)
        made = Terminal()
        made.clock = (lambda: clock.now) if still else made.clock
        return made, screen, clock

    return begin


# -- the text -------------------------------------------------------------------------------
def drawn(shown: Shown, columns: int, done: int, total: int, rate: float = 0.0, **live: Any) -> str:
    """The line at `done` of `total`, of which `rate` a second came in the last two seconds."""
    terminal, screen, clock = shown(columns)
    report = Live(terminal, **{"label": "reading", "unit": "tok"} | live)
    for seconds in (2, 1) if rate else ():
        report(done - int(seconds * rate), total)
        clock.now += 1
    report(done, total)
    return str(screen.frames[-1])


HERE = 90_608
NINE: dict[str, Any] = {"total": 9, "rate": 0}
BYTES: dict[str, Any] = {"total": 15 << 30, "rate": 2.0 * 2**30, "unit": "B"}


@pytest.mark.parametrize(
    ("columns", "done", "given", "pattern"),
    [
        # What does not fit is left out, the rate first.
        (80, HERE, {}, rf"reading  {'━' * 16} {{9}}  90,608/140,091 tok  9,420 tok/s  5.3 s left"),
        (62, HERE, {}, "reading  ━━━━╸    90,608/140,091 tok  9,420 tok/s  5.3 s left"),
        (60, HERE, {}, "reading  ━━━━━━━━━━━╸        90,608/140,091 tok  5.3 s left"),
        (40, HERE, {}, "reading  ━━━━━━      90,608/140,091 tok"),
        (31, HERE, {}, "reading  90,608/140,091 tok"),
        # Labels are text, bytes have the unit of the total, and no rate leaves no time.
        (80, 1, {"label": "[bold]:smile: {x}"} | NINE, r"\[bold\]:smile: \{x\}  ━.*"),
        (80, 9 << 30, BYTES, ".* 9.0/15.0 GiB  2.0 GiB/s  3.0 s left"),
        (60, 0, {"total": 100, "rate": 0}, "reading  +0/100 tok"),
        (60, 5, {"total": 0, "rate": 0}, ".* 5/0 tok"),
        # The bar is full only at the end.
        (120, 5_000, {"total": 10_000, "rate": 0}, "[^━]*━{20}[^━]*"),
        (120, 9_999, {"total": 10_000, "rate": 0}, "[^━]*━{39}[^━]*"),
        (120, 10_000, {"total": 10_000, "rate": 0}, "[^━]*━{40}[^━]*"),
    ],
)
def test_the_line_at_some_moment(
    shown: Shown, columns: int, done: int, given: dict[str, Any], pattern: str
) -> None:
    line = drawn(shown, columns, done, **{"total": 140_091, "rate": 9420.0} | given)
    assert re.fullmatch(pattern, line), line
    assert len(line) < columns


def test_no_line_is_wider_than_its_terminal(shown: Shown) -> None:
    for columns in (20, 23, 31, 45, 62, 80, 199):
        for done in (0, 1, 10**6, 10**11):
            given = {"rate": min(done / 2, 3e8), "unit": "B", "label": "download"}
            assert len(drawn(shown, columns, done, 10**11, **given)) < columns


def test_durations() -> None:
    texts = {0.04: "0.0 s", 9.94: "9.9 s", 9.96: "10 s", 59.4: "59 s", 59.6: "1 min 00 s"}
    texts |= {200: "3 min 20 s", 3599.7: "1 h 00 min", 3900: "1 h 05 min", 1e9: "a long time"}
    assert {seconds: duration(seconds) for seconds in texts} == texts


# -- drawing --------------------------------------------------------------------------------
def test_at_most_ten_frames_a_second(shown: Shown) -> None:
    terminal, screen, clock = shown()
    live = Live(terminal, "reading")
    for n in range(1000):
        clock.now += 0.003
        live(n, 1000)
    assert 28 <= len(screen.frames) <= 31  # three seconds
    # The rate is that of the last seconds.
    terminal, screen, clock = shown(120)
    live = Live(terminal, "reading")
    done = 5000  # was there before: a resumed download
    live(done, 100_000)
    assert "tok/s" not in screen.frames[-1]
    for speed in (1000, 100):
        for _ in range(40):
            clock.now += 1
            done += speed
            live(done, 100_000)
    assert "49,000/100,000 tok  100 tok/s  8 min 30 s left" in screen.frames[-1]


def test_work_after_other_work_has_a_rate_of_its_own(shown: Shown) -> None:
    terminal, screen, clock = shown(120)
    loading = Loading(terminal)
    for report, step in ((loading.download, 1 << 30), (loading.weights, 1 << 20)):
        for n in range(5):
            clock.now += 1
            report(n * step, 9 * step)
    assert re.search(r"download.*1\.0 GiB/s", screen.frames[4])
    assert re.search(r"weights.*1\.0 MiB/s  5\.0 s left", screen.frames[-1])
    assert "/s" not in screen.frames[5]


def test_a_file_is_told_before_a_large_model_loads_or_a_long_reading(shown: Shown) -> None:
    terminal, screen, _ = shown(tty=False)
    loading = Loading(terminal)
    loading.weights(0, 15 << 30)
    loading.weights(1 << 30, 15 << 30)
    assert screen.getvalue() == "weights: 15.0 GiB\n"
    loading.say('too large (`dtype="bfloat16"` is smaller)')
    assert screen.getvalue().endswith("too large (--dtype bfloat16 is smaller)\n")
    # An ASCII terminal gets an ASCII bar.
    terminal, screen, _ = shown(encoding="ascii")
    Live(terminal, "reading")(55, 101)
    assert "\\u" not in screen.getvalue()
    assert screen.getvalue().isascii()
    assert "reading  -----" in screen.getvalue()
    for tokens, line in ((999, ""), (1_000, "reading: 1,000 tokens\n")):
        terminal, screen, clock = shown(tty=False)
        live = Live(terminal, "reading")
        for done in (*range(0, tokens, 200), tokens):
            live(done, tokens)
            clock.now += 60
        assert screen.getvalue() == line


# -- loading --------------------------------------------------------------------------------
def test_weights_are_reported_byte_by_byte_of_the_files(tmp_path: Path, shown: Shown) -> None:
    """Ctrl-C stops them."""
    tiny.write(tmp_path)
    checkpoint, config = Checkpoint.open(tmp_path), ModelConfig.from_folder(tmp_path)
    told: list[tuple[int, int]] = []
    load_network(checkpoint, config, progress=lambda *now: told.append(now))
    total = sum(entry.size for entry in checkpoint.entries.values())
    assert (told[0], told[-1]) == ((0, total), (total, total))
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert len(told) > 5
    loading = Loading(shown(still=False)[0])
    loading.cancel()
    with pytest.raises(Interrupted, match=r"stopped at 0.0/.* of the weights$"):
        load_network(Checkpoint.open(tmp_path), config, progress=loading.weights)


COMPILES = "compiling the C kernels, once on this machine: ten seconds to half a minute"


@pytest.mark.parametrize("tty", [True, False])
@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        ("kernels", (), COMPILES),
        ("planned", (1, 5, 7 << 30), "will download 5 B in 1 file, 7.0 GiB free"),
        ("planned", (4, 5, None), "will download 5 B in 4 files"),
    ],
)
def test_what_comes_is_said_on_a_terminal_and_elsewhere(
    shown: Shown, tty: bool, name: str, given: tuple[Any, ...], line: str
) -> None:
    terminal, screen, _ = shown(still=False, tty=tty)
    getattr(Loading(terminal), name)(*given)
    text = re.sub(r"\x1b\[\d*m", "", screen.frames[0])
    assert (len(screen.frames), text.rstrip("\n")) == (1, line)
    assert text.endswith("\n") != (tty and name == "kernels")  # a line that is taken back


class Hub:
    """A hub that serves a model and moves the library's byte bar as it does. free: bytes on the
    disk."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.sizes, self.cache, self.fetched, self.free = SIZES, folder / "hub", 0, 1 << 50
        tiny.write(self.snapshot)
        (self.cache / "models--owner--some-model/blobs").mkdir()
        patch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, self.free))
        patch.setattr(huggingface_hub, "HfApi", lambda: self)
        patch.setattr(huggingface_hub, "snapshot_download", self.download)
        patch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(self.cache))
        patch.delenv("HF_HUB_OFFLINE", raising=False)

    @property
    def snapshot(self) -> Path:
        return self.cache / "models--owner--some-model/snapshots" / COMMIT

    def model_info(self, repo: str, revision: object, files_metadata: bool) -> Any:
        assert files_metadata
        files = [
            SimpleNamespace(rfilename=name, size=size, blob_id=name.encode().hex(), lfs=None)
            for name, size in self.sizes.items()
        ]
        return SimpleNamespace(siblings=files)

    def download(self, repo: str, *, tqdm_class: Any, **_: object) -> str:
        files = tqdm_class(total=len(self.sizes), desc="Fetching files")
        received = tqdm_class(total=0, initial=0, unit="B", unit_scale=True, desc="Downloading")
        written = tqdm_class(total=0, initial=0, unit="B", unit_scale=True, desc="Reconstructing")
        for size in self.sizes.values():
            received.update(size)
            self.fetched += size
            written.update(size)
            written.set_postfix_str("1 MB/s", refresh=False)
            assert written.format_dict.get("rate") is None
            files.update(1)
        return str(self.snapshot)


SIZES = {"config.json": 100, "tokenizer.json": 900, "model.safetensors": 3 << 30, "x.bin": 1 << 40}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    return Hub(monkeypatch, tmp_path)


def test_a_download_is_announced_and_counted_once(
    hub: Hub, shown: Shown, capsys: pytest.CaptureFixture[str]
) -> None:
    """And each of its bytes is told once."""
    hub.free = 212 << 30
    # What is in the cache already is not fetched again. The snapshot does not tell: blobs do.
    blob = hub.cache / "models--owner--some-model/blobs" / b"config.json".hex()
    blob.touch()
    capsys.readouterr()  # making the files wrote to it
    terminal, screen, _ = shown()
    assert resolve(REPO, progress=Loading(terminal)).folder == hub.snapshot
    out = screen.getvalue()
    assert "will download 3.0 GiB in 2 files, 212.0 GiB free" in out
    assert out.count("download  ") == 1  # one frame: the clock does not move
    assert capsys.readouterr() == ("", "")  # the library's own bars stay away
    blob.unlink()
    hub.sizes = {name: size for name, size in SIZES.items() if name != "x.bin"}
    told: list[tuple[int, int]] = []
    watcher: Any = SimpleNamespace(planned=lambda *_: None, download=lambda *now: told.append(now))
    resolve(REPO, progress=watcher)
    total = 1000 + (3 << 30)
    assert told == [(100, total), (1000, total), (total, total)]


def test_a_download_that_does_not_fit_or_is_stopped_gets_nothing(hub: Hub, shown: Shown) -> None:
    """One is refused with numbers. Ctrl-C is no failure of the hub."""
    hub.free, loading = 2 << 30, Loading(shown(still=False)[0])
    says = r"takes 3.0 GiB in 3 files, .* 2.0 GiB"
    error = refused(says, resolve, REPO, progress=loading, error=ModelUnavailable)
    assert error.exit_code == 3
    assert "HF_HOME" in error.hint
    assert hub.fetched == 0
    hub.free = 1 << 50
    loading.cancel()
    says = "of the download; finished files are kept"
    stopped = refused(says, resolve, REPO, progress=loading, error=Interrupted)
    assert stopped.exit_code == 130
    assert hub.fetched == 0  # at the first byte


# -- thoughts on the screen ------------------------------------------------------------------
THOUGHTS = (
    "Who runs the mill? Let me see: it was sold in 1912, and Ada has run it since then. But there "
    "is a lease further down, with a_word_that_is_wider_than_a_row_of_fifty_columns, until 1950."
)
TEXT = f"<think>\n{THOUGHTS}\n\nSo it is Ada.\x1b[31m\n</think>\n\nIt is **Ada**."
SHOWN = f"{THOUGHTS}\n\nSo it is Ada.[31m"
FOLDED = f"thought for {len(TEXT) - 16} tokens"


def run(
    monkeypatch: pytest.MonkeyPatch, how: str, *, width: int = 0, most: int = 900, **given: Any
) -> tuple[str, str]:
    """What a turn writes to stdout and to stderr; on a terminal (width) to both together."""
    out = Tty() if width else io.StringIO()
    err = out if width else io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width or 80))
    terminal = Terminal(**given)
    terminal.thoughts = how
    run_turn(scripted(TEXT), "who?", Generation(max_tokens=most), terminal, Interrupts())
    return out.getvalue(), "" if width else err.getvalue()


def test_a_pipe_gets_the_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thoughts that do not end are told once."""
    for how, quiet, err in (
        ("fold", False, f"{FOLDED}\n"),
        ("show", False, f"{SHOWN}\n{FOLDED}\n"),
        ("hide", False, ""),
        ("show", True, ""),
    ):
        assert run(monkeypatch, how, quiet=quiet) == ("It is **Ada**.\n", err), (how, quiet)
    out, err = run(monkeypatch, "fold", most=40)
    first, second = err.splitlines()
    assert (out, first) == ("\n", "thought for 40 tokens")
    assert second.startswith("! the model was still thinking, so there is no answer; ")


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("how", ["fold", "show", "hide"])
def test_what_a_terminal_keeps(monkeypatch: pytest.MonkeyPatch, how: str, width: int) -> None:
    monkeypatch.setattr("minikv.cli.screen.terminal.FRAME", 0.0)
    written, _ = run(monkeypatch, how, width=width)
    screen = pyte.HistoryScreen(width, 40)
    pyte.Stream(screen).feed(written.replace("\n", "\r\n"))
    rows = [row.rstrip() for row in screen.display if row.strip()]
    assert rows[-1] == "It is Ada."
    *thoughts, folded = rows[:-1] or [""]
    assert folded == ("" if how == "hide" else FOLDED)
    # A word that is wider than the terminal is broken there.
    assert "".join("".join(thoughts).split()) == ("".join(SHOWN.split()) if how == "show" else "")
    words = [word for row in thoughts for word in row.split() if "_" not in word]
    assert set(words) <= set(SHOWN.split())
    # While they came, one line had their end, or, hidden, only their number.
    live = [part for part in written.split("\r\x1b[K") if part.startswith("\x1b[2mthinking")]
    assert bool(live) == (how != "show")
    assert any("since then." in line for line in live) == (how == "fold")
    assert all(len(line.removeprefix("\x1b[2m").split("\x1b")[0]) < width for line in live)


def test_a_record_has_thoughts_beside_the_answer() -> None:
    for text, thoughts in ((TEXT, f"{THOUGHTS}\n\nSo it is Ada.\x1b[31m"), ("Ada.", None)):
        chat = scripted(text)
        list(chat.ask("who?", 900))
        found = record(chat.turns[0], Terminal())
        assert found.get("thoughts") == thoughts
        assert found["answer"] == text.rpartition("</think>\n\n")[2]
