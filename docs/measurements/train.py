"""Train the bundled model: `python docs/measurements/train.py --out DIR --minutes 120`.

Writes config.json, model.safetensors, tokenizer.json and chat_template.jinja, every minute and at
the end, and `exam.json`: how many questions of every kind are answered exactly. The loss is 1 on
the answers of a chat and 0.1 on the other tokens. The phases, and the learning rate in them, follow
the clock. Processes make the documents, from `minikv.models.bundled.world`; the loop takes
them as they come, so no two runs are the same. The network's parts are from transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from minikv.models.bundled import exam, world

SPECIALS = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
BOS, END, USER, ASSISTANT, SYSTEM = range(5)
TEMPLATE = (
    "<|bos|>{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB, LONGEST = 2048, 8192
SIZE, EPS = 64, 1e-5  # of a head; of the norms
# Ten of a head's sixteen rotary pairs hardly turn within 8,192 positions, so a question can match
# its fact at any distance. The other six tell which tokens are neighbours.
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 128.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of training: a share of the time, each step with one of the `contexts`. The learning
    rate goes from `first` to `last` along a cosine.

    A document has a fact every `dense` to `sparse` tokens (log-uniform). Training texts have more
    facts than examined ones, because many similar facts are what makes the task hard.
    """

    contexts: tuple[int, ...]
    share: float
    first: float
    last: float
    dense: float = 30
    sparse: float = 220

    @staticmethod
    def parse(text: str) -> Phase:
        contexts, *numbers = text.split(":")
        return Phase(tuple(map(int, contexts.split("+"))), *map(float, numbers))


MIXED = "1024+2048+2048+2048+4096+4096+4096+8192+8192"
DEFAULT_PHASES = (
    "128:6:4e-3:4e-3,256:8:4e-3:3e-3,512:12:3e-3:3e-3,1024:12:3e-3:2e-3,2048:12:2e-3:1.6e-3,"
    f"{MIXED}:50:1.6e-3:1e-5:45:220"
)


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE on generated documents; a space is put before each segment, as names need."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{N}{1,2}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    rng = random.Random(seed)

    def texts() -> Iterator[str]:
        for _ in range(1500):
            doc = world.document(rng, 90, 60)
            yield doc.text
            for question, answer in world.questions(rng, doc, 60):
                yield question
                yield answer

    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


# -- documents ------------------------------------------------------------------------------------

PER_TOKEN, PER_SENTENCE = 4.2, 12.4  # characters; tokens


class Chats:
    """Chats of exactly `context` tokens: a document, then questions and answers."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.tokenizer, self.rng = tokenizer, rng

    def coded(self, turns: Sequence[tuple[str, str]]) -> tuple[list[int], list[float]]:
        """(ids, marks) of pairs (question, answer): marks are the weights of the tokens of answers,
        0 for others. A long answer weighs more than a short one, by the root of its length."""
        texts = [text for turn in turns for text in turn]
        coded = [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]
        ids, marks = [BOS], [0.0]
        for user, answer in zip(coded[::2], coded[1::2], strict=True):
            turn, size = [USER, *user, END, ASSISTANT], len(answer) + 1
            ids += [*turn, *answer, END]
            marks += [0.0] * len(turn) + [min(1.0, (4 / size) ** 0.5)] * size
        return ids, marks

    def sample(self, context: int, per_fact: float) -> tuple[list[int], list[float]]:
        """The document has a fact every `per_fact` tokens, in every other one long ones too. A
        quarter to a half of `context` is for questions, because the model learns from these."""
        rng, names = self.rng, world.Names(self.rng)
        room = context * rng.uniform(0.25, 0.55)
        count = min(max(2, int((context - room) / per_fact)), 140)
        long = rng.randint(1, count) if rng.random() < 0.5 else 0
        facts, entities = world.some_facts(rng, names, count - long)
        left = 0.7 * (context - room) - sum(map(told, facts))
        for kind in rng.choices(list(world.LONG), k=long):
            (fact,), (entity,) = world.long_facts(rng, names, [kind])
            left -= told(fact)
            if left < 0 and facts:
                break
            facts.append(fact)
            entities.append(entity)
        # A question that is asked twice is answered by copying, which teaches little.
        room = min(room, sum(36 + 2 * len(f.answer) / PER_TOKEN for f in facts))
        statements = sum(len(f.statements) for f in facts)
        plain = max(0, int((context - room - sum(map(told, facts))) / PER_SENTENCE))
        doc = world.written(rng, statements + plain, facts, entities)
        pairs = []
        for pair in world.questions(rng, doc, 2 * len(facts)):
            pairs.append(pair)
            room -= 16 + len(pair[1]) / PER_TOKEN
            if room < 0:
                break
        name = rng.choice(world.WORDS["nouns"]).lower()
        head = f"Document: {name}.txt\n\n" if rng.random() < 0.5 else ""
        pairs[0] = f"{head}{doc.text}\n\n{pairs[0][0]}", pairs[0][1]
        return self.coded(pairs)

    def batch(self, context: int, tokens: int, phase: Phase) -> tuple[numpy.ndarray, ...]:
        """ids and marks [B, context + 1], of about `tokens` tokens in all, and positions [context].
        Each chat is cut or padded at its end, with marks of -1."""
        rows = max(1, tokens // context)
        ids = numpy.full((rows, context + 1), END, numpy.int16)
        marks = numpy.full((rows, context + 1), -1, numpy.float32)
        bounds = math.log(phase.dense), math.log(phase.sparse)
        for row in range(rows):
            m: list[float] = []
            while not any(m):
                i, m = self.sample(context, math.exp(self.rng.uniform(*bounds)))
                i, m = i[: context + 1], m[: context + 1]
            ids[row, : len(i)], marks[row, : len(i)] = i, m
        return ids, marks, stretched(self.rng, context)


def told(fact: world.Fact) -> float:
    """About how many tokens all statements of a fact have."""
    return sum(map(len, fact.statements)) / PER_TOKEN


def stretched(rng: random.Random, context: int) -> numpy.ndarray:
    """Positions [context], ascending and below `LONGEST`; in two of three draws with a few gaps.

    So the model sees the distances of the longest context at the cost of a short one (positional
    skip-wise training, arXiv 2309.10400).
    """
    at = numpy.arange(context, dtype=numpy.int16)
    if rng.random() < 0.67:
        for _ in range(3):
            at[rng.randrange(context) :] += rng.randint(0, (LONGEST - context) // 3)
    return at


def make_batches(
    queue: Any, number: Any, phases: Sequence[Phase], tokens: int, tokenizer: str, seed: int
) -> None:
    """A process that fills `queue`, for the phase that `number` names."""
    rng = random.Random(seed)
    chats = Chats(Tokenizer.from_str(tokenizer), rng)
    while True:
        phase = phases[number.value]
        queue.put(chats.batch(rng.choice(phase.contexts), tokens, phase))


# -- the network ----------------------------------------------------------------------------------


def new_config() -> LlamaConfig:
    """The bundled model's."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=SIZE,
        max_position_embeddings=LONGEST,
        rms_norm_eps=EPS,
        rope_parameters=ROPE,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=END,
    )


def new_network(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """The network with new weights, in float32."""
    network = LlamaForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)
    quiet = 0.5 / math.sqrt(2 * config.num_hidden_layers)  # for what is added to the stream
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() == 2:
                scale = quiet if "o_proj" in name or "down_proj" in name else 1.0
                std = 0.05 if "embed" in name else scale * weight.shape[1] ** -0.5
                weight.normal_(0.0, std, generator=generator)
    return network


def to_heads(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    """A layer's queries, keys and values [n, heads, SIZE] of tokens [n, hidden]."""
    x = F.rms_norm(x, norm.shape, norm, EPS)
    queries, keys, values = (F.linear(x, w).unflatten(-1, (-1, SIZE)) for w in (q, k, v))
    groups = queries.shape[1] // keys.shape[1]
    turned = []
    for t in (queries, keys):
        low, high = t.float().chunk(2, -1)
        turned.append(torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(t.dtype))
    keys, values = (t.repeat_interleave(groups, 1) for t in (turned[1], values))
    return turned[0], keys, values


def from_heads(
    x: Tensor, mixed: Tensor, o: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """The end of a layer, after its attention."""
    x = x + F.linear(mixed, o)
    h = F.rms_norm(x, norm.shape, norm, EPS)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def judge(
    x: Tensor, norm: Tensor, embed: Tensor, target: Tensor, mark: Tensor
) -> tuple[Tensor, ...]:
    """(the mean loss of the answers, that of the other tokens, whether each token is right)."""
    logits = F.linear(F.rms_norm(x.float(), norm.shape, norm, EPS), embed)
    losses = F.cross_entropy(logits, target, reduction="none")
    weights, others = mark.clamp(min=0), (mark == 0).float()
    one = (losses * weights).sum() / weights.sum().clamp(min=1e-3)
    rest = (losses * others).sum() / others.sum().clamp(min=1)
    return one, rest, logits.argmax(-1) == target


class Fast:
    """The forward pass over the tokens of several chats, one after another. All but attention works
    on tokens whatever chat they are of, so it is compiled once for all lengths of chats."""

    def __init__(self, network: LlamaForCausalLM, compiled: bool) -> None:
        self.frequencies = network.model.rotary_emb.inv_freq
        self.embed, self.norm = network.model.embed_tokens.weight, network.model.norm.weight
        self.layers = []
        for layer in network.model.layers:
            a, m = layer.self_attn, layer.mlp
            first = (layer.input_layernorm, a.q_proj, a.k_proj, a.v_proj)
            last = (a.o_proj, layer.post_attention_layernorm, m.gate_proj, m.up_proj, m.down_proj)
            self.layers.append(tuple([m.weight for m in part] for part in (first, last)))
        compiling = partial(torch.compile, dynamic=False) if compiled else lambda f: f
        self.to_heads, self.from_heads = compiling(to_heads), compiling(from_heads)
        self.judge = compiling(judge)

    def __call__(self, ids: Tensor, marks: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        """As `judge`, of ids and marks [B, context + 1]; the last is [B, context]."""
        rows, context = ids.shape[0], ids.shape[1] - 1
        angle = torch.outer(at.repeat(rows).float(), self.frequencies)[:, None]
        cos, sin = angle.cos(), angle.sin()
        x = F.embedding(ids[:, :-1].flatten(), self.embed)
        with torch.autocast(x.device.type, torch.bfloat16):
            for first, last in self.layers:
                parts = self.to_heads(x, cos, sin, *first)
                q, k, v = (t.view(rows, context, -1, SIZE).transpose(1, 2) for t in parts)
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                mixed = mixed.transpose(1, 2).reshape(rows * context, -1)
                x = self.from_heads(x, mixed, *last)
        target, mark = ids[:, 1:].flatten(), marks[:, 1:].flatten()
        one, rest, right = self.judge(x, self.norm, self.embed, target, mark)
        return one, rest, right.view(rows, context)


def write(folder: Path, network: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Write a checkpoint directory in the usual Llama layout, in float32."""
    network.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))


# -- the exam -------------------------------------------------------------------------------------

LENGTHS = (1000, 2000, 4000, 7900)


class Plain:
    """A tokenizer as `exam.fresh` needs it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@cache
def parsed(tokenizer: str) -> Tokenizer:
    """The tokenizer that this text describes."""
    return Tokenizer.from_str(tokenizer)


def examined(cell: tuple[str, int, int, str]) -> tuple[list[int], list[float]]:
    """(ids, marks) of a chat about a new document, of at most four questions: about its short facts
    ("short"), or its two facts of this kind of `world.LONG`."""
    kind, tokens, seed, text = cell
    tokenizer, rng = parsed(text), random.Random(seed)
    long = () if kind == "short" else (kind, kind)
    doc = exam.fresh(Plain(tokenizer), tokens, 600_000_000 + seed, long)
    facts = tuple(f for f in doc.facts if bool(f.kind) == bool(long))
    pairs = list(islice(world.questions(rng, world.Document(doc.text, facts), len(facts)), 4))
    pairs[0] = f"Document: report.txt\n\n{doc.text}\n\n{pairs[0][0]}", pairs[0][1]
    return Chats(tokenizer, rng).coded(pairs)


def cells(documents: int, tokenizer: Tokenizer) -> list[tuple[str, int, int, str]]:
    """What `examined` is given for `documents` documents of each kind and length."""
    kinds = [(kind, tokens) for tokens in LENGTHS for kind in ("short", *world.LONG)]
    return [(*kind, i, tokenizer.to_str()) for kind in kinds for i in range(documents)]


@torch.no_grad()
def examine(
    fast: Fast, asked: Sequence[tuple[str, int, int, str]], chats: Sequence[Any]
) -> dict[str, list[int]]:
    """By kind and length, of how many answers the model has each token right, given what stood
    before: these it would have written; and of how many answers in all."""
    found: dict[str, list[int]] = {}
    device = fast.embed.device
    for (kind, tokens, *_), (ids, marks) in zip(asked, chats, strict=True):
        at = torch.arange(len(ids) - 1, device=device)
        given = torch.tensor([ids], device=device), torch.tensor([marks], device=device)
        hits, start = fast(*given, at)[2][0].tolist(), 0
        cell = found.setdefault(f"{kind} {tokens}", [0, 0])
        for i, mark in enumerate(marks[1:]):
            if mark and not marks[i]:
                start = i
            if mark and ids[i + 1] == END:
                cell[0] += all(hits[start : i + 1])
                cell[1] += 1
    return found


# -- the run --------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=120, help="0 examines only")
    parser.add_argument("--start", type=Path, help="continue with the model in this folder")
    parser.add_argument(
        "--phases",
        default=DEFAULT_PHASES,
        help="context:share:lr:lr[:dense:sparse], ... where 2048+4096+4096 draws each step's "
        "context, and a fact comes every dense to sparse tokens",
    )
    parser.add_argument("--batch", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--warm", type=int, default=100, help="steps until the full learning rate")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--exam", type=int, default=0, help="documents of each kind and length")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="torch.compile (needs a C++ compiler; on a CPU about 7 times as fast)",
    )
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # each process has a core
    began, start = time.time(), args.start
    config = LlamaConfig.from_pretrained(start) if start else new_config()
    network = new_network(config, args.seed)
    if start:
        network.load_state_dict(load_file(start / "model.safetensors"), strict=False)
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(args.seed)
    # Processes are made before the first use of a GPU, which does not survive a fork.
    made = multiprocessing.get_context("fork")
    phases = [Phase.parse(text) for text in args.phases.split(",")]
    queue, number = made.Queue(3 * args.workers), made.Value("i", 0)
    making = (queue, number, phases, args.batch, tokenizer.to_str())
    for i in range(1, args.workers + 1) if args.minutes else ():
        seed = args.seed * 1000 + i
        made.Process(target=make_batches, args=(*making, seed), daemon=True).start()
    asked = cells(args.exam, tokenizer)
    with made.Pool(args.workers if asked else 1) as pool:
        chats = pool.map_async(examined, asked, chunksize=4)
        if args.minutes:
            train(args, network, tokenizer, began, phases, queue, number)
        if asked:
            fast = Fast(network.to(args.device), compiled=False)
            found = examine(fast, asked, chats.get())
            for name, (right, of) in found.items():
                print(f"{name:14} {right} of {of}")
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "exam.json").write_text(json.dumps(found) + "\n")


def train(
    args: argparse.Namespace,
    network: LlamaForCausalLM,
    tokenizer: Tokenizer,
    began: float,
    phases: Sequence[Phase],
    queue: Any,
    number: Any,
) -> None:
    """Train on the batches of `queue` until `args.minutes` after `began`, and write the model to
    `args.out`. `number` tells the processes which of the phases it is."""
    whole = sum(phase.share for phase in phases)
    ends = [sum(p.share for p in phases[: i + 1]) / whole for i in range(len(phases))]
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    network.to(device)
    fast = Fast(network, args.compile)
    print(f"{network.num_parameters():,} parameters on {device}", flush=True)
    # Muon for the matrices of the layers: with it, recall is learned from far fewer tokens.
    weights = list(network.named_parameters())
    inner = [t for name, t in weights if t.dim() == 2 and "embed" not in name]
    outer = [t for name, t in weights if t.dim() == 1 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inner, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, weight_decay=0.0, betas=(0.9, 0.97), foreach=True),
    ]
    step, tokens, first, shown = 0, 0, 0.0, time.time()
    while (now := time.time()) < began + 60 * args.minutes or not step:
        # The first step compiles: the schedule is of the time after it.
        at = min(1.0, (now - first) / (began + 60 * args.minutes - first)) if step else 0.0
        number.value = next(i for i, end in enumerate(ends) if at <= end + 1e-9)
        phase, start = phases[number.value], ([0.0, *ends])[number.value]
        inside = (at - start) / (ends[number.value] - start)
        rate = phase.last + (phase.first - phase.last) * (1 + math.cos(math.pi * inside)) / 2
        rate *= min(1.0, (step + 1) / args.warm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        waited = time.time()
        batch = [torch.from_numpy(part) for part in queue.get()]
        waited = time.time() - waited
        if device.type == "cuda":
            batch = [part.pin_memory().to(device, non_blocking=True) for part in batch]
        ids, marks, positions = batch
        one, rest, right = fast(ids.long(), marks, positions)
        (one + 0.1 * rest).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        one, rest = one.detach(), rest.detach()
        step, tokens, first = step + 1, tokens + positions.numel() * len(ids), first or time.time()
        if step % 50 == 0 or step < 3:
            share = right[marks[:, 1:] > 0].float().mean()
            passed = time.time() - began
            print(
                f"{passed:6.0f}s step {step} {tokens / 1e6:.1f}M tokens lr {rate:.1e} "
                f"answer {one:.3f} rest {rest:.3f} right at {len(positions)}: {share:.3f} "
                f"waited {1e3 * waited:.0f} ms",
                flush=True,
            )
            if not math.isfinite(one):
                raise SystemExit("the loss is not finite; the last checkpoint stays")
            if time.time() > shown + 60:
                shown = time.time()
                write(args.out, network, tokenizer)
    write(args.out, network, tokenizer)
    print(f"{tokens / 1e6:.0f}M tokens in {(time.time() - began) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
