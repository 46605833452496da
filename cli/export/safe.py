"""Untrusted text for files that people open: no character of it is invisible or has an effect."""

from __future__ import annotations

from minikv.cli.screen.text import clean


def visible(text: str) -> str:
    """`text` with its invisible characters replaced by names.

    These are the characters that `clean` drops for a terminal (controls, bidi overrides, tags, lone
    surrogates). A report shows them, because it shows every token. Newline and tab stay.
    """
    kept = clean(text)
    if kept == text:
        return text
    return "".join(c if clean(c) else _name(ord(c)) for c in text)


def _name(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's control pictures, e.g. for ESC
    return f"⟨U+{code:04X}⟩"
