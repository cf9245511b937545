"""How much memory and time loading takes: the rank's shard and one tensor, whatever the model's size.

    python bench/load_memory.py [--mb 400] [--tp 4] [--stored float32] [--dtype float32]

Writes a random Llama of that size, then loads each rank's part in a process of its own, one after the other, and prints for each the bytes
it holds, the bytes it read, and its peak memory over what the imports and the empty model cost. Every matrix is cut: this measures loading,
not a plan. What the engine makes of bfloat16 weights when they are there (12 bits each, parallel/compact.py) is not in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from colrow.checkpoint import model_dir
from colrow.parallel import load
from colrow.partition import even, whole
from colrow.planning.plan import Plan, TensorPlan


def config(megabytes: int, itemsize: int) -> LlamaConfig:
    """A Llama of about that size: 12 layers, width found by search."""
    for width in range(256, 16384, 128):
        heads, inner = width // 64, width * 11 // 4
        elements = 12 * (4 * width * width + 3 * width * inner) + 2 * 8000 * width
        if elements * itemsize >= megabytes * 1e6:
            break
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": inner}
    return LlamaConfig(vocab_size=8000, num_hidden_layers=12, pad_token_id=0, **sizes)


def plan(model: nn.Module, ranks: int) -> Plan:
    """Matrices cut along their rows and columns in turn."""
    tensors = {}
    for number, (name, p) in enumerate(model.named_parameters()):
        partition = even(number % 2, p.shape[number % 2], ranks) if p.dim() == 2 else whole(ranks)
        tensors[name] = TensorPlan(name, tuple(p.shape), partition, "split", "to be measured")
    return Plan("llama", type(model).__name__, ranks, tensors)


def memory(field: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS now, VmHWM at its highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def one_rank(folder: str, ranks: int, rank: int, dtype: torch.dtype) -> dict[str, float]:
    """Load one rank's part in this process and say what it took."""
    found = model_dir.find(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(found.config(), dtype=dtype)
    cuts = plan(model, ranks)
    for entry in cuts.tensors.values():
        parent, _, leaf = entry.name.rpartition(".")
        local = torch.empty(entry.partition.local_shape(entry.shape, rank), dtype=dtype, device="meta")
        setattr(model.get_submodule(parent), leaf, nn.Parameter(local))
    model.colrow = SimpleNamespace(plan=cuts, group=SimpleNamespace(rank=rank))
    source = found.source()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    before, start = memory("VmRSS"), time.perf_counter()
    load.from_source(model, source, dtype)
    seconds, peak = time.perf_counter() - start, memory("VmHWM") - before
    held = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    return {"held": held, "largest": largest, "read": source.bytes_read, "peak": peak, "seconds": seconds}


def measure(
    megabytes: int, ranks: int, stored: torch.dtype, dtype: torch.dtype, only: int | None = None
) -> tuple[int, list[dict[str, float]]]:
    """Bytes of the model's files, and what each rank took, or the one rank `only`."""
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config(megabytes, stored.itemsize), dtype=stored).save_pretrained(folder, max_shard_size="100MB")
        size = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
        results = []
        for rank in range(ranks) if only is None else (only,):
            arguments = ["--folder", folder, "--tp", str(ranks), "--rank", str(rank), "--dtype", str(dtype).removeprefix("torch.")]
            run = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(run.stdout.splitlines()[-1]))
        return size, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=int, default=400, help="size of the model in megabytes (default 400)")
    parser.add_argument("--tp", type=int, default=4, help="number of ranks (default 4)")
    parser.add_argument("--stored", default="float32", help="dtype in the files (default float32)")
    parser.add_argument("--dtype", default="float32", help="dtype in memory (default float32)")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # one rank's own process
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    stored, dtype = getattr(torch, options.stored), getattr(torch, options.dtype)
    if options.folder:
        print(json.dumps(one_rank(options.folder, options.tp, options.rank, dtype)))
        return
    size, results = measure(options.mb, options.tp, stored, dtype)
    print(f"model of {size / 1e6:.0f} MB in {options.stored}, tp={options.tp}, in memory {options.dtype}")
    for rank, r in enumerate(results):
        print(
            f"rank {rank}: holds {r['held'] / 1e6:.1f} MB, read {r['read'] / 1e6:.1f} MB, peak {r['peak'] / 1e6:.1f} MB"
            f" ({r['peak'] / size:.2f} of the model), largest tensor {r['largest'] / 1e6:.1f} MB, {r['seconds']:.2f} s"
        )


if __name__ == "__main__":
    main()
