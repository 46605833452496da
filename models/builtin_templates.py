"""Chat formats of known families, for model folders without a template.

A family is recognised by its vocabulary: by control tokens that only it has, or, where the turn
markers are plain text, by the ids of these markers. Llama-2 and TinyLlama share one vocabulary, and
Mistral-7B v0.1 and Zephyr another; there the folder's name decides. Two variables of the templates:
`gap` is a space, or empty if the vocabulary itself puts a space before a text; `start` is the BOS
token, or empty if the folder says that a text gets none.

In the plain-text formats (Llama-2, Mistral v1, Zephyr, TinyLlama) a marker that the user typed
cannot be told from a genuine one, because both have the same ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minikv.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A chat format. source: its Jinja template."""

    name: str
    source: str


# llama-models, chat_format.py.
LLAMA_3 = BuiltIn(
    "llama-3",
    "<|begin_of_text|>"
    "{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>{{ '\\n\\n' }}{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}"
    "{% endif %}",
)

# llama 2 release, generation.py: the system prompt stands inside the first user turn.
LLAMA_2 = BuiltIn(
    "llama-2",
    "{% set ns = namespace(system='') %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}"
    "{% set ns.system = '<<SYS>>\\n' ~ m.content ~ '\\n<</SYS>>\\n\\n' %}"
    "{% elif m.role == 'user' %}"
    "<s>{{ gap }}[INST] {{ (ns.system ~ m.content) | trim }} [/INST]{% set ns.system = '' %}"
    "{% else %} {{ m.content | trim }} </s>{% endif %}"
    "{% endfor %}",
)

# mistral_common, InstructTokenizerV1.
MISTRAL_V1 = BuiltIn(
    "mistral-v1",
    "<s>{% set ns = namespace(system='') %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content ~ '\\n\\n' %}"
    "{% elif m.role == 'user' %}"
    "{{ gap }}[INST] {{ ns.system }}{{ m.content }} [/INST]{% set ns.system = '' %}"
    "{% else %} {{ m.content }}</s>{% endif %}"
    "{% endfor %}",
)

# mistral_common, InstructTokenizerV2 and V3: the system prompt stands in the last user turn.
MISTRAL_V3 = BuiltIn(
    "mistral-v3",
    "<s>{% set ns = namespace(system='') %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content ~ '\\n\\n' %}"
    "{% elif m.role == 'user' %}"
    "[INST]{{ gap }}{% if loop.last %}{{ ns.system }}{% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ gap }}{{ m.content.rstrip(' ') }}</s>{% endif %}"
    "{% endfor %}",
)

# mistral_common, InstructTokenizerV7.
MISTRAL_V7 = BuiltIn(
    "mistral-v7",
    "<s>{% for m in messages %}"
    "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ gap }}{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]{{ gap }}{{ m.content }}[/INST]"
    "{% else %}{{ gap }}{{ m.content.rstrip(' ') }}</s>{% endif %}"
    "{% endfor %}",
)

CHATML = BuiltIn(
    "chatml",
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}{{ m.content }}<|im_end|>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}",
)

_ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>{{ '\\n' }}{{ m.content }}</s>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '\\n' }}{% endif %}"
)
ZEPHYR = BuiltIn("zephyr", _ZEPHYR)
TINYLLAMA = BuiltIn("tinyllama", _ZEPHYR)

PLAIN = BuiltIn(
    "plain",
    "{{ start }}{% for m in messages %}"
    "{% if not loop.first %}{{ '\\n' if m.role == 'assistant' else '\\n\\n' }}{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '\\n' }}{% endif %}",
)

# The ids of "[INST]" at the start of a text.
_LLAMA_2_INST = [518, 25580, 29962]
_MISTRAL_V1_INST = [733, 16289, 28793]


def recognise(tokenizer: Tokenizer, folder: Path) -> BuiltIn | None:
    """The chat format of the family with this vocabulary; None if it is not known."""

    def has(*control: str) -> bool:
        return all(text in tokenizer.control for text in control)

    if has("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"):
        return LLAMA_3
    if has("<|im_start|>", "<|im_end|>"):
        return CHATML
    if has("<s>", "</s>", "[INST]", "[/INST]"):
        return MISTRAL_V7 if has("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]") else MISTRAL_V3
    if not has("<s>", "</s>"):
        return None
    name = str(folder).lower()
    inst = tokenizer.encode("[INST]")
    if inst == _LLAMA_2_INST:
        return TINYLLAMA if "tinyllama" in name else LLAMA_2
    if inst == _MISTRAL_V1_INST:
        return ZEPHYR if "zephyr" in name else MISTRAL_V1
    return None
