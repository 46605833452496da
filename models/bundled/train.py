"""Train the bundled model: `python -m minikv.models.bundled.train --out DIR`.

Seeded; writes config.json, model.safetensors, tokenizer.json and chat_template.jinja. The loss is
1 on the answers of a chat and 0.1 on a sample of the other tokens; the context grows in phases.
The documents come from `minikv.models.bundled.world`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from minikv.models.bundled import world
from minikv.models.rope import RopeConfig, frequencies

SPECIALS = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
BOS, END, USER, ASSISTANT, SYSTEM = range(5)
TEMPLATE = (
    "<|bos|>{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of the network, in Hugging Face's names."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 3
    head_dim: int = 64
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5


# Ten of a head's sixteen rotary pairs hardly turn within 8,192 positions, so a question can match
# its fact at any distance. The other six tell which tokens are neighbours.
ROPE = RopeConfig(theta=5e5, kind="llama3", factor=128.0, original=512)


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of training: `tokens` tokens, each step with one of the `contexts`. The learning rate
    goes from `first` to `last` along a cosine.

    A document has a fact every `dense` to `sparse` tokens (log-uniform). Training texts have more
    facts than examined ones, because many similar facts are what makes the task hard.
    """

    contexts: tuple[int, ...]
    tokens: float
    first: float
    last: float
    dense: float = 30
    sparse: float = 220

    @staticmethod
    def parse(text: str) -> Phase:
        contexts, *numbers = text.split(":")
        return Phase(tuple(map(int, contexts.split("+"))), *map(float, numbers))


DEFAULT_PHASES = (
    "128:3e6:4e-3:4e-3,256:4e6:4e-3:3e-3,512:6e6:3e-3:3e-3,1024:6e6:3e-3:2e-3,2048:4e6:2e-3:1.6e-3,"
    "2048+2048+2048+4096+4096+4096+4096+8192+8192:24e6:1.6e-3:1e-5:45:220"
)


def train_tokenizer(seed: int, vocab: int) -> Tokenizer:
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
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


class Chats:
    """Chats of exactly `context` tokens: a document, then questions and answers."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def sample(
        self, context: int, per_fact: float, asked: int | None = None
    ) -> tuple[list[int], list[int]]:
        """(ids, marks): marks are 0 for plain tokens, and n for tokens of the n-th answer.

        The document has a fact every `per_fact` tokens, and fills `context` except for the room of
        `asked` questions. By default, a quarter to a half of `context` is for questions, because
        the model learns from these.
        """
        rng = self.rng
        if asked is None:
            room = int(context * rng.uniform(0.25, 0.55))
        else:
            room = 22 * asked
        # A question that is asked twice is answered by copying, which teaches little.
        facts = min(max(2, int((context - room) / per_fact)), 140)
        if asked is None:
            room = min(room, 40 * facts)
        sentences = max(3, int((context - room) / 12.4))
        facts = min(facts, sentences)
        doc = world.document(rng, sentences, facts)
        pairs = list(world.questions(rng, doc, asked or min(room // 18 + 2, 2 * facts)))
        head = f"Document: {rng.choice(world.NOUNS).lower()}.txt\n\n" if rng.random() < 0.5 else ""
        users = [f"{head}{doc.text}\n\n{pairs[0][0]}"] + [q for q, _ in pairs[1:]]
        coded = self._ids(users + [a for _, a in pairs])
        ids, marks = [BOS], [0]
        for i in range(len(pairs)):
            user, answer = coded[i], coded[len(pairs) + i]
            turn = [USER, *user, END, ASSISTANT]
            ids += turn + answer + [END]
            marks += [0] * len(turn) + [i + 1] * (len(answer) + 1)
        return ids, marks

    def batch(self, context: int, tokens: int, phase: Phase) -> tuple[Tensor, Tensor]:
        """ids and marks [B, context + 1], of about `tokens` tokens in all. Each chat is cut or
        padded at its end."""
        rows = max(1, tokens // context)
        ids = torch.full((rows, context + 1), END)
        marks = torch.full((rows, context + 1), -1)
        for row in range(rows):
            while True:
                bounds = math.log(phase.dense), math.log(phase.sparse)
                i, m = self.sample(context, math.exp(self.rng.uniform(*bounds)))
                if i and any(m[: context + 1]):
                    break
            size = min(len(i), context + 1)
            ids[row, :size] = torch.tensor(i[:size])
            marks[row, :size] = torch.tensor(m[:size])
        return ids, marks


def new_weights(size: Size, seed: int) -> dict[str, Tensor]:
    """New weights: float32 leaf tensors that require gradients, by their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    width, inner = size.hidden_size, size.intermediate_size
    q, kv = size.num_attention_heads * size.head_dim, size.num_key_value_heads * size.head_dim

    def matrix(rows: int, cols: int, std: float) -> Tensor:
        return (torch.randn(rows, cols, generator=generator) * std).requires_grad_()

    out = 0.5 / math.sqrt(2 * size.num_hidden_layers)
    weights = {"model.embed_tokens.weight": matrix(size.vocab_size, width, 0.05)}
    for i in range(size.num_hidden_layers):
        p = f"model.layers.{i}."
        weights[p + "self_attn.q_proj.weight"] = matrix(q, width, width**-0.5)
        weights[p + "self_attn.k_proj.weight"] = matrix(kv, width, width**-0.5)
        weights[p + "self_attn.v_proj.weight"] = matrix(kv, width, width**-0.5)
        weights[p + "self_attn.o_proj.weight"] = matrix(width, q, out * q**-0.5)
        weights[p + "mlp.gate_proj.weight"] = matrix(inner, width, width**-0.5)
        weights[p + "mlp.up_proj.weight"] = matrix(inner, width, width**-0.5)
        weights[p + "mlp.down_proj.weight"] = matrix(width, inner, out * inner**-0.5)
        weights[p + "input_layernorm.weight"] = torch.ones(width, requires_grad=True)
        weights[p + "post_attention_layernorm.weight"] = torch.ones(width, requires_grad=True)
    weights["model.norm.weight"] = torch.ones(width, requires_grad=True)
    return weights


def rotary(size: Size, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin [context, D] in the half-split layout."""
    inverse = frequencies(ROPE, size.head_dim)[0].to(device)
    angle = torch.arange(context, device=device).float()[:, None] * inverse
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def stretched(rng: random.Random, context: int, longest: int) -> Tensor:
    """Positions [context], ascending and below `longest`; in two of three draws with a few gaps.

    So the model sees the distances of the longest context at the cost of a short one (positional
    skip-wise training, arXiv 2309.10400).
    """
    at = torch.arange(context)
    if rng.random() < 0.67:
        for _ in range(3):
            at[rng.randrange(context) :] += rng.randint(0, (longest - context) // 3)
    return at


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def hidden(w: dict[str, Tensor], size: Size, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Batched, differentiable forward: ids [B, T] -> normed states [B, T, width]."""
    rows, context = ids.shape
    group = size.num_attention_heads // size.num_key_value_heads
    x = F.embedding(ids, w["model.embed_tokens.weight"])
    for i in range(size.num_hidden_layers):
        p = f"model.layers.{i}."
        h = _norm(x, w[p + "input_layernorm.weight"], size.rms_norm_eps)
        q, k, v = (
            F.linear(h, w[p + f"self_attn.{n}_proj.weight"])
            .view(rows, context, -1, size.head_dim)
            .transpose(1, 2)
            for n in "qkv"
        )
        q, k = _turn(q, cos, sin), _turn(k, cos, sin)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(
            mixed.transpose(1, 2).reshape(rows, context, -1), w[p + "self_attn.o_proj.weight"]
        )
        h = _norm(x, w[p + "post_attention_layernorm.weight"], size.rms_norm_eps)
        gate = F.silu(F.linear(h, w[p + "mlp.gate_proj.weight"]))
        x = x + F.linear(
            gate * F.linear(h, w[p + "mlp.up_proj.weight"]), w[p + "mlp.down_proj.weight"]
        )
    return _norm(x, w["model.norm.weight"], size.rms_norm_eps)


def score(w: dict[str, Tensor], states: Tensor, ids: Tensor, marks: Tensor) -> tuple[int, int]:
    """(exact, all) whole answers of one chat: states [T, width], ids and marks [T + 1]."""
    at = (marks[1:] > 0).nonzero().squeeze(1)
    guess = F.linear(states[at], w["model.embed_tokens.weight"]).argmax(-1)
    wrong = {int(m) for m, ok in zip(marks[1:][at], guess == ids[1:][at], strict=True) if not ok}
    everything = {int(m) for m in marks[1:][at]}
    return len(everything) - len(wrong), len(everything)


def evaluate(
    w: dict[str, Tensor], size: Size, tokenizer: Tokenizer, context: int, chats: int, seed: int
) -> float:
    """The share of whole answers that greedy decoding gets right, with four questions per document.

    Teacher forcing gives the exact result: an answer is right if and only if each of its tokens is
    the argmax.
    """
    source = Chats(tokenizer, seed)
    device = w["model.norm.weight"].device
    right = total = 0
    with torch.no_grad():
        for _ in range(chats):
            i, m = source.sample(context, 200, asked=4)
            ids, marks = torch.tensor(i, device=device), torch.tensor(m, device=device)
            cos, sin = rotary(size, len(i) - 1, device)
            states = hidden(w, size, ids[None, :-1], cos, sin)[0]
            r, n = score(w, states, ids, marks)
            right, total = right + r, total + n
    return right / total


def write(folder: Path, w: dict[str, Tensor], size: Size, tokenizer: Tokenizer) -> None:
    """Write a checkpoint directory in the usual Llama layout, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().float().cpu().contiguous() for name, t in w.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": END,
        "torch_dtype": "float32",
        "rope_theta": ROPE.theta,
        "rope_scaling": {
            "rope_type": ROPE.kind,
            "factor": ROPE.factor,
            "low_freq_factor": ROPE.low_freq_factor,
            "high_freq_factor": ROPE.high_freq_factor,
            "original_max_position_embeddings": ROPE.original,
        },
        **asdict(size),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="a directory written by --out to go on from")
    parser.add_argument(
        "--phases",
        default=DEFAULT_PHASES,
        help="context:tokens:lr:lr[:dense:sparse], ... where 2048+4096+4096 draws each step's "
        "context, and a fact comes every dense to sparse tokens",
    )
    parser.add_argument("--batch", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="torch.compile (needs a C++ compiler; on a CPU about 7 times as fast)",
    )
    parser.add_argument("--examined", type=int, default=40, help="chats after each phase")
    parser.add_argument("--float32", action="store_true", help="no bfloat16 matrix products")
    args = parser.parse_args()
    size, device = Size(), torch.device(args.device)
    if args.resume:
        facts = json.loads((args.resume / "config.json").read_text())
        size = Size(**{field.name: facts[field.name] for field in fields(Size)})
        tokenizer = Tokenizer.from_file(str(args.resume / "tokenizer.json"))
        w = {
            name: t.to(device).requires_grad_()
            for name, t in load_file(args.resume / "model.safetensors").items()
        }
    else:
        tokenizer = train_tokenizer(args.seed, size.vocab_size)
        w = new_weights(size, args.seed)
        w = {name: t.detach().to(device).requires_grad_() for name, t in w.items()}
    print(f"{sum(t.numel() for t in w.values()):,} parameters on {device}", flush=True)
    # Muon for the matrices of the layers: with it, recall is learned from far fewer tokens.
    inner = [t for name, t in w.items() if t.dim() == 2 and "embed" not in name]
    outer = [t for name, t in w.items() if t.dim() == 1 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inner, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, weight_decay=0.0, betas=(0.9, 0.97), foreach=True),
    ]
    forward = torch.compile(hidden, dynamic=False) if args.compile else hidden
    chats = Chats(tokenizer, args.seed + 1)
    sampler = torch.Generator(device="cpu").manual_seed(args.seed)
    began, step, done = time.time(), 0, 0
    shapes = random.Random(args.seed)
    for number, phase in enumerate(map(Phase.parse, args.phases.split(","))):
        table = rotary(size, size.max_position_embeddings, device)
        steps = max(1, int(phase.tokens / max(args.batch, *phase.contexts)))
        last, seen = time.time(), 0
        hits: dict[int, list[float]] = {context: [] for context in sorted(set(phase.contexts))}
        for i in range(steps):
            context = shapes.choice(phase.contexts)
            rate = phase.last + (phase.first - phase.last) * (1 + math.cos(math.pi * i / steps)) / 2
            if number == 0 or args.resume:
                rate *= min(1.0, (step + 1) / 100)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
            ids, marks = (t.to(device) for t in chats.batch(context, args.batch, phase))
            at = stretched(chats.rng, context, size.max_position_embeddings).to(device)
            cos, sin = table[0][at], table[1][at]
            with torch.autocast(device.type, torch.bfloat16, enabled=not args.float32):
                states = forward(w, size, ids[:, :-1], cos, sin).flatten(0, 1)
            target, mark = ids[:, 1:].flatten(), marks[:, 1:].flatten()
            answers = (mark > 0).nonzero().squeeze(1)
            rest = (mark == 0).nonzero().squeeze(1)
            some = torch.randint(len(rest), (max(256, len(rest) // 8),), generator=sampler)
            at = torch.cat((answers, rest[some.to(device)]))
            logits = F.linear(states[at].float(), w["model.embed_tokens.weight"])
            losses = F.cross_entropy(logits, target[at], reduction="none")
            main_loss = losses[: len(answers)].mean()
            loss = main_loss + 0.1 * losses[len(answers) :].mean()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            step, seen, done = step + 1, seen + ids.numel(), done + ids.numel()
            right = logits[: len(answers)].argmax(-1) == target[answers]
            hits[context].append(right.float().mean().item())
            if step % 50 == 0:
                shown = ", ".join(f"{c}: {sum(h) / len(h):.3f}" for c, h in hits.items() if h)
                print(
                    f"{time.time() - began:6.0f}s step {step} {done / 1e6:.1f}M lr {rate:.1e} "
                    f"answer {main_loss:.3f} rest {losses[len(answers) :].mean():.3f} "
                    f"tokens right at {shown}; {seen / (time.time() - last):,.0f} tok/s",
                    flush=True,
                )
                last, seen = time.time(), 0
                hits = {context: [] for context in hits}
            if step % 200 == 0:
                write(args.out, w, size, tokenizer)
        write(args.out, w, size, tokenizer)
        for context in sorted({*phase.contexts, min(8192, max(phase.contexts) * 2)}):
            chats_now = min(args.examined, max(4, 40000 // context))
            exact = evaluate(w, size, tokenizer, context, chats_now, args.seed + 999)
            print(f"exact answers at {context}: {exact:.3f}", flush=True)
    print(f"done in {(time.time() - began) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
