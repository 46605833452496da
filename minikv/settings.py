"""Every setting, defined once: its description, its default and its allowed values.

The fields of the classes below define the flags of the command line, the keys of the configuration
file, the `MINIKV_*` variables, the settings of `/set`, and the checks of `minikv.load`.
`Setting.read` checks a value, wherever it comes from.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from minikv import checks
from minikv.cache.budget import Budget
from minikv.chat.eviction_config import MOST_STRIDE, EvictionConfig, read_budget
from minikv.chat.transcript import OVERFLOWS, REUSES, TIER_DTYPES, TIERS
from minikv.checks import quoted
from minikv.errors import UsageError
from minikv.policies import DEFAULT_BUDGET, DEFAULT_PROMPT, check_name, prompt_names, step_names

WEIGHTS = ("auto", "plain", "int8", "int4", "int8+head", "int4+head")
"""Values of --weights, as `models.linear` knows them."""
MAX_TOKENS = 512  # of an answer; also Python's default
DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL, CACHE, DOCUMENTS = "Model", "KV cache", "Documents"
SAMPLING, OUTPUT, ADVANCED = "Sampling", "Output", "Advanced"
GONE: Mapping[str, str] = {
    "quality": "choose `budget`; the record of a turn says what eviction loses",
    "preset": '`policy="kvzip"` makes one cache for all questions',
    "refresh_every": '`policy="global-span"` keeps what the whole answer needs',
    "reread_limit": '`reuse="once"` reads nothing again for a new question',
    "encoding_errors": "`iconv -c -f UTF-8 -t UTF-8 FILE` prints a text without its invalid bytes",
    "chats_limit": "`minikv chats` shows the size of each, and its command rm removes old ones",
    "keep_packed": "a file of quantized weights (`FILE.gguf`) loads without packing them",
    "loaders": 'pipe the text in: `pandoc -t plain FILE | minikv ask "QUESTION"`',
}
"""Settings of earlier versions, with what to use instead."""
_CHAT = ("ask", "chat", "serve")
_LARGEST = 1 << 64  # a limit for whole numbers
_KEY = "setting"
_TRUTHS = dict.fromkeys(("1", "true", "yes", "on"), True)
_TRUTHS |= dict.fromkeys(("0", "false", "no", "off"), False)

Plain = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One field: its default, help and limits.

    default: the flag's; Python's may differ. A tuple means that the flag may be given several
    times. panel: the section of --help-all that lists it; `common` settings are in --help too.
    takes: the word for its value there. letters: other spellings of the flag. within: the smallest
    and the largest number. words: texts that may replace a number. examples: the completions for
    Tab if there are neither choices nor words. test: raises UsageError for an invalid text; later:
    the same for flags that may take several values, which the command tests.
    commands: those for which a configuration file sets it (empty: every command that has the flag).
    in_file: if False, a configuration file cannot set it. live: `/set` changes it in a chat.
    """

    name: str
    default: Plain
    help: str
    panel: str | None
    choices: tuple[str, ...] = ()
    within: tuple[float, float] = (-math.inf, math.inf)
    letters: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    in_file: bool = True
    live: bool = False
    common: bool = False
    takes: str = ""
    words: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    test: Callable[[str], object] | None = None
    later: Callable[[str], object] | None = None

    @property
    def flag(self) -> str:
        """The flag as it is typed, e.g. --max-tokens."""
        return f"--{self.name.replace('_', '-')}"

    def parse(self, text: str) -> object:
        """A text from a flag, a variable or a command as the value that a configuration file would
        have; the text itself if it cannot be parsed."""
        kind, value = type(self.default), text.strip()
        if kind is tuple:
            return [spelled(text)] if text else []
        if kind is bool:
            return _TRUTHS.get(value.lower(), text)
        try:
            return value if value in self.words else kind(value)
        except ValueError:
            return text

    def parse_words(self, words: Sequence[str]) -> object:
        """Like `parse`, for the words of a command. Raises UsageError for several words if the
        setting takes one."""
        if isinstance(self.default, tuple):
            return [spelled(word) for word in words if word]
        if len(words) > 1:
            raise UsageError(
                f"{self.name} takes one value, got {' '.join(words)!r}", "put a text in quotes"
            )
        return self.parse(words[0])

    def read(self, value: object, where: str) -> Plain:
        """The value in the type of the setting. Raises UsageError, which begins with `where`, for
        any other type and for a value that is not allowed."""
        kind = type(self.default)
        if kind is tuple:
            return self._texts(value, where)
        if isinstance(value, str) and value in self.words:
            return value
        if type(value) is int and not -_LARGEST < value < _LARGEST:
            raise UsageError(f"{where} is too large a number")
        if type(value) is int and kind is float:
            value = float(value)
        if type(value) is int and self.later is read_budget:
            value = str(value)
        if type(value) is not kind or not isinstance(value, str | int | float):
            kinds = " or ".join((_KINDS[kind], *self.words))
            raise UsageError(f"{where} must be {kinds}, got {quoted(value)}")
        if self.choices and value not in self.choices:
            some = ", ".join(self.choices)
            raise UsageError(f"{where} must be one of {some}, got {quoted(value)}")
        low, high = self.within
        if isinstance(value, int | float) and not low <= value <= high:  # NaN fails too
            limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:,.0f}"
            raise UsageError(f"{where} must be {limits}, got {value}")
        if self.test is not None and isinstance(value, str):
            _tested(self.test, value, where)
        return value

    def read_whole(self, value: object, where: str) -> Plain:
        """Like `read`, including the test `later`. An empty text is allowed."""
        found = self.read(value, where)
        if self.later is not None and isinstance(found, str) and found:
            _tested(self.later, found, where)
        return found

    def _texts(self, value: object, where: str) -> tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
            raise UsageError(f"{where} must be {_KINDS[tuple]}, got {quoted(value)}")
        if "" in texts:
            raise UsageError(f"{where} must not have an empty text")
        return tuple(texts)


def _tested(test: Callable[[str], object], value: str, where: str) -> None:
    try:
        test(value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}", error.hint) from None


_KINDS: Mapping[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of texts",
}


def setting(
    default: Plain | None,
    panel: str,
    more: str = "",
    *,
    flag_default: Plain | None = None,
    **how: Any,
) -> Any:
    """A dataclass field with a `Setting` as metadata. Its help is the paragraph "name: text" of the
    class's docstring, with `more` at the end. flag_default: if None, the flag's default is that of
    the field, or "" if that is None. how: other fields of `Setting`."""
    if panel in (CACHE, DOCUMENTS, SAMPLING):  # settings of a chat only
        how.setdefault("commands", _CHAT)
    how.setdefault("live", panel == SAMPLING)
    shown = default if flag_default is None else flag_default
    made = Setting("", "" if shown is None else shown, more, panel, **how)
    return field(default=default, metadata={_KEY: made})


@functools.cache  # the arguments are always the same few classes
def settings_of(*kinds: type) -> Mapping[str, Setting]:
    """The settings of these classes' fields by name, in order."""
    found = {}
    for kind in kinds:
        texts = inspect.cleandoc(kind.__doc__ or "")
        told = dict(re.findall(r"^(\w+): (.+(?:\n +.+)*)", texts, re.M))
        for name, one in ((one.name, one.metadata.get(_KEY)) for one in fields(kind)):
            if one is not None:
                text = told.get(name, "")  # there is none with python -OO
                help = " ".join(text.split()) + one.help
                found[name] = replace(one, name=name, help=help)
    return MappingProxyType(found)


def refuse_gone(name: str, where: str, hint: str = "") -> None:
    """Raise UsageError, which begins with `where`, if `name` is a setting of earlier versions."""
    if name in GONE:
        raise UsageError(f"{where} is gone: {GONE[name]}", hint)


def spelled(text: str) -> str:
    """The text that the user means: `\\n`, `\\t` and `\\\\` are a new line, a tab and a backslash;
    any other backslash stays."""
    signs = {"n": "\n", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nt\\])", lambda found: signs[found[1]], text)


def _known_policy(name: str) -> None:
    if name not in step_names():  # these are allowed with a stride
        check_name(name)


def _known_step_policy(name: str) -> None:
    if name != "auto":
        check_name(name, step=True)


def _known_device(name: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UsageError(f"unknown device {name!r}", "use auto, cpu, cuda or cuda:N")


def known_size(text: str) -> None:
    """Raise UsageError for a text that is neither a size nor off."""
    if text != "off" and Budget.size(text) is None:
        raise UsageError(
            f"{quoted(text)} is neither off nor a size", "give a size with its unit, such as 10GiB"
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings that affect what a chat computes. Raises UsageError for values that are wrong on
    every machine. In Python, `model` None is the bundled one, `threads` None leaves torch's number,
    and `options` are those of the policies, by name.

    model: the model: a directory, a name on the Hugging Face hub, or an alias; without it, the
        small bundled one
    revision: commit, branch or tag of a hub model
    offline: never use the network
    device: auto, cpu, cuda or cuda:N
    dtype: number format of weights and cache: float32, bfloat16, float16; auto: that of the files
    weights: quantize the weights to int8 or int4 (on a CPU, activations are then quantized to int8,
        too); int8+head and int4+head: also the output matrix (and a tied embedding), in int8; auto
        and plain: as --dtype says
    policy: which tokens stay in memory after a prompt was read (`minikv policies` explains)
    budget: tokens per head that stay in memory, averaged over heads and layers (512), a share of
        the prompt (20%), or memory for all layers (64MiB); auto: all of them while they fit, else
        as many as fit
    decode: which tokens leave memory while the answer is written
    stride: read the prompt in blocks of this many tokens and evict after each; needs a policy that
        can also evict while writing, such as --policy roco; 0: the prompt in one piece
    kv: number format of cached keys and values; auto: --dtype; int8: about half of bfloat16
    reuse: what a later question is answered from: recall: all that was read, stored by --tier;
        refresh: all that was read, after reading it again; once: the tokens that were kept for the
        first question; blind: the tokens that were kept before any question was seen; auto: recall
        if it fits, else refresh (kvzip: blind)
    overflow: if a question does not fit the model's context: refuse it, or drop the oldest turns
        (half of them, or all; the system prompt and the documents stay)
    tier: where the keys and values of all that was read are stored, for --reuse recall: ram; file:
        with the saved chat, which then continues without reading again; none; auto: on a GPU ram if
        it fits, else a file; on a CPU a file, as ram would take what eviction saves (kvzip keeps
        them only while it reads)
    tier_dtype: number format of what --tier stores; same: that of the model; int8: about half of
        bfloat16, but rounded: the same question, asked again, may get another answer
    remember: disk space for prompts of 2,000 tokens and more that were read, so that no document is
        read twice (at most a tenth of the free disk; `minikv cache` lists them); off: none
    fidelity: with --tier, measure for each question what eviction loses (/stats shows it); off:
        saves a step for each question
    check: after each answer, until you type, write it again from all that --tier stores, and say
        whether it is the answer of a cache without eviction
    pin_system: never evict the system prompt
    system: system prompt; @FILE reads it from a file
    seed: seed of every random draw
    threads: CPU threads; 0: as many as the process may use
    kernels: kernels of attention and eviction; auto: Triton on a GPU, C on a CPU
    """

    model: str | None = setting(None, MODEL, common=True, takes="NAME", letters=("-m",))
    revision: str | None = setting(None, MODEL, takes="NAME")
    offline: bool = setting(False, MODEL)
    device: str = setting(
        "auto", MODEL, takes="NAME", test=_known_device, examples=("auto", "cpu", "cuda")
    )
    dtype: str = setting("auto", MODEL, choices=DTYPES, takes="FORMAT")
    weights: str = setting("auto", MODEL, choices=WEIGHTS, common=True, takes="FORMAT")
    policy: str = setting(
        DEFAULT_PROMPT,
        CACHE,
        f": {', '.join(prompt_names())}",
        common=True,
        takes="NAME",
        later=_known_policy,
        live=True,
    )
    budget: str = setting(
        DEFAULT_BUDGET,
        CACHE,
        commands=(*_CHAT, "plan"),
        common=True,
        takes="SIZE",
        later=read_budget,
        live=True,
        examples=("auto", "128", "256", "512", "1024", "10%", "20%", "64MiB"),
    )
    decode: str = setting(
        "auto",
        CACHE,
        f": auto, {', '.join(step_names())}",
        takes="NAME",
        later=_known_step_policy,
        examples=("auto", *step_names()),
        live=True,
    )
    stride: int = setting(0, CACHE, within=(0, MOST_STRIDE))
    kv: str = setting("auto", CACHE, choices=("auto", "int8"))
    reuse: str = setting("auto", CACHE, common=True, takes="WAY", choices=REUSES, live=True)
    overflow: str = setting("refuse", CACHE, takes="HOW", choices=OVERFLOWS, live=True)
    tier: str = setting("auto", CACHE, takes="PLACE", choices=TIERS)
    tier_dtype: str = setting("same", CACHE, takes="FORMAT", choices=TIER_DTYPES)
    remember: str = setting("10GiB", CACHE, takes="SIZE|off", test=known_size)
    fidelity: str = setting("on", CACHE, choices=("on", "off"), live=True)
    check: str = setting("off", CACHE, choices=("on", "off"), live=True)
    options: Mapping[str, object] = field(default_factory=dict)
    pin_system: bool = setting(False, CACHE)
    system: str = setting("", DOCUMENTS, common=True, letters=("-S",), live=True)
    seed: int = setting(0, SAMPLING, letters=("-s",))
    threads: int | None = setting(None, ADVANCED, flag_default=0, within=(0, 4096), commands=_CHAT)
    kernels: str = setting("auto", ADVANCED, choices=("auto", "triton", "torch"))

    def __post_init__(self) -> None:
        _read_fields(self)
        checks.unicode("the system prompt", self.system)
        if self.kernels == "triton" and self.device == "cpu":
            raise no_cuda()

    def check_eviction(self) -> None:
        """Raise the UsageError of `eviction`. Imports torch only if there are options to check."""
        if self.options or self.stride:
            self.eviction()
            return
        check_name(self.policy)
        _known_step_policy(self.decode)
        read_budget(self.budget)

    def eviction(self) -> EvictionConfig:
        """The eviction settings, checked. Imports torch, unless a policy is unknown. Raises
        UsageError."""
        return EvictionConfig.read(
            self.policy, self.decode, self.budget, self.options, self.seed, self.stride
        )


@dataclass(frozen=True, slots=True)
class Generation:
    r"""How an answer is written. Raises UsageError for a value out of range.

    max_tokens: longest answer, in tokens
    temperature: how random the answer is: 0 always takes the likeliest token, 1 draws as the model
        was trained; auto: as the model's generation_config.json says
    top_k: sample from the k likeliest tokens; 0: off
    top_p: sample from the likeliest tokens that make up this probability; 1: off
    min_p: sample from tokens at least this fraction as likely as the likeliest; 0: off
    repeat_penalty: make the last 64 tokens (of the prompt, too) less likely, so that the answer
        repeats itself less: their logits are divided by this number, or multiplied if they are not
        above 0, such as 1.1; 1: off
    stop: the answer ends before this text, which is not shown; \n and \t mean a new line and a tab;
        may be given several times
    max_thoughts: end the thoughts of a reasoning model after this many tokens, so that it answers;
        0: the model decides
    """

    max_tokens: int = setting(
        MAX_TOKENS, SAMPLING, letters=("-n",), within=(1, math.inf), common=True
    )
    temperature: float | Literal["auto"] = setting(
        0.0,
        SAMPLING,
        common=True,
        letters=("--temp", "-t"),
        within=(0, 100),
        takes="N|auto",
        words=("auto",),
    )
    top_k: int = setting(0, SAMPLING, within=(0, 1 << 31))
    top_p: float = setting(1.0, SAMPLING, within=(0, 1))
    min_p: float = setting(0.0, SAMPLING, within=(0, 1))
    repeat_penalty: float = setting(1.0, SAMPLING, within=(0.1, 10))
    stop: tuple[str, ...] = setting((), SAMPLING)
    max_thoughts: int = setting(0, SAMPLING, within=(0, 1 << 31), takes="TOKENS")

    def __post_init__(self) -> None:
        _read_fields(self)


def _read_fields(made: Any) -> None:
    """Check the fields that have a setting, and convert them to its type. Raises UsageError."""
    for one in fields(made):
        value, known = getattr(made, one.name), one.metadata.get(_KEY)
        if known is not None and not (value is None and one.default is None):
            object.__setattr__(made, one.name, known.read(value, f"`{one.name}`"))


def no_cuda() -> UsageError:
    """The error if Triton kernels are requested without a GPU."""
    return UsageError(
        "no triton kernels without a CUDA device", 'use `kernels="auto"` or `kernels="torch"`'
    )
