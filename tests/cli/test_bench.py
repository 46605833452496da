"""`minikv bench`: floors and ratios by hand, small runs of every command, and runs that end early.

Nothing here looks at how long something took: only at what is made of times.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import (
    command,
    ending,
    everything,
    floors,
    kernels,
    machine,
    models,
    on_cpu,
    on_gpu,
    peer,
    rows,
    run,
    shapes,
    show,
    worker,
)
from minikv.cli.bench.asked import Asked
from minikv.cli.bench.deadline import Deadline, Guesses, Late
from minikv.cli.main import _resume_alone, app
from minikv.engine.decode_loop import Eager
from minikv.engine.engine import Engine
from minikv.errors import ContextError, MemoryShortError, UsageError
from minikv.models.config import ModelConfig
from minikv.models.errors import UnusableSetting
from minikv.models.linear import lacks

TINY = shapes.find("tiny")
CPU = torch.device("cpu")
RATES = floors.Rates(5e9, 1e10, 8e9, 2e11, 1e11, on_gpu=False)
GPU_RATES = floors.Rates(None, 4e12, 4e12, 8e14, 5e13, on_gpu=True)


def bench(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", *args])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates from small buffers, kernels on few inputs: figures of no use, in no time."""
    monkeypatch.setattr(kernels, "_CPU_CACHE", 0)
    monkeypatch.setattr(kernels, "_SECONDS", 1e-5)
    measure = machine.measure
    monkeypatch.setattr(machine, "measure", lambda device: measure(device, 1, small=True))


# -- floors and ratios ----------------------------------------------------------------------


def test_sizes_are_those_of_the_network() -> None:
    for name in ("tiny", "s", "llama-3.2-1b"):
        sizes = shapes.find(name)
        config = models.config_of(sizes)
        assert sizes.parameters == config.parameters
        assert models.sizes_of(config) == sizes
    # 4,096 x (2 x 4,096 + 2 x 1,024) of attention and 3 x 4,096 x 14,336 of MLP, 32 times.
    assert shapes.find("LLAMA-3-8B").matrices == 32 * (4096 * 10_240 + 3 * 4096 * 14_336)
    assert round(shapes.SHAPES["llama-3-8b"].parameters / 1e9, 2) == 8.03
    assert round(shapes.SHAPES["s"].parameters / 1e6) == 150


def test_flops_of_a_prompt() -> None:
    one = shapes.Sizes(1, 8, 2, 1, 4, 16, 32)
    assert one.matrices == 8 * (2 * 8 + 2 * 4 + 3 * 16)
    # Three tokens: every matrix thrice, the head once.
    assert one.linear_flops(3) == 2 * (3 * 576 + 32 * 8)
    # Query 0 sees one row, 1 two, 2 three: six pairs, each with two products of size 4, two heads.
    assert one.attention_flops(3) == 6 * 2 * 2 * (4 + 4)


def test_a_steps_floor_is_its_bytes_over_what_the_machine_reads() -> None:
    assert RATES.stream == 1e10
    assert GPU_RATES.stream == 4e12
    assert floors.decode_floor(8 * 10**9, 2e9, RATES.stream) == 1.0
    # Llama-3-8B at 1k on 4.3 TB/s, as the reference has it: 15.01 GB of weights, 128 KiB a token.
    sizes = shapes.SHAPES["llama-3-8b"]
    weights = 2 * (sizes.parameters - sizes.head)
    assert floors.decode_floor(weights, 1024 * 131_072, 4.3e12) == pytest.approx(3.52e-3, rel=2e-3)


def test_a_prompts_floor_is_its_flops_over_their_rates() -> None:
    assert floors.prefill_floor(4 * 10**11, RATES.product("bfloat16"), 10**11, 5e10) == 2.0 + 2.0
    assert RATES.product("float32") == 1e11


def test_medians_and_ratios() -> None:
    assert floors.middle([3.0, 1.0, 2.0]) == 2.0
    assert floors.middle([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert floors.ratio([4.0, 8.0, 6.0], [2.0, 3.0, 9.0]) == 2.0
    # A machine that grew slower in the second round slowed both down: the share stays 10 %.
    assert floors.overhead([1.1, 2.2, 1.1], [1.0, 2.0, 1.0]) == pytest.approx(0.1)
    with pytest.raises(ValueError):
        floors.overhead([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("measured", "at_least", "state"),
    [
        (0.9, True, "met"),
        (0.8, True, "met"),
        (0.7, True, "milestone"),
        (0.5, True, "missed"),
        (None, True, "not measured"),
        (0.5, False, "met"),
        (0.85, False, "missed"),
    ],
)
def test_goals(measured: float | None, at_least: bool, state: str) -> None:
    first = 0.65 if at_least else 0.82
    goal = floors.Goal("g", measured, 0.8, first, at_least)
    assert goal.state == state
    assert goal.record()["state"] == state


def test_step_bytes_leave_the_input_embedding_out_unless_it_is_the_head() -> None:
    spec = models.Spec(TINY)
    net = models.network(spec)
    assert net.weight_bytes == 2 * TINY.parameters
    assert models.step_bytes(net) == 2 * (TINY.parameters - TINY.head)
    tied = shapes.Sizes(1, 64, 4, 2, 16, 128, 256, tied=True)
    net = models.network(models.Spec(tied))
    assert models.step_bytes(net) == net.weight_bytes == 2 * tied.parameters


def test_a_rows_figures() -> None:
    row = rows.Row("prefill", "m", "minikv", 100, (2.0, 4.0, 3.0), floor=1.5)
    assert (row.seconds, row.rate, row.share) == (3.0, 100 / 3, 0.5)
    step = rows.Row("decode", "m", "minikv", 100, (0.5,))
    assert (step.rate, step.share) == (2.0, None)


# -- networks and caches --------------------------------------------------------------------


def test_random_weights_are_finite_and_no_two_heads_are_alike() -> None:
    net = models.network(models.Spec(TINY, dtype="float32"))
    for name, tensor in net.tensors():
        assert bool(tensor.isfinite().all())
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all())
        else:
            assert 0.015 < float(tensor.std()) < 0.025
    named = dict(net.tensors())
    first, second = (named[f"model.layers.{i}.self_attn.q_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first[:16], first[16:32])


def test_a_block_that_is_smaller_than_a_matrix_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_BLOCK", 97)
    net = models.plain(models.Spec(TINY, dtype="float32"))
    flat = dict(net.tensors())["lm_head.weight"].view(-1)
    assert torch.equal(flat[:97], flat[97:194])
    assert torch.equal(flat[: len(flat) % 97], flat[-(len(flat) % 97) :])
    assert bool((flat != 0).any())


def test_the_twin_holds_the_same_rows_and_judges_none() -> None:
    net = models.network(models.Spec(TINY, dtype="float32"))
    cached = models.Cached(net, EvictionConfig.read("adakv", "roco", "64"))
    ids = models.prompt(128, TINY.vocab)
    cached.read(ids)
    cached.write(5)
    other = cached.twin()
    other.copy(cached, 3)
    assert other.engine.kv.step_policy is None

    def rows(of: models.Cached, layer: int, head: int) -> torch.Tensor:
        """Keys that a head holds, by position."""
        arena = of.engine.kv.arena
        begin, count = int(arena.start[layer, head]), int(arena.length[layer, head])
        pos = arena.columns["pos"][begin : begin + count]
        hole = int(arena.free_slot[layer, head]) - begin
        live = torch.arange(count) != hole
        order = pos[live].argsort()
        return arena.columns["k"][begin : begin + count][live][order]

    for layer in range(TINY.layers):
        for head in range(TINY.kv_heads):
            assert torch.equal(rows(other, layer, head), rows(cached, layer, head))
            kept = (of.engine.kv.kept(layer, head) for of in (other, cached))
            assert torch.equal(*kept)
    # The next token attends to the same rows in both.
    assert torch.allclose(other.engine.step(7), cached.engine.step(7), atol=1e-6)
    before = other.engine.kv.arena.rows
    other.write(2)
    assert other.engine.kv.arena.rows == before  # as much room as was asked for, and no more


def test_weights_that_do_not_fit_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "free_memory", lambda device: 3 << 30)
    made: list[object] = []
    monkeypatch.setattr(models, "Llama", lambda *a, **k: made.append(a))
    with pytest.raises(MemoryShortError, match=r"need 15\.0 GiB, and 3\.0 GiB are free"):
        models.network(models.Spec(shapes.SHAPES["llama-3-8b"]))
    assert made == []
    out = bench("decode", "--shape", "llama-3-8b", "--no-peer")
    assert out.exit_code == 4
    assert "15.0 GiB" in out.stderr


# -- decode and prefill ---------------------------------------------------------------------

FLAGS = ("--shape", "tiny", "--length", "128,64", "--budget", "64", "--repeat", "2")


def test_decode_as_json_on_stdout() -> None:
    out = bench(
        "decode",
        *FLAGS,
        "--steps",
        "2",
        "--no-peer",
        "--json",
        "-",
        "--policy",
        "snapkv,streaming",
        "--decode",
        "auto,tova",
    )
    assert out.exit_code == 0, out.stderr
    made = json.loads(out.stdout)
    assert made["complete"] is True
    assert {"command", "machine", "versions", "rates", "wanted", "rows", "notes"} <= made.keys()
    assert made["rates"]["read"] > 0
    assert made["rates"]["matmul_fp32"] > 0
    assert made["machine"]["cores"] >= 1
    assert made["versions"]["torch"] == torch.__version__
    assert made["wanted"]["dtype"] == "bfloat16"
    rows = made["rows"]
    for length in (128, 64):
        mine = [row for row in rows if row["length"] == length]
        assert [row["policy"] for row in mine] == ["full", *["snapkv"] * 2, *["streaming"] * 2]
        full = mine[0]
        assert full["vs_full"] == 1.0
        assert full["evict_share"] is None
        assert full["budget"] == "-"
        for row in mine:
            check(row, made["rates"]["read"])
            assert row["vs_full"] == pytest.approx(full["seconds"] / row["seconds"])
            assert row["kv_bytes"]["full"] == length * 2 * TINY.kv_heads * 2 * 16 * 2
            if row["decode"] != "none":
                assert isinstance(row["evict_share"], float)
        # 128 rows under a budget of 64; of a prompt of 64 all stay.
        assert mine[1]["kv_bytes"]["kept_mean"] == 64
        assert mine[1]["step_bytes"]["kv"] < full["step_bytes"]["kv"] or length == 64
    assert [row["length"] for row in rows[:5]] == [128] * 5  # in the order asked for


def check(row: dict[str, Any], read: float) -> None:
    """A decode row agrees with itself."""
    assert len(row["times"]) == 2
    assert row["seconds"] == pytest.approx(sum(row["times"]) / 2)
    assert row["tok_s"] == pytest.approx(1 / row["seconds"])
    moved = row["step_bytes"]
    assert moved["weights"] == 2 * (TINY.parameters - TINY.head)
    assert row["read_bytes_s"] >= read  # of a buffer, or of the weights themselves
    assert row["floor_s"] == pytest.approx((moved["weights"] + moved["kv"]) / row["read_bytes_s"])
    assert row["share_of_floor"] == pytest.approx(row["floor_s"] / row["seconds"])
    assert row["peak_bytes"] > 1 << 20


@pytest.mark.parametrize("seen", [[3e9, 2e9], [2e10, 4e10]], ids=["buffer", "weights"])
def test_full_rows_hold_what_a_step_reads(
    seen: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run.Wanted(
        models.Spec(TINY),
        "tiny",
        (EvictionConfig.read("full", "none"),),
        (96,),
        steps=2,
        repeat=2,
        peer=False,
    )
    rates = iter(seen)
    monkeypatch.setattr(models, "reading_rate", lambda net: next(rates))
    made = run.Bench(wanted, RATES)
    made.decode(96)
    made.close()
    [row] = made.rows
    # The prompt and the three steps of the warm-up; 2 layers of 2 heads, keys and values of 16.
    assert row.step_bytes["kv"] == (96 + 3) * 2 * 2 * 2 * 16 * 2
    assert row.stream == max(1e10, *seen)
    assert row.floor == (row.step_bytes["weights"] + row.step_bytes["kv"]) / row.stream


@pytest.mark.parametrize("form", ["auto", "int8", "int4"])
def test_every_byte_of_the_matrices_is_read(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for scales: those of a step less the norms."""
    if form != "auto" and lacks(form):
        pytest.skip(f"no {form} kernel here")
    net = models.network(models.Spec(replace(TINY, hidden=64, tied=True), weights=form))
    monkeypatch.setattr(machine.Clock, "each", lambda self, work, rounds, warm: [2.0, 1.0])
    bits = {"auto": 16, "int8": 8, "int4": 4}[form]
    inside = sum(
        -(-m.shape[0] // 64) * 64 * m.shape[1] if form == "int4" else m.shape.numel()
        for layer in net.layers
        for m in (layer.qkv, layer.out, layer.gate_up, layer.down)
    )
    assert models.reading_rate(net) == inside * bits / 8 + net.embedding.nbytes


def test_int8_weights_stand_beside_plain_ones() -> None:
    choices = (EvictionConfig.read("full", "none"),)
    wanted = run.Wanted(
        models.Spec(TINY), "tiny", choices, (64,), ("auto", "int8"), 1, 2, peer=False
    )
    made = run.Bench(wanted, RATES)
    try:
        made.decode(64)
    except UnusableSetting:
        pytest.skip("no int8 kernel here")
    finally:
        made.close()
    plain, small = made.rows
    assert (plain.weights, small.weights) == ("auto", "int8")
    # A byte a weight in the layers' matrices, with a scale a row; the head stays as it is.
    assert small.step_bytes["weights"] < plain.step_bytes["weights"] - TINY.matrices // 2
    assert small.vs_full == pytest.approx(plain.seconds / small.seconds)
    assert show.name(small) == "full int8"


def test_systems_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = models.Cached.write

    def noted(self: models.Cached, steps: int) -> float:
        order.append(f"{self.eviction.policy} {self.eviction.decode} {steps}")
        return write(self, steps)

    monkeypatch.setattr(models.Cached, "write", noted)
    choices = Asked(policy="snapkv,h2o", budget="64").choices()
    wanted = run.Wanted(models.Spec(TINY), "tiny", choices, (64,), repeat=2, steps=4, peer=False)
    made = run.Bench(wanted, RATES)
    made.decode(64)
    made.close()
    # A policy that judges is followed by the same cache without one; copying takes the cache from
    # the device, so that three steps that are not measured come before those that are.
    turn = ["full none", "snapkv roco", "snapkv none", "h2o h2o", "h2o none"]
    warmed = [f"{name} 3" for name in (turn[0], turn[1], turn[3])]
    assert order == warmed + [f"{name} {steps}" for name in turn for steps in (3, 4)] * 2


def test_no_step_is_launched_beyond_those_that_are_timed() -> None:
    cached = models.Cached(models.network(models.Spec(TINY)), EvictionConfig.read("full", "none"))
    cached.engine = Engine(cached.net, cached.engine.kv, Eager())
    cached.read(models.prompt(16, TINY.vocab))
    cached.write(3)
    writer = cached.engine._writer
    assert writer is not None
    assert writer._at == cached.engine.kv.position == 16 + 3
    assert writer._early is None


def test_prefill_writes_a_file_and_a_table(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    out = bench("prefill", *FLAGS, "--no-peer", "--policy", "snapkv", "--json", str(path))
    assert out.exit_code == 0, out.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [(row["length"], row["policy"]) for row in rows] == [
        (128, "full"),
        (128, "snapkv"),
        (64, "full"),
        (64, "snapkv"),
    ]
    assert all(row["tok_s"] == pytest.approx(row["length"] / row["seconds"]) for row in rows)
    added = [b / a - 1 for a, b in zip(rows[0]["times"], rows[1]["times"], strict=True)]
    assert rows[1]["evict_share"] == pytest.approx(sum(added) / 2)
    text = out.stdout
    assert max(map(len, text.splitlines())) <= 80
    lines = text.splitlines()
    begin = lines.index("prefill, tiny, 128 tokens")
    assert [line.split()[0] for line in lines[begin + 2 : begin + 4]] == ["full", "snapkv+roco"]
    assert "prefill, tiny, 64 tokens" in lines
    assert "\x1b" not in text


def test_the_widest_row_has_eighty_columns() -> None:
    row = rows.Row(
        "prefill",
        "llama-3-8b",
        "minikv",
        131_072,
        (99.9,),
        "adakv",
        "scissorhands",
        "1024",
        weights="auto",
        floor=4.0,
        evict=-0.012,
        vs_full=12.34,
        vs_peer=12.34,
        kv={"held": 1023 << 20},
        peak=1023 << 20,
    )
    assert max(map(len, show.table([row]).splitlines())) <= 80


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (40, "40B"),
        (1000, "1.0K"),
        (900 << 20, "900M"),
        (1023 << 20, "1.0G"),
        (15 << 30, "15G"),
        (2000 << 30, "2000G"),
    ],
)
def test_bytes_in_a_cell(count: int, text: str) -> None:
    assert show._short(count) == text


def test_a_real_model_takes_the_place_of_a_shape() -> None:
    folder = Path(models.__file__).parents[2] / "models" / "bundled"
    config = ModelConfig.from_folder(folder)
    out = bench(
        "prefill",
        "--model",
        str(folder),
        "--length",
        "64",
        "--repeat",
        "1",
        "--budget",
        "48",
        "--no-peer",
        "--dtype",
        "float32",
        "--json",
        "-",
    )
    assert out.exit_code == 0, out.stderr
    made = json.loads(out.stdout)
    assert made["wanted"]["random_weights"] is False
    assert made["wanted"]["dtype"] == "float32"
    assert made["rows"][0]["kv_bytes"]["full"] == 64 * config.kv_row_bytes(4)
    long = bench("decode", "--model", str(folder), "--length", str(config.max_context), "--no-peer")
    assert long.exit_code == ContextError.exit_code
    assert "smaller --length" in long.stderr


@pytest.mark.skipif(not peer.installed(), reason="transformers is not there")
def test_transformers_takes_its_turns_in_a_process_of_its_own() -> None:
    here = [name for name in sys.modules if name.startswith("transformers")]  # other tests' own
    out = bench(
        "decode", *FLAGS[:2], "--length", "64", "--repeat", "1", "--steps", "2", "--json", "-"
    )
    assert out.exit_code == 0, out.stderr
    rows = json.loads(out.stdout)["rows"]
    assert [row["system"] for row in rows] == ["minikv", "minikv", "transformers"]
    theirs = rows[-1]
    assert theirs["vs_transformers"] == 1.0
    assert theirs["peak_bytes"] > 100 << 20
    assert rows[0]["vs_transformers"] == pytest.approx(theirs["seconds"] / rows[0]["seconds"])
    assert [name for name in sys.modules if name.startswith("transformers")] == here


@pytest.mark.skipif(not peer.installed(), reason="transformers is not there")
def test_transformers_computes_with_the_same_weights() -> None:
    spec = models.Spec(TINY, dtype="float32")
    theirs = peer.Transformers(spec)
    ours = models.Cached(models.network(spec), EvictionConfig.read("full", "none"))
    ids = models.prompt(70, TINY.vocab)
    with torch.inference_mode():
        logits = theirs.model(torch.tensor([ids])).logits[0, -1]
    assert torch.allclose(ours.engine.prompt(ids), logits, atol=1e-5)
    theirs.read(ids)
    theirs.write(3)
    assert theirs._cache.get_seq_length() == 73
    # Greedy both: the token that is fed next is the same.
    ours.go_on([1, 2])  # not from the beginning, and still a prompt
    ours.read(ids)
    ours.write(3)
    assert ours._token == int(theirs._token)


# -- what is refused, and what ends early -----------------------------------------------------


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
        (("decode", "--budget", "many"), "budget"),
        (("decode", "--repeat", "0"), "--repeat must be 1 to"),
        (("decode", "--steps", "-3"), "--steps must be 1 to"),
        (("decode", "--threads", "4096"), "--threads must be 1 to"),
        (("decode", "--device", "tpu"), "unknown device"),
        (("decode", "--device", "cuda:99"), "no CUDA device"),
        (("prefill", "--device", "cpu", "--kernels", "triton"), "riton kernels"),
        (("decode", "--json", "/nowhere/x.json"), "there is no directory"),
        (("decode", "--json", "/"), "is a directory"),
        (("decode", "--weights", "int3", "--shape", "tiny"), "int3"),
        (("kernels", "--shape", "none"), "unknown shape"),
        (("kernels", "--length", "1"), "at least 64"),
        (("all", "--repeat", "0"), "--repeat must be 1 to"),
        (("all", "--minutes", "0"), "--minutes must be more than 0"),
        (("all", "--minutes", "nan"), "--minutes must be more than 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags: tuple[str, ...], says: str) -> None:
    out = bench(*flags)
    assert out.exit_code == 2, out.output
    assert says in out.stderr
    assert len(out.stderr.strip().splitlines()) <= 2
    assert "Traceback" not in out.output


def test_a_budget_too_small_for_a_policy_is_refused() -> None:
    out = bench("decode", *FLAGS[:4], "--budget", "2", "--no-peer")
    assert out.exit_code == 2
    assert "smallest useful budget" in out.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_was_measured_is_shown_when_a_run_ends_early(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = models.Cached.read

    def stops(self: models.Cached, ids: list[int], room: int = 256) -> float:
        if len(ids) == 64:
            raise error
        return read(self, ids, room)

    monkeypatch.setattr(models.Cached, "read", stops)
    path = tmp_path / "part.json"
    out = bench("decode", *FLAGS, "--steps", "2", "--no-peer", "--json", str(path))
    assert out.exit_code == (130 if error is KeyboardInterrupt else 4)
    made = json.loads(path.read_text())
    assert made["complete"] is False
    assert {row["length"] for row in made["rows"]} == {128}
    assert "decode, tiny, 128 tokens" in out.stdout
    early = bench("decode", *FLAGS[:2], "--length", "64", "--no-peer", "--json", "-")
    assert early.exit_code == out.exit_code
    assert early.stdout.count("rows") <= 1  # nothing but, at most, an object without rows


def test_json_alone_means_stdout() -> None:
    assert _resume_alone(["bench", "decode", "--json"]) == ["bench", "decode", "--json=-"]
    assert _resume_alone(["bench", "decode", "--json", "--no-peer"])[2] == "--json=-"
    named = ["bench", "decode", "--json", "out.json"]
    assert _resume_alone(named) == named
    assert _resume_alone(["ask", "q", "--json"]) == ["ask", "q", "--json"]


def test_a_worker_measures_minikv_as_well_and_says_what_went_wrong() -> None:
    made = worker.Worker(
        "minikv", models.Spec(TINY), 1, EvictionConfig.read("snapkv", "none", "64")
    )
    try:
        assert made.read(range(128)) > 0
        assert made.write(2) > 0
        assert made.peak() > 50 << 20
        spec = worker._plain(models.Spec(TINY))
        with pytest.raises(worker.PeerError, match="another is no system"):
            made._ask(do="make", system="another", threads=1, spec=spec, eviction=None)
        assert made.write(1) > 0  # and goes on
        made._process.kill()
        with pytest.raises(MemoryShortError, match="killed"):
            made.read(range(128))
    finally:
        made.close()
    assert made._process.returncode is not None


# -- kernels --------------------------------------------------------------------------------


def test_kernels_in_c_are_measured_on_a_cpu() -> None:
    found, reason = kernels.dispatch.choose(CPU, "auto", 16, torch.bfloat16)
    if found.name != "native":
        pytest.skip(reason or "no kernels in C here")
    out = bench(
        "kernels",
        "--device",
        "cpu",
        "--shape",
        "tiny",
        "--length",
        "64",
        "--repeat",
        "1",
        "--json",
        "-",
    )
    assert out.exit_code == 0, out.stderr
    timings = json.loads(out.stdout)["kernels"]
    assert {row["kernels"] for row in timings} == {"native"}
    assert "ragged attention" in {row["kernel"] for row in timings}


def test_kernels_without_cuda_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(kernels.dispatch, "_native", lambda *a: (kernels.dispatch.Kernels(), None))
    for wanted in ((), ("--kernels", "triton")):
        out = bench("kernels", *wanted)
        assert out.exit_code == 2
        assert "need a CUDA device" in out.stderr
        assert "--kernels torch" in out.stderr


def test_kernels_as_torch_twins() -> None:
    out = bench(
        "kernels",
        "--kernels",
        "torch",
        "--shape",
        "tiny",
        "--length",
        "64",
        "--repeat",
        "1",
        "--json",
        "-",
    )
    assert out.exit_code == 0, out.stderr
    made = json.loads(out.stdout)
    assert made["notes"] == []
    rows = made["kernels"]
    assert {row["kernel"] for row in rows} >= {
        "ragged attention",
        "append",
        "hash append",
        "h2o_step".replace("_", " "),
        "tova step",
        "roco step",
        "scissorhands step",
        "observe",
        "column sums",
        "sdpa decode",
        "gather rows",
        "segments attention",
        "add norm",
        "rotate",
        "silu mul",
    }
    read, product = made["rates"]["read"], made["rates"]["matmul"]
    for row in rows:
        assert row["kernels"] == "torch"
        assert row["floor_s"] == max(row["bytes"] / read, row["flops"] / product)
        assert row["share_of_floor"] == pytest.approx(row["floor_s"] / row["seconds"])
    attention = next(row for row in rows if row["kernel"] == "ragged attention")
    assert attention["bytes"] == 64 * 2 * 2 * 16 * 2  # rows, heads, k and v of 16 in bfloat16


def test_uneven_heads_have_the_mean_and_one_has_four_times_it() -> None:
    for heads, mean in ((8, 1024), (8, 100), (32, 333), (5, 64)):
        rows = kernels.uneven(heads, mean)
        assert len(rows) == heads
        assert sum(rows) == heads * mean
        assert max(rows) == 4 * mean
        assert min(rows) > 0
    assert kernels.uneven(1, 64) == [64]
    assert sum(kernels.uneven(2, 64)) == 128


@pytest.mark.parametrize(
    "case",
    list(kernels.cases(TINY, torch.float32, [64])),
    ids=lambda case: f"{case.name}, {case.case}",
)
def test_every_case_does_what_it_says(case: kernels.Case) -> None:
    """It runs twice on the same inputs, and what it writes is finite."""
    operations = kernels.dispatch.Kernels()
    inputs = case.make(CPU, 0)
    case.run(operations, inputs)
    out = case.run(operations, inputs)
    tensors = [out] if isinstance(out, torch.Tensor) else list(out) if out is not None else []
    tensors += [inputs[name] for name in ("mass", "squares", "k", "v") if name in inputs]
    assert all(bool(t.isfinite().all()) for t in tensors)
    if "rows" in inputs:  # all heads were over, so every one has given up a row
        assert bool((inputs["hole"] >= 0).all())
    if case.name == "gather rows":
        kept, fresh = inputs["index"][1], inputs["fresh"][1]
        assert torch.equal(inputs["into"][1][len(kept) :], fresh[1, kept])
        assert case.nbytes == 2 * 2 * inputs["into"][0].nbytes + inputs["index"].nbytes
    if case.name == "hash append":
        assert bool((inputs["hole"] >= 0).all())
        assert case.nbytes >= inputs["code"].nbytes
    if case.name in ("ragged attention", "sdpa decode"):
        assert case.nbytes >= inputs["k"].nbytes // 2 + inputs["v"].nbytes // 2


def test_a_kernel_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kernels.dispatch.Kernels, "tova_step")
    out = bench(
        "kernels",
        "--kernels",
        "torch",
        "--shape",
        "tiny",
        "--length",
        "64",
        "--repeat",
        "1",
        "--json",
        "-",
    )
    made = json.loads(out.stdout)
    assert made["notes"] == ["tova step: no tova_step in this version"]
    assert not [row for row in made["kernels"] if row["kernel"] == "tova step"]


# -- the whole list -------------------------------------------------------------------------


def tried(parts: tuple[everything.Part, ...], *names: str) -> everything.Everything:
    """Some parts with tiny networks."""
    made = everything.Everything(CPU, RATES, lambda *a: None, repeat=1, peer=False, small=True)
    made.go([part for part in parts if part.name in names], True)
    return made


class Box:
    """A process that is none."""

    def __init__(
        self,
        name: str,
        spec: models.Spec,
        threads: int,
        eviction: EvictionConfig | None,
        deadline: Deadline | None = None,
    ) -> None:
        self.bytes = 100 if eviction and eviction.evicts else 200

    def read(self, ids: range) -> None:
        assert len(ids) == 512

    def write(self, steps: int) -> None: ...

    def peak(self) -> int:
        return self.bytes

    def close(self) -> None: ...


def test_parts_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "Worker", Box)
    made = tried(on_cpu.PARTS, "s at 2,048", "flat", "memory at 32,768")
    states = {goal.name: goal.state for goal in made.goals}
    assert states["decode, s at 2,048, adakv 512"] == "not measured"
    assert states["decode at 32k over decode at 2k, same budget"] in ("met", "missed")
    flat: Any = made.figures["flat"]
    assert flat["turn"] * flat["turns"] == 1024
    peaks: Any = made.figures["peak_resident_32768"]
    assert peaks == {"minikv full": 200, "minikv adakv 512": 100}
    assert {(row.kind, row.policy) for row in made.rows} == {
        (kind, policy) for kind in ("prefill", "decode") for policy in ("full", "adakv")
    }


def test_parts_of_a_gpu_run_anywhere() -> None:
    made = tried(on_gpu.PARTS, *(part.name for part in on_gpu.PARTS))
    assert made.notes == []
    names = [goal.name for goal in made.goals]
    assert len(names) == 3 + 8 + 2 + 4 + 2
    assert sum(name.startswith("eviction per step") for name in names) == 8
    unmeasured = {goal.name for goal in made.goals if goal.measured is None}
    assert unmeasured == {  # a CPU has no allocator that counts
        "peak over weights at 32k, over its parts",
        "cache reported, off the allocator's figure by",
    }
    for name, tokens in (("prompt_128k", 2048), ("prompt_512k", 8192)):
        long: Any = made.figures[name]
        assert long["tokens"] == tokens
        assert long["full_would_hold"] == (tokens + 4) * 2 * 2 * 2 * 16 * 2
        assert long["held"] < long["full_would_hold"] // 8
    assert on_gpu.PARTS[-1].name == "512k tokens"  # it comes last, if there is time
    states = {done.name: done.state for done in made.parts}
    assert states.pop("peak") == "measured in part"
    assert set(states.values()) == {"measured"}


class Time:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def listed(
    *parts: everything.Part, seconds: float = 100, slow: bool = False, now: Time | None = None
) -> everything.Everything:
    """What became of parts in so many seconds."""
    deadline = Deadline(seconds, now=now or Time())
    made = everything.Everything(CPU, RATES, lambda *a: None, deadline=deadline)
    made.go(parts, slow)
    return made


def test_a_part_begins_if_what_it_needs_fits_and_its_goals_are_listed_in_any_case() -> None:
    clock, ran = Time(), list[str]()

    def part(name: str, cost: float, slow: bool = False) -> everything.Part:
        def work(every: everything.Everything) -> None:
            ran.append(name)
            clock.at += cost
            every.reach(f"goal of {name}", 2.0)

        goal = floors.Goal(f"goal of {name}", None, 1.0)
        return everything.Part(name, work, (goal,), slow, lambda every: cost)

    made = listed(
        part("one", 60),
        part("slow", 1, True),
        part("two", 41),
        part("three", 40),
        part("four", 0),
        now=clock,
    )
    assert ran == ["one", "three"]
    assert [(goal.state, goal.note) for goal in made.goals] == [
        ("met", ""),
        ("not measured", "only with --full"),
        ("not measured", "needs about 41 s, 40 s are left"),
        ("met", ""),
        ("not measured", "no time left"),
    ]
    assert [(done.name, done.state, done.seconds) for done in made.parts] == [
        ("one", "measured", 60),
        ("slow", "left out", 0),
        ("two", "left out", 0),
        ("three", "measured", 40),
        ("four", "left out", 0),
    ]
    assert "two: needs about 41 s, 40 s are left" in made.notes


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (AssertionError(), "AssertionError"),
        (RuntimeError("no such\nkernel"), "RuntimeError: no such kernel"),
        (MemoryShortError("too little of it"), "too little of it"),
    ],
)
def test_whatever_goes_wrong_in_a_part_the_next_one_runs(error: Exception, says: str) -> None:
    def fails(every: everything.Everything) -> None:
        every.reach("first", 2.0)
        raise error

    goals = (floors.Goal("first", None, 1.0), floors.Goal("second", None, 1.0))
    made = listed(
        everything.Part("bad", fails, goals),
        everything.Part("good", lambda every: every.figures.update(good=1)),
    )
    assert made.figures == {"good": 1}
    assert made.notes == [f"bad: {says}"]
    assert [(goal.measured, goal.note) for goal in made.goals] == [(2.0, ""), (None, says)]
    assert [done.state for done in made.parts] == ["failed", "measured"]


def test_after_an_error_that_breaks_the_gpu_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def breaks(every: everything.Everything) -> None:
        ran.append("one")
        monkeypatch.setattr(machine, "healthy", lambda device: False)
        raise RuntimeError("CUDA error: device-side assert triggered")

    goal = floors.Goal("of two", None, 1.0)
    two = everything.Part("two", lambda every: ran.append("two"), (goal,))
    made = listed(everything.Part("one", breaks), two)
    assert ran == ["one"]
    assert made.broken
    assert "device-side assert triggered; after this the GPU answers no more" in made.notes[0]
    assert made.goals[0].note == "the GPU answers no more, see above"


def only(monkeypatch: pytest.MonkeyPatch, *parts: everything.Part) -> None:
    """These are all parts."""
    for where in (on_cpu, on_gpu):
        monkeypatch.setattr(where, "PARTS", parts)


def good(every: everything.Everything) -> None:
    every.rows.append(rows.Row("decode", "s", "minikv", 64, (0.5,), "full", "none"))
    every.reach("something", 2.0)


GOOD = everything.Part("good", good, (floors.Goal("something", None, 1.5),))


def bad(every: everything.Everything) -> None:
    raise MemoryShortError("too little of it")


def test_all_prints_goals_and_goes_on_after_a_part_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only(monkeypatch, everything.Part("bad", bad), GOOD)
    out = bench("all")
    assert out.exit_code == 0, out.output
    assert "something     x2.00   x1.50      -  met" in out.stdout
    assert "bad: too little of it" in out.stderr
    made = json.loads(bench("all", "--json", "-").stdout)
    assert made["goals"][0]["state"] == "met"
    assert made["notes"] == ["bad: too little of it"]
    assert made["complete"] is True
    assert [part["state"] for part in made["parts"]] == ["failed", "measured"]


def test_all_fails_only_if_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(monkeypatch, everything.Part("bad", bad))
    path = tmp_path / "none.json"
    out = bench("all", "--json", str(path))
    assert out.exit_code == 1
    assert "nothing could be measured" in out.stderr
    assert json.loads(path.read_text())["notes"] == ["bad: too little of it"]


def test_every_part_is_shown_and_written_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, seen, shown = tmp_path / "all.json", list[dict[str, Any]](), list[str]()
    data = command.Terminal.data

    def noted(self: command.Terminal, text: str) -> None:
        shown.append(text)
        data(self, text)

    def looks(every: everything.Everything) -> None:
        seen.append(json.loads(path.read_text()))
        assert "decode, s, 64 tokens" in shown[-1]
        raise KeyboardInterrupt

    monkeypatch.setattr(command.Terminal, "data", noted)
    late = everything.Part("late", looks, (floors.Goal("of late", None, 1.0),))
    only(monkeypatch, GOOD, late)
    out = bench("all", "--json", str(path))
    assert out.exit_code == 130, out.output
    assert seen[0]["complete"] is False
    assert len(seen[0]["rows"]) == 1
    assert [goal["state"] for goal in seen[0]["goals"]] == ["met", "not measured"]
    made = json.loads(path.read_text())
    assert made["complete"] is False
    assert made["goals"][1]["note"] == "not reached"
    assert out.stdout.count("decode, s, 64 tokens") == 1
    assert "of late" in out.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["all.json"]  # and nothing half written


def test_a_run_that_does_not_end_is_written_before_it_is_ended(tmp_path: Path) -> None:
    made = listed(GOOD)
    made.now = "hangs"
    path = tmp_path / "cut.json"
    record = command.Record(["minikv"], command.Terminal(quiet=True), str(path))
    assert command.Listing(record, made, 0.0, 8).cut() == 0
    found = json.loads(path.read_text())
    assert found["complete"] is False
    assert found["notes"] == ["hangs: did not end in time, and the process was ended"]
    assert found["rows"][0]["seconds"] == 0.5
    nothing = listed(everything.Part("bad", bad))
    assert command.Listing(record, nothing, 0.0, 8).cut() == 1


def test_a_file_is_replaced_as_a_whole_and_stays_who_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    path.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with path.open() as held:
        show.write({"new": 1}, link)
        assert held.read() == "old"  # whoever reads has the old one to its end
    assert json.loads(path.read_text()) == {"new": 1}
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(UsageError, match="cannot write"):
        show.write({}, tmp_path / "none" / "b.json")


# -- a run that must end ----------------------------------------------------------------------


def test_deadlines_and_guesses() -> None:
    clock = Time()
    deadline = Deadline(10, grace=2, now=clock)
    assert deadline.fits(10)
    assert not deadline.fits(10.1)
    clock.at = 11
    assert (deadline.left, deadline.patience) == (-1, 1)
    deadline.check()
    with pytest.raises(Late, match="needs about 5 s, 0 s are left"):
        deadline.require(5)
    clock.at = 12.1
    with pytest.raises(Late):
        deadline.check()
    Deadline().check()
    assert Deadline().fits(1e9)

    guesses = Guesses()
    assert guesses.say("read", "full", 3.0) == 6.0  # nothing is known
    guesses.learn("read", "full", 12.0, 3.0)
    guesses.learn("read", "peer", 24.0, 3.0)
    assert guesses.say("read", "full", 6.0) == 24.0
    assert guesses.say("read", "other", 6.0) == 24.0  # as the best
    assert guesses.say("step", "full", 1.0) == 3.0


SYSTEMS = Asked(policy="snapkv,h2o", budget="64").choices()  # with full, three


def clocked(
    monkeypatch: pytest.MonkeyPatch, seconds: float, grace: float = 5
) -> tuple[run.Bench, Time]:
    """Three systems that take ten seconds for a prompt and one for steps, by a clock that stands
    otherwise."""
    clock = Time()
    read, write = models.Cached.read, models.Cached.write

    def reads(self: models.Cached, ids: list[int], room: int = 256) -> float:
        clock.at += 10
        self.check()
        read(self, ids, room)
        return 10.0

    def writes(self: models.Cached, steps: int) -> float:
        clock.at += 1
        self.check()
        write(self, steps)
        return 1 / steps

    monkeypatch.setattr(models.Cached, "read", reads)
    monkeypatch.setattr(models.Cached, "write", writes)
    wanted = run.Wanted(models.Spec(TINY), "tiny", SYSTEMS, (64,), steps=4, peer=False)
    return run.Bench(wanted, RATES, deadline=Deadline(seconds, grace=grace, now=clock)), clock


def rounds(made: run.Bench) -> list[tuple[str, int]]:
    return [(row.policy, len(row.times)) for row in made.rows]


def test_rounds_after_the_first_end_when_the_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # Warm-ups 30, a round 30: the second fits into 100 seconds, the third does not.
    made, clock = clocked(monkeypatch, 100)
    made.prefill(64)
    made.close()
    assert rounds(made) == [("full", 2), ("snapkv", 2), ("h2o", 2)]
    assert made.notes == ["prefill 64: 2 of 3 rounds, for time"]
    assert clock.at == 90
    assert made.rows[1].evict == 0.0


def test_a_system_that_cannot_be_measured_in_time_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, clock = clocked(monkeypatch, 31)
    made.decode(64)
    made.close()
    # After 22 seconds two have read; a third reading of ten does not fit.
    assert [name for name, _ in rounds(made)] == ["full", "snapkv"]
    assert made.rows[1].evict is not None
    assert made.notes[0].startswith("decode 64, h2o 64: needs about ")
    assert clock.at <= 36


def test_work_that_takes_longer_than_thought_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    made, clock = clocked(monkeypatch, 95, grace=0)
    read = models.Cached.read

    def slower(self: models.Cached, ids: list[int], room: int = 256) -> float:
        if clock.at == 70:  # full has had its second round
            clock.at += 100
        return read(self, ids, room)

    monkeypatch.setattr(models.Cached, "read", slower)
    made.prefill(64)
    made.close()
    assert rounds(made) == [("full", 2), ("snapkv", 1), ("h2o", 1)]
    assert made.notes[0] == "prefill 64, snapkv 64: the time was up in the middle of it"
    assert clock.at == 180


def test_an_interrupted_run_keeps_the_rounds_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    made, clock = clocked(monkeypatch, 1000)
    read = models.Cached.read

    def stops(self: models.Cached, ids: list[int], room: int = 256) -> float:
        if clock.at == 80:
            raise KeyboardInterrupt
        return read(self, ids, room)

    monkeypatch.setattr(models.Cached, "read", stops)
    with pytest.raises(KeyboardInterrupt):
        made.prefill(64)
    made.close()
    assert rounds(made) == [("full", 2), ("snapkv", 2), ("h2o", 1)]


def test_readings_before_the_steps_are_a_round_of_the_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []
    read = models.Cached.read

    def noted(self: models.Cached, ids: list[int], room: int = 256) -> float:
        asked.append((self.eviction.policy, len(ids)))
        return read(self, ids, room)

    monkeypatch.setattr(models.Cached, "read", noted)
    wanted = run.Wanted(
        models.Spec(TINY),
        "tiny",
        SYSTEMS[:2],
        (600,),
        ("auto", "int8"),
        3,
        2,
        peer=False,
        full_once=True,
    )
    made = run.Bench(wanted, RATES, lenient=True)
    made.both(600)
    made.close()
    int8 = sum(row.weights == "int8" for row in made.rows)  # none where no kernel takes it
    whole = [name for name, tokens in asked if tokens == 600]
    assert whole == ["full", "snapkv", *["snapkv"] * int8, *["full", "snapkv"] * 2]
    kinds = [(row.kind, row.policy, row.weights, len(row.times)) for row in made.rows]
    assert kinds[:2] == [("decode", "full", "auto", 3), ("decode", "snapkv", "auto", 3)]
    assert kinds[2 + int8 :] == [("prefill", "full", "auto", 3), ("prefill", "snapkv", "auto", 3)]
    assert made.rows[-1].peak is not None


def test_a_system_that_fails_is_left_out_where_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twin = models.Cached.twin

    def fails(self: models.Cached) -> models.Cached:
        if self.eviction.policy == "snapkv":
            raise AssertionError
        return twin(self)

    monkeypatch.setattr(models.Cached, "twin", fails)
    wanted = run.Wanted(models.Spec(TINY), "tiny", SYSTEMS, (64,), repeat=1, steps=2, peer=False)
    made = run.Bench(wanted, RATES, lenient=True)
    made.decode(64)
    made.close()
    assert [row.policy for row in made.rows] == ["full", "h2o"]
    assert made.notes == ["decode 64, snapkv 64: AssertionError"]
    with pytest.raises(AssertionError):
        run.Bench(wanted, RATES).decode(64)


@pytest.mark.parametrize("ends", [True, False])
def test_a_peer_that_fails_costs_only_its_own_row(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails:
        alive = True

        def __init__(self, *args: object, **more: object) -> None: ...

        def read(self, ids: list[int]) -> float:
            if len(ids) == 128:
                self.alive = not ends
                raise worker.PeerError("no such head")
            return 1.0

        def write(self, steps: int) -> float:
            return 1.0

        def peak(self) -> int:
            return 1

        def close(self) -> None: ...

    monkeypatch.setattr(run, "Worker", Fails)
    monkeypatch.setattr(run, "installed", lambda: True)
    wanted = run.Wanted(models.Spec(TINY), "tiny", SYSTEMS[:2], (64,), repeat=2, steps=2)
    made = run.Bench(wanted, RATES)
    made.decode(128)
    made.prefill(64)
    made.close()
    systems = [(row.kind, row.system) for row in made.rows]
    after = [("prefill", "transformers")] * (not ends)
    assert systems == [("decode", "minikv")] * 2 + [("prefill", "minikv")] * 2 + after
    assert made.notes == ["decode 128, transformers: no such head"]
    assert made.wanted.peer is not ends


def test_rows_say_whether_steps_were_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    make = models._engine

    def captures(*args: Any) -> Engine:
        engine = make(*args)
        return Engine(engine.network, engine.kv, Eager())

    def measured() -> run.Bench:
        wanted = run.Wanted(
            models.Spec(TINY), "tiny", SYSTEMS, (64,), repeat=1, steps=4, peer=False
        )
        made = run.Bench(wanted, RATES)
        made.decode(64)
        made.close()
        return made

    if not torch.cuda.is_available():
        assert [row.record()["captured"] for row in measured().rows] == [False] * 3
    monkeypatch.setattr(models, "_engine", captures)
    monkeypatch.setattr(models, "CudaGraphs", Eager)
    graphs = measured()
    assert [row.record()["captured"] for row in graphs.rows] == [True] * 3
    assert all(row.evict is not None for row in graphs.rows[1:])
    # A step that is captured beside one that is not says nothing about eviction.
    evicts = property(lambda self: self.eviction.decode == "none")
    monkeypatch.setattr(models.Cached, "captured", evicts)
    uneven = measured()
    assert all(row.evict is None for row in uneven.rows)
    assert "steps with eviction were not captured" in uneven.notes[0]


def test_keys_and_values_in_int8() -> None:
    flags = (
        "decode",
        *FLAGS[:2],
        "--length",
        "128",
        "--budget",
        "64",
        "--repeat",
        "1",
        "--steps",
        "2",
        "--no-peer",
        "--json",
        "-",
    )
    out = bench(*flags, "--kv", "int8")
    assert out.exit_code == 0, out.stderr
    made = json.loads(out.stdout)
    assert made["wanted"]["kv"] == "int8"
    assert {row["kv"] for row in made["rows"]} == {"int8"}
    wide = json.loads(bench(*flags).stdout)
    assert wide["rows"][0]["kv"] == wide["wanted"]["kv"] == "auto"
    # 128 + 3 rows of two layers' two heads: 16 numbers and a scale, twice; or 16 of two bytes.
    assert made["rows"][0]["step_bytes"]["kv"] == (128 + 3) * 4 * 2 * (16 + 4)
    assert wide["rows"][0]["step_bytes"]["kv"] == (128 + 3) * 4 * 2 * 32
    for kind in ("decode", "prefill"):
        refused = bench(kind, "--kv", "int4")
        assert refused.exit_code == 2
        assert "'--kv'" in refused.stderr
    row = rows.Row("decode", "m", "minikv", 64, (1.0,), "full", "none", kept_in="int8")
    assert show.name(row) == "full kv int8"


def test_a_watch_ends_what_does_not_end_by_itself() -> None:
    ended, rung = list[int](), threading.Event()

    def end(status: int) -> None:
        ended.append(status)
        rung.set()

    watch = ending.Watch(0.01, lambda: 7, end)
    assert rung.wait(10)
    watch.close()
    assert ended == [7]
    watch = ending.Watch(0.2, lambda: 8, end)
    watch.close()
    time.sleep(0.4)
    watch._ring()  # as if the time had been up just before
    assert ended == [7]


_STAYS = """
import sys, time
from minikv.cli.bench import everything, machine, models, on_cpu, on_gpu, shapes, worker

measure = machine.measure
machine.measure = lambda device: measure(device, 1, small=True)
child = '''import time
from minikv.cli.bench.worker import serve
serve(lambda message: 0 if message["do"] == "make" else time.sleep(600))'''

def good(every):
    every.figures["one"] = 1

def stays(every):
    spec = models.Spec(shapes.find("tiny"))
    made = worker.Worker("x", spec, 1, command=("-c", child), deadline=every.deadline)
    print(made._process.pid, flush=True)
    try:
        made.read([1])
    finally:
        made.close()

on_cpu.PARTS = on_gpu.PARTS = (everything.Part("good", good), everything.Part("stays", stays))
from minikv.cli.main import app
app(["bench", "all", "--json", sys.argv[1], *sys.argv[2:]])
"""
"""A run whose second part waits for a process that works for ten minutes."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_has_written_and_leaves_no_process(
    number: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "ended.json"
    with subprocess.Popen(
        [sys.executable, "-c", _STAYS, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        child = next(int(line) for line in process.stdout if line.strip().isdigit())
        assert alive(child)
        process.send_signal(number)
        assert process.wait(30) == (130 if number == signal.SIGTERM else -number)
    for _ in range(100):
        if not alive(child):
            break
        time.sleep(0.1)
    assert not alive(child)
    made = json.loads(path.read_text())
    assert made["figures"] == {"one": 1}
    assert made["complete"] is False
    states = [part["state"] for part in made["parts"]]
    assert states == ["measured"]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be asked does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_worker_without_an_answer_in_time_is_killed() -> None:
    slow = (
        "import time; from minikv.cli.bench.worker import serve; "
        "serve(lambda message: 0 if message['do'] == 'make' else time.sleep(600))"
    )
    clock = Time()
    made = worker.Worker(
        "slow", models.Spec(TINY), 1, command=("-c", slow), deadline=Deadline(60, now=clock)
    )
    clock.at = 59.8
    with pytest.raises(Late, match="slow had no answer"):
        made.write(1)
    assert not made.alive
    made.close()


# -- the machine ----------------------------------------------------------------------------


def test_rates_of_a_cpu() -> None:
    threads = torch.get_num_threads()
    rates = machine.measure(CPU)
    assert torch.get_num_threads() == threads
    assert rates.read_1 is not None
    assert rates.read >= rates.read_1
    assert machine.attention_rate(CPU, torch.float32, 4, 2, 16, 64, rounds=1) > 0


def test_a_record_is_written_after_an_error_in_the_table(tmp_path: Path) -> None:
    terminal = command.Terminal(quiet=True)
    terminal.out = io.StringIO()
    record = command.Record(["minikv", "bench"], terminal, str(tmp_path / "x.json"))
    record.tables.append("one")
    record.show()
    record.show()
    record.made["rows"] = []
    record.finish(complete=True)
    assert terminal.out.getvalue() == "one\n\n"  # once
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "command": "minikv bench",
        "complete": True,
        "rows": [],
    }


def test_what_needs_no_torch_is_refused_without_it() -> None:
    with pytest.raises(UsageError):
        Asked(policy="full,nothing").choices()
    only = Asked(policy="full").choices()
    assert [eviction.policy for eviction in only] == ["full"]
    twice = Asked(policy="adakv,adakv", budget="64,64,128").choices()
    assert [str(eviction.budget) for eviction in twice[1:]] == ["64", "128"]
