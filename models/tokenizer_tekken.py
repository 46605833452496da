"""Reads Mistral's `tekken.json`: ranks of byte sequences, as in tiktoken, and a pattern.

Of all neighbouring pairs that form a piece, tiktoken joins the one whose piece has the lowest rank.
So a vocabulary of the tokenizers library with a merge for each division of each piece, ordered by
the rank of the piece, gives the same ids. Source: `Tekkenizer` of mistral_common.
"""

from __future__ import annotations

import base64
import itertools
from pathlib import Path
from typing import Any

from minikv.models.errors import CorruptModel, quote
from minikv.models.files import read_json
from minikv.models.stream import byte_level_alphabet
from minikv.models.tokenizer_json import Added, JsonVocabulary, byte_level, joined
from minikv.models.vocabulary import ADDED_TOKENS, LARGEST_ID, is_marker, library_errors

_LONGEST, _BYTES, _MERGES = 256, 2 << 20, 1_000_000
"""The most bytes of a piece, the most bytes of all together, and the most merges. Mistral's files
have up to 76, 878,000 and 269,000."""
_IMPLIED = """
<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]
[TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT]
[/SYSTEM_PROMPT] [TOOL_CONTENT]
""".split()
"""The control tokens of a file that does not list them. Only files up to version 7 may omit the
list."""


def read_tekken(path: Path) -> tuple[JsonVocabulary, str]:
    """The vocabulary, and Mistral's version of the tokenizer ("v3"). Raises CorruptModel or
    ModelUnavailable."""
    data, name = read_json(path), path.name
    with library_errors(name, "unexpected structure"):
        config = data["config"]
        version, pattern = str(config["version"]), config["pattern"]
        size, fixed = int(config["default_vocab_size"]), int(config["default_num_special_tokens"])
        if not 0 <= fixed <= min(size, ADDED_TOKENS) or size > LARGEST_ID:
            raise CorruptModel(f"{name} has {size:,} ids, {fixed:,} of them for control tokens")
        added = _control_tokens(data.get("special_tokens"), fixed, version, name)
        pieces = _pieces(data["vocab"][: size - fixed], name)
    if len(pieces) < size - fixed:
        raise CorruptModel(f"{name} has {len(pieces):,} of the {size - fixed:,} pieces it states")
    vocab = {piece: fixed + rank for rank, piece in enumerate(pieces)}
    merges = list(itertools.islice(joined(pieces, vocab), _MERGES + 1))
    if len(merges) > _MERGES:
        raise CorruptModel(f"{name} has more than {_MERGES:,} ways to join its pieces")
    made = byte_level(vocab, merges, [pattern], added, whole=True)
    return JsonVocabulary(made, name, [text for text, _, _ in added]), version


def _control_tokens(listed: Any, count: int, version: str, name: str) -> list[Added]:
    """All control tokens, including fillers for unlisted ids."""
    if listed is None:
        if version not in ("v1", "v2", "v3", "v7"):
            raise CorruptModel(f"{name} of version {quote(version, 20)} lists no special_tokens")
        listed = [{"rank": id, "token_str": text} for id, text in enumerate(_IMPLIED[:count])]
    found = [
        (int(token["rank"]), str(token["token_str"]), token.get("is_control", True) is not False)
        for token in listed
    ]
    for _, text, _ in found:
        if not is_marker(text):  # otherwise a text could spell it
            raise CorruptModel(f"{name} has the control token {quote(text, 40)}, which is a word")
    found += [(id, f"<SPECIAL_{id}>", True) for id in range(len(found), count)]
    found.sort()
    if [id for id, _, _ in found] != list(range(count)) or len({t for _, t, _ in found}) < count:
        raise CorruptModel(f"{name} does not give each of its {count:,} control tokens one id")
    return [(text, id, silent) for id, text, silent in found]


def _pieces(entries: Any, name: str) -> list[str]:
    """The pieces in the byte-level alphabet, by their ranks."""
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    pieces, total = [], 0
    for rank, entry in enumerate(entries):
        if entry["rank"] != rank:
            raise CorruptModel(f"{name} has the rank {quote(entry['rank'], 20)} at place {rank:,}")
        piece = base64.b64decode(entry["token_bytes"], validate=True)
        total += len(piece)
        if not 0 < len(piece) <= _LONGEST or total > _BYTES:
            raise CorruptModel(f"{name} has a piece of {len(piece):,} bytes, or too many bytes")
        pieces.append(piece.decode("latin-1").translate(letters))
    known = set(pieces)
    if len(known) < len(pieces):
        raise CorruptModel(f"{name} has {len(pieces) - len(known):,} pieces twice")
    if missing := [byte for byte, letter in letters.items() if letter not in known]:
        raise CorruptModel(f"{name} has no piece for the byte {min(missing)}")
    return pieces
