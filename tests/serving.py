"""A server in this process: the real app on a real port, its engine with one rank on a thread. For tests of what HTTP clients see."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from colrow.comm.group import single
from colrow.engine.engine import Engine
from colrow.serve.app import Service, app
from colrow.serve.bridge import Bridge
from colrow.serve.messages import Limits
from colrow.serve.server import listening
from colrow.serve.worker import work


@dataclass
class Served:
    port: int
    service: Service

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, method: str = "", headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """(status, body), which is parsed where it is JSON. `body`: an object, or bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers or {})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, json.loads(text) if "json" in response.headers["content-type"] else text

    def until(self, condition: Any, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come about"
            time.sleep(0.01)


@contextmanager
def served(model: Any, tokenizer: Any, limits: Limits | None = None, **options: Any) -> Iterator[Served]:
    limits = limits or Limits(cache_bytes=1 << 24)
    bridge = Bridge(lambda where: work(single(), Engine(model, single(), tokenizer), limits, where), lambda: tokenizer)
    service = Service(bridge, "tiny", limits, **options)
    where = listening("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app(service), log_level="warning", lifespan="off", timeout_graceful_shutdown=1))

    async def run() -> None:
        bridge.open()
        await server.serve(sockets=[where])
        await bridge.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    found = Served(where.getsockname()[1], service)
    thread.start()
    try:
        found.until(lambda: bridge.state != "starting")
        yield found
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
