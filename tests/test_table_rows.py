"""Single rows of a cut table, read by code outside of the embedding: what pads, what stands in the place of pictures (Gemma 4)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from bench.zoo import sizes
from colrow.comm import regions
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_gradients
from colrow.planning import cost
from colrow.planning.choose import choose
from colrow.planning.derive import derive
from colrow.planning.graph import Graph
from colrow.planning.plan import Plan
from colrow.planning.record import record
from colrow.planning.replay import check
from colrow.planning.words import plan_of
from colrow.proof.gate import GateRefused, prove
from colrow.proof.shrink import Small

from . import tiny
from .small_blocks import Feed, H, Norm, V


class Reads(PreTrainedModel):
    """Rows 7 and the last but one of the table: the one in the place of a token, the other through an MLP of its own (`split` work)."""

    config_class = PreTrainedConfig
    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig(vocab_size=V))
        self.embed, self.norm, self.head = nn.Embedding(V, H), Norm(), nn.Linear(H, V, bias=False)
        self.inner, self.feed, self.aside = Norm(), Feed(), Feed()
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        x = torch.where((input_ids == 5)[..., None], self.embed.weight[7, :].view(1, 1, -1), x)
        x = x + self.aside(self.embed.weight[-2])
        return {"logits": self.head(self.norm(x + self.feed(self.inner(x))))}


class Elsewhere(Reads):
    """The table is no embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(H, V, bias=False)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids) + self.scores.weight[3]
        return {"logits": self.scores(self.norm(x + self.feed(self.inner(x))))}


def planned(kind: type[Reads], ranks: int) -> Plan:
    with torch.device("meta"):
        trace = record(kind().eval(), bypasses=True)
    plan = plan_of(choose(Graph(trace), ranks), "", ())
    assert check(trace, plan).ok
    return plan


def compared(plan: Plan) -> float:
    """The largest difference of outputs and gradients from the whole model."""
    whole: Any = Reads().double().eval()
    tiny.add_noise(whole)
    ids = torch.tensor([[5, 1, 5, V - 1, 99, 0, 7]])
    copies = [copy.deepcopy(whole) for _ in range(plan.ranks)]
    expected = whole(ids)["logits"]
    expected.square().sum().backward()

    def on_a_rank(group: Group) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        model = parallelize(copies[group.rank], plan, group)
        group.counters.reset()
        logits = model(ids)["logits"]
        logits.square().sum().backward()
        counted = sum(t.calls for (_, op, name), t in group.counters.sites.items() if op == "all_reduce" and ".row." in name)
        return logits.detach(), whole_gradients(model), counted

    worst = 0.0
    for logits, gradients, counted in run_threads(on_a_rank, plan.ranks):
        assert counted == sum(p.calls for p in cost.predict(plan, 1, 7, "prefill", 8) if ".row." in p.name) == 2
        worst = max(worst, (logits - expected).abs().max().item())
        worst = max(worst, *((gradients[name] - p.grad).abs().max().item() for name, p in whole.named_parameters()))
    return worst


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_row_is_read_from_the_rank_that_has_it(ranks: int) -> None:
    plan = planned(Reads, ranks)
    assert plan.tensor("embed.weight").role == "vocab"
    (region,) = (r for r in plan.regions if r.op == "row")
    assert (region.module, region.arg, region.calls, region.shape) == ("", "embed.weight", 2, (H,))
    assert Plan.from_json(plan.to_json()) == plan
    assert compared(plan) < 1e-10


def test_a_row_that_is_not_added_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, real = planned(Reads, 3), regions.reduce_from
    monkeypatch.setattr(regions, "reduce_from", lambda x, group, name, **more: x if ".row." in name else real(x, group, name, **more))
    with pytest.raises(AssertionError):  # the count, before the numbers
        compared(plan)


def test_rows_of_other_tensors_keep_them_whole() -> None:
    plan = planned(Elsewhere, 2)
    assert plan.tensor("scores.weight").partition.is_whole
    assert "looks up along it outside an embedding module" in " ".join(note.text for note in plan.notes)


def test_a_plan_whose_row_is_of_no_cut_table_is_refused() -> None:
    plan = planned(Reads, 2)
    wrong = tuple(replace(r, arg="feed.up.weight") if r.op == "row" else r for r in plan.regions)
    with pytest.raises(UserError, match="a table that is cut along its rows"):
        run_threads(lambda group: parallelize(Reads(), replace(plan, regions=wrong), group), 2)


def reading_llama(monkeypatch: pytest.MonkeyPatch, inside: bool) -> PreTrainedConfig:
    """A Llama that puts row 7 in the place of tokens, or (`inside`) adds it to the stream in every block."""
    model, layer = LlamaModel.forward, LlamaDecoderLayer.forward

    def reads(self: Any, input_ids: torch.Tensor, inputs_embeds: None = None, **rest: Any) -> Any:
        row, x = self.embed_tokens.weight[7, :], self.embed_tokens(input_ids)
        if inside:
            return model(self, inputs_embeds=x, row=row, **rest)
        return model(self, inputs_embeds=torch.where((input_ids == 5)[..., None], row, x), **rest)

    def adds(self: Any, hidden_states: torch.Tensor, *args: Any, row: torch.Tensor | None = None, **rest: Any) -> Any:
        return layer(self, hidden_states if row is None else hidden_states + row, *args, **rest)

    monkeypatch.setattr(LlamaModel, "forward", reads)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", adds)
    return tiny.config("llama")


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_with_a_cache_and_with_the_sequence_cut(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate asks for cached decoding, every gradient and every collective."""
    config = reading_llama(monkeypatch, inside=False)
    plan = derive(config, ranks)
    assert [r.name for r in plan.regions if r.op == "row"] == ["model.row.model.embed_tokens.weight"]
    assert prove(Small(config, plan, ()), "again").of("decoding")


def test_a_row_that_meets_slices_of_the_sequence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the part of its gradient that comes from its own positions, and nothing adds them up."""
    config = reading_llama(monkeypatch, inside=True)
    plan = derive(config, 2)
    assert prove(Small(config, plan, ())).ok
    with pytest.raises(GateRefused, match=r"the gradient of model.embed_tokens.weight"):
        prove(Small(config, plan, ()), "keep")


def test_gemma_4_with_the_sequence_cut() -> None:
    """What stands before its first block is of a stream that is not cut yet: the f of the projection for all layers, and the row."""
    config = sizes.config("gemma4")
    plan = derive(config, 2)
    assert any(r.op == "row" for r in plan.regions)
    assert prove(Small(config, plan, ()), "again").of("decoding")
