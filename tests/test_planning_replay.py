"""The replay accepts right plans, written by hand, and names what is wrong with others: it must be able to fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from colrow.partition import Partition, even, whole
from colrow.planning import replay
from colrow.planning.plan import Plan, Region, TensorPlan
from colrow.planning.replay import check
from colrow.planning.spread import ReplayError
from colrow.planning.trace import Trace, trace

from . import tiny
from .hand_plans import hand_plan


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {family: trace(tiny.config(family)) for family in tiny.FAMILIES}


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_right_plans_are_accepted(family: str, ranks: int, traces: dict[str, Trace]) -> None:
    report = check(traces[family], hand_plan(tiny.config(family), ranks))
    assert report.ok, str(report)
    assert set(report.gradients) == set(traces[family].parameters)


def tensor(plan: Plan, name: str, change: Callable[[TensorPlan], TensorPlan]) -> Plan:
    return replace(plan, tensors={**plan.tensors, name: change(plan.tensors[name])})


def without(plan: Plan, wrong: Callable[[Region], bool]) -> Plan:
    regions = tuple(r for r in plan.regions if not wrong(r))
    assert len(regions) == len(plan.regions) - 1
    return replace(plan, regions=regions)


def plan_of(family: str, ranks: int = 2) -> Plan:
    return hand_plan(tiny.config(family), ranks)


def test_a_missing_reduction_is_named(traces: dict[str, Trace]) -> None:
    wrong = without(plan_of("llama"), lambda r: r.op == "reduce" and r.module == "model.layers.1.mlp.down_proj")
    with pytest.raises(ReplayError, match=r"partial"):
        check(traces["llama"], wrong)


def test_a_second_reduction_is_named(traces: dict[str, Trace]) -> None:
    plan = plan_of("llama")
    extra = Region("model.layers.0.mlp", "output", "0", "reduce", ("B", "S", 72), "planted")
    with pytest.raises(ReplayError, match=r"no summands"):
        check(traces["llama"], replace(plan, regions=(*plan.regions, extra)))


def test_a_missing_f_shows_in_the_gradients_only(traces: dict[str, Trace]) -> None:
    wrong = without(plan_of("llama"), lambda r: r.op == "copy" and "layers.1.post_attention" in r.module)
    report = check(traces["llama"], wrong)
    assert max(report.outputs.values()) < 1e-12
    assert not report.ok
    assert report.gradients["model.layers.0.self_attn.q_proj.weight"] > 1e-3


def test_a_gradient_taken_for_whole_is_seen(traces: dict[str, Trace]) -> None:
    """The norm behind f, moved before it: its weight's gradient is then partial."""
    plan = plan_of("llama")
    moved = tuple(
        replace(r, place="input", arg="hidden_states") if r.op == "copy" and r.module.endswith("0.input_layernorm") else r
        for r in plan.regions
    )
    report = check(traces["llama"], replace(plan, regions=moved))
    wrong = [name for name, x in report.gradients.items() if x > 1e-9]
    assert wrong == ["model.layers.0.input_layernorm.weight"]
    marked = tensor(replace(plan, regions=moved), wrong[0], lambda e: replace(e, grad="partial"))
    assert check(traces["llama"], marked).ok


def test_heads_given_to_the_wrong_rank(traces: dict[str, Trace]) -> None:
    """Query heads in the other order: each rank has KV heads that none of its query heads use."""

    def turn(entry: TensorPlan) -> TensorPlan:
        return replace(entry, partition=Partition(entry.partition.dim, entry.partition.pieces[::-1]))

    wrong = plan_of("llama", 3)
    for part in ("weight",):
        wrong = tensor(wrong, f"model.layers.0.self_attn.q_proj.{part}", turn)
    with pytest.raises(ReplayError):
        check(traces["llama"], wrong)


def test_a_fused_tensor_cut_in_one_piece(traces: dict[str, Trace]) -> None:
    """GPT-2's q|k|v as one contiguous range a rank: shapes fit, attention does not."""
    plan = plan_of("gpt2", 3)
    for part, dim in (("weight", 1), ("bias", 0)):
        plan = tensor(plan, f"transformer.h.0.attn.c_attn.{part}", lambda e, d=dim: replace(e, partition=even(d, 162, 3)))
    with pytest.raises(ReplayError):
        check(traces["gpt2"], plan)


def test_copied_kv_heads_may_not_be_summed_over(traces: dict[str, Trace]) -> None:
    """o_proj cut so that two ranks hold the same input features: the sum would count them twice."""
    pieces = (((0, 40),), ((32, 72),))
    wrong = tensor(plan_of("llama"), "model.layers.0.self_attn.o_proj.weight", lambda e: replace(e, partition=Partition(1, pieces)))
    wrong = tensor(wrong, "model.layers.0.self_attn.q_proj.weight", lambda e: replace(e, partition=Partition(0, pieces)))
    with pytest.raises(ReplayError, match=r"o_proj.*held by 1 to 2 ranks"):
        check(traces["llama"], wrong)


def test_a_whole_tensor_beside_slices_is_no_partial_sum(traces: dict[str, Trace]) -> None:
    wrong = tensor(plan_of("llama"), "model.layers.0.mlp.down_proj.weight", lambda e: replace(e, partition=whole(2), role="whole"))
    report = check(traces["llama"], wrong)  # the ranks' input slices meet the whole matrix on the indices they share: still a partial sum
    assert report.outputs["logits"] < 1e-12


def test_an_unknown_module_is_named(traces: dict[str, Trace]) -> None:
    plan = plan_of("llama")
    lost = Region("model.layers.7.mlp", "output", "0", "reduce", ("B", "S", 72), "planted")
    with pytest.raises(ReplayError, match=r"layers\.7"):
        check(traces["llama"], replace(plan, regions=(*plan.regions, lost)))


def test_what_is_no_number_is_not_equal(traces: dict[str, Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's max() passes over NaN."""
    plan, start_values = plan_of("llama"), replay._start_values

    def start(t: Trace, draw: torch.Generator) -> dict[int, torch.Tensor]:
        values = start_values(t, draw)
        values[t.parameters["model.norm.weight"]].data[0] = float("nan")
        return values

    monkeypatch.setattr(replay, "_start_values", start)
    report = check(traces["llama"], plan)
    assert not report.ok
    assert report.outputs["logits"] == report.gradients["model.layers.0.mlp.up_proj.weight"] == float("inf")
