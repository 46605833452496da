"""A chat's tier: where the exact keys and values of its conversation are stored, and for which
tokens.

The tier knows the tokens of its rows. So after an undone turn, a loaded chat or a change of policy,
`Recall` uses the rows of the tokens with which the conversation still begins.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from minikv.cache.kv_cache import KVCache
from minikv.cache.tier import Tier, copy_rows
from minikv.cache.tier_file import FileRows, Header, remove
from minikv.cache.tier_rows import Columns, RamRows, TierError, columns_of, row_nbytes
from minikv.chat.report import amount, size
from minikv.chat.store import Store
from minikv.chat.transcript import Stored, shared
from minikv.errors import MinikvError, UsageError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tier's file is created. identity: of the model whose rows it holds, for the file's
    header. named: the file keeps its name until it is closed, and may be renamed. Otherwise the
    name is removed at once, so that the file is deleted when the process ends."""

    path: Path
    identity: Mapping[str, object] = field(default_factory=dict)
    named: bool = False


def somewhere() -> Place:
    """A new file in $TMPDIR or in /var/tmp. Files in /tmp may be in memory."""
    folder = Path("/var/tmp")
    if "TMPDIR" in os.environ or not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir())
    return Place(folder / f"minikv-{os.getpid()}-{secrets.token_hex(4)}.kv")


_STAYS = "for later questions, all that was read stays in"


class Recall:
    """Manages the tier of a chat.

    kind: one of `TIERS`; may be set between turns. why: if a tier was needed and there is none, the
    reason; otherwise "". where(): where to create a file; raises UsageError. say(line): called once
    per conversation, with a line about where its tier is, or why there is none. store: the prompts
    that were read in other conversations; None: they are not remembered. remembering: the prompt
    under way must be read with the tier, because the store has rows of it or will store them."""

    def __init__(
        self,
        kv: KVCache,
        kind: str = "none",
        dtype: str = "same",
        free: Callable[[], int | None] = lambda: None,
    ) -> None:
        """dtype: one of `TIER_DTYPES`. free(): free bytes of host memory, None if not
        known."""
        self._kv, self._coded, self.free = kv, dtype == "int8", free
        self._chunk = 0  # see `lent`
        self.kind = kind
        self.where: Callable[[], Place] = somewhere
        self.say: Callable[[str], None] = lambda line: None
        self._told = False
        self.broken = ""  # why this conversation does not try files again
        self.why = ""
        self.store: Store | None = None
        self.remembering = False
        self._becomes = False  # the tier will become an entry of the store
        self._source: Path | None = None  # the entry whose rows the tier has
        self._entry: FileRows | None = None  # the entry that is being written to disk

    @classmethod
    def lent(cls, lender: Recall, kv: KVCache, chunk: int) -> Recall:
        """The tier of a chat, lent to another chat with the same network for one question. The
        borrower stores no rows and reports none as its own, so the lender's exact rows stay as they
        are.

        chunk: how many tokens the network reads together. Tokens that the tier does not have are
        read from the beginning of a chunk on. Then all numbers are bit-identical to those of
        reading everything, if the tier's rows were read in the same chunks.
        """
        assert lender.tier is not None
        assert lender.dtype == "same"
        made = cls(kv, lender.kind)
        kv.tier = Tier(kv.shape, kv.dtype, kv.device, rows=lender.tier.rows, lent=True)
        kv.tier.ids, kv.tier.length, made._chunk = lender.ids, lender.tokens, chunk
        return made

    @property
    def tier(self) -> Tier | None:
        """The tier; None if there is none."""
        return self._kv.tier

    @property
    def tokens(self) -> int:
        """How many tokens have their keys and values in the tier."""
        return 0 if self.tier is None else self.tier.length

    @property
    def dtype(self) -> str:
        """The number format of the tier's rows, one of `TIER_DTYPES`."""
        return "int8" if self._coded else "same"

    @property
    def nbytes(self) -> int:
        """Bytes of the chat's own tier."""
        return 0 if self.tier is None or self._chunk else self.tier.rows.nbytes

    @property
    def here(self) -> int:
        """Bytes of the tier in the cache's own memory: those of a tier in RAM, on a CPU."""
        in_ram = self.tier is not None and self.file is None
        return self.nbytes if in_ram and self._kv.device.type == "cpu" else 0

    @property
    def place(self) -> str:
        """Where the chat's own tier is: "ram" or "file"; "" if it holds nothing."""
        if self.tier is None or not self.tokens or self._chunk:
            return ""
        return self.tier.rows.kind

    @property
    def file(self) -> FileRows | None:
        """The file of the tier; None if it is not in a file."""
        rows = None if self.tier is None else self.tier.rows
        return rows if isinstance(rows, FileRows) else None

    @property
    def columns(self) -> Columns:
        """The columns of a tier of this chat."""
        return columns_of(self._kv.shape, self._kv.dtype, self._coded)

    @property
    def header(self) -> Header:
        """The header of an entry of the store for this chat."""
        shape = self._kv.shape
        identity = {} if self.store is None else self.store.identity
        return Header(shape.layers, shape.kv_heads, self.columns, identity)

    @property
    def ids(self) -> list[int]:
        """The tokens whose keys and values are in the tier: a copy."""
        return [] if self.tier is None else list(self.tier.ids[: self.tier.length])

    def has(self, ids: Sequence[int], *, stored: bool = False) -> int:
        """How many of the first tokens of `ids` are in the tier. Like `given`, but drops no rows.
        stored: or in the store, which `remember` would then use."""
        has, store = shared(self.ids, ids), self.store
        if not stored or store is None or len(ids) - has < store.least:
            return has
        if (found := store.find(self.header, ids)) is not None:
            has = max(has, shared(found.ids, ids))
            found.close()
        return has

    # -- before a prompt ----------------------------------------------------------------------

    def stored(self, tokens: int | None = None) -> Stored:
        """The tier's content, for a plan. tokens: if set, the question may be answered from the
        tier, and the conversation has this many tokens; then a tier is created if needed. Raises as
        `ready`."""
        room = tokens is not None and self.ready(tokens)
        if self._chunk:  # a single token would be read like a step, with differently rounded sums
            least = max(2, self._kv.observed(tokens or 0, 0))
            return Stored(self.ids, room, self.why, self.kind, least, self._chunk)
        return Stored(self.ids, room, self.why, self.kind)

    def ready(self, tokens: int) -> bool:
        """Whether there is a tier with room for a conversation of `tokens` tokens; creates one if
        needed. If not, `why` says why. Raises UsageError if `kind` is "ram" or "file" and there
        cannot be such a tier."""
        if self._chunk:
            return self.tier is not None and self._kv.rules.cannot_recall is None
        if self.remembering:
            return self.tier is not None
        self.why = '`tier="none"`' if self.kind == "none" else self._kv.rules.cannot_recall or ""
        if self.why:
            return False
        # On a GPU, or if the user wants it, rows from the store are moved to memory.
        if self.file is not None and (self._places[0] != "ram" or self.file.kept):
            return True
        reasons: list[str] = []
        for place in self._places:
            make = self._no_ram if place == "ram" else self._no_file
            if not (no := make(tokens, "; ".join(reasons))):
                return True
            reasons.append(no)
        self.why = "; ".join(reasons)
        self._tell(f'no tier: {self.why}; `tier_dtype="int8"` takes about half')
        return False

    @property
    def _places(self) -> tuple[str, ...]:
        """Where the tier may be, the best choice first. On a CPU a tier in RAM would take the
        memory that eviction frees."""
        if self.kind != "auto":
            return (self.kind,)
        return ("file", "ram") if self._kv.device.type == "cpu" else ("ram", "file")

    def _bytes(self, tokens: int) -> int:
        return row_nbytes(self._kv.shape, self._kv.dtype, self._coded) * tokens

    def _no_ram(self, tokens: int, because: str) -> str:
        """Make a tier in host memory with room for `tokens` tokens. Returns "", or why there is no
        room. because: why it cannot be in a file, for the message. Raises UsageError if there is no
        room and `kind` is "ram"."""
        have, free = 0 if self.file is not None else self.nbytes, self.free()
        need = self._bytes(RamRows.room(tokens, self._kv.shape.max_context))
        if free is not None and need - have > free - free // 8:
            no = f"in RAM it takes {size(need)}, and {size(free + have)} are free"
            if self.kind == "ram":
                raise UsageError(
                    f'`tier="ram"` does not fit: {no}',
                    '`tier_dtype="int8"` takes about half, `tier="none"` reads again instead',
                )
            return no
        if self.tier is None or self.file is not None:
            if self.file is not None:
                with contextlib.suppress(TierError):  # a reader detects the damage
                    self._to_ram(self.file, self.ids)
                return ""
            self._take(None)
            over = f", as {because}" if because else ""
            saves = "; this saves time, not memory" if self._kv.device.type == "cpu" else ""
            self._tell(f"{_STAYS} RAM (the tier): {size(self._bytes(tokens))}{over}{saves}")
        return ""

    def _no_file(self, tokens: int, because: str) -> str:
        """Move the tier to a file with room for `tokens` tokens. Returns "", or why that failed.
        because: why it cannot be in RAM, for the message. Raises UsageError if it failed for the
        first time in this conversation and `kind` is "file"."""
        if self.file is not None or self.broken:
            return "" if self.file is not None else self.broken
        try:
            rows = self._made(self.where(), self.tokens, max(tokens, self.tokens))
        except (TierError, UsageError) as error:
            if self.kind == "file":
                raise UsageError(
                    f'`tier="file"` is not possible: {error}',
                    '`tier="ram"` keeps it in memory, `tier="none"` reads again instead',
                ) from None
            self.broken = str(error)
            return self.broken
        self._take(rows, self.ids)
        over = f", as {because}" if because else ""
        much = f"{size(self._bytes(tokens))} for {amount(tokens, 'token')}"
        self._tell(f"{_STAYS} a file (the tier): {much}{over}")
        return ""

    def _made(
        self, place: Place, have: int, tokens: int, columns: Columns | None = None
    ) -> FileRows:
        """Create a file with room for `tokens` tokens, and copy the first `have` rows of the tier
        to it. columns: by default those of the tier. Raises TierError; then there is no file."""
        rows = self._file_at(place, columns)
        try:
            if have:
                assert self.tier is not None
                copy_rows(self.tier.rows, rows, self._kv.shape.layers, have, self.ids)
            rows.reserve(tokens, have)
        except BaseException:
            rows.close()
            raise
        return rows

    def _file_at(self, place: Place, columns: Columns | None = None, about: str = "") -> FileRows:
        """Create an empty file that is removed when it is closed. Raises TierError."""
        shape, pinned = self._kv.shape, self._kv.device.type == "cuda"
        header = Header(
            shape.layers, shape.kv_heads, columns or self.columns, place.identity, about
        )
        rows = FileRows.create(place.path, header, named=place.named, pinned=pinned)
        rows.kept = False
        return rows

    def _take(self, rows: FileRows | None, ids: Sequence[int] = ()) -> Tier:
        """Replace the tier by one with these rows; None: an empty one in memory. ids: the tokens of
        the rows."""
        self.leave()
        self._kv.tier = tier = self._tier(rows, ids)
        return tier

    def _tier(self, rows: FileRows | None, ids: Sequence[int]) -> Tier:
        kv = self._kv
        tier = Tier(kv.shape, kv.dtype, kv.device, coded=self._coded, rows=rows)
        tier.ids, tier.length = list(ids), len(ids)
        return tier

    def _tell(self, line: str) -> None:
        if not self._told:
            self._told = True
            self.say(line)

    def given(self, ids: Sequence[int]) -> int:
        """How many of the first tokens of the conversation `ids` are in the tier. Drops the other
        rows from it."""
        assert self.tier is not None
        self.tier.truncate(self.stored(len(ids)).gives(ids) if self._chunk else self.has(ids))
        self.tier.ids = list(ids)
        return self.tier.length

    # -- prompts of other conversations ---------------------------------------------------------

    def remember(self, ids: Sequence[int], about: str, why: str = "") -> Iterator[str]:
        """Before a prompt is planned: use the rows that the store has for the conversation's tokens
        `ids`, and if many tokens are new, make the tier an entry of the store. about: a description
        for people. why: why the prompt must be read whole. Yields warnings. If there is no store,
        if the tier has nearly all tokens, or if anything fails, the prompt is read as without a
        store."""
        if self.store is None or len(ids) - self.has(ids) < self.store.least:
            return
        try:
            if why:
                if have := self.has(ids, stored=True):
                    before = f"{have:,} of {len(ids):,} tokens were read before"
                    self.say(f"{before}, and are read again: {why}")
            else:
                yield from self._remember(self.store, ids, about)
        except (TierError, UsageError, OSError) as error:
            self.leave()
            yield f"this text is not remembered for later chats: {error}"

    def _remember(self, store: Store, ids: Sequence[int], about: str) -> Iterator[str]:
        found, had = store.find(self.header, ids), self.has(ids)
        have = 0 if found is None else shared(found.ids, ids)
        self._becomes = len(ids) - have >= store.least and had < have + store.least
        need, first = self._bytes(len(ids) - have), not store.entries()
        if self._becomes and (no := store.room(need)):
            self._becomes = False
            if first:
                yield f"this text is not remembered for later chats: {no}"
        try:
            if not self._becomes and have <= had:
                return
            place = Place(store.place(), store.identity, True) if self._becomes else self.where()
            self._take(self._resting(place, found, ids[:have], about))
        finally:
            if found is not None:
                found.close()
        assert self.tier is not None
        self.tier.ids, self.tier.length, self.remembering = list(ids[:have]), have, True
        if found is not None:
            self._source = found.path
        if have and not had:
            self.say(f"{have:,} of {len(ids):,} tokens were read before")
        elif first:
            self.say(
                f"this text is remembered for later chats: {size(need)} in {store.folder}; "
                '`remember="off"` keeps nothing'
            )

    def _remembered(self, ids: Sequence[int]) -> None:
        """The prompt was read, and the tier has all of it. If the tier becomes an entry, which
        never changes, the conversation continues in a new tier that begins with it."""
        self.remembering, self._source, rows = False, None, self.file
        assert self.store is not None
        if self._becomes and rows is not None:
            self._becomes, self._entry, self._kv.tier = False, rows, None
            rows.publish(self.store.name())
            if self.kind != "none":
                with contextlib.suppress(TierError, UsageError):
                    self._kv.tier = self._tier(self._resting(self.where(), rows, ids), ids)
        elif self.kind == "none":
            self.leave()
        if self.kind == "ram":
            with contextlib.suppress(UsageError, MemoryError, RuntimeError):  # later, or never
                self.ready(len(ids))

    def _resting(
        self, place: Place, found: FileRows | None, ids: Sequence[int], about: str = ""
    ) -> FileRows:
        """A file that begins with the rows that `found` has of the tokens `ids`. It has no name if
        they are on another disk, because files cannot be linked across disks. Raises TierError."""
        for named in dict.fromkeys((place.named, False)):
            rows = self._file_at(replace(place, named=named), about=about)
            try:
                if found is not None:
                    rows.rest_on(found, ids)
                return rows
            except TierError as error:
                failed = error
                rows.close()
        raise failed

    # -- after a prompt -------------------------------------------------------------------------

    def keep(self, ids: Sequence[int]) -> str:
        """The prompt was read: the tier has all tokens `ids`. Returns "", or a line for the user if
        it could not store them."""
        assert self.tier is not None
        if self._chunk:
            return ""
        if self.tier.failed is not None:
            return self.failed(self.tier.failed)
        self.tier.ids = list(ids)
        if self.remembering:
            self._remembered(ids)
        return ""

    def failed(self, error: TierError) -> str:
        """After an error of the tier, use only its rows that are intact. Returns a line for the
        user."""
        if self._kv.scoring_tier is not None:  # while it exists, the other tier is not read
            self.scored()
            self.broken = str(error)
            return (
                f"the file of the rows to be scored cannot be used: {error}; the document is read "
                "again"
            )
        assert self.tier is not None
        if self._source is not None and error.rows is not None:  # otherwise writing failed
            remove(self._source)
            self._source = None
        if self._chunk:  # the damage stays in the other chat's file, so none of it is used
            self.leave()
            return f"the tier is damaged: {error}; everything is read again"
        if error.rows is None:
            self.broken = str(error)
            self.leave()
            return f"the tier can no longer be used: {error}; this chat continues without it"
        lost = self.tokens - error.rows
        self.tier.truncate(error.rows)
        return f"the tier is damaged: {error}; {amount(lost, 'token')} are read again"

    # -- prompts with a second pass ---------------------------------------------------------------

    def keep_in_file(self, tokens: int) -> str:
        """Create a file without a name for the rows of prompts of up to `tokens` tokens. `scored`
        removes it. The rows are exact, whatever `dtype` is. Returns "", or why that failed."""
        kv = self._kv
        assert kv.scoring_tier is None
        try:
            place = replace(self.where(), named=False)
            rows = self._made(place, 0, tokens, columns_of(kv.shape, kv.dtype, coded=False))
        except (TierError, MinikvError, OSError) as error:
            return str(error)
        kv.scoring_tier = Tier(kv.shape, kv.dtype, kv.device, rows=rows)
        return ""

    def scored(self) -> None:
        """Remove the file of `keep_in_file`, if there is one: its rows are scored or no longer
        needed. Cannot fail."""
        tier, self._kv.scoring_tier = self._kv.scoring_tier, None
        if tier is not None and isinstance(tier.rows, FileRows):
            tier.rows.close()

    # -- a chat's files -------------------------------------------------------------------------

    def adopt(self, rows: FileRows) -> None:
        """Use the rows of this file, which belong to this network, as the tier; if `kind` is "ram",
        copy them to memory. Raises TierError, and torch's error if memory runs out; then there is
        no tier."""
        self._coded = "k_scale" in rows.header.columns
        if self.kind != "ram":
            self._take(rows, rows.ids)
            self._told = True
            return
        try:
            self._to_ram(rows, rows.ids)
        except BaseException:
            self.leave()
            raise
        finally:
            rows.close()

    def _to_ram(self, rows: FileRows, ids: Sequence[int]) -> None:
        """Replace the tier by one in memory with the rows that `rows` has of the tokens `ids`.
        Raises TierError, and torch's error if memory runs out."""
        tier = self._tier(None, ids)
        copy_rows(rows, tier.rows, self._kv.shape.layers, len(ids))
        self.leave()
        self._kv.tier = tier

    def write(self, place: Place) -> FileRows:
        """Write a copy of the tier to a new file, and wait until it is on disk. Raises TierError;
        then there is no file."""
        rows = self._made(place, self.tokens, self.tokens)
        try:
            rows.sync()
        except BaseException:
            rows.close()
            raise
        return rows

    def move(self, rows: FileRows) -> None:
        """Use this copy, which `write` returned, as the tier."""
        self._take(rows, self.ids)

    def exchange(self, tier: Tier | None) -> Tier | None:
        """Replace the present tier by `tier`, which an earlier call returned; return the present
        one."""
        was, self._kv.tier = self._kv.tier, None
        self.leave()
        self._kv.tier = tier
        return was

    def leave(self) -> None:
        """Drop the tier. The file of a saved chat stays."""
        self.scored()
        for file in (self.file, self._entry):
            if file is not None:
                file.close()
        self._kv.tier = self._source = self._entry = None
        self.remembering = False

    def clear(self) -> None:
        """Forget the conversation and free its memory. The file of a saved chat stays."""
        self.leave()
        self._told, self.broken = False, ""
