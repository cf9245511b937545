"""App: the routes. Bodies are in protocol.py and answers.py, the ranks behind bridge.py."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from ..engine.prompts import has_template
from .answers import Choice, Writer, check
from .bridge import Bridge, Gone, Ticket
from .messages import Limits
from .metrics import Metrics, prometheus, shown
from .protocol import ChatBody, Refused, TextBody, chat_prompt, parse, requests, text_prompts

OVERLONG = 8  # times the longest body: so much of a longer one is read


@dataclass
class Service:
    """What the routes share. `model`: its name in the API. `origins`: web sites whose pages may ask this server ("*": all)."""

    bridge: Bridge
    model: str
    limits: Limits = field(default_factory=Limits)
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    metrics: Metrics = field(default_factory=Metrics)
    started: int = field(default_factory=lambda: int(time.time()))


def app(service: Service) -> FastAPI:
    made = FastAPI(title="colrow", docs_url=None, redoc_url=None, openapi_url=None)

    @made.middleware("http")
    async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if service.api_key is not None and request.url.path.startswith("/v1/") and not _allowed(request, service.api_key):
            return failure(Refused("the API key is missing or wrong", 401, code="invalid_api_key"), {"WWW-Authenticate": "Bearer"})
        return await go_on(request)

    if service.origins:  # added last, so it answers first: a browser asks without the key whether it may send it
        made.add_middleware(CORSMiddleware, allow_origins=service.origins, allow_methods=["*"], allow_headers=["*"])

    @made.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        return failure(Refused(f"{error.detail}: {request.method} {request.url.path}", error.status_code), error.headers)

    def get(path: str) -> Callable[[Any], Any]:
        """HEAD too: it is how some ask whether a server is there."""
        return made.api_route(path, methods=["GET", "HEAD"])

    @get("/health")
    async def health() -> Response:
        ok = service.bridge.state == "ok"
        return JSONResponse({"status": service.bridge.state}, 200 if ok else 503)

    @get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(prometheus(service.metrics, service.bridge), media_type="text/plain; version=0.0.4")

    @get("/stats")
    async def stats() -> Response:
        chat = has_template(service.bridge.tokenizer)
        return JSONResponse(shown(service.metrics, service.bridge, service.model, chat), headers={"Cache-Control": "no-store"})

    @get("/")
    async def page() -> Response:
        return HTMLResponse((files(__package__) / "page.html").read_text(encoding="utf-8"))

    @get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_card(service)]})

    @get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(_card(service)) if name == service.model else failure(_unknown(name, service))

    @made.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(service, request, ChatBody)

    @made.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, TextBody)

    return made


def failure(error: Refused | Gone, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The error in OpenAI's form."""
    refused = error if isinstance(error, Refused) else Refused(str(error), 503, code="engine_unavailable")
    body = {"message": str(refused), "type": refused.kind, "param": refused.param, "code": refused.code}
    again = {"Retry-After": "1"} if refused.status in (429, 503) else {}
    return JSONResponse({"error": body}, refused.status, {**again, **(headers or {})})


def _card(service: Service) -> dict[str, Any]:
    ready = service.bridge.ready
    about = {"max_model_len": ready.context} if ready else {}
    return {"id": service.model, "object": "model", "created": service.started, "owned_by": "colrow", **about}


def _unknown(name: str, service: Service) -> Refused:
    return Refused(f"there is no model {name!r}; this server has {service.model!r}", 404, "model", "model_not_found")


def _allowed(request: Request, key: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), key.encode())


async def _json(request: Request, most: int) -> Any:
    """The body. Refused where it is longer than `most` bytes or no JSON. Of a longer one nothing is kept; a part is read all the same,
    since many clients look for an answer only when they have sent everything."""
    data, length = bytearray(), 0
    async for part in request.stream():
        length += len(part)
        if length <= most:
            data += part
        elif length > OVERLONG * most:
            break
    if length > most:
        raise Refused(f"the body is longer than {most} bytes", 413)
    try:
        return json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {error}") from None


async def _answer(service: Service, request: Request, kind: type[ChatBody] | type[TextBody]) -> Response:
    started = time.monotonic()
    try:
        writer, ticket, body = await _accept(service, await _json(request, service.limits.body), kind)
    except (Refused, Gone) as error:
        response = failure(error)
        service.metrics.ended(str(response.status_code))
        return response
    answer = _Answer(service, writer, ticket, started)
    if body.stream:
        return _Stream(answer.chunks(body.include_usage), on_end=answer.leave)
    return await answer.at_once(request)


async def _accept(service: Service, data: Any, kind: type[ChatBody] | type[TextBody]) -> tuple[Writer, Ticket, Any]:
    bridge = service.bridge
    ready = bridge.check()
    body = parse(kind, data)
    if body.model is not None and body.model != service.model:
        raise _unknown(body.model, service)
    # A thread: long texts take a while to be cut into tokens, and the other clients' streams must go on.
    if isinstance(body, ChatBody):
        prompts = [await asyncio.to_thread(chat_prompt, body, bridge.tokenizer)]
    else:
        prompts = await asyncio.to_thread(text_prompts, body, bridge.tokenizer)
    wanted = requests(body, prompts, ready, service.limits.seconds)
    if bridge.open_requests + len(wanted) > service.limits.running + service.limits.queue:
        raise Refused("too many requests are waiting", 429, code="queue_full", kind="rate_limit_error")
    echo = [bridge.tokenizer.decode(ids) for ids in prompts] if getattr(body, "echo", False) else []
    service.metrics.prompt_tokens += sum(map(len, prompts))
    return Writer(service.model, bridge.tokenizer, isinstance(body, ChatBody), wanted, echo, body.n), bridge.submit(wanted), body


class _Answer:
    """One HTTP request that the engine works on."""

    def __init__(self, service: Service, writer: Writer, ticket: Ticket, started: float) -> None:
        self._service, self._writer, self._ticket, self._started = service, writer, ticket, started
        self._choices = [Choice() for _ in ticket.ids]
        self._first, self._outcome = True, "disconnected"

    def leave(self) -> None:
        """However it ended: nothing of it stays in the engine."""
        self._service.bridge.leave(self._ticket)
        self._service.metrics.ended(self._outcome)
        self._service.metrics.whole.add(time.monotonic() - self._started)

    async def at_once(self, request: Request) -> Response:
        """The whole body; the engine's work ends when the client goes away. (The framework leaves plain handlers running then.)"""
        work, gone = asyncio.create_task(self._all()), asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)  # nobody reads it
            work.result()
            self._outcome = "200"
            return JSONResponse(self._writer.whole(self._choices))
        except (Refused, Gone) as error:
            response = failure(error)
            self._outcome = str(response.status_code)
            return response
        finally:
            work.cancel()
            gone.cancel()
            self.leave()

    async def chunks(self, usage: bool) -> AsyncIterator[str]:
        """Server-sent events. An error after the start is an event too."""
        try:
            for at in range(len(self._choices)):
                if (opening := self._writer.opening(at)) is not None:
                    yield _event(opening)
            async for at, output in self._outputs():
                if (piece := self._writer.piece(at, output)) is not None:
                    yield _event(piece)
            if usage:
                yield _event(self._writer.last(self._choices))
            yield "data: [DONE]\n\n"
            self._outcome = "200"
        except (Refused, Gone) as error:
            response = failure(error)
            self._outcome = str(response.status_code)
            yield f"data: {bytes(response.body).decode()}\n\n"

    async def _all(self) -> None:
        async for _ in self._outputs():
            pass

    async def _outputs(self) -> AsyncIterator[tuple[int, Any]]:
        async for at, output in self._ticket:
            check(output)
            self._choices[at].add(output)
            self._service.metrics.tokens(len(output.tokens))
            if self._first and output.tokens:
                self._first = False
                self._service.metrics.first_token.add(time.monotonic() - self._started)
            yield at, output


class _Stream(StreamingResponse):
    """`on_end` is called when the response is over, also where its client has gone away or the task was cancelled."""

    def __init__(self, content: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._on_end = on_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(data: Any) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
