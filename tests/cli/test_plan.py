"""`minikv plan`: its figures against checkpoints counted by the tensor, and against real runs."""

from __future__ import annotations

import json
import re
import socket
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from checkpoints import Spec, write
from fakes import PADDED
from lettered import over
from llama_8b import LLAMA
from pairwise import pairwise
from refusals import failing, refused
from safetensors.torch import load_file
from small import network
from small_chat import reported
from tables import table
from typed import body, invoke, printed, screen

import minikv
from minikv.cache.plan import Plan, Setup, held_after, peak
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.fitting import Machine, likely
from minikv.chat.report import TurnReport, size
from minikv.chat.session import ChatSession
from minikv.cli.forecast import Forecast, Planner
from minikv.cli.plan import plan
from minikv.cli.screen.terminal import in_columns
from minikv.cli.settings.config import Config, Interface
from minikv.cli.settings.flags import Call, read_count
from minikv.errors import UsageError
from minikv.loader import shape_of
from minikv.models import BUNDLED
from minikv.models.config import ModelConfig
from minikv.models.errors import ModelError, ModelUnavailable
from minikv.policies import DEFAULT_PROMPT
from minikv.settings import Generation, Settings, settings_of

# Every kind of reading: nothing observed, the last queries, all queries, none; blocks; a decode
# policy that waits for attention, one that does not, one with wide columns, and none.
CASES = """
full/auto adakv/auto adakv/none snapkv/hashevict pyramidkv/scissorhands h2o/auto tova/auto
streaming/auto keydiff/none expected/auto nacl/h2o kvcrush/l2 snapkv+global/auto h2o+global/none
keydiff+global/none dropkv/none global-span/roco full/roco roco/auto/32 streaming/auto/32 h2o/auto/8
"""
SOME = "full/auto adakv/auto keydiff/none defensive+global/auto roco/auto/32"
"""A policy, a decode policy, and a stride if there is one."""


def run(model: str | None, tokens: str, **named: Any) -> str:
    """What `minikv plan` prints. named: settings, and arguments of `plan`."""
    terminal = screen()
    settings, known = {"model": model, "policy": ""}, {*settings_of(Settings), "options"}
    settings |= {name: named.pop(name) for name in [*named] if name in known}
    written = Generation(named.pop("max_tokens", 512))
    call = Call(terminal, Config())
    body(plan)(call, Settings(**settings), written, Interface(), tokens, **named)
    return printed(terminal)


def words(*given: Any, **named: Any) -> str:
    return " ".join(run(*given, **named).split())


def record(*given: Any, **named: Any) -> Any:
    return json.loads(run(*given, as_json=True, **named))


def altered(folder: Path, **values: Any) -> str:
    """A folder with the bundled model's config.json, but for these values."""
    raw = json.loads((BUNDLED / "config.json").read_text()) | values
    kept = {name: value for name, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return str(folder)


def of(model: str | None, tokens: int, policy: str = DEFAULT_PROMPT, **named: Any) -> Forecast:
    room = named.pop("room", None)
    planner = Planner(Settings(model=model, **named), room)
    return planner.forecast(tokens, [(policy, 0)])


# -- weights --------------------------------------------------------------------------------
def test_the_weights_of_the_bundled_model_are_counted_to_the_byte() -> None:
    made = of(None, 1000)
    tensors = load_file(BUNDLED / "model.safetensors")
    assert made.parameters == sum(t.numel() for t in tensors.values())
    assert made.weights == sum(t.nbytes for t in tensors.values())
    assert made.dtype == "float32"
    half = of(None, 1000, dtype="bfloat16")
    assert half.weights == made.weights // 2
    config = ModelConfig.from_folder(BUNDLED)
    numbers = 2 * config.layers * config.kv_heads * config.head_dim
    assert made.token_bytes - half.token_bytes == 2 * numbers


@pytest.mark.parametrize("form", ["int8", "int4", "int8+head", "int4+head"])
def test_packed_weights_are_counted_to_the_byte(form: str) -> None:
    layers, _, head = form.partition("+")
    told = f"bfloat16, the layers in {layers}{', the head in int8' if head else ''}\n"
    given = {"weights": form, "device": "cpu"}
    made, there = of(None, 1000, **given), minikv.load(**given, tier="none")
    assert made.weights == there.facts.weight_bytes
    assert made.kept == form == there.facts.form
    assert f"weights   {made.weights / 2**20:.1f} MiB in {told}" in run(None, "1000", **given)
    assert record(None, "1000", **given)["kept"] == form


def test_packed_weights_are_planned_where_they_run() -> None:
    for form, device, dtype, error, message in (
        ("int8+head", "cuda", "float32", ModelError, 'weights="int8+head"'),
        ("int4+head", "cpu", "float32", ModelError, 'weights="int4+head"'),
        ("int2+head", "cpu", "auto", UsageError, "`weights` must be one of"),
    ):
        given = {"weights": form, "device": device, "dtype": dtype, "memory": "24GiB"}
        caught = refused(re.escape(message), run, None, "1000", error=error, **given)
        assert caught.exit_code == 2


SPECS = [Spec(), Spec(tied=True), Spec(bias=True, mlp_bias=True), Spec(head_dim=10)]
SPECS += [Spec("mistral", window=64), Spec("mistral", head_dim=24), Spec("qwen2")]


@pytest.mark.parametrize("spec", [*SPECS, Spec("qwen2", tied=True)], ids=lambda spec: spec.name)
def test_random_models_are_counted(spec: Spec, tmp_path: Path) -> None:
    model = write(spec, tmp_path)
    counted = sum(p.numel() for p in model.parameters())  # a tied head is one parameter
    made = of(str(tmp_path), 100, dtype="bfloat16")
    assert made.parameters == counted
    assert made.weights == 2 * counted


# -- the cache, against real runs -----------------------------------------------------------
@cache
def chat_of(which: str) -> ChatSession:
    """Over the bundled model, or over a random network whose tokens are bytes."""
    if which == "bundled":
        return minikv.load(device="cpu", tier="none")
    windows = (None, 120, None, 40) if which == "sliding" else (None,) * 8
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 16, "hidden": 64, "mlp": 96, "vocab": PADDED}
    net = network(64, 1, windows=windows, max_context=2048, **sizes)
    return over(net, EvictionConfig.read("full"), reuse="once")


def planned_by(
    eviction: EvictionConfig, config: ModelConfig, tokens: int, kept: torch.dtype = torch.float32
) -> tuple[Plan, Setup]:
    """For an answer of five tokens."""
    shape = shape_of(config)
    ops = likely("auto", shape, torch.float32, gpu=False)
    machine = Machine(shape, torch.float32, kept, lambda _: 0, ops=ops)
    return machine.plan(eviction, tokens, 5)


def allocated(made: Plan, setup: Setup) -> int:
    """Bytes of the rows that the plan makes room for."""
    return sum(made.needed) * setup.rules.row_nbytes(setup.shape, setup.kv)


def asked(session: ChatSession, eviction: EvictionConfig, text: str, answer: int = 5) -> TurnReport:
    session.configure(eviction)
    session.reset()
    session.attach(text)
    list(session.ask("What is it?", max_tokens=answer))
    return reported(session)


def measured_and_planned(
    session: ChatSession, eviction: EvictionConfig, text: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of one turn: peak, allocated, held and full, as the turn record has them and as planned."""
    session.recall.kind = "none"  # with a tier in RAM the layer that is read is a part of that
    report, config = asked(session, eviction, text), config_of(session)
    tokens, kv_bytes = report.tokens, report.kv_bytes
    made, setup = planned_by(eviction, config, tokens.prompt_new)
    seen = session.engine.kv.position
    full = sum(min(seen, (window or 1 << 40) - 1) for window in config.windows)
    held = held_after(made, setup, len(session.fed) - tokens.prompt_new)
    whole = full * config.kv_heads * (2 * config.head_dim * 4 + 4)
    return (
        (kv_bytes.peak_prefill, kv_bytes.allocated, kv_bytes.held, kv_bytes.full),
        (peak(made, setup).reading, allocated(made, setup), held, whole),
    )


def config_of(session: ChatSession) -> ModelConfig:
    found: ModelConfig = session.engine.network.config
    return found


MILL = "The mill on the river is run by Ada, who came from Velgate. "


@pytest.mark.parametrize(
    ("which", "case"),
    [*(("bundled", case) for case in CASES.split()), *product(["deep", "sliding"], SOME.split())],
)
def test_the_planned_bytes_are_those_of_a_real_run(which: str, case: str) -> None:
    session = chat_of(which)
    policy, decode, *stride = case.split("/")
    for budget in ("72", "600"):  # below the prompt, and above it
        choice = EvictionConfig.read(policy, decode, budget, stride=int(*stride))  # or 0
        measured, planned = measured_and_planned(session, choice, MILL * 4)
        if which == "sliding":  # rows slide out of a window one by one: a bound
            assert measured[2] <= planned[2] <= 1.05 * measured[2]
            measured, planned = measured[:2] + measured[3:], planned[:2] + planned[3:]
        assert planned == measured


@pytest.mark.parametrize(
    ("which", "policy", "decode", "tier"),
    pairwise(
        ["bundled", "deep", "sliding"],
        ["kvzip", "kvzip+", "kvzip+uniform"],
        ["none", "roco", "h2o"],
        ["none", "file"],
    ),
)
def test_what_is_read_twice(which: str, policy: str, decode: str, tier: str) -> None:
    """The request is counted with more tokens than it has."""
    session, choice = chat_of(which), EvictionConfig.read(policy, decode, "72")
    session.recall.kind, session.reuse = tier, "once"
    report = asked(session, choice, MILL * 20)
    session.recall.kind = "none"
    made, setup = planned_by(choice, config_of(session), report.tokens.prompt_new)
    assert made.repeats
    assert peak(made, setup, in_file=True).reading < peak(made, setup).reading
    planned = peak(made, setup, in_file=tier == "file").reading
    assert report.kv_bytes.peak_prefill <= planned <= 1.05 * report.kv_bytes.peak_prefill
    assert report.kv_bytes.allocated <= peak(made, setup).writing


def test_the_plan_tells_what_is_read_twice() -> None:
    kvzip, keydiff = record(None, "2k", policy="kvzip,keydiff", budget="64")["rows"]
    assert 2000 < kvzip["again"] < 2100
    row = 3 * 2 * 64 * 4
    assert kvzip["reading"] > row * 2000 * 4 + row * kvzip["again"]  # the text is repeated at once
    assert (keydiff["again"], kvzip["file"]) == (0, 0)
    alone = {"policy": "kvzip", "budget": "64"}
    (file,) = record(None, "2k", tier="file", **alone)["rows"]
    assert file["file"] == row * 2000 * 4
    assert kvzip["reading"] - file["reading"] == row * 2000 * 2
    assert record(None, "2k", memory="24MiB", **alone)["rows"] == [file | {"fits": False}]
    assert "keys and values: 11.7 MiB in a file and " in words(None, "2k", tier="file", **alone)
    said = words(None, "2k", **alone)
    assert "kvzip reads 2,060 tokens more to score 2,000" in said
    assert "MiB of RAM" in said
    assert "tier" not in said
    assert "scoring" not in run(None, "2k", policy="keydiff", budget="64")
    repeats = "kvzip has the model repeat what it has read, and 2 of 8,192"
    assert repeats in words(None, "8190", **alone)


def test_a_context_without_room_for_a_second_pass_is_told_as_such() -> None:
    """In its row, as too few positions are; a larger budget would not help."""
    for tokens, told in (
        ("8150", "42 of 8,192 positions"),
        ("8192", "8,192 tokens leave no position for an answer"),
        ("9000", "9,000 tokens do not fit"),
    ):
        lines = run(None, tokens, policy="kvzip,kvzip+", budget="512").splitlines()
        said = next(line for line in lines if line.startswith("kvzip+"))
        assert told in said
        assert "budget" not in said
        rows = record(None, tokens, policy="kvzip", budget="512")["rows"]
        assert [row["suffices"] for row in rows] == [False]
    rows = record(None, "8150", policy="kvzip,keydiff", budget="512")["rows"]
    assert [row["suffices"] for row in rows] == [False, True]
    refused("too small", run, None, "2000", policy="kvzip", budget="4")


@pytest.mark.parametrize("budget", ["30%", "300KiB"])
def test_a_budget_of_bytes_or_percent_becomes_rows_as_in_a_run(budget: str) -> None:
    choice = EvictionConfig.read("adakv", "roco", budget)
    text = "The mill is run by Ada. " * 40
    measured, planned = measured_and_planned(chat_of("bundled"), choice, text)
    assert planned == measured
    assert measured[2] < measured[3]  # it did evict


# -- the command ----------------------------------------------------------------------------
def test_the_screen_has_what_the_json_has() -> None:
    given = {"budget": "256", "memory": "24GiB"}
    text, made = run(None, "2k", **given), record(None, "2k", **given)
    assert (made["tokens"], made["free"], made["suffices"]) == (2000, 24 << 30, True)
    by_name = {(row["policy"], row["stride"]): row for row in made["rows"]}
    full, ada = by_name["full", 0], by_name["global-span", 0]
    assert full["reading"] > ada["reading"] > ada["writing"] > ada["held"] > 0
    assert full["writing"] > made["full"]  # positions, and room for the answer
    assert by_name["roco", 32]["reading"] < ada["reading"]
    assert ada["rows"] == 256
    for row in made["rows"]:
        running = made["weights"] + made["workspace"] + max(row["reading"], row["writing"])
        assert row["needs"] == max(running, made["loading"])
        assert row["fits"] is True
    for line in ("2.46 M parameters", "9.4 MiB in float32", "8,192 positions, enough for 2,000"):
        assert line in text
    assert "roco --stride 32" in text
    for tokens, width in product(("2000", ""), (40, 80, 200)):
        text = in_columns(run(None, tokens, budget="512"), width)
        assert max(map(len, text.splitlines())) <= width


def test_the_tier_is_that_of_a_real_chat_and_a_later_question_reads_it() -> None:
    session = minikv.load(device="cpu", budget=128)
    asked(session, session.eviction, "The mill is run by Ada. " * 40, 4)
    tokens, tier = session.recall.tokens, session.recall.tier
    assert tier is not None
    given: dict[str, Any] = {"budget": "128", "memory": "1GiB"}
    made = record(None, str(tokens), **given)
    rows = [tier.rows.read(layer, tokens) for layer in range(tier.shape.layers)]
    assert made["tier"] == sum(column.nbytes for layer in rows for column in layer.values())
    assert made["tier_int8"] < 0.3 * made["tier"]  # of float32
    kept = f"{size(made['tier'])} (in int8 {size(made['tier_int8'])}) for {tokens:,}"
    assert f"tier {kept}, which a later question reads" in words(None, str(tokens), **given)
    # Where nothing is evicted, there is none.
    assert record(None, "8k", policy="full", memory="1GiB")["tier"] == 0
    assert "a later question" not in run(None, "8k", policy="full", memory="1GiB")
    auto = record(None, "8k", memory="1GiB")
    assert auto["tier"] == 0
    assert {row["rows"] for row in auto["rows"]} == {None}


@pytest.mark.parametrize("dtype", ["same", "int8"])
def test_what_is_needed_counts_a_tier_in_ram(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In RAM it takes the cache's memory: all but the layer that is read in it, if it is exact."""
    monkeypatch.setattr("minikv.models.weights.loading_bytes", lambda *_: 0)
    config = config_of(chat_of("bundled"))
    row = 2 * config.kv_heads * (config.head_dim * 4 if dtype == "same" else config.head_dim + 2)
    layers = config.layers - (dtype == "same")
    given: dict[str, Any] = {"budget": "128", "tier_dtype": dtype, "memory": "1GiB"}
    needs = {}
    for tier in ("none", "auto", "file", "ram"):
        made = record(None, "4k", device="cpu", tier=tier, **given)
        needs[tier] = {(one["policy"], one["stride"]): one["needs"] for one in made["rows"]}
    assert needs["auto"] == needs["file"] == needs["none"]
    more = {case: needs["ram"][case] - needs["none"][case] for case in needs["ram"]}
    assert more.pop(("full", 0)) == 0
    tiers = {case: bytes for case, bytes in more.items() if bytes}
    assert ("global-span", 0) in tiers
    assert set(tiers.values()) == {4000 * row * layers}
    cuda = [record(None, "4k", device="cuda", tier=tier, **given) for tier in ("none", "ram")]
    assert cuda[0]["rows"] == cuda[1]["rows"]


def test_what_does_not_fit_is_told_apart_from_too_few_positions() -> None:
    fits = {row["policy"]: row["fits"] for row in record(None, "4k", memory="20MiB")["rows"]}
    assert fits["full"] is False
    text = run(None, "9000", budget="512")
    assert "8,192 positions, too few for 9,000 tokens" in text
    assert text.count("no, context") == 7
    assert [record(None, n)["suffices"] for n in ("8191", "8192")] == [True, False]
    assert "plan      read 8,100 tokens, write 92; budget" in run(None, "8100", budget="512")
    # A policy of the selection that the budget is too small for says so.
    text = run(None, "2000", budget="16")
    assert "is too small for snapkv" in text
    assert "the smallest useful budget here is" in words(None, "2000", budget="16")
    assert "streaming" in text
    refused("too small", run, None, "2000", policy="snapkv", budget="16")


# -- without --tokens, and what is suggested ------------------------------------------------
@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def test_without_tokens_the_plan_is_for_several_lengths(llama: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"memory": "24GiB", "device": "cpu"}
    text = run(llama, "", **given)
    assert "8.03 B parameters" in text
    assert "weights   15.0 GiB in bfloat16" in text
    assert "plan      read 4,000, 16,000 or 130,560 tokens, write 512; budget auto" in text
    heads = [line for line in text.splitlines() if re.match(r"[\d,]+ tokens( \(|$)", line)]
    assert heads == ["4,000 tokens", "16,000 tokens", "130,560 tokens (the whole context)"]
    # What is suggested for two lengths.
    assert " ".join(text.split()).count("nothing is evicted") == 2
    assert text.count("roco --stride 32") == 1
    made = record(llama, "", **given)["lengths"]
    assert [one["tokens"] for one in made] == [4000, 16_000, 130_560]
    for one in made[::2]:  # each is what it is alone
        alone = record(llama, str(one["tokens"]), **given)["rows"]
        rows = {row["policy"]: row for row in alone if row["policy"] != "roco"}
        assert all(row == rows[row["policy"]] for row in one["rows"] if row["policy"] in rows)
    short = altered(tmp_path, max_position_embeddings=2048)
    for model, lengths in ((None, [4000, 8192 - 512]), (short, [2048 - 512])):
        made = record(model, "", memory="24GiB")["lengths"]
        assert [one["tokens"] for one in made] == lengths
        assert made[-1]["suffices"] is True


@table("""
    memory | tokens | device | kept                                            | flags
    80GiB  | 16k    | cpu    | all of it fits: nothing is evicted              |
    16GiB  | 16k    | cpu    | 2,200 tokens per head fit: 13% of what is read  |
    12GiB  | 16k    | cpu    | 10,000 tokens per head fit: 62% of what is read | --weights int8
    8GiB   | 100k   | cpu    | 3,400 tokens per head fit: 3% of what is read   | --weights int4
    6.3GiB | 100k   | cpu    | of what is read | --weights int4+head --policy roco --stride 32
    12GiB  | 4k     | cuda   | nothing is evicted                              | --weights int8
    8GiB   | 4k     | cuda   |                                                 | --weights int4
""")
def test_what_is_suggested_fits(
    llama: str, memory: str, tokens: str, device: str, kept: str, flags: str
) -> None:
    settings = {"memory": memory, "device": device}
    made = record(llama, tokens, **settings)
    hint, flags = made["suggestion"], f"--device {device} {flags}".strip()
    assert (hint["fits"], hint["flags"]) == (True, flags)
    text = words(llama, tokens, **settings)
    assert f"tokens: minikv chat -m {llama} {flags} FILE (needs " in text
    assert f"{kept})" in text
    assert "do not fit" not in text
    # Planned for itself, it needs what was said.
    named = flags.split()
    given = dict(zip((word.removeprefix("--") for word in named[::2]), named[1::2], strict=True))
    given.setdefault("policy", DEFAULT_PROMPT)
    stride = int(given.pop("stride", 0))
    (row,) = record(llama, tokens, stride=stride, **settings | given)["rows"]
    assert row["fits"] is True
    assert (row["needs"], row["rows"]) == (hint["needs"], hint["rows"])
    assert hint["needs"] < hint["free"]


def test_what_cannot_be_helped_is_said(llama: str, tmp_path: Path) -> None:
    text = words(llama, "100k", memory="4GiB", device="cpu")
    assert "100,000 tokens do not fit: --device cpu --weights int4+head --policy roco" in text
    assert "still needs " in text
    # Weights that the user did not ask for are not suggested.
    hint = record(llama, "4k", memory="6GiB", weights="int8")["suggestion"]
    assert (hint["fits"], hint["flags"]) == (False, "--weights int8 --policy roco --stride 32")
    # Nor anything for a document that the model cannot read at all.
    assert record(llama, "200k", memory="4GiB")["suggestion"] is None
    assert "minikv chat" not in run(llama, "200k", memory="80GiB")
    # A model whose name has blanks is quoted.
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert f"-m '{folder}' " in words(str(folder), "4k", memory="80GiB")


def test_policies_decode_and_options_are_the_users() -> None:
    def rows(**given: Any) -> Any:
        return record(None, "2000", **given)["rows"]

    made = [(row["policy"], row["decode"]) for row in rows(policy="snapkv, h2o", decode="none")]
    assert made == [("snapkv", "none"), ("h2o", "none")]
    one, two = (rows(policy="roco", budget="512", stride=n)[0] for n in (64, 128))
    assert one["stride"] == 64
    assert two["reading"] > one["reading"]
    ada = {"policy": "adakv", "budget": "600"}
    wide = rows(decode="scissorhands", options={"window": "512"}, **ada)[0]
    assert wide["writing"] > 1.1 * rows(decode="none", max_tokens=1, **ada)[0]["writing"]


DTYPES = "auto, float32, bfloat16, float16"


@pytest.mark.parametrize(
    ("tokens", "given", "message"),
    [
        ("lots", {}, "cannot read the number of tokens 'lots'"),
        *((tokens, {}, "cannot read") for tokens in ("0", "-5", "1.5", "10000M")),
        ("5", {"policy": "adakb"}, "unknown policy 'adakb'"),
        ("5", {"policy": "adakv", "stride": 32}, "cannot read a prompt in blocks"),
        ("5", {"budget": "lots"}, "the budget cannot be"),
        ("5", {"dtype": "int3"}, f"`dtype` must be one of {DTYPES}, got 'int3'"),
        ("5", {"device": "tpu"}, "unknown device 'tpu'"),
        ("5", {"device": "cuda:99"}, "no CUDA device for 'cuda:99'"),
        ("5", {"memory": "512"}, "'512' is not a size"),
        ("5", {"memory": "much"}, "is not a size"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(tokens: str, given: dict[str, Any], message: str) -> None:
    refused(message, run, None, tokens, **given)


def test_numbers_of_tokens() -> None:
    numbers = {"100k": 100_000, "32Ki": 32_768, "1.5M": 1_500_000, "8,192": 8192, "1Mi": 1 << 20}
    numbers |= {"12_000": 12_000, " 7 ": 7, "128K": 128_000}
    assert {text: read_count(text, "--tokens") for text in numbers} == numbers


# -- where the configuration comes from -----------------------------------------------------
def test_only_the_configuration_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a hub with an empty cache; a cached one needs no network, and some repositories have
    none."""
    cached, names, asked = "", ["config.json"], list[tuple[str, str, str | None]]()

    def info(repo: str, revision: str | None = None) -> SimpleNamespace:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

    def download(repo: str, name: str, revision: str | None = None) -> str:
        asked.append((repo, name, revision))
        return str(BUNDLED / "config.json")

    for name, act in {
        "HfApi": lambda: SimpleNamespace(model_info=info),
        "hf_hub_download": download,
        "try_to_load_from_cache": lambda repo, name, revision=None: cached or None,
    }.items():
        monkeypatch.setattr(huggingface_hub, name, act)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    refused("offline", run, "owner/model", "1000", offline=True, error=ModelUnavailable)
    cached = str(BUNDLED / "config.json")
    assert "owner/model" in run("owner/model", "1000", offline=True)
    assert asked == []
    cached = ""
    assert "2.46 M parameters" in run("owner/model", "1000", revision="abc")
    assert asked == [("owner/model", "config.json", "abc")]
    for there, message in (
        (["README.md", "model.Q4_K_M.gguf"], "in 1 GGUF files, such as 'model.Q4_K_M.gguf'"),
        (["README.md"], "has no config.json"),
        ([], "has no config.json"),
    ):
        names[:] = there
        error = refused(message, run, "owner/model", "1000", error=ModelError)
        assert error.exit_code == 3
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused("offline", run, "owner/model", "1000", error=ModelUnavailable)
    assert len(asked) == 1


def test_without_a_network_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library logs each of its attempts, and makes six."""
    unknown = failing(socket.gaierror(-2, "Name or service not known"))
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, unknown)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    done = invoke("plan", "-m", "owner/no-such-model-here", "--tokens", "1k")
    assert (done.exit_code, done.stdout) == (3, "")
    first, *rest = (done.stderr + "".join(capfd.readouterr())).splitlines()
    assert first.startswith("error: owner/no-such-model-here: ")
    assert [line for line in rest if not line.startswith("  check the network")] == []


def test_the_number_format_is_the_checkpoints(tmp_path: Path) -> None:
    for said, expected in (("bfloat16", "bfloat16"), ("float16", "float32")):
        made = of(altered(tmp_path, torch_dtype=said), 100, device="cpu")
        assert made.dtype == expected  # float16 is computed in float32 on a CPU
    there = of(str(tmp_path), 100, device="cuda", room=24 << 30)
    assert (there.dtype, there.memory) == ("float16", "as given")  # no such device is needed here
    made = of(altered(tmp_path, torch_dtype=None), 100)
    assert made.dtype == "bfloat16"
    assert "bfloat16 is assumed" in made.notes[-1]


def test_codes_are_planned_as_they_are_kept() -> None:
    """With --kv int8 a row takes less, a budget of bytes is more rows, and a real run agrees."""
    session = minikv.load(device="cpu", kv="int8", tier="none")
    for budget, rows in (("72", (72, 72)), ("600KiB", None)):
        choice = EvictionConfig.read("adakv", "roco", budget)
        report = asked(session, choice, MILL * 20)
        prompt, config = report.tokens.prompt_new, config_of(session)
        coded, wide = (planned_by(choice, config, prompt, *kept) for kept in ((torch.int8,), ()))
        held = report.kv_bytes.allocated
        assert held == allocated(*coded) < allocated(*wide) * 1.1
        assert report.kv_bytes.peak_prefill <= peak(*coded).reading
        made = coded[0].rows, wide[0].rows
        assert made == rows if rows else made[0] > 2 * made[1]  # type: ignore[operator]
