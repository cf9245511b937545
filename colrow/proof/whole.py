"""The whole model: transformers' own, untouched by colrow. It is the reference for everything."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint.model_dir import ModelFiles
from ..comm.group import single
from ..parallel import load as split_load
from ..parallel.save import quiet
from ..parallel.state import State
from ..partition import whole as everything
from ..planning import models
from ..planning.plan import Plan, TensorPlan


def build(config: PreTrainedConfig, dtype: torch.dtype, attention: str = "eager") -> PreTrainedModel:
    """In eval mode, on the current default device. transformers' eager attention is plain products and a softmax, nothing fused.

    Tables that its code computes (sines of positions) are computed once more, as after loading from files: while it builds a model,
    transformers has another default dtype, which they would show.
    """
    model = models.build(config, attn_implementation=attention, dtype=dtype).eval()
    if torch.get_default_device().type != "meta":
        for module in model.modules():
            for leaf in module._non_persistent_buffers_set:
                if module._buffers.get(leaf) is not None:
                    module._buffers[leaf] = torch.empty_like(module._buffers[leaf], device="meta")
        split_load.remake_buffers(model, torch.get_default_device())
    if dtype is torch.float64:
        model.apply(_wide)
    return simple_experts(model)


def _wide(module: torch.nn.Module) -> None:
    """Routers that are float32 whatever the model's dtype are float64 in a comparison that is."""
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.double()


def simple_experts(model: PreTrainedModel) -> PreTrainedModel:
    """With experts computed one after the other: grouped products are not there for float64."""
    models.compute_experts(model, "eager")
    return model


def load(files: ModelFiles, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """With its weights. From safetensors and .bin files by transformers' loader, which shares no code with the ranks'.

    A GGUF file is read by colrow's own reader: transformers takes many times longer for it. Tests compare the two readers.
    """
    if files.kind != "gguf":
        options = {"attn_implementation": "eager", "dtype": dtype, "trust_remote_code": files.trust_remote_code, "local_files_only": True}
        with models.BUILDING, quiet():
            model = models.model_class(config).from_pretrained(files.path, config=copy.deepcopy(config), **options).eval()
        with torch.device("meta"):  # what its code freezes (tables of sines) comes back from files as if it were trained
            fresh = models.build(config)
        for name, parameter in fresh.named_parameters():
            model.get_parameter(name).requires_grad_(parameter.requires_grad)
        return simple_experts(model)
    with torch.device("meta"):
        model = build(config, dtype)
    model.colrow = State(_undivided(model), single())  # type: ignore[assignment]  # what the loader reads of a model
    source = files.source()
    try:
        split_load.from_source(model, source, dtype)
    finally:
        source.close()
        del model.colrow
    return model


def _undivided(model: PreTrainedModel) -> Plan:
    """One rank that holds everything."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    tensors = {
        first: TensorPlan(first, tuple(model.get_parameter(first).shape), everything(1), "whole", "undivided", aliases=tuple(others))
        for first, *others in names.values()
    }
    return Plan(model.config.model_type, type(model).__name__, 1, tensors)
