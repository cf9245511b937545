"""What a prompt's last layers compute for its last token alone: nothing changes by it, and where something would, they compute it all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine import packed, tail
from colrow.engine.engine import Engine
from colrow.engine.forward import Forward
from colrow.kernels import many
from colrow.parallel.build import parallelize
from colrow.parallel.int8 import quantize_layers
from colrow.planning.derive import derive

from . import tiny

needed = pytest.mark.skipif(not many.helps(), reason="this processor does not multiply pairs of bfloat16, or has AMX")
pytestmark = [needed, pytest.mark.usefixtures("threads")]

IDS = torch.tensor([[(5 * at + row) % 101 for at in range(40)] for row in range(3)])
MASK = torch.ones_like(IDS)
MASK[1, :7] = 0


def whole(family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    sizes = {} if family == "gpt2" else {"intermediate_size": 204}
    return tiny.whole(tiny.config(family, **sizes), dtype, attention="sdpa")


def results(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, every: bool = False) -> list[torch.Tensor]:
    scores, past = Forward(model)(ids, mask, None, every)
    return [scores, *(x for layer in past.layers for x in (layer.keys, layer.values))]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen2"])
def test_no_bit_changes(family: str, size: int, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, own = whole(family), list[int](), many.product

    def watched(x: torch.Tensor, *args: Any, **more: Any) -> Any:
        made = own(x, *args, **more)
        rows.extend([] if made is None else [x.numel() // x.shape[-1]])
        return made

    monkeypatch.setattr(many, "product", watched)

    def rank(group: Group) -> tuple[int, list[int], bool]:
        part: Any = copy.deepcopy(model)
        part = parallelize(part, derive(model.config, size), group) if size > 1 else part
        if int8:
            quantize_layers(part)
        engine = Engine(part, group)
        cases = [(IDS, MASK), (IDS[:1], None), (IDS[:, :16], None), (IDS[:, :15], None)]
        before = [results(part, *case) for case in cases]
        engine.decoder.prepare()
        marked = sum(module.colrow_tail for module in part.modules())
        rows.clear()
        after = [results(part, *case) for case in cases]
        seen = list(rows)
        return marked, seen, all(map(equal, before, after)) and equal(results(part, *cases[0], every=True)[1:], after[0][1:])

    for marked, seen, same in run_threads(rank, size) if size > 1 else [rank(single())]:
        assert marked == 4, "o, gate, up and down of the last block"
        assert same
        if size == 1:
            assert seen.count(3) == 8 + 3 * int8, "of three rows, twice; and heads with int8 weights"
            assert seen.count(1) == 4 + int8


@pytest.mark.parametrize("wanted", [[39], [12], [12, 39]])
def test_scores_of_chosen_tokens(wanted: list[int]) -> None:
    model = whole()
    forward, positions = Forward(model), torch.arange(40)[None]
    engine = Engine(model, single())
    before = forward.rows(IDS[:1], positions, None, torch.tensor(wanted))
    engine.decoder.prepare()
    assert any(module.colrow_tail for module in model.modules())
    assert torch.equal(before, forward.rows(IDS[:1], positions, None, torch.tensor(wanted)))


def test_all_tokens_scores_are_all_computed() -> None:
    model = whole()
    Engine(model, single()).decoder.prepare()
    marked = results(model, IDS, None, every=True)
    for module in model.modules():
        module.colrow_tail = False
    assert equal(marked, results(model, IDS, None, every=True))


class _OfAll(torch.nn.Module):
    """Mixes tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(1, keepdim=True)


class _Counts(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 16, -1)


@pytest.mark.parametrize("what", [_OfAll, _Counts])
def test_a_model_that_needs_all_tokens_computes_them(what: Any) -> None:
    model = whole()
    layer = model.model.layers[1].mlp.down_proj
    model.model.layers[1].mlp.down_proj = torch.nn.Sequential(layer, what())
    Engine(model, single())
    assert tail.find(model, single()) == 0
    assert not any(module.colrow_tail for module in model.modules())


def test_layers_that_other_blocks_use_are_none() -> None:
    model = whole()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    engine = Engine(model, single())
    before = results(model, IDS, None)
    engine.decoder.prepare()
    assert sum(module.colrow_tail for module in model.modules()) == 1, "o_proj"
    assert equal(before, results(model, IDS, None))


def test_ranks_of_which_one_has_no_such_products_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = whole(), tail._able
    monkeypatch.setattr(tail, "_able", lambda model, group: own(model, group) and group.rank == 0)

    def rank(group: Group) -> int:
        part: Any = parallelize(copy.deepcopy(model), derive(model.config, 2), group)
        Engine(part, group)
        return tail.find(part, group)

    assert run_threads(rank, 2) == [0, 0]


class _Full(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no memory left")


@pytest.mark.parametrize("asked", [tail.find, lambda part, group: packed.packable(Forward(part), group, 1024)])
def test_a_rank_without_memory_says_so(asked: Any) -> None:
    """The others wait for it in the model: it must not go on to what they do not come to."""
    model = whole()

    def rank(group: Group) -> Any:
        part: Any = parallelize(copy.deepcopy(model), derive(model.config, 2), group)
        Engine(part, group)
        if group.rank == 1:
            part.model.layers[1].mlp = _Full()
        return asked(part, group)

    with pytest.raises(MemoryError, match="no memory left"):
        run_threads(rank, 2)


def test_where_it_does_not_apply() -> None:
    for model in (whole(dtype=torch.float32), tiny.whole(tiny.config("llama"), torch.bfloat16)):  # eager attention is not heard
        Engine(model, single())
        assert tail.find(model, single()) == 0
    assert tail.find(whole("gpt2"), single()) == 0, "its layers are no nn.Linear"
