"""Attention of prompts in blocks of queries: about as close to the exact values as the fused kernel, and only where it may."""

from __future__ import annotations

import copy
import runpy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.engine import Engine
from colrow.engine.forward import Forward
from colrow.kernels import prompt
from colrow.parallel import prompt_attention
from colrow.parallel.attention import Heads, mapped_attention
from colrow.parallel.build import parallelize
from colrow.planning.derive import derive

from . import tiny


def module(groups: int = 1, causal: bool = True, **more: Any) -> Any:
    return SimpleNamespace(num_key_value_groups=groups, is_causal=causal, **more)


def qkv(batch: int, heads: int, kv_heads: int, queries: int, keys: int, width: int, width_v: int = 0) -> tuple[torch.Tensor, ...]:
    """As transformers hands them over: the queries are a view of [B, S, H, d]. Large enough that the softmax is far from uniform."""
    draw = torch.Generator().manual_seed(keys)
    shapes = ((batch, queries, heads, width), (batch, keys, kv_heads, width), (batch, keys, kv_heads, width_v or width))
    return tuple((2 * torch.randn(shape, generator=draw)).bfloat16().transpose(1, 2) for shape in shapes)


def by_blocks(monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What the blocks give; an error where they leave it to the fused kernel."""
    monkeypatch.setattr(prompt_attention, "sdpa_attention_forward", None)
    return prompt_attention.prompt_attention(*args, **kwargs)[0]


CASES = {  # heads, KV heads, queries, keys, width, width of values, what is seen
    "causal": (6, 2, 77, 77, 16, 16, "causal"),
    "a head each": (5, 5, 33, 33, 24, 24, "causal"),
    "other width of values": (4, 4, 65, 65, 24, 16, "causal"),
    "two queries": (4, 1, 2, 2, 8, 8, "causal"),
    "a later piece": (6, 2, 50, 131, 16, 16, "mask"),
    "a window": (6, 3, 70, 70, 16, 16, "window"),
    "everything": (4, 2, 45, 61, 16, 16, "all"),
    "many blocks": (32, 4, 300, 300, 16, 16, "causal"),
    "one KV head": (50, 1, 70, 70, 16, 130, "causal"),
    "odd widths": (6, 2, 67, 67, 15, 9, "causal"),
}


@pytest.fixture(params=["C", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who computes the blocks."""
    if request.param == "torch":
        monkeypatch.setattr(prompt, "attend", lambda *_: None)
    elif prompt.library() is None:
        pytest.skip("this processor does not multiply pairs of bfloat16")
    return str(request.param)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch", [1, 2])
@torch.inference_mode()
def test_as_close_to_the_exact_values_as_the_fused_kernel(name: str, batch: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, kv_heads, queries, keys, width, width_v, sees = CASES[name]
    q, k, v = qkv(batch, heads, kv_heads, queries, keys, width, width_v)
    positions = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None]  # how far behind a key is
    mask = {"mask": positions >= 0, "window": (positions >= 0) & (positions < 20)}.get(sees)
    mask = None if mask is None else mask[None, None].expand(batch, 1, -1, -1).clone()
    if mask is not None and batch == 2:
        mask[1, :, :, :5] &= positions[None, :, :5] == 0  # a padded row: each position sees itself at least
    asked: dict[str, Any] = {"scaling": 0.2, "is_causal": sees != "all"}
    exact = sdpa_attention_forward(module(heads // kv_heads), q.double(), k.double(), v.double(), mask, **asked)[0]
    fused = sdpa_attention_forward(module(heads // kv_heads), q, k, v, mask, **asked)[0]
    ours = by_blocks(monkeypatch, module(heads // kv_heads), q, k, v, mask, **asked)
    assert ours.shape == exact.shape
    assert ours.is_contiguous()
    error, allowed = (ours - exact).abs(), (fused - exact).abs()
    assert error.max() <= 1.05 * 2**-8 * v.abs().max()  # weights are rounded to 2^-9 of themselves, and so is their sum of values
    assert error.mean() <= 2 * allowed.mean()


@torch.inference_mode()
def test_bits_depend_neither_on_threads_nor_on_later_positions(way: str) -> None:
    q, k, v = qkv(1, 8, 2, 200, 200, 16)
    whole = prompt_attention.prompt_attention(module(4), q, k, v)[0]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 2)
        assert torch.equal(prompt_attention.prompt_attention(module(4), q, k, v)[0], whole)
    finally:
        torch.set_num_threads(threads)
    if way == "C":
        part = prompt_attention.prompt_attention(module(4), q[:, :, :150], k[:, :, :150], v[:, :, :150])[0]
        assert torch.equal(part, whole[:, :150])


def test_maps_of_heads_that_are_not_regular(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt_attention.install(torch.nn.Identity())
    q, k, v = qkv(1, 5, 2, 40, 40, 16)
    config = SimpleNamespace(_attn_implementation="colrow", unsplit=SimpleNamespace(_attn_implementation="sdpa"))
    mapped = module(1, colrow_heads=Heads((0, 0, 0, 1, 1), 2), config=config, colrow_prompts=True)
    index = torch.tensor([0, 0, 0, 1, 1])
    exact = sdpa_attention_forward(module(), q.double(), k.double()[:, index], v.double()[:, index], None)[0]
    monkeypatch.setattr(prompt_attention, "sdpa_attention_forward", None)
    torch.testing.assert_close(mapped_attention(mapped, q, k, v)[0].double(), exact, rtol=0, atol=0.05)


def test_all_else_is_the_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def fused(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setattr(prompt_attention, "sdpa_attention_forward", fused)
    q, k, v = qkv(1, 4, 2, 9, 9, 16)
    blind = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    blind[..., 0, :] = False
    prompt_attention.prompt_attention(module(2), q, k, v)
    assert not called
    others: list[tuple[Any, ...]] = [
        (q[:, :, :1], k, v),
        (q.float(), k.float(), v.float()),
        (q.clone().requires_grad_(), k, v),
        (q, k.clone().requires_grad_(), v),  # of the first layer, where adapters are on keys or values alone
        (q, k, v.clone().requires_grad_()),
        (q, k, v, blind),
        (q, k, v, torch.zeros(1, 1, 9, 9, dtype=torch.bfloat16)),
        (q[:, :, :5], k, v),  # a static cache that is not full
    ]
    for number, (query, key, value, *mask) in enumerate(others, 1):
        mine = prompt_attention.prompt_attention(module(2), query, key, value, *mask)[0]
        assert len(called) == number
        assert torch.equal(mine, sdpa_attention_forward(module(2), query, key, value, *(mask or [None]))[0])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_engine_computes_prompts_so(family: str) -> None:
    model = tiny.whole(tiny.config(family), torch.bfloat16, attention="sdpa")
    ids = torch.tensor([[(7 * at + 1) % 101 for at in range(40)]])
    before = Forward(model)(ids, None, None)[0]
    with torch.no_grad():
        exact = model.double()(ids).logits[:, -1]
    model = tiny.whole(tiny.config(family), torch.bfloat16, attention="sdpa")
    Engine(model, single())
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    after = Forward(model)(ids, None, None)[0]
    assert not torch.equal(before, after)  # else the blocks were not asked
    assert (after - exact).abs().max() <= 1.5 * (before - exact).abs().max() + 0.01 * exact.abs().max()


def test_eager_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.whole(tiny.config("llama"), torch.bfloat16, attention="eager")
    Engine(model, single())
    monkeypatch.setattr(prompt_attention, "prompt_attention", None)
    Forward(model)(torch.tensor([[1, 2, 3]]), None, None)


def test_an_attention_that_a_user_has_registered_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def own(module: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(type(module).__name__)
        return sdpa_attention_forward(module, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", own)
    with warnings.catch_warnings(action="ignore"):  # that it was imported before
        runpy.run_module("colrow.parallel.prompt_attention")
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own, "importing takes nothing over"
    whole = tiny.whole(tiny.config("llama"), torch.float64, attention="sdpa")
    ids = [1, 2, 3, 4]
    expected = Forward(whole)(torch.tensor([ids]), None, None)[0]
    called.clear()

    def rank(group: Group) -> torch.Tensor:
        part: Any = parallelize(copy.deepcopy(whole), derive(whole.config, 2), group)
        return Forward(Engine(part, group).model)(torch.tensor([ids]), None, None)[0]

    found = run_threads(rank, 2)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-10)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    assert called


def test_transformers_own_attention_is_taken_over_for_marked_modules_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    asked: list[Any] = []

    def ours(module: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(module)

    monkeypatch.setattr(prompt_attention, "prompt_attention", ours)
    marked, other = torch.nn.Identity(), torch.nn.Identity()
    prompt_attention.install(marked)
    ALL_ATTENTION_FUNCTIONS["sdpa"](marked, *qkv(1, 2, 2, 3, 3, 8), None)
    out, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](other, *qkv(1, 2, 2, 3, 3, 8), None)
    assert asked == [marked]
    assert out.shape == (1, 3, 2, 8)
