"""Prompts that go through the model in one pass: no number changes by it, and where one would, each goes by itself."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
import transformers

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine import batch, packed
from colrow.engine.batch import Batch
from colrow.engine.forward import Forward
from colrow.engine.prefixes import last_cut
from colrow.engine.request import Output, Request, Run, Step
from colrow.engine.scheduler import Chosen, Scheduler
from colrow.kernels import prompt
from colrow.parallel import build, prompt_attention
from colrow.planning.derive import derive
from tests import tiny
from tests.test_engine_batch import at_once, serve
from tests.test_engine_prefixes import numbers, one_by_one, watched

NEEDED = pytest.mark.skipif(prompt.library() is None, reason="this processor has no products of bfloat16 pairs (AVX512-BF16)")
DRAW = random.Random(3)
BEGINNING = tuple(DRAW.randrange(256) for _ in range(300))


def model(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    config = tiny.config("llama", **{"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 1024, **changes})
    return tiny.whole(config, dtype, attention="sdpa")


def others(lengths: tuple[int, ...]) -> list[Request]:
    prompts = [tuple(DRAW.randrange(256) for _ in range(length)) for length in lengths]
    return [Request(50 + at, ids, max_new_tokens=4, logprobs=1, ignore_eos=True) for at, ids in enumerate(prompts)]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Of each pass the tokens of its pieces."""
    seen: list[list[int]] = []
    own = packed.Packed.__call__

    def watched(self: packed.Packed, pieces: Any) -> Any:
        seen.append([len(piece.tokens) for piece in pieces])
        return own(self, pieces)

    monkeypatch.setattr(packed.Packed, "__call__", watched)
    return seen


@NEEDED
@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_prompts_give_the_bits_of_those_alone(monkeypatch: pytest.MonkeyPatch, passes: list[list[int]], ranks: int) -> None:
    lengths = (1, 7, 70, 80, 100, 128, 137, 191, 230, 256, 300)
    requests = [Request(at, BEGINNING[:length], max_new_tokens=4, logprobs=1, ignore_eos=True) for at, length in enumerate(lengths)]
    requests += others((90, 3, 64, 150))
    whole = model()

    def run(script: Callable[..., bool], **options: Any) -> dict[int, Any]:
        options = {"chunk": 256, "cache_tokens": 6000, **options}
        if ranks == 1:
            return numbers(serve(single(), whole, script, **options))
        return numbers(run_threads(partial(serve, **options), ranks, whole, script)[0])

    expected = {id: row for r in requests for id, row in run(at_once([r]), share=False).items()}
    assert [1] in passes, "a pass is filled up"
    if ranks == 1:  # as by the modules, each piece by itself, but where one is so small that other code computes it
        with monkeypatch.context() as patch:
            patch.setattr(packed, "packable", lambda *args: False)
            same = [r for r in requests if len(r.ids) - last_cut(len(r.ids) - 1, 256) >= packed.LEAST]
            assert len(same) == 10
            assert all(run(at_once([r]), share=False)[r.id] == expected[r.id] for r in same)
    for share in (False, True):
        passes.clear()
        assert run(at_once(requests), share=share, beside=40) == expected
        assert max(map(len, passes)) > 3
        assert run(one_by_one(requests), share=share) == expected
    draw = random.Random(4)
    for beside in (1, 23, 100):  # cut anywhere, in any company, in little room
        order = draw.sample(requests, len(requests))
        starts = dict(zip((r.id for r in order), sorted(draw.randrange(30) for _ in order), strict=True))

        def script(batch: Batch, step: int, outputs: list[Output], order: Any = order, starts: Any = starts) -> bool:
            for request in order:
                if starts[request.id] == step:
                    batch.add(request)
            return batch.idle and step > max(starts.values())

        seen: dict[str, int] = {}
        watching = watched(script, seen) if ranks == 1 else script
        assert run(watching, cache_tokens=900, beside=beside, max_running=5) == expected
        assert seen.get("shared", 1) > 0


@NEEDED
def test_a_pass_has_rows_enough_and_the_head_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries have code of their own for few rows, which need not add up as that for many does; here, with little to add up, it does."""
    whole, rows, own = model(), list[int](), Forward.rows

    def seen(self: Forward, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(ids.shape[1])
        return own(self, ids, *rest)

    monkeypatch.setattr(Forward, "rows", seen)
    monkeypatch.setattr(packed, "packable", lambda *args: True)
    monkeypatch.setattr(batch, "rides", lambda *args: False)  # which makes passes of its own
    scored: list[int] = []
    whole.lm_head = _Watched(whole.lm_head, scored)
    serve(single(), whole, at_once(others((1, 15, 38))), chunk=20)
    assert rows == [20, 20, 16]
    assert scored.count(1) == len(scored)


class _Watched(torch.nn.Linear):
    def __init__(self, head: torch.nn.Linear, seen: list[int]) -> None:
        super().__init__(head.in_features, head.out_features, bias=False, dtype=head.weight.dtype)
        self.weight, self.seen = head.weight, seen

    def __deepcopy__(self, memo: Any) -> _Watched:
        return _Watched(self, self.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.shape[1])
        return super().forward(x)


@NEEDED
def test_scores_are_those_of_the_model_itself() -> None:
    whole = model()
    request = Request(1, BEGINNING[:150], max_new_tokens=2, logprobs=3)
    found = [e for o in serve(single(), whole, at_once([*others((40, 90)), request]), chunk=256) if o.id == 1 for e in o.logprobs]
    expected = torch.log_softmax(copy.deepcopy(whole).float()(torch.tensor([request.ids])).logits[0, -1], -1)
    assert found[0].logprob == pytest.approx(expected[found[0].token].item(), abs=0.05)


def able(whole: Any, context: int | None = 1024) -> bool:
    prompt_attention.install(whole)
    return packed.packable(Forward(whole), single(), context)


@NEEDED
def test_a_model_whose_rows_depend_on_each_other_is_not_packed() -> None:
    assert able(model())
    assert able(model(), None)
    assert not able(model(), 100), "too short a context to look"
    assert not able(model(torch.float32)), "torch's own attention adds in blocks"
    loud = model()
    loud.model.layers[0].mlp.down_proj = torch.nn.Sequential(loud.model.layers[0].mlp.down_proj, _Louder())
    assert not able(loud)
    longer = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    assert not able(model(rope_parameters=longer), 4096), "positions turn otherwise where others are far away"
    bloom = transformers.BloomConfig(vocab_size=64, hidden_size=48, n_layer=2, n_head=6)
    assert not able(tiny.whole(bloom, torch.bfloat16)), "its positions cannot be said"
    assert not able(tiny.whole(tiny.config("llama"), torch.bfloat16, attention="eager")), "its attention is its own"
    window = transformers.MistralConfig(**{**tiny.GROUPED, "sliding_window": 16})
    assert not able(tiny.whole(window, torch.bfloat16, attention="sdpa"))


class _Louder(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + x.shape[1] // 100)


@NEEDED
def test_ranks_of_which_one_has_no_heads_agree() -> None:
    config = tiny.config("llama", vocab_size=257)

    def asked(group: Group, whole: Any) -> bool:
        part = build.parallelize(copy.deepcopy(whole), derive(config, group.size), group)
        prompt_attention.install(part)
        return packed.packable(Forward(part), group, 1024)

    heads = config.num_attention_heads
    assert len(set(run_threads(asked, heads + 1, tiny.whole(config, torch.bfloat16, attention="sdpa")))) == 1


@NEEDED
def test_ranks_of_which_one_has_no_such_products_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, own = model(), prompt.library

    def asked(group: Group) -> bool:
        part = build.parallelize(copy.deepcopy(whole), derive(whole.config, 2), group)
        prompt_attention.install(part)
        return packed.packable(Forward(part), group, 1024)

    monkeypatch.setattr(prompt, "library", lambda: None if threading.current_thread().name == "rank 1" else own())
    assert run_threads(asked, 2) == [False, False]


@NEEDED
def test_the_head_is_itself_again_whatever_happens() -> None:
    """Its own `forward`, too, where somebody has set one."""
    head, rows = torch.nn.Linear(4, 3), list[int]()

    def watched(x: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[1])
        return torch.nn.Linear.forward(head, x)

    def failing() -> None:
        with packed._row_by_row(head, True), packed._row_by_row(head, True):
            assert head(torch.ones(1, 5, 4)).shape == (1, 5, 3)
            raise ZeroDivisionError

    for own in (None, watched):
        if own is not None:
            head.forward = own
        with pytest.raises(ZeroDivisionError):
            failing()
        assert vars(head).get("forward") is own
    assert rows == [1] * 5


def planned(scheduler: Scheduler, steps: int) -> list[list[tuple[int, int]]]:
    """Of each step its prompts: (request, tokens). Every run that chooses gets token 1."""
    out = []
    for _ in range(steps):
        step = scheduler.plan()
        out.append(sizes(step))
        scheduler.advance(step, [Chosen(1) if run.chooses else Chosen() for run in step.runs])
    return out


def sizes(step: Step) -> list[tuple[int, int]]:
    prompts: list[Run] = [run for run in step.runs if not run.new]
    return [(id, sum(len(run.tokens) for run in runs)) for id, runs in groupby(prompts, key=lambda run: run.id)]


class _Silent:
    def push(self, token: int) -> None:
        return None

    def take(self, finished: Any) -> str:
        return ""


def scheduler(**options: Any) -> Scheduler:
    return Scheduler(10_000, frozenset(), None, lambda request: _Silent(), **{"chunk": 256, "beside": 64, "packs": True, **options})


def test_prompts_take_little_room_where_others_wait_and_all_of_it_where_none_does() -> None:
    def asked(id: int, length: int) -> Request:
        return Request(id, tuple(id * 1000 + at for at in range(length)), max_new_tokens=50)

    made = scheduler()
    for id, length in enumerate((90, 270, 290)):
        made.add(asked(id, length))
    assert planned(made, 1) == [[(0, 90), (1, 166)]]
    assert planned(made, 7) == [[(1, 64)], [(1, 40), (2, 24)], *[[(2, 64)]] * 3, [(2, 64 + 10)], []], "a last small part is taken along"
    apart = scheduler(packs=False)
    for id, length in enumerate((90, 200, 300)):
        apart.add(asked(id, length))
    assert planned(apart, 3) == [[(0, 90), (2, 128)], [(1, 200)], [(2, 172)]]


def test_a_piece_is_kept_when_its_last_part_has_come() -> None:
    made = scheduler(share=True)
    for id in (1, 2):
        made.add(Request(id, (*range(200), id), max_new_tokens=50))
    made.add(Request(3, tuple(range(900, 910)), max_new_tokens=50))
    first = made.plan()
    assert [(run.id, run.at, run.since, bool(run.keep)) for run in first.runs[:4]] == [
        (1, 0, 0, True),
        (1, 64, 64, True),
        (1, 128, 128, True),
        (1, 192, 192, False),
    ]
    assert [run.id for run in first.runs[4:]] == [3], "the same beginning is not computed twice"
    made.advance(first, [Chosen(1) if run.chooses else Chosen() for run in first.runs])
    second = made.plan()
    assert [(load.id, len(load.keys)) for load in second.loads] == [(2, 3)]
    late = scheduler(share=True, beside=50)
    late.add(Request(1, (7,) * 5, max_new_tokens=50))
    late.add(Request(2, tuple(range(100)), max_new_tokens=50))
    planned(late, 1)
    late.add(Request(4, tuple(range(500, 700)), max_new_tokens=50))
    parts = []
    for _ in range(3):
        step = late.plan()
        parts += [(run.at, len(run.tokens), run.since, bool(run.keep)) for run in step.runs if run.id == 4]
        late.advance(step, [Chosen(1) if run.chooses else Chosen() for run in step.runs])
    assert parts == [(0, 50, 0, False), (50, 14, 0, True), (64, 36, 64, False), (100, 28, 64, True), (128, 22, 128, False)]
