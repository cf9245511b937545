"""Steps that ride along with prompts: no number changes by it, products are made on the way, and none does where ranks would differ."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers

from colrow.comm import launch, shm_context
from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine import packed, riding
from colrow.engine.engine import Engine
from colrow.engine.forward import Forward
from colrow.engine.request import Output, Request
from colrow.kernels import many, prompt
from colrow.parallel import build
from colrow.parallel.compact import compact_layers
from colrow.parallel.int8 import quantize_layers
from colrow.planning.derive import derive
from tests import tiny
from tests.test_engine_batch import serve
from tests.test_engine_packed import model, others
from tests.test_engine_prefixes import numbers

able = prompt.library() is not None and many.helps()
needed = pytest.mark.skipif(not able, reason="this processor has no products of bfloat16 pairs (AVX512-BF16), or tiles (AMX)")
pytestmark = [needed, pytest.mark.usefixtures("threads")]


@pytest.fixture
def ridden(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each step that rode along how many products were made on the way."""
    seen: list[int] = []
    own = riding.Riding.scores

    def watched(self: riding.Riding) -> torch.Tensor:
        seen.append(len(self.places.made))
        return own(self)

    monkeypatch.setattr(riding.Riding, "scores", watched)
    return seen


WIDE = {"hidden_size": 630, "head_dim": 70, "intermediate_size": 1020}  # so that twelve bits save something
EVEN = {"hidden_size": 144, "intermediate_size": 204}  # widths of products, on each of two ranks too


def one_after_the_other(batch: Any, step: int, outputs: list[Output], requests: Any) -> bool:
    if step % 2 == 0 and step // 2 < len(requests):
        batch.add(requests[step // 2])
    return batch.idle and step > 2 * len(requests)


def rides(group: Group, whole: Any) -> bool:
    part = copy.deepcopy(whole)
    if group.size > 1:
        part = build.parallelize(part, derive(whole.config, group.size), group)
    engine = Engine(part, group)
    engine.decoder.prepare()
    return riding.rides(engine.decoder.program, Forward(part), group)


REQUESTS = others((90, 3, 64, 150, 41))


def served(group: Group, whole: Any) -> list[Output]:
    return serve(group, whole, partial(one_after_the_other, requests=REQUESTS), cache_tokens=6000, chunk=256, beside=40)


@pytest.mark.parametrize(("ranks", "keep"), [(1, None), (2, None), (1, quantize_layers), (1, compact_layers)])
def test_answers_are_those_of_steps_by_themselves(monkeypatch: pytest.MonkeyPatch, ridden: list[int], ranks: int, keep: Any) -> None:
    whole = model(**EVEN) if keep is not compact_layers else model(**WIDE)
    if keep is not None:
        assert keep(whole)

    def answers() -> dict[int, Any]:
        return numbers(served(single(), whole) if ranks == 1 else run_threads(served, ranks, whole)[0])

    found = answers()
    assert min(ridden) >= 7 * whole.config.num_hidden_layers
    ridden.clear()
    monkeypatch.setattr("colrow.engine.batch.rides", lambda *args: False)
    assert answers() == found
    assert not ridden


@pytest.mark.parametrize("asked", [None, 20, 300])
def test_a_step_that_others_wait_for_has_fewer_tokens(monkeypatch: pytest.MonkeyPatch, asked: int | None) -> None:
    seen: list[int] = []
    own = packed.Packed.__call__

    def watched(self: packed.Packed, pieces: Any) -> Any:
        seen.append(sum(len(piece.tokens) for piece in pieces))
        return own(self, pieces)

    def script(batch: Any, step: int, outputs: list[Output]) -> bool:
        if step in (0, 2):
            batch.add(first if step == 0 else long)
        seen.clear() if step == 2 else None
        return batch.idle and step > 2

    first, long = Request(1, (5,) * 20, max_new_tokens=30, ignore_eos=True), Request(2, (7,) * 400, max_new_tokens=2, ignore_eos=True)
    monkeypatch.setattr(packed.Packed, "__call__", watched)
    options = {} if asked is None else {"beside": asked}
    serve(single(), model(**EVEN), script, cache_tokens=6000, chunk=max(256, asked or 0), **options)
    assert seen[0] == (asked or riding.BESIDE)


def _over_shared_memory(group: Group, whole: Any) -> tuple[list[int], dict[int, Any]]:
    torch.set_num_threads(1)
    shm_context._SITES = 100  # call sites are forgotten again and again, in the middle of steps too
    seen, own = list[int](), riding.Riding.scores

    def watched(self: riding.Riding) -> torch.Tensor:
        seen.append(len(self.places.made))
        return own(self)

    riding.Riding.scores = watched  # type: ignore[method-assign]
    return seen, numbers(served(group, whole))


@pytest.mark.process
def test_ranks_that_share_memory() -> None:
    whole = model(**EVEN)
    expected = numbers(run_threads(served, 2, whole)[0])
    (seen, found), (others_seen, _) = launch.spawn(_over_shared_memory, 2, (whole,))
    assert found == expected
    assert seen == others_seen
    assert min(seen) >= 7 * whole.config.num_hidden_layers


def test_more_ranks_than_heads_agree() -> None:
    config = tiny.config("llama", vocab_size=257, intermediate_size=200)
    found = run_threads(rides, config.num_attention_heads + 1, tiny.whole(config, torch.bfloat16, attention="sdpa"))
    assert len(set(found)) == 1


def test_what_is_multiplied_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rides(single(), model(**EVEN))
    own = riding.Riding.job

    def once_too_few(self: riding.Riding, weight: int) -> tuple[int, int] | None:
        due = own(self, weight)
        return None if len(self.places.made) == 3 else due

    monkeypatch.setattr(riding.Riding, "job", once_too_few)
    monkeypatch.setattr(riding.Riding, "made", lambda self: None if self.places.due else self._go_on())
    assert not rides(single(), model(**EVEN))


def test_layers_in_another_order_go_by_themselves() -> None:
    """Attention and MLP side by side: a program has the products of one input together, modules come to the MLP's later."""
    config = transformers.GPTJConfig(vocab_size=257, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=512)
    assert not rides(single(), tiny.whole(config, torch.bfloat16, attention="sdpa"))
    assert not rides(single(), model(torch.float32, **EVEN))
