"""Writes a model of a known shape with random weights, shard by shard: never more than one tensor of it is in memory.

    python bench/random_model.py llama-2-7b FOLDER [--dtype bfloat16] [--shard-gb 1]

The shapes are those of `colrow plan` (colrow/planning/shapes.py), or a config.json. Weights are N(0, 0.02), norms are ones. A tokenizer
comes with it, so that every command works, in which each token of the model has a text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import struct
import time
from collections.abc import Iterator
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from colrow.planning import shapes

NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
PIECE = 1 << 24  # elements that are drawn at once


def write(config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.bfloat16, shard: float = 1e9, seed: int = 0) -> int:
    """A Hugging Face directory of at most `shard` bytes a file (a larger tensor has a file of its own); returns the weights' bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config.dtype = dtype
    config.save_pretrained(folder)
    tokenizer(config.get_text_config().vocab_size).save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    draw = torch.Generator().manual_seed(seed)
    parts = list(_parts(sizes, dtype.itemsize, shard))
    files = {}
    for number, names in enumerate(parts, 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        _write(folder / file, {name: sizes[name] for name in names}, dtype, draw)
        files |= dict.fromkeys(names, file)
    total = sum(prod(size) for size in sizes.values()) * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def _parts(sizes: dict[str, tuple[int, ...]], itemsize: int, shard: float) -> Iterator[list[str]]:
    total, number, at = 0.0, 0, {}
    for name, size in sizes.items():
        if total and total + prod(size) * itemsize > shard:
            total, number = 0.0, number + 1
        total += prod(size) * itemsize
        at[name] = number
    for _, names in groupby(at, at.__getitem__):
        yield list(names)


def _write(file: Path, sizes: dict[str, tuple[int, ...]], dtype: torch.dtype, draw: torch.Generator) -> None:
    """One safetensors file: the length of the header, the header, then the tensors one after the other."""
    header, start = {}, 0
    for name, size in sizes.items():
        stop = start + prod(size) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(size), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for size in sizes.values():
            count = prod(size)
            for begin in range(0, count, PIECE):
                n = min(PIECE, count - begin)
                values = torch.ones(n, dtype=dtype) if len(size) == 1 else torch.empty(n, dtype=dtype).normal_(0, 0.02, generator=draw)
                out.write(values.view(torch.uint8).numpy().data)


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    """One token a byte, then pairs and threes of letters, until there are `size` tokens: any text can be written, any token read."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [letter for letter in letters if letter.isascii()]
    pairs = itertools.product(printable, printable)
    threes = (("".join(pair), letter) for pair in itertools.product(printable, printable) for letter in printable)
    merges = list(itertools.islice(itertools.chain(pairs, threes), max(size - len(letters), 0)))
    vocab = {name: at for at, name in enumerate([*letters, *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def config_of(shape: str) -> PreTrainedConfig:
    return shapes.config(shape) if shapes.known(shape) else AutoConfig.from_pretrained(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="a name that colrow plan knows, or a directory with a config.json")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shard-gb", type=float, default=1.0)
    options = parser.parse_args()
    start = time.perf_counter()
    size = write(config_of(options.shape), options.folder, getattr(torch, options.dtype), options.shard_gb * 1e9)
    print(f"{options.folder}: {size / 1e9:.2f} GB of weights in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
