"""The flags of `minikv serve`. The packages that it needs are imported when it runs."""

from __future__ import annotations

from typing import Annotated

from minikv.cli.settings.config import Interface
from minikv.cli.settings.flags import MODEL, Call, Only, alone, flag
from minikv.errors import UsageError
from minikv.settings import ADVANCED, Generation, Settings

_SERVED = (
    f"{MODEL} keep_packed policy budget decode stride kv reuse tier tier_dtype remember "
    "fidelity options seed threads kernels"
)
"""The settings of a server: the others are of one conversation."""


@alone
def serve(
    call: Call,
    settings: Annotated[Settings, Only(_SERVED)],
    generation: Generation,
    interface: Annotated[Interface, Only("quiet debug")],
    host: Annotated[
        str, flag("--host", "the address to listen at; another than this machine's needs a key")
    ] = "127.0.0.1",
    port: Annotated[int, flag("--port", "the port; 0: any free one", min=0, max=65535)] = 8080,
    key: Annotated[
        str,
        flag(
            "--api-key",
            "what requests must bring; the variable keeps it out of the list of processes",
            envvar="MINIKV_API_KEY",
            metavar="KEY",
        ),
    ] = "",
    queue: Annotated[
        int,
        flag(
            "--queue",
            "how many requests may wait while one is answered",
            min=0,
            rich_help_panel=ADVANCED,
        ),
    ] = 8,
) -> None:
    """minikv serve --budget 512

    Answer requests as OpenAI's chat completions have them, one at a time. A conversation that comes
    again is continued from what is in memory, and a document from what is on disk. A request may
    name another policy and budget: its model is then NAME@adakv:512.
    """
    try:
        from minikv.cli.serve.command import serve as run
    except ModuleNotFoundError as error:
        if (error.name or "minikv").partition(".")[0] == "minikv":
            raise
        raise UsageError(
            f"`minikv serve` needs the package {error.name}, which is not installed",
            "pip install 'minikv[serve]'",
        ) from None

    run(settings, generation, call, host=host, port=port, key=key, queue=queue)
