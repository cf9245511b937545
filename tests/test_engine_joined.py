"""Pieces of a prompt that go through the model together: no number changes by it, and where one would, they do not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from colrow.comm.group import single
from colrow.engine import joined
from colrow.engine.forward import Forward
from colrow.engine.request import Request, Run
from colrow.kernels import prompt
from colrow.parallel import prompt_attention
from tests import tiny
from tests.test_engine_batch import at_once, serve
from tests.test_engine_prefixes import numbers, one_by_one

NEEDED = pytest.mark.skipif(prompt.library() is None, reason="this processor has no products of bfloat16 pairs (AVX512-BF16)")


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    config = tiny.config("llama", vocab_size=257, eos_token_id=256, max_position_embeddings=1024)
    return tiny.whole(config, dtype, attention="sdpa")


def test_what_is_joined() -> None:
    def run(id: int, count: int, **more: Any) -> Run:
        return Run(id, (1,) * count, **more)

    runs = [
        run(1, 64),
        run(1, 64),
        run(1, 15),
        run(2, 64),
        run(3, 64, every=True),
        run(3, 64, every=True),
        run(4, 1, new=1),
        run(5, 64),
        run(5, 16),
    ]
    assert list(map(len, joined.groups(runs, True))) == [2, 1, 1, 1, 1, 1, 2]
    assert list(map(len, joined.groups(runs, False))) == [1] * len(runs)
    assert list(joined.groups([], True)) == []


@NEEDED
def test_joined_pieces_give_the_bits_of_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    beginning = tuple(draw.randrange(256) for _ in range(300))
    lengths = (70, 80, 100, 128, 137, 191, 230, 256, 300)
    requests = [Request(at, beginning[:length], max_new_tokens=4, logprobs=1, ignore_eos=True) for at, length in enumerate(lengths)]
    whole, seen = model(), list[int]()
    monkeypatch.setattr(joined, "joinable", lambda *args: False)
    apart = [numbers(serve(single(), whole, at_once([r]), chunk=256, share=False)) for r in requests]
    expected = {id: row for one in apart for id, row in one.items()}
    monkeypatch.undo()
    own = Forward.__call__

    def watched(self: Forward, ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        seen.append(ids.shape[1])
        return own(self, ids, *rest, **more)

    monkeypatch.setattr(Forward, "__call__", watched)
    assert numbers(serve(single(), whole, at_once(requests), chunk=256, cache_tokens=4000, share=False)) == expected
    assert {80, 100, 128, 191, 256} <= set(seen), "pieces went together"
    seen.clear()
    others = [Request(at, tuple(draw.randrange(256) for _ in range(90)), max_new_tokens=1) for at in range(5)]
    serve(single(), whole, at_once(others), chunk=256)
    assert seen.count(90) == 5, "none is cut because a step has little room left"
    for script in (at_once, one_by_one):  # with beginnings that are there already
        assert numbers(serve(single(), whole, script(requests), chunk=256, cache_tokens=4000)) == expected


@NEEDED
def test_a_model_whose_rows_depend_on_each_other_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model()
    prompt_attention.install(whole)
    assert joined.joinable(Forward(whole), single(), 1024)
    assert not joined.joinable(Forward(whole), single(), 100), "too short a context to look"
    assert not joined.joinable(Forward(model(torch.float32)), single(), 1024), "torch's own attention adds in blocks"
    layer = whole.model.layers[1].mlp.down_proj
    whole.model.layers[1].mlp.down_proj = torch.nn.Sequential(layer, _Louder())
    assert not joined.joinable(Forward(whole), single(), 1024)


class _Louder(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + x.shape[1] // 100)
