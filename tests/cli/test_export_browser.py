"""The report as a browser shows it; skipped where there is no Chromium."""

from __future__ import annotations

import functools
import math
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from exports import HEADS, HOSTILE, LAYERS, chat, large

from minikv.chat.session import ChatSession
from minikv.cli.export import html
from minikv.cli.export.facts import ChatFacts, gather
from minikv.cli.export.safe import visible

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=4000 "
    "--enable-logging=stderr"
).split()


def browse(page: Path, fragment: str, *flags: str) -> str:
    """Chromium's stdout; fails on anything that the page writes to the console."""
    assert CHROMIUM
    done = subprocess.run(
        [
            CHROMIUM,
            *FLAGS,
            *flags,
            f"--user-data-dir={page.parent / 'profile'}",
            f"{page.as_uri()}{fragment}",
        ],
        capture_output=True,
        timeout=180,
        check=True,
    )
    console = [line for line in done.stderr.decode().splitlines() if "CONSOLE" in line]
    assert not console
    return done.stdout.decode()


class Rendered(HTMLParser):
    """The DOM that the script made: text by id, and each token with its classes."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.tokens: list[tuple[set[str], str]] = []
        self.cells: list[tuple[str, str]] = []
        self.hidden: dict[str, bool] = {}
        self.tags: set[str] = set()
        self._open: list[str | None] = []
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        name = given.get("id")
        if name:
            self.texts[name] = ""
            self.hidden[name] = "hidden" in given
        classes = set((given.get("class") or "").split())
        if tag == "span" and "t" in classes:
            self.tokens.append((classes, ""))
        if tag == "button":
            self.cells.append((given.get("aria-label") or "", given.get("aria-pressed") or ""))
        if tag not in ("meta", "input", "br"):
            self._open.append(name)

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for name in self._open:
            if name:
                self.texts[name] += data
        if self.tokens and self._open and "text" in self._open:
            classes, text = self.tokens[-1]
            self.tokens[-1] = (classes, text + data)


@pytest.fixture(scope="module")
def session() -> ChatSession:
    session = chat()
    session.attach("a long störy\nof two lines", "story.txt")
    list(session.ask("who?"))
    return session


@pytest.fixture(scope="module")
def page(session: ChatSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("browser") / "report.html"
    path.write_text(html.render(gather(session)), "utf-8")
    return path


@pytest.fixture(scope="module")
def look(page: Path) -> functools._lru_cache_wrapper[Rendered]:
    return functools.cache(lambda fragment="": Rendered(browse(page, fragment, "--dump-dom")))


def level(share: float) -> set[str]:
    return {f"s{max(1, -(-round(share * 1000) // 100))}"} if share else set()


def shades(dom: Rendered) -> list[set[str]]:
    return [{c for c in classes if re.fullmatch(r"s\d+", c)} for classes, _ in dom.tokens]


def test_every_token_is_shaded_by_the_share_of_heads(
    session: ChatSession, look: functools._lru_cache_wrapper[Rendered]
) -> None:
    dom = look()
    heads = [(i, h) for i in range(LAYERS) for h in range(HEADS)]
    held = [
        sum(i in set(session.kept(layer, head).tolist()) for layer, head in heads)
        for i in range(len(session.fed))
    ]
    assert shades(dom) == [level(count / len(heads)) for count in held]
    assert 0 < held.count(0) < len(held)
    assert not any(dom.hidden[name] for name in ("document", "map", "memory"))


def test_the_address_leads_to_a_layer_and_to_a_head(
    session: ChatSession, look: functools._lru_cache_wrapper[Rendered]
) -> None:
    n = len(session.fed)
    dom = look("#layer=1&head=1")
    kept = set(session.kept(1, 1).tolist())
    assert shades(dom) == [{"s10"} if i in kept else set() for i in range(n)]
    assert dom.texts["shown"].startswith(f"Layer 1, KV head 1 holds {len(kept)} of {n} tokens")
    assert (dom.texts["layer-out"], dom.texts["head-out"]) == ("1", "1")
    dom = look("#layer=2")
    both = [sum(i in session.kept(2, h).tolist() for h in range(HEADS)) for i in range(n)]
    assert shades(dom) == [level(count / HEADS) for count in both]
    assert [pressed for _, pressed in dom.cells] == ["false", "false", "true"] * HEADS


def test_an_address_that_names_nothing_changes_nothing(
    look: functools._lru_cache_wrapper[Rendered],
) -> None:
    plain = shades(look())
    for fragment in ("#layer=3&head=1&token=9999", "#layer=-1&token=%%%", "#layer=1e0"):
        assert shades(look(fragment)) == plain


def test_a_token_says_where_it_is_and_who_holds_it(
    session: ChatSession, look: functools._lru_cache_wrapper[Rendered]
) -> None:
    dom = look("#token=18")
    heads = [(i, h) for i in range(LAYERS) for h in range(HEADS)]
    held = sum(18 in session.kept(i, h).tolist() for i, h in heads)
    assert f"token 18, between the texts: held by {held} of 6 heads" in dom.texts["token-title"]
    assert "now" in dom.tokens[18][0]
    assert "story.txt: held by" in look("#token=26").texts["token-title"]


def test_the_map_has_the_rows_of_each_head(
    session: ChatSession, look: functools._lru_cache_wrapper[Rendered]
) -> None:
    said = [label for label, _ in look().cells]
    n = len(session.fed)
    assert len(said) == LAYERS * HEADS
    for label, (head, layer) in zip(
        said, [(h, i) for h in range(HEADS) for i in range(LAYERS)], strict=True
    ):
        kept = len(session.kept(layer, head))
        assert label.startswith(f"layer {layer}, KV head {head}: {kept} of {n} tokens kept")


def test_the_chart_and_its_table_have_the_curve(
    session: ChatSession, look: functools._lru_cache_wrapper[Rendered]
) -> None:
    dom = look()
    for tokens, _, full in session.curve:
        kib = math.floor(full / 102.4 + 0.5) / 10  # JavaScript rounds halves up
        assert f"{tokens}{kib:.1f} KiB{kib:.1f} KiB0%" in dom.texts["curve-table"]
    assert "full cache" in dom.texts["chart"]
    assert "KiB" in dom.texts["chart"]


def test_foreign_text_does_nothing(tmp_path: Path) -> None:
    session = chat(system=HOSTILE)
    session.attach(HOSTILE, name=HOSTILE)
    list(session.ask(HOSTILE))
    facts = gather(session)
    path = tmp_path / "report.html"
    path.write_text(html.render(facts), "utf-8")
    dom = browse(path, "", "--dump-dom")
    rendered = Rendered(dom)
    assert "img" not in rendered.tags
    assert "<title>fake-7B: adakv</title>" in dom
    shown = "".join(text for _, text in rendered.tokens)
    assert visible(HOSTILE) in shown


def pixel(png: bytes) -> tuple[int, ...]:
    """The first pixel of a PNG with 8 bits a channel: its row has no filter that matters there."""
    assert png.startswith(b"\x89PNG")
    at, data = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += length + 12
    return tuple(zlib.decompress(data)[1:4])


def test_light_and_dark(page: Path) -> None:
    colours = []
    for scheme in ("1", "0"):
        out = page.parent / f"{scheme}.png"
        browse(
            page,
            "",
            f"--screenshot={out}",
            "--window-size=900,1200",
            f"--blink-settings=preferredColorScheme={scheme}",
        )
        colours.append(pixel(out.read_bytes()))
    assert min(colours[0]) > 240
    assert max(colours[1]) < 60


def test_a_large_report_opens(tmp_path: Path, session: ChatSession) -> None:
    facts: ChatFacts = large(gather(session), 32, 8, 8_000)
    path = tmp_path / "report.html"
    path.write_text(html.render(facts), "utf-8")
    dom = Rendered(browse(path, "#layer=31&head=7", "--dump-dom"))
    assert len(dom.tokens) == 8_000
    assert len(dom.cells) == 256
    assert "Layer 31, KV head 7 holds" in dom.texts["shown"]
