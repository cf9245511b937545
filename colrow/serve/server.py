"""Server: the socket, the event loop, signals and the order in which things end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from ..errors import UserError
from .app import Service, app
from .bridge import Bridge, Start
from .messages import Limits, Ready

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AT_ONCE = 0.5  # seconds after a signal in which the same again is no second one: `timeout` sends it to its child and to the group
FAILED = 1.0  # seconds for answers that say that a rank is lost


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a port that is taken is known before anything else is done. UserError where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise UserError("there is no such host to listen on", f"{host} ({error})", "--host 127.0.0.1") from error
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may still be in TIME_WAIT
        found.bind(address)
        found.listen(2048)
    except (OSError, OverflowError) as error:
        found.close()
        raise UserError(f"cannot listen on {host} port {port}", getattr(error, "strerror", None) or error, f"--port {port + 1}") from error
    return found


def serve(
    where: socket.socket,
    start: Start,
    tokenizer: Callable[[], Any],
    model: str,
    limits: Limits,
    api_key: str | None = None,
    hear: Callable[[Any], None] = lambda item: None,
    ready: Callable[[Ready], None] = lambda ready: None,
    failed: Callable[[BaseException], None] = lambda error: None,
    origins: tuple[str, ...] = (),
) -> tuple[BaseException | None, bool]:
    """Serves until SIGTERM or SIGINT (then open requests may end, at most `limits.drain` seconds; a second signal ends them) or until the
    ranks are lost; returns what they were lost by, and whether a signal came. HTTP answers from the start: 503 until the model is open."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        return asyncio.run(_serve(where, start, tokenizer, model, limits, api_key, hear, ready, failed, origins))
    finally:
        for number, handler in before.items():  # asyncio leaves the defaults, by which SIGTERM ends the command without a word
            signal.signal(number, handler)


async def _serve(
    where: socket.socket,
    start: Start,
    tokenizer: Callable[[], Any],
    model: str,
    limits: Limits,
    api_key: str | None,
    hear: Callable[[Any], None],
    ready: Callable[[Ready], None],
    failed: Callable[[BaseException], None],
    origins: tuple[str, ...],
) -> tuple[BaseException | None, bool]:
    signals: list[float] = []  # when they came

    def is_ready() -> None:
        assert bridge.ready is not None
        ready(bridge.ready)

    def lost(error: BaseException) -> None:
        failed(error)
        config.timeout_graceful_shutdown = int(FAILED)
        server.should_exit = True

    bridge = Bridge(start, tokenizer, hear, is_ready, lost)
    config = uvicorn.Config(
        app(Service(bridge, model, limits, api_key, origins)),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=max(int(limits.drain), 1),
    )
    server = _Server(config)

    def end() -> None:
        signals.append(time.monotonic())
        if signals[-1] - signals[0] < AT_ONCE and len(signals) > 1:
            return
        if server.should_exit or bridge.ready is None:
            server.force_exit = True
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, end)
    bridge.open()
    await server.serve(sockets=[where])
    if bridge.ready is not None and bridge.error is None:
        await bridge.close()
    return bridge.error, bool(signals)


class _Server(uvicorn.Server):
    """Without uvicorn's own signal handlers: it would raise the signal again after the end, and the exit code would be the signal's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
