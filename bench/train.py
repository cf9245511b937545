"""Training steps of a Llama of 110M parameters: the whole model in one process, torch's DTensor tensor parallelism, colrow, in one run.

    python bench/train.py                                   # float32 and bfloat16, 2 ranks: about 25 minutes
    python bench/train.py --small --rounds 1                # a check that everything runs
    python bench/train.py --results F.jsonl --next          # only the next turn, under a minute; --report F.jsonl prints what is there

Every system trains the same transformers model (hidden 768, 12 layers, 12 heads, vocabulary 32000, 4 x 512 tokens) with torch's AdamW on
the same tokens, in processes of its own: the whole model in one process with all threads, the others on `--ranks` processes with their
share. The loss is transformers' own code, which colrow runs on slices of the logits; "dtensor loss" is torch's `loss_parallel`, which does
the same for DTensor. Systems take turns, round after round, so that a noisy machine hits all alike; the median step is reported, and the
peak of resident memory less what the process held after its imports. Ratios within 15 % are ties on a shared machine. With `--results` each
turn is written down when it is over, and a run that was stopped goes on. The first losses must agree, or the run fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from colrow.comm.group import Group
from colrow.comm.launch import spawn
from colrow.parallel.build import parallelize
from colrow.planning.derive import derive
from colrow.train.step import backward

COLROW = {"colrow": "off", "colrow sp": "again", "colrow sp keep": "keep"}
SYSTEMS = ("whole", "dtensor", "dtensor loss", "dtensor sp", *COLROW)
WARM = 1  # steps that are not counted


@dataclass(frozen=True)
class Turn:
    """What one system does in one round."""

    system: str
    dtype: str
    round: int
    small: bool
    steps: int
    ranks: int


@dataclass(frozen=True)
class Seen:
    """Of one rank."""

    seconds: tuple[float, ...]
    peak: int  # bytes, net of imports
    loss: float  # of the first step
    kind: str  # how ranks talk


def config(small: bool) -> LlamaConfig:
    sizes = (64, 160, 2, 4, 101) if small else (768, 2048, 12, 12, 32000)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaConfig(**dict(zip(names, sizes, strict=True)), **tokens, max_position_embeddings=512)


def one_turn(group: Group, turn: Turn) -> Seen:
    """Builds the system's model on this rank and trains it for some steps."""
    before = _memory("VmRSS")
    torch.manual_seed(0)
    made = config(turn.small)
    model: Any = AutoModelForCausalLM.from_config(made, dtype=getattr(torch, turn.dtype), attn_implementation="sdpa").train()
    if turn.system.startswith("dtensor"):
        _dtensor(model, group, turn.system)
    elif turn.system in COLROW:
        model = parallelize(model, derive(made, group.size), group, COLROW[turn.system])  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch, length = (2, 16) if turn.small else (4, 512)
    ids = torch.randint(3, made.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))
    seconds, losses = [], []
    for _ in range(WARM + turn.steps):
        start = time.perf_counter()
        losses.append(_step(model, turn.system, ids))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return Seen(tuple(seconds[WARM:]), max(0, _memory("VmHWM") - before), losses[0], group.transport.kind)


def _step(model: Any, system: str, ids: torch.Tensor) -> float:
    if system in COLROW:
        return backward(model, [{"input_ids": ids, "labels": ids}])
    with _loss_parallel() if system == "dtensor loss" else contextlib.nullcontext():
        positions = torch.arange(ids.shape[1])[None]  # the model would number the rank's slice of the sequence
        loss = model(ids, labels=ids, position_ids=positions, use_cache=False).loss
        loss.backward()
    value = loss.detach()
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


def _loss_parallel() -> contextlib.AbstractContextManager[Any]:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def _dtensor(model: Any, group: Group, system: str) -> None:
    """torch's tensor parallelism as its documentation shows it for Llama, with sequence parallelism or the parallel loss if asked for."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

    sequence = Shard(1) if system == "dtensor sp" else Replicate()
    logits: dict[str, Any] = {"output_layouts": Shard(-1), "use_local_output": False} if system == "dtensor loss" else {}
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "lm_head": ColwiseParallel(input_layouts=sequence, **logits or {"output_layouts": Replicate()}),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel(output_layouts=sequence)
    if system == "dtensor sp":
        plan |= {f"model.layers.*.{name}": SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        plan["model.norm"] = SequenceParallel()
        whole = {"input_kwarg_layouts": {"hidden_states": sequence}, "desired_input_kwarg_layouts": {"hidden_states": Replicate()}}
        plan["model.layers.*.self_attn"] = PrepareModuleInput(**whole)
        plan["model.layers.*.mlp"] = PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(Replicate(),))
    parallelize_module(model, init_device_mesh("cpu", (group.size,)), plan)


def _memory(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes. (Not getrusage: there a child starts with its parent's peak.)"""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def turns(options: argparse.Namespace) -> Iterator[Turn]:
    for number in range(options.rounds):
        for dtype in options.dtypes.split(","):
            for system in options.systems.split(","):
                yield Turn(system, dtype, number, options.small, options.steps, 1 if system == "whole" else options.ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--results", type=Path, help="where each turn is written down; what is there is not done again")
    parser.add_argument("--next", action="store_true", help="one turn only")
    parser.add_argument("--report", action="store_true", help="nothing is run")
    options = parser.parse_args()
    found: dict[Turn, list[Seen]] = {}
    if options.results is not None and options.results.exists():
        for line in options.results.read_text(encoding="utf-8").splitlines():
            turn, ranks = json.loads(line)
            found[Turn(**turn)] = [Seen(**{**seen, "seconds": tuple(seen["seconds"])}) for seen in ranks]
    missing = [] if options.report else [turn for turn in turns(options) if turn not in found]
    for turn in missing[:1] if options.next else missing:
        found[turn] = spawn(one_turn, turn.ranks, (turn,), "gloo" if turn.system.startswith("dtensor") else "auto")
        if options.results is not None:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps([asdict(turn), [asdict(seen) for seen in found[turn]]]) + "\n")
        if options.next:
            print(f"{turn.system}, {turn.dtype}, round {turn.round}: {', '.join(f'{s:.2f} s' for s in found[turn][0].seconds)}")
    if not options.next:
        for dtype in dict.fromkeys(turn.dtype for turn in found):
            report(dtype, {turn: seen for turn, seen in found.items() if turn.dtype == dtype})


def report(dtype: str, found: dict[Turn, list[Seen]]) -> None:
    """Of each system the median step, its ratio to the whole model's, the spread, memory."""
    by: dict[str, list[Seen]] = {}
    for turn, seen in found.items():
        by.setdefault(turn.system, []).extend(seen)
    steps = {system: [s for one in seen for s in one.seconds] for system, seen in by.items()}
    middle = {system: statistics.median(seconds) for system, seconds in steps.items()}
    first = next(iter(middle))
    print(f"\n{dtype}\n{'system':16} {'step, median':>14} {'of ' + first:>10} {'least .. most':>18} {'peak memory/rank':>18}  over")
    for system, seen in by.items():
        spread = f"{min(steps[system]):.2f} .. {max(steps[system]):.2f}"
        peak = f"{max(one.peak for one in seen) / 2**20:.0f} MiB"
        print(f"{system:16} {middle[system]:12.2f} s {middle[system] / middle[first]:>10.2f} {spread:>18} {peak:>18}  {seen[0].kind}")
    losses = {system: seen[0].loss for system, seen in by.items()}
    usual = statistics.median(losses.values())
    if any(abs(loss - usual) > (1e-3 if dtype == "float32" else 5e-2) for loss in losses.values()):
        raise SystemExit(f"the first losses differ: {losses}")


if __name__ == "__main__":
    main()
