"""GGUF files: seconds to load, bytes held, tokens per second, errors of logits; and llama.cpp's.

    python docs/measurements/real.py speed FILE.gguf --tokens 512,2048,8000
    python docs/measurements/real.py forms            # PYTHONPATH=tests/support before each
    python docs/measurements/real.py large big.gguf

speed: minikv and llama.cpp (llama-cpp-python) on the same file, each in a process of its own, by
turns; medians of `--repeat` rounds. llama.cpp copies the file (use_mmap=False), as minikv does:
with a map, it reads when it first computes. forms: random models of half a billion parameters, all
matrices of one type; the error is that of the logits beside float32 on the same numbers, and
`theirs_s` the seconds that llama.cpp takes to load the file. large: writes an 8B-shaped Q4_K_M of
random blocks, if FILE is not there, and answers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import peers
import torch

import minikv
from minikv import models
from minikv.cache.attend import DenseAttend
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import networks
from minikv.cli.bench.networks import prepare
from minikv.loader import packing_of

HALF = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
HALF |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
FORMS = ("Q8_0", "Q6_K", "Q5_K", "Q5_0", "IQ4_NL", "Q4_K", "Q4_1", "Q4_0")


class Loading:
    """Loads a file again and again. It has the methods of a system of `peers.py`."""

    vocab, device = 2, torch.device("cpu")

    def __init__(self, path: str, threads: int, theirs: bool) -> None:
        prepare("cpu", threads)
        self.path, self.threads, self.theirs = path, threads, theirs

    def read(self, _: list[int]) -> float:
        began = perf_counter()
        if not self.theirs:
            models.load(self.path, packing=packing_of("auto"))
        else:
            from llama_cpp import Llama

            how = {"n_ctx": 512, "n_threads": self.threads, "use_mmap": False, "verbose": False}
            Llama(self.path, **how).close()
        return perf_counter() - began


def loaders(path: str, threads: int) -> list[peers.Process]:
    """minikv and llama.cpp, each in a process that loads the file."""
    each = (("minikv", False), ("llama.cpp", True))
    return [peers.Process(name, Loading, path, threads, theirs) for name, theirs in each]


def speed(given: argparse.Namespace) -> dict[str, Any]:
    """Medians of both, and how many times as fast minikv is."""
    path, threads = str(given.file), given.threads
    counts = [int(count) for count in given.tokens.split(",")]
    spec = networks.Spec(networks.find("s"), given.file, "bfloat16", "cpu")
    context = max(counts) + 32 * (given.repeat + 2)
    vocab = models.config_of(given.file).vocab
    full = EvictionConfig.read("full", "none", "512")
    made = {
        "load": loaders(path, threads),
        "run": [
            peers.Process("minikv", peers.minikv, spec, threads, full),
            peers.Process("llama.cpp", peers.LlamaCpp, path, threads, context, vocab, False),
        ],
    }
    found: dict[str, Any] = {}

    def turns(name: str, what: str, act: str, count: int) -> None:
        rounds = [[getattr(one, act)(count) for one in made[what]] for _ in range(given.repeat + 1)]
        ours, theirs = (median(column) for column in zip(*rounds[1:], strict=True))
        found[name] = {"minikv": ours, "llama.cpp": theirs, "ratio": theirs / ours}
        print(f"{name}: {ours:.4f} s, llama.cpp {theirs:.4f} s: {theirs / ours:.2f} x", flush=True)

    turns("load", "load", "read", 2)
    for count in counts:
        turns(f"prompt of {count:,}", "run", "read", count)
        turns(f"a step after {count:,}", "run", "write", 16)
    return found


def peak(name: str = "VmHWM") -> int:
    """The most memory that this process has had, in bytes; or "VmRSS": what it has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def alone(path: Path, settings: dict[str, Any], threads: int) -> tuple[dict[str, Any], Any]:
    """Load a file, read 256 tokens and take 16 steps; the logits of the prompt's end."""
    prepare("cpu", threads)
    minikv.load(threads=threads)  # what the code itself takes
    before, began = peak("VmRSS"), perf_counter()
    chat = minikv.load(str(path), threads=threads, **settings)
    seconds, most = perf_counter() - began, peak() - before
    net, ids = chat.engine.network, torch.arange(256) * 7 % 86 + 4
    attend = DenseAttend(net.config.windows)
    times, found = [], None
    with torch.inference_mode():
        for part in (ids, *ids[:17].split(1)):
            began = perf_counter()
            logits = net.forward(part, attend)
            times.append(perf_counter() - began)
            found = logits if found is None else found
    facts = {"load_s": round(seconds, 2), "held": net.weight_bytes, "grown": round(most)}
    facts |= {"read_tok_s": round(256 / times[0]), "write_tok_s": round(1 / median(times[2:]), 1)}
    if settings.get("dtype") is None:
        facts["says"] = "".join(chat.ask("ab", max_tokens=4))
    assert found is not None
    return facts, found.float().numpy()  # a tensor would share memory with this process


def more_bits(name: str, layer: int) -> str:
    """What llama.cpp's Q4_K_M has: Q6_K for some values and down projections, and the output."""
    some = layer < 4 or layer >= 28 or (layer - 4) % 3 == 2
    return "Q6_K" if name == "output" or (name in ("attn_v", "ffn_down") and some) else "Q4_K"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["speed", "forms", "large"])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--tokens", default="512,2048,8000")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    import ggufs

    context, found = multiprocessing.get_context("spawn"), dict[str, Any]()

    def run(path: Path, **settings: Any) -> tuple[dict[str, Any], Any]:
        with context.Pool(1, maxtasksperchild=1) as pool:
            return pool.apply(alone, (path, settings, given.threads))

    if given.what == "speed":
        found = speed(given)
    elif given.what == "large":
        if not given.file.exists():
            ggufs.random_model(given.file, LARGE, more_bits)
        found["Q4_K_M"], _ = run(given.file)
    for name in FORMS if given.what == "forms" else ():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "one.gguf"
            ggufs.random_model(path, HALF, lambda *_, name=name: name)
            _, want = run(path, weights="plain", dtype="float32")
            found[name], got = run(path)
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            made = loaders(str(path), given.threads)
            rounds = [[one.read(2) for one in made] for _ in range(given.repeat + 1)]
            ours, theirs = (median(column) for column in zip(*rounds[1:], strict=True))
            for one in made:
                one.close()
            found[name] |= {"error": round(float(error), 5), "load_s": ours, "theirs_s": theirs}
            print(name, json.dumps(found[name]), flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
