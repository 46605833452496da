"""What a saved cache belongs to: model, tokenizer, number formats, policies and budget."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minikv
from minikv.cache.budget import Budget
from minikv.chat.eviction_config import EvictionConfig
from minikv.models import BUNDLED
from minikv.models.identity import digests

if TYPE_CHECKING:
    from minikv.chat.session import ChatSession

POLICY = ("policy", "policy_options", "decode", "decode_options", "budget", "stride")
"""The fields of an identity that a loaded chat replaces, so that they need not agree."""

_UNITS = ("rows", "share", "bytes", "auto")


def identity(session: ChatSession, model: Mapping[str, object]) -> dict[str, object]:
    """The settings that a saved cache depends on. `model`: from `model_identity`."""
    eviction = session.eviction
    return {
        "format": 1,
        "minikv": minikv.__version__,
        **model,
        "dtype": session.facts.dtype,
        "kv": session.facts.kv,
        "form": session.facts.form,
        "policy": eviction.policy,
        "policy_options": dict(eviction.policy_options),
        "decode": eviction.decode,
        "decode_options": dict(eviction.decode_options),
        "budget": f"{eviction.budget.value} {eviction.budget.unit}",
        "stride": eviction.stride,
    }


def eviction_of(identity: Mapping[str, Any]) -> EvictionConfig:
    """The eviction settings of an identity. Raises ValueError, KeyError or TypeError."""
    value, unit = str(identity["budget"]).split()
    # Without this limit "1e9999999" would be computed to its last digit.
    written = re.fullmatch(r"\d{1,40}(/\d{1,40})?", value, re.ASCII)
    least = 0 if unit == "auto" else Fraction(1, 10**18)
    if unit not in _UNITS or written is None or Fraction(value) < least:
        raise ValueError(f"{identity['budget']!r:.40} is not a budget")
    return EvictionConfig(
        str(identity["policy"]),
        str(identity["decode"]),
        Budget(unit, Fraction(value)),
        dict(identity["policy_options"]),
        dict(identity["decode_options"]),
        int(identity["stride"]),
    )


def differences(here: Mapping[str, object], there: Mapping[str, Any]) -> str:
    """In what a session differs from what a cache belongs to, policy and budget aside, in words; ""
    if in nothing."""
    different = [key for key in here if key not in POLICY and here[key] != there.get(key)]
    if "weights" in different and "model" in different:
        different.remove("weights")
    return "; ".join(
        f"{key} {_shown(here[key])} here, {_shown(there.get(key))} there" for key in different
    )


def _shown(value: object) -> str:
    """A value of an identity for a message; hashes are cut."""
    text = "nothing" if value is None else str(value) or "none"
    return f"{text[:12]}..." if re.fullmatch(r"[0-9a-f]{20,}", text) else text


def model_identity(session: ChatSession) -> dict[str, object]:
    """Name and revision for people, and hashes of the weights and of the tokenizer."""
    facts, folder = session.facts, model_folder(session)
    named = {"model": facts.model, "revision": facts.revision}
    if folder is None:
        return {**named, "weights": "", "tokenizer": ""}
    if not facts.revision:
        named["model"] = "bundled" if folder == BUNDLED else folder.name  # in any place
    return {**named, **digests(folder)}


def model_folder(session: ChatSession) -> Path | None:
    """The folder or file from which the session's model was loaded; None if there is none."""
    name = session.facts.model
    if not name:
        return None
    if name == "bundled":
        return BUNDLED
    from minikv.models.hub import resolve

    return resolve(name, revision=session.facts.revision or None, offline=True).folder.resolve()
