"""Beginnings that prompts have in common are computed once, and sequences give up their place and come back: no number changes by it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from colrow.comm.group import single
from colrow.comm.local import run_threads
from colrow.engine.batch import Batch
from colrow.engine.prefixes import Prefixes, next_cut
from colrow.engine.request import Output, Request
from colrow.engine.settings import Sampling
from tests import tiny
from tests.test_engine_batch import answers, at_once, ids, model, serve

SYSTEM = tuple(random.Random(5).randrange(256) for _ in range(200))


def numbers(outputs: list[Output]) -> dict[int, list[tuple[int, float | None]]]:
    """Tokens and log-probabilities, which show differences of rounding that tokens hide."""
    found: dict[int, list[tuple[int, float | None]]] = {}
    for output in outputs:
        found.setdefault(output.id, []).extend((e.token, e.logprob) for e in (*output.prompt_logprobs, *output.logprobs))
    return found


def one_by_one(requests: list[Request]) -> Callable[[Batch, int, list[Output]], bool]:
    left = list(requests)

    def script(batch: Batch, step: int, outputs: list[Output]) -> bool:
        if batch.idle and left:
            batch.add(left.pop(0))
        return batch.idle

    return script


def long_model(**changes: Any) -> Any:
    return tiny.whole(tiny.config("llama", vocab_size=257, eos_token_id=256, max_position_embeddings=1024, **changes), torch.float32)


def watched(script: Callable[[Batch, int, list[Output]], bool], seen: dict[str, int]) -> Callable[[Batch, int, list[Output]], bool]:
    """Checks at every step that no more is held than there is, and keeps what the scheduler has counted."""

    def watching(batch: Batch, step: int, outputs: list[Output]) -> bool:
        done, scheduler = script(batch, step, outputs), batch.scheduler
        assert scheduler is not None
        assert sum(held.length for held in batch._held.values()) + scheduler.prefixes.positions <= scheduler.cache_tokens
        assert len(batch._blocks._kept) == len(scheduler.prefixes._pieces)
        seen.update(shared=scheduler.shared, paused=scheduler.paused, kept=scheduler.prefixes.positions, running=len(scheduler.running))
        return done

    return watching


@pytest.mark.parametrize("together", [False, True])
def test_a_common_beginning_is_computed_once_and_changes_no_bit(together: bool) -> None:
    whole = long_model()
    requests = [
        Request(1, SYSTEM + ids("What is red?"), max_new_tokens=8, logprobs=1),
        Request(2, SYSTEM + ids("And what is green, then?"), max_new_tokens=8, logprobs=1),
        Request(3, SYSTEM + ids("What is red?"), Sampling(1.0, seed=1), max_new_tokens=8, logprobs=1),
        Request(4, SYSTEM[:128], max_new_tokens=4, logprobs=1),  # its last piece is kept, and computed all the same: it chooses
        Request(5, SYSTEM[:100] + ids("x" * 100), max_new_tokens=4, logprobs=1),
    ]
    alone = [numbers(serve(single(), whole, at_once([r]), chunk=256, share=False)) for r in requests]
    expected = {id: row for one in alone for id, row in one.items()}
    seen: dict[str, int] = {}
    script = at_once(requests) if together else one_by_one(requests)
    outputs = serve(single(), whole, watched(script, seen), chunk=256, cache_tokens=4000)
    assert numbers(outputs) == expected
    assert seen["shared"] == 192 + 192 + 64 + 64
    assert {o.id: o.shared for o in outputs if o.shared} == {2: 192, 3: 192, 4: 64, 5: 64}
    double = whole.double()
    split = run_threads(partial(serve, chunk=256, cache_tokens=4000), 2, double, at_once(requests))
    assert answers(split[0]) == answers(serve(single(), double, at_once(requests), chunk=256, share=False, cache_tokens=4000))


def test_log_probabilities_of_a_prompt_are_all_computed() -> None:
    whole = long_model()
    requests = [Request(at, SYSTEM, max_new_tokens=2, logprobs=0, prompt_logprobs=0 if at == 2 else None) for at in (1, 2, 3)]
    seen: dict[str, int] = {}
    found = numbers(serve(single(), whole, watched(one_by_one(requests), seen), chunk=256, cache_tokens=2000))
    assert [len(found[at]) for at in (1, 2, 3)] == [2, 202, 2]
    assert found[1] == found[3]
    for (token, value), (same, alike) in zip(found[1], found[2][200:], strict=True):  # the head sees all rows at once there
        assert token == same
        assert value == pytest.approx(alike, abs=1e-6)
    assert seen["shared"] == 192


@pytest.mark.parametrize("ranks", [1, 2])
def test_sequences_that_give_up_their_place_come_back_to_the_same_bits(ranks: int) -> None:
    whole = model()
    requests = [Request(at, ids("prompt " * at)[: 5 * at], Sampling(float(at % 2), seed=at), 40, logprobs=0) for at in range(1, 8)]
    alone = {id: row for r in requests for id, row in numbers(serve(single(), whole, at_once([r]))).items()}
    seen: dict[str, int] = {}
    tight = {"cache_tokens": 160, "max_running": 5}
    if ranks == 1:
        assert numbers(serve(single(), whole, watched(at_once(requests), seen), **tight)) == alone
        assert seen["paused"] >= 2
        assert seen["kept"] > 0
    else:
        double = whole.double()
        wide = answers(serve(single(), double, at_once(requests)))
        assert answers(run_threads(partial(serve, **tight), ranks, double, at_once(requests))[0]) == wide


@pytest.mark.parametrize("fast", [False, True])
def test_many_prompts_with_beginnings_in_common_in_little_room(fast: bool) -> None:
    draw = random.Random(2)
    whole = model(torch.float64 if fast else torch.float32)
    parts = [tuple(draw.randrange(256) for _ in range(8)) for _ in range(3)]
    requests = [
        Request(
            at, sum((draw.choice(parts) for _ in range(draw.randrange(1, 4))), ()) + ids("xyz"[: draw.randrange(1, 4)]), max_new_tokens=9
        )
        for at in range(40)
    ]
    starts = [draw.randrange(60) for _ in requests]
    seen: dict[str, int] = {}

    def script(batch: Batch, step: int, outputs: list[Output]) -> bool:
        for request, start in zip(requests, starts, strict=True):
            if start == step:
                batch.add(request)
            if start + 7 == step and request.id % 9 == 4:
                batch.abort(request.id)
        return batch.idle and step > max(starts)

    found = answers(serve(single(), whole, watched(script, seen), cache_tokens=192, fast=fast))
    expected = {r.id: answers(serve(single(), whole, at_once([r])))[r.id] for r in requests}
    for id, answer in found.items():
        assert answer == expected[id] or (answer[2] == "abort" and expected[id][0][: len(answer[0])] == answer[0])
    assert seen["shared"] > 100
    assert seen["running"] == 0


def test_caches_that_cannot_be_taken_apart_are_not_shared() -> None:
    import transformers

    config = transformers.MistralConfig(**{**tiny.GROUPED, "vocab_size": 257, "eos_token_id": 256, "sliding_window": 16})
    whole = tiny.whole(config, torch.float32)
    requests = [Request(at, SYSTEM[:40], max_new_tokens=5) for at in (1, 2)]
    seen: dict[str, int] = {}
    found = answers(serve(single(), whole, watched_lightly(one_by_one(requests), seen)))
    assert found[1] == found[2] == answers(serve(single(), whole, at_once([requests[0]]), share=False))[1]
    assert seen["shared"] == 0


def watched_lightly(script: Callable[[Batch, int, list[Output]], bool], seen: dict[str, int]) -> Callable[..., bool]:
    def watching(batch: Batch, step: int, outputs: list[Output]) -> bool:
        assert batch.scheduler is not None
        seen["shared"] = batch.scheduler.shared
        return script(batch, step, outputs)

    return watching


def cuts(most: int) -> Iterator[int]:
    at = 0
    while at < 3000:
        yield (at := next_cut(at, most))


def test_cuts_depend_on_the_position_alone() -> None:
    assert list(cuts(8))[:3] == [8, 16, 24]
    found = list(cuts(256))
    assert found[:8] == [64, 128, 192, 256, 384, 512, 768, 1024]
    assert all(stop - start <= 256 for start, stop in pairwise(found))
    assert all(start / stop >= 2 / 3 for start, stop in pairwise(found[1:]))


def test_pieces_are_forgotten_longest_unused_first_and_never_under_others() -> None:
    prefixes = Prefixes()
    a = prefixes.add(0, (1, 2))
    b = prefixes.add(a, (3, 4))
    c = prefixes.add(0, (5, 6))
    assert (prefixes.find(0, (1, 2)), prefixes.find(a, (3, 4)), prefixes.find(b, (3, 4)), prefixes.positions) == (a, b, 0, 6)
    assert list(prefixes.forget(1)) == [c]
    assert list(prefixes.forget(1, {b})) == []
    assert list(prefixes.forget(99)) == [b, a]
    assert (prefixes.positions, prefixes.find(0, (1, 2)), prefixes.keeps(a)) == (0, 0, False)
