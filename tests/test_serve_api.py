"""OpenAI's API as its own client and plain HTTP see it: answers, streams, log-probabilities, and errors in its form."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from colrow.comm.group import single
from colrow.engine.engine import Engine
from colrow.engine.settings import Sampling
from tests import tiny
from tests.serving import Served, served
from tests.test_engine_engine import TEMPLATE
from tests.test_engine_text import byte_level

CONTEXT = 64


def tokenizer() -> Any:
    made = byte_level()
    made.chat_template = TEMPLATE
    return made


def small() -> Any:
    return tiny.whole(
        tiny.config("llama", vocab_size=257, eos_token_id=256, max_position_embeddings=CONTEXT), torch.float32, attention="sdpa"
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return small()


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Served]:
    with served(model, tokenizer()) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def alone(model: Any, prompt: str, count: int, **settings: Any) -> str:
    return Engine(model, single(), tokenizer()).complete([prompt], max_new_tokens=count, sampling=Sampling(**settings), raw=True)[0]


def test_chat_whole_and_streamed(model: Any, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    expected = alone(model, "[user]Hi[assistant]", 12)
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (19, 12, 31)
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=12, temperature=0, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage == answer.usage
    assert chunks[-2].choices[0].finish_reason == "length"
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    again = client.chat.completions.create(model="tiny", messages=parts, max_tokens=12, temperature=0)
    assert again.choices[0].message.content == expected


def test_completions_of_texts_and_token_ids_several_at_once(model: Any, client: openai.OpenAI) -> None:
    prompts = ["Hello", "a", "bcd"]
    expected = [alone(model, prompt, 8) for prompt in prompts]
    for given in (prompts, [list(prompt.encode()) for prompt in prompts]):
        answer = client.completions.create(model="tiny", prompt=given, max_tokens=8, temperature=0)  # type: ignore[arg-type]
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        streamed = [""] * 3
        for chunk in client.completions.create(model="tiny", prompt=given, max_tokens=8, temperature=0, stream=True):  # type: ignore[call-overload]
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == expected
    assert client.completions.create(model="tiny", prompt=list(b"Hello"), max_tokens=8, temperature=0).choices[0].text == expected[0]


def test_a_seed_gives_the_text_that_run_gives_and_choices_differ(model: Any, client: openai.OpenAI) -> None:
    settings = {"temperature": 1.2, "top_p": 0.9}
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=10, seed=5, n=3, **settings)  # type: ignore[call-overload]
    texts = [choice.text for choice in answer.choices]
    assert texts == [alone(model, "Hello", 10, seed=seed, **settings) for seed in (5, 6, 7)]
    assert len(set(texts)) == 3
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 30
    loose = {client.completions.create(model="tiny", prompt="Hello", max_tokens=10).choices[0].text for _ in range(3)}
    assert len(loose) == 3, "without a seed each request draws its own"


def test_stop_strings_are_never_sent(model: Any, client: openai.OpenAI) -> None:
    """Report O-36 b, one stop the beginning of another."""
    whole = alone(model, "Hello", 24)
    long, short = whole[6:10], whole[6:8]
    for stop in ([long], [long, short], [short, long]):
        at = min(whole.find(text) for text in stop)
        plain = client.completions.create(model="tiny", prompt="Hello", max_tokens=24, temperature=0, stop=stop)
        assert (plain.choices[0].text, plain.choices[0].finish_reason) == (whole[:at], "stop")
        chunks = list(client.completions.create(model="tiny", prompt="Hello", max_tokens=24, temperature=0, stop=stop, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole[:at]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_characters_split_over_tokens_arrive_whole(client: openai.OpenAI) -> None:
    """Report O-36 a: ids are forced to spell an emoji byte by byte; an invalid byte does not stall the stream."""
    forced = "👍".encode()
    for at, byte in enumerate(forced):  # one after the other, since a bias holds for a whole request
        prompt = list(b"Hi" + forced[:at])
        bias = {str(byte): 100}
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, temperature=0, logit_bias=bias)
        assert answer.choices[0].text == "", "a part of a character is no text"
    bias = {str(0xE2): 100}
    chunks = list(client.completions.create(model="tiny", prompt="Hi", max_tokens=12, temperature=0, logit_bias=bias, stream=True))
    assert set("".join(chunk.choices[0].text for chunk in chunks)) <= {"\ufffd"}
    assert len(chunks) > 3


def speller(after: dict[int, int]) -> Any:
    """A model whose greedy next token depends on the last one alone: `after[token]`."""
    config = tiny.config("llama", vocab_size=257, hidden_size=264, num_attention_heads=3, num_key_value_heads=3, eos_token_id=256)
    made = tiny.whole(config, torch.float32, attention="sdpa")
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        made.model.norm.weight.fill_(1.0)
        made.model.embed_tokens.weight.copy_(torch.eye(257, 264))
        made.lm_head.weight.zero_()
        for token, following in after.items():
            made.lm_head.weight[following, token] = 1.0
    return made


def test_an_emoji_that_is_spelled_byte_by_byte_is_streamed_whole() -> None:
    """Report O-36 a, over HTTP: the pieces put together are the whole text, no U+FFFD, also where the end cuts a character, and past a byte
    that belongs to none."""
    for spelled, shown in (("👍é".encode(), "👍é"), (b"\xff", "\ufffd")):
        cycle = [*b"A", *spelled]
        model = speller(dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True)))
        with served(model, tokenizer()) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            for most in range(1, 2 * len(cycle) + 1):
                body: Any = {"model": "tiny", "prompt": "A", "max_tokens": most, "temperature": 0}
                made = bytes([*cycle[1:], *cycle, *cycle][:most])
                expected = made.decode(errors="ignore") if shown != "\ufffd" else made.rstrip(b"\xff").decode(errors="replace")
                pieces = [chunk.choices[0].text for chunk in client.completions.create(**body, stream=True)]
                assert "".join(pieces) == client.completions.create(**body).choices[0].text == expected
            every = client.completions.create(**body, logprobs=0).choices[0].logprobs
            assert every is not None
        with served(model, tokenizer()) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "x"}]
            bias = {str(cycle[1]): 100}
            answer = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=2, temperature=0, logprobs=True, top_logprobs=2, logit_bias=bias
            )
            assert answer.choices[0].logprobs is not None
            for entry in answer.choices[0].logprobs.content or ():
                assert entry.bytes == [cycle[1]], "the byte itself, not its name in the vocabulary"


def test_echo_and_logprobs_are_what_lm_eval_needs(model: Any, client: openai.OpenAI) -> None:
    ids = list(b"some prompt")
    for most in (0, 1):
        answer = client.completions.create(model="tiny", prompt=ids, max_tokens=most, temperature=0, echo=True, logprobs=1)
        found = answer.choices[0].logprobs
        assert found is not None
        assert found.tokens is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        assert answer.choices[0].text.startswith("some prompt")
        assert len(found.tokens) == 11 + most
        assert found.text_offset == [sum(map(len, found.tokens[:at])) for at in range(11 + most)]
        assert found.token_logprobs[0] is None
        scores = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
        for at in range(1, 11):
            assert found.token_logprobs[at] == pytest.approx(scores[at - 1, ids[at]].item(), abs=1e-5)
            top = found.top_logprobs[at]
            assert max(top.values()) == pytest.approx(scores[at - 1].max().item(), abs=1e-5)
            assert top[found.tokens[at]] == found.token_logprobs[at]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == most


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs
    assert entries is not None
    assert entries.content is not None
    for entry in entries.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert 0 < math.exp(entry.logprob) < 1
    assert len(entries.content) == 4


def test_models_tell_the_true_limit_and_prompts_at_it(model: Any, client: openai.OpenAI) -> None:
    """Report O-36 d."""
    (card,) = client.models.list().data
    limit = card.max_model_len  # type: ignore[attr-defined]
    assert (card.id, limit) == ("tiny", CONTEXT)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    for length, most, expected in [
        (limit - 1, 5, 1),
        (limit - 1, None, 1),
        (limit, 0, 0),
        (limit - 1, 0, 0),
    ]:
        answer = client.completions.create(model="tiny", prompt=[65] * length, max_tokens=most, temperature=0)
        assert (answer.choices[0].finish_reason, answer.usage and answer.usage.completion_tokens) == ("length", expected)
    for length, most in [(limit, 5), (limit, None), (limit + 1, 5), (limit + 1, 0), (limit + 1, None), (10 * limit, 5)]:
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="tiny", prompt=[65] * length, max_tokens=most)
        assert error.value.code == "context_length_exceeded"
        assert str(limit) in str(error.value)


WRONG = {
    "no JSON": (b"{", 400, "JSON"),
    "no object": (b"[]", 400, "object"),
    "nothing": (b"", 400, "JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', 400, "JSON"),
    "deep": (b"[" * 100_000, 400, "JSON"),
    "no prompt": ({}, 400, "prompt"),
    "empty prompt": ({"prompt": ""}, 400, "empty"),
    "half a character": ({"prompt": "hi \ud800"}, 400, "character 3 is half a character"),
    "an empty one among others": ({"prompt": ["a", ""]}, 400, "empty"),
    "empty list": ({"prompt": []}, 400, "no prompt"),
    "empty ids": ({"prompt": [[]]}, 400, "empty"),
    "id too large": ({"prompt": [257]}, 400, "257"),
    "negative id": ({"prompt": [-1]}, 400, "token ids"),
    "unknown model": ({"model": "gpt-7", "prompt": "a"}, 404, "gpt-7"),
    "temperature": ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    "temperature that is no number": ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    "top_p": ({"prompt": "a", "top_p": 0}, 400, "top-p"),
    "n": ({"prompt": "a", "n": 0}, 400, "n:"),
    "max_tokens": ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    "stop": ({"prompt": "a", "stop": ""}, 400, "stop"),
    "logit_bias": ({"prompt": "a", "logit_bias": {"999": 1}}, 400, "logit_bias"),
    "suffix": ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    "best_of": ({"prompt": "a", "best_of": 3}, 400, "best_of"),
    "true as an id": ({"prompt": [True]}, 400, "prompt"),
    "true among ids": ({"prompt": [[65], [65, True]]}, 400, "prompt"),
    **{
        f"{name} true": ({"prompt": "a", name: True}, 400, f"{name}: true and false")
        for name in ("n", "max_tokens", "logprobs", "best_of", "seed", "top_k", "temperature", "top_p", "min_p", "repetition_penalty")
    },
    "presence_penalty false": ({"prompt": "a", "presence_penalty": False}, 400, "presence_penalty"),
    "frequency_penalty false": ({"prompt": "a", "frequency_penalty": False}, 400, "frequency_penalty"),
    "logit_bias true": ({"prompt": "a", "logit_bias": {"65": True}}, 400, "logit_bias"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_have_openais_form_and_the_next_one_works(name: str, server: Served) -> None:
    """Report O-36 c and others."""
    body, status, word = WRONG[name]
    found, answer = server.ask("/v1/completions", body)
    assert (found, set(answer["error"])) == (status, {"message", "type", "param", "code"})
    assert word in answer["error"]["message"]
    assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    "messages",
    [[], [{"content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user"}], "Hi"],
    ids=lambda m: str(m)[:20],
)
def test_wrong_messages(messages: Any, server: Served) -> None:
    status, answer = server.ask("/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "top_logprobs", "n"])
def test_true_is_no_number_in_a_chat(name: str, server: Served) -> None:
    status, answer = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], name: True})
    assert (status, answer["error"]["param"]) == (400, name)


def test_half_a_character_in_a_message(server: Served) -> None:
    status, answer = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi \ud800"}]})
    assert status == 400
    assert "is half a character" in answer["error"]["message"]


def test_no_such_route_and_method(server: Served) -> None:
    assert server.ask("/v1/engines")[1]["error"]["type"] == "invalid_request_error"
    assert server.ask("/v1/completions")[0] == 405
    assert server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]})[0] == 400


def test_health_metrics_and_page(server: Served) -> None:
    assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 4})[0] == 200
    assert server.ask("/health") == (200, {"status": "ok"})
    server.until(lambda: server.service.bridge.stats.running == 0)
    text = server.ask("/metrics")[1]
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")}
    assert values["colrow_up"] == 1
    assert values["colrow_running"] == values["colrow_cache_used_tokens"] == 0
    assert values["colrow_new_tokens_total"] >= 4
    assert values['colrow_requests_total{outcome="200"}'] >= 1
    assert values['colrow_resident_bytes{rank="0"}'] > 1e6
    assert values['colrow_request_seconds_bucket{le="+Inf"}'] == values["colrow_request_seconds_count"]
    assert "<title>colrow</title>" in server.ask("/")[1]
    assert server.ask("/stats")[1]["chat"] is True


def test_streams_are_server_sent_events(server: Served) -> None:
    status, text = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 3, "temperature": 0, "stream": True})
    lines = text.split("\n\n")
    assert status == 200
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-2])
