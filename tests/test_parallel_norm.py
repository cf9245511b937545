"""Norms over a cut axis: the statistic of all ranks, in every way of writing one (reports O-13 and O-20)."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Mamba2Config, Olmo2Config, OlmoeConfig, PreTrainedConfig

from colrow.comm.group import Group
from colrow.comm.launch import spawn
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_gradients
from colrow.planning.derive import derive
from colrow.proof.counts import count_items, counted, predicted
from colrow.proof.exercise import ask, questions
from colrow.proof.gate import prove
from colrow.proof.precision import Float64
from colrow.proof.shrink import Small

from . import tiny
from .families import EVEN, EXPERTS
from .small_blocks import H, I, Norm, derived, model_of
from .splitting import TOLERANCE, decode, logits_off, next_token_loss

SIZES: dict[str, Any] = {**tiny.TOKENS, "hidden_size": 64, "intermediate_size": 51, "num_hidden_layers": 2, "max_position_embeddings": 64}


def olmo(heads: int = 4, kv: int = 4) -> PreTrainedConfig:
    return Olmo2Config(**SIZES, num_attention_heads=heads, num_key_value_heads=kv)


def mamba(groups: int) -> PreTrainedConfig:
    sizes = {"hidden_size": 32, "expand": 2, "head_dim": 8, "num_heads": 8, "state_size": 8, "num_hidden_layers": 2}
    return Mamba2Config(**tiny.TOKENS, **sizes, n_groups=groups)


def scaled(config: PreTrainedConfig) -> Any:
    """The whole model, the first head's query and key rows ten times as large: the statistics of the ranks differ a lot."""
    model: Any = tiny.whole(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight[:16] *= 10
    return model


def trained(model: Any, ids: torch.Tensor) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), Float64())})
    with Float64():
        next_token_loss(model.train()(ids).logits, ids).backward()


@pytest.mark.parametrize(("ranks", "kv"), [(2, 4), (4, 4), (3, 4), (3, 2), (4, 2)])
def test_o13_query_norm_over_all_heads(ranks: int, kv: int) -> None:
    """Logits, cached steps, and every gradient with the blocks computed again; with KV heads that lie on two ranks and count once."""
    config = olmo(kv=kv)
    whole, ids, plan = scaled(config), tiny.ids(config), derive(config, ranks)
    assert plan.attention
    assert plan.tensor("model.layers.0.self_attn.q_norm.weight").role == "split"
    copies = [copy.deepcopy(whole) for _ in range(ranks)]
    with torch.no_grad(), Float64():
        logits, steps = whole(ids).logits, decode(whole, ids)[0]
    trained(whole, ids)

    def on_a_rank(group: Group) -> None:
        model: Any = parallelize(copies[group.rank], plan, group)
        with torch.no_grad(), Float64():
            assert (model(ids).logits - logits).abs().max() <= TOLERANCE
            assert (decode(model, ids)[0] - steps).abs().max() <= TOLERANCE
        trained(model, ids)
        found = whole_gradients(model)
        for name, p in whole.named_parameters():
            assert p.grad is not None
            assert (found[name] - p.grad).abs().max() <= TOLERANCE, name

    run_threads(on_a_rank, ranks)


@pytest.mark.parametrize(("groups", "ranks"), [(1, 2), (2, 2), (4, 2), (4, 3), (4, 4), (1, 4)])
def test_o20_the_gated_norm_of_mamba2(groups: int, ranks: int) -> None:
    """With fewer groups than ranks the norm's groups lie across them."""
    config = mamba(groups)
    plan = derive(config, ranks)
    assert not plan.tensor("backbone.layers.0.mixer.in_proj.weight").partition.is_whole
    assert any(r.op == "mean" for r in plan.regions) == (groups < ranks)
    assert prove(Small(config, plan, ())).ok


def test_in_16_bits_the_statistic_is_added_in_32_and_counted_so() -> None:
    config = OlmoeConfig(**EVEN, num_experts=EXPERTS[1]["num_experts"], num_experts_per_tok=2)
    plan, whole = derive(config, 2), tiny.whole(config, torch.bfloat16)
    whole.set_experts_implementation("eager")
    asked = questions(whole, steps=0, train=False)
    copies = [copy.deepcopy(whole) for _ in range(2)]

    def on_a_rank(group: Group) -> list[str]:
        model = parallelize(copies[group.rank], plan, group)
        group.counters.reset()
        ask(model, asked, phase=lambda name: setattr(group.counters, "phase", name))
        wanted = predicted(plan, asked, group, 2)
        assert any(name.endswith("q_norm.mean") for _, _, name in wanted)
        return [item.detail for item in count_items(wanted, counted(group), group) if not item.ok]

    assert run_threads(on_a_rank, 2) == [[], []]


class Fused(nn.Module):
    """A norm of torch's own over the features of the MLP."""

    norm_class: type[nn.Module] = nn.LayerNorm

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.inner, self.down = Norm(), nn.Linear(H, I), self.norm_class(I), nn.Linear(I, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inner(self.up(self.norm(x))))


class Called(Fused):
    """The function, in the block's own forward, without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.layer_norm(self.up(self.norm(x)), (I,)))


class Sparse(Fused):
    """Of the MLP's features those far above the others (Gemma 3n): what is cut off follows from mean and standard deviation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(self.norm(x))
        return x + self.down(torch.relu(up - (up.mean(-1, keepdim=True) + 0.3 * self.spread(up).unsqueeze(-1))))

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        return torch.std(x, dim=-1, unbiased=False)


class Varying(Sparse):
    def spread(self, x: torch.Tensor) -> torch.Tensor:
        return x.var(-1)


BLOCKS = {
    "LayerNorm": Fused,
    "RMSNorm": type("FusedRMS", (Fused,), {"norm_class": nn.RMSNorm}),
    "layer_norm": Called,
    "std": Sparse,
    "var": Varying,
}
MEANS = {"LayerNorm": 2, "RMSNorm": 1, "layer_norm": 2, "std": 3, "var": 3}


@pytest.mark.parametrize("name", BLOCKS)
def test_fused_norms_are_taken_apart(name: str) -> None:
    """3 ranks have 20 of 60 features; 7 ranks 9 or 8. Forward two small all-reduces for a LayerNorm or a deviation, one for an RMSNorm."""
    for ranks in (3, 7):
        _, plan = derived(BLOCKS[name], ranks)
        means = [r.name for r in plan.regions if r.op == "mean" and ".0." in f"{r.name}."]
        assert len(means) == MEANS[name]
        whole = model_of(BLOCKS[name], "cpu").double()
        tiny.add_noise(whole)
        ids = torch.arange(14).view(2, 7)
        copies = [copy.deepcopy(whole) for _ in range(ranks)]
        whole(ids)["logits"].square().sum().backward()

        def on_a_rank(group: Group) -> dict[str, torch.Tensor]:
            model = parallelize(copies[group.rank], plan, group)  # noqa: B023
            model(ids)["logits"].square().sum().backward()  # noqa: B023
            return whole_gradients(model)

        for found in run_threads(on_a_rank, ranks):
            for parameter, p in whole.named_parameters():
                if p.grad is not None:
                    torch.testing.assert_close(found[parameter], p.grad, rtol=1e-10, atol=1e-10)


def test_a_forward_that_takes_no_mean_is_an_error() -> None:
    """A kernel in place of the norm's own forward would normalise by the rank's own statistic."""
    config = olmo()
    copies = [tiny.whole(config) for _ in range(2)]

    def on_a_rank(group: Group) -> None:
        for layer in copies[group.rank].model.layers:
            cls = type(layer.self_attn.q_norm)
            layer.self_attn.q_norm.__class__ = type("Kernel", (cls,), {"forward": lambda self, x: x * self.weight})
        parallelize(copies[group.rank], derive(config, 2), group)(tiny.ids(config))

    with pytest.raises(UserError, match="does not work as the plan was derived"):
        run_threads(on_a_rank, 2)


def on_process(group: Group) -> float:
    return logits_off(scaled(olmo()), group)


@pytest.mark.process
def test_in_processes() -> None:
    assert max(spawn(on_process, 2)) <= TOLERANCE


def test_a_group_of_any_width_is_dealt_by_heads() -> None:
    """O-20, at the sizes of a real model: the width that a norm divides by becomes the rank's own, whatever else would fit."""
    config = Mamba2Config(hidden_size=1024, num_heads=32, n_groups=1, num_hidden_layers=1)
    edits = {e.attribute: e.values for e in derive(config, 3).edits}
    assert edits["num_heads"] == (11, 11, 10)
    assert edits["group_size"] == (704, 704, 640)
