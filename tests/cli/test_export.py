"""/export and minikv report: true figures, inert text, whole files or none."""

from __future__ import annotations

import base64
import copy
import errno
import hashlib
import io
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from exports import HEADS, HOSTILE, LAYERS, chat, large

import minikv
from minikv.cache.stats import Fidelity
from minikv.chat.report import DeviceMemory, KvBytes, Loss, percent_saved
from minikv.chat.session import ChatSession
from minikv.cli.command import Context
from minikv.cli.export import command, figures, html, markdown
from minikv.cli.export.facts import ChatFacts, gather
from minikv.cli.export.read import parse, read_file
from minikv.cli.export.safe import visible
from minikv.cli.interrupt import Interrupts
from minikv.cli.saved.keeper import Keeper
from minikv.cli.terminal import Terminal
from minikv.errors import UsageError
from minikv.settings import Generation


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


def as_json(facts: ChatFacts) -> bytes:
    return json.dumps(facts.to_dict()).encode()


def bits(text: str) -> list[int]:
    data = base64.b64decode(text)
    return [i for i in range(8 * len(data)) if data[i >> 3] >> (i & 7) & 1]


def test_facts_are_those_of_the_chat() -> None:
    session = spoken()
    facts = gather(session)
    assert [(t.question, t.answer, t.documents) for t in facts.turns] == [
        ("who?", session.messages[2].content, (0, 1)),
        ("why?", session.messages[4].content, ()),
    ]
    assert [t.report for t in facts.turns] == session.reports
    assert [(d.name, d.characters) for d in facts.documents] == [("story.txt", 12), (None, 8)]
    assert len(facts.pieces) == len(session.fed)
    assert "".join(p or "" for p in facts.pieces) == session.tokenizer.decode(session.fed)
    assert facts.pieces[0] is None, "a control token has no text"
    assert [[bits(head) for head in layer] for layer in facts.kept] == [
        [session.kept(i, h).tolist() for h in range(HEADS)] for i in range(LAYERS)
    ]
    assert [(p.tokens, p.held, p.full) for p in facts.curve] == session.curve
    assert len(facts.curve) == 4
    assert facts.last == session.report


def test_sections_hold_the_texts() -> None:
    facts = gather(spoken())
    found = {
        (s.kind, s.label): "".join(p or "" for p in facts.pieces[s.start : s.end])
        for s in facts.sections
    }
    assert found == {
        ("document", "story.txt"): "a long störy",
        ("document", "document 2"): "nameless",
        ("question", "question 1"): "who?",
        ("answer", "answer 1"): facts.turns[0].answer,
        ("question", "question 2"): "why?",
        ("answer", "answer 2"): facts.turns[1].answer,
    }


def test_a_section_begins_with_the_first_byte_of_its_first_character() -> None:
    session = chat()
    session.attach("é is é")
    list(session.ask("q"))
    facts = gather(session)
    document = facts.sections[0]
    assert facts.pieces[document.start : document.end] == ("", "é", *" is ", "", "é")


def test_a_short_text_is_not_found_in_what_came_before() -> None:
    session = chat(system="q and a and q")
    list(session.ask("q"))
    question = gather(session).sections[0]
    # bos and system before the prompt, its end and user after it
    assert question.start == len("q and a and q") + 4
    # The answer is a text that its own question begins with.
    session = chat()
    session.engine.script = [ord("w")] * 12  # type: ignore[attr-defined]
    list(session.ask("wwwwwwwwwwwwww"))
    answer = gather(session).sections[1]
    assert (answer.start, answer.end) == (len(session.fed) - 12, len(session.fed))


def test_the_json_reads_back_as_it_was(facts: ChatFacts) -> None:
    again = parse(as_json(facts))
    assert again == facts
    assert html.render(again) == html.render(facts)
    assert markdown.render(again) == markdown.render(facts)


def drop(path: str) -> Callable[[dict[str, Any]], None]:
    def change(record: Any) -> None:
        *outer, last = path.split(".")
        for key in outer:
            record = record[int(key) if key.isdigit() else key]
        del record[last]

    return change


def put(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(record: Any) -> None:
        *outer, last = path.split(".")
        for key in outer:
            record = record[int(key) if key.isdigit() else key]
        record[int(last) if last.isdigit() else last] = value

    return change


KEYS = [
    "format",
    "version",
    "minikv",
    "made",
    "model",
    "policy",
    "system",
    "documents",
    "turns",
    "tokens",
    "kept",
    "curve",
    "model.layers",
    "policy.budget",
    "documents.0.name",
    "turns.0.question",
    "turns.0.answer",
    "turns.0.documents",
    "turns.0.record",
    "tokens.text",
    "tokens.sections",
    "tokens.sections.0.end",
    "turns.0.record.tokens.kept_mean",
    "turns.0.record.kv_bytes.held",
    "turns.0.record.warnings",
]


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(facts: ChatFacts, key: str) -> None:
    record = copy.deepcopy(facts.to_dict())
    drop(key)(record)
    with pytest.raises(ValueError, match=key.rsplit(".", 1)[-1]):
        parse(json.dumps(record).encode())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("version", 2), "version 2"),
        (put("format", "another"), "format"),
        (put("kept.0", []), "kept"),
        (put("kept.2.1", "AAAA"), "another length"),
        (put("kept.2.1", "!!"), "base64"),
        (put("kept.2.1", "é"), "base64"),
        (put("model.layers", 2), "kept"),
        (put("model.layers", 1 << 53), "kept"),
        (put("model.layers", True), "whole number"),
        (put("model.name", ["x"]), "text"),
        (put("tokens.text.3", 7), "text"),
        (put("tokens.sections.0.end", 1 << 40), "section"),
        (put("tokens.sections.0.start", -1), "section"),
        (put("tokens.sections.0.kind", "onclick"), "section"),
        (put("turns.0.documents", [9]), "document"),
        (put("turns.0.documents", [-1]), "negative"),
        (put("turns.0.record.stop_reason", "boredom"), "stop_reason"),
        (put("turns.0.record.rate.decode_tok_s", "fast"), "number"),
        (put("turns.0.record.tokens", None), "object"),
        (put("curve.0", [1, 2]), "three numbers"),
        (put("curve.0", [1, -2, 3]), "negative"),
        (put("documents", "none"), "list"),
    ],
)
def test_a_wrong_value_is_named(
    facts: ChatFacts, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    record = copy.deepcopy(facts.to_dict())
    change(record)
    with pytest.raises(ValueError, match=said):
        parse(json.dumps(record).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 30 + b"}",
        b'{"a": ' + b"9" * 9999 + b"}",
    ],
)
def test_what_is_no_export_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="not a chat that minikv exported"):
        read_file(str(path))


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("pipe.json", "absent.json", "."):
        with pytest.raises(UsageError):
            read_file(str(tmp_path / name))


# The page ------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Every element with its attributes, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.text = ""
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag in self.raw:
            self.raw[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in self.raw:
            self.raw[self.inside][-1] += data
        else:
            self.text += data


def hostile() -> ChatFacts:
    """Hostile text wherever text can be, an answer of markup included."""
    session = chat(system=HOSTILE)
    session.facts = type(session.facts)(model=HOSTILE, revision=HOSTILE, device=HOSTILE)
    session.attach(HOSTILE, name=HOSTILE)
    session.engine.script = list(b"</script><b>")  # type: ignore[attr-defined]
    list(session.ask(HOSTILE))
    return gather(session)


def test_foreign_text_adds_no_element_and_no_attribute(facts: ChatFacts) -> None:
    bad, good = Elements(html.render(hostile())), Elements(html.render(facts))
    assert {tag for tag, _ in bad.tags} - {"details"} <= {tag for tag, _ in good.tags}
    assert len(bad.raw["script"]) == len(bad.raw["style"]) + 1 == 2
    assert "</script><b>" in bad.text, "the answer is there, as text"
    for tag, attributes in [*bad.tags, *good.tags]:
        assert tag not in ("img", "iframe", "object", "embed", "link", "base", "form", "b")
        assert not [name for name in attributes if name.startswith("on") or name == "style"]


def test_no_character_of_foreign_text_is_hidden_or_acts() -> None:
    page = html.render(hostile())
    assert visible(page) == page
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)
    text = Elements(page).text
    assert "␛]0;owned␇" in text
    assert "⟨U+202E⟩gnp.exe" in text
    assert "{{ 7 * 7 }} {% raw %}⟨U+2028⟩" in text
    assert "été 日本語 👩‍🔬" in text, "only what is invisible is replaced"


def test_lone_surrogates_in_a_file_reach_no_page(facts: ChatFacts) -> None:
    record = copy.deepcopy(facts.to_dict())
    put("turns.0.answer", "a \ud800 b")(record)
    put("tokens.text.3", "\udfff")(record)
    again = parse(json.dumps(record).encode())
    assert "⟨U+D800⟩" in html.render(again).encode().decode()
    assert "⟨U+D800⟩" in markdown.render(again).encode().decode()


def test_the_page_runs_its_own_script_and_loads_nothing(facts: ChatFacts) -> None:
    page = html.render(facts)
    elements = Elements(page)
    metas = [a for tag, a in elements.tags if tag == "meta" and "http-equiv" in a]
    policy = metas[0]["content"] or ""
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for source in (elements.raw["script"][1], elements.raw["style"][0]):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert page.index("Content-Security-Policy") < page.index("<style")
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp|WebSocket|innerHTML|eval\(", page)
    for _, attributes in elements.tags:
        assert not {"src", "srcset", "data", "action"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")


def test_the_data_of_the_page_is_the_cache(facts: ChatFacts) -> None:
    data = json.loads(Elements(html.render(facts)).raw["script"][0])
    assert data["kept"] == [list(layer) for layer in facts.kept]
    assert data["pieces"] == list(facts.pieces)
    assert data["curve"] == [[p.tokens, p.held, p.full] for p in facts.curve]


def test_a_page_of_eight_thousand_tokens_and_256_heads_is_small(facts: ChatFacts) -> None:
    assert len(html.render(large(facts, 32, 8, 8_000)).encode()) < 1_000_000


def test_a_chat_that_is_not_read_again_yet_still_has_its_conversation() -> None:
    """As one that was loaded without its cache: turns, but no tokens."""
    session = spoken()
    session.engine.reset()
    session.refresh(wanted=False)
    facts = gather(session)
    assert parse(as_json(facts)) == facts
    assert facts.sections == ()
    assert facts.turns[0].answer in Elements(html.render(facts)).text


# The transcript ------------------------------------------------------------------------------


def test_the_transcript_has_the_words_and_the_figures(facts: ChatFacts) -> None:
    text = markdown.render(facts)
    report = facts.turns[1].report
    assert report is not None
    assert f"> {facts.turns[1].answer}\n" in text
    assert f"| Tokens kept per head | {report.tokens.kept_mean:,.1f} of" in text
    assert f"({report.saved})" in text
    assert "With story.txt, 12 characters." in text
    page = html.render(facts)
    assert "document 2" in page, "the nameless one"
    assert "document 3" not in page
    assert text.count("\n## Question") == 2
    assert visible(text) == text


def test_the_figures_of_a_turn_in_words(facts: ChatFacts) -> None:
    report = facts.last
    assert report is not None
    report = replace(
        report,
        rate=replace(report.rate, decode_tok_s=None, prefill_tok_s=1234.56),
        loss=Loss(0.0312, 0.5, 3, "window"),
        shaped_by_turn=2,
        time_s=replace(report.time_s, prefill=1.5, decode=0.25, evict=0.0314, first_token=1.625),
        kv_bytes=KvBytes(
            full=1 << 20,
            held=1 << 18,
            allocated=1 << 19,
            peak_prefill=3 << 20,
            policy_state=1 << 10,
        ),
        device_mem=DeviceMemory(5 << 20, None),
    )
    rows = dict(figures.rows(report))
    assert rows.pop("Tokens read").endswith(" before")
    assert rows.pop("Tokens written").endswith("stopped by end of turn")
    assert rows.pop("Tokens kept per head")
    assert rows == {
        "Policy": "adakv, then h2o, budget 64 tokens per head",
        "Memory": "KV 0.2 of 1.0 MiB (75.0% saved)",
        "of it, kept by the policy": "1.0 KiB",
        "Allocated for the cache": "512.0 KiB",
        "KV at the most": "3.0 MiB, while reading",
        "Reading": "1.50 s (1,234.6 tok/s)",
        "Evicting": "31 ms",
        "First token after": "1.62 s",
        "Writing": "0.25 s",
        "Answer": "as without eviction",
        "Attention lost": "~3.1%, worst layer 3: 50.0% (an estimate from the last window)",
        "Evicted for": "question 2",
        "Memory of the process": "5.0 MiB at most",
    }
    on_gpu = replace(report, device_mem=DeviceMemory(5 << 20, 8 << 20), shaped_by_turn=None)
    rows = dict(figures.rows(on_gpu))
    assert rows["Memory of the GPU"] == "5.0 MiB at most"
    assert "Evicted for" not in rows
    bare = replace(report, loss=Loss(None, None, None, None), device_mem=DeviceMemory(None, None))
    rows = dict(figures.rows(bare))
    assert rows["Attention lost"] == "not estimated"
    assert not any(name.startswith("Memory of") for name in rows)


def test_an_answer_cannot_leave_its_quotation() -> None:
    session = chat()
    question = "```\n# Heading\n| a | b |\n<img src=x>\n![x](http://evil)\n\\<b>\n</details>"
    list(session.ask(question))
    lines = markdown.render(gather(session)).splitlines()
    asked = [line for line in lines if line.startswith(">")]
    for part in ("# Heading", "| a | b |", "&lt;img src=x>", "!\\[x](http://evil)", "```"):
        assert f"> {part}" in asked
    assert not [line for line in lines if re.search(r"<[A-Za-z/!?]", line)]
    assert [line for line in lines if line.startswith("#")] == [
        "# Chat with someone/fake-7B @ abc",
        "## Question 1",
    ]


# The command ---------------------------------------------------------------------------------


@pytest.fixture
def context() -> Context:
    terminal = Terminal()
    terminal.err = terminal.out = io.StringIO()
    return Context(
        spoken(), terminal, "strict", Generation(), Interrupts(), Keeper(terminal, active=False)
    )


def run(context: Context, *arguments: object) -> str:
    (export,) = command.COMMANDS
    export.run(context, [str(argument) for argument in arguments])
    assert isinstance(context.terminal.err, io.StringIO)
    return context.terminal.err.getvalue()


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.html", "<!doctype html>"), ("b.MD", "# Chat with"), ("c d.json", '{\n "format"')],
)
def test_export_writes_what_the_name_says(
    context: Context, tmp_path: Path, name: str, start: str
) -> None:
    said = run(context, tmp_path / name)
    assert (tmp_path / name).read_text("utf-8").startswith(start)
    assert name in said
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask
    assert os.listdir(tmp_path) == [name], "no temporary file stays"


def test_export_replaces_only_when_told(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists") as caught:
        run(context, path)
    assert "--force" in caught.value.hint
    assert path.read_text() == "mine"
    run(context, path, "--force")
    assert path.read_text().startswith("# Chat")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "takes one file"),
        (["a.html", "b.html"], "takes one file"),
        (["--froce"], "takes one file"),
        (["a.docx"], "cannot tell"),
        (["a"], "cannot tell"),
        ([".html"], "cannot tell"),
        (["no/such/dir/a.html"], "no directory"),
        (["folder.html"], "not a regular file"),
        (["folder.html", "--force"], "not a regular file"),
        (["link.html", "--force"], "not a regular file"),
        (["x" * 300 + ".md"], "File name too long"),
    ],
)
def test_export_refuses(
    context: Context,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "link.html").symlink_to("/dev/null")
    with pytest.raises(UsageError, match=said):
        run(context, *arguments)
    assert sorted(os.listdir(tmp_path)) == ["folder.html", "link.html"]
    assert not os.listdir(tmp_path / "folder.html")


def test_nothing_to_export_yet(tmp_path: Path) -> None:
    terminal = Terminal()
    keeper = Keeper(terminal, active=False)
    context = Context(chat(), terminal, "strict", Generation(), Interrupts(), keeper)
    with pytest.raises(UsageError, match="nothing to export"):
        run(context, tmp_path / "a.md")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("broken", ["fsync", "replace", "fchmod"])
def test_a_full_disk_leaves_what_was_there(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "a.md"
    path.write_text("mine")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"minikv.cli.export.files.os.{broken}", full)
    with pytest.raises(UsageError, match="No space left on device"):
        run(context, path, "--force")
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["a.md"]


def test_an_interrupt_leaves_no_temporary_file(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("minikv.cli.export.files.os.fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        run(context, tmp_path / "a.md")
    assert not os.listdir(tmp_path)


def test_report_needs_no_model_and_no_torch(context: Context, tmp_path: Path) -> None:
    run(context, tmp_path / "chat.json")
    run(context, tmp_path / "same.html")
    code = (
        "import sys\n"
        "from minikv.cli.export.command import report\n"
        "from minikv.cli.terminal import Terminal\n"
        "report('chat.json', None, False, Terminal())\n"
        "report('chat.json', 'other.md', False, Terminal())\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = re.compile(r"\d{4}-\d\d-\d\dT[\d:]+\+00:00")  # the two were written at two moments
    pages = [made.sub("", (tmp_path / f"{n}.html").read_text()) for n in ("chat", "same")]
    assert pages[0] == pages[1]
    assert (tmp_path / "other.md").read_text().startswith("# Chat")


def test_report_never_writes_over_its_source(context: Context, tmp_path: Path) -> None:
    run(context, tmp_path / "chat.json")
    before = (tmp_path / "chat.json").read_bytes()
    with pytest.raises(UsageError, match="exists"):
        command.report(
            str(tmp_path / "chat.json"), str(tmp_path / "chat.json"), False, context.terminal
        )
    assert (tmp_path / "chat.json").read_bytes() == before


# A real model --------------------------------------------------------------------------------


def test_figures_of_the_bundled_model_add_up() -> None:
    session = minikv.load(budget=40)
    session.attach("Velgate exports mostly salt. " + "The mill of Orlin is closed. " * 20, "n.txt")
    list(session.ask("What does Velgate export?", max_tokens=4))
    facts = gather(session)
    report = facts.last
    assert report is not None
    rows = [len(bits(head)) for layer in facts.kept for head in layer]
    assert sum(rows) / len(rows) == report.tokens.kept_mean
    assert (min(rows), max(rows)) == (report.tokens.kept_min, report.tokens.kept_max)
    assert report.tokens.kept_max < len(facts.pieces) == report.tokens.seen_total
    assert facts.curve[-1].held == report.kv_bytes.held
    assert facts.curve[-1].full == report.kv_bytes.full
    assert [s.label for s in facts.sections] == ["n.txt", "question 1", "answer 1"]
    text = Elements(html.render(facts)).text
    assert percent_saved(report.kv_bytes.saved).split(".")[0] in text
    for line in report.lines():
        assert line in text


def test_what_eviction_lost_is_a_figure_and_comes_back_from_json(facts: ChatFacts) -> None:
    lost = Fidelity(0.0123, 0.25, 0.5, 3)
    *before, last = facts.turns
    assert last.report is not None
    report = replace(
        last.report,
        fidelity=lost,
        refreshes=3,
        time_s=replace(last.report.time_s, refresh=1.25),
    )
    changed = replace(facts, turns=(*before, replace(last, report=report)))
    back = parse(json.dumps(changed.to_dict()).encode()).last
    assert back == report
    rows = dict(figures.rows(report))
    assert rows["Fidelity"] == (
        "from the kept tokens alone, the first would be 0.012 nats off · "
        "attention output off by 25.0% (worst layer 3: 50.0%)"
    )
    assert rows["Chosen anew"] == "3 times within the answer, 1.25 s"
    none = replace(report, fidelity=Fidelity())
    assert dict(figures.rows(none))["Fidelity"].startswith("not measured")


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
    assert facts.model.name == ("owner/Some-3B" if model == "owner/Some-3B" else "Some-3B")
    for made in (html.render(facts), markdown.render(facts), json.dumps(facts.to_dict())):
        for part in ("/home", "~/", "../", str(tmp_path), "/models"):
            assert part not in made.replace("\\", "")
    assert facts.turns[-1].report is not None
    first, second, third = facts.turns[-1].report.warnings
    assert first == "the tier is damaged: tier.kv is damaged from token 9 on"
    assert second.endswith("No space left on device; /docs, a/b, 1/2")
    assert third == "see https://example.org/a/b or y.log"


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
    page = html.render(replace(facts, turns=(turn, *facts.turns[1:])))
    assert made in page
    tags = Elements(page).tags
    assert not [one for one in tags if one[0] in ("img", "a") and "skip" not in one[1].values()]
    assert not [name for _, names in tags for name in names if name in ("style", "onload")]
