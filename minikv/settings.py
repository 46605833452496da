"""Every setting, defined once: its description, its default and its allowed values.

The fields of the classes below make the flags of the command line, the keys of the configuration
file, the `MINIKV_*` variables, the settings of `/set`, and what `minikv.load` checks.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from minikv import checks
from minikv.cache.budget import Budget
from minikv.chat.eviction_config import MOST_STRIDE, EvictionConfig, read_budget
from minikv.chat.reuse import REREAD_LIMIT, REUSES, TIER_DTYPES, TIERS
from minikv.checks import quoted
from minikv.errors import UsageError
from minikv.policies import (
    DEFAULT_BUDGET,
    DEFAULT_PROMPT,
    check_name,
    prompt_names,
    step_names,
)

WEIGHTS = ("auto", "plain", "int8", "int4", "int8+head", "int4+head")
"""Values of --weights, as `models.linear` knows them."""
MAX_TOKENS = 512  # of an answer, also from Python
DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL, CACHE, DOCUMENTS = "Model", "KV cache", "Documents"
SAMPLING, OUTPUT, ADVANCED = "Sampling", "Output", "Advanced"
_CHAT = ("ask", "chat")
_MOST_THREADS = 4096
_KEY = "setting"

Plain = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the command line and the configuration file know about one field.

    default: of the flag; Python's may differ. A tuple is a flag that may be given several times.
    panel: the section of --help-all that lists it; `common` settings are in --help, too. takes: the
    word for its value there. letters: other spellings of the flag. low and high: limits of a
    number. words: texts that may stand in place of a number. commands: those for which a
    configuration file sets it (empty: every command that has the flag). in_file: if False, a
    configuration file cannot set it.
    """

    name: str
    default: Plain
    help: str
    panel: str | None
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    letters: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    in_file: bool = True
    common: bool = False
    takes: str = ""
    words: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The flag as it is typed, e.g. --keep-packed."""
        return f"--{self.name.replace('_', '-')}"

    def check_choice(self, value: object, where: str) -> None:
        """Raise UsageError, beginning with `where`, if the value is not one of the choices."""
        if self.choices and value not in self.choices:
            some = ", ".join(self.choices)
            raise UsageError(f"{where} must be one of {some}, got {quoted(value)}")


def setting(
    default: Plain | None,
    help: str,
    panel: str,
    *,
    flag_default: Plain | None = None,
    choices: tuple[str, ...] = (),
    low: float = -math.inf,
    high: float = math.inf,
    letters: tuple[str, ...] = (),
    commands: tuple[str, ...] = (),
    in_file: bool = True,
    common: bool = False,
    takes: str = "",
    words: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with a `Setting` as metadata. flag_default: if None, the flag has the
    default of the field, or "" if that is None."""
    shown = default if flag_default is None else flag_default
    made = Setting(
        "",
        "" if shown is None else shown,
        help,
        panel,
        choices,
        low,
        high,
        letters,
        commands,
        in_file,
        common,
        takes,
        words,
    )
    return field(default=default, metadata={_KEY: made})


@functools.cache  # the arguments are always the same few classes
def settings_of(*kinds: type) -> Mapping[str, Setting]:
    """The settings of these classes' fields by name, in order."""
    return MappingProxyType(
        {
            one.name: replace(one.metadata[_KEY], name=one.name)
            for kind in kinds
            for one in fields(kind)
            if _KEY in one.metadata
        }
    )


PRESETS: Mapping[str, Mapping[str, Plain]] = {
    # One cache for many questions: documents are evicted once, before any question.
    "many-questions": {"policy": "kvzip", "reuse": "blind"},
}
"""Settings that go together, by the name that --preset takes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides what a chat computes. Raises UsageError for values that are wrong on
    every machine.

    model: None is the bundled one. threads: None leaves torch's number. options: those of the
    policies, by name.
    """

    model: str | None = setting(
        None,
        "the model: a directory, a name on the Hugging Face hub, or an alias; without it, the "
        "small bundled one",
        MODEL,
        common=True,
        takes="NAME",
        letters=("-m",),
    )
    revision: str | None = setting(
        None, "commit, branch or tag of a hub model", MODEL, takes="NAME"
    )
    offline: bool = setting(False, "never use the network", MODEL)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", MODEL, takes="NAME")
    dtype: str = setting(
        "auto",
        "number format of weights and cache: float32, bfloat16, float16; auto: that of the files",
        MODEL,
        choices=DTYPES,
        takes="FORMAT",
    )
    weights: str = setting(
        "auto",
        "quantize the weights to int8 or int4 (on a CPU, activations are then quantized to int8, "
        "too); int8+head and int4+head: also the output matrix (and a tied embedding), in int8; "
        "auto and plain: as --dtype says",
        MODEL,
        choices=WEIGHTS,
        common=True,
        takes="FORMAT",
    )
    keep_packed: str = setting(
        "off",
        "disk space for packed weights (those of --weights int8 or int4), so that later starts "
        "need not pack them again; the least recently used are removed first; off: keep none",
        MODEL,
        flag_default="20GiB",
        takes="SIZE",
    )
    policy: str = setting(
        DEFAULT_PROMPT,
        "which tokens stay in memory after a prompt was read (`minikv policies` explains): "
        f"{', '.join(prompt_names())}",
        CACHE,
        commands=_CHAT,
        common=True,
        takes="NAME",
    )
    budget: str = setting(
        DEFAULT_BUDGET,
        "tokens per head that stay in memory, averaged over heads and layers (512), a share of the "
        "prompt (20%), or memory for all layers (64MiB); auto: all of them while they fit, else as "
        "many as fit",
        CACHE,
        commands=(*_CHAT, "plan"),
        common=True,
        takes="SIZE",
    )
    decode: str = setting(
        "auto",
        f"which tokens leave memory while the answer is written: auto, {', '.join(step_names())}",
        CACHE,
        takes="NAME",
        commands=_CHAT,
    )
    stride: int = setting(
        0,
        "read the prompt in blocks of this many tokens and evict after each; needs a policy that "
        "can also evict while writing, such as --policy roco; 0: the prompt in one piece",
        CACHE,
        commands=_CHAT,
        low=0,
        high=MOST_STRIDE,
    )
    kv: str = setting(
        "auto",
        "number format of cached keys and values; auto: --dtype; int8: about half of bfloat16",
        CACHE,
        commands=_CHAT,
        choices=("auto", "int8"),
    )
    reuse: str = setting(
        "auto",
        "what a later question is answered from: recall: all that was read, which --tier keeps; "
        "refresh: all that was read, after reading it again; once: the tokens that were kept for "
        "the first question; blind: the tokens that were kept before any question was seen; auto: "
        "recall if it fits, else refresh (kvzip: blind)",
        CACHE,
        commands=_CHAT,
        common=True,
        takes="WAY",
        choices=REUSES,
    )
    tier: str = setting(
        "auto",
        "where the keys and values of all that was read are kept, for --reuse recall: ram; file: "
        "with the saved chat, which then continues without reading again; none; auto: on a GPU ram "
        "if it fits, else a file; on a CPU a file, as ram would take what eviction saves (kvzip "
        "keeps them only while it reads)",
        CACHE,
        commands=_CHAT,
        takes="PLACE",
        choices=TIERS,
    )
    tier_dtype: str = setting(
        "same",
        "number format of what --tier keeps; same: that of the model; int8: about half of "
        "bfloat16, but rounded: the same question, asked again, may get another answer",
        CACHE,
        commands=_CHAT,
        takes="FORMAT",
        choices=TIER_DTYPES,
    )
    refresh_every: int = setting(
        0,
        "every so many tokens of an answer, choose again which tokens stay in memory, from all "
        "that --tier keeps and the answer so far; 0: once per answer",
        CACHE,
        commands=_CHAT,
        takes="TOKENS",
        low=0,
        high=1 << 31,
    )
    fidelity: str = setting(
        "on",
        "with --tier, measure with each question what eviction loses (/stats shows it); off: saves "
        "a step for each question",
        CACHE,
        commands=_CHAT,
        takes="on|off",
        choices=("on", "off"),
    )
    check: str = setting(
        "off",
        "after each answer, until you type, write it again from all that --tier keeps, and say "
        "whether it is the answer of a cache without eviction",
        CACHE,
        commands=_CHAT,
        takes="on|off",
        choices=("on", "off"),
    )
    reread_limit: int = setting(
        REREAD_LIMIT,
        "--reuse auto asks once before it reads more than this many tokens again; 0: it never asks",
        CACHE,
        commands=("chat",),
        takes="TOKENS",
        low=0,
        high=1 << 31,
    )
    options: Mapping[str, object] = field(default_factory=dict)
    pin_system: bool = setting(False, "never evict the system prompt", CACHE, commands=_CHAT)
    system: str = setting(
        "",
        "system prompt; @FILE reads it from a file",
        DOCUMENTS,
        common=True,
        letters=("-S",),
        commands=_CHAT,
    )
    seed: int = setting(0, "seed of every random draw", SAMPLING, letters=("-s",), commands=_CHAT)
    threads: int | None = setting(
        None,
        "CPU threads; 0: as many as the process may use",
        ADVANCED,
        flag_default=0,
        commands=_CHAT,
        low=0,
        high=_MOST_THREADS,
    )
    kernels: str = setting(
        "auto",
        "kernels of attention and eviction; auto: Triton on a GPU, C on a CPU",
        ADVANCED,
        choices=("auto", "triton", "torch"),
    )

    def __post_init__(self) -> None:
        for one in fields(Settings):
            if _KEY in one.metadata:
                _check_type(one.name, getattr(self, one.name), str(one.type))
        for name, setting in settings_of(Settings).items():
            setting.check_choice(getattr(self, name), name)
            if name == "refresh_every":
                checks.number(name, getattr(self, name), setting.low, setting.high)
        checks.unicode("the system prompt", self.system)
        self.packed_bytes()
        if self.threads is not None and not 0 <= self.threads <= _MOST_THREADS:
            raise UsageError(
                f"`threads` must be from 0 to {_MOST_THREADS:,}, got {self.threads}",
                "0 uses all there are",
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise UsageError(f"unknown device {self.device!r}", "use auto, cpu, cuda or cuda:N")
        if self.kernels == "triton" and self.device == "cpu":
            raise no_cuda()

    def packs(self) -> bool:
        """Whether the weights are packed to fewer bits (int8 or int4)."""
        return self.weights not in ("auto", "plain")

    def packed_bytes(self) -> int:
        """How many bytes of packed weights may be kept on disk. Raises UsageError for a wrong
        `keep_packed`."""
        if self.keep_packed == "off":
            return 0
        found = Budget.size(self.keep_packed)
        if found is not None:
            return found
        raise UsageError(
            f"`keep_packed` must be off or a size, got {quoted(self.keep_packed)}",
            "give a size with its unit, such as 20GiB",
        )

    def check_eviction(self) -> None:
        """Raise the UsageError of `eviction`. Imports torch only if there are options to check."""
        if self.options or self.stride:
            self.eviction()
            return
        check_name(self.policy)
        if self.decode != "auto":
            check_name(self.decode, step=True)
        read_budget(self.budget)

    def eviction(self) -> EvictionConfig:
        """The eviction settings, checked. Imports torch, unless a policy is unknown. Raises
        UsageError."""
        return EvictionConfig.read(
            self.policy, self.decode, self.budget, self.options, self.seed, self.stride
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """How an answer is written. Raises UsageError for a value out of range."""

    max_tokens: int = setting(
        MAX_TOKENS,
        "longest answer, in tokens",
        SAMPLING,
        letters=("-n",),
        commands=_CHAT,
        low=1,
        common=True,
    )
    temperature: float | Literal["auto"] = setting(
        0.0,
        "how random the answer is: 0 always takes the likeliest token, 1 draws as the model "
        "was trained; auto: as the model's generation_config.json says",
        SAMPLING,
        common=True,
        letters=("--temp", "-t"),
        commands=_CHAT,
        low=0,
        high=100,
        takes="N|auto",
        words=("auto",),
    )
    top_k: int = setting(
        0,
        "sample from the k likeliest tokens; 0: off",
        SAMPLING,
        commands=_CHAT,
        low=0,
        high=1 << 31,
    )
    top_p: float = setting(
        1.0,
        "sample from the likeliest tokens that make up this probability; 1: off",
        SAMPLING,
        commands=_CHAT,
        low=0,
        high=1,
    )
    min_p: float = setting(
        0.0,
        "sample from tokens at least this fraction as likely as the likeliest; 0: off",
        SAMPLING,
        commands=_CHAT,
        low=0,
        high=1,
    )
    repeat_penalty: float = setting(
        1.0,
        "make the last 64 tokens (of the prompt, too) less likely, so that the answer repeats "
        "itself less: their logits are divided by this number, or multiplied if they are not above "
        "0, such as 1.1; 1: off",
        SAMPLING,
        commands=_CHAT,
        low=0.1,
        high=10,
    )
    stop: tuple[str, ...] = setting(
        (),
        "the answer ends before this text, which is not shown; \\n and \\t stand for a new line "
        "and a tab; may be given several times",
        SAMPLING,
        commands=_CHAT,
    )

    def __post_init__(self) -> None:
        checks.stop_texts(self.stop)
        for name, one in settings_of(Generation).items():
            value = getattr(self, name)
            if isinstance(value, tuple) or value in one.words:
                continue
            if isinstance(value, str):
                raise UsageError(f"{one.flag} must be a number or auto, got {quoted(value)}")
            if one.low <= value <= one.high:  # NaN fails too
                continue
            if one.high == math.inf:
                raise UsageError(f"{one.flag} must be at least {one.low}, got {value}")
            low, high = type(value)(one.low), type(value)(one.high)
            raise UsageError(f"{one.flag} must be between {low:,} and {high:,}, got {value:,}")


def _check_type(name: str, value: object, annotation: str) -> None:
    """Raise UsageError for a value of another type than the field has."""
    kind, _, none = annotation.partition(" | ")
    if none and value is None:
        return
    if kind == "str":
        checks.text(f"`{name}`", value)
    elif kind == "bool":
        checks.truth(name, value)
    elif kind == "int":
        checks.whole(name, value)


def no_cuda() -> UsageError:
    """The error if Triton kernels are requested without a GPU."""
    return UsageError(
        "no triton kernels without a CUDA device", 'use `kernels="auto"` or `kernels="torch"`'
    )
