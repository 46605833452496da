"""minikv: chat with Llama and Mistral models over long documents under a KV-cache budget.

Letters used everywhere: L layers, H KV heads, G query heads per KV head, D head size, T new
tokens, N rows in a padded view, R rows in the arena, V vocabulary, W rows of an observation window.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minikv.errors import MinikvError

if TYPE_CHECKING:
    from minikv.chat.report import TurnReport
    from minikv.chat.session import ChatSession

__version__ = "0.1.0"
__all__ = ["ChatSession", "MinikvError", "TurnReport", "__version__", "load"]

if (
    Path(__file__).parents[1] / "kernels/dispatch.py"
).exists():  # in a clone it is beside this folder
    __path__.append(str(Path(__file__).parents[1]))


def __getattr__(name: str) -> type:
    """The classes of a chat; the first access imports torch."""
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
    policy: str = "global-span",
    budget: int | str = "auto",
    **settings: Any,
) -> ChatSession:
    """Load `model` (a directory or a hub id; None is the bundled model) and return a chat with it.

    `budget` is tokens per head, averaged over heads and layers (512), a share of the first prompt
    ("20%") or memory for all layers ("64MiB"); "auto" evicts nothing while everything fits. The
    other arguments are the fields of `minikv.settings.Settings`, which describes them and their
    allowed values, such as decode="h2o", and options of the policies, such as window=32. Raises
    MinikvError or ModelError, both with `exit_code`.
    """
    from minikv.engine.threads import wait_briefly
    from minikv.loader import build, settings_from

    wait_briefly()  # before `settings_from` imports torch for the options of policies
    return build(settings_from(model=model, policy=policy, budget=budget, **settings))
