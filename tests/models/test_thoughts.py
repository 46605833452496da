"""Chats with thoughts become the ids that transformers gives for what the model wrote.

The templates are short ones that treat thoughts as the published ones do.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
import vocabularies as v
from loaded import turns

from minikv.models.templates import ChatTemplate, Message
from minikv.models.thoughts import ThoughtTags
from minikv.models.tokenizer import Tokenizer
from minikv.models.tokenizer_json import JsonVocabulary

LOOP = """{% for m in messages %}{% set content = m.content %}<|{{ m.role }}|>@<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>#{% endif %}"""
CUT = "{% if m.role == 'assistant' %}{% set content = content.split('</think>')[-1] %}{% endif %}"
QWEN = """{% if m.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ content }}"""
KEEP = "{{ content }}"
ENDED = "{% if quick %}<think>\n\n</think>\n{% endif %}"
# The template, its tokens beside the turn markers, whether it forgets, whether the prompt opens.
R1 = LOOP.replace("@", CUT + "{{ content }}").replace("#", "<think>\n")
TAGS = ("<think>", "</think>")
MODELS: dict[str, tuple[str, tuple[str, ...], bool, bool]] = {
    "R1-Distill": (R1, TAGS, True, True),
    "R1-Distill, tags as text": (R1, (), True, True),
    "Qwen3": (LOOP.replace("@", QWEN).replace("#", ""), TAGS, True, False),
    "SmolLM3": (LOOP.replace("@", KEEP).replace("#", ENDED), TAGS, False, False),
    "Magistral": (LOOP.replace("@", KEEP).replace("#", ""), ("[THINK]", "[/THINK]"), False, False),
    "no tags": (LOOP.replace("@", KEEP).replace("#", ""), (), False, False),
}
MARKERS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")


def made(name: str) -> tuple[ChatTemplate, Any]:
    """Our template, and a function that gives the ids of transformers."""
    from transformers import PreTrainedTokenizerFast

    source, tags, _, _ = MODELS[name]
    names = (*MARKERS, *tags)
    data = v.byte_level_json(names, 1000, len(names))
    for token in data["added_tokens"]:  # Mistral's are special and so have no text
        token["special"] = token["content"] not in TAGS
    read = tokenizers.Tokenizer.from_str(json.dumps(data))
    backend = PreTrainedTokenizerFast(tokenizer_object=read)
    template = ChatTemplate(source, name, Tokenizer(JsonVocabulary(data)))

    def theirs(chat: list[tuple[str, str]]) -> Any:
        messages = [{"role": role, "content": text} for role, text in chat]
        how: Any = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
        return backend.apply_chat_template(messages, chat_template=source, **how)

    return template, theirs


@pytest.mark.parametrize("name", MODELS)
def test_chats_with_thoughts(name: str) -> None:
    """Their ids are those of transformers. Of an answer with a tag within code, all reaches the
    model, and no control token with it."""
    template, theirs = made(name)
    _, names, forgets, opens = MODELS[name]
    tags, tokenizer = template.tags, template._tokenizer
    for thoughts in ("one\nor two", ""):
        answer = "Yes,\n\nit is."
        written = tags.wrapped(thoughts, answer) if tags else answer
        chat = turns("a", Message("assistant", answer, thoughts if tags else ""), "b")
        expected = theirs([("user", "a"), ("assistant", written), ("user", "b")])
        assert template.opening(chat) == expected
        assert template.following(chat) == expected[-len(template.following(chat)) :]
    assert (tags is None) == (name == "no tags")
    if tags is None:
        return
    begin, end = names or TAGS
    assert (tags.begin, tags.end, tags.forgets) == (begin, end, forgets)
    assert set(tags.unseen.values()) == ({begin, end} if begin == "[THINK]" else set())
    for question in ("a", f"a{begin}"):
        assert tags.opened(template.opening([Message("user", question)])) == opens
    spelled = "".join(tags.unseen.get(id) or tokenizer.decode([id]) for id in tags.ending)
    assert spelled.strip() == end
    answer = f"So:\n```\n{begin}x{end}\n```\nIt {end} is."
    chat = turns(f"a{end}b", Message("assistant", answer, f"first {begin} {end}"), end)
    plain = turns("a", Message("assistant", "b", "c"), "d")
    ids, control = template.opening(chat), set(tokenizer.control.values())
    assert answer in tokenizer.decode(ids)
    expected = [id for id in template.opening(plain) if id in control]
    assert [id for id in ids if id in control] == expected


def test_a_template_that_refuses_a_second_question_forgets_nothing() -> None:
    source = "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}</think>"
    tokenizer = made("SmolLM3")[0]._tokenizer
    template = ChatTemplate(source + LOOP.replace("@", KEEP).replace("#", ""), "x", tokenizer)
    assert isinstance(template.tags, ThoughtTags)
    assert not template.tags.forgets
