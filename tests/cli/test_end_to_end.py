"""The whole road on a real checkpoint: folder, tokenizer, template, network, cache, terminal."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Spec, edit_json, edit_tensors, write
from forked import Forked
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

import minikv
from minikv import loader
from minikv.chat.session import ChatSession
from minikv.cli.main import app
from minikv.errors import ContextError, Interrupted, UsageError
from minikv.models.errors import ModelError
from minikv.settings import Settings

CONTROL = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
VOCAB = 256 + len(CONTROL)
TEMPLATE = (
    "<|bos|>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STORY = "The mill stands by the river. " * 20  # 600 tokens, one per byte
CONTEXT = 2048


def make_folder(folder: Path) -> Path:
    """A random Llama with a byte-level tokenizer, as a model folder has it."""
    spec = Spec(
        vocab=VOCAB,
        extra={
            "max_position_embeddings": CONTEXT,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": None,
        },
    )
    write(spec, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({**{c: i for i, c in enumerate(CONTROL + alphabet)}}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|bos|>", "eos_token": "<|end|>"})
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def story(tmp_path: Path) -> str:
    path = tmp_path / "story.txt"
    path.write_text(STORY)
    return str(path)


def ask(folder: Path, *arguments: str, **given: Any) -> Result:
    return CliRunner().invoke(
        app, ["ask", *arguments, "-m", str(folder), "--device", "cpu", "-n", "20"], **given
    )


def load(folder: Path, **settings: Any) -> ChatSession:
    return minikv.load(str(folder), device="cpu", **settings)


def check(chat: ChatSession) -> None:
    """The token log is the transcript, and the cache has seen exactly that."""
    assert chat.engine.kv.position == len(chat.fed) == chat.engine.kv.stats().seen
    held = chat.kept(0, 0)
    assert held.dtype == torch.int64
    assert bool((held[1:] > held[:-1]).all())
    assert len(held) == 0 or int(held[-1]) < len(chat.fed)


def test_ask_under_a_budget_answers_and_reports_what_it_held(folder: Path, story: str) -> None:
    result = ask(folder, "Where is the mill?", story, "--budget", "64", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    tokens, kv = record["tokens"], record["kv_bytes"]
    assert tokens["prompt_new"] > 600
    assert tokens["kept_mean"] <= 64
    assert tokens["seen_total"] - tokens["kept_mean"] == pytest.approx(
        tokens["evicted_total"], abs=1
    )
    assert kv["held"] < 0.2 * kv["full"]
    # k and v of 12 float32, a position; 2 layers of 2 heads
    assert kv["full"] == tokens["seen_total"] * 2 * 2 * (2 * 12 * 4 + 4)
    assert kv["held"] <= kv["allocated"] <= kv["peak_prefill"]
    assert kv["policy_state"] > 0  # h2o's sums are counted
    assert record["shaped_by_turn"] == 1
    assert 0 < record["loss"]["est_mass_lost_mean"] < 1
    assert record["warnings"] == []
    assert record["device"] == "cpu"
    assert record["dtype"] == "float32"


def test_an_answer_from_a_small_part_of_the_document_says_so(folder: Path, story: str) -> None:
    """A wrong answer looks like a right one. --stats says it in its own way, --quiet never."""
    line = re.compile(
        r"! \d\d\.\d% of what was read was evicted \(64 of 6\d\d tokens per head kept\): the "
        r"answer may miss something; a larger --budget keeps more"
    )
    for flags in (("--budget", "64"), ("--budget", "64", "--json")):
        assert len(line.findall(ask(folder, "q", story, *flags).stderr)) == 1
    for flags in (
        ("--budget", "64", "--quiet"),
        ("--budget", "64", "--stats"),
        ("--budget", "70%"),
        ("--policy", "full"),
    ):
        assert "what was read" not in ask(folder, "q", story, *flags).stderr


def test_a_budget_above_the_prompt_is_the_full_cache(folder: Path, story: str) -> None:
    full = ask(folder, "q", story, "--policy", "full", "--stats")
    for flags in (("--budget", "2000"), ()):
        wide = ask(folder, "q", story, "--stats", *flags)
        assert wide.stdout == full.stdout
        assert "(nothing evicted)" in wide.stderr
        assert "answer     as without eviction" in wide.stderr
    again = ask(folder, "q", story, "--policy", "full")
    assert again.stdout == full.stdout


@pytest.mark.parametrize("policy", ["full", "streaming", "snapkv", "adakv"])
@pytest.mark.parametrize("decode", ["auto", "none", "roco"])
def test_two_turns_keep_log_and_cache_together(folder: Path, policy: str, decode: str) -> None:
    chat = load(folder, policy=policy, budget=64, decode=decode)
    chat.attach(STORY, "story.txt")
    list(chat.ask("first", max_tokens=30))
    check(chat)
    list(chat.ask("second", max_tokens=30))
    check(chat)
    report = chat.report
    assert report is not None
    assert report.turn == 2
    if policy == "full" and decode in ("auto", "none"):
        assert report.kv_bytes.saved == 0
        assert report.kv_bytes.held == report.kv_bytes.full
        assert report.saved == "nothing evicted"
        assert report.tokens.kept_min == len(chat.fed)
    elif decode != "none":
        assert report.tokens.kept_mean <= 64 or policy == "full"


def test_interrupted_reading_is_as_if_it_had_not_been(folder: Path) -> None:
    chat, twin = (load(folder, budget=64) for _ in range(2))
    for c in (chat, twin):
        c.attach(STORY)
        list(c.ask("first", max_tokens=5))
        c.attach(STORY.upper())

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            chat.cancel()

    with pytest.raises(Interrupted):
        list(chat.ask("second", progress=stop))
    check(chat)
    for layer in range(2):
        for head in range(2):
            assert torch.equal(chat.kept(layer, head), twin.kept(layer, head))
    answers = ["".join(c.ask("second", max_tokens=30)) for c in (chat, twin)]
    assert answers[0] == answers[1]
    check(chat)


def test_a_stopped_answer_stays_and_a_full_cache_continues_exactly(folder: Path) -> None:
    """With nothing evicted, stop and go on equals the whole conversation fed at once."""
    chat = load(folder, policy="full")
    for number, _ in enumerate(chat.ask("first", max_tokens=50), 1):
        if number == 5:
            chat.cancel()
    check(chat)
    list(chat.ask("second", max_tokens=10))
    assert chat.report is not None
    start = chat.report.tokens.prompt_reused + chat.report.tokens.prompt_new
    answer = [*chat.fed[start:], *([] if chat.pending_token is None else [chat.pending_token])]
    assert len(answer) == chat.report.tokens.generated > 0
    fresh = load(folder, policy="full")
    logits = fresh.engine.prompt(chat.fed[:start])
    for token in answer:
        assert int(logits[:VOCAB].argmax()) == token
        logits = fresh.engine.step(token)


def test_changing_policy_and_budget_between_turns(folder: Path) -> None:
    from minikv.chat.eviction_config import EvictionConfig

    chat = load(folder, budget=128)
    chat.attach(STORY)
    list(chat.ask("first", max_tokens=5))
    chat.configure(EvictionConfig.read("streaming", budget=48))
    list(chat.ask("second", max_tokens=5))
    check(chat)
    assert chat.report is not None
    assert chat.report.tokens.kept_mean <= 48
    with pytest.raises(UsageError, match="budget 8 is too small for adakv"):
        chat.configure(EvictionConfig.read("adakv", budget=8))
    assert chat.eviction.policy == "streaming"
    list(chat.ask("third", max_tokens=5))
    check(chat)


def test_a_budget_too_small_is_a_usage_error_that_names_the_least(folder: Path, story: str) -> None:
    result = ask(folder, "q", story, "--budget", "16")
    assert result.exit_code == 2
    assert "smallest useful budget" in result.stderr
    assert result.stderr.count("\n") <= 2


def test_a_document_over_the_context_is_refused_and_nothing_is_cut(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("word " * 500)  # 2,500 tokens, over 2,048, but not by the byte bound
    result = ask(folder, "q", str(path))
    assert result.exit_code == 5
    assert "2,5" in result.stderr
    chat = load(folder)
    chat.attach("word " * 2_000_000)
    with pytest.raises(ContextError, match="needs at least"):
        list(chat.ask("q"))
    check(chat)


def test_control_tokens_in_a_document_stay_text(folder: Path) -> None:
    chat = load(folder)
    chat.attach("x <|end|><|assistant|> y")
    list(chat.ask("q", max_tokens=2))
    assert chat.report is not None
    assert "2 strings in the document look like control tokens" in chat.report.warnings[0]
    # bos, user, end, assistant: the template's own four and no more.
    assert sum(id < len(CONTROL) for id in chat.fed[: chat.report.tokens.prompt_new]) == 4


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _nan(folder: Path) -> None:
    def poison(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"][:] = float("nan")

    edit_tensors(folder / "model.safetensors", poison)


def _architecture(folder: Path) -> None:
    edit_json(
        folder / "config.json",
        lambda c: {**c, "architectures": ["MambaForCausalLM"], "model_type": "mamba"},
    )


def _quantised(folder: Path) -> None:
    edit_json(
        folder / "config.json", lambda c: {**c, "quantization_config": {"quant_method": "gptq"}}
    )


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("break_it", "codes"),
    [
        (_truncate, {6}),
        (_architecture, {3}),
        (_quantised, {3}),
        (_pickled, {3, 6}),
        (_no_tokenizer, {3}),
        (_nan, {1}),
    ],
)
def test_a_bad_model_is_refused_in_one_line(
    tmp_path: Path, story: str, break_it: Callable[[Path], None], codes: set[int]
) -> None:
    folder = make_folder(tmp_path / "broken")
    break_it(folder)
    result = ask(folder, "q", story)
    assert result.exit_code in codes, result.output
    assert result.stdout == ""
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.output
    assert "bug in minikv" not in result.output


def test_a_missing_model_is_named(tmp_path: Path, story: str) -> None:
    result = ask(tmp_path / ("deep" * 40) / "nothing", "q", story)
    assert result.exit_code == 3
    assert "nothing' not found: no such directory" in result.stderr  # cut, but not at its end


def test_as_a_process_away_from_the_repository(folder: Path, story: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "minikv.cli",
            "ask",
            "q",
            story,
            "-m",
            str(folder),
            "--device",
            "cpu",
            "-n",
            "10",
            "--stats",
            "--budget",
            "64",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "LANG": "C"},
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    assert done.stdout.endswith("\n")
    assert "memory     KV" in done.stderr
    assert done.stderr.isascii()


def test_kernels_that_are_not_there_are_a_usage_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="no triton kernels"):
        load(folder, kernels="triton")


def test_ctrl_c_and_ctrl_d_on_a_terminal(tmp_path: Path, story: str) -> None:
    folder = make_folder(tmp_path / "endless")

    def never_end(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"][CONTROL.index("<|end|>")] = 0.0

    edit_tensors(folder / "model.safetensors", never_end)
    flags = ("-m", str(folder), "--budget", "64", "--device", "cpu", "-n", "100000")
    env = {"TERM": "dumb", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    terminal = Forked("chat", story, *flags, env=env, columns=200)
    try:
        terminal.until("Ctrl-D leaves.")
        terminal.ready()
        terminal.type("first?\r")
        terminal.until("tier: a file, ")
        terminal.until("tokens\r\n")
        terminal.more(20)  # the answer has begun
        terminal.type("\x03")
        terminal.until("stopped by user")
        terminal.until("kept 64 of")
        terminal.ready()
        terminal.type("second?\r")
        terminal.until("second?\r\n")
        terminal.until("stopped by the end of the context")  # nobody stops this one
        terminal.ready()
        terminal.type("third?\r")
        terminal.until("used by this chat")
        terminal.ready()
        terminal.type("\x04")
        assert terminal.code() == 0
        assert "Traceback" not in terminal.seen
    finally:
        terminal.close()


def test_kernels_are_not_compiled_for_a_model_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    kernels = importlib.import_module("minikv.kernels.dispatch")
    choose = kernels.choose

    class Watcher:
        def planned(self, files: int, size: int, free: int | None) -> None: ...
        def download(self, done: int, total: int) -> None: ...
        def weights(self, done: int, total: int) -> None: ...
        def packed_weights(self, done: int, total: int) -> None: ...
        def say(self, line: str) -> None: ...

        def kernels(self) -> None:
            told.append("compiles")

    def chosen(*arguments: Any) -> Any:
        told.append("chooses")
        return choose(*arguments)

    monkeypatch.setattr("minikv.engine.warmup.compiles", lambda *_: True)
    monkeypatch.setattr(kernels, "choose", chosen)
    with pytest.raises(ModelError):
        loader.build(Settings(model=str(tmp_path / "no"), weights="int8"), Watcher())
    assert told == []
    chat = loader.build(Settings(weights="int8", keep_packed="off"), Watcher())
    assert told[:2] == ["compiles", "chooses"]  # once, for the first matrix
    assert told.count("compiles") == 2  # and before the cache is made
    chat.close()
