"""The registry of eviction policies: one row per published method.

Importing this needs no torch, so that `--help`, validation and `minikv policies` answer at once.
A row names the module that holds the method; `prompt_policy` and `step_policy` import it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minikv.errors import UsageError

if TYPE_CHECKING:
    from minikv.policy import PromptPolicy, StepPolicy

Value = int | float | str | bool


@dataclass(frozen=True, slots=True)
class Option:
    """One setting of a policy. `kind` is int, float, bool or str; `choices` only for str."""

    name: str
    default: Value
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    odd: bool = False


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """The facts of one method, from which help, validation and the policies table are made."""

    name: str
    prompt: bool  # may be given as --policy
    step: bool  # may be given as --decode
    when: str  # "never", "prompt", "step", "prompt + step"
    shape: str  # how the budget is spread: "uniform", "per head", ...
    scores: str  # what a row is worth
    state: str  # what is stored per row beyond k, v, position
    second: str  # what a second question finds
    paper: str  # arXiv number or "baseline"
    summary: str
    module: str  # holds prompt_policy(options) and / or step_policy(options)
    options: tuple[Option, ...] = ()


WINDOW = Option("window", 32, "observation window: the last rows, always kept", 1, 4096)
KERNEL = Option("kernel", 7, "pooling width over neighbouring rows (odd)", 1, 63, odd=True)
POOLING = Option("pooling", "max", "pooling of neighbouring scores", choices=("max", "avg"))
GROUP = Option(
    "group", "mean", "how the query heads of a KV head are joined", choices=("mean", "max")
)

POLICIES: dict[str, PolicyInfo] = {
    info.name: info
    for info in (
        PolicyInfo(
            "full", True, False, "never", "-", "-", "-", "safe", "baseline",
            "keeps every row; the baseline",
            "minikv.policies.full",
        ),
        PolicyInfo(
            "streaming", True, True, "prompt + step", "uniform", "position only", "-",
            "recent only", "2309.17453",
            "the first rows (sinks) and the most recent ones",
            "minikv.policies.streaming",
            (Option("sinks", 4, "first rows of the conversation, always kept", 0, 4096),),
        ),
        PolicyInfo(
            "snapkv", True, False, "prompt", "uniform", "last-window attention", "-",
            "shaped by Q1", "2404.14469",
            "rows that the last window of the prompt attends to",
            "minikv.policies.snapkv",
            (WINDOW, KERNEL, POOLING, GROUP),
        ),
        PolicyInfo(
            "adakv", True, False, "prompt", "per head", "last-window attention", "-",
            "shaped by Q1", "2407.11550",
            "SnapKV's scores, with the layer's budget spread over heads by need",
            "minikv.policies.adakv",
            (
                WINDOW, KERNEL, POOLING, GROUP,
                Option("alpha", 0.2, "share of the budget that every head is sure of", 0.0, 1.0),
                Option(
                    "rounding", "exact", "exact: the layer's total is kept to the row; official: "
                    "the authors' rounding, which drifts by a few rows",
                    choices=("exact", "official"),
                ),
                Option(
                    "normalize", False, "weigh a head's scores by how concentrated they are "
                    "before heads are compared (as KVCache-Factory does, not the authors)",
                ),
            ),
        ),
        PolicyInfo(
            "roco", False, True, "step", "each head's own cap", "mean and std of attention",
            "2 sums and 1 count per row", "fades", "2402.06262",
            "evicts the lowest mean attention among the rows of steady attention",
            "minikv.policies.roco",
            (
                Option("sinks", 4, "first rows of the conversation, always kept", 0, 4096),
                Option("recent", 10, "newest rows, always kept", 1, 4096),
                Option("scope", 0.3, "share of the cap that a high deviation saves", 0.0, 0.95),
            ),
        ),
        PolicyInfo(
            "none", False, True, "never", "-", "-", "-", "-", "-",
            "the answer's rows are all kept until the next prompt (one-shot papers' setting)",
            "minikv.policies.full",
        ),
    )
}
"""Every method by name."""

DEFAULT_PROMPT = "adakv"
DEFAULT_STEP = "roco"
DEFAULT_BUDGET = "512"


def prompt_names() -> list[str]:
    """Names that `--policy` takes."""
    return [p.name for p in POLICIES.values() if p.prompt]


def step_names() -> list[str]:
    """Names that `--decode` takes, besides "auto"."""
    return [p.name for p in POLICIES.values() if p.step]


def default_step(prompt: str) -> str:
    """What `--decode auto` means beside a prompt policy: the same method if it has a step form."""
    if prompt == "full":
        return "none"
    return prompt if POLICIES[prompt].step else DEFAULT_STEP


def find(name: str, *, step: bool = False) -> PolicyInfo:
    """The row called `name`, or a UsageError that names the nearest ones."""
    names = step_names() if step else prompt_names()
    info = POLICIES.get(name)
    if info is not None and (info.step if step else info.prompt):
        return info
    flag, other = ("--decode", "--policy") if step else ("--policy", "--decode")
    if info is not None:
        raise UsageError(
            f"{name} works only as {other}, not as {flag}", f"{flag} takes: {', '.join(names)}"
        )
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"unknown policy {name!r}", f"{guess}{flag} takes: {', '.join(names)}")


def read_options(info: PolicyInfo, given: Mapping[str, object]) -> dict[str, Value]:
    """Defaults of `info` overlaid with `given`, each checked; strings are parsed (`-o name=value`).

    Raises UsageError on an unknown name, a value of the wrong kind or out of range.
    """
    known = {option.name: option for option in info.options}
    values: dict[str, Value] = {option.name: option.default for option in info.options}
    for name, raw in given.items():
        option = known.get(name)
        if option is None:
            takes = ", ".join(known) or "no options"
            raise UsageError(f"{info.name} has no option {name!r}", f"{info.name} takes: {takes}")
        values[name] = _read(info.name, option, raw)
    return values


def _read(policy: str, option: Option, raw: object) -> Value:
    kind = type(option.default)
    try:
        if kind is bool:
            if isinstance(raw, bool):
                return raw
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
                str(raw).lower()
            ]
        if kind is int and isinstance(raw, (bool, float)):
            raise ValueError
        value: Value = kind(str(raw))
    except (ValueError, KeyError):
        raise UsageError(
            f"{policy}: {option.name} must be {kind.__name__}, got {raw!r}"
        ) from None
    if option.choices and value not in option.choices:
        raise UsageError(
            f"{policy}: {option.name} must be one of {', '.join(option.choices)}, got {value!r}"
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = option.low, option.high
        if not ((low is None or value >= low) and (high is None or value <= high)):
            raise UsageError(
                f"{policy}: {option.name} must be between {low} and {high}, got {value}"
            )
        if option.odd and isinstance(value, int) and value % 2 == 0:
            raise UsageError(f"{policy}: {option.name} must be odd, got {value}")
    return value


def prompt_policy(name: str, options: Mapping[str, object] | None = None) -> PromptPolicy | None:
    """Build the prompt side of a method; None means that prompts evict nothing."""
    info = find(name)
    made = importlib.import_module(info.module).prompt_policy(read_options(info, options or {}))
    assert made is None or made.name == name
    return made  # type: ignore[no-any-return]


def step_policy(name: str, options: Mapping[str, object] | None = None) -> StepPolicy | None:
    """Build the decode side of a method; None means that answers evict nothing."""
    info = find(name, step=True)
    made = importlib.import_module(info.module).step_policy(read_options(info, options or {}))
    assert made is None or made.name == name
    return made  # type: ignore[no-any-return]
