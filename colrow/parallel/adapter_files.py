"""Adapters as PEFT's files: a directory with adapter_config.json and adapter_model.safetensors, the names and whole tensors PEFT writes.

    load_adapter(model, "adapter")    slices of such a directory, onto a split model
    save_adapter(model, "adapter")    a directory that PeftModel.from_pretrained reads onto the unsplit one

`check` is where settings that a split model does not carry out are refused by name: other kinds of adapters than LoRA, and what would be
wrong on a rank's part of a layer (DoRA's norms, first values computed from whole weights, whole modules trained beside).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoint.safetensors import SafetensorsSource, read_header
from ..comm import collectives
from ..errors import UserError
from ..planning.plan import TensorPlan
from .collect import whole_tensor
from .state import State, state_of

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = "default"  # of the adapter, as PEFT calls the only one
PREFIX = "base_model.model."  # of every name in PEFT's files
KNOWN: dict[str, tuple] = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian")}  # the values that are understood
EMPTY = (  # settings of LoraConfig that must be; besides those that PEFT marks as variants of LoRA
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "use_qalora",
    "ensure_weight_tying",
)


def load_adapter(model: nn.Module, directory: str | Path, trainable: bool = False) -> nn.Module:
    """Puts the adapter of a PEFT directory into a split model, in place: each rank reads its slices. A collective of all ranks.

    UserError, with the model unchanged, where the directory and the model do not fit."""
    from .adapters import adapters_of, put, take_off

    path = Path(directory)
    config, source = read_config(path), _open(path)
    config.inference_mode = not trainable
    rank = state_of(model).group.rank
    try:
        put(model, config, lambda part: _read(source, path, part.entry, rank))
        strangers = sorted(source.tensors.keys() - {stored(part.entry.name) for part in adapters_of(model).parts})
        if strangers and not _are_base_weights(strangers, source, state_of(model)):
            take_off(model)
            raise UserError(
                f"{path / WEIGHTS} holds a tensor for which the model has no place", strangers[0], "the model it was trained on"
            )
    finally:
        source.close()
    return model


def save_adapter(model: nn.Module, directory: str | Path) -> None:
    """Writes the model's adapter as PEFT does. A collective of all ranks; rank 0 writes."""
    write(state_of(model), directory)


def write(state: State, directory: str | Path) -> None:
    if state.adapters is None:
        raise UserError("the model has no adapter to save", works="colrow.add_adapter(model, config)")
    whole = {
        part.entry.name: whole_tensor(part.held.detach(), part.entry.partition, state.group, f"adapter.{part.entry.name}")
        for part in state.adapters.parts
    }
    if state.group.rank == 0:
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        write_tensors(path, whole)
        write_config(path, state.adapters.config)
    collectives.barrier(state.group, "adapter.saved")


def write_tensors(path: Path, whole: Mapping[str, torch.Tensor]) -> None:
    """An adapter's whole matrices, by their names in the plan, as PEFT's file."""
    from safetensors.torch import save_file

    save_file({stored(name): value.contiguous().cpu() for name, value in whole.items()}, path / WEIGHTS, metadata={"format": "pt"})


def write_config(path: Path, config: LoraConfig) -> None:
    written = copy.copy(config)
    written.inference_mode = True
    written.save_pretrained(str(path))


def stored(name: str) -> str:
    """PEFT's name in files for a matrix of the plan."""
    head, _, tail = name.rpartition(f".{NAME}")
    return f"{PREFIX}{head}{tail}"


def read_config(path: Path) -> LoraConfig:
    """The adapter's config. UserError where the directory has none that is understood."""
    library, file = peft(), path / CONFIG
    if not file.is_file():
        raise UserError(f"there is no {CONFIG} in", path, "a directory that PEFT's save_pretrained wrote")
    try:
        kind = json.loads(file.read_text(encoding="utf-8"))["peft_type"]
        _check_kind(kind)
        config = library.PeftConfig.from_pretrained(str(path))
    except UserError:
        raise
    except Exception as e:  # whatever PEFT and json raise for a file that is none
        raise UserError(f"{file} is not the config of an adapter", f"{type(e).__name__}: {e}".split("\n")[0], "PEFT's own file") from e
    check(config)
    return config


def check(config: Any) -> None:
    """UserError naming the first setting of a LoraConfig that a split model does not carry out."""
    _check_kind(getattr(config, "peft_type", type(config).__name__))
    variants = [name for name, field in type(config).__dataclass_fields__.items() if field.metadata.get("is_lora_variant")]
    for name in (*variants, *EMPTY):
        if value := getattr(config, name, None):
            raise UserError(f"LoRA with {name} does not work on a split model", value, f"{name} unset")
    for name, known in KNOWN.items():
        if (value := getattr(config, name)) not in known:
            raise UserError(f"LoRA with this {name} does not work on a split model", value, " or ".join(map(str, known)))


def peft() -> Any:
    """The package. UserError where it is not installed."""
    try:
        import peft
    except ImportError as e:
        raise UserError("adapters need the package peft", str(e), "pip install peft") from e
    return peft


def _check_kind(kind: Any) -> None:
    if (name := str(getattr(kind, "value", kind))) != "LORA":
        raise UserError("adapters of this kind do not work on a split model", name, "LoRA (peft.LoraConfig)")


def _open(path: Path) -> SafetensorsSource:
    file = path / WEIGHTS
    if not file.is_file():
        raise UserError(f"there is no {WEIGHTS} in", path, "an adapter saved as safetensors")
    return SafetensorsSource(read_header(file), {})


def _read(source: SafetensorsSource, path: Path, entry: TensorPlan, rank: int) -> torch.Tensor:
    key = stored(entry.name)
    if key not in source.tensors:
        raise UserError(f"{path / WEIGHTS} lacks a matrix that {CONFIG} promises", key, "both files of one adapter")
    if (found := source.tensors[key].shape) != entry.shape:
        raise UserError(f"{path / WEIGHTS} holds {key} in another shape than the model needs", found, f"{entry.shape}")
    cut = entry.partition
    return source.read(key, cut.dim, () if cut.is_whole else cut.pieces[rank])


def _are_base_weights(keys: list[str], source: SafetensorsSource, state: State) -> bool:
    """PEFT writes the table of an adapted embedding too: it is the model's own, as wide as the model's."""
    known = dict(state.plan.names())
    return all((e := known.get(key.removeprefix(PREFIX))) is not None and e.shape == source.tensors[key].shape for key in keys)
