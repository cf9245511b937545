"""Axes whose entries go through modules of their own (StableLM's norms of single heads, O-14): cut like any other heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from colrow.checkpoint.model_dir import find
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel import entries
from colrow.parallel.build import empty, parallelize, split
from colrow.parallel.collect import whole_parameters
from colrow.parallel.load import from_source
from colrow.partition import Partition
from colrow.planning.derive import derive
from colrow.planning.models import build
from colrow.planning.plan import Plan
from colrow.planning.replay import check
from colrow.proof.gate import GateRefused, prove
from colrow.proof.noise import add_noise
from colrow.proof.shrink import Small

from .test_families import share

NORMS = "model.layers.0.self_attn.{}_layernorm.norms"


def stablelm(**changes: Any) -> tf.StableLmConfig:
    sizes = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 51, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 101, "qk_layernorm": True, "partial_rotary_factor": 0.25, "max_position_embeddings": 64}
    return tf.StableLmConfig(**sizes | changes, pad_token_id=0, bos_token_id=1, eos_token_id=2)


@pytest.mark.parametrize(("ranks", "changes"), [(2, {}), (3, {"use_parallel_residual": True}), (8, {}), (2, {"num_key_value_heads": 9})])
def test_norms_of_single_heads_are_cut_with_their_heads(ranks: int, changes: dict[str, Any]) -> None:
    config = stablelm(**changes)
    plan = derive(config, ranks)
    assert share(plan) > 0.98
    assert not plan.notes
    assert check(config, plan).ok
    assert prove(Small(config, plan, ())).ok


def test_a_norm_lies_where_its_head_lies() -> None:
    plan = derive(stablelm(), 2)
    held = {kind: [_holders(plan, f"{NORMS.format(kind)}.{n}.weight") for n in range(count)] for kind, count in (("q", 9), ("k", 3))}
    assert held["q"] == [[0]] * 5 + [[1]] * 4
    assert held["k"] == [[0], [0, 1], [1]], "the KV head in the middle belongs to query heads of both ranks"


def _holders(plan: Plan, name: str) -> list[int]:
    return [rank for rank, ranges in enumerate(plan.tensor(name).partition.pieces) if ranges]


def test_a_list_that_runs_the_first_norms_on_every_rank_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would happen without the rank's own list: `zip` takes the first ones, whose rows lie elsewhere or are another head's."""
    monkeypatch.setattr(entries, "install", lambda model, plan, group: None)
    with pytest.raises(GateRefused):
        prove(Small(stablelm(), derive(stablelm(), 2), ()))


def _with_the_mean(norms: Any, x: torch.Tensor) -> torch.Tensor:
    """Each norm gets the mean of all heads besides its own: then an entry is not a matter of its own rank."""
    return torch.cat([norm(one + x.mean(1, keepdim=True)) for norm, one in zip(norms, x.split(1, 1), strict=True)], 1)


def _turned(norms: Any, x: torch.Tensor) -> torch.Tensor:
    """Each norm gets the head of another number."""
    return torch.cat([norm(one) for norm, one in zip(norms, reversed(x.split(1, 1)), strict=True)], 1)


def _read_elsewhere(norms: Any, x: torch.Tensor) -> torch.Tensor:
    """The first head has a use of its own besides."""
    pieces = x.split(1, 1)
    return torch.cat([norm(one) for norm, one in zip(norms, pieces, strict=True)], 1) + pieces[0]


@pytest.mark.parametrize("together", [_with_the_mean, _turned, _read_elsewhere])
def test_one_by_one_with_something_of_all_of_them_is_not_such_an_axis(together: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then heads stay whole."""
    cls = type(build(stablelm(), dtype=torch.float32).model.layers[0].self_attn.q_layernorm)
    monkeypatch.setattr(cls, "forward", lambda self, x: together(self.norms, x))
    plan = derive(stablelm(), 2)
    assert not any(t.role == "entry" for t in plan.tensors.values())
    assert not plan.attention
    assert prove(Small(stablelm(), plan, ())).ok


def test_files_loading_and_names(tmp_path: Path) -> None:
    """Read from files, every element once, and put together again: the same tensors under the same names."""
    torch.manual_seed(0)
    model = build(stablelm(), dtype=torch.float32)
    add_noise(model)
    model.save_pretrained(tmp_path)
    expected = {name: p.detach() for name, p in model.named_parameters()}
    plan = derive(stablelm(), 2)

    def rank(group: Group) -> dict[str, torch.Tensor]:
        part = split(empty(stablelm(), torch.float32), plan, group)
        from_source(part, find(str(tmp_path)).source(), torch.float32, torch.device("cpu"))
        own = part.get_submodule(NORMS.format("q"))
        assert isinstance(own, entries.OwnEntries)
        assert (len(own), len(list(own)), len(own[1:])) == ((5, 5, 4), (4, 4, 3))[group.rank]
        assert own[0] is own._modules[("0", "5")[group.rank]]
        return whole_parameters(part)

    for found in run_threads(rank, 2):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_plan_with_half_an_entry_is_refused() -> None:
    plan = derive(stablelm(), 2)
    name = f"{NORMS.format('q')}.3.weight"
    plan.tensors[name] = replace(plan.tensors[name], partition=Partition(0, (((0, 4),), ((4, 8),))))
    model: nn.Module = build(stablelm(), dtype=torch.float32)
    with pytest.raises(UserError, match="cannot be an entry"):
        run_threads(lambda group: parallelize(model, plan, group), 2)
