"""A training checkpoint becomes a plain Hugging Face directory: the bytes that the unsplit model would have saved.

One process, no ranks: the pieces are read as whole tensors into the unsplit model, and transformers itself writes it (file names, shards,
metadata), so nothing of colrow is left in the result: no padding, no copies of KV heads, no names of its own. The directory is written
under another name and renamed. Memory: the whole model once, on the CPU.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from ..checkpoint.rank_files import STATE, Saved, open_checkpoint
from ..comm.group import single
from ..errors import UserError
from ..parallel.build import empty, split
from ..parallel.load import fill
from ..parallel.save import quiet
from ..planning.derive import derive
from ..planning.plan import TensorPlan


def export(directory: Path, out: Path, max_shard_size: str = "50GB") -> Path:
    """The checkpoint `directory` (or the last whole one in it) as `out`. UserError where `out` exists already."""
    if out.exists():
        raise UserError("the directory to write is there already", out, "a new name")
    saved = open_checkpoint(directory)
    try:
        model = whole_model(saved)
        unfinished = out.parent / f".unfinished-{out.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        with quiet():
            model.save_pretrained(unfinished, max_shard_size=max_shard_size)
        for file in saved.path.iterdir():  # the tokenizer's files, and what else belongs to the model
            if file.is_file() and file.suffix != ".safetensors" and file.name != STATE and not (unfinished / file.name).exists():
                shutil.copy2(file, unfinished / file.name)
        os.rename(unfinished, out)
    finally:
        saved.close()
    return out


def whole_model(saved: Saved) -> PreTrainedModel:
    """The unsplit model of a checkpoint, in the dtypes it was saved in."""
    config = AutoConfig.from_pretrained(saved.path, local_files_only=True)
    source = saved.source("weights")
    model = split(empty(config, torch.float32), derive(config, 1), single())

    def piece(entry: TensorPlan, wanted: torch.dtype) -> torch.Tensor:
        if entry.name not in source.tensors:
            raise UserError(f"{saved.path} has no weights for", entry.name, "a checkpoint of this model")
        return source.read(entry.name, None, ())

    fill(model, piece)  # type: ignore[arg-type]
    if getattr(model, "generation_config", None) is not None and (saved.path / "generation_config.json").is_file():
        model.generation_config = type(model.generation_config).from_pretrained(saved.path, local_files_only=True)  # type: ignore[union-attr]
    return model  # type: ignore[return-value]
