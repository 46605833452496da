"""/set, /show and /system: the settings of a chat."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from minikv import checks
from minikv.chat.eviction_config import EvictionConfig, read_budget
from minikv.chat.report import size
from minikv.cli import completion, refresh
from minikv.cli.command import Command, Context
from minikv.cli.config import SETTINGS
from minikv.cli.context_command import count_tokens
from minikv.cli.documents.text import read_file
from minikv.cli.screen import render
from minikv.cli.screen.text import cells, padded
from minikv.cli.values import listed, text
from minikv.cli.wording import worded
from minikv.errors import UsageError
from minikv.policies import registry
from minikv.settings import GONE, Generation, settings_of, spelled

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession

HERE = "/set"
_SHORT = {"temp": "temperature", "n": "max_tokens"}


# -- /set -----------------------------------------------------------------------------------


def _set(context: Context, arguments: list[str]) -> None:
    if not arguments:
        _settings(context)
        return
    first, *rest = arguments
    name, equals, value = first.partition("=")
    if equals:
        rest = [value, *rest]
    key = _SHORT.get(name, name.lstrip("-").replace("-", "_"))
    if key not in _CHANGES:
        raise _refused(name, key)
    if rest:
        if len(rest) > 1 and key not in ("system", "stop"):
            raise UsageError(f"{key} takes one value, got {' '.join(rest)!r}")
        one = SETTINGS[key]
        said = [spelled(word) for word in rest if word] if key == "stop" else None
        changed = one.read(one.parse(" ".join(rest)) if said is None else said, key)
        _CHANGES[key](context, changed)
        context.origins[key] = HERE
    context.terminal.say("\n".join(_lines(context, [key])))


def _refused(name: str, key: str) -> UsageError:
    """The error for a setting that a chat cannot change."""
    if key in GONE:
        return UsageError(f"{key} is gone: {worded(GONE[key], chat=True)}")
    if key in SETTINGS:
        return UsageError(f"{key} cannot change in a chat", f"start one with {SETTINGS[key].flag}")
    near = difflib.get_close_matches(key, _CHANGES, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]}? " if near else ""
    return UsageError(f"no setting {name!r}", f"{guess}/set lists them all")


def _seed(context: Context, seed: int) -> None:
    session = context.session
    changed = reseeded(session.eviction, seed)
    if changed != session.eviction:
        session.configure(changed)
    session.seed = seed


def reseeded(eviction: EvictionConfig, seed: int, before: int | None = None) -> EvictionConfig:
    """The settings with another seed for policies that draw random numbers. If `before` is given,
    only seeds that have this value change."""
    policy, decode = (
        {
            name: seed if name == "seed" and before in (None, value) else value
            for name, value in options.items()
        }
        for options in (eviction.policy_options, eviction.decode_options)
    )
    return replace(eviction, policy_options=policy, decode_options=decode)


def _budget(context: Context, value: str) -> None:
    session = context.session
    session.configure(replace(session.eviction, budget=read_budget(value)))


def _policy(context: Context, value: str) -> None:
    session = context.session
    chosen = EvictionConfig.read(value, seed=session.seed)
    session.configure(replace(chosen, budget=session.eviction.budget))
    context.origins["decode"] = context.origins["stride"] = HERE


def _decode(context: Context, value: str) -> None:
    session = context.session
    now = session.eviction
    if now.stride:
        raise UsageError(
            "with --stride, one policy evicts while reading and while writing",
            "/set policy changes it",
        )
    chosen = EvictionConfig.read(now.policy, value, seed=session.seed)
    session.configure(replace(chosen, budget=now.budget, policy_options=now.policy_options))


def _reuse(context: Context, value: str) -> None:
    session = context.session
    session.reuse = value
    if value == "blind" and session.documents and session.evicted_for_turn != 0:
        context.terminal.say(
            "what was read stays as it is; /clear reads it again, and evicts before any question"
        )


def _change_system(context: Context, given: str) -> None:
    """Change the system prompt: at once if nothing was read yet, else for the next conversation."""
    session = context.session
    if given.startswith("@"):
        if given == "@":
            raise UsageError("/system @ names no file")
        given = read_file(given[1:], context.errors).text.strip()
    checks.unicode("the system prompt", given)
    session.system = given.strip()
    what = "system prompt set" if session.system else "no system prompt from here on"
    if not session.fed:
        session.reset(keep_documents=True)
        context.terminal.say(f"{what}, for your next question")
    else:
        context.terminal.say(f"{what}, for the next conversation: /clear begins it")


def _written(key: str) -> Callable[[Context, Any], None]:
    def change(context: Context, value: Any) -> None:
        context.generation = replace(context.generation, **{key: value})

    return change


_CHANGES: Mapping[str, Callable[[Context, Any], None]] = {
    **{key: _written(key) for key in settings_of(Generation)},
    "seed": _seed,
    "policy": _policy,
    "budget": _budget,
    "decode": _decode,
    "reuse": _reuse,
    "refresh_every": lambda context, value: setattr(context.session, "refresh_every", value),
    "fidelity": lambda context, value: setattr(context.session, "fidelity", value == "on"),
    "check": lambda context, value: setattr(context, "checks", value == "on"),
    "encoding_errors": lambda context, value: setattr(context, "errors", value),
    "thoughts": lambda context, value: setattr(context.terminal, "thoughts", value),
    "quiet": lambda context, value: setattr(context.terminal, "quiet", value),
    "system": _change_system,
}
"""Setting -> the function that /set calls with the new value, which has the setting's type."""


def _settings(context: Context) -> None:
    for line in _lines(context, [name for name in SETTINGS if name != "stats"]):
        context.terminal.say(line)
    context.terminal.say(f"/set KEY VALUE changes: {', '.join(_CHANGES)}")


def _lines(context: Context, names: list[str]) -> list[str]:
    values = _values(context)
    shown = {name: values.get(name, "") for name in names}
    shown |= {name: f"{value:g}" for name, value in shown.items() if isinstance(value, float)}
    return listed({name: text(value) for name, value in shown.items()}, context.origins)


def _values(context: Context) -> dict[str, Any]:
    """Every setting as it is in force now, by name."""
    import torch

    session, facts, eviction = context.session, context.session.facts, context.session.eviction
    return {
        **{name: getattr(context.generation, name) for name in settings_of(Generation)},
        **{name: getattr(facts, name) for name in ("revision", "device", "dtype", "kernels", "kv")},
        **{name: getattr(eviction, name) for name in ("policy", "budget", "decode", "stride")},
        **{name: getattr(session, name) for name in ("reuse", "refresh_every", "system", "seed")},
        "model": facts.model or "bundled",
        "weights": facts.form,
        "offline": context.offline,
        "tier": session.recall.kind,
        "tier_dtype": session.recall.dtype,
        "fidelity": "on" if session.fidelity else "off",
        "check": "on" if context.checks else "off",
        "threads": torch.get_num_threads(),
        "pin_system": session.pin_system,
        "encoding_errors": context.errors,
        "thoughts": context.terminal.thoughts,
        "quiet": context.terminal.quiet,
    }


# -- /show ----------------------------------------------------------------------------------


def _show(context: Context, arguments: list[str]) -> None:
    what = arguments[0] if arguments else "model"
    if what not in _VIEWS or len(arguments) > 1:
        raise UsageError(
            f"/show does not know {' '.join(arguments)!r}", f"/show {' | '.join(_VIEWS)}"
        )
    _VIEWS[what](context)


def _show_model(context: Context) -> None:
    session, facts = context.session, context.session.facts
    shape = session.engine.kv.shape
    rows = [
        ("model", facts.model or "unnamed"),
        ("revision", facts.revision or "-"),
        ("runs on", f"{facts.device} · {facts.dtype} · {facts.kernels} kernels"),
        ("cache", facts.kv),
        ("weights", f"{size(facts.weight_bytes)}, loaded in {facts.load_s:.1f} s"),
        (
            "layers",
            f"{shape.layers} · {shape.heads} heads, {shape.kv_heads} KV heads of {shape.head_dim}",
        ),
        ("context", f"{session.max_context:,} positions"),
    ]
    windows = sorted({w for w in shape.windows if w is not None})
    if windows:
        count = sum(w is not None for w in shape.windows)
        rows.append(("windows", f"{count} layers see {', '.join(f'{w:,}' for w in windows)} back"))
    _say_rows(context, rows)


def _show_system(context: Context) -> None:
    session = context.session
    context.terminal.say(session.system or "no system prompt; /system TEXT sets one")
    if session.system:
        pinned = "never evicted" if session.pin_system else "may be evicted"
        context.terminal.say(f"({count_tokens(session, session.system):,} tokens; {pinned})")


def _show_template(context: Context) -> None:
    """Show an example message in the model's template, as the model sees it."""
    from minikv.chat.transcript import Message

    session = context.session
    context.terminal.say(f"template: {getattr(session.template, 'name', 'unnamed')}")
    for note in session.template.notes:
        context.terminal.say(f"! {note}")
    messages = [Message("system", session.system)] if session.system else []
    ids = session.template.opening([*messages, Message("user", "QUESTION")])
    context.terminal.say("an example as the model sees it, markers included:")
    context.terminal.say(_spelled(session, ids))
    context.terminal.say(f"({len(ids):,} tokens)")


def _spelled(session: ChatSession, ids: Sequence[int]) -> str:
    """The text of ids; control tokens by name."""
    control: Mapping[str, int] = getattr(session.tokenizer, "control", {})
    names = {id: name for name, id in control.items()}
    parts = [
        "".join(names[id] for id in part) if named else session.tokenizer.decode(part)
        for named, part in groupby(ids, names.__contains__)
    ]
    return "".join(parts)


def _show_policy(context: Context) -> None:
    eviction = context.session.eviction
    rows = [("now", render.policy_line(context.session))]
    if eviction.evicts:
        counted = context.session.engine.kv.stats().budget_rows
        if counted is not None and eviction.budget.unit not in ("rows", "auto"):
            rows.append(("budget", f"{eviction.budget}, which is {counted:,} tokens per head"))
    if eviction.stride:
        rows.append(("stride", f"blocks of {eviction.stride} tokens"))
    rows.append(("reuse", refresh.line(context.session)))
    for name, options in (
        (eviction.policy, eviction.policy_options),
        (eviction.decode, eviction.decode_options),
    ):
        rows += [(f"{name}.{key}", str(value)) for key, value in options.items()]
        if name in registry.method_names():
            rows.append((name, registry.method(name).summary))
    _say_rows(context, list(dict.fromkeys(rows)))


_VIEWS: Mapping[str, Callable[[Context], None]] = {
    "model": _show_model,
    "system": _show_system,
    "template": _show_template,
    "settings": _settings,
    "policy": _show_policy,
}


def _say_rows(context: Context, rows: list[tuple[str, str]]) -> None:
    wide = max(cells(name) for name, _ in rows)
    for name, value in rows:
        context.terminal.say(f"{padded(name, wide)}  {value}")


# -- /system --------------------------------------------------------------------------------


def _system(context: Context, arguments: list[str]) -> None:
    if not arguments:
        _show_system(context)
        return
    _change_system(context, " ".join(arguments))
    context.origins["system"] = "/system"


def _after_set(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    if not before:
        return _CHANGES
    key = before[0].lstrip("-").replace("-", "_")
    return completion.values(SETTINGS[key], word) if key in _CHANGES and len(before) == 1 else ()


def _after_show(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    return () if before else _VIEWS


COMMANDS = (
    Command(
        ("set",),
        "[KEY VALUE]",
        "every setting and where it came from, or change one",
        _set,
        follows=_after_set,
    ),
    Command(
        ("show",),
        f"[{' | '.join(_VIEWS)}]",
        "what this chat runs on",
        _show,
        follows=_after_show,
    ),
    Command(("system",), "[TEXT | @FILE]", "show or change the system prompt", _system, raw=True),
)
