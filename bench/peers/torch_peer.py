"""transformers alone, its tensor parallelism over gloo, and DeepSpeed's AutoTP over its own shared memory, which all run modules of torch.

    python torch_peer.py MODEL TOKENS DTYPE alone [THREADS]
    torchrun --nproc-per-node 2 torch_peer.py MODEL TOKENS DTYPE tp_plan|deepspeed

For bench/decode.py: DeepSpeed in its own environment, the others in colrow's.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from typing import Any

import torch
from timing import LONG, PROMPT, answer, prompt, seconds
from transformers import AutoModelForCausalLM, __version__


def alone(folder: str, dtype: torch.dtype, threads: int) -> tuple[Any, str]:
    torch.set_num_threads(threads)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), f"transformers {__version__}"


def tp_plan(folder: str, dtype: torch.dtype) -> tuple[Any, str]:
    torch.distributed.init_process_group("gloo")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, tp_plan="auto"), f"transformers {__version__}"


def by_deepspeed(folder: str, dtype: torch.dtype) -> tuple[Any, str]:
    import deepspeed

    os.environ.setdefault("LOCAL_SIZE", os.environ["WORLD_SIZE"])
    deepspeed.init_distributed("gloo")
    ranks = int(os.environ["WORLD_SIZE"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    engine = deepspeed.init_inference(model, dtype=dtype, tensor_parallel={"tp_size": ranks}, replace_with_kernel_inject=False)
    shared = hasattr(torch.ops, "deepspeed") and hasattr(torch.ops.deepspeed, "inference_all_reduce_")
    return engine.module, f"DeepSpeed {deepspeed.__version__}, {'its shared-memory op' if shared else 'gloo'}, transformers {__version__}"


@torch.inference_mode()
def measure(model: Any, tokens: int, how: str) -> None:
    """Greedy decoding with the model's own cache."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    out, times = model(torch.tensor([prompt(PROMPT)]), use_cache=True), []
    for _ in range(tokens + 2):
        times.append(time.perf_counter())
        out = model(out.logits[:, -1:].argmax(-1), use_cache=True, **{name: out[name]})
    ids = torch.tensor([prompt(LONG)])
    long = seconds(lambda: model(ids, use_cache=True, logits_to_keep=1))
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        answer(times[1:], long, how)


def main(folder: str, tokens: int, dtype: torch.dtype, way: str, threads: int) -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["RANK"])]})
    model, how = {"alone": lambda: alone(folder, dtype, threads), "tp_plan": lambda: tp_plan(folder, dtype)}.get(
        way, lambda: by_deepspeed(folder, dtype)
    )()
    measure(model.eval(), tokens, how)


main(sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3]), sys.argv[4], int((sys.argv[5:] or ["1"])[0]))
