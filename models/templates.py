"""Turns chat messages into ids. Only the template can write control tokens, never a message.

Before the template runs, everything in a message that spells a control token, or could complete one
at its edges, is replaced by a placeholder with a random name. The rendered text is then split at
its control tokens, which are all genuine. The texts between them are restored and encoded as plain
text. At the end, the control ids must equal those of the same chat with neutral messages, and both
chats must contain everything that the user said.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from minikv.models.builtin_templates import PLAIN, recognise, source
from minikv.models.errors import CorruptModel, UnsupportedModel
from minikv.models.files import read_bytes, read_json
from minikv.models.rendering import SOURCE_LIMIT, TemplateRefusal, render
from minikv.models.thoughts import ThoughtTags
from minikv.models.tokenizer import Tokenizer, well_formed
from minikv.models.vocabulary import ADDED_LENGTH, TokenSearch

Role = Literal["system", "user", "assistant"]

_NEUTRAL = 0xF0000
"""The first of the private-use characters that represent the messages of a neutral chat, two for
each. They have no case, and are not white space."""
_ANSWER = chr(0x10FFFD)  # represents an answer that is not written yet
_THOUGHTS = chr(0x10FFFC)  # represents the thoughts of a neutral chat
_MARK = re.compile(r"<<?[^<>\s]+>>?|\[[^\[\]\s]+\]")
_LABEL = re.compile(r"(#+ *[^\n#]{1,40}|(?:^|(?<=\n))[^\n]{1,40}:|[^\s:]+:)\s*$")
"""The pattern of turn markers in plain text: `[INST]`, `<|user|>`, `### Response:` or `USER:`, the
last two before a message."""
_MARKERS, _NEAR = 64, 80  # the most markers; characters before a message that may hold a label

_REASONING = re.compile(
    r"[<\[\u25c1]\|?/\|?(\w+:)?(think|thinking|thoughts?|reason|reasoning|reflection)\|?[>\]\u25b7]"
    r"|<\|?end_(of_)?(think|thinking|thought|reasoning)\|?>",
    re.IGNORECASE,
)
"""How models end their reasoning: `</think>`, `[/THINK]`, `<|end_of_thought|>`."""
_WHICH = {"user": "a question", "system": "the system prompt", "assistant": "an earlier answer"}


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. thoughts: those that precede the answer `content`."""

    role: Role
    content: str
    thoughts: str = ""


class ChatTemplate:
    """The chat format of one model. name: its origin, for messages. tags: the tags around the
    model's thoughts; None if it has none."""

    def __init__(
        self,
        source: str,
        name: str,
        tokenizer: Tokenizer,
        *,
        notes: Iterable[str] = (),
    ) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._source = source
        # Only a template that names the end of the reasoning can remove it.
        self._reasoning = frozenset(match[0] for match in _REASONING.finditer(source))
        self._parts: frozenset[Role] = frozenset()  # whose contents are lists of parts
        self._folds = False
        self._tail: list[Message] = []  # added so that the template writes the header of an answer
        self._notes = tuple(notes)
        self.tags = ThoughtTags.of(source, tokenizer)
        self._markers = TokenSearch(self._learn())
        self._folded = False

    @classmethod
    def from_folder(cls, path: Path | str, tokenizer: Tokenizer) -> ChatTemplate:
        """The folder's own template, or a built-in one, or plain completion.

        Looks in chat_template.jinja, tokenizer_config.json (a string, or several with a "default")
        and chat_template.json. Raises CorruptModel (damaged, failing or too costly) or
        UnsupportedModel.
        """
        return cls.chosen(_own_template(Path(path)), tokenizer, Path(path))

    @classmethod
    def chosen(cls, own: tuple[str, str] | None, tokenizer: Tokenizer, path: Path) -> ChatTemplate:
        """The model's own template (source, name), or a built-in one, or plain completion. path:
        the model's."""
        if own is not None:
            return cls(*own, tokenizer)
        why = f"no default chat template in the {'file' if path.is_file() else 'folder'}"
        if (found := recognise(tokenizer, path)) is None:
            note = f"{why}, and no known vocabulary: plain completion, not a chat"
        else:
            note = (
                f"{why}: using the built-in {found} format, which its "
                "vocabulary points to; a model without chat training will not follow it"
            )
        return cls.built_in(found or PLAIN, tokenizer, note)

    @classmethod
    def built_in(cls, format: str, tokenizer: Tokenizer, *notes: str) -> ChatTemplate:
        """The template of a built-in format. notes: messages for the user."""
        name = PLAIN if format == PLAIN else f"built-in {format}"
        return cls(source(format), name, tokenizer, notes=notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user about the chat format."""
        if not self._folded:
            return self._notes
        note = "this model takes no system prompt: it was put in front of the first message"
        return (*self._notes, note)

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a whole conversation that ends with a user message, up to the start of the answer.

        They equal the ids of the rendered text, except that control tokens spelled in a message are
        plain text. Raises UnsupportedModel if the template refuses the conversation.
        """
        return self._compose(messages, follow=False)

    def following(self, messages: Sequence[Message]) -> list[int]:
        """Ids to feed after the text of the last answer: the end of the answer, the new message,
        and the beginning of the next answer.

        messages: the whole conversation. The last is the new user message, and the one before it
        the answer. If a template rewrites earlier turns, its changes to turns that were already fed
        are ignored. Raises UnsupportedModel or CorruptModel.
        """
        if len(messages) < 2 or messages[-2].role != "assistant":
            raise ValueError("the message before the last must be the assistant's answer")
        return self._compose(messages, follow=True)

    def lookalikes(self, text: str) -> int:
        """How often a text spells a control token of this model. These become plain text."""
        return self._tokenizer.lookalikes(text)

    def markers(self, text: str) -> int:
        """How often a text spells a turn marker that is plain text for this model, such as Llama
        2's [INST]. The model cannot distinguish these from real ones."""
        return sum(1 for _ in self._markers.find(text))

    def lost(self, text: str) -> int:
        """How many characters of a text do not reach this model: see `Tokenizer.lost`."""
        return self._tokenizer.lost(text)

    def _compose(self, messages: Sequence[Message], follow: bool) -> list[int]:
        clean = self._prepared(messages)
        shield = _Shield(self._tokenizer.search, self.tags)
        end = shield.mark("") if follow else None
        hidden = [Message(m.role, *map(shield.hide, (m.content, m.thoughts))) for m in clean]
        neutral = _neutral(clean)
        if end is not None:
            hidden[-2] = neutral[-2] = Message("assistant", end)
        text, plain = self._written(hidden, end), self._written(neutral, end)
        self._refuse_loss(hidden, text, neutral, plain, follow)
        segments, expected = self._tokenizer.split(text), self._tokenizer.split(plain)
        if [id for id, _ in segments] != [id for id, _ in expected]:
            raise UnsupportedModel(f"{self.name} makes control tokens out of a message's text")
        restored = ((id, shield.restore(part)) for id, part in segments)
        return self._tokenizer.joined(restored, "inside" if follow else "start")

    def _refuse_loss(
        self,
        messages: Sequence[Message],
        text: str,
        neutral: Sequence[Message],
        plain: str,
        follow: bool,
    ) -> None:
        """Raise UnsupportedModel if the template's text does not contain every whole message. A
        template may only change case and white space, and remove the reasoning from an answer. The
        neutral chat, whose messages cannot occur by chance, shows that each is there and in order;
        the real chat shows that no part is missing."""
        checked, near = [], 0
        for message, sign in list(zip(messages, neutral, strict=True))[-1 if follow else 0 :]:
            if content := message.content.strip():
                # Each message usually follows the previous one, so a long text is searched only
                # once.
                found = plain.find(sign.content, near)
                found = found if found >= 0 else plain.find(sign.content)
                near = max(near, found)
                checked.append((found, message.role, content))
        checked.sort(key=lambda one: one[0])
        missing: Role | None = checked[0][1] if checked and checked[0][0] < 0 else None
        if missing is None and _absent(text, ((role, [one]) for _, role, one in checked)):
            forms = ((role, self._forms(role, one)) for _, role, one in checked)
            missing = _absent(_loose(text), forms)
        if missing is not None:
            raise UnsupportedModel(
                f"{self.name} leaves out {_WHICH[missing]}, or a part of it",
                "the model would not receive all that you say: it needs another chat template",
            )

    def _forms(self, role: Role, content: str) -> list[str]:
        """The possible forms of a message in the text: all of it, perhaps as JSON; for an answer,
        at least the part after its reasoning."""
        forms = [content, json.dumps(content, ensure_ascii=False)[1:-1]]
        if role == "assistant":
            ends = [content.rfind(end) + len(end) for end in self._reasoning if end in content]
            forms += [content[max(ends) :]] if ends else []
        return [_loose(form) for form in forms]

    def _prepared(self, messages: Sequence[Message]) -> list[Message]:
        """Well-formed messages. If the template takes no system message, it is put at the beginning
        of the next user message."""
        if not messages or messages[-1].role != "user":
            raise ValueError("a conversation ends with a user message")
        clean = [Message(m.role, *map(well_formed, (m.content, m.thoughts))) for m in messages]
        if not self._folds:
            return clean
        folded: list[Message] = []
        system = ""
        for message in clean:
            if message.role == "system":
                system += message.content + "\n\n"
                self._folded = True
            elif message.role == "user":
                folded.append(replace(message, content=system + message.content))
                system = ""
            else:
                folded.append(message)
        return folded

    def _written(self, messages: Sequence[Message], end: str | None) -> str:
        """What the template writes, up to the start of the answer; from `end` on if that is
        given."""
        if self._tail:
            text, found, _ = self._render([*messages, *self._tail]).rpartition(_ANSWER)
            text = text.rstrip(" ")  # the answer begins with the space
            if not found:
                raise UnsupportedModel(f"{self.name} writes no answer after this conversation")
        else:
            text = self._render(messages)
        if end is not None:
            _, found, text = text.rpartition(end)
            if not found:
                raise UnsupportedModel(
                    f"{self.name} leaves earlier answers out, so a chat with it cannot continue"
                )
        return text

    def _render(self, messages: Sequence[Message], prompt: bool = True) -> str:
        try:
            return render(self._source, self.name, self._variables(messages, prompt))
        except TemplateRefusal as refusal:
            raise UnsupportedModel(f"{self.name} refuses this conversation: {refusal}") from refusal

    def _variables(self, messages: Sequence[Message], prompt: bool = True) -> dict[str, Any]:
        return {
            **self._tokenizer.named,
            "gap": " " if self._tokenizer.prefix == "first" else "",
            "start": self._tokenizer.start,
            "messages": [{"role": m.role, "content": self._content(m)} for m in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": prompt,
        }

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        text = message.content
        if self.tags is not None:
            text = self.tags.wrapped(message.thoughts, text)
        return [{"type": "text", "text": text}] if message.role in self._parts else text

    def _learn(self) -> list[str]:
        """Find out how the template takes messages: whose contents must be lists of parts, whether
        it drops system messages, and whether it writes the header of an answer only together with
        an answer. Returns the turn markers that it writes as plain text.

        Raises CorruptModel or UnsupportedModel if it fails for a single question or refuses it.
        """
        system, user, answer, more = _neutral(
            [Message(role, "x") for role in ("system", "user", "assistant", "user")]
        )
        asked = self._probe([user], "user")
        if asked is None:  # raises the error, or the first question is refused
            asked = self._render([user])
            if not asked.strip():
                raise CorruptModel(f"{self.name} writes nothing for a question")
        briefed = self._probe([system, user], "system")
        self._folds = briefed is None
        closed = self._probe([user, answer], "assistant")
        longer = self._probe([user, answer, more], "assistant")
        if self.tags is not None:
            thought = [user, replace(answer, thoughts=_THOUGHTS), more]
            forgets = _THOUGHTS not in (self._probe(thought, "assistant") or _THOUGHTS)
            self.tags = replace(self.tags, forgets=forgets)
        self._find_header(asked, closed, longer, (user, answer, more))
        return self._plain_markers(text for text in (briefed, asked, closed, longer) if text)

    def _find_header(
        self,
        asked: str,
        closed: str | None,
        longer: str | None,
        chat: tuple[Message, Message, Message],
    ) -> None:
        """Find out whether the template writes the header of an answer only with an answer, or
        with an answer and another question; then a conversation is rendered with these.

        asked, closed, longer: the texts of the first message of a chat, of two, and of all."""
        user, answer, more = (message.content for message in chat)
        end = asked.rpartition(user)[2].rstrip()
        bare = self._render(chat[:1], prompt=False).rpartition(user)[2].rstrip()
        next_turn = longer.partition(answer)[2].partition(more)[0] if longer else ""
        texts = [(text, tail) for text, tail in ((closed, []), (longer, [chat[2]])) if text]
        fronts = [text.partition(answer)[0].rpartition(user)[2] for text, _ in texts]
        # Text that also precedes a question is not the header of an answer.
        shared = max((_alike(front, next_turn) for front in fronts), default=0)
        if end != bare and any(_alike(end, front) > shared for front in fronts):
            return  # it prompts for an answer
        for front, (_, tail) in zip(fronts, texts, strict=True):
            if front.startswith(end) and front.rstrip() != end:
                self._tail = [Message("assistant", _ANSWER), *tail]
                return
        control = [
            {id for id, _ in self._tokenizer.split(front) if id is not None}
            for front in (end, *fronts)
        ]
        if any(one - control[0] for one in control[1:]):
            note = "the template does not end a question with the control tokens that begin an "
            self._notes += (note + "answer: the model may not answer as it was trained to",)

    def _probe(self, messages: Sequence[Message], role: Role) -> str | None:
        """The text of a neutral chat. The contents of `role` become lists of parts if the template
        takes only these; None if it takes neither form."""
        given = self._parts
        for parts in (given, given | {role}):
            self._parts = parts
            with contextlib.suppress(CorruptModel, UnsupportedModel):
                text = self._render(messages)
                if all(message.content in text for message in messages):
                    return text
        self._parts = given
        return None

    def _plain_markers(self, texts: Iterable[str]) -> list[str]:
        """The turn markers in the texts of neutral chats that are not control tokens."""
        found: dict[str, None] = {}
        for text in texts:
            for _, segment in self._tokenizer.split(text):
                parts = re.split(f"[{chr(_NEUTRAL)}-{chr(_NEUTRAL + 9)}]+", segment)
                if len(parts) == 1:
                    continue  # between two control tokens, without a message
                for part in parts:
                    found.update(dict.fromkeys(_MARK.findall(part)))
                for part in parts[:-1]:
                    if (label := _LABEL.search(_MARK.sub("", part[-_NEAR:]))) is not None:
                        found[label[1].strip()] = None
        return [marker for marker in found if len(marker) <= ADDED_LENGTH][:_MARKERS]


def _neutral(messages: Sequence[Message]) -> list[Message]:
    """The messages with two unique characters instead of their contents. Empty messages stay empty,
    because a template may test for them."""
    made = []
    for n, message in enumerate(messages):
        first = _NEUTRAL + 2 * n % 0x10000
        text = chr(first) + chr(first + 1)
        thoughts = _THOUGHTS if message.thoughts else ""
        content = text if message.content.strip() else message.content
        made.append(replace(message, content=content, thoughts=thoughts))
    return made


def _alike(one: str, other: str) -> int:
    """How many characters at the beginning of two texts are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _absent(text: str, messages: Iterable[tuple[Role, list[str]]]) -> Role | None:
    """The role of the first message without any form after the previous message; None if all are
    there."""
    at = 0
    for role, forms in messages:
        end = -1
        for form in forms:
            # The form that ends first leaves most text for the next message: a question may repeat
            # an answer.
            found = text.find(form, at, end if end >= 0 else None)
            end = found + len(form) if found >= 0 else end
        if end < 0:
            return role
        at = end
    return None


def _loose(text: str) -> str:
    """A text reduced to what templates must preserve: without case, and with single spaces between
    words."""
    return " ".join(text.split()).casefold()


class _Shield:
    """Placeholders for parts of the messages of one conversation, with a fresh random name.

    They consist of private-use characters, which have no case and are not white space. So a
    template that trims a message or changes its case does not change them.
    """

    _FIRST, _COUNT = 0xE000, 6400

    def __init__(self, search: TokenSearch, tags: ThoughtTags | None = None) -> None:
        self._search = search
        self._tags = () if tags is None else (tags.begin, tags.end)
        self._name = "".join(self._character(secrets.randbelow(self._COUNT)) for _ in range(8))
        self._placeholders: dict[str, str] = {}
        self._texts: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """The placeholder for a text."""
        if text not in self._placeholders:
            high, low = divmod(len(self._texts), self._COUNT)
            placeholder = self._name + self._character(high) + self._character(low)
            self._placeholders[text] = placeholder
            self._texts[placeholder] = text
        return self._placeholders[text]

    def hide(self, text: str) -> str:
        """The text with placeholders for control tokens and tags of thoughts, and for parts of
        control tokens at its edges."""
        search = self._search
        for tag in self._tags:
            text = text.replace(tag, self.mark(tag))
        parts, at = [], 0
        for found, token in search.find(text):
            parts += [text[at:found], self.mark(token)]
            at = found + len(token)
        text = "".join([*parts, text[at:]])
        # White space at the edges is skipped, because templates may trim it.
        inner = text.lstrip()
        if n := _begun(search.backwards, inner[: search.longest][::-1]):
            text = text[: len(text) - len(inner)] + self.mark(inner[:n]) + inner[n:]
        inner = text.rstrip()
        if n := _begun(search.texts, inner[max(0, len(inner) - search.longest) :]):
            text = inner[:-n] + self.mark(inner[-n:]) + text[len(inner) :]
        return text

    def restore(self, text: str) -> str:
        """The text with every placeholder replaced by its original."""
        if self._name not in text:
            return text
        return re.sub(
            f"{self._name}(..)", lambda match: self._texts.get(match[0], ""), text, flags=re.S
        )

    def _character(self, number: int) -> str:
        return chr(self._FIRST + number)


def _begun(texts: Sequence[str], text: str) -> int:
    """How many of the last characters of `text` are the beginning of one of the sorted, longer
    texts."""
    for n in range(len(text), 0, -1):
        end = text[-n:]
        # Texts with this beginning are adjacent, and `end` itself would be before them.
        at = bisect_right(texts, end)
        if at < len(texts) and texts[at].startswith(end):
            return n
    return 0


def _own_template(folder: Path) -> tuple[str, str] | None:
    """(source, file name) of the folder's own template; None if it has none. Raises
    CorruptModel."""
    if (file := folder / "chat_template.jinja").exists():
        try:
            return read_bytes(file, SOURCE_LIMIT).decode("utf-8-sig"), file.name
        except UnicodeDecodeError as error:
            raise CorruptModel(f"{file.name} is not UTF-8 text") from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        if not (file := folder / name).exists():
            continue
        found = read_json(file).get("chat_template")
        if isinstance(found, list):
            found = {str(e.get("name")): e.get("template") for e in found if isinstance(e, dict)}
        if isinstance(found, dict):
            found = found.get("default")
        if isinstance(found, str):
            if len(found) > SOURCE_LIMIT:
                found = ""  # the error keeps this frame alive
                raise CorruptModel(f"{name}: chat_template is larger than {SOURCE_LIMIT >> 10} KiB")
            return found, name
        if found is not None:
            raise CorruptModel(f"{name}: chat_template is neither text nor a list of templates")
    return None
