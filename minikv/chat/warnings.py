"""Warnings before a turn, and the check that a text is valid Unicode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from minikv import checks
from minikv.chat.protocols import Template
from minikv.chat.transcript import Document
from minikv.errors import UsageError


def marker_lines(template: Template, documents: Iterable[Document], question: str) -> Iterator[str]:
    """Warnings about strings that look like control tokens or turn markers of the model."""
    texts = [(document.name or "the document", document.text) for document in documents]
    for name, text in [*texts, ("the question", question)]:
        count = template.lookalikes(text)
        if count:
            strings = "1 string" if count == 1 else f"{count:,} strings"
            verb = "looks" if count == 1 else "look"
            tokens = "a control token; it was" if count == 1 else "control tokens; they were"
            yield f"{strings} in {name} {verb} like {tokens} read as plain text"
        count = template.markers(text)
        if count:
            strings = "1 string" if count == 1 else f"{count:,} strings"
            yield (
                f"{strings} in {name} may pass for turn markers, which are plain text for this "
                "model: it cannot tell them from real ones"
            )


def check_text(text: str, what: str) -> None:
    """Raise UsageError for what is not a str, and for lone surrogates, which no tokenizer accepts.
    Those come from bytes that are not UTF-8. what: the name of the text in the message."""
    checks.text(what, text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code, at = ord(text[error.start]), f"at character {error.start:,}"
        why = f"a lone surrogate {at}"
        if 0xDC80 <= code <= 0xDCFF:  # Python's way to hold a byte that it could not decode
            why = f"byte 0x{code - 0xDC00:02x} {at} is not UTF-8"
        raise UsageError(f"{what} is not valid Unicode: {why}") from None
