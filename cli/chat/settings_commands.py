"""/set, /policy and /system: the settings of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from minikv import checks
from minikv.chat.eviction_config import EvictionConfig, read_budget
from minikv.chat.report import amount
from minikv.cli.chat.slash import Command, Context
from minikv.cli.screen import render
from minikv.cli.settings import flags
from minikv.cli.settings.config import SETTINGS
from minikv.cli.settings.flags import file_text, listed, read_pairs, text
from minikv.errors import UsageError
from minikv.settings import GONE

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession

_SHORT = {"temp": "temperature", "n": "max_tokens"}
_LIVE = [name for name, one in SETTINGS.items() if one.live]


def _set(context: Context, arguments: list[str]) -> None:
    if not arguments:
        context.terminal.say("\n".join(_lines(context, SETTINGS)))
        context.terminal.say(f"/set KEY VALUE changes: {', '.join(_LIVE)}")
        return
    first, *rest = arguments
    name, equals, value = first.partition("=")
    if equals:
        rest = [value, *rest]
    key = _SHORT.get(name, name.lstrip("-").replace("-", "_"))
    if key not in _LIVE:
        raise _refused(name, key)
    if rest:
        _change(context, key, rest)
    context.terminal.say("\n".join(_lines(context, [key])))


def _refused(name: str, key: str) -> UsageError:
    """The error for a setting that a chat cannot change."""
    if key in GONE:
        return UsageError(f"{key} is gone: {GONE[key]}")
    if key == "stats":
        return UsageError("stats is a flag of `minikv ask`", "/stats shows the figures here")
    if key in SETTINGS:
        return UsageError(f"{key} cannot change in a chat", f"start one with {SETTINGS[key].flag}")
    return UsageError(f"no setting {name!r}", f"{checks.guess(key, _LIVE)}/set lists them all")


def _lines(context: Context, names: Iterable[str]) -> list[str]:
    values = _values(context)
    shown = {name: values.get(name, SETTINGS[name].default) for name in names}
    shown |= {name: f"{value:g}" for name, value in shown.items() if isinstance(value, float)}
    return listed({name: text(value) for name, value in shown.items()}, context.origins)


def _places(context: Context) -> dict[str, tuple[object, str]]:
    """What holds the settings that are changed as they are shown, and their names there."""
    session, terminal = context.session, context.terminal
    return {
        **{name: (session, name) for name in ("reuse", "overflow", "fidelity")},
        **{name: (terminal, name) for name in ("thoughts", "quiet")},
        "check": (context, "checks"),
    }


def _values(context: Context) -> dict[str, Any]:
    """The present value of every setting, by name."""
    import torch

    session = context.session
    holders = (
        (session, ("system", "seed", "pin_system")),
        (session.facts, ("revision", "device", "dtype", "kernels", "kv")),
        (session.eviction, ("policy", "budget", "decode", "stride")),
    )
    found = {
        **context.began,
        **asdict(context.generation),
        **{name: getattr(one, name) for one, names in holders for name in names},
        **{name: getattr(*place) for name, place in _places(context).items()},
        "model": session.facts.model or "bundled",
        "weights": session.facts.form,
        "tier": session.recall.kind,
        "tier_dtype": session.recall.dtype,
        "threads": torch.get_num_threads(),
    }
    switched = {name: "on" if found[name] else "off" for name in ("fidelity", "check")}
    return found | switched


# -- changes --------------------------------------------------------------------------------


def reseeded(eviction: EvictionConfig, seed: int, before: int | None = None) -> EvictionConfig:
    """The settings with another seed for policies that draw random numbers. If `before` is given,
    only seeds with this value change."""
    policy, decode = (
        {
            name: seed if name == "seed" and before in (None, value) else value
            for name, value in options.items()
        }
        for options in (eviction.policy_options, eviction.decode_options)
    )
    return replace(eviction, policy_options=policy, decode_options=decode)


def _policy(
    context: Context, value: str, decode: str = "auto", options: Mapping[str, object] | None = None
) -> None:
    session = context.session
    chosen = EvictionConfig.read(value, decode, options=options, seed=session.seed)
    session.configure(replace(chosen, budget=session.eviction.budget))
    context.origins |= dict.fromkeys(("policy", "decode", "stride"), "/set")


def _decode(context: Context, value: str) -> None:
    session, now = context.session, context.session.eviction
    if now.stride:
        raise UsageError(
            "with --stride, one policy evicts while reading and while writing",
            "/policy changes it",
        )
    chosen = EvictionConfig.read(now.policy, value, seed=session.seed)
    session.configure(replace(chosen, budget=now.budget, policy_options=now.policy_options))


def _system(context: Context, given: str) -> None:
    """Change the system prompt: at once if nothing was read yet, otherwise for the next
    conversation."""
    session = context.session
    if given.startswith("@"):
        given = file_text(given[1:], typed=True)
    checks.unicode("the system prompt", given)
    session.system = given.strip()
    what = "system prompt set" if session.system else "no system prompt from here on"
    if not session.fed:
        session.reset(keep_documents=True)
        context.terminal.say(f"{what}, for your next question")
    else:
        context.terminal.say(f"{what}, for the next conversation: /clear begins it")


def _change(context: Context, key: str, words: Sequence[str]) -> None:
    """Change a setting to the value that these words spell. Raises UsageError."""
    one, words = SETTINGS[key], [" ".join(words)] if key == "system" else words
    value: Any = one.read(one.parse_words(words), key)
    session, eviction = context.session, context.session.eviction
    place = _places(context).get(key)
    if place is not None:
        setattr(*place, value == "on" if SETTINGS[key].choices == ("on", "off") else value)
    elif key == "policy":
        _policy(context, value)
    elif key == "decode":
        _decode(context, value)
    elif key == "budget":
        session.configure(replace(eviction, budget=read_budget(value)))
    elif key == "system":
        _system(context, value)
    elif key == "seed":
        if (drawn := reseeded(eviction, value)) != eviction:
            session.configure(drawn)
        session.seed = value
    else:
        context.generation = replace(context.generation, **{key: value})
    if value == "blind" and session.documents and session.evicted_for_turn != 0:
        context.terminal.say(
            "text read so far stays as it is; /clear reads it again, and evicts before any question"
        )
    context.origins[key] = "/set"


# -- /policy and /system --------------------------------------------------------------------


def _policy_command(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    if arguments:
        name, *pairs = arguments
        options = read_pairs(pairs)
        _policy(context, name, str(options.pop("decode", "auto")), options)
        terminal.say(f"from the next question on: {render.policy_line(session)}")
        return
    eviction = session.eviction
    terminal.say(render.policy_line(session))
    for name, chosen in (
        (eviction.policy, eviction.policy_options),
        (eviction.decode, eviction.decode_options),
    ):
        if chosen:
            terminal.say(f"  {name}: {' '.join(f'{key}={chosen[key]}' for key in chosen)}")


def _system_command(context: Context, arguments: list[str]) -> None:
    session, terminal = context.session, context.terminal
    if arguments:
        _change(context, "system", arguments)
        return
    terminal.say(session.system or "no system prompt; /system TEXT sets one")
    if session.system:
        pinned = "never evicted" if session.pin_system else "may be evicted"
        terminal.say(
            f"({amount(len(session.tokenizer.encode(session.system)), 'token')}; {pinned})"
        )


def _after_set(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    if not before:
        return _LIVE
    key = before[0].lstrip("-").replace("-", "_")
    return flags.values_of(SETTINGS[key], word) if key in _LIVE and len(before) == 1 else ()


def _after_policy(session: ChatSession, before: Sequence[str], word: str) -> Iterable[str]:
    if not before:
        return flags.policies(word)
    if word.startswith("decode="):
        return [f"decode={step}" for step in SETTINGS["decode"].examples]
    return ["decode=", *flags.options_of(before[0])]


COMMANDS = (
    Command(
        ("policy",),
        "[NAME [option=value...]]",
        "show or change the eviction policy",
        _policy_command,
        follows=_after_policy,
    ),
    Command(
        ("set",),
        "[KEY VALUE]",
        "every setting and where it came from, or change one",
        _set,
        follows=_after_set,
    ),
    Command(
        ("system",), "[TEXT | @FILE]", "show or change the system prompt", _system_command, raw=True
    ),
)
