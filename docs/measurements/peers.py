"""minikv beside other systems on the same random weights, in turns within one run.

    python docs/measurements/peers.py --shape s --tokens 2048 --json docs/measurements/peers.json

transformers runs where it is installed. llama.cpp (llama-cpp-python) and OpenVINO GenAI run where
they are installed and have been given the weights in their own format: `--export DIR` writes the
random model as a Hugging Face folder, from which `to_gguf.py` (`--gguf FILE`) and optimum-intel
(`--openvino DIR`) make it; both flags may be given again, for other formats of the weights. With
`--folder DIR` minikv and transformers load the exported model, as a user's, instead of making it:
without, the peak of packed weights counts what they were packed from. Every system runs in a
process of its own; medians of `--repeat` rounds, greedy. Reading is a prompt from nothing, writing
the steps after it, peak the process's resident memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import util
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import networks, speed
from minikv.cli.bench.networks import prepare
from minikv.cli.screen.text import grid

BUNDLED = Path(networks.__file__).resolve().parents[2] / "models" / "bundled"
MODULES = {
    "transformers": "transformers",
    "llama.cpp": "llama_cpp",
    "openvino": "openvino_genai",
}


# -- processes ----------------------------------------------------------------------------------


class PeerError(Exception):
    """A system could not be measured; the others are."""


class Process:
    """The system that `make(*arguments)` returns, in a process of its own."""

    def __init__(self, name: str, make: Callable[..., Any], *arguments: object) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")  # a fork would share torch's threads
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._ask("start", 0)

    def read(self, tokens: int) -> float:
        """Seconds of a prompt of so many random tokens."""
        return self._ask("read", tokens)

    def write(self, steps: int) -> float:
        """Seconds of a step, mean over so many."""
        return self._ask("write", steps)

    def peak(self) -> int:
        """Bytes at the high-water mark of the process."""
        return int(self._ask("peak", 0))

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def _ask(self, what: str, number: int) -> float:
        try:
            self._pipe.send((what, number))
            error, value = self._pipe.recv()
        except (EOFError, OSError):
            raise PeerError(f"{self.name} ended unexpectedly") from None
        if error:
            raise PeerError(f"{self.name}: {error}")
        return float(value)


def serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    """Answer until the other end is closed: (error, value)."""
    system = None
    while True:
        try:
            what, number = pipe.recv()
        except EOFError:
            return
        try:
            value: float | None = 0.0
            if system is None:
                system = make(*arguments)
            elif what == "read":
                value = system.read(networks.prompt(number, system.vocab))
            elif what == "write":
                value = system.write(number)
            else:
                value = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            pipe.send(("", value))
        except Exception as error:
            pipe.send((" ".join(f"{type(error).__name__}: {error}".split())[:300], 0.0))


def minikv(spec: networks.Spec, threads: int, eviction: EvictionConfig) -> speed.Cached:
    prepare(spec.device, threads)
    return speed.Cached(networks.network(spec), eviction)


def transformers(spec: networks.Spec, threads: int) -> speed.Transformers:
    prepare(spec.device, threads)
    return speed.Transformers(spec)


# -- the systems that minikv's own benchmarks do not know --------------------------------------


class LlamaCpp:
    """A GGUF file through llama-cpp-python. plain: weights stay as the file has them."""

    def __init__(self, path: str, threads: int, context: int, vocab: int, plain: bool) -> None:
        import llama_cpp

        if plain:
            defaults = llama_cpp.llama_cpp.llama_model_default_params

            def without() -> Any:
                made = defaults()
                made.use_extra_bufts = False
                return made

            llama_cpp.llama_cpp.llama_model_default_params = without
        self.device, self.vocab = torch.device("cpu"), vocab
        self._model = llama_cpp.Llama(
            path,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            verbose=False,
        )

    def read(self, ids: list[int]) -> float:
        self._model.reset()
        began = time.perf_counter()
        self._model.eval(ids)
        return time.perf_counter() - began

    def write(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self._model.eval([self._model.sample(temp=0.0)])
        return (time.perf_counter() - began) / steps


class OpenVino:
    """A folder that OpenVINO's exporter wrote, through openvino_genai. Its pipeline reads and
    writes in one call, and says how long each took. It keeps no prompt for the next call."""

    def __init__(self, folder: str, threads: int, vocab: int) -> None:
        import openvino_genai

        self.device, self.vocab = torch.device("cpu"), vocab
        plan = openvino_genai.SchedulerConfig()
        plan.enable_prefix_caching = False
        plan.max_num_batched_tokens = 1 << 20  # a prompt at once, as its default is
        self._pipeline = openvino_genai.LLMPipeline(
            folder, "CPU", scheduler_config=plan, INFERENCE_NUM_THREADS=threads
        )
        self._ids: list[int] = []

    def read(self, ids: list[int]) -> float:
        self._ids = ids
        return float(self._run(2).get_ttft().mean) / 1e3

    def write(self, steps: int) -> float:
        return float(self._run(steps + 1).get_tpot().mean) / 1e3

    def _run(self, count: int) -> Any:
        import numpy
        import openvino
        import openvino_genai

        given = numpy.array([self._ids], dtype=numpy.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(given), openvino.Tensor(numpy.ones_like(given))
        )
        made = self._pipeline.generate(
            inputs, max_new_tokens=count, ignore_eos=True, do_sample=False
        )
        return made.perf_metrics


# -- the run ----------------------------------------------------------------------------------


def export(spec: networks.Spec, folder: Path) -> None:
    """The random model as others read it: config.json, weights and a tokenizer.

    The tokenizer is the bundled model's, whose words mean nothing here: converters ask for one.
    """
    model = speed.Transformers(spec).model
    model.config.max_position_embeddings = 1 << 17
    model.save_pretrained(folder)
    for path in BUNDLED.glob("tokenizer*"):
        shutil.copy(path, folder / path.name)
    print(f"{folder}: config.json, model.safetensors, tokenizer")


def known(args: argparse.Namespace, spec: networks.Spec) -> dict[str, Callable[[], Process]]:
    """What can be measured here, by name; a line for what cannot."""
    threads, vocab = args.threads or torch.get_num_threads(), networks.find(args.shape).vocab
    context = args.tokens + args.new * (args.repeat + 1)
    found: dict[str, Callable[[], Process]] = {}
    for form in args.weights.split(","):
        for pair in (("full", "none", "512"), (args.policy, "auto", args.budget)):
            eviction = EvictionConfig.read(*pair)
            budget, kept = [args.budget] * eviction.evicts, [form] * (form != "auto")
            name = " ".join(["minikv", eviction.policy, *budget, *kept])
            one = replace(spec, weights=form)
            found[name] = partial(Process, "minikv", minikv, one, threads, eviction)
    for name, module in MODULES.items():
        sources = args.gguf if name == "llama.cpp" else args.openvino
        if util.find_spec(module) is None:
            print(f"{name}: not installed, left out", file=sys.stderr)
        elif name == "transformers":
            theirs = replace(spec, dtype=args.transformers or spec.dtype)
            found[name] = partial(Process, name, transformers, theirs, threads)
        elif not sources:
            flag = "--gguf" if name == "llama.cpp" else "--openvino"
            print(f"{name}: no {flag}, left out (--export writes the model)", file=sys.stderr)
        elif name == "llama.cpp":
            for path in map(str, sources):
                found[f"{name}, {path}"] = partial(
                    Process,
                    name,
                    LlamaCpp,
                    path,
                    threads,
                    context,
                    vocab,
                    args.plain and "bf16" not in path,
                )
        else:
            for path in map(str, sources):
                found[f"{name}, {path}"] = partial(Process, name, OpenVino, path, threads, vocab)
    return found


def measured(args: argparse.Namespace, spec: networks.Spec) -> list[dict[str, Any]]:
    """A row per system: medians, and every round."""
    workers: dict[str, Process] = {}
    runs: dict[str, dict[str, list[float]]] = {}
    try:
        for name, make in known(args, spec).items():
            print(f"starting {name}", file=sys.stderr)
            try:
                workers[name] = make()
                workers[name].read(min(args.tokens, 256))
                workers[name].write(2)
                runs[name] = {"read": [], "write": []}
            except PeerError as error:
                print(f"left out: {error}", file=sys.stderr)
                if name in workers:
                    workers.pop(name).close()
        for number in range(args.repeat):
            for name, worker in workers.items():
                print(f"round {number + 1}: {name}", file=sys.stderr)
                runs[name]["read"].append(worker.read(args.tokens))
                runs[name]["write"].append(worker.write(args.new))
        return [
            {
                "system": name,
                "read_tok_s": args.tokens / median(runs[name]["read"]),
                "write_tok_s": 1 / median(runs[name]["write"]),
                "peak_rss": worker.peak(),
                "rounds": runs[name],
            }
            for name, worker in workers.items()
        ]
    finally:
        for worker in workers.values():
            worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="s", help=", ".join(networks.SHAPES))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--new", type=int, default=32, help="steps of a round")
    parser.add_argument("--policy", default="adakv")
    parser.add_argument("--budget", default="512")
    parser.add_argument("--weights", default="auto", help="minikv's, with commas: auto, int8")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--transformers", help="its dtype: float32 where the processor has no bfloat16"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="the exported model, to be loaded from there")
    parser.add_argument(
        "--gguf", type=Path, action="append", default=[], help="the same, converted for llama.cpp"
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="llama.cpp does not rearrange quantised weights: with AMX, 0.3.36 crashes in its own",
    )
    parser.add_argument(
        "--openvino",
        type=Path,
        action="append",
        default=[],
        help="the same, converted for OpenVINO",
    )
    parser.add_argument("--export", type=Path, help="write the random model there and stop")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spec = networks.Spec(networks.find(args.shape), args.folder, args.dtype, "cpu")
    if args.folder:
        told = json.loads((args.folder / "config.json").read_text())
        assert told["vocab_size"] == networks.find(args.shape).vocab, "--folder has another --shape"
    if args.export:
        export(spec, args.export)
        return
    device = prepare("cpu", args.threads)
    rate = networks.bandwidth(device)
    rows = measured(args, spec)
    base = next((row for row in rows if row["system"] == "transformers"), rows[0])
    lines = [["system", "read tok/s", "", "write tok/s", "", "peak"]]
    for row in rows:
        read, write = row["read_tok_s"], row["write_tok_s"]
        lines.append(
            [
                row["system"],
                f"{read:,.0f}",
                f"{read / base['read_tok_s']:.2f}",
                f"{write:.1f}",
                f"{write / base['write_tok_s']:.2f}",
                f"{row['peak_rss'] / 2**20:,.0f} MiB",
            ]
        )
    facts = networks.facts(device)
    print(networks.header(facts, rate, f"{args.shape}, {args.dtype}, {args.tokens:,} tokens,"))
    print(grid(lines, "<>>>>>"))
    if args.json:
        record = {
            "command": " ".join(["python", "docs/measurements/peers.py", *sys.argv[1:]]),
            "machine": facts,
            "versions": networks.versions(),
            "read_bytes_s": rate,
            "rows": rows,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
