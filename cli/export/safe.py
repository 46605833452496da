"""Untrusted text for files that people open: no part of it takes effect or is invisible."""

from __future__ import annotations

from minikv.cli.terminal import clean


def visible(text: str) -> str:
    """`text` with its invisible characters spelled out.

    The characters that the terminal drops (controls, bidi overrides, tags, lone surrogates) are
    shown instead: a report is about every token, and these are tokens too. Newline and tab stay.
    """
    kept = clean(text)
    if kept == text:
        return text
    return "".join(c if clean(c) else _name(ord(c)) for c in text)


def _name(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)  # the control pictures: ESC becomes one sign
    return f"⟨U+{code:04X}⟩"
