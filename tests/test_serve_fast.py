"""The server with --fast: the same answers where rounding decides nothing, and fewer passes over the weights."""

from __future__ import annotations

import concurrent.futures
import random

import torch

from colrow.comm.group import single
from colrow.engine.engine import Engine
from colrow.serve.messages import Limits
from tests import tiny
from tests.serving import served
from tests.test_engine_text import byte_level


def test_many_clients_get_the_answers_that_they_get_alone() -> None:
    config = tiny.config("llama", vocab_size=257, eos_token_id=256, max_position_embeddings=4096)
    whole = tiny.whole(config, torch.float64, attention="sdpa")
    draw = random.Random(3)
    prompts = ["".join(draw.choices("abc ", k=draw.randrange(1, 40))) for _ in range(16)]
    expected = [Engine(whole, single(), byte_level()).complete([prompt], max_new_tokens=20, raw=True)[0] for prompt in prompts]
    with served(whole, byte_level(), Limits(cache_bytes=1 << 24, fast=True)) as server, concurrent.futures.ThreadPoolExecutor(16) as pool:
        asked = pool.map(lambda p: server.ask("/v1/completions", {"prompt": p, "max_tokens": 20, "temperature": 0}), prompts)
        assert [answer["choices"][0]["text"] for _, answer in asked] == expected
