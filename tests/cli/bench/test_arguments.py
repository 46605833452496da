"""What is refused, and what commands make of their flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from minikv.cli.bench import models, peer, shapes, turns
from minikv.cli.bench.arguments import Arguments
from minikv.cli.main import _resume_alone, app
from minikv.errors import ContextError, UsageError
from minikv.models import BUNDLED
from minikv.models.config import ModelConfig


def bench(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", *args])


def test_lists_are_read_once_each_the_full_cache_first() -> None:
    with pytest.raises(UsageError):
        Arguments(policy="full,nothing").evictions()
    assert [each.policy for each in Arguments(policy="full").evictions()] == ["full"]
    twice = Arguments(policy="adakv,adakv", budget="64,64,128").evictions()
    assert [str(each.budget) for each in twice[1:]] == ["64", "128"]
    assert Arguments(length="8k,64,8000").lengths() == (8000, 64)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("decode", "--shape", "lama-3-8b"), "did you mean llama-3-8b?"),
        (("decode", "--model", "/nowhere"), "is not a directory"),
        (("decode", "--policy", "snapkw"), "snapkw"),
        (("decode", "--policy", ","), "--policy names nothing"),
        (("decode", "--decode", "snapkv"), "snapkv"),
        (("prefill", "--length", "63"), "at least 64"),
        (("prefill", "--length", "long"), "number of tokens"),
        (("prefill", "--steps", "3"), "No such option"),
        (("decode", "--budget", "many"), "budget"),
        (("decode", "--repeat", "0"), "--repeat must be 1 to"),
        (("decode", "--steps", "-3"), "--steps must be 1 to"),
        (("decode", "--threads", "4096"), "--threads must be 1 to"),
        (("decode", "--device", "tpu"), "unknown device"),
        (("decode", "--device", "cuda:99"), "no CUDA device"),
        (("decode", "--kv", "int4"), "'--kv'"),
        (("prefill", "--device", "cpu", "--kernels", "triton"), "riton kernels"),
        (("decode", "--json", "/nowhere/x.json"), "there is no directory"),
        (("decode", "--json", "/"), "is a directory"),
        (("decode", "--weights", "int3", "--shape", "tiny"), "int3"),
        (("decode", "--shape", "tiny", "--budget", "2", "--no-peer"), "smallest useful budget"),
        (("kernels", "--shape", "none"), "unknown shape"),
        (("kernels", "--length", "1"), "at least 64"),
        (("all", "--repeat", "0"), "--repeat must be 1 to"),
        (("all", "--minutes", "0"), "--minutes must be more than 0"),
        (("all", "--minutes", "nan"), "--minutes must be more than 0"),
        (("all", "--part", "x"), "no part is called 'x'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags: tuple[str, ...], says: str) -> None:
    out = bench(*flags)
    assert out.exit_code == 2, out.output
    assert says in out.stderr
    assert "Traceback" not in out.output


def test_json_alone_means_stdout() -> None:
    assert _resume_alone(["bench", "decode", "--json"]) == ["bench", "decode", "--json=-"]
    assert _resume_alone(["bench", "decode", "--json", "--no-peer"])[2] == "--json=-"
    named = ["bench", "decode", "--json", "out.json"]
    assert _resume_alone(named) == named
    assert _resume_alone(["ask", "q", "--json"]) == ["ask", "q", "--json"]


FLAGS = ("--shape", "tiny", "--budget", "64", "--repeat", "1")


def test_a_table_and_its_legend() -> None:
    out = bench("prefill", *FLAGS, "--length", "128,64", "--policy", "snapkv", "--no-peer")
    assert out.exit_code == 0, out.stderr
    lines = out.stdout.splitlines()
    assert lines[0].startswith("tiny on ")
    begin = lines.index("prefill, tiny, 128 tokens")
    assert lines[begin + 1].split()[-2:] == ["x", "full"]
    assert [line.split()[0] for line in lines[begin + 2 : begin + 4]] == ["full", "snapkv+h2o"]
    assert "prefill, tiny, 64 tokens" in lines
    assert "medians of 1 rounds in turns" in out.stdout
    assert max(map(len, lines[begin:])) <= 80
    assert "\x1b" not in out.stdout


@pytest.mark.skipif(not peer.installed(), reason="transformers is not there")
def test_json_on_stdout_with_transformers_in_a_process_of_its_own() -> None:
    out = bench("decode", *FLAGS, "--length", "64", "--steps", "2", "--json", "-")
    assert out.exit_code == 0, out.stderr
    made = json.loads(out.stdout)
    keys = "command complete machine versions rates wanted rows attention_flops_s notes"
    assert made.keys() == set(keys.split())
    assert made["complete"] is True
    assert made["rates"]["read"] >= made["rates"]["read_1"] > 0
    assert made["machine"]["cores"] >= 1
    assert made["wanted"]["dtype"] == "bfloat16"
    rows = made["rows"]
    assert [row["system"] for row in rows] == ["minikv", "minikv", "transformers"]
    theirs = rows[-1]
    assert theirs["vs_transformers"] == 1.0
    assert theirs["peak_bytes"] > 100 << 20
    assert rows[0]["vs_transformers"] == pytest.approx(theirs["seconds"] / rows[0]["seconds"])


def test_a_real_model_takes_the_place_of_a_shape() -> None:
    config = ModelConfig.from_folder(BUNDLED)
    model = ("--model", str(BUNDLED), "--no-peer", "--dtype", "float32")
    out = bench("prefill", *model, "--length", "64", "--repeat", "1", "--budget", "48", "--json=-")
    assert out.exit_code == 0, out.stderr
    made = json.loads(out.stdout)
    assert made["wanted"]["random_weights"] is False
    assert made["wanted"]["dtype"] == "float32"
    assert made["rows"][0]["kv_bytes"]["full"] == 64 * (
        config.kv_row_bytes(4) + 4 * config.layers * config.kv_heads
    )
    long = bench("decode", *model, "--length", str(config.max_context))
    assert long.exit_code == ContextError.exit_code
    assert "smaller --length" in long.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt, 130), pytest.param(MemoryError, 4, marks=pytest.mark.soak)],
)
def test_what_was_measured_is_shown_when_a_run_ends_early(
    error: type[BaseException], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = turns.Run.read

    def stops(self: turns.Run, entry: Any, ids: list[int], *others: Any) -> float:
        if len(ids) == 64:
            raise error
        return read(self, entry, ids, *others)

    monkeypatch.setattr(turns.Run, "read", stops)
    path = tmp_path / "part.json"
    flags = ("decode", *FLAGS, "--steps", "2", "--no-peer", "--json")
    out = bench(*flags, str(path), "--length", "128,64")
    assert out.exit_code == code
    made = json.loads(path.read_text())
    assert made["complete"] is False
    assert {row["length"] for row in made["rows"]} == {128}
    assert "decode, tiny, 128 tokens" in out.stdout
    early = bench(*flags, "-", "--length", "64")
    assert (early.exit_code, early.stdout) == (code, "")


def test_weights_that_do_not_fit_are_exit_code_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "free_memory", lambda device: 3 << 30)
    out = bench("decode", "--shape", "llama-3-8b", "--no-peer")
    assert out.exit_code == 4
    assert "15.0 GiB" in out.stderr


def test_every_shape_has_a_name_that_is_found_in_any_case() -> None:
    for name, sizes in shapes.SHAPES.items():
        assert shapes.find(name.upper()) is sizes
