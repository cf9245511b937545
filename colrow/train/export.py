"""A training checkpoint becomes a plain Hugging Face directory: the bytes that the unsplit model would have saved.

A checkpoint of an adapter becomes the model with the adapter merged, or the adapter alone as PEFT writes it.

One process, no ranks: the pieces are read as whole tensors into the unsplit model, and transformers itself writes it (file names, shards,
metadata), so nothing of colrow is left in the result: no padding, no copies of KV heads, no names of its own. The directory is written
under another name and renamed. Memory: the whole model once, on the CPU.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from ..checkpoint.model_dir import find
from ..checkpoint.rank_files import STATE, Saved, open_checkpoint
from ..comm.group import single
from ..errors import UserError
from ..parallel.adapter_files import CONFIG, load_adapter, read_config, write_tensors
from ..parallel.adapters import merge_adapter
from ..parallel.build import empty, split
from ..parallel.load import fill, from_source, persistent_buffers
from ..parallel.save import quiet
from ..planning.derive import derive
from .writing import writing


def export(directory: Path, out: Path, max_shard_size: str = "50GB", adapter: bool = False) -> Path:
    """The checkpoint `directory` (or the last whole one in it) as `out`; its `adapter` alone. UserError where `out` exists already."""
    if out.exists():
        raise UserError("the directory to write is there already", out, "a new name")
    saved = open_checkpoint(directory)
    try:
        if adapter and not (saved.path / CONFIG).is_file():
            raise UserError("this checkpoint is not of an adapter", saved.path, "the same without --adapter")
        unfinished = out.parent / f".unfinished-{out.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        with writing(f"the model could not be written to {out}", "more room on the disk, or a directory on another one", remove=unfinished):
            out.parent.mkdir(parents=True, exist_ok=True)
            if adapter:
                unfinished.mkdir()
                _write_adapter(saved, unfinished)
            else:
                with quiet():
                    whole_model(saved).save_pretrained(unfinished, max_shard_size=max_shard_size)
            for file in saved.path.iterdir():  # the tokenizer's files, and what else belongs to the model
                known = file.suffix == ".safetensors" or file.name in (
                    STATE,
                    CONFIG,
                    *(("config.json", "generation_config.json") * adapter),
                )
                if file.is_file() and not known and not (unfinished / file.name).exists():
                    shutil.copy2(file, unfinished / file.name)
            os.rename(unfinished, out)
    finally:
        saved.close()
    return out


def whole_model(saved: Saved) -> PreTrainedModel:
    """The unsplit model of a checkpoint, in the dtypes it was saved in; one with an adapter in that of the model's files."""
    model = _merged(saved) if (saved.path / CONFIG).is_file() else _trained(saved)
    if getattr(model, "generation_config", None) is not None and (saved.path / "generation_config.json").is_file():
        model.generation_config = type(model.generation_config).from_pretrained(saved.path, local_files_only=True)
    return model


def _trained(saved: Saved) -> PreTrainedModel:
    """All of it from the checkpoint."""
    config = AutoConfig.from_pretrained(saved.path, local_files_only=True)
    source = saved.source("weights")
    model = split(empty(config, torch.float32), derive(config, 1), single())

    def read(name: str) -> torch.Tensor:
        if name not in source.tensors:
            raise UserError(f"{saved.path} has no weights for", name, "a checkpoint of this model")
        return source.read(name, None, ())

    buffers = {name: read(name) for name, _ in persistent_buffers(model)}
    fill(model, lambda entry, wanted: read(entry.name), buffers=buffers)  # type: ignore[arg-type]
    return model  # type: ignore[return-value]


def _merged(saved: Saved) -> PreTrainedModel:
    """The model that the adapter was trained on, read again, with the adapter in its weights."""
    files = find(read_config(saved.path).base_model_name_or_path or "")
    config, source = files.config(), files.source()
    dtype: Any = getattr(config, "dtype", None) or torch.float32
    model: Any = split(empty(config, getattr(torch, dtype) if isinstance(dtype, str) else dtype), derive(config, 1), single())
    try:
        from_source(model, source)
    finally:
        source.close()
    with tempfile.TemporaryDirectory() as folder:
        _write_adapter(saved, Path(folder))
        merge_adapter(load_adapter(model, folder))
    return model


def _write_adapter(saved: Saved, path: Path) -> None:
    source = saved.source("weights")
    write_tensors(path, {name: source.read(name, None, ()) for name in source.tensors})
    shutil.copy2(saved.path / CONFIG, path / CONFIG)
