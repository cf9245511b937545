"""GGUF files: a rank's own ranges are read and dequantized, nothing else.

Weights lie in blocks along the innermost dim (32 or 256 values with their scale), so rows can be read alone and columns in whole blocks.
llama.cpp writes some tensors in another order (query and key rows of Llama are interleaved for its rotary embedding, GPT-2's matrices are
transposed, norms of some models hold 1 more): transformers' `TensorProcessor` of the architecture knows how to undo that for a whole
tensor; it is asked here with row numbers instead of weights, and its answer is applied to slices. Names and config are transformers' and
gguf's own as well. Not here: tensors that transformers merges or splits on the way (experts): refused by name.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from ..errors import UserError
from ..partition import Range, merge_ranges
from .gguf_header import Header, Stored, read, without_vocabulary
from .source import Files, TensorInfo, local_shape, read_plain

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BATCH_BLOCKS = 8192


@dataclass(frozen=True)
class Layout:
    """How the model's tensor comes out of the stored one: rows in another `order`, then transposed, then `shift` added."""

    order: np.ndarray | None = None  # model row i is stored row order[i]
    transposed: bool = False
    shift: float = 0.0


class GGUFSource:
    """The tensors of one file under the model's names (see source.Source); values are float32 unless another dtype is asked for."""

    def __init__(self, header: Header, config: PreTrainedConfig) -> None:
        self._header, self._files = header, Files()
        self._processor = _processor(header, config)
        self._stored = {name: key for key, name in _names(header, config, self._processor).items()}
        self._layouts: dict[str, Layout] = {}
        for name, key in self._stored.items():
            if name != key:  # else nothing asks for it
                _check_kind(header, key)
        self.tensors = {name: self._info(header.tensors[key], self.layout(key)) for name, key in self._stored.items()}
        self.unlisted: dict[str, Path] = {}

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def layout(self, key: str) -> Layout:
        if key not in self._layouts:
            self._layouts[key] = layout(self._processor, self._header, key)
        return self._layouts[key]

    def read(self, key: str, dim: int | None, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> torch.Tensor:
        stored, how = self._header.tensors[self._stored[key]], self.layout(self._stored[key])
        if how.transposed and dim is not None:
            dim = 1 - dim
        if how.order is None:
            value = self._ranges(stored, dim, ranges)
        elif dim == 0:  # the stored rows of these rows, read in file order, then put in theirs
            rows = np.concatenate([how.order[a:b] for a, b in ranges] or [how.order[:0]])
            wanted, back = np.unique(rows, return_inverse=True)
            value = self._ranges(stored, 0, merge_ranges((int(r), int(r) + 1) for r in wanted))[torch.from_numpy(back)]
        else:
            value = self._ranges(stored, dim, ranges)[torch.from_numpy(how.order)]
        if how.shift:
            value = value + how.shift
        return (value.T.contiguous() if how.transposed else value).to(dtype or torch.float32)

    def close(self) -> None:
        self._files.close()

    def _info(self, stored: Stored, how: Layout) -> TensorInfo:
        shape = stored.shape[::-1] if how.transposed else stored.shape
        return TensorInfo(shape, torch.float32, stored.nbytes, self._header.path, stored.kind.name)

    def _ranges(self, stored: Stored, dim: int | None, ranges: Sequence[Range]) -> torch.Tensor:
        """Ranges of the tensor as stored, float32."""
        path, shape = self._header.path, stored.shape
        if stored.kind.name in PLAIN:
            return read_plain(self._files, path, stored.start, shape, PLAIN[stored.kind.name], dim, ranges, torch.float32)
        values, size = stored.block
        blocks = (*shape[:-1], shape[-1] // values, size)  # as bytes
        if dim != len(shape) - 1:
            raw = read_plain(self._files, path, stored.start, blocks, torch.uint8, dim, ranges, torch.uint8)
            return dequantize(raw, stored).reshape(local_shape(shape, dim, ranges))
        covering = _covering(ranges, values)
        raw = read_plain(self._files, path, stored.start, blocks, torch.uint8, dim, covering, torch.uint8)
        wide = dequantize(raw, stored).reshape(*shape[:-1], -1)
        if tuple(ranges) == tuple((a * values, b * values) for a, b in covering):
            return wide
        held = torch.cat([torch.arange(a * values, b * values) for a, b in covering])
        wanted = torch.cat([torch.arange(a, b) for a, b in ranges])
        return wide.index_select(-1, torch.searchsorted(held, wanted))


def open_file(path: Path) -> GGUFSource:
    """UserError where the file is damaged or its architecture is not one that can be read."""
    header = read(path)
    return GGUFSource(header, config(path, header))


def config(path: Path, header: Header | None = None) -> PreTrainedConfig:
    """transformers' config of the file, by its own reader; from a copy of the header without the vocabulary where that gives the same."""
    header = header or read(path)
    mapping: Any = GGUF_CONFIG_MAPPING.get(header.architecture, {})
    try:
        if "vocab_size" not in mapping:
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        with tempfile.TemporaryDirectory() as folder:
            without_vocabulary(header, Path(folder) / path.name, f"{header.architecture}.vocab_size")
            found = AutoConfig.from_pretrained(folder, gguf_file=path.name)
        found.name_or_path = str(path.parent)
        return found
    except (ValueError, KeyError, OSError, TypeError) as e:
        raise UserError(
            f"transformers cannot read the config in {path}", f"architecture {header.architecture}", "the safetensors files of the model"
        ) from e


def dequantize(raw: torch.Tensor, stored: Stored) -> torch.Tensor:
    """Bytes of whole blocks to a flat float32 tensor. In batches: gguf makes several copies of what it is given."""
    values, size = stored.block
    flat = raw.numpy().reshape(-1, size)
    out = np.empty((len(flat), values), np.float32)
    for at in range(0, len(flat), BATCH_BLOCKS):
        part = flat[at : at + BATCH_BLOCKS]
        out[at : at + len(part)] = gguf.dequantize(part.reshape(1, -1), stored.kind).reshape(-1, values)
    return torch.from_numpy(out).view(-1)


@functools.cache
def dequantizes(kind: gguf.GGMLQuantizationType) -> bool:
    """Whether the gguf package can turn blocks of this type into numbers."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        return gguf.dequantize(np.zeros((1, size), np.uint8), kind).shape == (1, values)
    except NotImplementedError:  # of types that the package knows by their size alone
        return False


def _check_kind(header: Header, key: str) -> None:
    kind = header.tensors[key].kind
    if kind.name not in PLAIN and not (gguf.GGML_QUANT_SIZES[kind][0] > 1 and dequantizes(kind)):
        what = f"{header.path} holds {key} in a type that the gguf package does not dequantize"
        raise UserError(what, kind.name, "a file of the model in another type, such as Q8_0, Q4_K_M or F16")


def layout(processor: TensorProcessor, header: Header, key: str) -> Layout:
    """What the processor does to a tensor, found by giving it row numbers. UserError where it is more than an order, a transposition or an
    offset."""
    shape = header.tensors[key].shape
    if type(processor) is TensorProcessor:
        return Layout()
    numbers = np.arange(shape[0], dtype=np.float64).reshape(-1, *(1 for _ in shape[1:]))
    kept: dict[str, dict] = {"tensors": {}}
    try:
        result = processor.process(weights=numbers, name=key, tensor_key_mapping={}, parsed_parameters=kept)
        # a processor may store what it renames instead of returning it
        got = np.asarray(next(iter(kept["tensors"].values())) if result.name is None else result.weights)
    except Exception as e:  # whatever a processor raises when it needs more than rows
        raise _unreadable(header, key) from e
    if got.shape == numbers.shape and np.array_equal(np.sort(got, 0), numbers):
        return Layout() if np.array_equal(got, numbers) else Layout(order=got.reshape(-1).astype(np.int64))
    if len(shape) == 2 and got.shape == (1, shape[0]) and np.array_equal(got.T, numbers):
        return Layout(transposed=True)
    if got.shape == numbers.shape and len(shape) == 1 and np.ptp(got - numbers) == 0:
        return Layout(shift=float(got[0] - numbers[0]))
    raise _unreadable(header, key)


def _unreadable(header: Header, key: str) -> UserError:
    return UserError(
        f"{header.path} stores {key} in a form that colrow does not read", header.architecture, "the safetensors files of the model"
    )


def _processor(header: Header, config: PreTrainedConfig) -> TensorProcessor:
    if header.architecture not in GGUF_CONFIG_MAPPING:
        raise UserError(
            f"colrow cannot read GGUF files of this architecture: {header.path}", header.architecture, "the model's safetensors files"
        )
    return TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())


def _names(header: Header, config: PreTrainedConfig, processor: TensorProcessor) -> dict[str, str]:
    """{stored name: the model's name}; a tensor that is no parameter of the model keeps its own name."""
    known = next((arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture), None)
    if known is None:
        raise _unreadable(header, "its tensors")
    blocks = 1 + max((int(key.split(".")[1]) for key in header.tensors if key.startswith("blk.")), default=0)
    table = gguf.get_tensor_name_map(known, blocks)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {key: key for key in header.tensors}
    for name in model.state_dict():
        short = name.removeprefix(f"{model.base_model_prefix}.")
        for candidate in (processor.preprocess_name(name), short):
            stem, _, suffix = candidate.rpartition(".")
            key = f"{table.get_name(stem)}.{suffix}"
            if names.get(key) == key:
                names[key] = name
                break
    return names


def _covering(ranges: Sequence[Range], block: int) -> tuple[Range, ...]:
    """Ranges of block numbers that cover ascending ranges of values."""
    out: list[Range] = []
    for start, stop in ranges:
        first, last = start // block, -(-stop // block)
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        else:
            out.append((first, last))
    return tuple(out)
