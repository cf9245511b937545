"""What a model's generation config asks of its text: the same tokens as transformers' `generate`, one prompt at a time and in a batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.engine import Engine
from colrow.engine.generate import generate
from colrow.engine.mixed import Row, changed
from colrow.engine.request import Request
from colrow.engine.rules import Place, Rules, rules_of
from colrow.engine.settings import Sampling
from colrow.engine.stopping import Limits
from colrow.errors import UserError
from colrow.parallel import build
from colrow.planning.derive import derive

from .test_engine_batch import answers, at_once, model, serve
from .test_engine_text import byte_level
from .test_engine_translate import speaking

PROMPTS = ["Hello there", "a", "aaaaaaaa"]
NEW = 14


def greedy(whole: Any, prompt: str) -> list[int]:
    """transformers' new tokens, without an end token."""
    ids = torch.tensor([byte_level()(prompt)["input_ids"]])
    given = 1 if whole.config.is_encoder_decoder else ids.shape[1]
    out = whole.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, num_beams=1, pad_token_id=0)
    return out[0].tolist()[given:]


def engines(whole: Any, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of every prompt from `Engine.stream`'s generate, and from a batch."""
    ids = [byte_level()(prompt)["input_ids"] for prompt in PROMPTS]

    def rank(group: Group) -> list[list[int]]:
        part = copy.deepcopy(whole)
        part = build.parallelize(part, derive(whole.config, ranks), group) if ranks > 1 else part
        engine, rows = Engine(part, group), [list[int]() for _ in ids]
        sampling, limits = engine.rules.sampling(Sampling()), Limits(NEW, engine.eos, engine.context)
        for step in generate(part, group, ids, sampling, limits, decoder=engine.decoder, rules=engine.rules):
            for row, token in zip(rows, step.tokens, strict=True):
                row.extend([] if token is None else [token])
        return rows

    requests = [Request(at, tuple(prompt), max_new_tokens=NEW) for at, prompt in enumerate(ids)]
    if ranks == 1:
        rows, served = rank(single()), serve(single(), whole, at_once(requests))
    else:
        rows = run_threads(rank, ranks)[0]
        served = run_threads(lambda group: serve(group, whole, at_once(requests)), ranks)[0]
    return rows, [answers(served)[at][0] for at in range(len(ids))]


EVEN = [[[token], 2.0] for token in range(0, 256, 2)]
RULES: dict[str, dict[str, Any]] = {
    "no n-gram twice": {"no_repeat_ngram_size": 2},
    "one token never, two never together": {"bad_words_ids": "likely"},
    "not the end too early": {"min_length": 20, "eos_token_id": "likely"},
    "not the end in the first new ones": {"min_new_tokens": 9, "eos_token_id": "likely"},
    "suppressed, some at the beginning": {"suppress_tokens": "likely", "begin_suppress_tokens": [3, 4, 5]},
    "a forced beginning": {"forced_bos_token_id": 7},
    "some not behind a forced beginning": {"forced_bos_token_id": 7, "begin_suppress_tokens": [*range(40), *range(50, 256)]},
    "an end at the limit": {"forced_eos_token_id": 256},
    "a bias of sequences": {"sequence_bias": [[[32], 4.0], [[101, 32], -8.0]]},
    "a repetition penalty": {"repetition_penalty": 1.7},
    "a bias of sequences, and then a repetition penalty": {"sequence_bias": EVEN, "repetition_penalty": 1.7},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "forced_eos_token_id": 256, "suppress_tokens": [7, 8]},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("family", "ranks"), [("llama", 2), ("bart", 1), ("bart", 3)])
def test_tokens_are_those_of_transformers(family: str, ranks: int, rule: str) -> None:
    whole = speaking("bart") if family == "bart" else model()
    before = [greedy(whole, prompt) for prompt in PROMPTS]
    likely = before[0][1]
    for name, value in RULES[rule].items():
        if value == "likely":
            value = {"bad_words_ids": [[likely], [before[1][2], before[1][3]]], "eos_token_id": likely}.get(name, [likely])
        setattr(whole.generation_config, name, value)
    expected = [greedy(whole, prompt) for prompt in PROMPTS]
    assert expected != before, "the rule changes something"
    rows, served = engines(whole, ranks)
    assert rows == expected
    end = whole.generation_config.eos_token_id
    assert [row + [end] * (len(row) < len(wanted)) for row, wanted in zip(served, expected, strict=True)] == expected


def test_an_end_is_not_forced_upon_a_request_that_wants_none() -> None:
    whole = model()
    whole.generation_config.forced_eos_token_id = 256
    requests = [Request(at, (5, 9), max_new_tokens=3, ignore_eos=at == 1) for at in range(2)]
    found = answers(serve(single(), whole, at_once(requests)))
    assert [found[at][0][-1] == 256 for at in range(2)] == [True, False]
    assert found[0][0][:-1] == found[1][0][:-1]


def test_what_a_request_says_itself_comes_first() -> None:
    rules = Rules(repetition_penalty=1.5)
    assert rules.sampling(Sampling()).penalty == 1.5
    assert rules.sampling(Sampling(repetition_penalty=1.0)).penalty == 1.0
    assert Sampling().penalty == 1.0


def test_what_is_not_obeyed_is_said() -> None:
    config = GenerationConfig(num_beams=4, no_repeat_ngram_size=3, stop_strings=["END"])
    rules = rules_of(config, frozenset([2]))
    assert "num_beams=4, stop_strings=['END']" in rules.warning
    assert "ngram" not in rules.warning
    assert [bool(found) for found in (rules, rules_of(GenerationConfig(), frozenset([2])), rules_of(None, frozenset()))] == [
        True,
        False,
        False,
    ]


def test_a_bias_comes_in_front_of_a_penalty() -> None:
    """The model's or the request's: 1 + 5 is divided, as in transformers, not 1."""
    rules = rules_of(GenerationConfig(sequence_bias=[[[2], 5.0]], repetition_penalty=1.5), frozenset())
    assert (rules.warning, rules.repetition_penalty) == ("", 1.5)
    scores = torch.tensor([0.0, -1.0, 1.0, 2.0])
    for asked, expected in ((Sampling(), 4.0), (Sampling(repetition_penalty=3.0), 2.0)):
        request = Request(0, (2,), rules.sampling(asked))
        assert changed(Row(request, scores, 0, [2]), scores, rules).tolist() == [0, -1, expected, 2]


NO_RULES = {"no_repeat_ngram_size": -2, "bad_words_ids": [7], "sequence_bias": 3, "min_length": "x"}


@pytest.mark.parametrize("name", [*NO_RULES, "repetition_penalty"])
def test_what_is_no_rule_is_said_when_the_model_is_opened(name: str) -> None:
    whole = model()
    setattr(whole.generation_config, name, NO_RULES.get(name, -1.0))
    said = f"{name} in generation_config.json is no rule" if name in NO_RULES else "repetition penalty must be above 0"
    with pytest.raises(UserError, match=said):
        Engine(whole, single())


def test_a_model_without_an_end_token() -> None:
    rules = rules_of(GenerationConfig(bad_words_ids=[[3]], min_length=5), frozenset())
    assert rules(torch.zeros(5), [1], Place(1, False)).tolist() == [0, 0, 0, float("-inf"), 0]
