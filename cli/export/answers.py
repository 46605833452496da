"""The Markdown of an answer as HTML: text, lists, tables and code. No link, image or HTML of the
answer becomes one of the page, and no attribute comes from it."""

from __future__ import annotations

from functools import cache

from markdown_it import MarkdownIt

_FOREIGN = ("link", "image", "autolink", "html_inline", "html_block", "reference", "entity")


@cache
def _parser() -> MarkdownIt:
    return (
        MarkdownIt("commonmark", {"html": False, "breaks": True}).enable("table").disable(_FOREIGN)
    )


def formatted(text: str) -> str:
    """`text` as HTML."""
    parser = _parser()
    tokens = parser.parse(text)
    for token in tokens:
        start = token.attrs.get("start")
        token.attrs = {} if start is None else {"start": int(start)}
        token.info = ""  # the language of code would become a class
        if token.type in ("heading_open", "heading_close"):
            token.tag = "h4"  # below the page's own headings
    return str(parser.renderer.render(tokens, parser.options, {}))
