"""The map from query to KV heads: how it reaches transformers' attention, and what the cache holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from colrow.comm.group import Group
from colrow.errors import UserError
from colrow.parallel import attention
from colrow.parallel.attention import Heads, Run, group_size, mapped_attention, route, runs
from colrow.partition import Partition
from colrow.planning.plan import Attention

from .hand_plans import hand_plan, head_cut
from .splitting import STEPS, TOLERANCE, ask_split, case, decode, whole


@pytest.mark.parametrize(
    ("kv_of", "heads", "size"),
    [
        ((0, 0, 1, 1), 2, 2),
        ((0, 1, 2), 3, 1),
        ((0,) * 4, 1, 4),
        ((0, 0, 0, 1, 1), 2, None),
        ((1, 0), 2, None),
        ((0, 1, 0, 1), 2, None),
        ((), 0, 1),
    ],
)
def test_group_size(kv_of: tuple[int, ...], heads: int, size: int | None) -> None:
    assert group_size(kv_of, heads) == size


def test_cut_of_nine_and_three_heads() -> None:
    query, kv, _ = head_cut(9, 3, 2)
    assert (query.pieces, kv.pieces) == ((((0, 5),), ((5, 9),)), (((0, 2),), ((1, 3),)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_cache_holds_the_ranks_own_heads(ranks: int) -> None:
    at = whole(case("llama"))
    plan = hand_plan(at.config, ranks)

    def task(group: Group, model: Any) -> list[torch.Size]:
        out = model(at.ids, use_cache=True)
        cache = out["cache"] if "cache" in out else out["past_key_values"]
        return [layer.keys.shape for layer in cache.layers]

    for rank, shapes in enumerate(ask_split(at, plan, task)):
        assert shapes == [(2, plan.attention[0].kv.local_size(rank), 12, 8)] * 2


def test_regular_ranks_keep_the_models_own_function() -> None:
    """9 and 3 heads on 4 ranks: 3, 2, 2 and 2 query heads. Only a rank whose heads share KV heads unequally goes the long way."""
    at = whole(case("llama"))
    plan = hand_plan(at.config, 4)

    def task(group: Group, model: Any) -> tuple[Any, ...]:
        module = model.model.layers[0].self_attn
        return getattr(module, "colrow_heads", None), module.num_key_value_groups, module.config._attn_implementation

    assert [plan.attention[0].local_map(r) for r in range(4)] == [(0, 0, 0), (0, 0), (0, 1), (0, 0)]
    assert ask_split(at, plan, task) == [(None, 3, "eager"), (None, 2, "eager"), (None, 1, "eager"), (None, 2, "eager")]
    assert ask_split(at, hand_plan(at.config, 2), task) == [
        (((0, 0, 0, 1, 1), 2), 1, "colrow"),
        (((0, 1, 1, 1), 2), 1, "colrow"),
    ]
    assert at.config._attn_implementation != "colrow", "the model's own config is left alone"


@pytest.mark.parametrize(("first", "then"), [("eager", "sdpa"), ("sdpa", "eager")])
def test_the_implementation_can_be_changed_after_the_split(first: str, then: str) -> None:
    at, other = whole(case("llama"), first), whole(case("llama"), then)

    def task(group: Group, model: Any) -> torch.Tensor:
        model.set_attn_implementation(then)
        with torch.no_grad():
            return decode(model, at.ids)[0]

    for found in ask_split(at, hand_plan(at.config, 2), task):
        assert (found - other.answers.tensors["cached logits"]).abs().max() <= TOLERANCE


def test_padding_on_the_left_is_masked() -> None:
    at = whole(case("llama"), "sdpa")
    mask = torch.ones_like(at.ids)
    mask[0, :5] = 0
    with torch.no_grad():
        expected = at.model(at.ids, attention_mask=mask).logits[:, 5:]

    def task(group: Group, model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(at.ids, attention_mask=mask).logits[:, 5:]

    for found in ask_split(at, hand_plan(at.config, 2), task):
        assert (found - expected).abs().max() <= TOLERANCE


def test_a_capped_eager_function_runs_under_the_map() -> None:
    """A family's own eager function, with things that sdpa does not know, is found beside the attention class."""
    from transformers import Gemma2Config
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, eager_attention_forward

    config = Gemma2Config(hidden_size=40, num_attention_heads=5, num_key_value_heads=2, head_dim=8, attn_logit_softcapping=2.0)
    config._attn_implementation = "eager"
    module = Gemma2Attention(config, 0)
    kv_of = (0, 0, 0, 1, 1)
    attention.apply(module, Attention("attn", Partition(0, (((0, 5),),)), Partition(0, (((0, 2),),)), kv_of, 8, "by hand"), 0)
    q, k, v = torch.randn(1, 5, 4, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    found, _ = mapped_attention(module, q, k, v, None, scaling=1.0, softcap=2.0)
    plain = nn.Module()
    plain.num_key_value_groups, plain.training = 1, True
    expected, _ = eager_attention_forward(plain, q, k[:, kv_of], v[:, kv_of], None, scaling=1.0, softcap=2.0)
    uncapped, _ = eager_attention_forward(plain, q, k[:, kv_of], v[:, kv_of], None, scaling=1.0)
    assert torch.equal(found, expected)
    assert (found - uncapped).abs().max() > 1e-3


def test_steps_go_past_the_prompt() -> None:
    assert whole(case("llama")).answers.tokens.shape == (2, STEPS)


MAPS = [(0, 0, 0, 1, 1), (0, 1, 1, 1), (1, 0, 0), (0, 1, 0, 2, 2), (0, 0, 1, 1, 2), (2, 1, 0, 0, 0, 0)]


@pytest.mark.parametrize("kv_of", MAPS, ids=str)
@pytest.mark.parametrize("mask", [None, "for all heads", "for each head"])
@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_any_map_equals_copied_heads(implementation: str, queries: int, mask: str | None, kv_of: tuple[int, ...]) -> None:
    """Runs of regular heads (sdpa) and lined-up heads (eager) beside attention with a KV head for each query head."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config._attn_implementation = implementation
    module = LlamaAttention(config, 0)
    heads = len(kv_of)
    q, k, v = (torch.randn(2, n, t, 8, dtype=torch.float64, requires_grad=True) for n, t in ((heads, queries), (3, 6), (3, 6)))
    bias = None if mask is None else torch.randn(2, 1 if mask == "for all heads" else heads, queries, 6, dtype=torch.float64)
    if bias is None and implementation == "eager" and queries > 1:
        bias = torch.zeros(queries, 6).masked_fill(torch.ones(queries, 6).triu(1).bool(), float("-inf")).double()[None, None]
    module.colrow_heads = Heads(kv_of, 3)
    route(module)
    found, _ = mapped_attention(module, q, k, v, bias, scaling=0.3)
    expected = F.scaled_dot_product_attention(q, k[:, kv_of], v[:, kv_of], bias, scale=0.3, is_causal=bias is None and queries > 1)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-6, atol=1e-6)
    weight = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight.transpose(1, 2)).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_heads_that_are_not_the_plans_are_refused() -> None:
    """An attention class that repeats K and V itself before it calls the interface."""
    module = LlamaAttention(LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2), 0)
    module.colrow_heads = Heads((0, 0, 1), 2)
    with pytest.raises(UserError, match="3 query and 3 KV heads"):
        mapped_attention(module, *(torch.zeros(1, 3, 4, 8) for _ in range(3)), None)


def test_runs_are_as_few_as_can_be() -> None:
    assert runs((0, 0, 1, 1, 2, 2)) == (Run(0, 0, 2, 3),)
    assert runs((1, 0, 0)) == (Run(0, 1, 1, 1), Run(1, 0, 2, 1))
    assert runs(()) == ()
