"""Many requests at once: each one's answer is the one it gets alone, whatever its company; rank 0 decides."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.batch import Batch
from colrow.engine.engine import Engine
from colrow.engine.request import Output, Request
from colrow.engine.settings import Sampling
from colrow.parallel import build
from colrow.planning.derive import derive
from tests import tiny
from tests.test_engine_text import byte_level

CONFIG = {"vocab_size": 257, "eos_token_id": 256}


def model(dtype: torch.dtype = torch.float32, family: str = "llama") -> Any:
    return tiny.whole(tiny.config(family, **CONFIG), dtype, attention="sdpa")


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def serve(group: Group, whole: Any, script: Callable[[Batch, int, list[Output]], bool], **options: Any) -> list[Output]:
    """Steps a batch of all ranks; before each step rank 0 runs `script(batch, step, outputs)`, which returns whether it is done."""
    import copy

    part = copy.deepcopy(whole)
    if group.size > 1:
        part = build.parallelize(part, derive(whole.config, group.size), group)
    engine = Engine(part, group, byte_level() if group.rank == 0 else None)
    batch, outputs, step = Batch(engine, **{"cache_tokens": 1000, "chunk": 8, **options}), [], 0
    while True:
        if group.rank == 0 and script(batch, step, outputs):
            batch.close()
        if not batch.step(outputs.extend):
            return outputs
        step += 1


def at_once(requests: list[Request]) -> Callable[[Batch, int, list[Output]], bool]:
    def script(batch: Batch, step: int, outputs: list[Output]) -> bool:
        if step == 0:
            for request in requests:
                batch.add(request)
        return batch.idle

    return script


def answers(outputs: list[Output]) -> dict[int, tuple[list[int], str, str | None]]:
    found: dict[int, tuple[list[int], str, str | None]] = {}
    for output in outputs:
        tokens, text, finish = found.get(output.id, ([], "", None))
        assert finish is None, "something came after the end"
        found[output.id] = [*tokens, *output.tokens], text + output.text, output.finish
    return found


REQUESTS = [
    Request(1, ids("Hello"), max_new_tokens=12),
    Request(2, ids("a longer prompt than one chunk"), max_new_tokens=20),
    Request(3, ids("x"), Sampling(1.0, seed=7), max_new_tokens=9),
    Request(4, ids("nucleus"), Sampling(1.3, top_p=0.95, seed=3), max_new_tokens=9),
    Request(5, ids("topk"), Sampling(1.3, top_k=5, seed=3), max_new_tokens=9, logprobs=2),
    Request(6, ids("penalty"), Sampling(repetition_penalty=1.3), max_new_tokens=9, presence_penalty=0.5, frequency_penalty=0.2),
    Request(7, ids("bias"), max_new_tokens=5, logit_bias=((65, 100.0),)),
    Request(8, ids("Hello"), max_new_tokens=12),
]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokens_are_those_of_the_request_alone_in_any_company_and_at_any_degree(family: str) -> None:
    whole = model(family=family)
    alone = {}
    for request in REQUESTS:
        alone |= answers(serve(single(), whole, at_once([request])))
    assert answers(serve(single(), whole, at_once(REQUESTS))) == alone
    draw = random.Random(1)
    for _ in range(3):  # requests that join at any step, in any order, in a cache with little room
        order = draw.sample(REQUESTS, len(REQUESTS))
        starts = sorted(draw.randrange(25) for _ in order)

        def script(batch: Batch, step: int, outputs: list[Output], plan: Any = (order, starts)) -> bool:
            for request, start in zip(*plan, strict=True):
                if start == step:
                    batch.add(request)
            return batch.idle and step > max(plan[1])

        assert answers(serve(single(), whole, script, cache_tokens=90, max_running=4)) == alone
    assert alone[7][0] == [65] * 5
    assert alone[1] == alone[8]
    double = whole.double()
    for ranks in (2, 3):
        split = run_threads(serve, ranks, double, at_once(REQUESTS))
        assert answers(split[0]) == answers(serve(single(), double, at_once(REQUESTS)))
        assert split[1] == []


def test_probabilities_are_bit_equal_in_any_company() -> None:
    """Tokens hide differences of rounding; log-probabilities do not."""
    whole = model()
    requests = [Request(at, ids("prompt " * at)[: 9 * at], max_new_tokens=6, logprobs=0) for at in range(1, 7)]

    def numbers(outputs: list[Output]) -> dict[int, list[float | None]]:
        return {r.id: [e.logprob for output in outputs if output.id == r.id for e in output.logprobs] for r in requests}

    together = numbers(serve(single(), whole, at_once(requests)))
    for request in requests:
        assert numbers(serve(single(), whole, at_once([request])))[request.id] == together[request.id]


def test_equals_the_engine_that_serves_one_call() -> None:
    whole = model()
    outputs = answers(serve(single(), whole, at_once(REQUESTS), chunk=64))
    engine = Engine(whole, single(), byte_level())
    for request in REQUESTS[:4]:
        assert outputs[request.id][1] == engine.complete([request.ids], sampling=request.sampling, max_new_tokens=request.max_new_tokens)[0]


def test_logprobs_are_the_models_own() -> None:
    whole = model(torch.float64)
    request = Request(1, ids("some prompt"), Sampling(2.0, top_k=3, seed=1), max_new_tokens=6, logprobs=3, prompt_logprobs=2)

    def check(outputs: list[Output]) -> None:
        prompt = [entry for output in outputs for entry in output.prompt_logprobs]
        new = [entry for output in outputs for entry in output.logprobs]
        tokens = [entry.token for entry in prompt + new]
        assert len(new) == 6
        assert tuple(tokens[:11]) == request.ids
        expected = torch.log_softmax(whole(torch.tensor([tokens])).logits[0], -1)
        assert prompt[0].logprob is None
        for at, entry in enumerate((prompt + new)[1:]):
            assert entry.logprob == pytest.approx(expected[at, entry.token].item(), abs=1e-10)
            best = torch.topk(expected[at], len(entry.top))
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-10)

    check(serve(single(), whole, at_once([request])))
    check(run_threads(serve, 2, whole, at_once([request]))[0])


def test_prompt_logprobs_alone_make_no_token() -> None:
    outputs = serve(
        single(),
        model(),
        at_once([Request(1, ids("some prompt"), max_new_tokens=0, prompt_logprobs=1), Request(2, ids("a"), max_new_tokens=0)]),
    )
    assert answers(outputs) == {1: ([], "", "length"), 2: ([], "", "length")}
    assert sum(len(output.prompt_logprobs) for output in outputs) == 11


def test_an_aborted_request_is_gone_with_the_next_step_and_others_go_on() -> None:
    """Report O-36 e."""
    seen: dict[int, set[int]] = {}

    def script(batch: Batch, step: int, outputs: list[Output]) -> bool:
        if step == 0:
            for request in (Request(1, ids("one"), max_new_tokens=50), Request(2, ids("two"), max_new_tokens=20), Request(3, ids("three"))):
                batch.add(request)
        if step == 5:
            batch.abort(1)
            batch.abort(99)
        seen[step] = set(batch._held)
        return batch.idle

    outputs = serve(single(), model(), script, cache_tokens=79)
    assert seen[5] == {1, 2}
    assert seen[6] == {2, 3}, "the place is free within one step, and the one that waited has it"
    found = answers(outputs)
    assert found[1][2] == "abort"
    assert len(found[1][0]) == 5
    assert (len(found[2][0]), len(found[3][0])) == (20, 16)


def test_wrong_requests_end_alone() -> None:
    now = [0.0]

    def script(batch: Batch, step: int, outputs: list[Output]) -> bool:
        if step == 0:
            batch.add(Request(1, (), max_new_tokens=5))
            batch.add(Request(2, ids("x" * 40), max_new_tokens=100))
            batch.add(Request(3, ids("fine"), max_new_tokens=8))
            batch.add(Request(4, ids("slow"), max_new_tokens=30, seconds=4.0))
        now[0] += 1.0
        return batch.idle

    found = answers(serve(single(), model(), script, cache_tokens=100, clock=lambda: now[0]))
    assert (found[1][2], found[2][2], found[4][2]) == ("error", "error", "timeout")
    assert found[3][2] == "length"
    assert len(found[3][0]) == 8


def test_numbers_that_are_not_finite_end_their_request_alone() -> None:
    whole = model()
    with torch.no_grad():
        whole.model.embed_tokens.weight[200] = float("nan")

    def rank(group: Group) -> list[Output]:
        bad = [Request(1, (1, 200)), Request(2, (200, 5), logprobs=0), Request(3, (200,), max_new_tokens=0, prompt_logprobs=0)]
        return serve(group, whole, at_once([*bad, Request(4, (5, 6), max_new_tokens=3)]))

    for outputs in (rank(single()), run_threads(rank, 2)[0]):
        found = answers(outputs)
        assert [found[id][2] for id in (1, 2, 3, 4)] == ["error", "error", "error", "length"]
        assert all("NaN" in output.error for output in outputs if output.finish == "error")


def test_a_long_prompt_does_not_stall_the_others() -> None:
    def script(batch: Batch, step: int, outputs: list[Output]) -> bool:
        if step == 0:
            batch.add(Request(1, ids("short"), max_new_tokens=10))
        if step == 1:
            batch.add(Request(2, ids("l" * 50), max_new_tokens=4))
        return batch.idle

    outputs = serve(single(), model(), script)
    first = next(at for at, output in enumerate(outputs) if output.id == 2)
    assert sum(output.id == 1 for output in outputs[:first]) >= 7


@pytest.mark.parametrize("seed", [0, 1])
def test_sampled_ids_are_the_same_at_any_degree(seed: int) -> None:
    """Report O-35: temperature 1, many tokens; one rank decides."""
    whole = model(torch.float64)
    requests = [Request(1, ids("Hi"), Sampling(1.0, seed=seed), max_new_tokens=50, ignore_eos=True)]
    expected = answers(serve(single(), whole, at_once(requests)))
    assert len(expected[1][0]) == 50
    for ranks in (2, 3):
        assert answers(run_threads(serve, ranks, whole, at_once(requests))[0]) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2", "sliding"])
def test_fast_decodes_rows_together_and_chooses_the_same_tokens(family: str) -> None:
    """Float64, so that rounding decides nothing; requests join and leave, and outgrow their batch. Left padding: report O-36 f."""
    if family == "sliding":
        from transformers import MistralConfig

        whole = tiny.whole(MistralConfig(**{**tiny.GROUPED, **CONFIG, "sliding_window": 8}), attention="sdpa")
    else:
        whole = model(torch.float64, family)
    alone = {}
    for request in REQUESTS:
        alone |= answers(serve(single(), whole, at_once([request])))
    draw = random.Random(2)
    for _ in range(3):
        order, starts = draw.sample(REQUESTS, len(REQUESTS)), sorted(draw.randrange(25) for _ in REQUESTS)

        def script(batch: Batch, step: int, outputs: list[Output], plan: Any = (order, starts)) -> bool:
            for request, start in zip(*plan, strict=True):
                if start == step:
                    batch.add(request)
            return batch.idle and step > max(plan[1])

        assert answers(serve(single(), whole, script, cache_tokens=150, fast=True)) == alone
    calls = {}

    def rank(group: Group, fast: bool) -> list[Output]:
        outputs = serve(group, whole, at_once(REQUESTS), fast=fast)
        calls[fast] = group.counters.total(phase="decode").calls
        return outputs

    assert answers(run_threads(rank, 2, True)[0]) == answers(run_threads(rank, 2, False)[0]) == alone
    assert (calls[True] < 0.8 * calls[False]) is (family != "sliding")
