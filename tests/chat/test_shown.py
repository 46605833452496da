"""What a Python prompt and a notebook show of a chat and of a report."""

from __future__ import annotations

from html.parser import HTMLParser

from small_chat import chat

from minikv.chat import shown

HOSTILE = "<script>alert(1)</script> & \"quotes\" 'too' \x1b[31m\u202egnp\x00\nnew line"


class Tags(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes = 0
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += len(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_line_is_short_and_has_no_control_characters() -> None:
    assert shown.line("chat", ["", HOSTILE, "2 turns"]).startswith("<minikv chat: <script>")
    assert all(c.isprintable() for c in shown.line("chat", [HOSTILE]))
    assert len(shown.line("chat", ["word " * 1000])) < 330
    assert shown.clipped("one two three", 7) == "one tw…"


def test_a_table_is_text_alone() -> None:
    page = Tags(shown.table(HOSTILE, [(HOSTILE, HOSTILE), ("answer", "x" * 1000)]))
    assert page.tags == {"table", "caption", "tr", "th", "td"}
    assert page.attributes == 0
    assert page.text.count("<script>alert(1)</script> & \"quotes\" 'too'") == 3
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text
    assert "x" * 400 not in page.text


def test_a_chat_and_its_report() -> None:
    session = chat(budget=64)
    session.attach("The mill of Orlin. " * 20, HOSTILE)
    assert repr(session) == "<minikv chat: adakv with h2o, budget 64, 0 turns, 0 of 2,048 tokens>"
    list(session.ask(HOSTILE.replace("\x00", ""), 4))
    report = session.report
    assert report is not None
    assert repr(session).endswith(f"1 turn, {len(session.fed):,} of 2,048 tokens>")
    assert repr(report).startswith(f"<minikv report: turn 1, {report.tokens.prompt_new:,} tokens")
    assert f"({report.saved})" in repr(report)
    assert "\n" not in repr(report) + repr(session)
    for thing in (session, report):
        page = Tags(thing._repr_html_())
        assert "script" not in page.tags
        assert page.attributes == 0
    assert "alert(1)" in Tags(session._repr_html_()).text
