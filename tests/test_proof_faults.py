"""The proofs can fail: with each fault planted, the gate refuses, verify's comparison is red, and the right place is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from colrow.checkpoint import model_dir
from colrow.comm import collectives
from colrow.comm.group import Group
from colrow.parallel import build
from colrow.planning import cost
from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.proof import gate, gate_cache, verify

from . import faults, tiny

LAYER = "model.layers.1."
PLANTED = {
    # fault and call site, and what the message must name
    ("drop g", f"{LAYER}self_attn"): f"the output of {LAYER}self_attn.o_proj",
    ("drop g", f"{LAYER}mlp"): f"the output of {LAYER}mlp.down_proj",
    ("drop g", "embed"): "the output of model.embed_tokens",
    ("bias on every rank", ""): "the output of model.layers.0.self_attn.o_proj",
    ("rotated head map", ""): "the input of model.layers.0.self_attn.o_proj",
    (
        "drop f",
        f"{LAYER}input_layernorm",
    ): f"the forward pass is right; first on the way back, the gradient of {LAYER}input_layernorm.weight",
    ("drop f", "model.norm"): "the forward pass is right; first on the way back, the gradient of model.norm.weight",
    ("drop the sum of copied heads", ""): f"the gradient of {LAYER}self_attn.v_proj.bias",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.whole(tiny.config("llama-bias"), torch.float32).save_pretrained(folder)
    return model_dir.find(str(folder))


def refusal(family: str = "llama-bias", change: Callable[[Plan], Plan] = lambda plan: plan) -> str:
    config = tiny.config(family)
    with pytest.raises(gate.GateRefused) as refused:
        gate.gate(config, change(derive(config, 2)))
    text = str(refused.value)
    assert "\n" not in text
    assert not any(gate_cache.folder().glob("*")), "only passes are remembered"
    return text


def test_every_fault_of_the_list_is_planted():
    assert {fault for fault, _ in PLANTED} == set(faults.FAULTS)


@pytest.mark.parametrize(("fault", "at"), PLANTED)
def test_the_gate_refuses_and_names_the_place(fault, at):
    with faults.plant(fault, at):
        text = refusal()
    assert PLANTED[fault, at] in text
    assert "looks like a bug" in text


@pytest.mark.parametrize(
    ("fault", "at", "dtype"),
    [
        *((*planted, torch.float32) for planted in PLANTED),
        ("rotated head map", "", torch.bfloat16),
        ("drop f", f"{LAYER}input_layernorm", torch.bfloat16),
    ],
)
def test_verify_is_red_and_names_the_place(fault, at, dtype, saved):
    with faults.plant(fault, at):
        report = verify.verify(saved, 2, dtype=dtype, backend="threads")
    assert report.exit_code == 1
    assert PLANTED[fault, at] in report.finding
    assert "looks like a bug" in report.finding
    assert "equal" not in report.text().splitlines()[-1]


@pytest.mark.parametrize(
    ("fault", "at", "named"),
    [
        ("drop g", f"{LAYER}mlp", "first in model.layers.1, the outputs"),
        ("drop g", "embed", "first in model.embed_tokens, the outputs"),
        ("rotated head map", "", "first in model.layers.0, the outputs"),
        ("drop f", f"{LAYER}input_layernorm", "first in model.layers.1, the gradients of inputs"),
        ("drop f", "model.norm", "first in model.norm.weight, the gradients"),
        ("drop the sum of copied heads", "", "first in model.layers.0.self_attn.k_proj.weight, the gradients"),
    ],
)
def test_layer_by_layer_is_red_and_names_the_unit(fault, at, named, saved):
    with faults.plant(fault, at):
        report = verify.verify(saved, 2, stream=True, backend="threads")
    assert report.exit_code == 1
    assert report.finding.startswith(named)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("fault", ["drop g", "rotated head map", "drop f"])
def test_the_gate_refuses_in_other_families(family, fault):
    if (family, fault) == ("gpt2", "rotated head map"):  # one KV head for each query head: a regular map, which the model's own code has
        return
    with faults.plant(fault, "mlp" if fault == "drop g" else ""):
        refusal(family)


def without(plan: Plan, op: str, where: str) -> Plan:
    gone = next(r for r in plan.regions if r.op == op and where in r.module)
    return replace(plan, regions=tuple(r for r in plan.regions if r is not gone))


@pytest.mark.parametrize(("op", "where"), [("reduce", "layers.1.self_attn"), ("copy", "layers.1.post_attention_layernorm")])
def test_a_plan_without_one_region_is_refused(op, where):
    assert where in refusal("llama", lambda plan: without(plan, op, where))


@pytest.mark.process
def test_verify_is_red_with_real_processes(tmp_path):
    where = "layers.1.mlp"
    tiny.whole(tiny.config("llama"), torch.float32).save_pretrained(tmp_path)
    files = model_dir.find(str(tmp_path))
    report = verify.verify(files, 2, plan=without(derive(files.config(), 2), "reduce", where))
    assert report.exit_code == 1
    assert where in report.finding


def planted(monkeypatch, fault: Callable[[nn.Module, Group], Any]) -> None:
    """The applier does `fault` to every model that it has split."""
    right = build.split

    def wrong(model: nn.Module, plan: Plan, group: Group, *more: Any) -> nn.Module:
        model = right(model, plan, group, *more)
        fault(model, group)
        return model

    monkeypatch.setattr(build, "split", wrong)


def test_a_gradient_counted_on_every_rank_is_refused(monkeypatch):
    name = f"{LAYER}mlp.down_proj.bias"
    planted(monkeypatch, lambda model, group: _change_gradient(model, name, lambda g: collectives.all_reduce(g, group, "fault")))
    assert f"the gradient of {name}" in refusal()


def test_copies_that_drift_by_one_bit_are_refused(monkeypatch):
    name = f"{LAYER}input_layernorm.weight"
    planted(monkeypatch, lambda model, group: _change_gradient(model, name, lambda g: g * (1 + 2.3e-16 * group.rank)))
    assert f"{name} from 0 differs between ranks [0] and [1]" in refusal()


def _change_gradient(model: nn.Module, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Hooks the parameter at its first use: when a model is split its parameters are not yet those that it will have."""
    module, _, key = name.rpartition(".")
    layer = model.get_submodule(module)

    def hook(*_: Any) -> None:
        handle.remove()
        layer.get_parameter(key).register_hook(change)

    handle = layer.register_forward_pre_hook(hook)


def test_a_collective_too_many_is_refused(monkeypatch):
    def spend(model: nn.Module, group: Group) -> None:
        def hook(*_: Any) -> None:
            collectives.all_reduce(torch.zeros(3), group, "extra")

        model.get_submodule("model.norm").register_forward_hook(hook)

    planted(monkeypatch, spend)
    assert "all_reduce at extra: predicted none, counted 1 x 12 bytes" in refusal()


def test_a_wrong_prediction_is_refused(monkeypatch):
    right = cost.predict
    monkeypatch.setattr(cost, "predict", lambda *args: right(*args)[1:])
    assert "predicted none, counted 1 x" in refusal()


def test_weights_that_are_not_the_whole_models_are_refused(monkeypatch):
    right = gate.load.from_whole

    def wrong(model: nn.Module, state: dict[str, torch.Tensor], *options: Any) -> None:
        right(model, state, *options)
        with torch.no_grad():
            model.get_parameter("model.norm.weight")[0] += 1e-12

    monkeypatch.setattr(gate.load, "from_whole", wrong)
    assert "the loaded weights: model.norm.weight is not the whole model's" in refusal()


def test_a_crash_of_the_applier_is_a_refusal(monkeypatch):
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(build, "split", broken)
    assert "ZeroDivisionError: of all things" in refusal()
