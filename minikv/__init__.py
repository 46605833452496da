"""minikv: chat with Llama and Mistral models over long documents under a KV-cache budget.

Letters used everywhere: L layers, H KV heads, G query heads per KV head, D head size, T new
tokens, N rows in a padded view, R rows in the arena, V vocabulary, W rows of an observation window.
"""

from __future__ import annotations

from os import PathLike, fspath
from typing import TYPE_CHECKING

from minikv.errors import MinikvError

if TYPE_CHECKING:
    from minikv.chat.report import TurnReport
    from minikv.chat.session import ChatSession

__version__ = "0.1.0"
__all__ = ["ChatSession", "MinikvError", "TurnReport", "__version__", "load"]


def __getattr__(name: str) -> type:
    """The classes of a chat, which load torch when they are first asked for."""
    if name == "ChatSession":
        from minikv.chat.session import ChatSession

        return ChatSession
    if name == "TurnReport":
        from minikv.chat.report import TurnReport

        return TurnReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def load(
    model: str | PathLike[str] | None = None,
    policy: str = "adakv",
    budget: int | str = "auto",
    decode: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    kernels: str = "auto",
    seed: int = 0,
    stride: int = 0,
    kv: str = "auto",
    weights: str = "auto",
    keep_packed: str = "off",
    reuse: str = "auto",
    tier: str = "auto",
    tier_dtype: str = "same",
    refresh_every: int = 0,
    fidelity: str = "on",
    system: str = "",
    pin_system: bool = False,
    revision: str | None = None,
    offline: bool = False,
    threads: int | None = None,
    **policy_options: object,
) -> ChatSession:
    """Load `model` (a directory or a hub id; None is the bundled model) and return a chat with it.

    `budget` is tokens per head, averaged over heads and layers (512), a share of the first prompt
    ("20%") or memory for all layers ("64MiB"); "auto" evicts nothing while everything fits. The
    other arguments are fields of
    `minikv.settings.Settings`, which describes them and their allowed values. `policy_options` are
    checked against those of all policies. Raises MinikvError or ModelError, both with
    `exit_code`.
    """
    from inspect import signature

    from minikv.engine.threads import wait_briefly
    from minikv.loader import build, check_budget, check_names
    from minikv.settings import Settings

    wait_briefly()  # before torch is imported, to know the options of policies
    check_names(policy_options, list(signature(load).parameters)[:-1])
    check_budget(budget)

    return build(
        Settings(
            model=fspath(model) if isinstance(model, PathLike) else model,
            policy=policy,
            budget=str(budget),
            decode=decode,
            device=device,
            dtype=dtype,
            kernels=kernels,
            seed=seed,
            stride=stride,
            kv=kv,
            weights=weights,
            keep_packed=keep_packed,
            reuse=reuse,
            tier=tier,
            tier_dtype=tier_dtype,
            refresh_every=refresh_every,
            fidelity=fidelity,
            system=system,
            pin_system=pin_system,
            revision=revision,
            offline=offline,
            threads=threads,
            options=dict(policy_options),
        )
    )
