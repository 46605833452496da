"""`minikv cache`, and the same document asked about twice, as a user does."""

from __future__ import annotations

import json
import os
from pathlib import Path

from typed import fails, invoke

from minikv.chat.report import size
from minikv.models import BUNDLED


def ask(*flags: str) -> tuple[str, int, str]:
    """The answer about the bundled sample, how many tokens were read, and what was told."""
    question, sample = "What does Halhart Works make?", str(BUNDLED / "sample.txt")
    result = invoke("ask", question, sample, "--json", *flags)
    fails(result, 0)
    made = json.loads(result.stdout)
    return made["answer"], made["tokens"]["prompt_new"], result.stderr


def test_the_second_question_about_a_document_reads_only_itself() -> None:
    home = Path(os.environ["MINIKV_HOME"]) / "cache/prompts"
    fails(invoke("cache"), 0, "no prompt is kept")
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
    _, line = invoke("cache").stdout.splitlines()
    name, tokens, *shown = line.split()
    assert shown[:2] == size(sum(path.stat().st_size for path in home.glob("*/*"))).split()
    assert line.endswith("bundled  sample.txt")
    planned = json.loads(invoke("plan", "--tokens", tokens, "--json").stdout)
    assert planned["remembered"] == sum(path.stat().st_size for path in home.glob("*/rows"))
    fails(invoke("cache", "rm", "other"), 2, "`minikv cache` lists them")
    fails(invoke("cache", "rm", name, "--yes"), 0, "removed 1 prompt")
    assert not [*home.iterdir()]
    fails(invoke("cache", "rm", "--yes"), 0, "nothing was removed")
