"""Weights that are quantized in a form that colrow does not read are refused by name, before one is read, with what to do instead.

A form is known from the config's `quantization_config`, from the file that older writers put beside it, or from the names of the tensors:
files whose config says nothing would otherwise fail later, at a tensor. GGUF files are read (gguf.py). Not here: dequantizing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError

UNQUANTIZED = "the model's unquantized files (BF16), or a GGUF file of it"
METHODS: dict[str, tuple[str, str]] = {
    "gptq": ("GPTQ", UNQUANTIZED),
    "awq": ("AWQ", UNQUANTIZED),
    "bitsandbytes": ("bitsandbytes", f"{UNQUANTIZED}, or dequantize() and save_pretrained() it in transformers"),
    "compressed-tensors": (
        "compressed-tensors",
        f"{UNQUANTIZED}, or load it in transformers with CompressedTensorsConfig(run_compressed=False) and save_pretrained() it",
    ),
    "fp8": (
        "block-scaled fp8",
        f"{UNQUANTIZED}, or load it in transformers with FineGrainedFP8Config(dequantize=True) and save_pretrained() it",
    ),
    "mxfp4": ("MXFP4", f"{UNQUANTIZED}, or load it in transformers with Mxfp4Config(dequantize=True) and save_pretrained() it"),
}
"""{quant_method: (its name, what to do)}. Other methods are refused under the name that the config gives them."""

BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
ENDINGS: dict[str, str] = {
    ".qzeros": "gptq or awq",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "fp8",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
"""Endings of tensors that only such files have. `.qweight` alone does not tell one from another."""


def refuse(path: Path, config: Mapping[str, Any]) -> None:
    """UserError where the config of the directory, or a file beside it, says that its weights are quantized."""
    nested = config.get("text_config") or {}
    found = config.get("quantization_config") or config.get("compression_config") or nested.get("quantization_config")
    if not found:
        beside = next((name for name in BESIDE if (path / name).is_file()), None)
        found = _read(path / beside) | {"quant_method": BESIDE[beside]} if beside else None
    if found:
        raise _refusal(path, _method(found), _details(found))


def refuse_tensors(path: Path, keys: Iterable[str]) -> None:
    """UserError where the names of the tensors say so, though the config does not."""
    for key in keys:
        for ending, method in ENDINGS.items():
            if key.endswith(ending):
                raise _refusal(path, method, f"a tensor {key}")


def _refusal(path: Path, method: str, found: str) -> UserError:
    name, works = METHODS.get(method, (method.upper() if " or " in method else method, UNQUANTIZED))
    return UserError(f"the weights in {path} are quantized by {name}, which colrow does not read", found, works)


def _method(config: Mapping[str, Any]) -> str:
    method = str(config.get("quant_method", "")).lower()
    if not method and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        return "bitsandbytes"
    return method or "a method that the config does not name"


def _details(config: Mapping[str, Any]) -> str:
    shown = ("quant_method", "bits", "w_bit", "group_size", "q_group_size", "load_in_4bit", "load_in_8bit", "format", "weight_block_size")
    return ", ".join(f"{key} {config[key]}" for key in shown if config.get(key)) or "a quantization_config"


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
