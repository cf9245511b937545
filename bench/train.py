"""Training steps of a Llama of 110M parameters: the whole model in one process, torch's DTensor tensor parallelism, colrow, in one run.

    python bench/train.py                        # float32 and bfloat16, 2 ranks
    python bench/train.py --small --rounds 1     # a check that everything runs

Every system trains the same transformers model with the same loss and torch's AdamW on the same tokens, in processes of its own: the whole
model in one process with all threads, the others on `--ranks` processes with their share. Systems take turns, round after round, so that
a noisy machine hits all alike; the median step is reported, and the peak of resident memory less what the process held after its imports.
Ratios within 15 % are ties on a shared machine. The first losses must agree, or the run fails.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from colrow.comm.group import Group
from colrow.comm.launch import spawn
from colrow.parallel.build import parallelize
from colrow.planning.derive import derive
from colrow.train.step import backward

SYSTEMS = ("whole", "dtensor", "colrow", "colrow sp", "colrow sp keep")
WARM = 1  # steps that are not counted


@dataclass(frozen=True)
class Task:
    """What one system does in one round."""

    system: str
    dtype: torch.dtype
    small: bool
    steps: int


@dataclass(frozen=True)
class Seen:
    seconds: tuple[float, ...]
    peak: int  # bytes, net of imports
    loss: float  # of the first step
    kind: str  # how ranks talk


def config(small: bool) -> LlamaConfig:
    sizes = (64, 160, 2, 4, 101) if small else (768, 2048, 12, 12, 32000)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaConfig(**dict(zip(names, sizes, strict=True)), **tokens, max_position_embeddings=512)


def one_round(group: Group, task: Task) -> Seen:
    """Builds the system's model on this rank and trains it for some steps."""
    before = _resident()
    torch.manual_seed(0)
    made = config(task.small)
    model: Any = AutoModelForCausalLM.from_config(made, dtype=task.dtype, attn_implementation="sdpa").train()
    if task.system == "dtensor":
        _dtensor(model, group)
    elif task.system.startswith("colrow"):
        mode = {"colrow": "off", "colrow sp": "again", "colrow sp keep": "keep"}[task.system]
        model = parallelize(model, derive(made, group.size), group, mode)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch, length = (2, 16) if task.small else (4, 512)
    ids = torch.randint(3, made.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))
    seconds, losses = [], []
    for _ in range(WARM + task.steps):
        start = time.perf_counter()
        if task.system.startswith("colrow"):
            losses.append(backward(model, [{"input_ids": ids, "labels": ids}]))
        else:
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Seen(tuple(seconds[WARM:]), max(0, peak - before), losses[0], group.transport.kind)


def _dtensor(model: Any, group: Group) -> None:
    """torch's tensor parallelism as its documentation shows it for Llama."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (group.size,)), plan)


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    options = parser.parse_args()
    for dtype in options.dtypes.split(","):
        found: dict[str, list[Seen]] = {}
        for _ in range(options.rounds):
            for system in options.systems.split(","):
                task = Task(system, getattr(torch, dtype), options.small, options.steps)
                ranks = 1 if system == "whole" else options.ranks
                found.setdefault(system, []).extend(spawn(one_round, ranks, (task,), "gloo" if system == "dtensor" else "auto"))
        report(dtype, found)


def report(dtype: str, found: dict[str, list[Seen]]) -> None:
    losses = {system: seen[0].loss for system, seen in found.items()}
    middle = statistics.median(losses.values())
    wrong = {s: loss for s, loss in losses.items() if abs(loss - middle) > (1e-3 if dtype == "float32" else 5e-2)}
    print(f"\n{dtype}\n{'system':16} {'step, median':>14} {'least .. most':>18} {'peak memory/rank':>18}  over")
    for system, seen in found.items():
        steps = [s for one in seen for s in one.seconds]
        spread = f"{min(steps):.2f} .. {max(steps):.2f}"
        peak = f"{max(one.peak for one in seen) / 2**20:.0f} MiB"
        print(f"{system:16} {statistics.median(steps):12.2f} s {spread:>18} {peak:>18}  {seen[0].kind}")
    if wrong:
        raise SystemExit(f"the first losses differ: {losses}")


if __name__ == "__main__":
    main()
