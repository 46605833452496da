"""`minikv cache`, and the same document asked about twice, as a user does."""

from __future__ import annotations

import json
import os
from pathlib import Path

from typed import invoke
from typer.testing import Result

from minikv.chat.report import size
from minikv.models import BUNDLED


def run(*arguments: str, code: int = 0) -> Result:
    result = invoke(*arguments)
    assert result.exit_code == code, result.stderr
    return result


def ask(*flags: str) -> tuple[str, int, str]:
    """The answer about the bundled sample, how many tokens were read, and what was told."""
    question, sample = "What does Halhart Works make?", str(BUNDLED / "sample.txt")
    result = run("ask", question, sample, "--json", *flags)
    made = json.loads(result.stdout)
    return made["answer"], made["tokens"]["prompt_new"], result.stderr


def test_the_second_question_about_a_document_reads_only_itself() -> None:
    home = Path(os.environ["MINIKV_HOME"]) / "cache/prompts"
    assert "no prompt is kept" in run("cache").stderr
    answer, read, told = ask("--remember", "off")
    assert read > 6000
    assert not home.exists()
    answered, read, told = ask()
    assert (answered, read > 6000) == (answer, True)
    assert "--remember off keeps nothing" in told
    few = ("--budget", "256")
    for flags in (few, (*few, "--policy", "streaming"), ("--kv", "int8")):
        answered, read, told = ask(*flags)
        assert read < 100
        assert answered == answer or "streaming" in flags
        assert "were read before" in told
    _, line = run("cache").stdout.splitlines()
    name, tokens, *shown = line.split()
    assert shown[:2] == size(sum(path.stat().st_size for path in home.glob("*/*"))).split()
    assert line.endswith("bundled  sample.txt")
    planned = json.loads(run("plan", "--tokens", tokens, "--json").stdout)
    assert planned["remembered"] == sum(path.stat().st_size for path in home.glob("*/rows"))
    assert "`minikv cache` lists them" in run("cache", "rm", "other", code=2).stderr
    assert "removed 1 prompt" in run("cache", "rm", name, "--yes").stderr
    assert not [*home.iterdir()]
    assert "nothing was removed" in run("cache", "rm", "--yes").stderr
