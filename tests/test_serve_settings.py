"""Every setting of a request reaches the sampling through HTTP: the text is that of a plain loop over the whole model's logits."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import tiny
from tests.serving import Served, served
from tests.test_engine_text import byte_level

PROMPT = list(b"Hello Hello")
NEW = 12
EOS = 256


@pytest.fixture(scope="module")
def model() -> Any:
    config = tiny.config("llama", vocab_size=257, eos_token_id=EOS, max_position_embeddings=1024)
    return tiny.whole(config, torch.float32, attention="sdpa")


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Served]:
    with served(model, byte_level()) as found:
        yield found


def expected(model: Any, **settings: Any) -> list[int]:
    """Greedy, with the penalties as OpenAI (presence, frequency: of new tokens) and Keskar et al. (repetition: of all) define them."""
    ids, new = list(PROMPT), list[int]()
    while len(new) < NEW:
        logits = model(torch.tensor([ids])).logits[0, -1].double()
        if (penalty := settings.get("repetition_penalty", 1.0)) != 1:
            seen = torch.tensor(sorted(set(ids)))
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        for token, count in collections.Counter(new).items():
            logits[token] -= settings.get("presence_penalty", 0.0) + settings.get("frequency_penalty", 0.0) * count
        for token, bias in settings.get("logit_bias", {}).items():
            logits[int(token)] += bias
        token = int(logits.argmax())
        if token == EOS and not settings.get("ignore_eos"):
            break
        new.append(token)
        ids.append(token)
    return new


def answer(server: Served, **settings: Any) -> dict[str, Any]:
    status, body = server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0, **settings})
    assert status == 200, body
    return body["choices"][0]


CHANGES = {
    "repetition_penalty": {"repetition_penalty": 3.0},
    "presence_penalty": {"presence_penalty": 1.9},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {"65": 1.0, "66": -100, "67": 2.5}},
    "all together": {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {"65": 0.4, "90": 0.4},
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_penalties_and_biases(name: str, model: Any, server: Served) -> None:
    settings = CHANGES[name]
    found = expected(model, **settings)
    assert found != expected(model), "the setting changes nothing, so it is not tested"
    assert answer(server, **settings)["text"] == byte_level().decode(found)


def test_the_end_token_ends_unless_it_is_ignored(server: Served) -> None:
    bias = {str(EOS): 100}
    ended = answer(server, logit_bias=bias)
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")
    gone_on = answer(server, logit_bias=bias, ignore_eos=True)
    assert gone_on["finish_reason"] == "length"


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=lambda narrow: next(iter(narrow)))
def test_the_narrowest_choice_is_the_greedy_one_at_any_temperature(narrow: dict[str, float], server: Served) -> None:
    greedy = answer(server)["text"]
    wide = {answer(server, temperature=3.0, seed=seed)["text"] for seed in range(3)}
    assert len(wide - {greedy}) == 3
    assert {answer(server, temperature=3.0, seed=seed, **narrow)["text"] for seed in range(3)} == {greedy}


def test_a_beginning_that_was_computed_before_is_told(server: Served) -> None:
    """As OpenAI tells it, and with the same answer."""
    ids = [65 + at % 23 for at in range(300)]
    asked = {"prompt": ids, "max_tokens": 4, "temperature": 0}
    (_, first), (_, second) = (server.ask("/v1/completions", asked) for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 200
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    server.until(lambda: server.service.bridge.stats.shared >= 200)
