"""A real model, SmolLM2-135M-Instruct in Q4_1. `.ci/nightly` fetches the file that $SMOLLM2 names.

By day its tokenizer's beginning (tests/data/smollm.json) and files of random numbers stand in.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import ggufs
import numpy as np
import pytest
import regex
import torch
from gguf import GGUFReader, quants
from typer.testing import CliRunner

import minikv
from minikv import models
from minikv.cache.attend import DenseAttend
from minikv.cli.main import app
from minikv.models.gguf import Gguf
from minikv.models.stream import byte_level_alphabet
from minikv.models.templates import Message
from minikv.policies import registry

pytestmark = pytest.mark.soak
QUESTION = "What is the capital of France?"
TEXT = Path(__file__).parents[2] / "LICENSE"
GPT_2 = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def path() -> Path:
    return Path(os.environ["SMOLLM2"])


def llama_cpp(path: Path, **settings: Any) -> Any:
    """The file in llama.cpp; the test is skipped where it is not installed."""
    program = pytest.importorskip("llama_cpp")
    return program.Llama(str(path), verbose=False, **settings)


def texts() -> list[str]:
    kept = json.loads((Path(__file__).parents[1] / "data/smollm.json").read_text("utf-8"))
    return [text for text, _ in kept["cases"]]


def test_ids_are_those_of_a_loop_over_the_merges(path: Path) -> None:
    """Of 1,000 texts, cut by Python's `regex`."""
    file = Gguf(path)
    ours, said = file.tokenizer(file.config()), file.metadata
    ids = {piece: id for id, piece in enumerate(said["tokenizer.ggml.tokens"])}
    ranks = {tuple(m.split(" ")): n for n, m in enumerate(said["tokenizer.ggml.merges"])}
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}

    def encoded(word: str) -> list[int]:
        parts = [letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = [ranks.get(pair, len(ranks)) for pair in pairwise(parts)]
            at = pairs.index(min(pairs))
            if pairs[at] == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [ids[part] for part in parts if part in ids]  # it lacks some bytes

    assert len(texts()) == 1000
    for text in texts():
        # A digit is cut off before all else, so a space before it is alone.
        cut = [part for one in regex.split(r"(\p{N})", text) for part in regex.findall(GPT_2, one)]
        assert ours.encode(text) == [id for word in cut for id in encoded(word)], text


def test_ids_are_those_of_llama_cpp(path: Path) -> None:
    file, theirs = Gguf(path), llama_cpp(path, vocab_only=True)
    ours = file.tokenizer(file.config())
    for text in texts():
        want = theirs.tokenize(text.encode(), add_bos=False, special=False)
        assert ours.encode(text) == want, text


@torch.inference_mode()
def logits(path: Path, **settings: Any) -> tuple[list[int], torch.Tensor]:
    """The ids of the question, and our logits after each."""
    loaded = models.load(path, **settings)
    ids, net = loaded.template.opening([Message("user", QUESTION)]), loaded.network
    found = net.logits(net.hidden(torch.tensor(ids), DenseAttend(net.config.windows)))
    return ids, found


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@torch.inference_mode()
def test_logits_are_those_of_transformers(path: Path) -> None:
    """In float32 on the numbers that the package `gguf` reads. In four bits, what the scales are
    rounded by is left: less than llama.cpp loses by activations of eight bits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names = {own: name for name, own in ggufs.NAMES.items()} | {"ffn_up": "mlp.up_proj"}
    state = {}
    for tensor in GGUFReader(path).tensors:
        value = quants.dequantize(tensor.data, tensor.tensor_type)
        _, _, rest = tensor.name.rpartition("blk.")
        layer, _, own = rest.partition(".") if rest != tensor.name else ("", "", tensor.name)
        if own in ("attn_q.weight", "attn_k.weight"):
            value = value.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
        stem = names[own.removesuffix(".weight")]
        state[f"model.layers.{layer}.{stem}.weight" if layer else f"{stem}.weight"] = value
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    rope = {"rope_type": "default", "rope_theta": 1e5}
    made = LlamaConfig(**sizes, rope_parameters=rope, rms_norm_eps=1e-5, tie_word_embeddings=True)
    net = LlamaForCausalLM(made).eval()
    net.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in state.items()}, strict=False)
    ids, plain = logits(path, weights="plain", dtype="float32")
    want = net(torch.tensor(ids)[None]).logits[0].float()
    assert off(plain, want) <= 1e-5
    _, kept = logits(path)
    assert off(kept, want) <= 0.05
    assert {*kept[-1].topk(3).indices.tolist()} == {*want[-1].topk(3).indices.tolist()}


def test_logits_are_those_of_llama_cpp(path: Path) -> None:
    """Which rounds activations to eight bits."""
    theirs = llama_cpp(path, n_ctx=256, logits_all=True)
    ids, plain = logits(path, weights="plain", dtype="float32")
    theirs.eval(ids)
    want = torch.from_numpy(np.array(theirs.scores[: len(ids)]))
    assert off(want, plain) <= 0.1
    assert {*want[-1].topk(3).indices.tolist()} == {*plain[-1].topk(3).indices.tolist()}


@pytest.mark.parametrize("policy", registry.method_names())
def test_an_answer_under_every_policy(path: Path, policy: str) -> None:
    """Within a budget of a third of what is read."""
    step = {"policy": "full", "decode": policy} if policy in registry.STEP else {"policy": policy}
    chat = minikv.load(path, budget=96, **step)
    said = "".join(chat.ask(f"{TEXT.read_text()[:1200]}\n\n{QUESTION}", max_tokens=24))
    assert said.strip()
    assert "\ufffd" not in said


def test_eval_asks_it(path: Path, tmp_path: Path) -> None:
    record = tmp_path / "made.json"
    asked = ["--tasks", "ppl,kl", "--length", "400", "--policy", "snapkv", "--budget", "128"]
    made = ["eval", str(TEXT), "-m", str(path), *asked, "-n", "1", "--json", str(record)]
    result = CliRunner().invoke(app, made)
    assert result.exit_code == 0, result.output
    assert json.loads(record.read_text())
