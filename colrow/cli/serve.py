"""`serve` as the user sees it: the port, the ranks, the server, and what is said about them on standard error."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ..comm import launch
from ..errors import UserError
from .interrupt import INTERRUPTED, ending_at_once, sigterm_is_said
from .job import Opening, Stage
from .screen import Screen, note
from .units import nbytes

IMPORTS = ("colrow.cli.serving", "colrow.proof.gate")  # with all that opening a model imports late


def serve(
    ranks: int,
    backend: str,
    opening: Opening,
    limits: Any,
    host: str,
    port: int,
    api_key: str | None = None,
    restart: bool = False,
    origins: tuple[str, ...] = (),
) -> int:
    """Serves until it is told to end; the exit code: 0, or that of the error that the ranks were lost by. With `restart` they are started
    again then, if they have served before and no signal came. UserError where the port is taken, before anything is started."""
    if launch.under_torchrun():
        raise UserError("serve starts its ranks itself", works="colrow serve MODEL --tp 2")
    server = _server()
    where = server.listening(host, port)
    port = where.getsockname()[1]
    while True:
        code, again = _once(server, where, ranks, backend, opening, limits, api_key, origins)
        if code == 0 or not (restart and again):
            return code
        note(f"{'restart':12} new ranks; port {port} answers again in a moment")
        where, opening = server.listening(host, port), replace(opening, started=time.time())


def _once(
    server: Any, where: Any, ranks: int, backend: str, opening: Opening, limits: Any, api_key: str | None, origins: tuple[str, ...]
) -> tuple[int, bool]:
    """The exit code of one life of the ranks, and whether they may have another: they came to serve, and no signal came."""
    from ..comm.ranks import Ranks
    from ..serve.messages import Ready

    host, port = where.getsockname()[:2]
    served = False

    with Screen() as screen:

        def hear(item: Any) -> None:
            if isinstance(item, Stage):
                screen.show(item.name, item.done, item.total)
            else:
                screen.clear()
                subject, _, text = str(item).partition(": ")
                note(f"{subject:12} {text}")

        def ready(about: Ready) -> None:
            nonlocal served
            served = True
            screen.clear()
            for rank, size in enumerate(about.parameters):
                note(f"{'memory' if rank == 0 else '':12} rank {rank}: {nbytes(size)} parameters (process {about.pids[rank]})")
            kept = "beginnings that prompts share are computed once" if about.shares else "a cache of this model's own kind, nothing shared"
            note(f"{'cache':12} {about.cache_tokens} positions, at most {about.context} tokens a request; {kept}")
            address = f"[{host}]" if ":" in host else host
            seconds = time.time() - opening.started
            note(f"{'ready':12} {opening.files.name} at http://{address}:{port}/ after {seconds:.1f} s")

        def failed(error: BaseException) -> None:
            screen.clear()
            what = "" if isinstance(error, UserError) and not served else "the engine has failed: "
            note(f"colrow: {what}{' '.join(str(error).split())}")

        screen.show("start")
        with (
            sigterm_is_said(screen.clear),
            ending_at_once(screen.clear),  # these two until the server takes signals itself
            Ranks(ranks, backend, IMPORTS) as started,
        ):
            from . import serving

            lost, told = server.serve(
                where,
                lambda at: started.stream(serving.serve, (opening, limits, at)),
                opening.files.tokenizer,
                opening.files.name,
                limits,
                api_key,
                hear,
                ready,
                failed,
                origins,
            )
            started.close(now=lost is not None)
    if lost is not None:
        return getattr(lost, "exit_code", 1), served and not told
    return (0 if served else INTERRUPTED), False


def _server() -> Any:
    """The module, or a UserError where what it needs is not installed."""
    try:
        from ..serve import server
    except ImportError as error:
        raise UserError("serving needs fastapi and uvicorn", error, "pip install 'colrow[serve]'") from error
    return server
