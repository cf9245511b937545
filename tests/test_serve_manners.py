"""What clients of every kind take for granted: methods, keys, other sites' pages, long bodies, patience, and that nothing is ignored."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from colrow.errors import RankError
from tests import test_serve_api
from tests.serving import Served, served
from tests.test_engine_text import byte_level
from tests.test_serve_api import alone, tokenizer

model, server, client = test_serve_api.model, test_serve_api.server, test_serve_api.client  # its fixtures


def test_a_body_that_is_too_long_is_not_kept(model: Any) -> None:
    """The openai package sends all of it before it looks for an answer. A body as long as is allowed may take its time."""
    from colrow.serve.messages import Limits

    with served(model, byte_level(), Limits(cache_bytes=1 << 24, body=1_000_000)) as server:
        assert server.ask("/v1/completions", {"prompt": "x" * 1_000_000})[0] == 413
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIStatusError, match="longer than 1000000 bytes"):
                client.completions.create(model="tiny", prompt="x" * 7_000_000)
        status, answer = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert (status, "template" in answer["error"]["message"]) == (400, True)
        body = json.dumps({"prompt": "Hi", "max_tokens": 2, "temperature": 0, "user": "x" * 900_000}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
            for at in range(0, len(body), 100_000):
                slow.sendall(body[at : at + 100_000])
                assert server.ask("/v1/completions", {"prompt": "Hi", "max_tokens": 1})[0] == 200, "the others go on"
            with slow.makefile("rb") as file:
                assert b" 200 " in file.readline()


def test_a_key_is_asked_for(model: Any) -> None:
    with served(model, byte_level(), api_key="sécret") as server:
        wrong = ("", "Bearer wrong", "sécret", "Basic sécret", "Bearer", "Bearer sécret sécret")
        for header in wrong:
            assert (
                server.ask("/v1/models", headers={"Authorization": header.encode().decode("latin-1")})[1]["error"]["code"]
                == "invalid_api_key"
            )
        for header in ("Bearer sécret", "bearer  sécret"):
            assert server.ask("/v1/models", headers={"Authorization": header.encode().decode("latin-1")})[0] == 200
        assert server.ask("/health")[0] == 200
        with (
            openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        assert _head(server, "GET", "/v1/models")[1]["www-authenticate"] == "Bearer"


def _head(server: Served, method: str, path: str, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        response.read()
        return response.status, {name.lower(): value for name, value in response.headers.items()}


def test_signals_are_again_what_they_were_when_the_server_has_ended() -> None:
    """Closing the ranks and starting new ones takes seconds, in which they have a meaning too."""
    from colrow.serve import server
    from colrow.serve.messages import Limits

    def start(where: Any) -> Iterator[Any]:
        raise RankError("lost")
        yield

    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ours = [signal.getsignal(number) for number in before]
        error, told = server.serve(server.listening("127.0.0.1", 0), start, byte_level, "tiny", Limits())
        assert (str(error), told) == ("lost", False)
        assert [signal.getsignal(number) for number in before] == ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_methods(server: Served) -> None:
    for path in ("/", "/health", "/metrics", "/stats", "/v1/models", "/v1/models/tiny"):
        assert _head(server, "HEAD", path)[0] == 200
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, headers = _head(server, "HEAD", path)
        assert (status, headers["allow"]) == (405, "POST")
    assert _head(server, "DELETE", "/v1/models")[0] == 405


def test_pages_of_other_sites_may_ask_where_that_is_wanted(model: Any, server: Served) -> None:
    """A browser asks first, without the key, whether it may."""
    asking = {"Origin": "http://a.example", "Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
    assert _head(server, "OPTIONS", "/v1/completions", **asking)[0] == 405
    with served(model, tokenizer(), api_key="secret", origins=("http://a.example",)) as open_one:
        status, headers = _head(open_one, "OPTIONS", "/v1/completions", **asking)
        assert (status, headers["access-control-allow-origin"]) == (200, "http://a.example")
        assert "authorization" in headers["access-control-allow-headers"].lower()
        assert _head(open_one, "OPTIONS", "/v1/completions", **{**asking, "Origin": "http://b.example"})[0] == 400
        status, headers = _head(open_one, "GET", "/v1/models", Origin="http://a.example")
        assert (status, headers["access-control-allow-origin"]) == (401, "http://a.example"), "its error can be read"
        status, headers = _head(open_one, "GET", "/v1/models", Origin="http://a.example", Authorization="Bearer secret")
        assert (status, headers["access-control-allow-origin"]) == (200, "http://a.example")


REFUSED = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "guided_json": {},
    "stop_token_ids": [3],
    "min_tokens": 4,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_answer_and_cannot_be_done_is_refused_by_name(name: str, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.BadRequestError, match=f"{name} is not supported") as error:
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, extra_body={name: REFUSED[name]})
    assert (error.value.param, error.value.code) == (name, "unsupported_parameter")
    nothing = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "min_tokens": 0, "user": "u", "store": False}
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, extra_body=nothing).usage


def test_streams_of_several_choices(client: openai.OpenAI) -> None:
    """Each with its role, its log-probabilities and its end; the usage of all of them comes last, alone."""
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "n": 3, "max_tokens": 6, "seed": 4, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=2)
    texts, ends, names = [""] * 3, [""] * 3, [list[str]() for _ in range(3)]
    chunks = list(client.chat.completions.create(**asked, top_logprobs=2, stream=True, stream_options={"include_usage": True}))
    assert sorted(chunk.choices[0].index for chunk in chunks[:3] if chunk.choices[0].delta.role == "assistant") == [0, 1, 2]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] += choice.finish_reason or ""
        names[choice.index] += [entry.token for entry in choice.logprobs.content] if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert names == [[entry.token for entry in choice.logprobs.content] for choice in whole.choices]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_async_client_and_its_patience(model: Any) -> None:
    """Clients that do not wait long enough leave nothing behind, and the others get what they would get alone."""
    slow = copy.deepcopy(model)
    slow.register_forward_pre_hook(lambda *_: time.sleep(0.2))

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        patience = client.with_options(timeout=0.3 if number % 2 else 60)
        try:
            answer = await patience.completions.create(model="tiny", prompt=f"prompt {number}", max_tokens=20, temperature=0)
        except openai.APITimeoutError:
            return "left"
        return answer.choices[0].text

    async def all_of_them(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(6)))

    with served(slow, byte_level()) as server:
        found = asyncio.run(all_of_them(server.url))
        server.until(lambda: server.service.bridge.stats.running == server.service.bridge.stats.waiting == 0)
    expected = [alone(model, f"prompt {number}", 20) for number in range(6)]
    assert [text for text in found if text != "left"] == [text for text, one in zip(expected, found, strict=True) if one != "left"]
    assert found[::2] == expected[::2]
    assert found[1::2] == ["left"] * 3
