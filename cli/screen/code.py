"""Colours code on a terminal, line by line while an answer is written.

pygments parses the code, through rich. The colours are few and the terminal's own, so that they are
readable on dark and light backgrounds.
"""

from __future__ import annotations

from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.text import Text

MOST_LINES = 200
"""How many earlier lines are parsed to colour the current one."""
TAB = 8
"""Columns from one tab stop of a terminal to the next."""
_LOOKS = {
    "dim": "Comment Generic.Prompt",
    "magenta": "Comment.Preproc Keyword Operator.Word Name.Tag",
    "cyan": "Keyword.Constant Keyword.Type Name.Builtin Name.Decorator Name.Attribute "
    "Literal.Number",
    "bold": "Name.Class Name.Function Generic.Heading Generic.Subheading",
    "green": "Literal.String Generic.Inserted",
    "red": "Generic.Deleted",
}
_THEME = ANSISyntaxTheme(
    {
        tuple(name.split(".")): Style.parse(look)
        for look, names in _LOOKS.items()
        for name in names.split()
    }
)


class Code:
    """The code of one block, in a language that pygments knows."""

    def __init__(self, syntax: Syntax) -> None:
        self._syntax = syntax
        self._lines: list[str] = []

    @staticmethod
    def of(language: str) -> Code | None:
        """The code of a block with this language after its opening marks; None if the language is
        not known, or plain text."""
        words = language.strip().strip("{}").lstrip(".").split()
        lexer = Syntax("", words[0].rstrip(",;:").lower(), tab_size=TAB).lexer if words else None
        if lexer is None or "text" in lexer.aliases:
            return None
        return Code(Syntax("", lexer, theme=_THEME, tab_size=TAB))

    def line(self, text: str) -> Text | None:
        """The next line in colours, tabs as spaces; None if it has no colours, or if these would
        change the text."""
        self._lines = [*self._lines[-MOST_LINES:], text]
        if "\t" in text and not text.isascii():
            return None  # where a tab ends depends on the width of the characters before it
        number = len(self._lines)
        read = self._syntax.highlight("\n".join(self._lines), line_range=(number, number))
        lines = read.split("\n", allow_blank=True)
        found = lines[number - 1] if len(lines) >= number else Text()
        return found if found.spans and found.plain == text.expandtabs(TAB) else None
