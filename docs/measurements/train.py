"""Train the bundled model: `python docs/measurements/train.py --out DIR`.

Seeded; writes config.json, model.safetensors, tokenizer.json and chat_template.jinja. The loss is
1 on the answers of a chat and 0.1 on a sample of the other tokens; the context grows in phases.
The documents come from `minikv.models.bundled.world`, the network from transformers.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from minikv.models.bundled import world

SPECIALS = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
BOS, END, USER, ASSISTANT, SYSTEM = range(5)
TEMPLATE = (
    "<|bos|>{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB, LONGEST = 2048, 8192
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


class Chats:
    """Chats of exactly `context` tokens: a document, then questions and answers."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)

    def sample(self, context: int, per_fact: float) -> tuple[list[int], list[int]]:
        """(ids, marks): marks are 1 for the tokens of answers, 0 for others.

        The document has a fact every `per_fact` tokens. A quarter to a half of `context` is for
        questions, because the model learns from these.
        """
        rng = self.rng
        room = int(context * rng.uniform(0.25, 0.55))
        # A question that is asked twice is answered by copying, which teaches little.
        facts = min(max(2, int((context - room) / per_fact)), 140)
        room = min(room, 40 * facts)
        sentences = max(3, int((context - room) / 12.4))
        doc = world.document(rng, sentences, min(facts, sentences))
        pairs = list(world.questions(rng, doc, min(room // 18 + 2, 2 * facts)))
        name = rng.choice(world.WORDS["nouns"]).lower()
        head = f"Document: {name}.txt\n\n" if rng.random() < 0.5 else ""
        users = [f"{head}{doc.text}\n\n{pairs[0][0]}"] + [q for q, _ in pairs[1:]]
        texts = users + [answer for _, answer in pairs]
        coded = [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]
        ids, marks = [BOS], [0]
        for user, answer in zip(coded[: len(pairs)], coded[len(pairs) :], strict=True):
            turn = [USER, *user, END, ASSISTANT]
            ids += [*turn, *answer, END]
            marks += [0] * len(turn) + [1] * (len(answer) + 1)
        return ids, marks

    def batch(self, context: int, tokens: int, phase: Phase) -> tuple[Tensor, Tensor]:
        """ids and marks [B, context + 1], of about `tokens` tokens in all. Each chat is cut or
        padded at its end, with marks of -1."""
        rows = max(1, tokens // context)
        ids = torch.full((rows, context + 1), END)
        marks = torch.full((rows, context + 1), -1)
        bounds = math.log(phase.dense), math.log(phase.sparse)
        for row in range(rows):
            m: list[int] = []
            while not any(m):
                i, m = self.sample(context, math.exp(self.rng.uniform(*bounds)))
                i, m = i[: context + 1], m[: context + 1]
            ids[row, : len(i)], marks[row, : len(i)] = torch.tensor(i), torch.tensor(m)
        return ids, marks


def new_network(seed: int) -> LlamaForCausalLM:
    """The network with new weights, in float32."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=LONGEST,
        rms_norm_eps=1e-5,
        rope_parameters=ROPE,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=END,
    )
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


def stretched(rng: random.Random, context: int) -> Tensor:
    """Positions [context], ascending and below `LONGEST`; in two of three draws with a few gaps.

    So the model sees the distances of the longest context at the cost of a short one (positional
    skip-wise training, arXiv 2309.10400).
    """
    at = torch.arange(context)
    if rng.random() < 0.67:
        for _ in range(3):
            at[rng.randrange(context) :] += rng.randint(0, (LONGEST - context) // 3)
    return at


def write(folder: Path, network: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Write a checkpoint directory in the usual Llama layout, in float32."""
    network.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
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
    args = parser.parse_args()
    device = torch.device(args.device)
    tokenizer, network = train_tokenizer(args.seed), new_network(args.seed).to(device)
    print(f"{network.num_parameters():,} parameters on {device}", flush=True)
    # Muon for the matrices of the layers: with it, recall is learned from far fewer tokens.
    weights = list(network.named_parameters())
    inner = [t for name, t in weights if t.dim() == 2 and "embed" not in name]
    outer = [t for name, t in weights if t.dim() == 1 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inner, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, weight_decay=0.0, betas=(0.9, 0.97), foreach=True),
    ]
    forward = torch.compile(network.model, dynamic=False) if args.compile else network.model
    chats = Chats(tokenizer, args.seed + 1)
    sampler = torch.Generator().manual_seed(args.seed)
    shapes = random.Random(args.seed)
    began, step = time.time(), 0
    for number, phase in enumerate(map(Phase.parse, args.phases.split(","))):
        steps = max(1, int(phase.tokens / max(args.batch, *phase.contexts)))
        for i in range(steps):
            context = shapes.choice(phase.contexts)
            rate = phase.last + (phase.first - phase.last) * (1 + math.cos(math.pi * i / steps)) / 2
            if number == 0:
                rate *= min(1.0, (step + 1) / 100)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.zero_grad(set_to_none=True)
            ids, marks = (t.to(device) for t in chats.batch(context, args.batch, phase))
            at = stretched(chats.rng, context).to(device).expand(len(ids), -1)
            # A mask of ones: without one, transformers takes a gap for the start of another text.
            given = {"attention_mask": torch.ones_like(ids[:, 1:]), "use_cache": False}
            with torch.autocast(device.type, torch.bfloat16):
                found = forward(ids[:, :-1], position_ids=at, **given)
            target, mark = ids[:, 1:].flatten(), marks[:, 1:].flatten()
            answers, rest = (mark > 0).nonzero().squeeze(1), (mark == 0).nonzero().squeeze(1)
            some = torch.randint(len(rest), (max(256, len(rest) // 8),), generator=sampler)
            at = torch.cat((answers, rest[some.to(device)]))
            logits = network.lm_head(found.last_hidden_state.flatten(0, 1)[at].float())
            losses = F.cross_entropy(logits, target[at], reduction="none")
            told, others = losses[: len(answers)].mean(), losses[len(answers) :].mean()
            (told + 0.1 * others).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            step += 1
            if step % 50 == 0:
                right = logits[: len(answers)].argmax(-1) == target[answers]
                print(
                    f"{time.time() - began:6.0f}s step {step} lr {rate:.1e} answer {told:.3f} "
                    f"rest {others:.3f} tokens right at {context}: {right.float().mean():.3f}",
                    flush=True,
                )
            if step % 200 == 0:
                write(args.out, network, tokenizer)
        write(args.out, network, tokenizer)
    print(f"done in {(time.time() - began) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
