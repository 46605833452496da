"""/export: true figures, inert text, whole files or none."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import stat
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typed
from exports import HEADS, HOSTILE, LAYERS, chat, large
from fakes import END, ByteTokenizer, ThinkML
from refusals import failing, refused

from minikv.chat.session import ChatSession
from minikv.cli.chat.slash import Context
from minikv.cli.export import page
from minikv.cli.export.facts import ChatFacts, gather
from minikv.cli.export.page import rendered
from minikv.errors import UsageError


def spoken() -> ChatSession:
    """Two documents, two questions; one answer cut short."""
    session = chat(system="be brief")
    session.attach("a long störy", "story.txt")
    session.attach("nameless")
    list(session.ask("who?", max_tokens=5))
    list(session.ask("why?"))
    return session


@pytest.fixture(scope="module")
def facts() -> ChatFacts:
    return gather(spoken())


def bits(text: str) -> list[int]:
    data = base64.b64decode(text)
    return [i for i in range(8 * len(data)) if data[i >> 3] >> (i & 7) & 1]


def text_of(facts: ChatFacts, start: int, end: int) -> str:
    return "".join(piece or "" for piece in facts.text[start:end])


def test_the_json_has_the_facts_of_the_chat() -> None:
    session = spoken()
    made: Any = json.loads(rendered(gather(session), ".json"))
    one, two = (session.messages[n].content for n in (2, 4))
    told = [(t["question"], t["answer"], t["documents"]) for t in made["turns"]]
    assert told == [("who?", one, [0, 1]), ("why?", two, [])]
    assert [t["record"] for t in made["turns"]] == [r.to_dict() for r in session.reports]
    documents = [(d["name"], d["characters"], len(d)) for d in made["documents"]]
    assert documents == [("story.txt", 12, 2), (None, 8, 2)]
    text = made["tokens"]["text"]
    assert len(text) == len(session.fed)
    assert "".join(piece or "" for piece in text) == session.tokenizer.decode(session.fed)
    assert text[0] is None, "a control token has no text"
    kept = [[session.kept(i, h).tolist() for h in range(HEADS)] for i in range(LAYERS)]
    assert [[bits(head) for head in layer] for layer in made["kept"]] == kept
    assert [tuple(point) for point in made["curve"]] == session.curve
    assert len(made["curve"]) == 4
    assert (made["format"], made["version"]) == ("minikv chat", 1)


@pytest.mark.parametrize(("question", "forgets"), [("who?", True), ("Ada?", True), ("who?", False)])
def test_thoughts_are_folded_and_their_text_is_not_taken_for_the_answer(
    question: str, forgets: bool
) -> None:
    session, text = chat(), "<think>\nIs it Ada? Yes, <b>Ada</b>.\n</think>\n\nAda"
    engine: Any = session.engine
    session.template = ThinkML(ByteTokenizer(), opens=False, forgets=forgets)
    engine.length, engine.script = 1 << 20, [*text.encode(), END]
    list(session.ask(question))
    list(session.ask("really?"))
    facts = gather(session)
    assert [turn.thoughts for turn in facts.turns] == ["Is it Ada? Yes, <b>Ada</b>."] * 2
    spans = {s.label: (s.start, s.end) for s in facts.sections}
    for number in (1, 2):
        _, end = span = spans[f"answer {number}"]
        after = [END] if number == 1 else []
        assert (text_of(facts, *span), session.fed[end : end + 1]) == ("Ada", after)
    folded = f"<details><summary>thought for {len(text) - 5} tokens</summary>"
    assert page.render(facts).count(folded) == 2


def test_sections_hold_the_texts() -> None:
    """From the first byte of the first character on."""
    facts = gather(spoken())
    one, two = (turn.answer for turn in facts.turns)
    found = {s.label: (s.kind, text_of(facts, s.start, s.end)) for s in facts.sections}
    assert found == {
        "story.txt": ("document", "a long störy"),
        "piped text": ("document", "nameless"),
        "question 1": ("question", "who?"),
        "answer 1": ("answer", one),
        "question 2": ("question", "why?"),
        "answer 2": ("answer", two),
    }
    session = chat()
    session.attach("é is é")
    list(session.ask("q"))
    facts = gather(session)
    document = facts.sections[0]
    assert facts.text[document.start : document.end] == ("", "é", *" is ", "", "é")
    for text, name in (("  a lead ", None), ("e", "e")):
        session = chat()
        session.engine.script = list(b" e ")  # type: ignore[attr-defined]
        session.attach(text, name)
        list(session.ask(text, max_tokens=3))
        facts = gather(session)
        found = [text_of(facts, s.start, s.end) for s in facts.sections]
        assert found == [text.strip(), text.strip(), "e"]
        begin = facts.sections[0].start
        assert text_of(facts, 0, begin) == (f"Document: {name}\n\n" if name else "  ")
    # As one that was loaded without its cache: turns, but no tokens.
    session = spoken()
    session.engine.reset()
    session.refresh(wanted=False)
    facts = gather(session)
    assert facts.sections == ()
    assert facts.turns[0].answer in Elements(page.render(facts)).text


def test_a_short_text_is_not_found_in_what_came_before() -> None:
    session = chat(system="q and a and q")
    list(session.ask("q"))
    question = gather(session).sections[0]
    # bos and system before the prompt, its end and user after it
    assert question.start == len("q and a and q") + 4
    # Nor where the record says that all of it was read before.
    turn = session.turns[0]
    spent = turn.report.tokens
    reused = replace(spent, prompt_reused=spent.prompt_reused + spent.prompt_new, prompt_new=0)
    session.turns[0] = replace(turn, report=replace(turn.report, tokens=reused))
    assert gather(session).sections[0] == question
    # The answer is a text that its own question begins with.
    session = chat()
    session.engine.script = [ord("w")] * 12  # type: ignore[attr-defined]
    list(session.ask("wwwwwwwwwwwwww"))
    answer = gather(session).sections[1]
    assert (answer.start, answer.end) == (len(session.fed) - 12, len(session.fed))


# The page ------------------------------------------------------------------------------------
class Elements(HTMLParser):
    """Every element with its attributes and its own text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts, self.text, self.inside = list[str](), "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.texts.append("")
        self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[-1] += data
        self.text += data

    def titled(self, kind: str) -> list[tuple[str, str, str]]:
        """(class, title, text) of the elements of this kind that have a title."""
        return [
            (given["class"] or "", given["title"] or "", text)
            for (tag, given), text in zip(self.tags, self.texts, strict=True)
            if tag == kind and "title" in given
        ]


def hostile() -> ChatFacts:
    """Hostile text wherever text can be, an answer of markup included."""
    session = chat(system=HOSTILE)
    session.facts = type(session.facts)(model=HOSTILE, revision=HOSTILE, device=HOSTILE)
    session.attach(HOSTILE, name=HOSTILE)
    session.engine.script = list(b"</script><b>")  # type: ignore[attr-defined]
    list(session.ask(HOSTILE))
    return gather(session)


def test_the_page_runs_and_loads_nothing_whatever_its_text(facts: ChatFacts) -> None:
    known = {tag for tag, _ in Elements(page.render(facts)).tags} | {"details", "summary"}
    for html in (page.render(facts), page.render(hostile())):
        elements = Elements(html)
        assert {tag for tag, _ in elements.tags} <= known
        assert not known & {"script", "img", "iframe", "object", "embed", "link", "base", "form"}
        for _, given in elements.tags:
            assert not {"src", "srcset", "data", "action", "style"} & set(given)
            assert not [name for name in given if name.startswith("on")]
            assert (given.get("href") or "#").startswith("#")
        style = elements.texts[[tag for tag, _ in elements.tags].index("style")]
        assert not re.search(r"url\(|@import", style)
        (policy,) = (given["content"] for _, given in elements.tags if "http-equiv" in given)
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        only = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'"
        assert policy == f"{only}; form-action 'none'"
        assert html.index("Content-Security-Policy") < html.index("<style")
    assert "</script><b>" in elements.text, "the answer is there, as text"


def test_no_character_of_foreign_text_is_hidden_or_acts(facts: ChatFacts) -> None:
    """Nor does a lone surrogate, which a model's tokens can give, reach a file."""
    turn = replace(facts.turns[0], answer="a \ud800 b")
    lone = replace(facts, turns=(turn,), text=("\ud800", *facts.text[1:]))
    acting = "[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    for made in (hostile(), lone):
        assert not re.search(acting, rendered(made, ".html"))
    assert rendered(lone, ".html").count("⟨U+D800⟩") == 2
    text = Elements(rendered(hostile(), ".html")).text
    assert "␛]0;owned␇" in text
    assert "⟨U+202E⟩gnp.exe" in text
    assert "{{ 7 * 7 }} {% raw %}⟨U+2028⟩" in text
    assert "été 日本語 👩‍🔬" in text, "only what is invisible is replaced"


def test_every_token_and_every_head_is_shaded_by_what_is_held() -> None:
    session = spoken()
    facts = gather(session)
    elements, tokens = Elements(page.render(facts)), len(session.fed)
    kept = {(i, h): session.kept(i, h).tolist() for i in range(LAYERS) for h in range(HEADS)}
    held = [sum(t in rows for rows in kept.values()) for t in range(tokens)]
    assert 0 < held.count(0) < tokens
    spans = elements.titled("span")
    titles = [f"token {t}: {by} of 6 heads" for t, by in enumerate(held)]
    assert [title for _, title, _ in spans] == titles
    tenths = "s0 s2 s4 s5 s7 s9 s10".split()
    assert [look.split()[-1] for look, _, _ in spans] == [tenths[by] for by in held]
    text = "".join(text for _, _, text in spans if text != "·")
    assert text == session.tokenizer.decode(session.fed)
    cells = {title.split(" (")[0]: text for _, title, text in elements.titled("td")}
    assert cells == {
        f"layer {i}, KV head {h}: {len(rows)} of {tokens} tokens kept": str(len(rows))
        for (i, h), rows in kept.items()
    }
    for label in ("story.txt", "piped text", "question 2", "answer 2"):
        assert f"<h3><bdi>{label}</bdi></h3>" in page.render(facts)


def test_the_table_of_memory_has_the_curve(facts: ChatFacts) -> None:
    html = page.render(replace(facts, curve=((50, 1024, 4096), (100, 2048, 2048))))
    for row in ("50</td><td>1.0 KiB</td><td>4.0 KiB</td><td>75.0%", "2.0 KiB</td><td>nothing"):
        assert row in html
    bars = re.findall(r'class="(\w+)"\s+width="([\d.]+)" height="4"', html)
    assert bars == [("rail", "100.0"), ("bar", "25.0"), ("rail", "50.0"), ("bar", "50.0")]
    # A page of 8,000 tokens and 256 heads is small.
    assert len(page.render(large(facts, 32, 8, 8_000)).encode()) < 1_000_000


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("one *two* **three**", "<p>one <em>two</em> <strong>three</strong></p>"),
        ("a\nb", "<p>a<br />\nb</p>"),
        ("# Big", "<h4>Big</h4>"),
        ("- a\n- b", "<ul>\n<li>a</li>\n<li>b</li>\n</ul>"),
        ("3. a\n4. b", '<ol start="3">\n<li>a</li>\n<li>b</li>\n</ol>'),
        ("```x onload=y\n<b>\n```", "<pre><code>&lt;b&gt;\n</code></pre>"),
        ("`a<b`", "<p><code>a&lt;b</code></p>"),
        ("<script>x</script>", "<p>&lt;script&gt;x&lt;/script&gt;</p>"),
        ("[a](javascript:x)", "<p>[a](javascript:x)</p>"),
        ("![a](http://x/y.png)", "<p>![a](http://x/y.png)</p>"),
        ("<http://x>", "<p>&lt;http://x&gt;</p>"),
        ("|a|b|\n|:-|-:|\n|1|2|", "<td>2</td>"),
        ("&lt;b&gt;", "<p>&amp;lt;b&amp;gt;</p>"),
    ],
)
def test_the_page_formats_answers(facts: ChatFacts, text: str, made: str) -> None:
    turn = replace(facts.turns[0], answer=text)
    html = page.render(replace(facts, turns=(turn, *facts.turns[1:])))
    assert made in html
    assert html.count("piped text</bdi>") == 2  # the nameless one
    tags = Elements(html).tags
    assert not [tag for tag, _ in tags if tag in ("img", "a")]
    assert not [name for _, names in tags for name in names if name in ("style", "onload")]


# The command ---------------------------------------------------------------------------------
@pytest.fixture
def context() -> Context:
    return typed.context(spoken())


def run(context: Context, *arguments: object) -> str:
    return typed.run(page.COMMANDS, context, "export", *map(str, arguments))


@pytest.mark.parametrize("name", ["a.html", "b.HTML", "c d.json"])
def test_export_writes_what_the_name_says(context: Context, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert name in run(context, path)
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    path.write_text("mine")
    assert "--force" in refused("exists", run, context, path).hint
    assert path.read_text() == "mine"
    run(context, path, "--force")
    start = '{\n "format"' if name.endswith("json") else "<!doctype html>"
    assert path.read_text("utf-8").startswith(start)
    assert os.listdir(tmp_path) == [name], "no temporary file stays"


def test_export_refuses(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "link.html").symlink_to("/dev/null")
    for line, said in {
        "": "takes one file",
        "a.html b.html": "takes one file",
        "--froce": "takes one file",
        "a.docx": "cannot tell",
        "a": "cannot tell",
        ".html": "cannot tell",
        "no/such/dir/a.html": "no directory",
        "folder.html": "not a regular file",
        "folder.html --force": "not a regular file",
        "link.html --force": "not a regular file",
        "a.md": "writes no Markdown",
        f"{'x' * 300}.html": "File name too long",
    }.items():
        refused(said, run, context, *line.split())
        assert sorted(os.listdir(tmp_path)) == ["folder.html", "link.html"], line
    context.session.turns.clear()
    refused("nothing to export", run, context, "a.html")


@pytest.mark.parametrize("broken", ["fsync", "replace", "Ctrl-C"])
def test_a_failed_write_leaves_what_was_there(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "a.html"
    path.write_text("mine")
    full, stopped = OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt("No space left")
    call, error = ("fsync", stopped) if broken == "Ctrl-C" else (broken, full)
    monkeypatch.setattr(f"minikv.cli.export.page.os.{call}", failing(error))
    with pytest.raises((UsageError, KeyboardInterrupt), match="No space left"):
        run(context, path, "--force")
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["a.html"]


PATHS = ("/home/ada/models/Some-3B", "~/models/Some-3B", "./Some-3B", "../models/Some-3B/")


@pytest.mark.parametrize("model", [*PATHS, "owner/Some-3B"])
def test_no_export_names_a_folder_of_this_machine(model: str, tmp_path: Path) -> None:
    session = spoken()
    session.facts = replace(session.facts, model=model)
    told = (
        f"the tier is damaged: {tmp_path}/chats/x/tier.kv is damaged from token 9 on",
        'cannot write "/home/ada/some thing/tier.kv": No space left on device; /docs, a/b, 1/2',
        "see https://example.org/a/b or ~/x/y.log",
    )
    turn = session.turns[-1]
    session.turns[-1] = replace(turn, report=replace(turn.report, warnings=told))
    facts = gather(session)
    assert facts.model["name"] == ("owner/Some-3B" if model == "owner/Some-3B" else "Some-3B")
    for made in (rendered(facts, kind) for kind in ("page", "markdown", ".json")):
        for part in ("/home", "~/", "../", str(tmp_path), "/models"):
            assert part not in made.replace("\\", "")
    first, second, third = facts.turns[-1].report.warnings
    assert first == "the tier is damaged: tier.kv is damaged from token 9 on"
    assert second.endswith("No space left on device; /docs, a/b, 1/2")
    assert third == "see https://example.org/a/b or y.log"
