"""docs/architecture.md names files, classes and methods that exist. The commands of the README and
of the guide are ones, links between the pages lead to headings, and the guide's figures of a plan
are what `minikv plan` says."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
from functools import cache
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import typer
from huggingface_hub import constants
from llama_8b import LLAMA
from typed import invoke

from minikv.chat.report import size
from minikv.cli.main import _resume_alone, app
from minikv.cli.screen.terminal import in_columns
from minikv.cli.settings.config import Interface
from minikv.cli.settings.help import Group
from minikv.kernels.native import choice
from minikv.settings import Generation, Settings, settings_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/architecture.md").read_text()
PICTURE = (ROOT / "docs/architecture.svg").read_text()


@cache
def known() -> set[str]:
    """Every `Class.name` of the sources: methods, attributes of `self` and annotated fields."""
    found: set[str] = set()
    for top in ("minikv", "kernels", "models"):
        for path in (ROOT / top).rglob("*.py"):
            for kind in ast.walk(ast.parse(path.read_text())):
                if not isinstance(kind, ast.ClassDef):
                    continue
                for node in ast.walk(kind):
                    if isinstance(node, ast.FunctionDef):
                        found.add(f"{kind.name}.{node.name}")
                    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                        found.add(f"{kind.name}.{node.target.id}")
                    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        found.add(f"{kind.name}.{node.attr}")
    return found


@pytest.mark.parametrize("text", [PAGE, PICTURE], ids=["page", "picture"])
def test_the_files_and_methods_exist(text: str) -> None:
    files = set(re.findall(r"\b((?:minikv|kernels|models|cli)/[\w/]*\.py)\b", text))
    assert len(files) >= 5
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []
    names = set(re.findall(r"\b([A-Z]\w+\.(?!md\b)[a-z_]\w*)", text))
    assert len(names) >= 5
    assert sorted(names - known()) == []


def test_the_map_has_about_the_lines_of_each_folder() -> None:
    rows = re.findall(r"^\| `([a-z/]+)/` \|.*\| ([\d,]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 7
    for folder, told in rows:
        files = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".c", ".h")]
        lines = sum(len(path.read_text().splitlines()) for path in files)
        assert int(told.replace(",", "")) == pytest.approx(lines, rel=0.2), folder


# -- the README and the guide ---------------------------------------------------------------

README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs/guide.md").read_text()


def commands(page: str) -> list[list[str]]:
    """Every `minikv ...` of the page's shell blocks, as words without `minikv`."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            for part in re.split(r" && | \| ", line):
                words = shlex.split(part, comments=True)
                if words and words[0] in ("minikv", ".venv/bin/minikv"):
                    found.append(words[1 : words.index("<")] if "<" in words else words[1:])
    return found


@pytest.mark.parametrize("words", [*commands(README), *commands(GUIDE)], ids=" ".join)
def test_the_commands_of_the_pages_are_ones(words: list[str]) -> None:
    """They are parsed as typer would: the command, its flags and their values."""
    command: Any = typer.main.get_command(app)
    names: list[str] = []
    words = _resume_alone(words)
    while isinstance(command, Group) and words:
        names.append(words[0])
        assert words[0] in command.commands, names
        command, words = command.whole(words[0]), words[1:]
    with command.make_context(" ".join(names), list(words)):
        pass


def test_the_readme_has_the_commands_of_a_first_day_and_the_guide_others() -> None:
    first = {words[0] for words in commands(README)}
    assert {"ask", "chat", "plan", "policies", "eval", "bench"} <= first
    assert "https://huggingface.co/meta-llama/Meta-Llama-3-8B-Instruct" in README
    assert "`.venv/bin/hf auth login`" in README
    scripts = metadata.entry_points(group="console_scripts")
    assert "hf" in scripts.names
    found = commands(GUIDE)
    assert len(found) >= 22
    assert {"ask", "chat", "chats", "config", "eval", "bench"} <= {w[0] for w in found}


@pytest.mark.parametrize(("page", "folder"), [(README, ROOT), (GUIDE, ROOT / "docs")])
def test_links_lead_to_files_and_headings(page: str, folder: Path) -> None:
    links = re.findall(r"\]\(([^):\s]+)\)", page)
    assert len(links) >= 5
    for link in links:
        name, _, heading = link.partition("#")
        assert not name or (folder / name).is_file(), link
        if heading:
            text = (folder / name).read_text() if name else page
            text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
            titles = [title.lower() for title in re.findall(r"^#+ (.+)$", text, re.M)]
            assert heading in [re.sub(r"[^\w -]", "", one).replace(" ", "-") for one in titles], (
                link
            )


def test_the_chat_of_the_readme_answers_its_questions() -> None:
    line = next(words for words in commands(README) if words[0] == "chat")
    assert line[1:] == ["models/bundled/sample.txt", "--budget", "256"]
    entries = json.loads((ROOT / "models/bundled/questions.json").read_text())
    known = {entry["question"]: entry["answer"] for entry in entries}
    told = README[README.index("Questions to try:") :].split("\n\n")[0]
    questions = re.findall(r'"([^"]+)"', " ".join(told.split()))
    assert len(questions) == 3
    asked = re.search(r'minikv ask "([^"]+)" models/bundled/sample\.txt', README)
    assert asked is not None
    assert {asked[1], *questions} <= set(known)
    done = invoke("chat", str(ROOT / line[1]), *line[2:], input="\n".join(questions))
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [known[question] for question in questions]


def test_every_setting_has_a_paragraph_and_every_paragraph_is_of_one() -> None:
    """In the docstring of its class: it is the help of the flag."""
    for kind in (Settings, Generation, Interface):
        told = re.findall(r"^(\w+): ", inspect.cleandoc(kind.__doc__ or ""), re.M)
        assert told == [*settings_of(kind)]
        assert all(one.help for one in settings_of(kind).values())


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`minikv plan` of the guide's model, whose configuration is in the hub's cache."""
    folder = tmp_path / "hub/models--meta-llama--Llama-3.1-8B-Instruct"
    (folder / "snapshots/0123").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("0123")
    (folder / "snapshots/0123/config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    # Processors with tiles read more rows at once, which need more memory.
    monkeypatch.setattr(choice, "processor", lambda: "avx512-bf16")

    def run(*words: str) -> str:
        done = invoke("plan", *words, env={"COLUMNS": "100"})
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def planned() -> list[str]:
    """The flags of the guide's plan."""
    return next(words for words in commands(GUIDE) if words[0] == "plan")[1:]


def test_the_plan_of_the_guide_is_what_plan_says_and_suggests_a_command(plan: Any) -> None:
    shown = re.search(r"^```sh\n[^\n]*minikv plan .*?^```\n\n```\n(.*?)^```", GUIDE, re.M | re.S)
    assert shown is not None
    text = plan(*planned())
    assert in_columns(text, 100) == shown[1]
    line = re.search(r"tokens: minikv (chat .*) FILE \(needs", " ".join(text.split()))
    assert line is not None
    test_the_commands_of_the_pages_are_ones(shlex.split(line[1]))


def test_the_table_of_the_guide_is_what_plan_says(plan: Any) -> None:
    rows = re.findall(r"^\| `(\w+)`[^|]*\| (GPU|CPU) \|(.*)\|$", GUIDE, re.MULTILINE)
    assert [row[:2] for row in rows] == [*product(("auto", "int8", "int4"), ("GPU", "CPU"))]
    common = [word for word in planned() if word not in ("--device", "cuda")]
    for form, where, cells in rows:
        device = "cuda" if where == "GPU" else "cpu"
        made = json.loads(plan(*common, "--weights", form, "--device", device, "--json"))
        needs = {row["policy"]: row["needs"] for row in made["rows"] if not row["stride"]}
        found = [made["weights"], needs["global-span"], needs["full"]]
        assert [cell.strip() for cell in cells.split("|")] == [size(count) for count in found]


# -- what was tried to break it -------------------------------------------------------------------

RELIABILITY = (ROOT / "docs/reliability.md").read_text()


def test_every_kind_of_attempt_has_its_row() -> None:
    """Rows 1 to 17, each with six columns; one that did not run says so."""
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", RELIABILITY, re.MULTILINE)
    assert sorted({int(number) for number, _ in rows}) == [*range(1, 18)]
    for number, row in rows:
        _, tried, failed, command, when = (cell.strip() for cell in re.split(r"(?<!`)\|", row))
        assert tried, number
        assert (tried == "not run for this page") == (failed == command == when == "-"), number
        assert failed.startswith("0") or failed == "-", number
    assert "`docs/reliability.md`" in README
    # The files that it names are there.
    named = set(re.findall(r"\btests/[\w/]+\.py", RELIABILITY))
    assert len(named) >= 15
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
