"""The turn record: what one turn cost, and how a Python prompt shows it. Every figure on the screen
comes from it.

`saved` is 1 - (held + tier_here) / full: a tier in the cache's own memory counts. It is rounded
down, and never below 0. A figure that was not measured is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from minikv.cache.stats import Fidelity, share_saved

UNKNOWN = "unknown"
"""`Loss.method` if rows had left before the measured prompt."""
PLACES = {"ram": "RAM", "file": "a file"}
"""Where a tier is, in words."""
STOPS = {
    "eos": "end of turn",
    "stop": "a stop text",
    "length": "max_tokens",
    "user": "user",
    "context": "the end of the context",
    "error": "an error",
}
"""`stop_reason` in words."""
FEW = 8
"""The fewest tokens of an answer for which its speed is meaningful."""
_MOST = 300  # characters of a `repr`
UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Numbers of tokens. kept_*: per KV head and layer. prompt_reread: how many of `prompt_new`
    earlier turns had read or written. thoughts: how many of `generated` belong to the thoughts,
    tags included."""

    prompt_new: int
    prompt_reused: int
    generated: int
    seen_total: int
    evicted_total: int
    kept_mean: float
    kept_min: int
    kept_max: int
    prompt_reread: int = 0
    thoughts: int = 0


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of the KV cache, over all layers."""

    full: int  # bytes of the same tokens in a cache without eviction
    held: int  # rows held, with the policies' columns
    allocated: int  # memory allocated for the cache
    peak_prefill: int  # the most at once while the prompt was read, tier_here included
    policy_state: int  # the part of `held` that is the policies' columns
    tier: int = 0  # the tier, in addition to held and allocated
    tier_here: int = 0  # the part of `tier` that is in the cache's own memory

    @property
    def taken(self) -> int:
        """What cache and tier hold in the memory in which a cache without eviction would be."""
        return self.held + self.tier_here

    @property
    def saved(self) -> float:
        """See `share_saved`."""
        return share_saved(self.taken, self.full)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall time in seconds. load: of loading the model, once. fidelity: of measuring what eviction
    loses. thoughts: the part of `decode` spent on thoughts."""

    load: float
    first_token: float
    prefill: float
    evict: float
    decode: float
    total: float
    fidelity: float = 0.0
    thoughts: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second; None if nothing was measured."""

    prefill_tok_s: float | None
    decode_tok_s: float | None


@dataclass(frozen=True, slots=True)
class Loss:
    """Estimate of the share of attention mass on evicted rows, from the queries of the last window.

    method: "window"; "unknown" if rows had left before this prompt, because their loss cannot be
    measured; None if the policy observes no attention or nothing was evicted.
    """

    est_mass_lost_mean: float | None
    est_mass_lost_max: float | None
    est_mass_lost_argmax_layer: int | None
    method: str | None


@dataclass(frozen=True, slots=True)
class AgainstFull:
    """How this answer compares to that of a cache without eviction.

    same: whether the two are equal; None: not known. checked: the other one was written to compare;
    otherwise `same` is true because nothing was evicted. tokens: if the answers differ, how many
    tokens are equal before that.
    """

    same: bool | None = None
    checked: bool = False
    tokens: int | None = None

    @property
    def words(self) -> str:
        """ "as without eviction", "not checked", "differs from the full cache after 22 tokens"."""
        if self.same is None:
            return "not checked"
        if self.same:
            return "as without eviction" + (" (checked)" if self.checked else "")
        where = (
            f"after {amount(self.tokens, 'token')}" if self.tokens else "from the first token on"
        )
        return f"differs from the full cache {where}"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """On CUDA, what torch's allocator says. On a CPU, the peak resident memory of the process."""

    peak_bytes: int | None
    reserved_bytes: int | None


@dataclass(frozen=True, slots=True)
class TurnReport:
    """One turn of a chat. stop_reason is a key of `STOPS`.

    shaped_by_turn: the number of the question for which the cache was evicted; 0 if it was evicted
        before any question; None if no question decided what stayed.
    reuse: what the turn read: "once": only new tokens; "refresh": the whole conversation; "blind":
        the documents as separate prompts; "recall": the tokens that the tier did not have.
    tier: where the tier is, "ram" or "file"; "" if there is none.
    kv_dtype: number format of cached keys and values.
    weights: "plain", or the value of --weights.
    fidelity: None if nothing was recalled or measured.
    against_full: whether a cache without eviction would give the same answer.
    dropped: how many turns left the conversation because the context had no room for this one.
    """

    turn: int
    policy: str
    policy_options: Mapping[str, object]
    budget: Mapping[str, object]  # unit, value
    kernels: str
    dtype: str
    device: str
    tokens: Tokens
    kv_bytes: KvBytes
    time_s: Seconds
    rate: Rates
    loss: Loss
    shaped_by_turn: int | None
    stop_reason: str
    seed: int
    sampling: Mapping[str, object]
    device_mem: DeviceMemory
    warnings: tuple[str, ...]
    reuse: str = "once"
    kv_dtype: str = ""
    weights: str = ""
    tier: str = ""
    fidelity: Fidelity | None = None
    against_full: AgainstFull = AgainstFull()
    dropped: int = 0

    def __repr__(self) -> str:
        tokens = self.tokens
        words = [
            f"turn {self.turn}",
            f"{amount(tokens.prompt_new, 'token')} read",
            f"{tokens.generated:,} written in {self.time_s.total:.1f} s",
            self.memory,
            f"kept {tokens.kept_mean:,.0f} of {tokens.seen_total:,} tokens per head",
        ]
        return line("report", words)

    def to_dict(self) -> dict[str, object]:
        """The record as dictionaries, lists, texts and numbers, for JSON."""
        record = asdict(self)
        record["warnings"] = list(self.warnings)
        return record

    @property
    def saved(self) -> str:
        """The saving, e.g. "96.1% saved"."""
        if self.kv_bytes.saved > 0:
            return f"{percent_saved(self.kv_bytes.saved)} saved"
        return "nothing evicted" if self.whole else "nothing saved"

    @property
    def whole(self) -> bool:
        """Whether nothing was evicted. Rows that slide out of a layer's window do not count."""
        return not self.tokens.evicted_total or self.against_full == AgainstFull(same=True)

    @property
    def memory(self) -> str:
        """Memory of the cache, with a tier in the same memory: "KV 1.5 of 41.0 MiB (96.2% saved)".
        For a GPU, a tier in host memory is a separate figure."""
        kv = self.kv_bytes
        what = "KV and tier" if kv.tier_here else "KV"
        taken = of_full(kv.taken, kv.full) if kv.taken < kv.full else size(kv.taken)
        beside = kv.tier - kv.tier_here if self.tier == "ram" else 0
        return f"{what} {taken} ({self.saved})" + (f" + {size(beside)} in RAM" if beside else "")

    @property
    def misses(self) -> int:
        """The number of the earlier question for which the cache was evicted; 0 if there is
        none."""
        by = self.shaped_by_turn or 0
        return by if by < self.turn else 0

    def lines(self) -> tuple[str, ...]:
        """The short lines below an answer: speed, memory, and a warning if the answer may miss
        something."""
        tokens = self.tokens
        written = tokens.generated - tokens.thoughts
        speed = [amount(written, "token")]
        if tokens.thoughts:
            speed[0] += f" after {tokens.thoughts:,} of thought"
        if self.rate.decode_tok_s is not None and tokens.generated >= FEW:
            speed.append(f"{self.rate.decode_tok_s:.1f} tok/s")
        speed.append(f"first token {self.time_s.first_token:.2f} s")
        if self.stop_reason != "eos":
            speed.append(f"stopped by {STOPS[self.stop_reason]}")
        memory = [self.memory]
        if not self.whole:
            memory.append(f"kept {tokens.kept_mean:,.0f} of {tokens.seen_total:,} tokens per head")
        if self.reuse == "refresh":
            again = f"{amount(tokens.prompt_reread, 'token')} " if tokens.prompt_reread else ""
            memory.append(f"{again}read again")
        elif self.shaped_by_turn == 0:
            memory.append("evicted before any question")
        memory.append(self.against_full.words)
        lines = [" · ".join(speed), " · ".join(memory)]
        if self.misses:
            lines.append(
                f"may miss what question {self.misses} did not need; `chat.refresh()` reads all "
                "again"
            )
        return tuple(lines)


def thought_for(tokens: int) -> str:
    """The line in place of folded thoughts: "thought for 312 tokens"."""
    return f"thought for {amount(tokens, 'token')}"


def amount(count: int, word: str) -> str:
    """ "1 token", "2,000 tokens"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def size(count: int, unit: str = "") -> str:
    """1234567 -> "1.2 MiB"; `unit` forces one."""
    for name, scale in UNITS:
        if name == unit or (not unit and (count >= scale or scale == 1)):
            return f"{count:,} B" if scale == 1 else f"{count / scale:,.1f} {name}"
    raise ValueError(f"unknown unit {unit!r}")


def of_full(held: int, full: int) -> str:
    """ "90.8 of 913.1 MiB": both in the unit of the larger number."""
    unit = size(max(held, full)).split()[-1]
    return f"{size(held, unit).removesuffix(unit).rstrip()} of {size(full, unit)}"


def percent_saved(share: float) -> str:
    """Rounded down to a tenth of a percent, so that it is never too high."""
    # The small term corrects binary rounding: 0.9 must not become 89.9%, 1 - 64/1024 stays 93.7%.
    return f"{math.floor(share * 1000 + 1e-9) / 10:.1f}%"


def clipped(text: str, most: int) -> str:
    """`text` on one line of at most `most` characters, with a space for what is not printable."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def line(what: str, words: Iterable[str]) -> str:
    """ "<minikv chat: bundled, 2 turns>"."""
    return f"<minikv {what}: {clipped(', '.join(filter(None, words)), _MOST)}>"
