"""`minikv bench`: what is refused, what is shown and written, and runs that end early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from minikv.cli.bench import networks, systems
from minikv.cli.main import _resume_alone, app
from minikv.policies import DEFAULT_PROMPT

FLAGS = ("--shape", "tiny", "--budget", "64", "--repeat", "1")


def bench(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", *args])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("kernels", "'kernels'"),
        ("decode --shape lama-3-8b", "did you mean llama-3-8b?"),
        ("decode --policy snapkw", "snapkw"),
        ("decode --policy ,", "--policy names nothing"),
        ("decode --decode snapkv", "snapkv"),
        ("decode -o depth=16", "has an option"),
        ("prefill --length 63", "--length must be 64 to"),
        ("prefill --length long", "number of tokens"),
        ("decode --budget many", "budget"),
        ("decode --repeat 0", "--repeat must be 1 to"),
        ("decode --steps -3", "--steps must be 0 to"),
        ("decode --threads 4000", "--threads must be 1 to"),
        ("decode --device tpu", "unknown device"),
        ("decode --device cuda:99", "no CUDA device"),
        ("decode --kv int4", "--kv"),
        ("prefill --kernels triton --device cpu", "CUDA"),
        ("decode --json /nowhere/x.json", "there is no directory"),
        ("decode --json /", "is a directory"),
        ("decode --weights int3 --shape tiny", "int3"),
        ("decode --shape tiny --budget 2 --no-peer", "smallest useful budget"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags: str, says: str) -> None:
    out = bench(*flags.split())
    assert out.exit_code == 2, out.output
    assert says in out.stderr
    assert "Traceback" not in out.output


def test_json_alone_means_stdout() -> None:
    assert _resume_alone(["bench", "decode", "--json"]) == ["bench", "decode", "--json=-"]
    named = ["bench", "decode", "--json", "out.json"]
    assert _resume_alone(named) == named


def test_all_is_steps_and_prompts_of_one_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tables have at most 80 columns, and the file has what they show."""
    monkeypatch.setitem(networks.SHAPES, "s", networks.find("tiny"))  # type: ignore[index]
    path = tmp_path / "all.json"
    flags = ("--length", "64,80,64", "--steps", "2", "--no-peer", "--device", "cpu")
    out = bench("all", *FLAGS[2:], *flags, "--json", str(path))
    assert out.exit_code == 0, out.stderr
    made = json.loads(path.read_text())
    keys = "command complete machine versions bandwidth wanted rows notes"
    assert made.keys() == {*keys.split()}
    assert made["complete"] is True
    assert made["bandwidth"] > 0
    assert made["wanted"] == {"shape": "s", "dtype": "bfloat16", "repeat": 1, "steps": 2}
    kinds = [(row["kind"], row["length"], row["policy"]) for row in made["rows"]]
    assert kinds == [
        (kind, length, policy)
        for kind in ("decode", "prefill")
        for length in (64, 80)
        for policy in ("full", DEFAULT_PROMPT)
    ]
    lines = out.stdout.splitlines()
    assert lines[0].startswith("s on ")
    assert "medians of 1 rounds in turns; 2 steps a decode round; bfloat16" in lines
    begin = lines.index("prefill, 80 tokens")
    for line, policy in zip(lines[begin + 2 :], ("full", DEFAULT_PROMPT), strict=False):
        assert line.startswith(policy)
    assert max(map(len, lines[1:])) <= 80


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (MemoryError, 4)])
def test_what_was_measured_is_shown_when_a_run_ends_early(
    error: type[BaseException], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = systems.Cached.read

    def stops(self: systems.Cached, ids: list[int], room: int = 256) -> float:
        if len(ids) == 64:
            raise error
        return read(self, ids, room)

    monkeypatch.setattr(systems.Cached, "read", stops)
    path = tmp_path / "part.json"
    flags = ("decode", *FLAGS, "--steps", "2", "--no-peer", "--json")
    out = bench(*flags, str(path), "--length", "128,64")
    assert out.exit_code == code
    made = json.loads(path.read_text())
    assert made["complete"] is False
    assert {row["length"] for row in made["rows"]} == {128}
    assert "decode, 128 tokens" in out.stdout
    early = bench(*flags, "-", "--length", "64")
    assert (early.exit_code, early.stdout) == (code, "")


def test_weights_that_do_not_fit_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(networks, "free_memory", lambda device: 3 << 30)
    monkeypatch.setattr(networks, "Llama", lambda *a, **k: pytest.fail("made"))
    out = bench("decode", "--shape", "llama-3-8b", "--no-peer")
    assert out.exit_code == 4
    assert "need 15.0 GiB, and 3.0 GiB are free" in out.stderr
