"""Activation memory of a training step: predicted from a run on meta tensors, measured in real processes, and by Korthikanti's formulas.

    python bench/activations.py                      # a Llama of 8 layers at tp=1, 2 and 4: about a minute
    python bench/activations.py --tp 2 --layers 2    # quicker

Predicted: parallel/saved.py, without weights and other ranks. Measured: what torch's own allocator of the CPU gave out and did not get back
during the forward pass (the profiler's count), with the loss as the only thing held. The formulas (arXiv:2205.05198, section 4) are about
another block, GPT's with dropout in 16 bits; they stand beside as a scale, for as many bytes an element. Recomputation keeps the inputs of
layers. Fails where prediction and measurement differ by more than 10 %.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from colrow.comm.group import Group
from colrow.comm.launch import spawn
from colrow.parallel.build import parallelize
from colrow.parallel.head import sharded_logits
from colrow.parallel.recompute import recompute_layers
from colrow.parallel.saved import saved_bytes
from colrow.planning.derive import derive
from colrow.planning.memory import activations_of_layer

PASSES = 3  # of which torch's profiler, one time in ten, misses the memory that came last: the most counts
ALLOWED = 0.10


@dataclass(frozen=True)
class Way:
    name: str
    sequence: str = "off"
    recompute: bool = False


WAYS = (Way("tp"), Way("tp + sp", "again"), Way("tp + sp, kept", "keep"), Way("tp, recomputed", recompute=True))
WAYS += (Way("tp + sp, recomputed", "again", True),)


@dataclass(frozen=True)
class Case:
    way: Way
    layers: int = 8
    hidden: int = 256
    heads: int = 8
    batch: int = 2
    seq: int = 128

    def config(self) -> LlamaConfig:
        sizes: dict[str, Any] = {"num_hidden_layers": self.layers, "hidden_size": self.hidden, "num_attention_heads": self.heads}
        tokens = {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return LlamaConfig(**sizes, **tokens, intermediate_size=4 * self.hidden, max_position_embeddings=self.seq)

    def formula(self, ranks: int) -> float:
        """Korthikanti's, for float32 instead of 16 bits."""
        how = "full" if self.way.recompute else "none"
        at = (self.seq, self.batch, self.hidden, self.heads, ranks, self.way.sequence != "off", how)
        return 2 * self.layers * activations_of_layer(*at)  # type: ignore[arg-type]


def measured(group: Group, case: Case) -> int:
    """Bytes that a forward pass leaves on this rank, eager attention, float32."""
    config = case.config()
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").train()
    if group.size > 1:
        parallelize(model, derive(config, group.size), group, case.way.sequence)  # type: ignore[arg-type]
    if case.way.recompute:
        if group.size > 1:
            recompute_layers(model)
        else:
            model.activation_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, config.vocab_size, (case.batch, case.seq))
    nets = []
    for _ in range(PASSES + 1):  # the first pass makes what is made once
        gc.collect()  # what an earlier pass left would be freed in this one, and counted
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            if group.size > 1:
                with sharded_logits(model):
                    loss = model(ids, labels=ids, use_cache=False).loss
            else:
                loss = model(ids, labels=ids, use_cache=False).loss
        nets.append(sum(event.self_cpu_memory_usage for event in seen.key_averages()))
        loss.backward()
        model.zero_grad()
        del loss
    return max(nets[1:])


def predicted(case: Case, ranks: int) -> list[int]:
    config, way = case.config(), case.way
    plan = derive(config, ranks)
    at = (case.batch, case.seq, torch.float32, "eager", way.sequence, way.recompute)
    return [saved_bytes(config, plan, rank, *at) for rank in range(ranks)]  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tp", default="1,2,4")
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    print(f"{'way':22} {'tp':>3} {'predicted':>12} {'measured':>12} {'difference':>11} {'formula for GPT':>16}")
    wrong = []
    for ranks in map(int, options.tp.split(",")):
        for way in WAYS if ranks > 1 else (Way("whole"), Way("whole, recomputed", recompute=True)):
            case = Case(way, options.layers)
            expected, found = max(predicted(case, ranks)), max(spawn(measured, ranks, (case,)))
            apart = abs(found - expected) / found
            wrong += [way.name] if apart > ALLOWED else []
            mib = [f"{x / 2**20:.2f} MiB" for x in (expected, found, case.formula(ranks))]
            print(f"{way.name:22} {ranks:3} {mib[0]:>12} {mib[1]:>12} {apart:>10.1%} {mib[2]:>16}", flush=True)
    if wrong:
        raise SystemExit(f"predicted and measured differ by more than {ALLOWED:.0%}: {wrong}")


if __name__ == "__main__":
    main()
