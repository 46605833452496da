"""`minikv bench`: what is measured, on what, beside what, and how it is said."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import table
from typed import fails, invoke

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.asked import Bench
from minikv.cli.bench import networks, speed
from minikv.cli.bench.speed import Cached, Transformers
from minikv.cli.main import _resume_alone
from minikv.cli.measure import STDOUT, Results
from minikv.cli.screen import terminal as screen
from minikv.cli.screen.terminal import Terminal
from minikv.models.linear import lacks
from minikv.models.tensors import tensors_of
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Settings


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_READ", 1 << 20)
    monkeypatch.setattr(networks, "bandwidth", lambda device: networks.read_rate(1 << 20, 1))


# -- steps and prompts of several speed, in turns, beside floors computed ------------------
TINY = networks.find("TINY")


def measured(
    policy: str = "snapkv", kv: str = "auto", weights: str = "auto", **flags: Any
) -> dict[str, Any]:
    """The record of a run."""
    terminal = Terminal(quiet=True)
    terminal.out = io.StringIO()
    given = {"question": "decode", "length": "64", "repeat": 1, "steps": 2, "peer": False} | flags
    asked = Bench(shape="tiny", as_json=STDOUT, **given)
    settings = Settings(policy=policy, budget="64", kv=kv, weights=weights, device="cpu")
    speed.measure(asked, settings, terminal, [])
    made: dict[str, Any] = json.loads(terminal.out.getvalue())
    return made


def test_systems_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = Cached.write

    def noted(self: Cached, steps: int) -> float:
        order.append(f"{self.name} {steps}")
        return write(self, steps)

    monkeypatch.setattr(Cached, "write", noted)
    measured(repeat=2, steps=4)
    # Three steps come before those that count.
    turn = ["full 3", "full 4", "snapkv+h2o 64 3", "snapkv+h2o 64 4"]
    assert order == ["full 3", "snapkv+h2o 64 3", *turn, *turn]


@pytest.mark.parametrize("seen", [[3e9, 2e9], [2e10, 4e10]])
def test_rows_of_steps(seen: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is slower than before the run, and faster: the floor is that of the fastest."""
    rates = iter(seen * 2)
    monkeypatch.setattr(networks, "bandwidth", lambda device: 1e10)
    monkeypatch.setattr(networks, "read_rate", lambda size, rounds: next(rates))
    full, evicting = measured(length="128", repeat=2)["rows"]
    assert [full["policy"], evicting["policy"]] == ["full", "snapkv"]
    assert (full["vs_full"], full["budget"], full["vs_transformers"]) == (1.0, "-", None)
    assert evicting["vs_full"] == pytest.approx(full["seconds"] / evicting["seconds"])
    assert evicting["kv_bytes"]["kept_mean"] == 64
    # The prompt and three steps of the warm-up; 2 layers of 2 heads, keys and values of 16.
    assert full["step_bytes"]["kv"] == (128 + 3) * 2 * 2 * 2 * 16 * 2
    for row in (full, evicting):
        assert len(row["times"]) == 2
        assert row["kv_bytes"]["full"] == 128 * 2 * 2 * (2 * 16 * 2 + 4)
        assert row["step_bytes"]["weights"] == 2 * (TINY.parameters - TINY.vocab * TINY.hidden)
        assert row["read_bytes_s"] == max(1e10, *seen)
        assert row["floor_s"] == sum(row["step_bytes"].values()) / row["read_bytes_s"]
        assert row["tok_s"] == 1 / row["seconds"]


def test_rows_of_prompts_and_of_int8_weights_and_cache() -> None:
    full, evicting = measured(question="prefill", policy="streaming", length="600")["rows"]
    assert full["tok_s"] == pytest.approx(600 / full["seconds"])
    assert evicting["kv_bytes"]["kept_mean"] == 64
    assert full["floor_s"] is full["captured"] is None
    if lacks("int8"):
        pytest.skip("no int8 kernel here")
    plain, small = (measured("full", "int8", form)["rows"][0] for form in ("auto", "int8"))
    assert (plain["name"], small["name"]) == ("full kv int8", "full int8 kv int8")
    # A byte a weight in the layers' matrices, with a scale a row; the head stays as it is.
    numbers = 2 * TINY.hidden * (2 * 64 + 2 * 32 + 3 * TINY.mlp)
    assert small["step_bytes"]["weights"] < plain["step_bytes"]["weights"] - numbers // 2
    assert small["step_bytes"]["kv"] == (64 + 3) * 4 * 2 * (16 + 4)  # 16 codes and a scale, twice


def test_a_peer_that_fails_costs_only_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(speed.Transformers):
        def __init__(self, *arguments: object) -> None: ...

        def read(self, ids: list[int], room: int = 0) -> float:
            if len(ids) == 128:
                raise RuntimeError("no such head")
            return 1.0

        def write(self, steps: int) -> float:
            return 1.0

    monkeypatch.setattr(speed, "Transformers", Fails)
    made = measured(policy="full", length="128,64", peer=True)
    names = [(row["length"], row["system"]) for row in made["rows"]]
    assert names == [(128, "minikv"), (64, "minikv"), (64, "transformers")]
    assert made["notes"] == ["decode 128: beginning, transformers: no such head"]
    assert made["rows"][1]["vs_transformers"] == 1 / made["rows"][1]["seconds"]


# -- random networks, minikv as a system that is measured, and transformers ------------------
FULL = EvictionConfig.read("full", "none")


def test_random_weights_are_finite_and_no_heads_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is smaller than a matrix fills it."""
    net = networks.network(networks.Spec(TINY, dtype="float32"))
    for name, tensor in tensors_of(net):
        assert bool(tensor.isfinite().all())
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all())
        else:
            assert 0.015 < float(tensor.std()) < 0.025
    named = dict(tensors_of(net))
    first, second = (named[f"model.layers.{i}.self_attn.q_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first[:16], first[16:32])
    monkeypatch.setattr(networks, "_BLOCK", 97)
    net = networks.plain(networks.Spec(TINY, dtype="float32"))
    flat = dict(tensors_of(net))["lm_head.weight"].view(-1)
    assert torch.equal(flat[:97], flat[97:194])
    assert torch.equal(flat[: len(flat) % 97], flat[-(len(flat) % 97) :])
    assert bool((flat != 0).any())
    # The bytes of a step leave the input embedding out unless it is the head.
    net = networks.network(networks.Spec(TINY))
    assert net.weight_bytes == 2 * TINY.parameters
    assert networks.step_bytes(net) == 2 * (TINY.parameters - TINY.vocab * TINY.hidden)
    tied = replace(TINY, tied=True)
    net = networks.network(networks.Spec(tied))
    assert networks.step_bytes(net) == net.weight_bytes == 2 * tied.parameters


def test_no_step_is_launched_beyond_those_that_are_timed() -> None:
    cached, asked = Cached(networks.network(networks.Spec(TINY)), FULL), list[bool]()
    cached.read(networks.prompt(16, TINY.vocab))
    step = cached.engine.next

    def noted(*args: object, ahead: bool) -> int:
        asked.append(ahead)
        return step(*args, ahead=ahead)  # type: ignore[arg-type]

    cached.engine.next = noted  # type: ignore[method-assign]
    cached.write(3)
    assert asked == [True, True, False]
    assert cached.engine.kv.position == 16 + 3


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not there")
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_with_the_same_weights(tied: bool) -> None:
    spec = networks.Spec(replace(TINY, tied=tied), dtype="float32")
    theirs, ours = Transformers(spec), Cached(networks.network(spec), FULL)
    ids = networks.prompt(70, TINY.vocab)
    with torch.inference_mode():
        logits = theirs.model(torch.tensor([ids])).logits[0, -1]
    assert torch.allclose(ours.engine.prompt(ids), logits, atol=1e-5)
    for system in (theirs, ours):
        system.read(ids)
        system.write(3)
    assert theirs._cache.get_seq_length() == 73
    assert ours._token == int(theirs._token)  # greedy both


# -- `minikv bench` --------------------------------------------------------------------------
FLAGS = ("--shape", "tiny", "--budget", "64", "--repeat", "1")


bench = partial(invoke, "bench")


@table("""
    flags                                            | says
    kernels                                          | 'kernels'
    decode --shape lama-3-8b                         | did you mean llama-3-8b?
    decode --policy snapkw                           | snapkw
    decode --policy ,                                | --policy names nothing
    decode --decode snapkv                           | snapkv
    decode -o depth=16                               | has an option
    prefill --length 63                              | --length must be 64 to
    prefill --length long                            | number of tokens
    decode --length 0                                | for example --length 8192
    decode --budget many                             | budget
    decode --repeat 0                                | --repeat must be 1 to
    decode --steps -3                                | --steps must be 0 to
    decode --threads 4000                            | --threads must be 1 to
    decode --device tpu                              | unknown device
    decode --device cuda:99                          | no CUDA device
    decode --kv int4                                 | --kv
    prefill --kernels triton --device cpu            | CUDA
    decode --json /nowhere/x.json                    | there is no directory
    decode --json /                                  | is a directory
    decode --weights int3 --shape tiny               | int3
    decode --shape tiny --budget 2 --no-peer         | smallest useful budget
""")
def test_bad_input_is_one_line_and_exit_code_2(flags: str, says: str) -> None:
    fails(bench(*flags.split()), 2, says)


def test_all_is_steps_and_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tables have at most 80 columns, and the file has what they show; --json alone means
    stdout."""
    assert _resume_alone(["bench", "decode", "--json"]) == ["bench", "decode", "--json=-"]
    for kind in ("decode", "prefill", "all"):
        assert _resume_alone(["bench", "--json", kind]) == ["bench", "--json=-", kind]
    named = ["bench", "decode", "--json", "out.json"]
    assert _resume_alone(named) == named
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
    policies = ("full", DEFAULT_PROMPT)
    assert made["wanted"] == {"shape": "s", "dtype": "bfloat16", "repeat": 1, "steps": 2}
    kinds = [(row["kind"], row["length"], row["policy"]) for row in made["rows"]]
    assert kinds == [*product(("decode", "prefill"), (64, 80), policies)]
    lines = out.stdout.splitlines()
    assert lines[0].startswith("s on ")
    assert "medians of 1 round in turns; 2 steps a decode round; bfloat16" in lines
    begin = lines.index("prefill, 80 tokens")
    assert all(line.startswith(p) for line, p in zip(lines[begin + 2 :], policies, strict=False))
    assert max(map(len, lines[1:])) <= 80


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (MemoryError, 4)])
def test_what_was_measured_is_shown_when_a_run_ends_early(
    error: type[BaseException], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = speed.Cached.read

    def stops(self: speed.Cached, ids: list[int], room: int = 256) -> float:
        if len(ids) == 64:
            raise error
        return read(self, ids, room)

    monkeypatch.setattr(speed.Cached, "read", stops)
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


def test_weights_that_do_not_fit_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "free_memory", lambda device: 3 << 30)
    monkeypatch.setattr(networks, "Llama", lambda *a, **k: pytest.fail("made"))
    out = bench("decode", "--shape", "llama-3-8b", "--no-peer")
    fails(out, 4, "need 15.0 GiB, and 3.0 GiB are free")


def test_no_number_of_a_table_is_cut_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    terminal.out = io.StringIO()
    monkeypatch.setattr(screen, "_is_tty", lambda stream: stream is terminal.out)
    monkeypatch.setattr(screen, "window", lambda stream: (50, 24))
    Results(terminal, None, {}).show("adakv" + "  100.0%" * 9)
    shown = terminal.out.getvalue()
    assert max(map(len, shown.split("\n"))) <= 50
    assert shown.split() == ["adakv"] + ["100.0%"] * 9
