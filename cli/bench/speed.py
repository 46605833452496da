"""Measures the time of decode steps and of prompts. minikv under each policy takes turns with
transformers, if that is installed, so that a change of the machine's speed affects all of them.

Whatever ends a run, the measurements so far are shown and written first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, ClassVar

import torch

from minikv.cache.kv_cache import KVCache
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import amount, size
from minikv.cli.asked import Bench
from minikv.cli.bench import networks
from minikv.cli.measure import Results, choices, lengths
from minikv.cli.screen.terminal import Terminal
from minikv.cli.screen.text import grid
from minikv.engine.engine import Engine
from minikv.engine.sampling import Sampling
from minikv.errors import UsageError
from minikv.loader import output_of, shape_of
from minikv.models.llama import Llama
from minikv.models.tensors import tensors_of
from minikv.settings import Settings

PEER = "transformers"
_GREEDY = Sampling()


class Cached:
    """A network under one policy: reads a prompt, writes tokens, and reports its cache."""

    def __init__(
        self,
        net: Llama,
        eviction: EvictionConfig,
        kernels: str = "auto",
        kv: str = "auto",
        weights: str = "auto",
    ) -> None:
        """`kernels`, `kv` and `weights` as the flags take them. Raises UsageError for a budget that
        is too small."""
        self.net, self.eviction, self.kv = net, eviction, kv
        budget = str(eviction.budget) if eviction.evicts else "-"
        self.facts: dict[str, Any] = {
            "system": "minikv",
            "policy": eviction.policy,
            "decode": eviction.decode,
            "budget": budget,
            "weights": weights,
            "kv": kv,
        }
        same = eviction.decode in ("none", eviction.policy)
        policies = eviction.policy if same else f"{eviction.policy}+{eviction.decode}"
        named = (policies, budget, weights, f"kv {kv}")
        self.name = " ".join(x for x in named if x not in ("-", "auto", "kv auto"))
        self.device, self.vocab = net.device, net.config.vocab
        cache = KVCache(
            shape_of(net.config),
            eviction.rules(),
            dtype=net.dtype,
            device=net.device,
            kv=torch.int8 if kv == "int8" else None,
            output=output_of(net),
            rotary=net.rotation,
            kernels=kernels,
        )
        net.use(cache.ops if cache.ops.name != "torch" else None)
        self.engine = Engine(net, cache)
        self._clock = networks.Clock(net.device)
        self._token = 0

    def read(self, ids: list[int], room: int = 256) -> float:
        """Seconds to read a prompt into a new conversation; `room`: how many steps will follow."""
        self.engine.reset()
        return self.read_on(ids, room)

    def read_on(self, ids: list[int], room: int = 256) -> float:
        """Seconds to read a further prompt of the same conversation."""

        def run() -> None:
            self._token = int(self.engine.prompt(ids, room=room).argmax())

        return self._clock(run)

    def write(self, steps: int) -> float:
        """Seconds of a step, mean over `steps`. Greedy: each step is fed the last one's token."""

        def run() -> None:
            for i in range(steps):  # no further step is launched after the last
                self._token = self.engine.next(
                    self._token, self.vocab, _GREEDY, 0, ahead=i + 1 < steps
                )

        return self._clock(run) / steps

    def held(self) -> dict[str, Any]:
        """Bytes of the cache, and its tokens per head, for JSON."""
        stats = self.engine.kv.stats()
        names = ("held_bytes", "allocated_bytes", "full_bytes", "kept_mean", "kept_max")
        return {"kv_bytes": {x.removesuffix("_bytes"): getattr(stats, x) for x in names}}

    def step_kv_bytes(self) -> float:
        """Bytes of keys and values that a step reads."""
        config, stats = self.net.config, self.engine.kv.stats()
        coded = 2 * (config.head_dim + torch.float32.itemsize)  # a byte a number, and a scale
        each = coded if self.kv == "int8" else stats.row_bytes
        return stats.kept_mean * config.layers * config.kv_heads * each

    def close(self) -> None:
        """Free the cache."""
        self.engine.reset()


class Transformers:
    """A Llama of transformers with torch's attention and a cache that grows.

    Its loop is only the forward pass and an argmax, without the overhead of `generate`: the
    comparison favours transformers.
    """

    name = PEER
    facts: ClassVar[Mapping[str, Any]] = {
        "system": PEER,
        **dict.fromkeys(("policy", "decode", "budget", "weights"), "-"),
        "kv": "auto",
    }

    def __init__(self, spec: networks.Spec) -> None:
        library = importlib.import_module(PEER)
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
        self.device, self.dtype = torch.device(spec.device), getattr(torch, spec.dtype)
        if spec.folder is not None:
            self.model: Any = library.AutoModelForCausalLM.from_pretrained(
                str(spec.folder),
                dtype=self.dtype,
                attn_implementation="sdpa",
                local_files_only=True,
            ).to(self.device)
        else:
            self.model = _random(library, spec, networks.plain(spec))
        self.model.eval()
        self.vocab = int(self.model.config.vocab_size)
        self._clock = networks.Clock(self.device)
        self._new_cache = library.DynamicCache
        self._cache: Any = None
        self._token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)

    def read(self, ids: list[int], room: int = 0) -> float:
        """Seconds for a prompt into a new cache; computes only the logits of the last token, as
        `generate` does."""
        self._cache = self._new_cache(config=self.model.config)
        given = torch.tensor([ids], device=self.device)
        return self._clock(lambda: self._forward(given))

    def write(self, steps: int) -> float:
        """Seconds of a step, mean over `steps`; greedy, and the token stays on the device."""

        def run() -> None:
            for _ in range(steps):
                self._forward(self._token)

        return self._clock(run) / steps

    def held(self) -> dict[str, Any]:
        """Nothing: its cache was not counted."""
        return {}

    def close(self) -> None:
        """Free the cache."""
        self._cache = None

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor) -> None:
        made = self.model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._token = made.logits[:, -1].argmax(-1, keepdim=True)


def _random(library: Any, spec: networks.Spec, net: Llama) -> Any:
    """A model whose parameters are the tensors of minikv's random network, without copies."""
    sizes = spec.sizes
    assert sizes is not None
    config = library.LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        vocab_size=sizes.vocab,
        num_attention_heads=sizes.heads,
        head_dim=sizes.head_dim,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=networks.POSITIONS,
        tie_word_embeddings=sizes.tied,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope.theta},
    )
    with torch.device("meta"):
        model = library.LlamaForCausalLM(config)
    model.load_state_dict(dict(tensors_of(net)), assign=True, strict=not sizes.tied)
    if sizes.tied:
        model.tie_weights()
    # The angles are not weights: they were made on the meta device, without memory.
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    model.model.rotary_emb = llama.LlamaRotaryEmbedding(config=config).to(spec.device)
    return model


_WARM = 3  # steps before those that count: one of them is captured
_WARM_PROMPT = 512  # tokens of the prompt that does not count, on a CPU; on a GPU it is a whole one
_READ = 256 << 20  # bytes read before each turn on a CPU, to measure the speed of the memory
_LEGEND = """\
floor: share of the speed that the bandwidth measured in this run allows
x full, x HF: times as fast as the full cache, and as transformers (sdpa)"""


def measure(asked: Bench, settings: Settings, terminal: Terminal, command: Sequence[str]) -> None:
    """Measure steps after prompts of every length, prompts, or both. command: for the record.
    Raises UsageError, ModelError and MemoryShortError."""
    for flag, value, least, most in (
        ("--repeat", asked.repeat, 1, 100),
        ("--steps", asked.steps, 0, 10_000),
    ):
        if not least <= value <= most:
            raise UsageError(f"{flag} must be {least} to {most:,}, got {value}")
    lengths(asked.length)
    evictions = choices(settings.policy, settings.budget, settings.decode, options=settings.options)
    record = {"command": " ".join(command), "complete": False, "rows": []}
    results = Results(terminal, asked.as_json, record)
    terminal.status("starting")
    device = networks.prepare(settings.device, settings.threads or 0)
    if settings.kernels == "triton" and device.type != "cuda":
        raise UsageError("no Triton kernels without a CUDA device", "use --kernels auto or torch")
    name = asked.shape.lower()
    if name == "auto":
        name = "llama-3-8b" if device.type == "cuda" else "s"
    sizes = networks.find(name)
    terminal.status("measuring the machine's bandwidth")
    rate, facts, made = networks.bandwidth(device), networks.facts(device), results.record
    made |= {"machine": facts, "versions": networks.versions(), "bandwidth": rate}
    results.show(networks.header(facts, rate, name))
    dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
    spec = networks.Spec(sizes, None, dtype, str(device), settings.weights)
    steps = asked.steps or (128 if device.type == "cuda" else 32)
    made["wanted"] = {"shape": name, "dtype": dtype, "repeat": asked.repeat, "steps": steps}
    try:
        run = Run(replace(asked, steps=steps), settings, evictions, spec, rate, results)
        for kind in ("decode", "prefill") if asked.question == "all" else (asked.question,):
            for length in lengths(asked.length):
                run.measure(kind, length)
        made["complete"] = True
    finally:
        if made["rows"]:
            rounds = (
                f"medians of {amount(asked.repeat, 'round')} in turns; {steps} steps a decode round"
            )
            results.show(f"{rounds}; {dtype}\n{_LEGEND}")
            results.write(last=True)


@dataclass(slots=True, eq=False)
class Entry:
    """A system and its measurements. times: seconds of each round. facts: about the cache after the
    prompt, and about a step."""

    system: Cached | Transformers
    times: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Run:
    """The networks of a run, and transformers. rate: bytes a second."""

    def __init__(
        self,
        asked: Bench,
        settings: Settings,
        evictions: Sequence[EvictionConfig],
        spec: networks.Spec,
        rate: float,
        results: Results,
    ) -> None:
        """Raises ModelError and MemoryShortError."""
        self.asked, self.settings, self.evictions = asked, settings, evictions
        self.rate, self.results, self.device = rate, results, torch.device(spec.device)
        self.room = 2 * _WARM + asked.repeat * (_WARM + asked.steps)  # steps of a prompt
        self.net = networks.network(spec)
        self.peer = self._peer(spec) if asked.peer else None

    def _peer(self, spec: networks.Spec) -> Transformers | None:
        try:
            return Transformers(spec)
        except ModuleNotFoundError:
            self.results.note(f"{PEER} is not installed: nothing to compare with")
        except Exception as error:
            self.results.note(f"not compared: {PEER}: {error}")
        return None

    def measure(self, kind: str, length: int) -> None:
        """Rows of every system for prompts of one length, the full cache first. kind: "decode" or
        "prefill"."""
        ids = networks.prompt(length, self.net.config.vocab)
        kinds = (self.settings.kernels, self.settings.kv, self.settings.weights)
        every = [Entry(Cached(self.net, eviction, *kinds)) for eviction in self.evictions]
        if self.peer is not None:
            every.append(Entry(self.peer))
        entries, what = list(every), f"{kind} {length:,}"
        try:
            self._each(f"{what}: beginning", entries, lambda entry: self._begin(kind, entry, ids))
            for number in range(self.asked.repeat):
                title = f"{what}: round {number + 1} of {self.asked.repeat}"
                self._each(title, entries, lambda entry: self._turn(kind, entry, ids))
        finally:
            measured = [entry for entry in every if entry.times]
            if measured:
                rows = [self._row(kind, length, entry, measured) for entry in measured]
                self.results.record["rows"] += rows
                title = f"{kind}, {length:,} tokens"
                table = _table(rows, self.results.terminal.columns, decode=kind == "decode")
                self.results.show(f"{title}\n{table}")
            self.results.write()
            for entry in every:
                entry.system.close()
            networks.settle(self.device)

    def _each(self, what: str, entries: list[Entry], work: Callable[[Entry], None]) -> None:
        """A turn of every system. If transformers fails, it takes no more turns."""
        for index, entry in enumerate(list(entries)):
            name = f"{what}, {entry.system.name}"
            self.results.progress(name, index, len(entries))
            try:
                work(entry)
                continue
            except Exception as error:
                if isinstance(entry.system, Cached):
                    raise
                self.results.note(f"{name}: {error}")
            # Outside the except clause, so that the traceback does not keep the failed system
            # alive.
            entries.remove(entry)
            entry.system.close()
            networks.settle(self.device)

    def _begin(self, kind: str, entry: Entry, ids: list[int]) -> None:
        """The unmeasured part of a turn: a prompt for the steps, or a first prompt."""
        system = entry.system
        if kind == "prefill":
            system.read(ids if self.device.type == "cuda" else ids[:_WARM_PROMPT])
            system.close()
            return
        system.read(ids, self.room)
        entry.facts |= system.held()
        system.write(_WARM)
        if isinstance(system, Cached):
            weights, kv = networks.step_bytes(self.net), system.step_kv_bytes()
            entry.facts["step_bytes"] = {"weights": weights, "kv": kv}

    def _turn(self, kind: str, entry: Entry, ids: list[int]) -> None:
        """The measured part: a prompt, or steps."""
        system = entry.system
        if kind == "prefill":
            entry.times.append(system.read(ids, self.room))
            entry.facts |= system.held()
            system.close()
            return
        if self.device.type == "cpu":  # the speed of its memory varies over time
            self.rate = max(self.rate, networks.read_rate(_READ, 1))
        system.write(_WARM)
        entry.times.append(system.write(self.asked.steps))

    def _row(self, kind: str, length: int, entry: Entry, all_of: Sequence[Entry]) -> dict[str, Any]:
        """The measurements of a system, for JSON.

        seconds: the median. floor_s: the time to read `step_bytes`, the weights and the cache that
        a step reads, at `read_bytes_s`. vs_full, vs_transformers: how many times as fast, by
        medians. captured: whether a step was one CUDA graph. kv_bytes: the cache after the prompt.
        """
        system, seconds = entry.system, median(entry.times)

        def times_as_fast(**wanted: str) -> float | None:
            for other in all_of:
                if wanted.items() <= other.system.facts.items():
                    return median(other.times) / seconds
            return None

        row: dict[str, Any] = {
            "kind": kind,
            "length": length,
            "name": system.name,
            **system.facts,
            "times": entry.times,
            "seconds": seconds,
            "tok_s": (length if kind == "prefill" else 1) / seconds,
            "vs_full": times_as_fast(policy="full", budget="-"),
            "vs_transformers": times_as_fast(system=PEER),
            **{"kv_bytes": {}, "step_bytes": {}, "captured": None},
            **{"read_bytes_s": None, "floor_s": None},
            **entry.facts,
        }
        if isinstance(system, Cached):
            for notice in system.engine.notices:
                self.results.note(notice)
            if kind == "decode":
                floor = sum(row["step_bytes"].values()) / self.rate
                row |= {"captured": system.engine.captured, "read_bytes_s": self.rate}
                row["floor_s"] = floor
        return row


def _table(rows: Sequence[dict[str, Any]], width: int, *, decode: bool) -> str:
    floor = ["floor"] if decode else []
    lines = [["system", "tok/s", "ms", *floor, "held", "x full", "x HF"]]
    for row in rows:
        beside = (row["vs_full"], row["vs_transformers"])
        share = "-" if row["floor_s"] is None else f"{row['floor_s'] / row['seconds']:.0%}"
        lines.append(
            [
                row["name"],
                _number(row["tok_s"]),
                _number(1e3 * row["seconds"]),
                *([share] if decode else []),
                size(int(row["kv_bytes"]["held"])) if row["kv_bytes"] else "-",
                *("-" if times is None else f"{times:.2f}" for times in beside),
            ]
        )
    return grid(lines, "<" + ">" * (len(lines[0]) - 1), width)


def _number(value: float) -> str:
    """A number with three significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
