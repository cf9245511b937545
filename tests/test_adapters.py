"""LoRA on a split model beside the unsplit PEFT model, in float64: logits, cached decoding, gradients of A and B, AdamW, files, merging."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.parallel import adapter_files
from colrow.parallel.adapter_files import load_adapter
from colrow.parallel.adapters import add_adapter, every_linear_layer, merge_adapter
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_gradients, whole_parameters
from colrow.parallel.head import sharded_logits
from colrow.parallel.random import seed_dropout
from colrow.planning.derive import derive
from colrow.proof.precision import Float64

from . import tiny
from .adapting import EVERY_LINEAR, check, largest, lora, observe, reference, split
from .families import FAMILIES
from .splitting import TOLERANCE, next_token_loss


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_o27_every_linear_layer_of_llama(ranks: int, tmp_path: Path) -> None:
    """huggingface/peft PR #3079, Megatron-Bridge PR #5635: A whole and B cut beside column layers, A cut and B whole beside row layers.

    Nine query and three KV heads: at 2 ranks heads are dealt 5 and 4, and a KV head lies on both."""
    check("llama", EVERY_LINEAR, ranks, tmp_path)


CASES = {
    "llama-bias": ["o_proj", "down_proj"],  # biases are added once, after the sum with the adapter's part
    "llama-tied": ["embed_tokens", "q_proj"],
    "llama": ["embed_tokens", "lm_head", "k_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],  # Conv1D, q|k|v in one
    "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
    "gpt-neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "gemma3": ["embed_tokens", "o_proj"],  # an embedding that scales what it looks up
    "deepseek-v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],  # whole layers between split ones
    "bert": ["query", "dense"],  # f at the input of a dense layer itself: it must stand before A too
    "falcon-rw": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],  # linear layers of the model's own class
    "mpt": ["Wqkv", "out_proj", "up_proj"],
}


@pytest.mark.parametrize("family", CASES)
def test_layers_of_every_kind(family: str, tmp_path: Path) -> None:
    check(family, CASES[family], 2, tmp_path)


def test_merged_is_unmerged(tmp_path: Path) -> None:
    """... and afterwards the model has its names, plan and hooks again, takes another adapter, and saves itself whole."""
    whole, peft, ids, expected = reference("llama", ("embed_tokens", "lm_head", "k_proj"))
    merged = copy.deepcopy(peft).merge_and_unload()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.save_pretrained(tmp_path / "adapter")

    def task(group: Group, model: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, list[bool]]:
        before = model.colrow.plan
        merge_adapter(load_adapter(model, tmp_path / "adapter"))
        assert model.colrow.plan is before
        parameters = whole_parameters(model)
        with Float64():
            logits = model(ids).logits.detach()
        wanted = [p.requires_grad for p in model.parameters()]
        model.save_pretrained(tmp_path / "model")
        add_adapter(model, lora(target_modules=["o_proj"]), seed=1)
        with Float64():
            again = model(ids).logits.detach()
        return parameters, logits, again, wanted

    for parameters, logits, again, wanted in split(whole, 3, task):
        worst = largest({n: p.detach() for n, p in merged.named_parameters()}, parameters)
        assert worst[0] <= TOLERANCE, worst
        assert (logits - expected["logits"]).abs().max() <= TOLERANCE
        assert torch.equal(logits, again), "a new adapter starts at 0"
        assert all(wanted)
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == dict(whole.named_parameters()).keys()


def test_first_values_are_the_same_at_any_number_of_ranks() -> None:
    """... as PEFT distributes them: U(-1/sqrt(in), 1/sqrt(in)) of the whole layer's inputs, and zeros. One seed from rank 0's generator."""
    whole = reference("llama", tuple(EVERY_LINEAR))[0]

    def task(group: Group, model: Any) -> dict[str, torch.Tensor]:
        add_adapter(model, lora(target_modules=[*EVERY_LINEAR, "embed_tokens"]), seed=3)
        return {name: p for name, p in whole_parameters(model).items() if "lora_" in name}

    one, *rest = (split(whole, ranks, task)[-1] for ranks in (1, 2, 3))
    assert all(torch.equal(one[name], other[name]) for other in rest for name in one)
    down = one["model.layers.1.mlp.down_proj.lora_A.default.weight"]
    assert 0.9 * 51**-0.5 < float(down.abs().max()) <= 51**-0.5
    assert not one["model.layers.1.mlp.down_proj.lora_B.default.weight"].any()
    assert not torch.equal(down, one["model.layers.0.mlp.down_proj.lora_A.default.weight"])


@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_a_saved_adapter_is_plain_peft(rank_stabilized: bool, tmp_path: Path) -> None:
    """Trained on two ranks, read by PEFT onto the unsplit model; layers of their own ranks and scales included."""
    whole, _, ids, _ = reference("llama", tuple(EVERY_LINEAR))
    options = {"use_rslora": rank_stabilized, "rank_pattern": {"layers.1.*.o_proj": 2}, "alpha_pattern": {"up_proj": 3}}

    def task(group: Group, model: Any) -> torch.Tensor:
        add_adapter(model, lora(**options), seed=0)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        for _ in range(2):
            next_token_loss(model(ids).logits, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(tmp_path)
        return model(ids).logits.detach()

    found = split(whole, 2, task)[0]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".md") == [adapter_files.CONFIG, adapter_files.WEIGHTS]
    theirs = PeftModel.from_pretrained(copy.deepcopy(whole), tmp_path)
    assert (theirs(ids).logits - found).abs().max() <= 1e-6
    assert (whole(ids).logits - found).abs().max() > 1e-3


def test_dropout_is_the_same_at_any_number_of_ranks() -> None:
    whole, _, ids, _ = reference("llama", tuple(EVERY_LINEAR))

    def task(group: Group, model: Any) -> dict[str, torch.Tensor]:
        add_adapter(model, lora(lora_dropout=0.5), seed=3)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name and "down_proj" in name:
                    p.fill_(0.1)  # whole: alike on all ranks
        seed_dropout(model.train(), 7)
        with Float64():
            loss = next_token_loss(model(ids).logits, ids)
            loss.backward()
        return whole_gradients(model) | {"loss": loss.detach()}

    one, two, three = (split(whole, ranks, task)[-1] for ranks in (1, 2, 3))
    for other in (two, three):
        worst = largest(one, other)
        assert worst[0] <= TOLERANCE, worst


@pytest.mark.parametrize("mode", ["again", "keep"])
def test_with_sequence_parallelism(mode: Any, tmp_path: Path) -> None:
    whole, peft, ids, expected = reference("llama-bias", ("o_proj", "down_proj"))
    peft.save_pretrained(tmp_path)
    plan = derive(whole.config, 2)
    copies = [copy.deepcopy(whole) for _ in range(2)]

    def task(group: Group) -> dict[str, torch.Tensor]:
        model = parallelize(copies[group.rank], plan, group, mode)
        load_adapter(model, tmp_path, trainable=True)
        return observe(model, ids, whole_gradients, whole_parameters)

    for found in run_threads(task, 2):
        worst = largest(expected, found)
        assert worst[0] <= TOLERANCE, worst


def test_nothing_more_is_communicated_forward() -> None:
    """The adapter's part goes through the base's all-reduce; backward the parts of A and B are summed, under their names."""
    whole, _, ids, _ = reference("llama", tuple(EVERY_LINEAR))

    def task(group: Group, model: Any) -> tuple[int, int, set[str]]:
        def calls() -> int:
            before = group.counters.total().calls
            with torch.no_grad(), sharded_logits(model):
                model(ids)
            return group.counters.total().calls - before

        alone = calls()
        add_adapter(model, lora(), seed=0)
        with_adapter = calls()
        next_token_loss(model(ids).logits, ids).backward()
        return alone, with_adapter, {name for _, _, name in group.counters.sites if "lora" in name}

    for alone, with_adapter, names in split(whole, 2, task):
        assert alone == with_adapter
        assert "model.layers.0.mlp.down_proj.lora_B.default.weight.grad" in names
        assert "model.layers.0.mlp.down_proj.lora_A.default.weight.grad" not in names
        assert "model.layers.0.self_attn.k_proj.lora_B.default.weight.copies.grad" in names


def test_every_linear_layer_beside_experts() -> None:
    for family, count in (("mixtral", 8), ("deepseek-v3", 10), ("llama", 14)):
        made = FAMILIES.get(family)
        whole = tiny.whole(made() if made else tiny.config(family), torch.float32)

        def task(group: Group, model: Any) -> int:
            add_adapter(model, lora(target_modules=every_linear_layer(model)))
            return len(model.colrow.adapters.layers)

        assert split(whole, 2, task) == [count, count], family
