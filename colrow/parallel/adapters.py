"""LoRA adapters of PEFT on a split model: added, merged and taken off, with the numbers of the unsplit model.

    add_adapter(model, LoraConfig(r=8, target_modules=["q_proj", "o_proj"]))   then train as ever; the base is frozen
    merge_adapter(model)                   into the weights; layers and names are then as before

The layers are PEFT's, put beside the split ones in place: the model stays the model, and its plan gets an entry for every matrix. So
gradients, norms, checkpoints and all else that reads the plan treat adapters as they treat weights. The names of adapted weights get
".base_layer", as in PEFT. First values are drawn whole from a seed and their names, so they are the same at any number of ranks.

One adapter at a time, and LoRA only (adapter_files.check). peft itself must be installed. Not here: how layers compute (lora.py), files
(adapter_files.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..comm import collectives
from ..errors import UserError
from ..partition import Partition
from ..planning.models import BUILDING
from ..planning.plan import Plan, TensorPlan
from . import gradients
from .adapter_files import check, peft, write
from .sites import Site, Sites
from .state import state_of

if TYPE_CHECKING:
    from peft import LoraConfig

    from .lora import Part

OF_EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}  # which cannot be adapted here
HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@dataclass(frozen=True, eq=False)
class Adapters:
    """A model's adapter: PEFT's layers by path, their matrices, and what taking it off brings back."""

    config: LoraConfig
    layers: dict[str, Any]
    parts: tuple[Part, ...]
    base: Plan  # the model's own, without the adapter
    trained: tuple[nn.Parameter, ...]  # that wanted a gradient before
    saves: Callable[..., Any] | None  # the model's save_pretrained, where it has one of its own

    def sites(self) -> Sites:
        """Where the adapter drops: the input of A, cut as A is. UserError where that is a part of another kind."""
        if not self.config.lora_dropout:
            return {}
        found: Sites = {}
        for path, a in zip(self.layers, self.parts[::2], strict=True):
            weight, cut = self.base.tensor(f"{path}.weight"), a.entry.partition
            if weight.partition.is_whole and weight.grad == "partial":  # it works on a slice of the sequence, or of the heads
                raise UserError("lora_dropout before a whole layer inside split work has no mask", path, "lora_dropout=0")
            found[f"{path}.lora_dropout.default"] = (Site(None if cut.is_whole else Partition(-1, cut.pieces), 0),)
        return found


def add_adapter(model: nn.Module, config: LoraConfig, seed: int | None = None) -> nn.Module:
    """Puts a new adapter into a split model, in place, and freezes the rest. A collective of all ranks.

    `config`: a peft.LoraConfig. `seed`: of the first values; None: drawn on rank 0 from torch's generator. UserError, with the model
    unchanged, where the adapter could not be split right.
    """
    group = state_of(model).group
    mine = int(torch.randint(2**31, ())) if seed is None and group.rank == 0 else seed
    drawn = collectives.broadcast_object(mine, group, "adapter.seed")
    return put(model, config, lambda part: part.drawn(drawn, group.rank))


@torch.no_grad()
def merge_adapter(model: nn.Module) -> nn.Module:
    """Adds the adapter to the weights, in place, and takes it off: layers, names and plan are those from before it was added."""
    for layer in adapters_of(model).layers.values():
        layer.merge()
    return take_off(model)


def adapters_of(model: nn.Module) -> Adapters:
    """The model's adapter. UserError where it has none."""
    found = state_of(model).adapters
    if found is None:
        raise UserError("the model has no adapter", type(model).__name__, "colrow.add_adapter(model, config)")
    return found


def every_linear_layer(model: Any) -> str | list[str]:
    """Target modules: all linear layers but the head. Beside experts without names that PEFT takes for theirs."""
    if not any(p.dim() > 2 for p in model.parameters()):
        return "all-linear"
    head = model.get_output_embeddings()
    found = {path.rpartition(".")[2] for path, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    return sorted(found - OF_EXPERTS)


def put(model: nn.Module, config: LoraConfig, value: Callable[[Part], torch.Tensor]) -> nn.Module:
    """Puts an adapter into a split model; `value(part)` is the rank's piece of a matrix. UserError, with the model unchanged."""
    library = peft()
    from . import lora

    state = state_of(model)
    if state.adapters is not None:
        raise UserError("the model has an adapter already", works="colrow.merge_adapter(model) first")
    check(config)
    config = copy.deepcopy(config)
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(model, "name_or_path", None)
    config.fan_in_fan_out = any(isinstance(m, Conv1D) for m in model.modules())  # else PEFT warns, and sets it
    before = tuple(p for p in model.parameters() if p.requires_grad)
    try:
        with BUILDING:  # PEFT makes parameters on meta by changing nn.Module for all threads
            library.inject_adapter_in_model(config, model, lora.NAME, low_cpu_mem_usage=True)
        layers = _layers(model, library)
        found = [part for path, layer in layers.items() for part in lora.parts(path, layer, state.plan, config.init_lora_weights)]
        pieces = [value(part) for part in found]
    except Exception as e:
        _unwrap(model, _layers(model, library), before)
        if isinstance(e, UserError):
            raise
        raise UserError("PEFT cannot add this adapter", str(e).split("\n")[0], "target modules that the model has") from e
    state.adapters = Adapters(config, layers, tuple(found), state.plan, before, vars(model).get("save_pretrained"))
    for part, piece in zip(found, pieces, strict=True):
        part.put(piece, not config.inference_mode)
    for layer in layers.values():
        lora.become_split(layer)
        layer.train(layer.get_base_layer().training)
        _swap_hooks(layer, layer.get_base_layer())
    entries = [part.entry for part in found]
    state.plan = with_adapter(state.plan, layers, entries)
    if state.sums is not None:
        state.sums.add(gradients.sums_of(model, entries, state.group))
    model.save_pretrained = lambda directory, *_, **__: write(state, directory)  # type: ignore[assignment]
    return model


def take_off(model: nn.Module) -> nn.Module:
    """The layers that were there before, with their hooks, names and plan."""
    state, found = state_of(model), adapters_of(model)
    for layer in found.layers.values():
        _swap_hooks(layer, layer.get_base_layer())
    _unwrap(model, found.layers, found.trained)
    if state.sums is not None:
        state.sums.drop({id(part.module) for part in found.parts})
    vars(model).pop("save_pretrained", None)
    if found.saves is not None:
        model.save_pretrained = found.saves  # type: ignore[assignment]
    state.plan, state.adapters = found.base, None
    return model


def with_adapter(plan: Plan, paths: Container[str], entries: Iterable[TensorPlan]) -> Plan:
    """The plan of the model with an adapter: PEFT's names for the weights beside it, and an entry for each of its matrices."""

    def renamed(name: str) -> str:
        path, _, key = name.rpartition(".")
        return f"{path}.base_layer.{key}" if path in paths else name

    base = [replace(e, name=renamed(e.name), aliases=tuple(map(renamed, e.aliases))) for e in plan.tensors.values()]
    return replace(plan, tensors={entry.name: entry for entry in (*base, *entries)})


def _layers(model: nn.Module, library: Any) -> dict[str, Any]:
    """PEFT's layers by path, the outer ones where it has nested them."""
    kind = library.tuners.tuners_utils.BaseTunerLayer
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, kind) and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def _unwrap(model: nn.Module, layers: dict[str, Any], trained: Iterable[nn.Parameter]) -> None:
    """The layers underneath take their places again."""
    for path, layer in layers.items():
        parent, _, key = path.rpartition(".")
        setattr(model.get_submodule(parent), key, layer.get_base_layer())
    for parameter in trained:
        parameter.requires_grad_(True)
    vars(model).pop("peft_config", None)


def _swap_hooks(a: nn.Module, b: nn.Module) -> None:
    """What the plan does at a layer's border (f, gathers) is done at that of the layer with its adapter."""
    for name in HOOKS:
        mine, other = getattr(a, name), getattr(b, name)
        setattr(a, name, other)
        setattr(b, name, mine)
