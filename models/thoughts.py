"""The tags between which a model writes its thoughts before it answers.

`TAGS` lists all pairs: R1-Distill, Qwen3 and SmolLM3 use the first, Magistral the second. A model
has a pair if its chat template contains the closing tag, or if both are control tokens of its
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minikv.models.tokenizer import Tokenizer

TAGS = (("<think>\n", "\n</think>\n\n"), ("[THINK]", "[/THINK]"))
"""Each pair with the line ends around it, as these models write them."""
_TAIL = 12  # how many tokens at the end of a prompt are searched for an opening tag


@dataclass(frozen=True, slots=True)
class ThoughtTags:
    """One pair. begin, end: the tags alone. unseen: tags that are control tokens without text in
    the tokenizer, by id. ending: the tokens that end a thought. forgets: the template leaves out
    the thoughts of earlier turns."""

    begin: str
    end: str
    unseen: Mapping[int, str]
    ending: tuple[int, ...]
    forgets: bool
    _wrap: tuple[str, str]
    _tokenizer: Tokenizer = field(repr=False)

    @classmethod
    def of(cls, source: str, tokenizer: Tokenizer) -> ThoughtTags | None:
        """The pair of a model with this template; None if it has none. `forgets` is False in it."""
        for pair in TAGS:
            begin, end = (tag.strip() for tag in pair)
            if end in source or {begin, end} <= tokenizer.control.keys():
                ids = {
                    tag: tokenizer.control[tag] for tag in (begin, end) if tag in tokenizer.control
                }
                unseen = {id: tag for tag, id in ids.items() if not tokenizer.decode([id])}
                ending = tuple(tokenizer.joined(tokenizer.split(pair[1]), "inside"))
                return cls(begin, end, unseen, ending, False, pair, tokenizer)
        return None

    def opened(self, ids: Sequence[int]) -> bool:
        """Whether the prompt of these ids ends with the opening tag."""
        text = self._tokenizer.decode
        # A control token without text is between the user's text and the end.
        tail = (self.unseen.get(id) or text([id]) or "\0" for id in ids[-_TAIL:])
        return "".join(tail).rstrip().endswith(self.begin)

    def wrapped(self, thoughts: str, answer: str) -> str:
        """An answer as the model wrote it."""
        begin, end = self._wrap
        return f"{begin}{thoughts}{end}{answer}" if thoughts else answer
