"""Chats become the ids that transformers and mistral_common give; templates are bounded."""

from __future__ import annotations

import concurrent.futures
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import loaded
import pytest
import tokenizers
import vocabularies as v
from jinja2.exceptions import TemplateError
from loaded import refused, turns
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from pairwise import some_by_day

from minikv.models import rendering, templates
from minikv.models.builtin_templates import source
from minikv.models.rendering import TemplateRefusal, TemplatesUnavailable, _Process, process, render
from minikv.models.templates import ChatTemplate, Message
from minikv.models.tokenizer import Tokenizer
from minikv.models.tokenizer_json import JsonVocabulary
from minikv.models.vocabulary import TokenSearch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# In the style of the published ones: white space control, macros, dates, refusals, tools, tags.
PUBLISHED = {
    path.stem: path.read_text("utf-8")
    for path in sorted(Path(__file__).with_name("templates").glob("*.jinja"))
}
OWN = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
SP = {"bos_token": "<s>", "eos_token": "</s>"}
L3 = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
CHATML_ENDS = {"eos_token": "<|im_end|>"}
CASES: dict[str, tuple[str, Callable[..., dict[str, Any]], Any, dict[str, str]]] = {
    "llama-3": ("llama-3", v.byte_level_json, v.LLAMA_3, L3),
    "llama-3.2": ("llama-3.2", v.byte_level_json, v.LLAMA_3, L3),
    "chatml": ("chatml", v.byte_level_json, v.CHATML, CHATML_ENDS),
    "macro": ("chatml-macro", v.byte_level_json, v.CHATML, CHATML_ENDS),
    "own": ("own", v.byte_level_json, OWN, {"bos_token": "<|bos|>"}),
    "llama-2": ("llama-2", v.legacy_json, "v1", SP),
    "mistral-v1": ("mistral-v1", v.legacy_json, "v1", SP),
    "zephyr": ("zephyr", v.legacy_json, "v1", SP),
    "mistral-v3": ("mistral-first", v.first_json, "v3", SP),
    "zephyr-first": ("zephyr", v.first_json, "v3", SP),
}


@cache
def prepared(case: str) -> tuple[Tokenizer, ChatTemplate]:
    """Our tokenizer and template."""
    name, make, of, named = CASES[case]
    # These two are found without a configuration, so that other tests have the same tokenizer.
    tokenizer = loaded.tokenizer(make, of, **({} if named is SP else named))
    with tempfile.TemporaryDirectory() as folder:
        config = {**named, "chat_template": PUBLISHED[name]}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        return tokenizer, ChatTemplate.from_folder(folder, tokenizer)


@cache
def theirs(make: Callable[..., dict[str, Any]], of: Any, **named: str) -> PreTrainedTokenizerFast:
    """The tokenizer that transformers makes of the same file."""
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer.from_str(json.dumps(make(of)))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def random_chat(rng: random.Random, system: bool = True, strip: bool = False) -> list[Message]:
    def text() -> str:
        made = v.random_text(rng, ("<", ">", "[", "]", "<|", "|>", "INST", "\n\n"), 8)
        return made.strip() or "x" if strip else made

    prompt = text() if system and rng.random() < 0.4 else None
    return turns(*(text() for _ in range(2 * rng.randrange(3) + 1)), system=prompt)


def plain(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]


@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_transformers(case: str, part: float) -> None:
    tokenizer, template = prepared(case)
    name, make, of, named = CASES[case]
    oracle, rng = theirs(make, of, **named), random.Random(21)
    given = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    compared = 0
    for _ in range(int(part * 500)):
        chat = random_chat(rng, system=case != "mistral-v1")
        if any(tokenizer.lookalikes(m.content) for m in chat):
            continue
        expected = oracle.apply_chat_template(plain(chat), chat_template=PUBLISHED[name], **given)
        assert template.opening(chat) == expected, chat
        compared += 1
    assert compared > part * 450


NEWER = ("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")


@pytest.mark.parametrize(
    ("file", "data", "format"),
    [
        ("tokenizer.model.v1", v.REAL[0], "v1"),
        ("tokenizer.model.v2", v.REAL[1], "v3"),
        ("tokenizer.model.v3", v.REAL[2], "v3"),
        ("tokenizer.model.v7", v.REAL[3], "v7"),
        ("tokenizer.model.v7m1", v.REAL[4], "v7"),
        ("tokenizer.model", v.REAL[0], "v1"),
        ("tokenizer.model", v.REAL[2], "v3"),
        ("tekken.json", v.tekken(), "v3"),
        ("tekken.json", v.tekken(2000, "v7"), "v7"),
        ("tekken.json", v.tekken(2000, "v11", NEWER), "v7"),
        ("tekken.json", v.tekken(2000, "v13", NEWER), "v7"),
    ],
)
def test_built_in_ids_are_the_vendors(
    tmp_path: Path, file: str, data: Any, format: str, part: float
) -> None:
    if isinstance(data, str):
        theirs = v.vendor_file(data)
        (tmp_path / file).write_bytes(theirs.read_bytes())
    else:
        theirs = v.write_folder(tmp_path, data) / file
    template = ChatTemplate.from_folder(tmp_path, Tokenizer.from_folder(tmp_path))
    assert template.name == f"built-in mistral-{format}"
    vendor = MistralTokenizer.from_file(str(theirs))
    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    rng = random.Random(22)
    for _ in range(round(1000 * part)):
        # The vendor encodes the parts of a v1 chat one by one, so that white space at the edge of
        # a message meets its neighbours differently there.
        chat = random_chat(rng, strip=True)
        if any("REF" in m.content for m in chat):
            continue
        messages = [kinds[m.role](content=m.content) for m in chat]
        expected = vendor.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
        assert template.opening(chat) == expected, chat


@pytest.mark.parametrize(
    ("version", "format"), [("v3", "mistral-v3"), ("v1", "mistral-v1"), ("v1", "llama-2")]
)
def test_built_in_formats_agree_over_vocabulary_layouts(
    version: str, format: str, part: float
) -> None:
    pieces = ChatTemplate.built_in(format, loaded.tokenizer(version))
    rng = random.Random(23)
    for make in (v.first_json, v.legacy_json):
        words = ChatTemplate.built_in(format, loaded.tokenizer(make, version))
        for _ in range(round(200 * part)):
            chat = random_chat(rng, strip=True)
            assert words.opening(chat) == pieces.opening(chat), (format, chat)


def spoken(format: str) -> tuple[Tokenizer, ChatTemplate]:
    """A tokenizer with the control tokens of a built-in format, and that format."""
    if format == "llama-3":
        tokenizer = loaded.tokenizer(v.byte_level_json, v.LLAMA_3, **L3)
    elif format == "chatml":
        tokenizer = loaded.tokenizer(v.byte_level_json, v.CHATML, **CHATML_ENDS)
    else:
        tokenizer = loaded.tokenizer({"mistral-v3": "v3", "mistral-v7": "v7"}.get(format, "v1"))
    return tokenizer, ChatTemplate.built_in(format, tokenizer)


# Not "mistral-v1" of a folder: without the space its answer can merge with the bracket before it.
@pytest.mark.parametrize(
    ("make", "name"),
    [(prepared, case) for case in CASES if case != "mistral-v1"] + [(spoken, f) for f in v.FORMATS],
)
def test_following_continues_the_opening(make: Any, name: str, part: float) -> None:
    """What is fed turn by turn is what the whole conversation gives."""
    tokenizer, template = make(name)
    rng = random.Random(24)
    for _ in range(round(400 * part)):
        chat = random_chat(rng, system=name != "mistral-v3", strip=True)
        if len(chat) < 3:
            continue
        fed, whole = template.opening(chat[:-2]), template.opening(chat)
        suffix = template.following(chat)
        assert suffix, chat
        end = len(whole) - len(suffix)
        assert (whole[: len(fed)], whole[end:]) == (fed, suffix)
        assert tokenizer.decode(whole[len(fed) : end]) == chat[-2].content


def test_following_survives_what_a_template_trims() -> None:
    tokenizer, template = prepared("llama-3")
    found = template.following(turns("q", "  padded \n", " r "))
    assert found[:2] == [tokenizer.control["<|eot_id|>"], tokenizer.control["<|start_header_id|>"]]
    assert tokenizer.decode(found) == "user\n\nrassistant\n\n"


def test_no_text_is_searched_for_the_parts_of_no_control_token(monkeypatch: Any) -> None:
    """A document has a million characters."""
    monkeypatch.setattr(templates, "bisect_right", None)
    assert templates._Shield(TokenSearch([])).hide(" a document ") == " a document "


def with_source(source: str) -> ChatTemplate:
    vocabulary = JsonVocabulary(v.byte_level_json(OWN, 1000, 8))
    return ChatTemplate(source, "chat_template.jinja", Tokenizer(vocabulary))


def test_conversations_that_are_refused() -> None:
    short = with_source(each(TURN).replace("messages", "messages[:2]"))
    assert short.opening(ASKED)
    refused(lambda: short.opening(LATER), "writes no answer", code=3)
    template = prepared("own")[1]
    for chat in ([], turns("a", "b")):
        with pytest.raises(ValueError, match="user message"):
            template.opening(chat)
    with pytest.raises(ValueError, match="answer"):
        template.following(turns("a"))
    last, alternates = with_source("{{ messages[-1].content }}"), prepared("mistral-v1")[1]
    refused(lambda: last.following(turns("a", "b", "c")), "leaves earlier answers out", code=3)
    refused(lambda: alternates.opening(turns("a") * 2), "roles must alternate", code=3)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_system_prompts_are_folded_where_a_template_takes_none(source: str) -> None:
    template = with_source(source)
    tokenizer = template._tokenizer
    assert template.notes == ()
    chat = turns("Hi", "Yes", "So", system="Be brief.")
    assert template.opening(chat[:2]) == tokenizer.encode("Be brief.\n\nHi")
    assert "no system prompt" in template.notes[0]
    assert template.following(chat) == tokenizer.encode("So", "inside")


TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
LOOP = "{% for m in messages %}@{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
CUT = "{{ m.content if m.role == 'user' else m.content[:9] }}"
LONG = "a question that is longer than twenty characters"
ASKED = turns(LONG)
LATER = turns(LONG, "an answer, again in some words", "So?")


def each(body: str) -> str:
    """A template without the header of an answer."""
    return "{% for m in messages %}" + body + "{% endfor %}"


def looped(body: str) -> str:
    return LOOP.replace("@", body)


LATER_CUT = "{{ m.content if loop.first else m.content[:20] }}"
SHORT = "{{ m.content[:20] if m.role == 'user' else m.content }}"
LEFT_OUT: dict[str, tuple[str, list[Message], str]] = {
    "cut": ("{{ m.content[:20] }}", ASKED, "a question"),
    "a word": ("{{ m.content.split()[0] }}", ASKED, "a question"),
    "all of it": ("<|{{ m.role }}|>", ASKED, "a question"),
    "early ones": ("{{ m.content if loop.last }}", LATER, "a question"),
    "first": ("{{ m.content if not loop.first }}yes", turns("yes", "b", "yes"), "a question"),
    "answers": ("{{ m.content if m.role == 'user' }}", LATER, "an earlier answer"),
    "end of answers": (CUT, LATER, "an earlier answer"),
    "end of the system prompt": (CUT, turns(LONG, system="Be brief, now."), "the system"),
    "words run together": ("{{ m.content.split() | join }}", ASKED, "a question"),
    "said by the system": (SHORT, turns(LONG, system=f"People often ask: {LONG}"), "a question"),
    "what a question said, too": (LATER_CUT, turns(f"Text: {LONG}", "b", LONG), "a question"),
    "all before a tag": (
        "{{ m.content.split('</b>')[-1] }}",
        turns(LONG, "one <b>two</b> three", LONG),
        "an earlier answer",
    ),
}
for tag in ("</b>", "[/b]", "</html>", "</think>", "[/THINK]"):
    tagged = turns(LONG, f"{tag[0]}b{tag[-1]} some bold text {tag}", LONG)
    LEFT_OUT[f"answers that end with {tag}"] = CUT, tagged, "an earlier answer"


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_template_leaves_out_is_refused(name: str) -> None:
    source, chat, which = LEFT_OUT[name]
    template = with_source(each(source))
    refused(lambda: template.opening(chat), f"leaves out {which}", code=3)
    if chat is ASKED:
        refused(lambda: template.following(turns("x", "y", LONG)), "leaves", code=3)


@pytest.mark.parametrize(
    "change",
    [
        "m.content | trim",
        "m.content | tojson",
        "m.content | upper",
        "m.content.split() | join(' ')",
        "m.content | indent(4)",
        "m.content.split('</think>')[-1]",
    ],
)
def test_a_template_may_change_case_and_space_and_take_reasoning_out(change: str) -> None:
    template = with_source(looped(f"<|{{{{ m.role }}}}|>{{{{ {change} }}}}<|end|>"))
    chat = turns(' "one"\ntwo ', "<think>so\nor so</think>\n Yes\n\n ", "c")
    for ids in (template.opening(chat), template.following(chat)):
        assert template._tokenizer.decode(ids).strip('"').lower().endswith("c")


@pytest.mark.parametrize(
    ("end", "answer"),
    [
        ("<|/think|>", "<|think|>so<|/think|> hi"),
        ("</seed:think>", "<seed:think>so</seed:think> hi"),
        ("<|end_of_thought|>", "so<|end_of_thought|> hi"),
    ],
)
def test_a_question_may_repeat_an_answer_without_its_reasoning(end: str, answer: str) -> None:
    cut = f"{{{{ m.content.split('{end}')[-1] if m.role == 'assistant' else m.content }}}}"
    template = with_source(looped(TURN.replace("{{ m.content }}", cut)))
    chat = turns(answer, answer, answer, system=answer)
    for messages in (chat, chat[1:]):
        text = template._tokenizer.decode(template.opening(messages))
        assert text == answer * (len(messages) - 2) + answer.split(end)[-1] + answer


EACH = (
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
)
UNLESS_SYSTEM = (
    "{% if m.role == 'system' %}<|system|>{{ m.content | trim }}<|end|>"
    "{% else %}<|{{ m.role }}|>{{ m['content'][0]['text'] }}<|end|>{% endif %}"
)
NO_TEXT = (
    "{% if m.content is string %}{{ raise_exception('a list') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content | map(attribute='text') | join }}<|end|>"
)


@pytest.mark.parametrize(
    ("roles", "body"),
    [
        ({"system", "user", "assistant"}, TURN.replace("{{ m.content }}", EACH)),
        ({"user", "assistant"}, UNLESS_SYSTEM),
        ({"system", "user", "assistant"}, NO_TEXT),
        (set(), TURN),
    ],
    ids=["each part", "unless system", "no text", "text"],
)
def test_contents_are_lists_of_parts_where_a_template_takes_them_so(roles: Any, body: str) -> None:
    """transformers renders what a caller gives it in the right form."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = with_source(looped(body))
    chat = turns(LONG, LATER[1].content, "<|end|> hi", system="s")
    given: list[dict[str, Any]] = [dict(one) for one in plain(chat)]
    for one in given:
        if one["role"] in roles:
            one["content"] = [{"type": "text", "text": one["content"]}]
    texts = render_jinja_template([given], chat_template=looped(body), add_generation_prompt=True)
    ids = template.opening(chat)
    assert spelled(template, ids) == texts[0][0]
    assert ids[-len(template.following(chat)) :] == template.following(chat)


def spelled(template: ChatTemplate, ids: list[int]) -> str:
    """The text of ids, with control tokens."""
    tokenizer = template._tokenizer
    control = {id: text for text, id in tokenizer.control.items()}
    return "".join(control.get(id) or tokenizer.decode([id]) for id in ids)


LABELS = "{{ {'user': 'USER: ', 'assistant': 'ASSISTANT: '}[m.role] }}{{ m.content }}"
END = "<|end|><|assistant|>"
UNANSWERED = "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
ASKS_FIRST = "{% if add_generation_prompt %}<|system|>Answer.{% endif %}"
PART_OF_HEADER = (
    "<|{{ m.role }}|>{{ m.content }}"
    "{% if not loop.last or add_generation_prompt %}<|end|>{% endif %}"
)
INST = (
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|end|>{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "ends"),
    [
        (each(TURN), END),
        (each(TURN + "\n"), "<|end|>\n<|assistant|>"),
        (each(LABELS + "\n"), "So?\nASSISTANT:"),
        # Those that need a question after the answer.
        (each(TURN) + UNANSWERED, END),
        (each("{% if m.role == 'user' or not loop.last %}" + TURN + "{% endif %}"), END),
        # Those that take the wish for an answer for something else, or write a part of its header.
        (ASKS_FIRST + each(TURN), END),
        (looped(TURN).replace("<|assistant|>", "{{ '\n' }}"), END),
        (each(PART_OF_HEADER), END),
        # Those that ask for an answer, always write its header, or have none.
        (looped(TURN), END),
        (looped(TURN + "<|system|>"), "<|end|><|system|><|assistant|>"),
        (each(TURN) + "<|assistant|>", END),
        (each(INST), "[/INST]"),
    ],
)
def test_the_header_of_an_answer_is_in_front_of_it(source: str, ends: str) -> None:
    template = with_source(source)
    first = template.opening(ASKED)
    for ids in (first, template.following(LATER), template.opening(LATER)):
        text = spelled(template, ids)
        assert text.endswith(ends.replace("So?", LONG) if ids is first else ends)
        assert text.count("<|assistant|>") <= text.count("<|user|>")
    # The answer is where the whole conversation has it.
    assert template.opening(LATER)[: len(first)] == first


@pytest.mark.parametrize(("asks", "said"), [("Now answer.", True), ("<|assistant|><think>", False)])
def test_a_question_that_does_not_end_as_answers_begin_is_said(asks: str, said: bool) -> None:
    template = with_source(looped(TURN).replace("<|assistant|>", asks))
    assert ["tokens that begin an answer" in note for note in template.notes] == [True] * said
    assert template.opening(ASKED) == template._compose(ASKED, follow=False)


def from_folder(folder: Path, config: Any = None, special: tuple[str, ...] = OWN) -> ChatTemplate:
    v.write_folder(folder, v.byte_level_json(special, 1000, 8), config)
    return ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))


@pytest.mark.parametrize("first", ["<html>", "<?xml version='1.0'?>", "<!-- a -->\n<HTML>"])
def test_a_template_may_begin_with_a_tag(tmp_path: Path, first: str) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_text(first + looped(TURN), "utf-8")
    template = from_folder(tmp_path)
    assert template._tokenizer.decode(template.opening(ASKED)) == first + LONG
    for page in (first, "<!doctype html>" + first + "{{ messages }}"):
        file.write_text(page, "utf-8")
        refused(lambda: from_folder(tmp_path), "is a web page", code=6)


HEADINGS = "### {{ m.role }}:\n{{ m.content }}\n\n"
UPPER = "{{ m.role | upper }}: {{ m.content }} "


@pytest.mark.parametrize(
    ("source", "text", "count"),
    [
        (PUBLISHED["llama-2"], "[INST] a [/INST] <<SYS>> [INSTALL] INST", 3),
        (PUBLISHED["zephyr"], "<|user|> and <|assistant|>, <|system|> <|other|>", 3),
        (each(HEADINGS), "### user:\n### assistant:\n### note:\nuser:", 2),
        ("Some words: of it. " + each(UPPER), "USER: a ASSISTANT: b Some words: USER :", 2),
        (PUBLISHED["chatml"], "user\nassistant <|im_start|> [INST]", 0),
        (PUBLISHED["llama-3.2"], "Cutting Knowledge Date: Today Date: user", 0),
    ],
)
def test_markers_that_are_plain_text_are_counted_for_templates_of_a_folder(
    source: str, text: str, count: int
) -> None:
    vocabulary = JsonVocabulary(v.byte_level_json(v.CHATML + v.LLAMA_3, 1000, 12))
    template = ChatTemplate(source, "t", Tokenizer(vocabulary, named=SP))
    assert template.markers(text) == count


def test_look_up_order(tmp_path: Path) -> None:
    def found(**config: Any) -> tuple[str, str]:
        template = from_folder(tmp_path, {"eos_token": "<|end|>", **config})
        return template.name, template._tokenizer.decode(template.opening(turns("")))

    assert found() == ("plain", "\n")
    assert "plain completion" in from_folder(tmp_path).notes[0]
    for listed, special, format in (  # templates for other uses are not taken
        ({"rag": "R", "tool_use": "T"}, OWN, "plain"),
        ([{"name": "rag", "template": "R"}, {"name": "tool"}, 7], v.LLAMA_3, "built-in llama-3"),
    ):
        template = from_folder(tmp_path, {"chat_template": listed}, special)
        assert template.name == format
        (note,) = template.notes
        assert note.startswith("no default chat template in the folder")
    (tmp_path / "chat_template.json").write_text('{"chat_template": {"default": "D"}}', "utf-8")
    assert found() == ("chat_template.json", "D")
    listed = [{"name": "tool", "template": "X"}, {"name": "default", "template": "C"}]
    assert found(chat_template=listed) == ("tokenizer_config.json", "C")
    assert found(chat_template="B") == ("tokenizer_config.json", "B")
    (tmp_path / "chat_template.jinja").write_text("A", "utf-8")
    assert found(chat_template="B") == ("chat_template.jinja", "A")


def llama_2_json() -> dict[str, Any]:
    """A vocabulary that has Llama-2's ids for its turn marker, and fillers elsewhere."""
    data = v.legacy_json("v1")
    places = {"▁[": 518, "IN": 1177, "ST": 1254, "INST": 25580, "]": 29962, "▁": 29871, "[": 29961}
    places |= {"I": 29902, "N": 29940, "S": 29903, "T": 29911}
    vocab = {f"filler{id}": id for id in range(3, 32_000) if id not in places.values()}
    data["model"]["vocab"] = {"<unk>": 0, "<s>": 1, "</s>": 2, **vocab, **places}
    data["model"]["merges"] = [["▁", "["], ["I", "N"], ["S", "T"], ["IN", "ST"]]
    return data


@pytest.mark.parametrize(
    ("name", "folder", "of"),
    [
        ("built-in llama-3", "a", (v.byte_level_json, v.LLAMA_3, 1000, 8)),
        ("built-in chatml", "b", (v.byte_level_json, v.CHATML, 1000, 8)),
        ("built-in mistral-v3", "c", (v.first_json, "v3")),
        ("built-in mistral-v3", "d", (v.byte_level_json, v.NEMO, 1000, 8)),
        ("built-in mistral-v1", "mistral-7b", ("v1",)),
        ("built-in zephyr", "zephyr-7b-beta", ("v1",)),
        ("built-in llama-2", "Llama-2-7b-chat", (llama_2_json,)),
        ("built-in tinyllama", "TinyLlama-1.1B", (llama_2_json,)),
        ("plain", "unknown", (v.byte_level_json, ("<s>", "</s>"), 1000, 8)),
    ],
)
def test_families_are_recognised_by_their_vocabulary(name: str, folder: str, of: Any) -> None:
    template = ChatTemplate.from_folder(Path("/none") / folder, loaded.tokenizer(*of))
    assert template.name == name
    assert template.notes


def test_built_in_formats_as_text() -> None:
    """The published text of each format, from its reference implementation's documentation."""
    messages = plain(turns("a", "b", "c", system="S"))
    written = {
        "llama-2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\na [/INST] b </s><s>[INST] c [/INST]",
        "llama-3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n",
        "zephyr": "<|system|>\nS</s>\n<|user|>\na</s>\n<|assistant|>\nb</s>\n<|user|>\nc</s>\n"
        "<|assistant|>\n",
        "plain": "<s>S\n\na\nb\n\nc\n",
    }
    for format, text in written.items():
        variables = {"messages": messages, "add_generation_prompt": True, "gap": "", "start": "<s>"}
        assert render(source(format), format, variables) == text


# The sandbox.

FAITHFUL = [
    *PUBLISHED.values(),
    "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ 'é<&>' | tojson }}",
    "{{ none }}{{ true }}{{ 1.5 }}{{ missing }}{{ [1, 'a', none] }}{{ (1, 2) }}{{ {'a': [1]} }}",
    "{% macro f(a, b='z') %}<{{ a }}{{ b }}>{% endmacro %}{{ f('x') ~ f(2, b=none) }}",
    "{% set ns = namespace(a=0, b='') %}{% for i in range(9) %}{% if i == 5 %}{% break %}{% elif "
    "i % 2 %}{% continue %}{% endif %}{% set ns.a = ns.a + i * 2 %}{% set ns.b = ns.b ~ i %}"
    "{% endfor %}{{ ns.a }}{{ ns.b }}",
    "{% set x %}a{{ 1 }}b{% endset %}{{ x | upper }}{{ x.replace('a', 'cc') }}{{ x | length }}",
    "{{ 'a-b-c'.split('-') | join('+') }}{{ ['x', 'y'] | map('upper') | list }}"
    "{{ ', '.join(['p', 'q']) }}{{ 'x{}y{:>4}{{}}'.format(1, 2) }}{{ 'abc'[::-1] }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}",
    "{{ messages | rejectattr('role', 'in', ['user']) | list | length }}{{ messages | last }}",
    "{% for k, w in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ w }}{% endfor %}{% set a, b = 1, 2 %}"
    "{{ a + b }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ -a }}{{ 'ab' * 3 }}{{ [1] * 2 + [3] }}",
    "  {%- if messages %}  \n x {% endif +%}  \n\n{{- ' y' }}{# note #}\n",
    "{{ 'x' if missing is defined else 'y' }}{{ missing | default('d') }}{{ '' | d('e', true) }}",
    "{{ messages[0]['content'] | trim | indent(3, true) }}{{ 'a b'.title() }}{{ [3, 1] | sort }}",
    "{{ dict(a=1).items() | list }}{{ {'a': {'b': 2}}.a.b }}{{ {'a': 1}.get('z', 'no') }}",
]


@pytest.mark.parametrize("source", FAITHFUL)
def test_the_sandbox_writes_what_transformers_writes(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for chat in (turns(" hi <b>\n"), turns("ü", "", "\t", system="s"), turns("a", "b", "c " * 500)):
        given = {"add_generation_prompt": True, **SP}
        variables = {"messages": plain(chat), "tools": None, "documents": None, **given}
        try:
            expected = render_jinja_template([plain(chat)], chat_template=source, **given)[0][0]
        except TemplateError as error:
            with pytest.raises(TemplateRefusal, match=str(error)):
                render(source, "t", variables)
            continue
        assert render(source, "t", variables) == expected


DOUBLE = (
    "{{% set n = namespace(x={0}) %}}{{% for i in range(60) %}}{{% set n.x = {1} %}}{{% endfor %}}"
)
HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "loops in calls": "{{ ([range(99999)] * 99999) | map('list') | list | length }}",
    "loops in sums": "{{ ([range(99999)] * 99999) | map('sum') | list | length }}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "text times": "{{ 'a' * 4000000000 }}",
    "list times": "{{ ([1] * 99999) * 99999 }}",
    "power": "{{ 9 ** 999999999 }}",
    "power of powers": DOUBLE.format("9", "n.x * n.x"),
    "range": "{{ range(1000000000) | list }}",
    "format width": "{{ '{:99999999999}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 99999999999) }}",
    "center filter": "{{ 'a' | center(10000000000) }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list }}",
    "replace nothing": "{{ ('a' * 999999) | replace('', 'b' * 999999) }}",
    "lipsum": "{{ lipsum(1000000000) }}",
    "tilde": DOUBLE.format("'ab'", "n.x ~ n.x"),
    "pairs": DOUBLE.format("[1]", "[n.x, n.x]") + "{{ n.x }}",
    "pairs compared": DOUBLE.format("1", "(n.x, n.x)")
    + "{% set a = n.x %}"
    + DOUBLE.format("1", "(n.x, n.x)")
    + "{{ a == n.x }}",
    "loop condition": "{% set b = ('a,' * 1000000).split(',') %}"
    "{% for i in range(100000) if 'zz' in b %}{% endfor %}",
    "attribute path": "{{ [1] | map(attribute='0.' * 2000000 ~ '0') | list }}"
    "{{ range(99999) | map(attribute='0.' * 20000 ~ '0') | list | length }}",
    "sorting": "{% set b = ('a,' * 1000000).split(',') %}{% for i in range(9999) %}"
    "{% set n = b | sort | unique | list | length + (b | max | length) %}{% endfor %}",
    "many strings": "".join(f"{{% set x{i} = '{i}' ~ 'a' * 4000000 %}}" for i in range(2500)),
    "pairs in names": DOUBLE.format("1", "namespace(a=[n.x, n.x])") + "{{ [n.x] | tojson }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "plain output": "{% for i in range(99999) %}" + "a" * 99_999 + "{% endfor %}",
    "size": "a" * 300_000,
    "brackets": "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "unfinished": "{% for i in messages %}",
    "unknown tag": "{% load x %}",
    "file": "{% include '/etc/passwd' %}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by item": "{{ messages['__class__'].__bases__ }}",
    "globals": "{{ raise_exception.__globals__['json'].x }}",
    "class by format": "{{ '{0.__class__.__mro__[1]}'.format(messages).x() }}",
    "class by map": "{{ messages | map(attribute='__class__') | map(attribute='x') | list }}",
    "change": "{{ messages.append(1) }}",
    "private name": "{% set n = namespace(_x=1) %}",
    "environment": "{{ environment.tick() }}",
}
SLOW = ("nested loops", "loops in sums", "macro tree", "power", "power of powers", "pairs")
SLOW += ("pairs compared", "loop condition", "sorting", "many strings")
"""Each takes all of the second that it may. By day it may take a tenth of that."""
STOPPED = [(name, share) for share in (0.1, 1.0) for name in HOSTILE if share == 1 or name in SLOW]


def given_less_time(path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Templates are rendered by a process that may take a share of the processor time."""
    source = rendering._WORKER.read_text("utf-8")
    assert source.count("_SECONDS = 1.0 ") == 1
    path.write_text(source.replace("_SECONDS = 1.0 ", f"_SECONDS = {share} "), "utf-8")
    one = _Process()
    monkeypatch.setattr(rendering, "_WORKER", path)
    monkeypatch.setattr(rendering, "process", lambda: one)


@pytest.mark.parametrize(
    ("name", "share"), some_by_day(STOPPED, lambda case: case[0] not in SLOW or case[1] < 1)
)
def test_hostile_templates_are_stopped(
    name: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if share < 1:
        given_less_time(tmp_path / "sandbox.py", monkeypatch, share)
    started = time.monotonic()
    data = {"messages": [{"content": "a"}]}
    error = refused(lambda: render(HOSTILE[name], "chat_template.jinja", data), code=6)
    assert time.monotonic() - started < 10  # unbounded, they take minutes
    assert str(error).startswith("chat_template.jinja")
    assert "MemoryError" not in str(error)
    assert share == 1 or "was stopped" in str(error)
    running = rendering.process()._running
    assert running is not None
    if running.poll() is None:
        assert loaded.resident("VmHWM", running.pid) < 512 << 20


def test_a_text_may_be_long_and_names_are_printed_without_what_they_hold() -> None:
    source = "{% for i in range(COUNT) %}{{ 'a' * 65536 }}{% endfor %}"
    assert len(render(source.replace("COUNT", "64"), "t", {})) == 4 << 20
    source = source.replace("COUNT", "66")
    refused(lambda: render(source, "t", {}), "it wrote more than 4,194", code=6)
    text = "All work and no play. " * 200_000
    variables = {"messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
    assert render(PUBLISHED["own"], "t", variables) == f"<|bos|><|user|>{text}<|end|><|assistant|>"
    names = DOUBLE.format("1", "namespace(a=[n.x, n.x])") + "{{ [n.x] }}"
    assert render(names, "t", {}) == "[<namespace>]"


def test_the_next_rendering_is_none_the_worse(tmp_path: Path, monkeypatch: Any) -> None:
    """Behind one that was stopped, that Ctrl-C ended, or whose process is gone."""
    data = {"messages": [{"content": "ü" * 9}]}

    def answers() -> None:
        assert render("{{ messages[0].content }}", "t", data) == "ü" * 9

    with monkeypatch.context() as patch:
        given_less_time(tmp_path / "sandbox.py", patch, 0.1)
        for name in ("nested loops", "output"):
            refused(partial(render, HOSTILE[name], "t", {}), "was stopped", code=6)
            answers()
    with monkeypatch.context() as patch:
        patch.setattr(_Process, "_exchange", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            render("{{ 'first' }}", "t", {})
    answers()
    running = process()._running
    assert running is not None
    running.kill()
    running.wait()
    answers()
    assert process()._running is not running


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], _Process]:
    """A process that starts a shell with these lines in the place of Python, or nothing."""

    def in_place(lines: str | None) -> _Process:
        path = tmp_path / "python"
        if lines is not None:
            path.write_text(f"#!/bin/sh\n{lines}\n")
            path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        return _Process()

    return in_place


def test_it_imports_from_where_this_process_does(python: Any, monkeypatch: Any) -> None:
    """A Python without site-packages, as where packages are in PYTHONPATH."""
    bare = python(f'exec {sys.executable} -S "$@"')
    assert bare.ask({"source": "{{ 1 + 1 }}", "data": {}})[1] == "2"
    monkeypatch.setattr(sys, "path", ["."])
    with pytest.raises(TemplatesUnavailable, match="No module named 'jinja2'"):
        _Process().ask({"source": "", "data": {}})


def test_a_process_that_cannot_be_started_is_no_fault_of_the_template(python: Any) -> None:
    for lines, why in (
        (None, "No such file"),
        ("exit 3", "it ended"),
        ("echo what; exec cat", "what"),
    ):
        started = python(lines)
        started.start()  # says nothing: there may be no template to render
        with pytest.raises(TemplatesUnavailable, match=why):
            started.ask({"source": "", "data": {}})
    # A text that ends early is no text.
    cut = python("""echo '{}'; read line; echo '{"bytes": 1000}'; printf xxxxxx""")
    found, text = cut.ask({"source": "", "data": {}})
    assert (list(found), text) == (["stopped"], "")


def test_threads_start_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started, one = Mock(wraps=subprocess.Popen), _Process()
    monkeypatch.setattr(subprocess, "Popen", started)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: one.start(), range(8)))
    assert started.call_count == 1


def test_the_deadline_holds_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the program that uses minikv ignores the signal of the deadline."""
    monkeypatch.setattr(rendering, "_WAIT", 20.0)
    one, endless = _Process(), {"source": HOSTILE["nested loops"], "data": {}}
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    try:
        one.start()
    finally:
        signal.signal(signal.SIGPROF, before)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = pool.submit(one.ask, endless).result(30)[0]
    assert found == {"stopped": "it ran for too long"}


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no' * 1500000) }}",
        "{{ raise_exception('\n\t no' * 1500000) }}",
        "{{ raise_exception([messages] * 99999) }}",
        "{{ {}['a' * 3000000].x }}",
        "{% " + "a" * 200_000 + " %}",
        "{{ '" + "a" * 300_000 + "' }}",
    ],
)
def test_what_a_template_says_of_itself_is_cut(source: str, tmp_path: Path) -> None:
    config = {"chat_template": source * (len(source) // 300_000 * 9 + 1)}  # two megabytes
    assert len(str(refused(lambda: from_folder(tmp_path, config)))) < 400


def test_hostile_templates_are_refused_with_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    for content in (HOSTILE["text times"].encode(), b"\xff\xfe", b"{% for"):
        file.write_bytes(content)
        refused(lambda: from_folder(tmp_path), "chat_template.jinja", code=6)
    file.unlink()
    seven = {"chat_template": 7}
    refused(lambda: from_folder(tmp_path, seven), "neither text nor a list", code=6)
