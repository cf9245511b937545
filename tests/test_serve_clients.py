"""Clients that go away, read slowly, come in crowds or ask for too much: the others' answers stay what they are alone."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import random
import socket
import time
from typing import Any

import pytest
import torch

from colrow.comm.group import single
from colrow.engine.engine import Engine
from colrow.serve.messages import Limits
from tests import tiny
from tests.serving import Served, served
from tests.test_engine_text import byte_level


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.whole(tiny.config("llama", vocab_size=257, eos_token_id=256, max_position_embeddings=4096), torch.float32, attention="sdpa")


def begin(server: Served, **body: Any) -> socket.socket:
    """A request whose answer has not been read yet."""
    data = json.dumps({"prompt": "Hello", "max_tokens": 4000, "temperature": 0, "ignore_eos": True, **body}).encode()
    found = socket.create_connection(("127.0.0.1", server.port))
    found.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(stream: bool, model: Any) -> None:
    """Report O-36 e, streaming and not; also for a request that still waits for its place."""
    with served(model, byte_level(), Limits(cache_bytes=1 << 24, running=1)) as server:
        bridge = server.service.bridge
        first = begin(server, stream=stream)
        server.until(lambda: bridge.stats.running == 1 and bridge.stats.steps > 3)
        second = begin(server, stream=stream)
        server.until(lambda: bridge.stats.waiting == 1)
        second.close()
        server.until(lambda: bridge.stats.waiting == 0)
        assert bridge.stats.running == 1
        first.close()
        server.until(lambda: bridge.stats.running == 0)
        assert bridge.stats.steps < 3000, "the request would have run on"
        assert bridge.stats.used == 0
        assert bridge.open_requests == 0
        server.until(lambda: server.service.metrics.requests.get("disconnected") == 2)
        assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


def test_a_slow_reader_holds_nobody_up(model: Any) -> None:
    with served(model, byte_level()) as server:
        slow = begin(server, stream=True, max_tokens=600)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        started = time.monotonic()
        assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 5})[0] == 200
        assert time.monotonic() - started < 10
        server.until(lambda: server.service.bridge.stats.running == 0, 60)
        text = b""
        while b"[DONE]" not in text:
            text += slow.recv(512)
        slow.close()
        events = [json.loads(line[6:]) for line in text.decode().replace("\r\n", "\n").split("\n") if line.startswith("data: {")]
        whole = "".join(event["choices"][0]["text"] for event in events)
        assert whole == alone(model, "Hello", 600)


def alone(model: Any, prompt: str, count: int) -> str:
    engine = Engine(model, single(), byte_level())
    engine.eos = frozenset()
    return engine.complete([prompt], max_new_tokens=count, raw=True)[0]


def test_32_clients_each_get_the_answer_that_they_get_alone(model: Any) -> None:
    """Greedy; half of them streams read slowly, some go away in between."""
    draw = random.Random(0)
    prompts = ["".join(draw.choices("abc ", k=draw.randrange(1, 40))) for _ in range(32)]
    expected = [alone(model, prompt, 20) for prompt in prompts]

    def client(at: int) -> str | None:
        body = {"prompt": prompts[at], "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": at % 2 == 0}
        if at % 8 == 3:
            gone = begin(server, **{**body, "max_tokens": 1000})
            time.sleep(0.2)
            gone.close()
            return None
        if at % 2:
            return server.ask("/v1/completions", body)[1]["choices"][0]["text"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body))
        response, text = connection.getresponse(), ""
        while line := response.readline().decode():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                time.sleep(0.01)
        connection.close()
        return text

    with served(model, byte_level(), Limits(cache_bytes=1 << 24, running=12)) as server:
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(client, range(32)))
        assert [answer for answer in answers if answer is not None] == [text for at, text in enumerate(expected) if at % 8 != 3]
        server.until(lambda: server.service.bridge.open_requests == 0)


def test_a_thousand_requests_wait_and_all_are_answered(model: Any) -> None:
    with served(model, byte_level(), Limits(cache_bytes=1 << 24, running=8)) as server:
        body = {"prompt": [[65 + at % 20] for at in range(250)], "max_tokens": 2, "temperature": 0}
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: server.ask("/v1/completions", body), range(4)))
        assert [status for status, _ in answers] == [200] * 4
        texts = [[choice["text"] for choice in answer["choices"]] for _, answer in answers]
        assert texts == [texts[0]] * 4
        assert texts[0][:20] == texts[0][20:40]


def test_a_full_queue_is_said(model: Any) -> None:
    with served(model, byte_level(), Limits(cache_bytes=1 << 24, running=1, queue=1)) as server:
        first, second = begin(server), begin(server)
        server.until(lambda: server.service.bridge.open_requests == 2)
        status, answer = server.ask("/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        first.close()
        second.close()
        server.until(lambda: server.service.bridge.open_requests == 0)


def test_a_request_that_takes_too_long_ends(model: Any) -> None:
    with served(model, byte_level(), Limits(cache_bytes=1 << 24, seconds=0.3)) as server:
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
        status, answer = server.ask("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        _, text = server.ask("/v1/completions", {**body, "stream": True})
        assert '"code":"timeout"' in text.replace(" ", "")
        server.until(lambda: server.service.bridge.stats.running == 0)


def test_a_prompt_larger_than_the_cache_is_refused(model: Any) -> None:
    """The limit that /v1/models tells is that of the memory, where this is the smaller one."""
    with served(model, byte_level(), Limits(cache_bytes=100_000)) as server:
        limit = server.ask("/v1/models")[1]["data"][0]["max_model_len"]
        assert limit < 4096
        assert server.ask("/v1/completions", {"prompt": [65] * limit, "max_tokens": 1})[0] == 400
        assert server.ask("/v1/completions", {"prompt": [65] * (limit - 1), "max_tokens": 50})[1]["usage"]["completion_tokens"] == 1


def test_logits_that_are_not_finite_are_a_named_error(model: Any) -> None:
    broken = tiny.whole(tiny.config("llama", vocab_size=257, eos_token_id=256), torch.float32, attention="sdpa")
    with torch.no_grad():
        broken.model.embed_tokens.weight[200] = float("nan")
    with served(broken, byte_level()) as server:
        for extra in ({}, {"logprobs": 1, "echo": True}):
            status, answer = server.ask("/v1/completions", {"prompt": [200], "max_tokens": 3, **extra})
            assert (status, answer["error"]["type"]) == (500, "server_error")
            assert "NaN" in answer["error"]["message"]
        assert "NaN" in server.ask("/v1/completions", {"prompt": [1, 200], "stream": True})[1]
        assert server.ask("/v1/completions", {"prompt": [5], "max_tokens": 3})[0] == 200
